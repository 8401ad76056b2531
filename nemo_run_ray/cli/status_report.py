"""The reports of ``nemo-run-ray status`` and ``timeline``: observe, then render."""

from __future__ import annotations

import json
import logging
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from itertools import accumulate

from jinja2 import Environment, PackageLoader, StrictUndefined
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from nemo_run_ray import nemo
from nemo_run_ray.errors import NemoRunRayError, shown
from nemo_run_ray.experiment.dispatch import Snapshot
from nemo_run_ray.experiment.job import (
    RemoteJob,
    jobs_of,
    not_ready,
)
from nemo_run_ray.experiment.store import experiments, store_of
from nemo_run_ray.remote.spec import Json
from nemo_run_ray.remote.status import JobState, JobStatus, Reason

log = logging.getLogger(__name__)

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
#: Kind, state, begin, end and a text.
_Bar = tuple[str, str, float, float, str]
#: Jobs whose names a cell shows before it only counts them.
_NAMES_MAX = 3
#: Reasons of attempts whose command did not start.
_NEVER_RAN = (Reason.NOT_PLACED, Reason.START_TIMEOUT, Reason.RUNTIME_ENV)


@dataclass(frozen=True)
class StatusReport:
    """One look at jobs of any experiments.

    Attributes:
        seen: the jobs and their statuses, for ``record``.
        snapshot: the look at the clusters from which they come.
        rows: the same as ``status --json`` has them.
    """

    seen: list[tuple[RemoteJob, JobStatus]]
    snapshot: Snapshot
    rows: list[Json]

    @property
    def is_over(self) -> bool:
        return all(status.state.is_terminal for _, status in self.seen)

    @property
    def exit_code(self) -> int:
        """0 as long as all jobs wait, run or have succeeded."""
        states = {status.state for _, status in self.seen}
        return next((code for state, code in _EXIT_CODES.items() if state in states), 0)

    def as_json(self) -> str:
        self.complete()
        return json.dumps(self.rows, indent=1)

    def complete(self) -> None:
        """Add to the rows what takes longer to find out: when attempts began, or were seen last."""

        def complete(job: RemoteJob, row: Json) -> None:
            seen = job.with_begin_times(job.attempts_in(self.snapshot)).values()
            for attempt, record in zip(row["attempts"], seen, strict=True):
                attempt["running_at"] = record.running_at
                if attempt["state"] == JobState.LOST:
                    # The last line of the log that its cluster has kept.
                    with suppress(NemoRunRayError):
                        moments = [path.stat().st_mtime for path in job.left_logs()]
                        attempt["seen_at"] = max(moments, default=None)

        with ThreadPoolExecutor(8) as pool:  # each may ask for end records
            list(pool.map(complete, (job for job, _ in self.seen), self.rows))

    def table(self, now: float) -> Group:
        """Everything for people; ``now`` in seconds since the epoch."""
        lines: list[tuple[str | Text, ...]] = [
            ("job", "state", "reason", "attempt", "node", "since", "waits for")
        ]
        parts: list[RenderableType] = []
        # Many jobs may share one.
        troubles = defaultdict[tuple[str, ...], list[tuple[str, str]]](list)
        for (job, status), row in zip(self.seen, self.rows, strict=True):
            last = row["attempts"][-1] if row["attempts"] else {"exit_code": None}
            has_code = status.reason is Reason.EXIT_CODE and last["exit_code"] is not None
            lines.append(
                (
                    job.name,
                    Text(row["state"], _COLORS.get(status.state, "")),
                    f"{row['reason']} {last['exit_code']}" if has_code else row["reason"],
                    str(status.attempt) if status.attempt and not job.is_direct else "",
                    row["host"] or "",
                    since(row, now),
                    _short(status.waits_for),
                )
            )
            if status.reason.is_trouble or status.reason is Reason.ROOM:
                same = troubles[row["reason"], status.detail, status.tail]
                same.append((job.name, status.message))
            if "roles" in row:
                parts.append(f"\n{job.name} is {row['phase']}")
                if row.get("waits_for_room"):
                    parts.append(f"waiting for room: {row['waits_for_room']}")
                roles = _table("role", "state", "exit code", "node", "address")
                for role in row["roles"]:
                    code = "" if role["exit_code"] is None else str(role["exit_code"])
                    is_service = " (service)" if role["service"] else ""
                    name = f"{role['role']}/{role['replica']}{is_service}"
                    roles.add_row(name, role["state"], code, role["host"], role["address"])
                parts += [*not_ready(row), roles]  # type: ignore[arg-type]
            if "elements" in row:
                states = ("succeeded", "failed", "cancelled", "running", "waiting")
                counts = [f"{row[state]} {state}" for state in states if row[state]]
                pace = ""
                if row["running"] and row["left_s"] is not None:
                    left = length(round(row["left_s"]))
                    pace = f"; {row['elements_per_s']:.3g} elements/s, about {left} left"
                parts.append(
                    f"\n{job.name} has {row['elements']} elements: {', '.join(counts)}{pace}"
                )
                parts += [
                    f"  element {index}: {words or f'exit code {code}'}"
                    for index, code, words in row["failures"]
                ]
                if row["failures"]:
                    parts.append(f"  Their output: nemo-run-ray logs {job.id} --element N")
        for shared in troubles.values():
            parts.append(f"\n{_short([name for name, _ in shared])}: {shared[0][1]}")
        used = [column for column in zip(*lines, strict=True) if any(column[1:])]
        header, *cells = zip(*used, strict=True)
        table = _table(*map(str, header))
        for line in cells:
            table.add_row(*line)
        return Group(table, *parts)


