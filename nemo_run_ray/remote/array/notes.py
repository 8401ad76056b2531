"""The notes of an element host beside its run directory, and the program that reads them.

When a host has died, another process on its node ends what it has left and prints its notes::

    {"sweep": [[number, tag, run_dir], ...]}                            on standard input
    {"swept": [[number, ended, begun], ...], "remaining": "process 7"}  on standard output

It removes the notes in ``{"forget": [run_dir, ...]}``: the driver has written down what they say.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from contextlib import suppress
from time import monotonic
from typing import Any, Dict, List, Sequence, Set, Tuple

from ..files import open_own
from ..node.rundir import RunDir, run_dirs
from ..node.supervise import ROUND_S, SUPERVISOR_TAG, TAG, is_watchdog, kill, marked

#: Seconds until it is said that a process does not end.
_TELL_S = 30.0
#: Looks in a row that must find nothing: a process can be made while another look is on.
_CLEAN_LOOKS = 2


class Notes:
    """The notes of one host, in a file beside its run directory, which must be there."""

    def __init__(self, run_dir: str):
        self._run_dir = run_dir
        path = _path_in(run_dirs(tempfile.gettempdir()), run_dir)
        self._fd = open_own(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def add(self, row: Sequence[Any]) -> None:
        """Note that an element is about to begin (index, attempt), or how it has ended."""
        data, written = b"\n" + json.dumps(row).encode(), 0
        with suppress(OSError):
            written = os.write(self._fd, data)
        if written < len(data):
            # The disk is full. Without the file, the driver counts all that the host had as begun.
            forget(self._run_dir)


def read_notes(run_dir: str) -> Tuple[List[List[Any]], List[List[int]] | None]:
    """The notes of a host that writes no more: the ends, and the attempts that have only begun.

    Without its file, any may have begun: ``None``.
    """
    rows: Dict[Tuple[int, ...], List[Any]] = {}
    try:
        with open(_path_in(_folder_of(run_dir), run_dir), encoding="utf-8") as file:
            for line in file:
                with suppress(ValueError):  # a full disk, or the host's death, has torn it
                    row = json.loads(line)
                    rows[tuple(row[:2])] = row
    except FileNotFoundError:
        return [], None
    last = list(rows.values())
    return [row for row in last if len(row) > 2], [row for row in last if len(row) == 2]


def forget(run_dir: str) -> None:
    """Remove the notes of a host."""
    with suppress(FileNotFoundError):
        os.remove(_path_in(_folder_of(run_dir), run_dir))


def _folder_of(run_dir: str) -> str:
    """The folder of a host's notes and run directory.

    ``tempfile`` would skip a folder that has become full.
    """
    given = (os.environ.get(name, "") for name in ("TMPDIR", "TEMP", "TMP"))
    places = [one for one in (*given, "/tmp", "/var/tmp", "/usr/tmp") if os.access(one, os.X_OK)]
    folders = list(map(run_dirs, places))
    return next((one for one in folders if os.path.exists(_path_in(one, run_dir))), folders[0])


def _path_in(folder: str, run_dir: str) -> str:
    return f"{folder}/{run_dir}.notes"


def main(argv: Sequence[str]) -> None:
    """Sweep, as the module's text says."""
    request = json.load(sys.stdin)
    for run_dir in request.get("forget", ()):
        forget(run_dir)
    rows, swept = request.get("sweep", ()), []
    remaining = _end_all([tag for _, tag, _ in rows])
    for number, _, run_dir in () if remaining else rows:
        swept.append([number, *read_notes(run_dir)])
        RunDir(run_dir, base=_folder_of(run_dir)).remove()
    print(json.dumps({"swept": swept, "remaining": remaining}))


def _end_all(tags: Sequence[str]) -> str:
    """End what dead hosts have left; the processes that do not end, in words.

    A host's own process is killed first: one that was only stopped could start another element
    later, or note ends that this causes. Its watchdog then kills what is below it, also what has
    lost its mark, and last comes what carries the host's tag.
    """
    until = monotonic() + _TELL_S
    clean_looks = 0
    pids: Set[int] = set()
    while tags and clean_looks < _CLEAN_LOOKS:
        pids = set()
        for tag in tags:
            found = marked(f"{SUPERVISOR_TAG}={tag}".encode())
            watchdogs = [pid for pid in found if is_watchdog(pid)]
            found = [pid for pid in found if pid not in watchdogs]
            found = found or marked(f"{TAG}={tag}".encode())
            for pid in found:
                kill(pid, signal.SIGKILL)
            for pid in watchdogs:
                kill(pid, signal.SIGCONT)
            pids |= {*watchdogs, *found}
        if pids and monotonic() >= until:
            break
        clean_looks = 0 if pids else clean_looks + 1
        time.sleep(ROUND_S)
    return ", ".join(f"process {pid}" for pid in sorted(pids))
