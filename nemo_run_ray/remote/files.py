"""Files that readers see whole: as they were before, or as they are now."""

from __future__ import annotations

import contextlib
import os
from typing import IO, Iterator, Union

#: In jobs on an allocation of Slurm: the folder of this run of Slurm's job, and that of the
#: allocation where a client has asked for it by a name.
RUN, LIFE = "NEMO_RUN_RAY_RUN", "NEMO_RUN_RAY_LIFE"
#: In the same jobs: when the allocation ends, in seconds since the epoch by the head's clock; how
#: many seconds it lasts from Ray's start; and ``1`` where another one goes on with jobs.
ENDS_AT, LASTS_S, RENEWS = "NEMO_RUN_RAY_ENDS_AT", "NEMO_RUN_RAY_LASTS_S", "NEMO_RUN_RAY_RENEWS"


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
    # Where others may write, a name that can be guessed may be a link of theirs.
    temporary = f"{os.fspath(path)}.{os.urandom(8).hex()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(temporary, flags, 0o666), "wb") as file:
            yield file
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError) and error.errno and error.filename in (None, temporary):
            error.filename = os.fspath(path)  # a write that fails names no file
        raise
