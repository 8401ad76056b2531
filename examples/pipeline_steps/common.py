"""What the steps share. They say in one line what is wrong, and write whole files or none."""

import os
import sys
import uuid
from pathlib import Path

try:
    import numpy
    import sklearn  # noqa: F401
except ModuleNotFoundError as error:
    print(f"{sys.executable} on {os.uname().nodename} lacks {error.name}; install scikit-learn")
    sys.exit(2)  # no further attempt would find it, see permanent_exit_codes in pipeline.py


def write(path: Path, content: bytes) -> None:
    """Write a file so that nobody ever sees half of it.

    A step that is killed leaves nothing that the next one would take for its result, and one that
    runs again replaces what it wrote before.
    """
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(content)
        unfinished.replace(path)
    except OSError as error:
        sys.exit(f"{path} cannot be written on {os.uname().nodename}: {error.strerror}")


def read(path: Path) -> tuple["numpy.ndarray", "numpy.ndarray"]:
    """The images and digits of one part."""
    with numpy.load(path) as part:
        return part["images"], part["digits"]
