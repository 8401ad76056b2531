"""The reports of ``nemo-run-ray status`` and ``timeline``: observe, then render."""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from rich.console import Group
from rich.table import Table
from rich.text import Text

from nemo_run_ray.errors import shown
from nemo_run_ray.experiment.dispatch import Snapshot
from nemo_run_ray.experiment.job import (
    FIRST_FAILURES,
    RemoteJob,
    failure_lines,
    not_ready,
    with_begin_times,
)
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
#: All states, in the order in which they are counted.
_STATES = (
    *("FAILED", "LOST", "CANCELLED", "SUCCEEDED"),
    *("RUNNING", "PENDING", "WAITING", "UNKNOWN"),
)
#: The states of an array's elements, in the order of their parts of a bar.
ELEMENT_STATES = ("succeeded", "failed", "cancelled", "running", "waiting")
#: Up to this many jobs all dependencies are drawn; beyond, those of the chosen job.
ALL_LINKS_MAX = 40
#: Pixels of a row, and of its letters, up to a number of jobs.
_SIZES = ((40, 30, 13), (150, 22, 12), (10**9, 17, 11))
#: Percents of the axis: the least bar, and the room that a mark or a number inside it needs.
_BAR_MIN, _MARK_MIN, _NUMBER_MIN = 0.12, 2.5, 4.5
_TICKS_MAX = 9
_DAY_S = 86400
_STEPS_S = (
    *(0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800),
    *(3600, 7200, 10800, 21600, 43200, *(_DAY_S * 2**power for power in range(20))),
)
#: A job, or an attempt of one, as ``status --json`` has it.
Row = Mapping[str, Any]


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
                    "state": JobState.LOST.value if self._is_lost(attempt) else attempt.state,
                    "seen_at": attempt.seen_at if self._is_lost(attempt) else None,
                }
                for attempt in self.attempts.values()
            ],
            **(rows or {"waits_for_room": self._waits_for_room()}),
        }

    def _is_lost(self, attempt: AttemptRecord) -> bool:
        """Whether an attempt is lost with its job, because its end was not seen."""
        return self.status.state is JobState.LOST and not JobState(attempt.state).is_terminal

    def _waits_for_room(self) -> str:
        """The resources that a task waits for; empty if it waits for none."""
        explained = self.status.reason in (Reason.ROOM, Reason.UNSCHEDULABLE)
        return self.status.detail if explained and self.status.state is JobState.PENDING else ""

    def timeline_row(self) -> dict[str, Any]:
        """The same for the timeline, with what takes longer to find out."""
        row = self.as_dict()
        attempts = with_begin_times(self.job, self.attempts).values()
        for seen, attempt in zip(row["attempts"], attempts, strict=True):
            seen["running_at"] = attempt.running_at
            if self._is_lost(attempt):
                # Last seen by a look, or by the last line of the log that its cluster has left.
                moments = [path.stat().st_mtime for path in self.job.left_logs()]
                seen["seen_at"] = max([*moments, attempt.seen_at or 0.0]) or None
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
    return page(folder.name, rows, store_of(folder).ledger.began_at() or now, now)


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
    return f"{length(max(0, int(now - at)))} ago" if at else ""


def _short(names: Sequence[str]) -> str:
    more = len(names) - _NAMES_MAX
    return ", ".join(names[:_NAMES_MAX]) + (f" and {more} more" if more > 0 else "")


def _array_lines(job: str, array: ArrayRows, has_failures_in_message: bool) -> Group:
    """One line for an array, and one for each of the first elements that failed."""
    counts = ", ".join(
        f"{array[state]} {state}"  # type: ignore[literal-required]
        for state in ELEMENT_STATES
        if array[state]  # type: ignore[literal-required]
    )
    pace = ""
    if array["running"] and array["left_s"] is not None:
        left = length(round(array["left_s"]))
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


# The page of the timeline: pure, without a clock or a network, and readable without its script.
# The markup is in ``page.html.jinja``, whose environment cleans and escapes every value, so that
# texts of others cannot reach the page in any other way.


class _Axis:
    """The time that the page shows, in seconds since 1970."""

    def __init__(self, start: float, end: float) -> None:
        self.start, self.end = start, end

    def x(self, at: float) -> float:
        """The place of a moment, in percent of the axis."""
        return min(100.0, max(0.0, (at - self.start) / (self.end - self.start) * 100))

    def moments(self, attempt: Row) -> tuple[float, float, float]:
        """The moments posted, running and ended, in this order whatever the clocks say."""
        posted = attempt["posted_at"]
        ended = max(
            posted,
            attempt["ended_at"] or attempt["seen_at"] or self.end,
        )
        is_pending = attempt["ended_at"] is None and attempt["state"] == "PENDING"
        running = attempt["running_at"] or (ended if is_pending else posted)
        return posted, min(max(posted, running), ended), ended


