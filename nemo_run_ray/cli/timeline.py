"""The page that shows when each job of an experiment waited, ran and ended.

Pure, without a clock or a network; the page is readable without its script. The markup is in
``page.html.jinja``, whose environment cleans and escapes every value, so that texts of others
cannot reach the page in any other way.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from nemo_run_ray.errors import shown
from nemo_run_ray.remote.status import JobState

#: The states that have a mark, in the order in which they are counted. Any other is UNKNOWN's.
STATES = (
    *("FAILED", "LOST", "CANCELLED", "SUCCEEDED"),
    *("RUNNING", "PENDING", "WAITING", "UNKNOWN"),
)
_LIVE = {state.value for state in JobState if not state.is_terminal}
#: A longer message loses its middle; the log has all of it.
MESSAGE_MAX = 6000
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
    *(3600, 7200, 10800, 21600, 43200, _DAY_S, 2 * _DAY_S, 7 * _DAY_S),
)


@dataclass(frozen=True)
class Span:
    """One attempt of a job. Times are seconds since 1970.

    Attributes:
        number: from 1.
        submission_id: its name on the cluster.
        node: hexadecimal id of the node of its driver; empty when it has none.
        posted_at: when Ray got it.
        running_at: when it was first seen running; ``None`` when no process saw that.
        ended_at: ``None`` while it runs, and when no process saw its end.
        seen_at: when one whose end was not seen was last seen alive; ``None`` for all others.
        outcome: its state in one word.
        reason: a sentence.
    """

    number: int
    submission_id: str
    node: str
    posted_at: float
    running_at: float | None
    ended_at: float | None
    outcome: str
    reason: str
    seen_at: float | None = None


@dataclass(frozen=True)
class TimelineRow:
    """One job.

    Attributes:
        name: unique in its experiment.
        state: a ``JobState`` in one word; another word is shown as it is.
        reason: a sentence.
        message: further lines.
        after: names of the jobs that it depends on.
        waits_for: those of them that it still waits for.
        attempts: the first one first; none when it was never submitted.
        elements: of an array, how many are in each state; empty for other jobs.
    """

    name: str
    state: str
    reason: str
    message: str
    after: Sequence[str]
    waits_for: Sequence[str]
    attempts: tuple[Span, ...]
    elements: Mapping[str, int] = field(default_factory=dict)

    @property
    def known_state(self) -> str:
        return self.state if self.state in STATES else "UNKNOWN"


@dataclass(frozen=True)
class Axis:
    """The time that the page shows."""

    start: float
    end: float

    def x(self, at: float) -> float:
        """The place of a moment, in percent of the axis."""
        return min(100.0, max(0.0, (at - self.start) / (self.end - self.start) * 100))


def page(title: str, rows: Sequence[TimelineRow], began_at: float, now: float) -> str:
    """The whole page.

    Args:
        title: of the experiment.
        rows: its jobs, in the order in which they are shown.
        began_at: when the experiment was handed over, in seconds since 1970.
        now: the moment that the page shows.
    """
    is_live = any(row.known_state in _LIVE for row in rows)
    # A cluster's clock may be off by much: all moments that it gave are on the axis.
    moments = [began_at, now] if is_live else [began_at]
    for attempt in (attempt for row in rows for attempt in row.attempts):
        times = (attempt.posted_at, attempt.running_at, attempt.ended_at, attempt.seen_at)
        moments += [at for at in times if at is not None]
    axis = Axis(min(moments), max(*moments, min(moments) + 1))
    span_s = axis.end - axis.start
    jobs = _jobs(rows, axis, began_at)
    has_all_links = len(rows) <= ALL_LINKS_MAX
    counts = Counter(row.known_state for row in rows)
    style, script = _asset("page.css") + _measures(rows), _asset("page.js")
    return _template().render(
        which_links="all" if has_all_links else "chosen",
        style_hash=_sha256(style),
        script_hash=_sha256(script),
        style=style,
        script=script,
        title=title,
        facts=(
            f"{len(rows)} job{'' if len(rows) == 1 else 's'}",
            f"{'running for' if is_live else 'took'} {length(span_s)}",
            f"began {utc(began_at)}",
            f"page made {utc(now)}",
        ),
        counts=[(state.lower(), counts[state]) for state in STATES if counts[state]],
        start_s=f"{axis.start:.3f}",
        span_s=f"{span_s:.3f}",
        ticks=[
            (_percent(axis.x(axis.start + at)), length(at) if at else "0", utc(axis.start + at))
            for at in _ticks(span_s)
        ],
        arrows=[(jobs[number], job) for job in jobs for number in job["after"] if has_all_links],
        jobs=jobs,
    )


def _jobs(rows: Sequence[TimelineRow], axis: Axis, began_at: float) -> list[dict[str, Any]]:
    """The rows and the details that they open, as the template takes them."""
    numbers = {row.name: number for number, row in enumerate(rows)}
    ends = [_end(row, axis) for row in rows]
    jobs: list[dict[str, Any]] = []
    for number, row in enumerate(rows):
        names = [name for name in dict.fromkeys(row.after) if name != row.name]
        after = [numbers[name] for name in names if name in numbers]
        # It waits for others until the last of them has ended.
        ready_at = max([began_at, *(ends[upstream] or began_at for upstream in after)])
        first_at = row.attempts[0].posted_at if row.attempts else ends[number] or ready_at
        # A job below that was cancelled with this one has its mark where this one's is.
        ends[number] = end_at = ends[number] or ready_at
        waits = f"for {len(row.waits_for)} job{'s' if len(row.waits_for) > 1 else ''}"
        is_unseen = row.known_state in ("LOST", "UNKNOWN")
        jobs.append(
            {
                "number": number,
                "name": row.name,
                "state": row.known_state.lower(),
                "said": _said(row.state, row.reason or (waits if row.waits_for else "")),
                "took": length(end_at - first_at) if row.attempts else "",
                "message": _shorten(row.message),
                "first_x": _percent(axis.x(first_at)),
                "end_x": _percent(axis.x(end_at)),
                "after": after,
                "bars": [
                    *_bars(row, axis, min(began_at, first_at), min(ready_at, first_at), first_at),
                    *_band(row, axis),
                ],
                "labels": list(_labels(row.attempts, axis)),
                "attempts": [_attempt(attempt, axis) for attempt in row.attempts],
                "no_attempt": "No attempt of it was seen."
                if is_unseen
                else "It was never submitted.",
                "waits_for": [{"name": name} for name in row.waits_for],
                "strangers": [{"name": name} for name in names if name not in numbers],
                "needed_by": [],
            }
        )
    for job in jobs:
        job["runs_after"] = [*(jobs[number] for number in job["after"]), *job["strangers"]]
        for number in job["after"]:
            jobs[number]["needed_by"].append(job)
    return jobs


def _end(row: TimelineRow, axis: Axis) -> float | None:
    """The end of its last bar; ``None`` for a job that has none."""
    if row.known_state in _LIVE:
        return axis.end
    return max((_moments(attempt, axis)[2] for attempt in row.attempts), default=None)


def _moments(attempt: Span, axis: Axis) -> tuple[float, float, float]:
    """The moments posted, running and ended, in this order whatever the clocks say."""
    posted = attempt.posted_at
    ended = max(posted, attempt.ended_at or attempt.seen_at or axis.end)
    is_pending = attempt.ended_at is None and attempt.outcome == "PENDING"
    running = attempt.running_at or (ended if is_pending else posted)
    return posted, min(max(posted, running), ended), ended


def _bars(
    row: TimelineRow, axis: Axis, began_at: float, ready_at: float, first_at: float
) -> Iterator[dict[str, str]]:
    """All bars of a job, in order. Every attempt has one, perhaps of no length."""
    is_live = row.known_state in _LIVE
    if row.attempts or is_live:
        yield from _bar(axis, "early", began_at, ready_at, "waiting for other jobs")
        yield from _bar(axis, "waiting", ready_at, first_at, "waiting for its turn")
    last = first_at
    for attempt in row.attempts:
        posted, running, ended = _moments(attempt, axis)
        state = _known(attempt)
        which = f"attempt {attempt.number} of {len(row.attempts)}: "
        which += _said(attempt.outcome, attempt.reason)
        yield from _bar(axis, "waiting", last, posted, "waiting for the next attempt")
        # An attempt that was lost was seen to begin, if nothing of it later.
        both = attempt.outcome == "LOST" and attempt.running_at is not None
        is_pending = attempt.outcome == "PENDING"
        if both or posted < running or (is_pending and running == ended):
            yield from _bar(axis, f"pending {state}", posted, running, "pending", which)
        if both or running < ended or (not is_pending and posted == running):
            words = "running" if attempt.running_at is not None else "running, start not seen"
            yield from _bar(axis, f"running {state}", running, ended, words, which)
        last = ended
    if is_live:
        yield from _bar(axis, "waiting", last, axis.end, "waiting after its last attempt")


def _bar(
    axis: Axis, kind: str, start: float, end: float, words: str, attempt: str = ""
) -> Iterator[dict[str, str]]:
    if start < end or attempt:
        left = min(axis.x(start), 100 - _BAR_MIN)
        yield {
            "kind": kind,
            "x": _percent(left),
            "width": _percent(max(_BAR_MIN, axis.x(end) - left)),
            "height": "full" if attempt else "low",
            "tip": f"{words}: {length(end - start)}\n{utc(start)} to {utc(end)}\n{attempt}",
        }


def _band(row: TimelineRow, axis: Axis) -> Iterator[dict[str, str]]:
    """The elements of an array below the bar of its last attempt: a part for each state."""
    total = sum(row.elements.values())
    if not total or not row.attempts:
        return
    _, running, ended = _moments(row.attempts[-1], axis)
    left, width = axis.x(running), axis.x(ended) - axis.x(running)
    for state, count in row.elements.items():
        part = width * count / total
        if count:
            yield {
                "kind": f"element {state}",
                "x": _percent(left),
                "width": _percent(part),
                "height": "band",
                "tip": f"{count} of {total} elements: {state}",
            }
        left += part


def _labels(attempts: Sequence[Span], axis: Axis) -> Iterator[dict[str, Any]]:
    """The numbers of several attempts, and how all but the last ended, where there is room."""
    for attempt in attempts if len(attempts) > 1 else ():
        left, right = (axis.x(at) for at in _moments(attempt, axis)[1:])
        has_mark = right - left >= _MARK_MIN and attempt is not attempts[-1]
        yield {
            "number": attempt.number,
            "number_x": _percent(left) if right - left >= _NUMBER_MIN else None,
            "state": _known(attempt),
            "mark_x": _percent(right) if has_mark else None,
        }


def _attempt(attempt: Span, axis: Axis) -> dict[str, Any]:
    """The details of an attempt."""
    posted, running, ended = _moments(attempt, axis)
    is_seen, is_over = attempt.running_at is not None, attempt.ended_at is not None
    not_seen = "not seen"
    if attempt.seen_at is not None:
        not_seen += f"; last seen alive {utc(attempt.seen_at)}"
    return {
        "number": attempt.number,
        "state": _known(attempt),
        "said": _said(attempt.outcome, attempt.reason),
        "posted": utc(posted),
        "running": f"{utc(running)}, {length(running - posted)} later" if is_seen else "not seen",
        "ended": f"{utc(ended)}, {length(ended - running)} later" if is_over else not_seen,
        "submission_id": attempt.submission_id,
        "node": attempt.node,
    }


def _known(attempt: Span) -> str:
    return (attempt.outcome if attempt.outcome in STATES else "UNKNOWN").lower()


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
    step = next((step for step in _STEPS_S if span_s / step <= _TICKS_MAX), _STEPS_S[-1])
    while span_s / step > _TICKS_MAX:
        step *= 2
    return [number * step for number in range(int(span_s / step) + 1)]


def _percent(x: float) -> str:
    return f"{x:.2f}%"


def _shorten(message: str) -> str:
    if len(message) <= MESSAGE_MAX:
        return message
    head, tail = MESSAGE_MAX // 3, MESSAGE_MAX - MESSAGE_MAX // 3
    omitted = len(message) - MESSAGE_MAX
    return f"{message[:head]}\n[… {omitted} characters are left out …]\n{message[-tail:]}"


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("nemo_run_ray.cli", ""),
        autoescape=True,
        finalize=_clean,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["clean"] = _clean
    return environment.get_template("page.html.jinja")


def _clean(value: object) -> object:
    """A text without control characters; markup, which has ``__html__``, was cleaned before."""
    is_text = isinstance(value, str) and not hasattr(value, "__html__")
    return shown(str(value)) if is_text else value


def _measures(rows: Sequence[TimelineRow]) -> str:
    """The rules that depend on the jobs: rows are lower where there are many."""
    _, row, letters = next(size for size in _SIZES if len(rows) <= size[0])
    lengths = sorted(len(row.name) for row in rows) or [0]
    # A few very long names shall not take the width from all bars.
    characters = min(max(10, lengths[(len(lengths) - 1) * 19 // 20]), 40)
    name = characters * letters * 0.6 + 28
    return f":root {{ --row: {row}px; --letters: {letters}px; --name: {name:.0f}px; }}\n"


def _asset(name: str) -> str:
    return resources.files("nemo_run_ray.cli").joinpath(name).read_text(encoding="utf-8")


def _sha256(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
