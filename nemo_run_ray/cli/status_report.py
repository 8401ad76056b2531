"""The report of ``nemo-run-ray status`` and ``timeline``: observe, record, render."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Group
from rich.table import Table
from rich.text import Text

from nemo_run_ray.cli import timeline
from nemo_run_ray.experiment.elements import (
    FIRST_FAILURES,
    failure_lines,
    not_ready,
)
from nemo_run_ray.experiment.job import RemoteJob, with_begin_times
from nemo_run_ray.experiment.snapshot import Snapshot
from nemo_run_ray.experiment.store import AttemptRecord, Attempts, store_of
from nemo_run_ray.nemo import registry
from nemo_run_ray.remote.spec import ArrayRows, GroupRows
from nemo_run_ray.remote.status import JobState, JobStatus, Reason

_COLORS = {
    JobState.SUCCEEDED: "green",
    JobState.FAILED: "red",
    JobState.LOST: "red",
    JobState.CANCELLED: "yellow",
    JobState.RUNNING: "cyan",
}
#: Exit codes of ``status --once``; where jobs are in several of these states, the first one counts.
_EXIT_CODES = {
    JobState.FAILED: 3,
    JobState.LOST: 4,
    JobState.UNKNOWN: 5,
    JobState.CANCELLED: 6,
}
#: Jobs whose names a cell shows before it only counts them.
_NAMES_MAX = 3
_ELEMENT_STATES: tuple[Literal["succeeded", "failed", "cancelled", "running", "waiting"], ...] = (
    "succeeded",
    "failed",
    "cancelled",
    "running",
    "waiting",
)


@dataclass(frozen=True)
class StatusReport:
    """One look at jobs: of each its status, what its driver reports, and its attempts."""

    jobs: Sequence[RemoteJob]
    statuses: Sequence[JobStatus]
    roles: Sequence[GroupRows | None]
    arrays: Sequence[ArrayRows | None]
    attempts: Sequence[Attempts]
    snapshot: Snapshot

    @property
    def seen(self) -> list[tuple[RemoteJob, JobStatus]]:
        """The argument of ``history.record``."""
        return list(zip(self.jobs, self.statuses, strict=True))

    @property
    def is_over(self) -> bool:
        return all(status.state.is_terminal for status in self.statuses)

    @property
    def exit_code(self) -> int:
        """0 as long as all jobs wait, run or have succeeded."""
        states = {status.state for status in self.statuses}
        return next((code for state, code in _EXIT_CODES.items() if state in states), 0)

    def as_json(self) -> str:
        told = [group or array for group, array in zip(self.roles, self.arrays, strict=True)]
        rows = zip(self.jobs, self.statuses, self.attempts, told, strict=True)
        return json.dumps([_as_dict(*row) for row in rows], indent=1)

    def table(self, now: float) -> Group:
        """Everything for people; ``now`` in seconds since the epoch."""
        names = ("job", "state", "reason", "attempt", "node", "since", "waits for")
        table = Table(*names, box=None, pad_edge=False)
        troubles: dict[tuple[str, ...], list[tuple[str, str]]] = {}  # many jobs may share one
        rows = zip(self.jobs, self.statuses, self.attempts, self.roles, strict=True)
        for job, status, attempts, _ in rows:
            name = job.name
            table.add_row(
                Text(name),
                Text(status.state.value, _COLORS.get(status.state, "")),
                status.reason.value,
                str(status.attempt) if status.attempt and not job.is_direct else "",
                status.node[:12],
                _since(status, attempts, now),
                Text(_short(status.waits_for)),
            )
            if status.reason.is_trouble or status.reason is Reason.ROOM:
                what = (status.reason.value, status.detail, status.tail)
                troubles.setdefault(what, []).append((name, status.message))
        groups = [
            _roles_table(job.name, found)
            for job, found in zip(self.jobs, self.roles, strict=True)
            if found
        ]
        groups += [
            _array_lines(job, found, FIRST_FAILURES in status.detail)
            for job, status, found in zip(self.jobs, self.statuses, self.arrays, strict=True)
            if found
        ]
        details = [
            Text(f"\n{_short([name for name, _ in shared])}: {shared[0][1]}")
            for shared in troubles.values()
        ]
        return Group(table, *groups, *details)


def observe(jobs: Sequence[RemoteJob]) -> StatusReport:
    """Look at jobs of any experiments; nothing is written."""
    snapshot = Snapshot()
    statuses = [job.status_in(snapshot) for job in jobs]
    return StatusReport(
        jobs,
        statuses,
        [job.roles(status) for job, status in zip(jobs, statuses, strict=True)],
        [job.array_rows(status) for job, status in zip(jobs, statuses, strict=True)],
        [job.attempts_in(snapshot) for job in jobs],
        snapshot,
    )


def timeline_page(title: str, exp_dir: Path, jobs: Sequence[RemoteJob], now: float) -> str:
    """The page of ``nemo-run-ray timeline``."""
    report = observe(jobs)
    began = store_of(exp_dir).ledger.began_at() or now
    rows = [
        timeline.TimelineRow(
            name=job.name,
            state=status.state.value,
            reason=status.reason.value,
            message=status.message,
            after=job.after,
            waits_for=status.waits_for,
            attempts=tuple(
                _span(number, attempt, job, status)
                for number, attempt in enumerate(with_begin_times(job, attempts).values(), start=1)
            ),
            elements={name: array[name] for name in _ELEMENT_STATES} if array else {},
        )
        for job, status, attempts, array in zip(
            jobs, report.statuses, report.attempts, report.arrays, strict=True
        )
    ]
    return timeline.page(title, rows, began, now)


def _as_dict(
    job: RemoteJob, status: JobStatus, attempts: Attempts, told: GroupRows | ArrayRows | None
) -> dict[str, Any]:
    return {
        "job": job.name,
        "id": job.id,
        "handle": registry.handle(job.id),
        "state": status.state.value,
        "reason": status.reason.value,
        "message": status.message,
        "node": status.node,
        "attempt": status.attempt,
        "waits_for": list(status.waits_for),
        "after": list(job.after),
        "attempts": [
            {
                "id": attempt.submission_id,
                "state": JobState.LOST.value if _is_lost(attempt, status) else attempt.state,
                "reason": attempt.reason,
                "node": attempt.node,
                "posted_at": attempt.posted_at,
                "running_at": attempt.running_at,
                "ended_at": attempt.ended_at,
                "exit_code": attempt.exit_code,
            }
            for attempt in attempts.values()
        ],
        **(told or {"waits_for_room": _waits_for_room(status)}),
    }


def _waits_for_room(status: JobStatus) -> str:
    """The resources that a task waits for; empty if it waits for none."""
    explained = status.reason in (Reason.ROOM, Reason.UNSCHEDULABLE)
    return status.detail if explained and status.state is JobState.PENDING else ""


def _since(status: JobStatus, attempts: Attempts, now: float) -> str:
    """Time since the newest attempt got its state; empty if that was not seen.

    Of one that runs, and that nobody saw begin, it is when it was handed over; of one that is lost,
    when it was seen last.
    """
    if not attempts:
        return ""
    last = list(attempts.values())[-1]
    at = last.running_at or last.posted_at
    if status.state is JobState.LOST and last.ended_at is None:
        at = last.seen_at or at  # when it was seen last
    elif status.state.is_terminal:
        at = last.ended_at or 0.0
    return f"{timeline.length(max(0, int(now - at)))} ago" if at else ""


def _short(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES_MAX])
    more = len(names) - _NAMES_MAX
    return f"{shown} and {more} more" if more > 0 else shown


def _span(number: int, attempt: AttemptRecord, job: RemoteJob, status: JobStatus) -> timeline.Span:
    is_lost = _is_lost(attempt, status)
    return timeline.Span(
        number=number,
        submission_id=attempt.submission_id,
        node=attempt.node,
        posted_at=attempt.posted_at,
        running_at=attempt.running_at,
        ended_at=attempt.ended_at,
        outcome=status.state.value if is_lost else attempt.state,
        reason=attempt.detail or attempt.reason,
        seen_at=_last_seen(attempt, job) if is_lost else None,
    )


def _last_seen(attempt: AttemptRecord, job: RemoteJob) -> float | None:
    """When an attempt was seen going on last, in seconds since the epoch: by a look, or by the last
    line of its log, if its cluster left that."""
    moments = [path.stat().st_mtime for path in job.left_logs()]
    return max([*moments, *([attempt.seen_at] if attempt.seen_at else [])], default=None)


def _is_lost(attempt: AttemptRecord, status: JobStatus) -> bool:
    """Whether it was not over at the last look, and now its end cannot be found out."""
    return status.state is JobState.LOST and not JobState(attempt.state).is_terminal


def _array_lines(job: RemoteJob, array: ArrayRows, has_failures_in_message: bool = False) -> Group:
    """One line for an array, and one for each of the first elements that failed.

    Args:
        job: the array.
        array: what is known of it.
        has_failures_in_message: its message names these elements.
    """
    counts = ", ".join(f"{array[name]} {name}" for name in _ELEMENT_STATES if array[name])
    pace = ""
    if array["running"] and array["left_s"] is not None:
        left = timeline.length(round(array["left_s"]))
        pace = f"; {array['elements_per_s']:.3g} elements/s, about {left} left"
    lines = [Text(f"\n{job.name} has {array['elements']} elements: {counts}{pace}")]
    if not has_failures_in_message:
        lines += [Text(line) for line in failure_lines(array)]
    return Group(*lines)


def _roles_table(job: str, group: GroupRows) -> Group:
    """One line for every replica of a group."""
    lines: list[Any] = [Text(f"\n{job} is {group['phase']}")]
    if group.get("waits_for_room"):
        lines.append(Text(f"waiting for room: {group['waits_for_room']}"))
    lines += [Text(words) for words in not_ready(group)]
    table = Table("role", "state", "exit code", "node", "address", box=None, pad_edge=False)
    for row in group["roles"]:
        code = "" if row["exit_code"] is None else str(row["exit_code"])
        kind = " (service)" if row["service"] else ""
        name = f"{row['role']}/{row['replica']}{kind}"
        table.add_row(Text(name), row["state"], code, row["host"], row["address"])
    return Group(*lines, table)
