"""Files that readers see whole: as they were before, or as they are now."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import IO, Iterator, Union


def write_file(path: Union[str, os.PathLike[str]], content: Union[str, bytes]) -> None:
    """Replace a file's content at once. Text becomes UTF-8.

    Raises:
        OSError: it cannot be written; the file is what it was.
    """
    with replacing(path) as file:
        file.write(content if isinstance(content, bytes) else content.encode())


@contextlib.contextmanager
def replacing(path: Union[str, os.PathLike[str]]) -> Iterator[IO[bytes]]:
    """A file to write to that takes the path's place at the end, and only if all went well."""
    temporary = f"{os.fspath(path)}.{os.getpid()}-{threading.get_ident()}"
    try:
        with open(temporary, "wb") as file:
            yield file
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
