"""Policies that ``decide`` asks: retries, and the time that an allocation still has. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Mapping, Optional, Tuple

from ..files import ENDS_AT, LASTS_S, RENEWS
from ..status import CANCELLED, NOT_PLACED, Attempt, JobState, JobStatus, Reason

#: Seconds from the end of an attempt to the next one.
SETTLE_S = 1.0
#: Failures that Ray's head concludes, while the command may still run on a node that is cut off.
_UNPROVEN = {Reason.NODE_DIED, Reason.OTHER}
#: Failures that another attempt would not change. See docs/chains.md.
_PERMANENT = {Reason.RUNTIME_ENV, Reason.UNSCHEDULABLE, Reason.NOT_PLACED}
#: Seconds before an allocation is renewed in which no job begins: Ray's job table is written down
#: then, and what it lacks would begin again.
CLOSING_S = 5.0


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
            return replace(row.status, attempt=number)
    for claim in rows.values():
        if claim.claim:
            runs = [number for number, row in rows.items() if row.status.state is JobState.RUNNING]
            # Its end is still open: it may succeed before it is stopped.
            return (
                replace(rows[runs[-1]].status, attempt=runs[-1]) if runs else _claimed(claim, rows)
            )
    number = max(rows)
    last = replace(rows[number].status, attempt=number)
    if last.state is not JobState.FAILED:
        return last
    # A start that Ray gave up does not count.
    failed = [
        number
        for number, row in rows.items()
        if row.status.state is JobState.FAILED and row.status.reason is not Reason.START_TIMEOUT
    ]
    if failed:
        newest = rows[failed[-1]]
        permanent = newest.status.reason in _PERMANENT or newest.exit_code in permanent_exit_codes
        if permanent or len(failed) > retries:
            return replace(newest.status, attempt=failed[-1])
    if last.reason is Reason.START_TIMEOUT:
        detail = f"attempt {number} was not started in time by Ray, which does not count"
    else:
        more = retries - len(failed) + 1
        detail = f"attempt {number} failed ({last.detail}); {more} more allowed"
    return with_state(last, JobState.WAITING, Reason.RETRY, detail)


def is_settled(last: Attempt, now: float, node_dead_s: float) -> bool:
    """Whether nothing of an attempt that failed can still run."""
    if last.status.reason in _UNPROVEN:
        return now >= last.ended_at + node_dead_s
    # The end was written by the clock of the attempt's node, which may be ahead.
    return now >= last.ended_at + SETTLE_S or last.ended_at > now


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


def with_state(status: JobStatus, state: JobState, reason: Reason, detail: str) -> JobStatus:
    """The status with another state; its node and attempt stay."""
    return replace(status, state=state, reason=reason, detail=detail, tail="")


@dataclass(frozen=True)
class TimeLeft:
    """The remaining time of an allocation.

    Attributes:
        left_s: seconds from now until it ends.
        lasts_s: seconds that it lasts in all.
        renews: whether another one continues its jobs.
    """

    left_s: float
    lasts_s: float
    renews: bool

    def why_never(self, time_s: Optional[float]) -> str:
        """The reason for never starting a job that needs so long; empty if there is none."""
        if time_s is None or time_s <= self.left_s:
            return ""
        if self.renews and time_s <= self.lasts_s:
            return ""  # in the next one
        if self.renews:
            return f"it needs {time_s:g} s, and each allocation lasts {self.lasts_s:.0f} s"
        return f"it needs {time_s:g} s, and its allocation ends in {max(self.left_s, 0):.0f} s"

    def has(self, time_s: Optional[float]) -> bool:
        """Whether a job that needs so long may begin now."""
        if self.renews and self.left_s < CLOSING_S:
            return False  # the next allocation would not know that it has begun
        return time_s is None or time_s <= self.left_s


def time_left(env: Mapping[str, str], now: float) -> Optional[TimeLeft]:
    """The remaining time by a job's environment; ``None`` where nothing ends the cluster.

    Args:
        env: of the dispatcher.
        now: seconds since the epoch.
    """
    try:
        return TimeLeft(float(env[ENDS_AT]) - now, float(env[LASTS_S]), env.get(RENEWS) == "1")
    except (KeyError, ValueError):
        return None
