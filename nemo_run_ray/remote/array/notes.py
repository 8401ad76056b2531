"""What a host notes of the elements that begin and end, for the next host on its node."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import Any, List, Optional

from ..node import command
from ..node.rundir import run_dirs
from ..trust import open_own


class Notes:
    """The notes of one host, in two files beside its run directory.

    Args:
        run_dir: name of the run directory, which must be there.
    """

    def __init__(self, run_dir: str) -> None:
        folder = run_dirs(command.tmpdir())
        self._path_of_begun = _begun(folder, run_dir)
        self._begun_fd, self._ended_fd = _open(self._path_of_begun), _open(_ended(folder, run_dir))
        self._is_torn = False  # the last line of the ends may have no end

    def begins(self, element: int, attempt: int) -> None:
        """Note that an element is about to begin.

        Where that cannot be noted, the file goes: a full disk lets one be removed. Then all that
        the host has counts as begun.
        """
        data = f"[{element}, {attempt}]\n".encode()
        with suppress(OSError):
            if os.write(self._begun_fd, data) == len(data):
                return
        with suppress(FileNotFoundError):
            os.remove(self._path_of_begun)

    def ended(self, row: List[Any]) -> None:
        """Note how an element has ended, before it is reported."""
        data = ("\n" if self._is_torn else "").encode() + json.dumps(row).encode() + b"\n"
        self._is_torn = True
        with suppress(OSError):  # a full disk: it is reported all the same
            self._is_torn = os.write(self._ended_fd, data) != len(data)


def read_ended(run_dir: str) -> List[List[Any]]:
    """The ends that a host has noted that writes no more."""
    try:
        return _rows(_ended(folder_of(run_dir), run_dir))
    except FileNotFoundError:
        return []


def read_begun(run_dir: str) -> Optional[List[List[int]]]:
    """The elements that a host has begun that writes no more, with their attempts.

    Returns:
        ``None`` when nothing says which ones it has begun.
    """
    try:
        return _rows(_begun(folder_of(run_dir), run_dir))
    except FileNotFoundError:
        return None


def forget(run_dir: str) -> None:
    """Remove the notes of a host: the driver has written down what they say."""
    folder = folder_of(run_dir)
    for path in (_begun(folder, run_dir), _ended(folder, run_dir)):
        with suppress(FileNotFoundError):
            os.remove(path)
    with suppress(OSError):  # other jobs are in it
        os.rmdir(folder)


def folder_of(run_dir: str) -> str:
    """The folder in which a host of this node has its run directory and its notes.

    That need not be the one of this process: Python passes over a full folder of temporary files.
    """
    given = [os.environ[name] for name in ("TMPDIR", "TEMP", "TMP") if name in os.environ]
    others = ("/tmp", "/var/tmp", "/usr/tmp")
    places = [run_dirs(place) for place in (command.tmpdir(), *given, *others)]
    found = [place for place in places if os.path.exists(_ended(place, run_dir))]
    return found[0] if found else places[0]


def _rows(path: str) -> List[List[Any]]:
    rows: List[List[Any]] = []
    with open(path, encoding="utf-8") as file:
        for line in file:
            with suppress(ValueError):  # a full disk, or the host's death, has torn it
                rows.append(json.loads(line))
    return rows


def _open(path: str) -> int:
    return open_own(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def _begun(folder: str, run_dir: str) -> str:
    return os.path.join(folder, f"{run_dir}.begun")


def _ended(folder: str, run_dir: str) -> str:
    return os.path.join(folder, f"{run_dir}.ended")
