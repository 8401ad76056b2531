"""What ``nemo-run-ray status`` and ``timeline`` know of an experiment, as plain values."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from nemo_run_ray import plugin, timeline
from nemo_run_ray.chained_job import ChainedJob, dispatcher_lines
from nemo_run_ray.errors import NemoRunRayError
from nemo_run_ray.ledger import Ledger
from nemo_run_ray.remote import story
from nemo_run_ray.remote.decide import Seen, attempts_of, first_id, seen
from nemo_run_ray.remote_job import RemoteJob
from nemo_run_ray.states import JobState, Verdict

_COLORS = {
    JobState.SUCCEEDED: "green",
    JobState.FAILED: "red",
    JobState.LOST: "red",
    JobState.CANCELLED: "yellow",
    JobState.RUNNING: "cyan",
}
#: Jobs whose names a cell shows before it only counts them.
_NAMES_MAX = 3


class View:
    """One look at jobs: verdicts, attempts, and how long they have been where they are."""

    def __init__(self, jobs: Sequence[RemoteJob]) -> None:
        self.jobs = jobs
        self.verdicts = [job.verdict() for job in jobs]
        self.roles = [
            job.roles(verdict) if job.record.is_group else {}
            for job, verdict in zip(jobs, self.verdicts, strict=True)
        ]
        self.attempts = [_attempts(job) for job in jobs]

    @property
    def is_over(self) -> bool:
        return all(verdict.state.is_terminal for verdict in self.verdicts)

    def as_json(self) -> str:
        rows = zip(self.jobs, self.verdicts, self.attempts, self.roles, strict=True)
        return json.dumps([_as_dict(*row) for row in rows], indent=1)

    def table(self, now: float) -> Group:
        """Everything for people; ``now`` in seconds since the epoch."""
        names = ("job", "state", "reason", "attempt", "node", "since", "waits for")
        table = Table(*names, box=None, pad_edge=False)
        details: list[Text] = []
        rows = zip(self.jobs, self.verdicts, self.attempts, self.roles, strict=True)
        for job, verdict, attempts, _ in rows:
            name = job.record.job
            table.add_row(
                Text(name),
                Text(verdict.state.value, _COLORS.get(verdict.state, "")),
                verdict.reason.value,
                str(verdict.attempt) if isinstance(job, ChainedJob) and verdict.attempt else "",
                verdict.node[:12],
                _since(verdict, attempts, now),
                Text(_short(verdict.waits_for)),
            )
            if verdict.reason.is_trouble:
                details.append(Text(f"\n{name}: {verdict.message}"))
        groups = [
            _roles_table(job.record.job, roles)
            for job, roles in zip(self.jobs, self.roles, strict=True)
            if roles
        ]
        return Group(table, *groups, *details)


def timeline_page(title: str, exp_dir: Path, jobs: Sequence[RemoteJob], now: float) -> str:
    """The page of ``nemo-run-ray timeline``."""
    view = View(jobs)
    began = min((event["at"] for event in Ledger(exp_dir).events()), default=now)
    running = _first_seen_running(jobs)
    rows = [
        timeline.Row(
            name=job.record.job,
            state=verdict.state.value,
            reason=verdict.reason.value,
            message=verdict.message,
            after=_after(job),
            waits_for=verdict.waits_for,
            attempts=tuple(
                _span(name, number, row, running.get(name))
                for number, (name, row) in enumerate(attempts.items(), start=1)
            ),
        )
        for job, verdict, attempts in zip(jobs, view.verdicts, view.attempts, strict=True)
    ]
    return timeline.page(title, rows, began, now)


def _attempts(job: RemoteJob) -> dict[str, Seen]:
    """The attempts of a job by submission id, in their order; claims are none."""
    try:
        own = {n: row for n, row in job.rows().items() if first_id(n) == job.submission_id}
        table = {name: seen(row) for name, row in own.items()}
    except NemoRunRayError:
        return {}  # the cluster is away or gone: the verdict says so
    found = attempts_of([job.submission_id], table)[job.submission_id]
    rows = [found[number] for number in sorted(found)]
    names = [job.attempt_id(number) for number in sorted(found)]
    return {
        name: row
        for name, row in zip(names, rows, strict=True)
        if not row.claim and row.nonce in job.record.nonces
    }


def _as_dict(
    job: RemoteJob, verdict: Verdict, attempts: dict[str, Seen], roles: dict[str, Any]
) -> dict[str, Any]:
    return {
        "job": job.record.job,
        "id": job.submission_id,
        "handle": plugin.handle(job.submission_id),
        "state": verdict.state.value,
        "reason": verdict.reason.value,
        "message": verdict.message,
        "node": verdict.node,
        "attempt": verdict.attempt,
        "waits_for": list(verdict.waits_for),
        "after": list(_after(job)),
        "attempts": [
            {
                "id": name,
                "state": row.verdict.state.value,
                "reason": row.verdict.reason.value,
                "node": row.verdict.node,
                "posted_at": row.posted_at,
                "ended_at": row.ended_at or None,
                "exit_code": row.exit_code,
            }
            for name, row in attempts.items()
        ],
        **roles,
    }


def _after(job: RemoteJob) -> tuple[str, ...]:
    if not isinstance(job, ChainedJob):
        return ()
    links = (link for link in job.chain.spec.links if link.name == job.record.job)
    return tuple(name for link in links for name in link.after)


def _since(verdict: Verdict, attempts: dict[str, Seen], now: float) -> str:
    """How long ago the newest attempt was handed over, or ended."""
    if not attempts:
        return ""
    last = list(attempts.values())[-1]
    at = last.ended_at if verdict.state.is_terminal and last.ended_at else last.posted_at
    return f"{duration(now - at)} ago" if at else ""


def duration(seconds: float) -> str:
    """``45s``, ``12m``, ``3h 05m``, ``2d 4h``."""
    minutes, rest = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}h"
    if hours:
        return f"{hours}h {minutes:02d}m"
    return f"{minutes}m {rest:02d}s" if minutes else f"{rest}s"


def _short(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES_MAX])
    more = len(names) - _NAMES_MAX
    return f"{shown} and {more} more" if more > 0 else shown


def _span(name: str, number: int, row: Seen, running_at: float | None) -> timeline.Attempt:
    return timeline.Attempt(
        number=number,
        submission_id=name,
        node=row.verdict.node,
        posted_at=row.posted_at,
        running_at=running_at,
        ended_at=row.ended_at or None,
        outcome=row.verdict.state.value,
        reason=row.verdict.detail or row.verdict.reason.value,
    )


def _first_seen_running(jobs: Sequence[RemoteJob]) -> dict[str, float]:
    """When each attempt was first seen running, as the dispatchers' logs tell."""
    found: dict[str, float] = {}
    chains = dict.fromkeys(job.chain for job in jobs if isinstance(job, ChainedJob))
    for chain in chains:
        for line in story.parse(dispatcher_lines(chain)):
            if line.state == JobState.RUNNING.value:
                found[line.submission_id] = min(line.at, found.get(line.submission_id, line.at))
    return found


def _roles_table(job: str, group: dict[str, Any]) -> Group:
    """One line for every replica of a group."""
    lines: list[Any] = [Text(f"\n{job} is {group['phase']}")]
    if group["waits_for"]:
        lines.append(Text(f"waiting for room: {group['waits_for']}"))
    table = Table("role", "state", "exit code", "node", "address", box=None, pad_edge=False)
    for one in group["roles"]:
        code = "" if one["exit_code"] is None else str(one["exit_code"])
        kind = " (service)" if one["service"] else ""
        name = f"{one['role']}/{one['replica']}{kind}"
        table.add_row(Text(name), one["state"], code, one["host"], one["address"])
    return Group(*lines, table)
