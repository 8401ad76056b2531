"""Decides for jobs that are handed over together which start, are tried again, or end.

It is a pure function of their plan (a *dispatch*) and of the cluster's job table. The dispatcher
carries out what it says; the client asks it the status of every job, also those that
Ray has never heard of. Nothing is remembered between two calls: the table is the memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from ..attempts import (
    CANCELLED,
    NODE_DEAD_S,
    NOT_PLACED,
    Attempt,
    JobExit,
    attempt_id,
    attempts_of,
)
from ..spec import DispatchedJobSpec, DispatchSpec, OutsideSpec, cancel_id
from ..status import JobState, JobStatus, Reason
from .policies import TimeLeft, is_settled, status_of_attempts, with_state

#: Jobs that may start at the same moment: each start costs the head 1.4 s of a CPU (measured).
STARTING_MAX = 8
#: Seconds after which a job that has not started is taken to wait for room. Until it gets
#: room, no other job that asks for the same is handed over: Ray gives up what waits for 900 s.
STUCK_S = 6.0


#: A job that may be started, and the number of its attempt.
_Start = Tuple[DispatchedJobSpec, int]


class Do(str, Enum):
    """What the dispatcher can do."""

    #: Hand over an attempt.
    SUBMIT = "submit"
    #: End an attempt, or keep a pending one from starting.
    STOP = "stop"
    #: Take an id so that nothing can be started under it.
    CLAIM = "claim"


@dataclass(frozen=True)
class Action:
    """One thing to do.

    Attributes:
        do: what.
        job: name of the job.
        submission_id: of the attempt.
        why: in words; of a claim, what it says.
    """

    do: Do
    job: str
    submission_id: str
    why: str = ""


@dataclass(frozen=True)
class Decision:
    """What to do, and the status of every job, by its name.

    Attributes:
        actions: in this order.
        statuses: by the job's name.
        is_out_of_time: nothing goes on, and what could start needs longer than there is time.
    """

    actions: Tuple[Action, ...]
    statuses: Dict[str, JobStatus]
    is_out_of_time: bool = False

    @property
    def is_over(self) -> bool:
        return all(status.state.is_terminal for status in self.statuses.values())


def decide(
    dispatch: DispatchSpec,
    table: Mapping[str, Attempt],
    now: float,
    limit: Optional[int] = None,
    node_dead_s: float = NODE_DEAD_S,
    time_left: Optional[TimeLeft] = None,
) -> Decision:
    """What to do now, and the status of every job of the dispatch.

    Args:
        dispatch: the plan; every job comes after those that it depends on.
        table: the cluster's jobs by submission id, others' jobs among them.
        now: seconds since the epoch, by the clock of the table's times.
        limit: of jobs at once, where the dispatch has none of its own; ``None`` is none.
        node_dead_s: seconds from a node's death until nothing can run on it any more.
        time_left: of the cluster's allocation; ``None`` where nothing ends it.
    """
    attempts = _attempts(dispatch, table)
    cancelled = _is_cancelled(dispatch, table)

    statuses: Dict[str, JobStatus] = {}
    stops: List[Action] = []
    ready: List[_Start] = []
    for job in dispatch.jobs:
        rows = attempts[job.id]
        needs = {name: statuses[name] for name in job.after}
        others = _statuses_outside(job, attempts, table)
        status = _status(job, rows, [*needs.items(), *others.items()], cancelled)
        statuses[job.name] = status
        stops += _stops(job, rows, status, cancelled, now)
        lives = any(row.is_live for row in rows.values())
        if status.reason in (Reason.TURN, Reason.RETRY) and not lives:
            last = rows.get(status.attempt)
            if last is None or is_settled(last, now, node_dead_s):
                ready.append((job, status.attempt + 1))
    in_time, claims = _in_time(ready, time_left)
    actions = [*stops, *claims, *_submits(dispatch, in_time, attempts, now, limit)]
    is_held = bool(ready) and not (in_time or actions) and _goes_on(statuses) == len(ready)
    return Decision(tuple(actions), statuses, is_held)


def _goes_on(statuses: Mapping[str, JobStatus]) -> int:
    """How many jobs neither have ended nor wait for others."""
    left = (status for status in statuses.values() if not status.state.is_terminal)
    return sum(status.reason is not Reason.WAITS for status in left)


def _in_time(
    ready: Sequence[_Start], left: Optional[TimeLeft]
) -> Tuple[List[_Start], List[Action]]:
    """The jobs that end before their allocation does, and claims of those that never will."""
    if left is None:
        return list(ready), []
    claims = []
    for job, number in ready:
        why = left.why_never(job.time_s)
        if why:
            claims.append(Action(Do.CLAIM, job.name, attempt_id(job.id, number), why))
    return [(job, number) for job, number in ready if left.has(job.time_s)], claims


def _attempts(
    dispatch: DispatchSpec, table: Mapping[str, Attempt]
) -> Dict[str, Dict[int, Attempt]]:
    """The rows of all jobs that matter to a dispatch, by first id and number."""
    ids = [job.id for job in dispatch.jobs]
    outside = [upstream for job in dispatch.jobs for upstream in job.outside]
    dispatchers = [upstream.dispatcher for upstream in outside if upstream.dispatcher]
    return attempts_of([*ids, *(upstream.id for upstream in outside), *dispatchers], table)


def _is_cancelled(dispatch: DispatchSpec, table: Mapping[str, Attempt]) -> bool:
    """Whether the id is claimed by which the whole dispatch is cancelled."""
    cancel = table.get(dispatch.cancel_id)
    return cancel is not None and cancel.nonce == dispatch.nonce and bool(cancel.claim)


def _status(
    job: DispatchedJobSpec,
    rows: Mapping[int, Attempt],
    needs: Sequence[Tuple[str, JobStatus]],
    cancelled: bool,
) -> JobStatus:
    """The status of one job: its attempts decide, and before each the jobs that it depends on."""
    strangers = [number for number, row in rows.items() if row.nonce != job.nonce]
    if strangers:
        name = attempt_id(job.id, strangers[0])
        return JobStatus(
            JobState.FAILED, Reason.TAKEN, f"the id {name} is another run's", attempt=0
        )
    turn = JobStatus(JobState.WAITING, Reason.TURN, "waits for its turn", attempt=0)
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
        status = with_state(turn, JobState.WAITING, Reason.WAITS, detail)
        return replace(status, waits_for=missing)
    return turn


def _statuses_outside(
    job: DispatchedJobSpec,
    attempts: Mapping[str, Dict[int, Attempt]],
    table: Mapping[str, Attempt],
) -> Dict[str, JobStatus]:
    """The status of every job of another experiment that a job depends on, by its first id."""
    return {
        upstream.id: _status_outside(upstream, attempts, table.get(cancel_id(upstream.dispatcher)))
        for upstream in job.outside
    }


def _status_outside(
    upstream: OutsideSpec, attempts: Mapping[str, Dict[int, Attempt]], cancel: Optional[Attempt]
) -> JobStatus:
    """The status of a job of another experiment, as far as the table proves it.

    Args:
        upstream: the job.
        attempts: the rows by first id and number.
        cancel: the row that claims the other experiment's ``cancel_id``, if there is one.
    """
    rows = {n: row for n, row in attempts[upstream.id].items() if row.nonce in upstream.nonces}
    status = JobStatus(JobState.WAITING, Reason.WAITS)
    if rows:
        last = rows[max(rows)]
        status = status_of_attempts(rows, last.retries, last.permanent_exit_codes)
        if status.reason is Reason.RETRY and not upstream.dispatcher:
            return last.status  # no dispatcher would try it again
    if upstream.dispatcher and status.state is JobState.WAITING:
        own = attempts[upstream.dispatcher]
        last_own = own[max(own)] if own else None
        ended = last_own and last_own.exit_code in (JobExit.SUCCEEDED, JobExit.SOME_FAILED)
        nonces = {row.nonce for row in own.values()}
        if ended or (cancel and cancel.claim and cancel.nonce in nonces):
            return JobStatus(JobState.CANCELLED, Reason.UPSTREAM, "it is not started any more")
    return status


def _stops(
    job: DispatchedJobSpec,
    rows: Mapping[int, Attempt],
    status: JobStatus,
    cancelled: bool,
    now: float,
) -> List[Action]:
    """Every attempt that must not go on; and the claim that gives up what was not placed."""
    live = [number for number in sorted(rows) if rows[number].is_live]
    if any(row.nonce != job.nonce for row in rows.values()):
        live = [number for number in live if rows[number].nonce == job.nonce]
    if not live:
        return []
    newest = live[-1]
    row = rows[newest]
    is_late = (
        job.pending_timeout_s is not None
        and now - _pending_since(rows, newest) > job.pending_timeout_s
    )
    why = CANCELLED if cancelled else status.detail or "it is superseded"
    claims: List[Action] = []
    doomed = live if cancelled else live[:-1]
    if status.state.is_terminal or newest != max(rows):
        doomed = live
    elif row.status.state is JobState.PENDING and (cancelled or is_late):
        # The claim comes first: it says why, to any client that sees the stopped attempt, which Ray
        # shows as pending until there is room for it.
        why = CANCELLED if cancelled else NOT_PLACED
        claims = [Action(Do.CLAIM, job.name, attempt_id(job.id, newest + 1), why)]
        doomed = live
    return claims + [
        Action(Do.STOP, job.name, attempt_id(job.id, number), why) for number in doomed
    ]


def _submits(
    dispatch: DispatchSpec,
    ready: Sequence[_Start],
    attempts: Mapping[str, Dict[int, Attempt]],
    now: float,
    limit: Optional[int],
) -> List[Action]:
    """The attempts to hand over, in the order of the jobs, as far as there is room for them."""
    limit = limit if dispatch.max_in_flight is None else dispatch.max_in_flight
    starting, live, stuck, crowded, pending = 0, 0, set(), set(), set()
    for job in dispatch.jobs:
        for row in attempts[job.id].values():
            if row.nonce != job.nonce:
                continue  # a stranger's asked for a room of its own
            if row.status.reason is Reason.START_TIMEOUT:
                crowded.add(job.shape)  # from now on one at a time waits for such room
            if not row.is_live:
                continue
            live += 1
            if row.status.state is JobState.PENDING:
                pending.add(job.shape)
                if now - row.posted_at > STUCK_S:
                    stuck.add(job.shape)
                else:
                    starting += 1
    submits: List[Action] = []
    for job, number in ready:
        if (limit is not None and live >= limit) or starting >= STARTING_MAX:
            break
        if job.shape in stuck or job.shape in crowded & pending:
            continue
        name = attempt_id(job.id, number)
        submits.append(Action(Do.SUBMIT, job.name, name, f"attempt {number}"))
        live, starting = live + 1, starting + 1
        pending.add(job.shape)
    return submits


def _pending_since(rows: Mapping[int, Attempt], number: int) -> float:
    """When the job began to wait for room: starts that Ray gave up belong to the same wait."""
    while number - 1 in rows and rows[number - 1].status.reason is Reason.START_TIMEOUT:
        number -= 1
    return rows[number].posted_at
