"""The report of ``nemo-run-ray status`` and ``timeline``: observe, then render."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from nemo_run_ray.cli import timeline
from nemo_run_ray.experiment.dispatch import Snapshot
from nemo_run_ray.experiment.job import (
    FIRST_FAILURES,
    RemoteJob,
    failure_lines,
    not_ready,
    with_begin_times,
)
from nemo_run_ray.experiment.store import Attempts, store_of
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


@dataclass(frozen=True)
class ObservedJob:
    """One look at a job: its status, what the driver of a group or array reports, its attempts."""

    job: RemoteJob
    status: JobStatus
    group: GroupRows | None
    array: ArrayRows | None
    attempts: Attempts

    def as_dict(self) -> dict[str, Any]:
        status = self.status
        rows = self.group or self.array
        return {
            "job": self.job.name,
            "id": self.job.id,
            "handle": registry.handle(self.job.id),
            "state": status.state.value,
            "reason": status.reason.value,
            "message": status.message,
            "node": status.node,
            "attempt": status.attempt,
            "waits_for": list(status.waits_for),
            "after": list(self.job.after),
            "attempts": [
                {
                    "id": attempt.submission_id,
                    **asdict(attempt),
                    "state": self._state_of(attempt.state),
                }
                for attempt in self.attempts.values()
            ],
            **(rows or {"waits_for_room": self._waits_for_room()}),
        }

    def _state_of(self, attempt_state: str) -> str:
        """The state of an attempt, which is lost with its job when its end was not seen."""
        is_lost = self.status.state is JobState.LOST and not JobState(attempt_state).is_terminal
        return JobState.LOST.value if is_lost else attempt_state

    def _waits_for_room(self) -> str:
        """The resources that a task waits for; empty if it waits for none."""
        explained = self.status.reason in (Reason.ROOM, Reason.UNSCHEDULABLE)
        return self.status.detail if explained and self.status.state is JobState.PENDING else ""

    def timeline_row(self) -> dict[str, Any]:
        """The same for the timeline, with what takes longer to find out."""
        row = self.as_dict()
        attempts = with_begin_times(self.job, self.attempts).values()
        for shown, attempt in zip(row["attempts"], attempts, strict=True):
            shown["running_at"], shown["seen_at"] = attempt.running_at, None
            if shown["state"] != attempt.state:
                # Last seen by a look, or by the last line of the log that its cluster has left.
                moments = [path.stat().st_mtime for path in self.job.left_logs()]
                shown["seen_at"] = max([*moments, attempt.seen_at or 0.0]) or None
        return row


@dataclass(frozen=True)
class StatusReport:
    """One look at jobs of any experiments."""

    jobs: Sequence[ObservedJob]
    snapshot: Snapshot

    @property
    def seen(self) -> list[tuple[RemoteJob, JobStatus]]:
        """The argument of ``record``."""
        return [(one.job, one.status) for one in self.jobs]

    @property
    def is_over(self) -> bool:
        return all(one.status.state.is_terminal for one in self.jobs)

    @property
    def exit_code(self) -> int:
        """0 as long as all jobs wait, run or have succeeded."""
        states = {one.status.state for one in self.jobs}
        return next((code for state, code in _EXIT_CODES.items() if state in states), 0)

    def as_json(self) -> str:
        return json.dumps([one.as_dict() for one in self.jobs], indent=1)

    def table(self, now: float) -> Group:
        """Everything for people; ``now`` in seconds since the epoch."""
        names = ("job", "state", "reason", "attempt", "node", "since", "waits for")
        table = Table(*names, box=None, pad_edge=False)
        groups: list[Group] = []
        troubles: dict[tuple[str, ...], list[tuple[str, str]]] = {}  # many jobs may share one
        for one in self.jobs:
            job, status = one.job, one.status
            table.add_row(
                job.name,
                Text(status.state.value, _COLORS.get(status.state, "")),
                status.reason.value,
                str(status.attempt) if status.attempt and not job.is_direct else "",
                status.node[:12],
                _since(status, one.attempts, now),
                _short(status.waits_for),
            )
            if status.reason.is_trouble or status.reason is Reason.ROOM:
                what = (status.reason.value, status.detail, status.tail)
                troubles.setdefault(what, []).append((job.name, status.message))
            if one.group:
                groups.append(_roles_table(job.name, one.group))
            if one.array:
                groups.append(_array_lines(job.name, one.array, FIRST_FAILURES in status.detail))
        details = [
            f"\n{_short([name for name, _ in shared])}: {shared[0][1]}"
            for shared in troubles.values()
        ]
        return Group(table, *groups, *details)


def observe(jobs: Sequence[RemoteJob]) -> StatusReport:
    """Look at jobs of any experiments; nothing is written."""
    snapshot = Snapshot()
    statuses = [job.status_in(snapshot) for job in jobs]
    observed = [
        ObservedJob(
            job, status, job.roles(status), job.array_rows(status), job.attempts_in(snapshot)
        )
        for job, status in zip(jobs, statuses, strict=True)
    ]
    return StatusReport(observed, snapshot)


def timeline_page(jobs: Sequence[RemoteJob], now: float) -> str:
    """The page of ``nemo-run-ray timeline``."""
    folder = jobs[0].record.exp_dir
    with ThreadPoolExecutor(8) as pool:  # each may ask for end records
        rows = list(pool.map(ObservedJob.timeline_row, observe(jobs).jobs))
    return timeline.page(folder.name, rows, store_of(folder).ledger.began_at() or now, now)


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
        at = last.seen_at or at
    elif status.state.is_terminal:
        at = last.ended_at or 0.0
    return f"{timeline.length(max(0, int(now - at)))} ago" if at else ""


def _short(names: Sequence[str]) -> str:
    more = len(names) - _NAMES_MAX
    return ", ".join(names[:_NAMES_MAX]) + (f" and {more} more" if more > 0 else "")


def _array_lines(job: str, array: ArrayRows, has_failures_in_message: bool) -> Group:
    """One line for an array, and one for each of the first elements that failed."""
    counts = ", ".join(
        f"{array[state]} {state}"  # type: ignore[literal-required]
        for state in timeline.ELEMENT_STATES
        if array[state]  # type: ignore[literal-required]
    )
    pace = ""
    if array["running"] and array["left_s"] is not None:
        left = timeline.length(round(array["left_s"]))
        pace = f"; {array['elements_per_s']:.3g} elements/s, about {left} left"
    failures = [] if has_failures_in_message else failure_lines(array)
    head = f"\n{job} has {array['elements']} elements: {counts}{pace}"
    return Group(head, *failures)


def _roles_table(job: str, group: GroupRows) -> Group:
    """One line for every replica of a group."""
    lines = [f"\n{job} is {group['phase']}"]
    if group.get("waits_for_room"):
        lines.append(f"waiting for room: {group['waits_for_room']}")
    table = Table("role", "state", "exit code", "node", "address", box=None, pad_edge=False)
    for row in group["roles"]:
        code = "" if row["exit_code"] is None else str(row["exit_code"])
        kind = " (service)" if row["service"] else ""
        name = f"{row['role']}/{row['replica']}{kind}"
        table.add_row(name, row["state"], code, row["host"], row["address"])
    return Group(*lines, *not_ready(group), table)
