"""What was seen of a job's attempts, kept in the ledger: it outlives the cluster's table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from nemo_run_ray.remote.attempts import Attempt, attempt_id, attempt_of_row, attempts_of, first_id
from nemo_run_ray.remote.rows import JobRow, JobRows
from nemo_run_ray.remote.states import JobState, JobStatus

if TYPE_CHECKING:
    from nemo_run_ray.experiment.ledger import JobRecord

#: An attempt that nothing delays begins to run within so many seconds of its posting.
_FRESH_S = 3.0
#: How much longer an attempt must have run than was written down, to be written down again: a job
#: of days, looked at each second, adds some dozens of lines to its ledger.
_LONGER, _LONGER_S = 1.25, 5.0


@dataclass(frozen=True)
class AttemptRecord:
    """One attempt as it was last seen. Times are seconds since the epoch.

    Attributes:
        submission_id: its name on the cluster.
        state: a ``JobState``'s value.
        reason: a ``Reason``'s value.
        detail: why, in words.
        node: hexadecimal id of the node of its driver; empty when it had none.
        posted_at: when Ray got it.
        running_at: when it began to run; ``None`` when no process saw that.
        ended_at: when it ended; ``None`` when no process saw that.
        exit_code: of its command; ``None`` when it has none.
        seen_at: when it was seen running last; ``None`` when it was not, or has ended.
    """

    submission_id: str
    state: str
    reason: str = ""
    detail: str = ""
    node: str = ""
    posted_at: float = 0.0
    running_at: float | None = None
    ended_at: float | None = None
    exit_code: int | None = None
    seen_at: float | None = None

    @classmethod
    def of(cls, submission_id: str, row: Attempt, now: float) -> AttemptRecord:
        """The record of a row of the job table at this moment.

        Ray does not tell when it began to run. One that was posted long ago may have done so at any
        moment since.
        """
        status = row.status
        is_running = status.state is JobState.RUNNING
        return cls(
            submission_id=submission_id,
            state=status.state.value,
            reason=status.reason.value,
            detail=status.detail,
            node=status.node,
            posted_at=row.posted_at,
            running_at=now if is_running and now - row.posted_at <= _FRESH_S else None,
            ended_at=row.ended_at or None,
            exit_code=row.exit_code,
            seen_at=now if is_running else None,
        )

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> AttemptRecord:
        """Inverse of ``to_json``; what a later version has added is left out.

        Raises:
            ValueError: the state is none.
        """
        known = {field.name for field in fields(cls)}
        found = cls(**{name: value for name, value in values.items() if name in known})
        JobState(found.state)
        return found

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


#: The attempts of one job by submission id, the first one first.
Attempts = Mapping[str, AttemptRecord]


def of_rows(rows: JobRows, job: str, nonces: Sequence[str], now: float) -> dict[str, AttemptRecord]:
    """The attempts of a job in the cluster's job table; claims are none.

    Args:
        rows: the table.
        job: submission id of the first attempt.
        nonces: of the job's submissions.
        now: seconds since the epoch.
    """
    table = {name: attempt_of_row(row) for name, row in _by_job(rows).get(job, {}).items()}
    found = attempts_of([job], table)[job]
    named = {attempt_id(job, number): row for number, row in found.items()}
    return {
        name: AttemptRecord.of(name, row, now)
        for name, row in named.items()
        if not row.claim and row.nonce in nonces
    }


#: The job table that was grouped last, and its rows by first id. All jobs of one look share it.
_grouped: tuple[JobRows, dict[str, dict[str, JobRow]]] = ({}, {})


def _by_job(rows: JobRows) -> dict[str, dict[str, JobRow]]:
    global _grouped
    last, groups = _grouped
    if last is not rows:
        groups = {}
        for name, row in rows.items():
            groups.setdefault(first_id(name), {})[name] = row
        _grouped = rows, groups
    return groups


def merged(
    kept: Attempts, found: Attempts, running_at: Mapping[str, float] | None = None
) -> dict[str, AttemptRecord]:
    """What is known of a job's attempts.

    Args:
        kept: as they were seen before.
        found: as they are now; empty when the cluster does not tell.
        running_at: when attempts were seen running by their dispatcher.
    """
    result = {}
    for name, now in {**kept, **found}.items():
        moments = [
            at
            for at in (
                kept[name].running_at if name in kept else None,
                now.running_at,
                (running_at or {}).get(name),
            )
            if at is not None
        ]
        result[name] = replace(now, running_at=min(moments, default=None))
    return result


def known(
    record: JobRecord, found: Attempts, now: float, running_at: Mapping[str, float] | None = None
) -> Attempts:
    """What is known of a job's attempts; none goes on of a job that is over.

    Of a job that was given up while it waited Ray's table may have an attempt as pending still: a
    stop of such a row is held back until Ray would start it.

    Args:
        record: of the job, with the attempts as they were written down.
        found: as they are now; empty when the cluster does not tell.
        now: seconds since the epoch, for an end that nobody has written down.
        running_at: when attempts were seen running by their dispatcher.
    """
    attempts = merged(record.attempts, found, running_at)
    if not record.terminal:
        return attempts
    status = JobStatus.from_json(record.terminal)
    for name, one in attempts.items():
        if not JobState(one.state).is_terminal:
            before = record.attempts[name].ended_at if name in record.attempts else None
            attempts[name] = replace(
                one,
                state=status.state.value,
                reason=status.reason.value,
                detail=status.detail,
                ended_at=now if before is None else before,
                seen_at=None,
            )
    return attempts


def has_news(kept: Attempts, found: Attempts) -> bool:
    """Whether what is known of a job's attempts is to be written down.

    Args:
        kept: as it was written down.
        found: as it is now.
    """
    if {name: replace(one, seen_at=None) for name, one in kept.items()} != {
        name: replace(one, seen_at=None) for name, one in found.items()
    }:
        return True
    return any(_is_longer(kept[name], one) for name, one in found.items())


def _is_longer(before: AttemptRecord, now: AttemptRecord) -> bool:
    if now.seen_at is None or before.seen_at is None:
        return now.seen_at != before.seen_at
    length_s, known_s = now.seen_at - now.posted_at, before.seen_at - now.posted_at
    return length_s > max(_LONGER * known_s, known_s + _LONGER_S)
