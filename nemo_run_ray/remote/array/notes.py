"""What a host notes of the elements that have ended, for the next host on its node."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import Any, List

from ..node import command
from ..node.rundir import run_dirs


class Notes:
    """The notes of one host, in a file beside its run directory.

    Args:
        run_dir: name of the run directory, which must be there.
    """

    def __init__(self, run_dir: str) -> None:
        self._fd = os.open(_path(run_dir), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._is_torn = False  # the last line may have no end

    def add(self, row: List[Any]) -> None:
        """Note how an element has ended, before it is reported."""
        data = ("\n" if self._is_torn else "").encode() + json.dumps(row).encode() + b"\n"
        self._is_torn = True
        with suppress(OSError):  # a full disk: it is reported all the same
            self._is_torn = os.write(self._fd, data) != len(data)


def read(run_dir: str) -> List[List[Any]]:
    """What a host has noted that writes no more."""
    rows: List[List[Any]] = []
    with suppress(FileNotFoundError), open(_path(run_dir), encoding="utf-8") as file:
        for line in file:
            with suppress(ValueError):  # a full disk, or the host's death, has torn it
                rows.append(json.loads(line))
    return rows


def forget(run_dir: str) -> None:
    """Remove the notes of a host: the driver has written down what they say."""
    with suppress(FileNotFoundError):
        os.remove(_path(run_dir))
    with suppress(OSError):  # other jobs are in it
        os.rmdir(run_dirs(command.tmpdir()))


def _path(run_dir: str) -> str:
    return os.path.join(run_dirs(command.tmpdir()), f"{run_dir}.ended")
