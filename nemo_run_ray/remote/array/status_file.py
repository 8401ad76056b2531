"""What the driver shows of an array: files beside the job's log, which Ray's log API serves.

Nothing is decided by it.
"""

from __future__ import annotations

import json
import os
import time
from typing import Collection, Optional, Set

from ..attempts import first_id
from ..files import write_file
from ..group.roles_file import file_name
from ..node.output import say
from ..rows import ArrayRows
from .progress import ArrayProgress, ElementState
from .states_file import StatesFile

#: Kinds of files of an array in Ray's folder of logs, which all of its attempts have in common.
JOURNAL_FILE, HOSTS_FILE, RESULTS_FILE, STATES_FILE = "journal", "hosts", "results", "states"
#: Seconds between two states of the file.
_WRITE_S = 1.0
#: Seconds between two lines about the progress in the log.
_TELL_S = 30.0
#: Seconds over which the rate is measured.
_RATE_S = 30.0


def file_of(submission_id: str, kind: str) -> str:
    """Name of another file of an array in Ray's folder of logs, the same for all of its attempts.

    Args:
        submission_id: of any attempt.
        kind: ``JOURNAL_FILE``, ``HOSTS_FILE``, ``RESULTS_FILE`` or ``STATES_FILE``.
    """
    return f"nemo_run_ray-{first_id(submission_id)}.{kind}"


class StatusFile:
    """The file; absent when the output goes to no file of Ray's.

    Args:
        folder: of Ray's logs; ``None`` when it is not known.
        submission_id: of the job.
    """

    def __init__(self, folder: Optional[str], submission_id: str) -> None:
        self._path = os.path.join(folder, file_name(submission_id)) if folder else None
        states = os.path.join(folder, file_of(submission_id, STATES_FILE)) if folder else None
        self._states = StatesFile(states)
        self._write_at = 0.0
        self._tell_at = time.monotonic() + _TELL_S
        self._seen = [(time.monotonic(), 0)]
        self._may_be_left_on: Set[str] = set()

    def write(
        self,
        progress: ArrayProgress,
        running: int,
        may_be_left_on: Collection[str],
        is_over: bool = False,
    ) -> None:
        """Show where the array is, at most once a second before its end.

        Args:
            progress: of the elements.
            running: how many slots are busy.
            may_be_left_on: ids of the nodes where processes of cancelled elements may go on. They
                are shown before the states of these elements are.
            is_over: the driver ends.
        """
        now = time.monotonic()
        if now >= self._write_at or is_over or set(may_be_left_on) != self._may_be_left_on:
            self._write_at, self._may_be_left_on = now + _WRITE_S, set(may_be_left_on)
            self._write(progress, running, now, is_over)
        if is_over:
            self._states.finish(progress)
        else:
            self._states.go_on(progress)

    def _write(self, progress: ArrayProgress, running: int, now: float, is_over: bool) -> None:
        rows = self._rows(progress, running, now)
        if now >= self._tell_at and not is_over:
            self._tell_at = now + _TELL_S
            say(_in_words(rows))
        if self._path is None:
            return
        try:
            write_file(self._path, json.dumps({"phase": "over" if is_over else "running", **rows}))
        except OSError:  # a full disk: the array goes on, and is not shown
            return

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
            "may_be_left_on": sorted(self._may_be_left_on),
        }


def _in_words(rows: ArrayRows) -> str:
    """The progress, for those who follow the log."""
    over = rows["succeeded"] + rows["failed"] + rows["cancelled"]
    words = f"{over} of {rows['elements']} elements are over, {rows['failed']} failed"
    if rows["left_s"] is None:
        return words
    return f"{words}; {rows['elements_per_s']:.3g} elements/s, about {rows['left_s']:.0f} s left"
