"""The state of an array for clients: files beside the job's log, which Ray's log API serves.

Nothing that the array does is decided by it.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from contextlib import suppress

from ..files import write_file
from ..node.output import say
from ..spec import ArrayRows, status_file_name
from ..status import STATES_FILE, file_of
from .elements import ArrayProgress, ElementState

#: Seconds between two writes of a file; that of all elements' states may take longer, and is
#: written so seldom that it costs the driver a twentieth of its time.
_WRITE_S, _PAUSE = 1.0, 20
#: Seconds between two lines about the progress in the log.
_TELL_S = 30.0
#: Writes over which the rate is measured.
_RATE_ROWS = 30


class StatusFile:
    """The two files: counts, and the states of all elements.

    Args:
        folder: of Ray's logs.
        submission_id: of the job.
    """

    def __init__(self, folder: str, submission_id: str) -> None:
        self._folder, self._submission_id = folder, submission_id
        self._write_at = self._write_states_at = 0.0
        self._tell_at = time.monotonic() + _TELL_S
        self._seen = deque([(time.monotonic(), 0)], maxlen=_RATE_ROWS)

    def write(self, progress: ArrayProgress, running: int) -> None:
        """Show where the array is, at most once a second before its end.

        Args:
            progress: of the elements.
            running: how many slots are busy.
        """
        now, is_over = time.monotonic(), progress.is_over
        if now >= self._write_at or is_over:
            self._write_at = now + _WRITE_S
            rows = self._rows(progress, running, now)
            if now >= self._tell_at and not is_over:
                self._tell_at = now + _TELL_S
                say(_progress_line(rows))
            self._replace(status_file_name(self._submission_id), json.dumps(rows))
        if now >= self._write_states_at or is_over:
            states = "".join(json.dumps(stretch) + "\n" for stretch in progress.stretches())
            self._replace(file_of(self._submission_id, STATES_FILE), states)
            self._write_states_at = now + _WRITE_S + _PAUSE * (time.monotonic() - now)

    def _replace(self, name: str, content: str) -> None:
        with suppress(OSError):  # a full disk: the array continues, and is not shown
            write_file(os.path.join(self._folder, name), content)

    def _rows(self, progress: ArrayProgress, running: int, now: float) -> ArrayRows:
        ended = progress.ended_count
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
            "failures": [*progress.failures],
        }


def _progress_line(rows: ArrayRows) -> str:
    """The progress, for those who follow the log."""
    over = rows["succeeded"] + rows["failed"] + rows["cancelled"]
    line = f"{over} of {rows['elements']} elements are over, {rows['failed']} failed"
    if rows["left_s"] is None:
        return line
    return f"{line}; {rows['elements_per_s']:.3g} elements/s, about {rows['left_s']:.0f} s left"
