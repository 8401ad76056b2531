"""What the driver shows of an array: files beside the job's log, which Ray's log API serves.

Nothing that the array does is decided by it.
"""

from __future__ import annotations

import json
import os
import time
from typing import Mapping, Optional, Sequence

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
        #: ``may_be_left`` as the file has it, and as it was in the last try to write the file.
        self._shown: Mapping[str, Sequence[int]] = {}
        self._tried: Optional[Mapping[str, Sequence[int]]] = None

    def write(
        self,
        progress: ArrayProgress,
        running: int,
        may_be_left: Mapping[str, Sequence[int]],
        is_over: bool = False,
    ) -> None:
        """Show where the array is, at most once a second before its end.

        Args:
            progress: of the elements.
            running: how many slots are busy.
            may_be_left: by node the elements that count as cancelled and may go on there.
            is_over: the driver ends.
        """
        now = time.monotonic()
        if self._tried is None:  # another driver may have written the states before
            self._states.finish(progress)
        if now >= self._write_at or is_over or may_be_left != self._tried:
            self._write_at, self._tried = now + _WRITE_S, may_be_left
            if self._write(self._rows(progress, running, now, may_be_left), is_over):
                self._shown = may_be_left
        if may_be_left != self._shown:
            return  # no state says "cancelled" before this file says where that is not proven
        if is_over:
            self._states.finish(progress)
        else:
            self._states.go_on(progress)

    def _write(self, rows: ArrayRows, is_over: bool) -> bool:
        """Write the file, and a line into the log; ``False`` when the disk does not take it."""
        now = time.monotonic()
        if now >= self._tell_at and not is_over:
            self._tell_at = now + _TELL_S
            say(_in_words(rows))
        if self._path is None:
            return True
        try:
            write_file(self._path, json.dumps({"phase": "over" if is_over else "running", **rows}))
        except OSError:  # a full disk: the array goes on, and is not shown
            return False
        return True

    def _rows(
        self,
        progress: ArrayProgress,
        running: int,
        now: float,
        may_be_left: Mapping[str, Sequence[int]],
    ) -> ArrayRows:
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
            "may_be_left": dict(may_be_left) if self._states.is_written else None,
        }


def _in_words(rows: ArrayRows) -> str:
    """The progress, for those who follow the log."""
    over = rows["succeeded"] + rows["failed"] + rows["cancelled"]
    words = f"{over} of {rows['elements']} elements are over, {rows['failed']} failed"
    if rows["left_s"] is None:
        return words
    return f"{words}; {rows['elements_per_s']:.3g} elements/s, about {rows['left_s']:.0f} s left"