def _table(*names: str) -> Table:
    """A table that folds long words where the terminal is narrow."""
    columns = (Column(name, overflow="fold") for name in names)
    return Table(*columns, box=None, pad_edge=False)


def observe(jobs: Sequence[RemoteJob]) -> StatusReport:
    """Look at jobs of any experiments; nothing is written."""
    snapshot = Snapshot()
    seen = [(job, job.status_in(snapshot)) for job in jobs]
    return StatusReport(seen, snapshot, [_row(*one, snapshot) for one in seen])


def _row(job: RemoteJob, status: JobStatus, snapshot: Snapshot) -> Json:
    attempts = []
    is_away = status.reason in (Reason.UNREACHABLE, Reason.CLUSTER_GONE)
    hosts = job.hosts_in(snapshot) if status.node and not is_away else {}
    for attempt in job.attempts_in(snapshot).values():
        state = attempt.state
        if status.state is JobState.LOST and not state.is_terminal:
            state = JobState.LOST  # with its job, because its end was not seen
        attempts.append(
            {
                "id": attempt.submission_id,
                **asdict(attempt),
                "seen_at": None,
                "state": state.value,
                "host": hosts.get(attempt.node),
            }
        )
    explained = status.reason in (Reason.ROOM, Reason.UNSCHEDULABLE)
    waits_for_room = status.detail if explained and status.state is JobState.PENDING else ""
    return {
        "job": job.name,
        "id": job.id,
        "handle": nemo.handle(job.id),
        "state": status.state.value,
        "reason": status.reason.value,
        "message": status.message,
        "node": status.node,
        "host": hosts.get(status.node),
        "attempt": status.attempt,
        "waits_for": list(status.waits_for),
        "after": list(job.after),
        "attempts": attempts,
        **(job.roles(status) or job.array_rows(status) or {"waits_for_room": waits_for_room}),
    }


def experiment_rows(everything: bool, now: float) -> list[Json]:
    """The experiments of this home, the newest first.

    Args:
        everything: also those all of whose jobs have ended.
        now: in seconds since the epoch.
    """
    snapshot, rows = Snapshot(), []
    for folder in experiments():
        try:
            jobs = jobs_of(folder)
        except NemoRunRayError as error:  # the others are shown all the same
            log.warning("The experiment %s is left out: %s", folder.name, error)
            continue
        if not everything and all(job.record.terminal for job in jobs):
            continue
        states = Counter(job.status_in(snapshot).state for job in jobs)
        if states and (everything or not all(state.is_terminal for state in states)):
            began_at = store_of(folder).ledger.began_at() or now
            rows.append(
                {
                    "experiment": folder.name,
                    "title": folder.parent.name,
                    "jobs": [f"{count} {state.value}" for state, count in states.most_common()],
                    "began_at": began_at,
                    "began": f"{length(now - began_at).partition(' ')[0]} ago",
                    "cluster": " ".join(dict.fromkeys(job.cluster.title for job in jobs)),
                }
            )
    return rows


