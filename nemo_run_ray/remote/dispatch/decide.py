"""Decides for jobs that are handed over together which start, are tried again, or end.

It is a pure function of their plan (a *dispatch*) and of the cluster's job table. The dispatcher
carries out what it says; the client asks it the status of every job, also those that
Ray has never heard of. Nothing is remembered between two calls: the table is the memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from ..attempts import CANCELLED, NOT_PLACED, Attempt, attempt_id, attempts_of
from ..spec import DispatchedJobSpec, DispatchSpec, OutsideSpec, cancel_id
from ..states import JobState, JobStatus, Reason

#: Exit codes of a dispatcher that has decided everything: all jobs succeeded, or not all.
ALL_SUCCEEDED, NOT_ALL_SUCCEEDED = 0, 8
#: Jobs that may start at the same moment: each start costs the head 1.4 s of a CPU (measured).
STARTING_MAX = 8
#: Seconds after which a job that has not started is taken to wait for room. Until it gets
#: room, no other job that asks for the same is handed over: Ray gives up what waits for 900 s.
STUCK_S = 6.0
#: Seconds from the end of an attempt to the next one.
SETTLE_S = 1.0
#: The same when its node died, or Ray does not know why it lost it: a node that was cut off goes on
#: until its raylet has noticed, Ray's ``gcs_rpc_server_reconnect_timeout_s`` (60), and its
#: processes for some moments more.
NODE_DEAD_S = 75.0
#: Failures that Ray's head concludes, while the command may still run on a node that is cut off.
_UNPROVEN = {Reason.NODE_DIED, Reason.OTHER}
#: Failures that another attempt would not change. See docs/chains.md.
_PERMANENT = {Reason.RUNTIME_ENV, Reason.UNSCHEDULABLE, Reason.NOT_PLACED}


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
    """What to do, and the status of every job, by its name."""

    actions: Tuple[Action, ...]
    statuses: Dict[str, JobStatus]

    @property
    def is_over(self) -> bool:
        return all(status.state.is_terminal for status in self.statuses.values())


def decide(
    dispatch: DispatchSpec,
    table: Mapping[str, Attempt],
    now: float,
    limit: Optional[int] = None,
    node_dead_s: float = NODE_DEAD_S,
) -> Decision:
    """What to do now, and the status of every job of the dispatch.

    Args:
        dispatch: the plan; every job comes after those that it depends on.
        table: the cluster's jobs by submission id, others' jobs among them.
        now: seconds since the epoch, by the clock of the table's times.
        limit: of jobs at once, where the dispatch has none of its own; ``None`` is none.
        node_dead_s: seconds from a node's death until nothing can run on it any more.
    """
    ids = [job.id for job in dispatch.jobs]
    outside = [upstream for job in dispatch.jobs for upstream in job.outside]
    dispatchers = [upstream.dispatcher for upstream in outside if upstream.dispatcher]
    attempts = attempts_of([*ids, *(upstream.id for upstream in outside), *dispatchers], table)
    cancelled = _is_cancelled(dispatch, table)

    statuses: Dict[str, JobStatus] = {}
    stops: List[Action] = []
    ready: List[Tuple[DispatchedJobSpec, int]] = []
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
            if last is None or _is_settled(last, now, node_dead_s):
                ready.append((job, status.attempt + 1))
    most = limit if dispatch.max_in_flight is None else dispatch.max_in_flight
    submits = _submits(dispatch, ready, attempts, now, most)
    return Decision((*stops, *submits), statuses)


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
        turn = _status_of_attempts(rows, job.retries, job.permanent_exit_codes)
        if turn.reason is not Reason.RETRY:
            return turn
    if cancelled:
        detail = "cancelled between attempts" if rows else "cancelled before its start"
        return _with(turn, JobState.CANCELLED, Reason.CANCELLED, detail)
    for name, need in needs:
        if need.state.is_terminal and need.state is not JobState.SUCCEEDED:
            failed = need.state is JobState.FAILED
            detail = f"upstream {name} {'failed' if failed else 'was cancelled'}"
            return _with(turn, JobState.CANCELLED, Reason.UPSTREAM, detail)
    missing = tuple(name for name, need in needs if need.state is not JobState.SUCCEEDED)
    if missing:
        detail = f"waits for {', '.join(missing)}"
        status = _with(turn, JobState.WAITING, Reason.WAITS, detail)
        return replace(status, waits_for=missing)
    return turn


def _status_of_attempts(
    rows: Mapping[int, Attempt], retries: int, permanent_exit_codes: Tuple[int, ...]
) -> JobStatus:
    """The status of a job with at least one attempt or claim."""
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
    return _with(_of(last, number), JobState.WAITING, Reason.RETRY, detail)


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
        return JobStatus(JobState.FAILED, Reason.NOT_STARTED, claim.claim, node, before)
    detail = "cancelled" if before else "cancelled before its start"
    return JobStatus(JobState.CANCELLED, Reason.CANCELLED, detail, node, before)


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
        status = _status_of_attempts(rows, last.retries, last.permanent_exit_codes)
        if status.reason is Reason.RETRY and not upstream.dispatcher:
            return last.status  # no dispatcher would try it again
    if upstream.dispatcher and status.state is JobState.WAITING:
        own = attempts[upstream.dispatcher]
        last_own = own[max(own)] if own else None
        ended = last_own and last_own.exit_code in (ALL_SUCCEEDED, NOT_ALL_SUCCEEDED)
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
    ready: Sequence[Tuple[DispatchedJobSpec, int]],
    attempts: Mapping[str, Dict[int, Attempt]],
    now: float,
    limit: Optional[int],
) -> List[Action]:
    """The attempts to hand over, in the order of the jobs, as far as there is room for them."""
    starting, live, stuck, crowded, pending = 0, 0, set(), set(), set()
    for job in dispatch.jobs:
        for row in attempts[job.id].values():
            if row.status.reason is Reason.START_TIMEOUT:
                crowded.add(job.shape)  # from now on one at a time waits for such room
            if not row.is_live or row.nonce != job.nonce:
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


def _is_settled(last: Attempt, now: float, node_dead_s: float) -> bool:
    """Whether nothing of an attempt that failed can still run."""
    if last.status.reason in _UNPROVEN:
        return now >= last.ended_at + node_dead_s
    # The end was written by the clock of the attempt's node, which may be ahead.
    return now >= last.ended_at + SETTLE_S or last.ended_at > now


def _of(row: Attempt, number: int) -> JobStatus:
    return _with(row.status, row.status.state, row.status.reason, row.status.detail, number)


def _with(
    status: JobStatus,
    state: JobState,
    reason: Reason,
    detail: str,
    attempt: Optional[int] = None,
) -> JobStatus:
    number = status.attempt if attempt is None else attempt
    return JobStatus(state, reason, detail, status.node, number, status.waits_for)
