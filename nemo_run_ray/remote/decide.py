"""Decides for jobs that are submitted together which start, are tried again, or end.

It is a pure function of their plan (a *dispatch*) and of the cluster's job table. The dispatcher
carries out what it says; the client asks it the status of every job, also those that
Ray has never heard of. Nothing is remembered between two calls: the table is the memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import Mapping, NamedTuple, Sequence

from .files import ENDS_AT, LASTS_S, RENEWS
from .spec import DispatchedJobSpec, DispatchSpec, Env, OutsideSpec, cancel_id
from .status import (
    CANCELLED,
    NODE_DEAD_S,
    NOT_PLACED,
    Attempt,
    JobExit,
    JobState,
    JobStatus,
    Reason,
    attempt_id,
    attempts_of,
)

#: Jobs that may start at the same moment: each start costs the head 1.4 s of a CPU (measured).
STARTING_MAX = 8
#: Seconds after which a job that has not started is taken to wait for room. Until it gets
#: room, no other job that asks for the same is submitted: Ray gives up what waits for 900 s.
STUCK_S = 6.0
#: Failures that Ray's head concludes, while the command may still run on a node that is cut off.
_UNPROVEN = {Reason.NODE_DIED, Reason.OTHER}
#: Failures that another attempt would not change. See docs/guides/chains.md.
_PERMANENT = {Reason.RUNTIME_ENV, Reason.UNSCHEDULABLE, Reason.NOT_PLACED}
#: Seconds before an allocation is renewed in which no job begins: Ray's job table is written down
#: then, and what it lacks would begin again.
CLOSING_S = 5.0


class Do(str, Enum):
    """An action of the dispatcher."""

    #: Submit an attempt.
    SUBMIT = "submit"
    #: End an attempt, or keep a pending one from starting.
    STOP = "stop"
    #: Take an id so that nothing can be started under it.
    CLAIM = "claim"


@dataclass(frozen=True)
class Action:
    """One thing to do with an attempt of a job, which is named; a claim says why."""

    do: Do
    job: str
    submission_id: str
    why: str = ""


@dataclass(frozen=True)
class Decision:
    """The actions in their order, and the status of every job, by its name."""

    actions: tuple[Action, ...]
    statuses: dict[str, JobStatus]
    #: Nothing runs, and what could start needs more time than remains.
    is_out_of_time: bool = False

    @property
    def is_over(self) -> bool:
        return all(status.state.is_terminal for status in self.statuses.values())


class TimeLeft(NamedTuple):
    """The remaining and the whole time of an allocation, and whether another one continues it."""

    left_s: float = math.inf
    lasts_s: float = math.inf
    renews: bool = False

    def why_not(self, time_s: float | None) -> str | None:
        """The reason for never starting a job that needs so long; empty if the next one has time.

        ``None`` lets it begin now.
        """
        needs_s = -math.inf if time_s is None else time_s
        if needs_s > (self.lasts_s if self.renews else self.left_s):
            each = f"each allocation lasts {self.lasts_s:.0f} s"
            rest = each if self.renews else f"its allocation ends in {max(self.left_s, 0):.0f} s"
            return f"it needs {time_s:g} s, and {rest}"
        # At the very end the next allocation would not know that it has begun.
        is_closing = self.renews and self.left_s < CLOSING_S
        return "" if is_closing or needs_s > self.left_s else None


#: No end, as where nothing ends Ray.
FOREVER = TimeLeft()


def decide(
    dispatch: DispatchSpec,
    table: Mapping[str, Attempt],
    now: float,
    node_dead_s: float = NODE_DEAD_S,
    time_left: TimeLeft = FOREVER,
) -> Decision:
    """Decide about the next actions and the status of every job of the dispatch.

    Every job of it comes after those that it depends on. The table has others' jobs too, and its
    clock is that of ``now``. Nothing runs on a node ``node_dead_s`` after its death.
    """
    attempts = attempts_of(dispatch.ids, table)
    cancel = table.get(dispatch.cancel_id)
    cancelled = bool(cancel and cancel.nonce == dispatch.nonce and cancel.claim)

    statuses: dict[str, JobStatus] = {}
    actions = []
    submits = []  # with the job's shape
    # Ray gave up a start of a crowded shape: from then on, one job of it at a time waits for room.
    stuck, crowded, pending = set[str](), set[str](), set[str]()
    in_flight = starting = held = unfinished = 0
    for job in dispatch.jobs:
        rows = attempts[job.id]
        needs = [(name, statuses[name]) for name in job.after]
        needs += [(other.id, _status_outside(other, attempts, table)) for other in job.outside]
        status = statuses[job.name] = _status(job, rows, needs, cancelled)
        unfinished += not status.state.is_terminal and status.reason is not Reason.WAITS
        live = [number for number, row in rows.items() if row.is_live and row.nonce == job.nonce]
        in_flight += len(live)
        own = (row.status.reason for row in rows.values() if row.nonce == job.nonce)
        if Reason.START_TIMEOUT in own:
            crowded.add(job.shape)
        for number in live:
            if rows[number].status.state is JobState.PENDING:
                pending.add(job.shape)
                if now - rows[number].posted_at > STUCK_S:
                    stuck.add(job.shape)
                else:
                    starting += 1
        if live:
            actions += _stops(job, rows, live, status, cancelled, now)
        elif status.reason in (Reason.TURN, Reason.RETRY):
            last = rows.get(status.attempt)
            is_unproven = last and last.status.reason in _UNPROVEN
            if not last or not is_unproven or now >= last.ended_at + node_dead_s:
                why, name = time_left.why_not(job.time_s), attempt_id(job.id, status.attempt + 1)
                if why is None:
                    submits.append((job.shape, Action(Do.SUBMIT, job.name, name)))
                elif why:
                    actions.append(Action(Do.CLAIM, job.name, name, why))
                else:
                    held += 1
    is_out_of_time = 0 < held == unfinished and not actions
    for shape, action in submits:
        is_full = dispatch.max_in_flight is not None and in_flight >= dispatch.max_in_flight
        if is_full or starting >= STARTING_MAX:
            break
        if shape not in stuck | (crowded & pending):
            actions.append(action)
            pending.add(shape)
            in_flight, starting = in_flight + 1, starting + 1
    return Decision(tuple(actions), statuses, is_out_of_time)


def _status(
    job: DispatchedJobSpec,
    rows: Mapping[int, Attempt],
    needs: Sequence[tuple[str, JobStatus]],
    cancelled: bool,
) -> JobStatus:
    """The status of one job: its attempts decide, and before each the jobs that it depends on."""
    turn = JobStatus(JobState.WAITING, Reason.TURN, "waits for its turn", attempt=0)
    for number, row in rows.items():
        if row.nonce != job.nonce:
            detail = f"the id {attempt_id(job.id, number)} is another run's"
            return with_state(turn, JobState.FAILED, Reason.TAKEN, detail)
    if rows:
        turn = status_of_attempts(rows, job.retries, job.permanent_exit_codes)
        if turn.reason is not Reason.RETRY:
            return turn
    if cancelled:
        detail = "cancelled between attempts" if rows else "cancelled before its start"
        return with_state(turn, JobState.CANCELLED, Reason.CANCELLED, detail)
    for name, need in needs:
        if need.state.is_terminal and need.state is not JobState.SUCCEEDED:
            failed = need.state is JobState.FAILED
            detail = f"upstream {name} {'failed' if failed else 'was cancelled'}"
            return with_state(turn, JobState.CANCELLED, Reason.UPSTREAM, detail)
    missing = tuple(name for name, need in needs if need.state is not JobState.SUCCEEDED)
    if missing:
        detail = f"waits for {', '.join(missing)}"
        turn = with_state(turn, JobState.WAITING, Reason.WAITS, detail)
    return replace(turn, waits_for=missing)


def _status_outside(
    upstream: OutsideSpec,
    attempts: Mapping[str, dict[int, Attempt]],
    table: Mapping[str, Attempt],
) -> JobStatus:
    """The status of a job of another experiment, as far as the table proves it."""
    rows = {n: row for n, row in attempts[upstream.id].items() if row.nonce in upstream.nonces}
    status = JobStatus(JobState.WAITING, Reason.WAITS)
    if rows:
        last = rows[max(rows)]
        status = status_of_attempts(rows, last.retries, last.permanent_exit_codes)
        if status.reason is Reason.RETRY and not upstream.dispatcher:
            return last.status  # no dispatcher would try it again
    if upstream.dispatcher and status.state is JobState.WAITING:
        own = list(attempts[upstream.dispatcher].values())
        ended = own and own[-1].exit_code in (JobExit.SUCCEEDED, JobExit.SOME_FAILED)
        cancel = table.get(cancel_id(upstream.dispatcher))
        if ended or (cancel and cancel.claim and cancel.nonce in {row.nonce for row in own}):
            return JobStatus(JobState.CANCELLED, Reason.UPSTREAM, "it is not started any more")
    return status


def _stops(
    job: DispatchedJobSpec,
    rows: Mapping[int, Attempt],
    live: Sequence[int],
    status: JobStatus,
    cancelled: bool,
    now: float,
) -> list[Action]:
    """Every live attempt that must not go on; and the claim that gives up what was not placed."""
    newest = first = live[-1]
    # Starts that Ray gave up belong to the same wait for room.
    while first - 1 in rows and rows[first - 1].status.reason is Reason.START_TIMEOUT:
        first -= 1
    limit_s = job.pending_timeout_s
    is_late = limit_s is not None and now - rows[first].posted_at > limit_s
    is_last = newest == max(rows) and not status.state.is_terminal
    why = CANCELLED if cancelled else status.detail or "it is superseded"
    actions = []
    if is_last and rows[newest].status.state is JobState.PENDING and (cancelled or is_late):
        # The claim comes first: it says why, to any client that sees the stopped attempt, which Ray
        # shows as pending until there is room for it.
        why = CANCELLED if cancelled else NOT_PLACED
        actions = [Action(Do.CLAIM, job.name, attempt_id(job.id, newest + 1), why)]
    doomed = live if cancelled or actions or not is_last else live[:-1]
    return actions + [
        Action(Do.STOP, job.name, attempt_id(job.id, number), why) for number in doomed
    ]


# ---------------------------------------------------------------- policies: retries, time


def status_of_attempts(
    rows: Mapping[int, Attempt], retries: int, permanent_exit_codes: tuple[int, ...]
) -> JobStatus:
    """The status of a job with at least one attempt or claim, by their numbers.

    It is ``WAITING`` with ``Reason.RETRY`` after a failure that is tried again.
    """
    tried = {
        number: replace(row.status, attempt=number) for number, row in rows.items() if not row.claim
    }
    for status in tried.values():
        if status.state is JobState.SUCCEEDED:
            return status
    # The last one explains a claim, too.
    last = tried[max(tried)] if tried else JobStatus(JobState.WAITING, attempt=0)
    claim = next((row.claim for row in rows.values() if row.claim), "")
    if claim:
        runs = [status for status in tried.values() if status.state is JobState.RUNNING]
        if runs:  # its end is still open: it may succeed before it is stopped
            return runs[-1]
        if claim == CANCELLED:
            detail = claim if tried else "cancelled before its start"
            return with_state(last, JobState.CANCELLED, Reason.CANCELLED, detail)
        reason = Reason.NOT_PLACED if claim == NOT_PLACED else Reason.REFUSED
        return with_state(last, JobState.FAILED, reason, claim)
    if last.state is not JobState.FAILED:
        return last
    failed = [
        status
        for status in tried.values()
        if status.state is JobState.FAILED and status.reason is not Reason.START_TIMEOUT
    ]
    if failed:
        exit_code = rows[failed[-1].attempt].exit_code
        permanent = failed[-1].reason in _PERMANENT or exit_code in permanent_exit_codes
        if permanent or len(failed) > retries:
            return failed[-1]
    detail = f"attempt {last.attempt} was not started in time by Ray, which does not count"
    if last.reason is not Reason.START_TIMEOUT:
        more = retries - len(failed) + 1
        detail = f"attempt {last.attempt} failed ({last.detail}); {more} more allowed"
    return with_state(last, JobState.WAITING, Reason.RETRY, detail)


def with_state(status: JobStatus, state: JobState, reason: Reason, detail: str) -> JobStatus:
    """The status with another state; its node and attempt stay."""
    return replace(status, state=state, reason=reason, detail=detail, tail="")


def time_left(env: Env, now: float) -> TimeLeft:
    """The remaining time by the dispatcher's environment; without end where nothing ends Ray."""
    ends_at, lasts_s = (float(env.get(name, math.inf)) for name in (ENDS_AT, LASTS_S))
    return TimeLeft(ends_at - now, lasts_s, env.get(RENEWS) == "1")