def page(title: str, rows: Sequence[Row], began_at: float, now: float) -> str:
    """The whole page.

    Args:
        title: of the experiment.
        rows: its jobs as ``status --json`` has them, in the order in which they are shown.
        began_at: when the experiment was handed over, in seconds since 1970.
        now: the moment that the page shows.
    """
    is_live = any(map(_is_live, rows))
    # A cluster's clock may be off by much: all moments that it gave are on the axis.
    moments = [began_at, now] if is_live else [began_at]
    for attempt in (attempt for row in rows for attempt in row["attempts"]):
        times = (attempt[f"{name}_at"] for name in ("posted", "running", "ended", "seen"))
        moments += [at for at in times if at is not None]
    axis = _Axis(min(moments), max(*moments, min(moments) + 1))
    span_s = axis.end - axis.start
    jobs = _jobs(rows, axis, began_at)
    has_all_links = len(rows) <= ALL_LINKS_MAX
    counts = Counter(row["state"] for row in rows)
    style, script = _asset("page.css") + _measures(rows), _asset("page.js")
    environment = Environment(
        loader=PackageLoader("nemo_run_ray.cli", ""),
        autoescape=True,
        finalize=_clean,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"utc": utc, "duration": length}
    return environment.get_template("page.html.jinja").render(
        which_links="all" if has_all_links else "chosen",
        style_hash=_sha256(style),
        script_hash=_sha256(script),
        style=style,
        script=script,
        title=title,
        is_live=is_live,
        began_at=began_at,
        now=now,
        counts=[(state.lower(), counts[state]) for state in _STATES if counts[state]],
        start_s=axis.start,
        span_s=span_s,
        ticks=[(_percent(axis.x(axis.start + at)), at) for at in _ticks(span_s)],
        arrows=[(jobs[number], job) for job in jobs for number in job["after"] if has_all_links],
        jobs=jobs,
    )


def _jobs(rows: Sequence[Row], axis: _Axis, began_at: float) -> list[dict[str, Any]]:
    """The rows and the details that they open, as the template takes them."""
    numbers = {row["job"]: number for number, row in enumerate(rows)}
    #: Of each job the end of its last bar; ``None`` for one that has none.
    ends: list[float | None] = []
    for row in rows:
        last = [axis.moments(attempt)[2] for attempt in row["attempts"]]
        ends.append(axis.end if _is_live(row) else max(last, default=None))
    jobs: list[dict[str, Any]] = []
    for number, row in enumerate(rows):
        attempts, state = row["attempts"], row["state"]
        names = [name for name in dict.fromkeys(row["after"]) if name != row["job"]]
        after = [numbers[name] for name in names if name in numbers]
        # It waits for others until the last of them has ended.
        ready_at = max([began_at, *(ends[upstream] or began_at for upstream in after)])
        first_at = attempts[0]["posted_at"] if attempts else ends[number] or ready_at
        # A job below that was cancelled with this one has its mark where this one's is.
        ends[number] = end_at = ends[number] or ready_at
        waits = f"for {len(row['waits_for'])} job(s)"
        jobs.append(
            {
                "number": number,
                "name": row["job"],
                "state": state.lower(),
                "said": _said(state, row["reason"] or (waits if row["waits_for"] else "")),
                "took": length(end_at - first_at) if attempts else "",
                "message": row["message"],
                "first_x": _percent(axis.x(first_at)),
                "end_x": _percent(axis.x(end_at)),
                "after": after,
                "bars": _bars(row, axis, began_at, ready_at, first_at),
                "attempts": [_attempt(place, row, axis) for place in range(len(attempts))],
                "waits_for": [{"name": name} for name in row["waits_for"]],
                "strangers": [{"name": name} for name in names if name not in numbers],
                "needed_by": [],
            }
        )
    for job in jobs:
        job["runs_after"] = [*(jobs[number] for number in job["after"]), *job["strangers"]]
        for number in job["after"]:
            jobs[number]["needed_by"].append(job)
    return jobs


