"""Ends of jobs that Ray's job table has lost, restored from the end of the job's own log.

What Ray's record says of a job counts, but for two cases in which it is wrong (Ray 2.54 to 2.60):

- The agent of a node starts a job manager of its own when it is first asked for a log, also by
  Ray's dashboard. That one watches all jobs that go on at that moment, and of each that fails
  within its first second it writes "failed to get job supervisor" over the exit code.
- A supervisor that cannot reach the head for 30 s, or whose head has another address since (Ray's
  issue 65608), cannot write the end. When the head is back it writes that the command could not be
  started, or Ray finds that the supervisor has died.

The last line of a job's log is this package's. It is written when nothing of the command is left,
and carries a proof of the exit code, by a key that the command never sees. The lock that a proof
must fit is in the job's metadata, so whoever can read the job table can check it.
"""

from __future__ import annotations

import re
import time
from collections import deque
from typing import Any, Callable, Deque, Dict, Optional, Tuple

from .attempts import lock_of_row, nonce_of
from .node.output import PROOF, end_mark, lock_of
from .rows import JobRow
from .states import JobState, Reason, status_of_row

#: Ray's errors that may hide an end.
_ERRORS = {
    "JOB_SUPERVISOR_ACTOR_START_FAILURE",
    "JOB_SUPERVISOR_ACTOR_DIED",
    "JOB_ENTRYPOINT_COMMAND_START_ERROR",
}
#: Seconds until a node or a log that had no answer is asked again, twice as long each time.
_AGAIN_S, _AGAIN_MAX_S = 5.0, 3600.0
#: Requests at most in so many seconds; other rows stay as Ray has them until the next look.
_REQUESTS_MAX, _REQUESTS_S = 20, 10.0
#: Seconds after which an answer is a slow one, and the name under which all others wait for a while
#: then: one look shall not wait for every node of a rack that is cut off.
_SLOW_S, _ANY = 1.0, ""
#: How a last line begins of what was not cancelled and not killed with this package's process: in
#: the words of ``describe_exit``, ``explain_start`` and of a group that failed. A node that shuts
#: down tells that process to end, as Ray does for a cancelled job.
_ENDED = re.compile(r"exit code \d|killed by SIG\w|\[[\w ]+\] ")


class LostEnds:
    """Restores the rows of one job table.

    Args:
        log_end: gives the last ``LINES`` lines of a job's log, by its node's id and the job's;
            ``None`` when they cannot be had.
        clock: in seconds.
    """

    def __init__(
        self,
        log_end: Callable[[str, str], Optional[str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log_end = log_end
        self._clock = clock
        self._ends: Dict[str, Dict[str, Any]] = {}  # what was found, by job and time of its end
        self._waits: Dict[str, Tuple[float, float]] = {}  # of a node or a job: until when, how long
        self._requests: Deque[float] = deque(maxlen=_REQUESTS_MAX)

    def restored(self, row: JobRow) -> JobRow:
        """The row with the end that the job's log proves; the row itself when it proves none."""
        if not _may_be_lost(row):
            return row
        name, node = str(row["submission_id"]), str(row["driver_node_id"])
        key = f"{name} {row.get('end_time')}"
        if key not in self._ends:
            if not self._may_ask(name, node):
                return row
            asked_at = self._clock()
            text = self._log_end(node, name)
            if self._clock() - asked_at > _SLOW_S:
                self._waits[_ANY] = self._clock() + _REQUESTS_S, _REQUESTS_S
            end = None if text is None else _end(row, text)
            if end is None:
                self._wait(node if text is None else name)
                return row
            self._ends[key] = end
        found: JobRow = {**row, **self._ends[key]}  # type: ignore[typeddict-item]
        return found

    def _may_ask(self, name: str, node: str) -> bool:
        now = self._clock()
        is_full = len(self._requests) == _REQUESTS_MAX and now - self._requests[0] < _REQUESTS_S
        if is_full or any(
            now < self._waits.get(about, (0.0, 0.0))[0] for about in (name, node, _ANY)
        ):
            return False
        self._requests.append(now)
        return True

    def _wait(self, name: str) -> None:
        _, last_s = self._waits.get(name, (0.0, _AGAIN_S / 2))
        wait_s = min(2 * last_s, _AGAIN_MAX_S)
        self._waits[name] = self._clock() + wait_s, wait_s


def _may_be_lost(row: JobRow) -> bool:
    if (
        row.get("error_type") not in _ERRORS
        or not row.get("driver_node_id")
        or not lock_of_row(row)
    ):
        return False  # most rows; or another program's job, or one that has no log
    status = status_of_row(row)
    has_failed = status.state is JobState.FAILED and row.get("driver_exit_code") is None
    return has_failed and status.reason in (Reason.NODE_DIED, Reason.UNRECORDED)


def _end(row: JobRow, text: str) -> Optional[Dict[str, Any]]:
    """The fields of a row that the end of the job's log proves, as Ray would have written them."""
    mark, lock = end_mark(nonce_of(row)), lock_of_row(row)
    lines = [line[len(mark) :] for line in text.splitlines() if line.startswith(mark)]
    ends = [words.rpartition(PROOF) for words in lines]
    proven = [(words, proof) for words, _, proof in ends if lock_of(proof) == lock]
    if not proven or not _ENDED.match(proven[-1][0]):
        return None
    code = int(proven[-1][1].partition(".")[0])
    if code == 0:
        message = "Job finished successfully."
        return {
            "status": "SUCCEEDED",
            "error_type": None,
            "driver_exit_code": 0,
            "message": message,
        }
    return {
        "error_type": "JOB_ENTRYPOINT_COMMAND_ERROR",
        "driver_exit_code": code,
        "message": f"Job entrypoint command failed with exit code {code}, "
        f"last available logs (truncated to 20,000 chars):\n{text}",
    }
