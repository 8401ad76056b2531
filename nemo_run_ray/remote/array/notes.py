"""What a host notes of the elements that have ended, for the next host on its node."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import Any, List

from ..node import command
from ..node.rundir import RunDir, run_dirs
from ..node.tree import sweep


class Notes:
    """The notes of one host, in a file beside its run directory.

    Args:
        run_dir: name of the run directory, which must be there.
    """

    def __init__(self, run_dir: str) -> None:
        self._file = open(_path(run_dir), "a", buffering=1)  # noqa: SIM115 as long as the host

    def add(self, row: List[Any]) -> None:
        """Note how an element has ended, before it is reported."""
        with suppress(OSError):  # a full disk: it is reported all the same
            self._file.write(json.dumps(row) + "\n")


def end_and_read(tag: str, run_dir: str) -> List[List[Any]]:
    """End what a dead host has left on this node; what it has noted."""
    sweep(tag)
    rows: List[List[Any]] = []
    with suppress(FileNotFoundError), open(_path(run_dir), encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if line.endswith("\n")]
    RunDir(run_dir, base=run_dirs(command.tmpdir())).remove()
    return rows


def forget(run_dir: str) -> None:
    """Remove the notes of a host: the driver has written down what they say."""
    with suppress(FileNotFoundError):
        os.remove(_path(run_dir))
    with suppress(OSError):  # other jobs are in it
        os.rmdir(run_dirs(command.tmpdir()))


def _path(run_dir: str) -> str:
    return os.path.join(run_dirs(command.tmpdir()), f"{run_dir}.ended")
