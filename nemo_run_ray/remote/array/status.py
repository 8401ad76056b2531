"""The state of an array for clients: files beside the job's log, which Ray's log API serves.

Nothing that the array does is decided by it.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from itertools import islice
from typing import IO, Iterator, Optional

from ..attempts import STATES_FILE, file_of
from ..files import write_file
from ..node.output import say
from ..rows import ArrayRows, status_file_name
from ..trust import open_own
from .elements import ArrayProgress, ElementState, Stretch

#: Seconds between two states of the file.
_WRITE_S = 1.0
#: Seconds between two lines about the progress in the log.
_TELL_S = 30.0
#: Seconds over which the rate is measured.
_RATE_S = 30.0
#: Stretches that are written at once; seconds from the end of one file of states to the next one.
_PIECE, _AGAIN_S = 500, 1.0


class StatusFile:
    """The two files; absent when the output goes to no file of Ray's.

    Args:
        folder: of Ray's logs; ``None`` when it is not known.
        submission_id: of the job.
    """

    def __init__(self, folder: Optional[str], submission_id: str) -> None:
        self._path = os.path.join(folder, status_file_name(submission_id)) if folder else None
        states = os.path.join(folder, file_of(submission_id, STATES_FILE)) if folder else None
        self._states = _StatesFile(states)
        self._write_at = 0.0
        self._tell_at = time.monotonic() + _TELL_S
        self._seen = [(time.monotonic(), 0)]

    def write(self, progress: ArrayProgress, running: int, is_over: bool = False) -> None:
        """Show where the array is, at most once a second before its end.

        Args:
            progress: of the elements.
            running: how many slots are busy.
            is_over: the driver ends.
        """
        now = time.monotonic()
        if now >= self._write_at or is_over:
            self._write_at = now + _WRITE_S
            rows = self._rows(progress, running, now)
            if now >= self._tell_at and not is_over:
                self._tell_at = now + _TELL_S
                say(_in_words(rows))
            if self._path is not None:
                phase = "over" if is_over else "running"
                with suppress(OSError):  # a full disk: the array goes on, and is not shown
                    write_file(self._path, json.dumps({"phase": phase, **rows}))
        if is_over:
            self._states.finish(progress)
        else:
            self._states.go_on(progress)

    def _rows(self, progress: ArrayProgress, running: int, now: float) -> ArrayRows:
        ended = progress.ended_count
        self._seen = [row for row in self._seen if now - row[0] <= _RATE_S] or self._seen[-1:]
        self._seen.append((now, ended))
        first_at, first = self._seen[0]
        rate = (ended - first) / (now - first_at) if now > first_at else 0.0
        left = progress.count - ended
        return {
            "elements": progress.count,
            "succeeded": progress.number(ElementState.SUCCEEDED),
            "failed": progress.number(ElementState.FAILED),
            "cancelled": progress.number(ElementState.CANCELLED),
            "running": running,
            "waiting": left - running,
            "elements_per_s": round(rate, 3),
            "left_s": round(left / rate, 1) if rate > 0 else None,
            "failures": [list(failure) for failure in progress.failures],
        }


def _in_words(rows: ArrayRows) -> str:
    """The progress, for those who follow the log."""
    over = rows["succeeded"] + rows["failed"] + rows["cancelled"]
    words = f"{over} of {rows['elements']} elements are over, {rows['failed']} failed"
    if rows["left_s"] is None:
        return words
    return f"{words}; {rows['elements_per_s']:.3g} elements/s, about {rows['left_s']:.0f} s left"


class _StatesFile:
    """The states of all elements: a line of JSON for those in a row about which the same is known.

    An array may have a million, so each turn of the driver's loop writes a piece.

    Args:
        path: of the file; ``None`` when there is no place for it.
    """

    def __init__(self, path: Optional[str]) -> None:
        self._path = path
        self._file: Optional[IO[str]] = None
        self._stretches: Iterator[Stretch] = iter(())
        self._begin_at = 0.0

    def go_on(self, progress: ArrayProgress) -> None:
        """Write the next piece. A full disk leaves the last file as it is."""
        if self._path is None or (self._file is None and time.monotonic() < self._begin_at):
            return
        with suppress(OSError):
            self._write(self._path, progress)
            return
        self._give_up()

    def finish(self, progress: ArrayProgress) -> None:
        """Write all, as it is at the end."""
        self._give_up()
        self._begin_at = 0.0
        self.go_on(progress)
        while self._file is not None:
            self.go_on(progress)

    def _write(self, path: str, progress: ArrayProgress) -> None:
        if self._file is None:
            # Over many turns of the loop, so it is no context as ``files.replacing`` is.
            with suppress(FileNotFoundError):  # of a driver that died, or another user's link
                os.remove(f"{path}.part")
            fd = open_own(f"{path}.part", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            self._file = open(fd, "w", encoding="utf-8")  # noqa: SIM115
            self._stretches = progress.stretches()
        lines = [json.dumps(stretch) + "\n" for stretch in islice(self._stretches, _PIECE)]
        self._file.writelines(lines)
        if len(lines) < _PIECE:
            self._file.close()
            self._file = None
            os.replace(f"{path}.part", path)
            self._begin_at = time.monotonic() + _AGAIN_S

    def _give_up(self) -> None:
        if self._file is not None and self._path is not None:
            with suppress(OSError):
                self._file.close()
            with suppress(OSError):
                os.remove(f"{self._path}.part")
        self._file = None
        self._begin_at = time.monotonic() + _AGAIN_S