def _bars(
    row: Row, axis: _Axis, began_at: float, ready_at: float, first_at: float
) -> list[dict[str, str]]:
    """All bars of a job, in order. Every attempt has one, perhaps of no length."""
    bars: list[dict[str, str]] = []
    attempts, is_live = row["attempts"], _is_live(row)

    def add(kind: str, start: float, end: float, words: str, attempt: str = "") -> None:
        if start < end or attempt:
            left = min(axis.x(start), 100 - _BAR_MIN)
            width = max(_BAR_MIN, axis.x(end) - left)
            tip = f"{words}: {length(end - start)}\n{utc(start)} to {utc(end)}\n{attempt}"
            bars.append(_bar(kind, left, width, "full" if attempt else "low", tip))

    if attempts or is_live:
        add("early", min(began_at, first_at), min(ready_at, first_at), "waiting for other jobs")
        add("waiting", min(ready_at, first_at), first_at, "waiting for its turn")
    last = first_at
    for number, attempt in enumerate(attempts, start=1):
        posted, running, ended = axis.moments(attempt)
        state, is_seen = attempt["state"], attempt["running_at"] is not None
        which = f"attempt {number} of {len(attempts)}: {_how(attempt)}"
        add("waiting", last, posted, "waiting for the next attempt")
        # An attempt that was lost was seen to begin, if nothing of it later.
        both = state == "LOST" and is_seen
        if both or posted < running or (state == "PENDING" and running == ended):
            add(f"pending {state.lower()}", posted, running, "pending", which)
        if both or running < ended or (state != "PENDING" and posted == running):
            words = "running" if is_seen else "running, start not seen"
            add(f"running {state.lower()}", running, ended, words, which)
        last = ended
    if is_live:
        add("waiting", last, axis.end, "waiting after its last attempt")
    total = sum(row.get(state, 0) for state in ELEMENT_STATES)
    if total and attempts:  # an array has a band below the bar of its last attempt
        _, running, ended = axis.moments(attempts[-1])
        left = axis.x(running)
        for state in ELEMENT_STATES:
            if count := row[state]:
                width = (axis.x(ended) - axis.x(running)) * count / total
                tip = f"{count} of {total} elements: {state}"
                bars.append(_bar(f"element {state}", left, width, "band", tip))
                left += width
    return bars


def _bar(kind: str, left: float, width: float, height: str, tip: str) -> dict[str, str]:
    place = {"x": _percent(left), "width": _percent(width), "height": height}
    return {"kind": kind, **place, "tip": tip}


def _attempt(place: int, row: Row, axis: _Axis) -> dict[str, Any]:
    """The details of an attempt, and of one of several its number and mark, where there is room."""
    attempts = row["attempts"]
    attempt, is_one_of_several = attempts[place], len(attempts) > 1
    posted, running, ended = axis.moments(attempt)
    width = axis.x(ended) - axis.x(running) if is_one_of_several else 0.0
    has_mark = width >= _MARK_MIN and attempt is not attempts[-1]
    return {
        "number": place + 1,
        "number_x": _percent(axis.x(running)) if width >= _NUMBER_MIN else None,
        "mark_x": _percent(axis.x(ended)) if has_mark else None,
        "state": attempt["state"].lower(),
        "said": _how(attempt),
        "posted": posted,
        "running": running,
        "ended": ended,
        "row": attempt,
    }


def _is_live(row: Row) -> bool:
    return not JobState(row["state"]).is_terminal


def _how(attempt: Row) -> str:
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


def _ticks(span_s: float) -> list[float]:
    """The moments that the axis names, in seconds since its start."""
    step = next(step for step in _STEPS_S if span_s / step <= _TICKS_MAX)
    return [number * step for number in range(int(span_s / step) + 1)]


def _percent(x: float) -> str:
    return f"{x:.2f}%"


def _clean(value: object) -> object:
    """A text without control characters; markup, which has ``__html__``, was cleaned before."""
    is_text = isinstance(value, str) and not hasattr(value, "__html__")
    return shown(str(value)) if is_text else value


def _measures(rows: Sequence[Row]) -> str:
    """The rules that depend on the jobs: rows are lower where there are many."""
    _, row, letters = next(size for size in _SIZES if len(rows) <= size[0])
    characters = min(max([10, *(len(row["job"]) for row in rows)]), 40)
    name = characters * letters * 0.6 + 28
    return f":root {{ --row: {row}px; --letters: {letters}px; --name: {name:.0f}px; }}\n"


def _asset(name: str) -> str:
    return resources.files("nemo_run_ray.cli").joinpath(name).read_text(encoding="utf-8")


def _sha256(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
