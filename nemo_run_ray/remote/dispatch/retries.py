"""Decides whether a job that failed is tried again, and when that is safe.

Pure functions of the rows of one job in the cluster's job table.
"""

from __future__ import annotations

from typing import Mapping, Optional, Tuple

from ..attempts import CANCELLED, NOT_PLACED, Attempt
from ..states import JobState, JobStatus, Reason

#: Seconds from the end of an attempt to the next one.
SETTLE_S = 1.0
#: Failures that Ray's head concludes, while the command may still run on a node that is cut off.
_UNPROVEN = {Reason.NODE_DIED, Reason.OTHER}
#: Failures that another attempt would not change. See docs/chains.md.
_PERMANENT = {Reason.RUNTIME_ENV, Reason.UNSCHEDULABLE, Reason.NOT_PLACED}


def status_of_attempts(
    rows: Mapping[int, Attempt], retries: int, permanent_exit_codes: Tuple[int, ...]
) -> JobStatus:
    """The status of a job with at least one attempt or claim.

    Args:
        rows: of the job, by the number of the attempt.
        retries: further attempts that are allowed after failures.
        permanent_exit_codes: that no further attempt would change.

    Returns:
        ``WAITING`` with ``Reason.RETRY`` for a failure that is tried again.
    """
    for number, row in rows.items():
        if row.status.state is JobState.SUCCEEDED and not row.claim:
            return _of(row, number)
    for claim in rows.values():
        if claim.claim:
            runs = [
                attempt for attempt, row in rows.items() if row.status.state is JobState.RUNNING
            ]
            # Its end is still open: it may succeed before it is stopped.
            return _of(rows[runs[-1]], runs[-1]) if runs else _claimed(claim, rows)
    number = max(rows)
    last = rows[number]
    if last.status.state is not JobState.FAILED:
        return _of(last, number)
    failed = [attempt for attempt, row in rows.items() if _counts(row)]
    if failed:
        newest = rows[failed[-1]]
        permanent = newest.status.reason in _PERMANENT or newest.exit_code in permanent_exit_codes
        if permanent or len(failed) > retries:
            return _of(newest, failed[-1])
    if last.status.reason is Reason.START_TIMEOUT:
        detail = f"attempt {number} was not started in time by Ray, which does not count"
    else:
        left = retries - len(failed) + 1
        detail = f"attempt {number} failed ({last.status.detail}); {left} more allowed"
    return with_state(_of(last, number), JobState.WAITING, Reason.RETRY, detail)


def is_settled(last: Attempt, now: float, node_dead_s: float) -> bool:
    """Whether nothing of an attempt that failed can still run."""
    if last.status.reason in _UNPROVEN:
        return now >= last.ended_at + node_dead_s
    # The end was written by the clock of the attempt's node, which may be ahead.
    return now >= last.ended_at + SETTLE_S or last.ended_at > now


def _counts(row: Attempt) -> bool:
    """Whether an attempt counts: it failed, and not because Ray gave its start up."""
    status = row.status
    return status.state is JobState.FAILED and status.reason is not Reason.START_TIMEOUT


def _claimed(claim: Attempt, rows: Mapping[int, Attempt]) -> JobStatus:
    """The status of a job whose next attempt was claimed; what ran before explains it."""
    before = max((attempt for attempt, row in rows.items() if not row.claim), default=0)
    node = rows[before].status.node if before else ""
    if claim.claim == NOT_PLACED:
        return JobStatus(JobState.FAILED, Reason.NOT_PLACED, NOT_PLACED, node, before)
    if claim.claim != CANCELLED:
        return JobStatus(JobState.FAILED, Reason.REFUSED, claim.claim, node, before)
    detail = "cancelled" if before else "cancelled before its start"
    return JobStatus(JobState.CANCELLED, Reason.CANCELLED, detail, node, before)


def _of(row: Attempt, number: int) -> JobStatus:
    return with_state(row.status, row.status.state, row.status.reason, row.status.detail, number)


def with_state(
    status: JobStatus,
    state: JobState,
    reason: Reason,
    detail: str,
    attempt: Optional[int] = None,
) -> JobStatus:
    """The status with another state; its node stays."""
    number = status.attempt if attempt is None else attempt
    return JobStatus(state, reason, detail, status.node, number, status.waits_for)