def since(row: Json, now: float) -> str:
    """Time since the newest attempt got its state; empty if that was not seen."""
    if not row["attempts"]:
        return ""
    last, state = row["attempts"][-1], JobState(row["state"])
    at = last["ended_at"] or last["seen_at"]
    if state is JobState.LOST or not state.is_terminal:
        at = at or last["running_at"] or last["posted_at"]
    return f"{length(max(0, int(now - at)))} ago" if at else ""


def _short(names: Sequence[str]) -> str:
    more = len(names) - _NAMES_MAX
    return ", ".join(names[:_NAMES_MAX]) + (f" and {more} more" if more > 0 else "")


def page(title: str, rows: Sequence[Json], began_at: float, now: float) -> str:
    """The page of ``nemo-run-ray timeline``, in which every value is cleaned and escaped.

    Args:
        title: of the experiment.
        rows: its jobs as ``status --json`` has them, in the order in which they are shown.
        began_at: when the experiment was submitted, in seconds since 1970.
        now: the moment that the page shows.
    """
    is_live = not all(JobState(row["state"]).is_terminal for row in rows)
    # A cluster's clock may be off by much: all moments that it gave are on the axis.
    moments = [began_at, now] if is_live else [began_at]
    for row in rows:
        for attempt in row["attempts"]:
            times = (attempt[f"{name}_at"] for name in ("posted", "running", "ended", "seen"))
            moments += filter(None, times)
    start, end = min(moments), max(moments)
    span_s = max(1.0, end - start)
    jobs = [{**row, "bars": _bars(row, began_at, end)} for row in rows]
    environment = Environment(
        loader=PackageLoader("nemo_run_ray.cli", ""),
        autoescape=True,
        finalize=lambda value: shown(value) if isinstance(value, str) else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "utc": _utc,
        "duration": length,
        "outcome": _outcome,
        "percent": lambda seconds: f"{seconds / span_s * 100:.2f}%",
    }
    return environment.get_template("page.html.jinja").render(
        title=title, jobs=jobs, is_live=is_live, start=start, span_s=span_s, now=now
    )


def _bars(row: Json, began_at: float, end: float) -> list[_Bar]:
    """All bars of a job, in order. Every attempt has one."""
    bars = []
    all_posted = [attempt["posted_at"] for attempt in row["attempts"]]
    last = min([began_at, *all_posted])
    for number, attempt in enumerate(row["attempts"], start=1):
        state = attempt["state"]
        never_ran = not attempt["running_at"] and attempt["reason"] in _NEVER_RAN
        is_pending = never_ran or state == "PENDING"
        which = f"attempt {number}: {_outcome(attempt)}"
        ended = attempt["ended_at"] or attempt["seen_at"] or min([end, *all_posted[number:]])
        running = attempt["running_at"] or (ended if is_pending else 0)
        # In this order, whatever the clocks say.
        _, posted, running, ended = accumulate((last, attempt["posted_at"], running, ended), max)
        if last < posted:
            bars.append(("waits", "", last, posted, "waiting"))
        if is_pending or posted < running:
            bars.append(("pends", state, posted, running, f"{which}, pending"))
        if not is_pending:
            seen = "running" if attempt["running_at"] else "running, start not seen"
            bars.append(("runs", state, running, ended, f"{which}, {seen}"))
        last = ended
    if last < end and not JobState(row["state"]).is_terminal:
        bars.append(("waits", "", last, end, "waiting"))
    return bars


def _outcome(row: Json) -> str:
    """State and reason of a job, or of an attempt."""
    state, why = row["state"].lower(), row.get("detail") or row["reason"]
    return f"{state}: {why}" if why and why.lower() != state else state


def length(seconds: float) -> str:
    """A length of time in at most two units: ``3.2s``, ``1m 5s``, ``3d 4h``."""
    for unit_s, unit, below_s, below in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "m"),
        (60, "m", 1, "s"),
    ):
        if seconds >= unit_s:
            return f"{int(seconds // unit_s)}{unit} {int(seconds % unit_s // below_s)}{below}"
    return f"{seconds:.2g}s"


def _utc(at: float | None) -> str:
    if at is None:
        return "not seen"
    return datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
