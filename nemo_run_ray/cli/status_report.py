"""The reports of ``nemo-run-ray status`` and ``timeline``: observe, then render."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from nemo_run_ray.errors import NemoRunRayError, shown
from nemo_run_ray.experiment.dispatch import Snapshot
from nemo_run_ray.experiment.job import (
    RemoteJob,
    failure_lines,
    jobs_of,
    not_ready,
    with_begin_times,
)
from nemo_run_ray.experiment.store import experiments, store_of
from nemo_run_ray.nemo import registry
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
#: Jobs whose names a cell shows before it only counts them.
_NAMES_MAX = 3
#: The states of an array's elements, in the order of their parts of a bar.
ELEMENT_STATES = ("succeeded", "failed", "cancelled", "running", "waiting")
#: Up to this many jobs all dependencies are drawn; beyond, those of the chosen job.
ALL_LINKS_MAX = 40
#: Percents of the axis that the least bar has.
_BAR_MIN = 0.12
_TICKS_MAX = 9
_DAY_S = 86400
_STEPS_S = (
    *(0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800),
    *(3600, 7200, 10800, 21600, 43200, *(_DAY_S * 2**power for power in range(20))),
)
#: A job, or an attempt of one, as ``status --json`` has it.
Row = Mapping[str, Any]


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
    rows: list[dict[str, Any]]

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

        def complete(job: RemoteJob, row: Row) -> None:
            seen = with_begin_times(job, job.attempts_in(self.snapshot)).values()
            for attempt, record in zip(row["attempts"], seen, strict=True):
                attempt["running_at"] = record.running_at
                if attempt["state"] == JobState.LOST.value:
                    # The last line of the log that its cluster has kept.
                    moments = [path.stat().st_mtime for path in job.left_logs()]
                    attempt["seen_at"] = max(moments, default=None)

        with ThreadPoolExecutor(8) as pool:  # each may ask for end records
            list(pool.map(complete, (job for job, _ in self.seen), self.rows))

    def table(self, now: float) -> Group:
        """Everything for people; ``now`` in seconds since the epoch."""
        names = ("job", "state", "reason", "attempt", "node", "since", "waits for")
        lines: list[tuple[str | Text, ...]] = []
        parts: list[RenderableType] = []
        troubles: dict[tuple[str, ...], list[tuple[str, str]]] = {}  # many jobs may share one
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
                what = (row["reason"], status.detail, status.tail)
                troubles.setdefault(what, []).append((job.name, status.message))
            if "roles" in row:
                parts += _group_lines(row)
            if "elements" in row:
                parts += _array_lines(row)
                parts += failure_lines(row)  # type: ignore[arg-type]
        for shared in troubles.values():
            parts.append(f"\n{_short([name for name, _ in shared])}: {shared[0][1]}")
        table = Table(box=None, pad_edge=False)
        used = [column for column in range(len(names)) if any(line[column] for line in lines)]
        for column in used:
            table.add_column(names[column])
        for line in lines:
            table.add_row(*(line[column] for column in used))
        return Group(table, *parts)


def observe(jobs: Sequence[RemoteJob]) -> StatusReport:
    """Look at jobs of any experiments; nothing is written."""
    snapshot = Snapshot()
    seen = [(job, job.status_in(snapshot)) for job in jobs]
    return StatusReport(seen, snapshot, [_row(*one, snapshot) for one in seen])


def _row(job: RemoteJob, status: JobStatus, snapshot: Snapshot) -> dict[str, Any]:
    attempts = []
    is_away = status.reason in (Reason.UNREACHABLE, Reason.CLUSTER_GONE)
    hosts = job.hosts_in(snapshot) if status.node and not is_away else {}
    for attempt in job.attempts_in(snapshot).values():
        row = {"id": attempt.submission_id, **asdict(attempt), "seen_at": None}
        row["host"] = hosts.get(attempt.node)
        if status.state is JobState.LOST and not JobState(attempt.state).is_terminal:
            # It is lost with its job, because its end was not seen.
            row["state"] = JobState.LOST.value
        attempts.append(row)
    explained = status.reason in (Reason.ROOM, Reason.UNSCHEDULABLE)
    waits_for_room = status.detail if explained and status.state is JobState.PENDING else ""
    return {
        "job": job.name,
        "id": job.id,
        "handle": registry.handle(job.id),
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


def experiment_rows(everything: bool, now: float) -> list[dict[str, Any]]:
    """The experiments of this home, the newest first.

    Args:
        everything: also those all of whose jobs have ended.
        now: in seconds since the epoch.
    """
    found: dict[Path, list[RemoteJob]] = {}
    for folder in experiments():
        try:
            found[folder] = jobs_of(folder)
        except NemoRunRayError as error:  # the others are shown all the same
            log.warning("The experiment %s is left out: %s", folder.name, error)
    looked_at = {
        folder: jobs
        for folder, jobs in found.items()
        if jobs and (everything or not all(job.record.terminal for job in jobs))
    }
    states: dict[Path, Counter[str]] = {folder: Counter() for folder in looked_at}
    for job, status in observe([job for jobs in looked_at.values() for job in jobs]).seen:
        states[job.record.exp_dir][status.state.value] += 1
    return [
        {
            "experiment": folder.name,
            "title": folder.parent.name,
            "jobs": [f"{count} {name}" for name, count in states[folder].most_common()],
            "began_at": began_at,
            "began": f"{length(now - began_at)} ago",
            "cluster": " ".join(dict.fromkeys(job.cluster.title for job in jobs)),
        }
        for folder, jobs in looked_at.items()
        for began_at in [store_of(folder).ledger.began_at() or now]
        if everything or any(not JobState(name).is_terminal for name in states[folder])
    ]


def timeline_page(jobs: Sequence[RemoteJob], now: float) -> str:
    """The page of ``nemo-run-ray timeline``."""
    report = observe(jobs)
    report.complete()
    folder = jobs[0].record.exp_dir
    return page(folder.name, report.rows, store_of(folder).ledger.began_at() or now, now)


def since(row: Row, now: float) -> str:
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


def _array_lines(array: Row) -> list[str]:
    counts = ", ".join(f"{array[state]} {state}" for state in ELEMENT_STATES if array[state])
    pace = ""
    if array["running"] and array["left_s"] is not None:
        remaining = length(round(array["left_s"]))
        pace = f"; {array['elements_per_s']:.3g} elements/s, about {remaining} left"
    return [f"\n{array['job']} has {array['elements']} elements: {counts}{pace}"]


def _group_lines(group: Row) -> list[RenderableType]:
    """One line for every replica of a group."""
    lines: list[RenderableType] = [f"\n{group['job']} is {group['phase']}"]
    if group.get("waits_for_room"):
        lines.append(f"waiting for room: {group['waits_for_room']}")
    table = Table("role", "state", "exit code", "node", "address", box=None, pad_edge=False)
    for row in group["roles"]:
        code = "" if row["exit_code"] is None else str(row["exit_code"])
        name = f"{row['role']}/{row['replica']}{' (service)' if row['service'] else ''}"
        table.add_row(name, row["state"], code, row["host"], row["address"])
    return [*lines, *not_ready(group), table]  # type: ignore[arg-type]


# The page of the timeline: pure, without a clock or a network, and readable without its script.
# The markup is in ``page.html.jinja``, whose environment cleans and escapes every value, so that
# texts of others cannot reach the page in any other way.


def page(title: str, rows: Sequence[Row], began_at: float, now: float) -> str:
    """The whole page.

    Args:
        title: of the experiment.
        rows: its jobs as ``status --json`` has them, in the order in which they are shown.
        began_at: when the experiment was submitted, in seconds since 1970.
        now: the moment that the page shows.
    """
    is_live = any(map(_is_live, rows))
    # A cluster's clock may be off by much: all moments that it gave are on the axis.
    moments = [began_at, now] if is_live else [began_at]
    for attempt in (attempt for row in rows for attempt in row["attempts"]):
        times = (attempt[f"{name}_at"] for name in ("posted", "running", "ended", "seen"))
        moments += [at for at in times if at is not None]
    start = min(moments)
    span_s = max(1.0, max(moments) - start)

    def x(at: float, most: float = 100.0) -> float:
        """The place of a moment, in percent of the axis."""
        return min(most, max(0.0, (at - start) / span_s * 100))

    def place(begin: float, end: float) -> tuple[str, str]:
        """Left edge and width of a bar, which can be seen whatever its length."""
        left = x(begin, 100 - _BAR_MIN)
        return f"{left:.2f}%", f"{max(_BAR_MIN, x(end) - left):.2f}%"

    step = next(step for step in _STEPS_S if span_s / step <= _TICKS_MAX)
    ticks = [number * step for number in range(int(span_s / step) + 1)]
    style, script = (
        resources.files("nemo_run_ray.cli").joinpath(name).read_text(encoding="utf-8")
        for name in ("page.css", "page.js")
    )
    environment = Environment(
        loader=PackageLoader("nemo_run_ray.cli", ""),
        autoescape=True,
        finalize=_clean,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"utc": utc, "duration": length, "sha256": _sha256, "outcome": _outcome}
    environment.filters["x"] = lambda at: f"{x(at):.2f}%"
    return environment.get_template("page.html.jinja").render(
        has_all_links=len(rows) <= ALL_LINKS_MAX,
        style=style,
        script=script,
        title=title,
        is_live=is_live,
        began_at=began_at,
        now=now,
        start_s=start,
        span_s=span_s,
        ticks=ticks,
        place=place,
        jobs=_jobs(rows, began_at, start + span_s),
    )


def _jobs(rows: Sequence[Row], began_at: float, end: float) -> list[dict[str, Any]]:
    """The rows as the template takes them: with their bars, and links to each other."""
    numbers = {row["job"]: number for number, row in enumerate(rows)}
    jobs: list[dict[str, Any]] = []
    #: Of each job the end of its last bar; ``None`` for one that has none.
    ends: list[float | None] = []
    for number, row in enumerate(rows):
        attempts = [_with_moments(attempt, end) for attempt in row["attempts"]]
        last = max((attempt["ended"] for attempt in attempts), default=None)
        ends.append(end if _is_live(row) else last)
        names = [name for name in dict.fromkeys(row["after"]) if name != row["job"]]
        waits = f"for {len(row['waits_for'])} job(s)" if row["waits_for"] else ""
        jobs.append(
            {
                **row,
                "number": number,
                "state": row["state"].lower(),
                "said": _said(row["state"], row["reason"] or waits),
                "attempts": attempts,
                "above": [numbers[name] for name in names if name in numbers],
                "strangers": [name for name in names if name not in numbers],
                "needed_by": [],
            }
        )
    for number, job in enumerate(jobs):
        # It waits for others until the last of them has ended.
        ready_at = max([began_at, *(ends[above] or began_at for above in job["above"])])
        attempts = job["attempts"]
        job["first"] = attempts[0]["posted"] if attempts else ends[number] or ready_at
        # A job below that was cancelled with this one has its mark where this one's is.
        ends[number] = job["end"] = ends[number] or ready_at
        job["bars"] = _bars(job, began_at, ready_at, end if _is_live(rows[number]) else None)
        job["runs_after"] = [*(jobs[above] for above in job["above"]), *job["strangers"]]
        for above in job["above"]:
            jobs[above]["needed_by"].append(job)
    return jobs


def _with_moments(attempt: Row, end: float) -> dict[str, Any]:
    """With the moments posted, running and ended, in this order whatever the clocks say."""
    posted = attempt["posted_at"]
    ended = max(posted, attempt["ended_at"] or attempt["seen_at"] or end)
    is_pending = attempt["ended_at"] is None and attempt["state"] == "PENDING"
    running = attempt["running_at"] or (ended if is_pending else posted)
    running = min(max(posted, running), ended)
    return {**attempt, "posted": posted, "running": running, "ended": ended}


def _bars(
    job: Row, began_at: float, ready_at: float, live_until: float | None
) -> list[tuple[str, float, float, str]]:
    """All bars of a job, in order: kind, begin, end and a text. Every attempt has one."""
    attempts, last = job["attempts"], job["first"]
    waits: list[tuple[str, float, float, str]] = []
    if attempts or live_until:
        ready_at = min(ready_at, last)
        waits.append(("early", min(began_at, last), ready_at, "waiting for other jobs"))
        waits.append(("waiting", ready_at, last, "waiting for its turn"))
    bars = [bar for bar in waits if bar[1] < bar[2]]
    for number, attempt in enumerate(attempts, start=1):
        posted, running, ended = attempt["posted"], attempt["running"], attempt["ended"]
        state = attempt["state"]
        which = f"attempt {number} of {len(attempts)}: {_outcome(attempt)}"
        if last < posted:
            bars.append(("waiting", last, posted, "waiting for the next attempt"))
        if posted < running or state == "PENDING":
            bars.append((f"pending {state.lower()}", posted, running, f"{which}\npending"))
        if running < ended or state != "PENDING":
            text = "running" if attempt["running_at"] else "running, start not seen"
            bars.append((f"running {state.lower()}", running, ended, f"{which}\n{text}"))
        last = ended
    if live_until and last < live_until:
        bars.append(("waiting", last, live_until, "waiting after its last attempt"))
    total = sum(job.get(state, 0) for state in ELEMENT_STATES)
    if total and attempts:  # an array has a band below the bar of its last attempt
        at, per_element = attempts[-1]["running"], (last - attempts[-1]["running"]) / total
        for state in ELEMENT_STATES:
            if count := job[state]:
                text = f"{count} of {total} elements: {state}"
                bars.append((f"element {state}", at, at + count * per_element, text))
                at += count * per_element
    return bars


def _is_live(row: Row) -> bool:
    return not JobState(row["state"]).is_terminal


def _outcome(attempt: Row) -> str:
    return _said(attempt["state"], attempt["detail"] or attempt["reason"])


def _said(state: str, why: str) -> str:
    word = state.lower()
    return f"{word}: {why}" if why and why.lower() != word else word


def length(seconds: float) -> str:
    """A length of time in at most two units: ``3.2s``, ``1m 5s``, ``2h``, ``3d 4h``."""
    if seconds < 9.95:
        return f"{seconds:.1f}".removesuffix(".0") + "s"
    whole = round(seconds)
    days, hours, minutes = whole // _DAY_S, whole // 3600 % 24, whole // 60 % 60
    parts = [(days, "d"), (hours, "h"), (minutes, "m"), (whole % 60, "s")]
    first = next(place for place, (count, _) in enumerate(parts) if count)
    return " ".join(f"{count}{unit}" for count, unit in parts[first : first + 2] if count)


def utc(at: float) -> str:
    return datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def _clean(value: object) -> object:
    """A text without control characters; markup, which has ``__html__``, was cleaned before."""
    is_text = isinstance(value, str) and not hasattr(value, "__html__")
    return shown(str(value)) if is_text else value


def _sha256(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
