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

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from nemo_run_ray.errors import shown
from nemo_run_ray.remote.status import JobState

#: The states that have a mark, in the order in which they are counted. Any other is UNKNOWN's.
STATES = tuple(
    state.value
    for state in (
        JobState.FAILED,
        JobState.LOST,
        JobState.CANCELLED,
        JobState.SUCCEEDED,
        JobState.RUNNING,
        JobState.PENDING,
        JobState.WAITING,
        JobState.UNKNOWN,
    )
)
#: A job in one of these may go on, so the axis goes on to the present.
_LIVE = {state.value for state in JobState if not state.is_terminal}


@dataclass(frozen=True)
class Span:
    """One attempt of a job. Times are seconds since 1970.

    Attributes:
        number: from 1.
        submission_id: its name on the cluster.
        node: hexadecimal id of the node of its driver; empty when it has none.
        posted_at: when Ray got it.
        running_at: when it was first seen running; ``None`` when no process saw that.
        ended_at: ``None`` while it goes on, and when no process saw its end.
        seen_at: when one whose end was not seen was last seen going on; ``None`` for all others.
        outcome: its state in one word.
        reason: why, in words.
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

    @property
    def said(self) -> str:
        return _said(self.outcome, self.reason)


@dataclass(frozen=True)
class TimelineRow:
    """One job.

    Attributes:
        name: unique in its experiment.
        state: a ``JobState`` in one word; another word is shown as it is.
        reason: why, in words.
        message: what else is known, in many lines.
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
    def known(self) -> str:
        return known_state(self.state)

    @property
    def said(self) -> str:
        count = len(self.waits_for)
        waits = f"for {count} job{'s' if count > 1 else ''}" if count else ""
        return _said(self.state, self.reason or waits)


@dataclass(frozen=True)
class Axis:
    """The time that is shown. ``is_live``: a job may go on, so it ends at the present."""

    start: float
    end: float
    is_live: bool

    @property
    def span_s(self) -> float:
        return self.end - self.start

    def x(self, at: float) -> float:
        """The place of a moment, in percent of the axis."""
        return min(100.0, max(0.0, (at - self.start) / self.span_s * 100))


@dataclass(frozen=True)
class Lane:
    """A row and its place.

    Attributes:
        number: of its row, from 0.
        after: numbers of the jobs that it depends on.
        before: numbers of the jobs that depend on it.
        strangers: names that it depends on and that no row has.
        began_at: when it began to wait.
        ready_at: when the last job that it depends on had ended.
        first_at: when its first attempt was posted; without one, the end of its waiting.
        end_at: of its last bar.
    """

    row: TimelineRow
    number: int
    after: Sequence[int]
    before: Sequence[int]
    strangers: Sequence[str]
    began_at: float
    ready_at: float
    first_at: float
    end_at: float


@dataclass(frozen=True)
class Bar:
    """``kind``: early (waits for other jobs), waiting, pending or running; ``outcome``: of its
    attempt, empty outside of one."""

    kind: str
    start: float
    end: float
    words: str
    outcome: str = ""
    detail: str = ""


def axis_of(rows: Sequence[TimelineRow], began_at: float, now: float) -> Axis:
    is_live = any(row.known in _LIVE for row in rows)
    # A cluster's clock may be off by much: whatever it said is on the axis.
    known = [began_at, now] if is_live else [began_at]
    for attempt in (attempt for row in rows for attempt in row.attempts):
        moments = (attempt.posted_at, attempt.running_at, attempt.ended_at, attempt.seen_at)
        known += [at for at in moments if at is not None]
    return Axis(min(known), max(*known, min(known) + 1), is_live)


def lanes_of(rows: Sequence[TimelineRow], axis: Axis, began_at: float) -> list[Lane]:
    numbers = {row.name: number for number, row in enumerate(rows)}
    before: list[list[int]] = [[] for _ in rows]
    ends = [_end(row, axis) for row in rows]
    lanes = []
    for number, row in enumerate(rows):
        names = [name for name in dict.fromkeys(row.after) if name != row.name]
        after = [numbers[name] for name in names if name in numbers]
        strangers = [name for name in names if name not in numbers]
        for upstream in after:
            before[upstream].append(number)
        ready_at = max([began_at, *(_or(ends[upstream], began_at) for upstream in after)])
        first_at = row.attempts[0].posted_at if row.attempts else _or(ends[number], ready_at)
        # A job below that was cancelled with this one has its mark where this one's is.
        ends[number] = end_at = _or(ends[number], ready_at)
        moments = (min(began_at, first_at), min(ready_at, first_at), first_at, end_at)
        lanes.append(Lane(row, number, after, before[number], strangers, *moments))
    return lanes


def span_of(attempt: Span, axis: Axis) -> tuple[float, float, float]:
    """The moments posted, running and ended, in this order whatever the clocks say."""
    posted = attempt.posted_at
    ended = max(posted, _or(attempt.ended_at, _or(attempt.seen_at, axis.end)))
    is_pending = attempt.ended_at is None and attempt.outcome == JobState.PENDING.value
    running = _or(attempt.running_at, ended if is_pending else posted)
    return posted, min(max(posted, running), ended), ended


def bars_of(lane: Lane, axis: Axis) -> list[Bar]:
    """All its bars, in order. Every attempt has one, perhaps of no length."""
    return [bar for bar in _bars(lane, axis) if bar.start < bar.end or bar.outcome]


def known_state(state: str) -> str:
    return state if state in STATES else JobState.UNKNOWN.value


def _bars(lane: Lane, axis: Axis) -> Iterator[Bar]:
    attempts, is_live = lane.row.attempts, lane.row.known in _LIVE
    if attempts or is_live:
        yield Bar("early", lane.began_at, lane.ready_at, "waiting for other jobs")
        yield Bar("waiting", lane.ready_at, lane.first_at, "waiting for its turn")
    last = lane.first_at
    for attempt in attempts:
        yield Bar("waiting", last, attempt.posted_at, "waiting for the next attempt")
        yield from _phases(attempt, len(attempts), axis)
        last = span_of(attempt, axis)[2]
    if is_live:
        yield Bar("waiting", last, axis.end, "waiting after its last attempt")


def _phases(attempt: Span, total: int, axis: Axis) -> list[Bar]:
    posted, running, ended = span_of(attempt, axis)
    words = "running" if attempt.running_at is not None else "running, start not seen"
    which = f"attempt {attempt.number} of {total}: {attempt.said}"
    bars = [
        Bar("pending", posted, running, "pending", attempt.outcome, which),
        Bar("running", running, ended, words, attempt.outcome, which),
    ]
    only = bars[0] if attempt.outcome == JobState.PENDING.value else bars[1]
    if attempt.outcome == JobState.LOST.value and attempt.running_at is not None:
        return bars  # it was seen to begin, if nothing of it later
    return [bar for bar in bars if bar.start < bar.end] or [only]


def _end(row: TimelineRow, axis: Axis) -> float | None:
    """The end of its last bar; ``None`` for a job that has none."""
    if row.known in _LIVE:
        return axis.end
    return max((span_of(attempt, axis)[2] for attempt in row.attempts), default=None)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _said(state: str, why: str) -> str:
    word = state.lower()
    return f"{word}: {why}" if why and why.lower() != word else word


#: A longer message loses its middle; the log has all of it.
MESSAGE_MAX = 6000
#: So many neighbours of a job are listed in its details.
NEIGHBOURS_MAX = 25
#: Percents of the axis: the least bar, and the room that a mark or a number inside it needs.
_BAR_MIN, _MARK_MIN, _NUMBER_MIN = 0.12, 2.5, 4.5
_TICKS_MAX = 9
_DAY_S = 86400
_STEPS_S = (
    *(0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800),
    *(3600, 7200, 10800, 21600, 43200, _DAY_S, 2 * _DAY_S, 7 * _DAY_S),
)


@dataclass(frozen=True, slots=True)
class Tick:
    """A moment that the axis names."""

    x: str
    label: str
    utc: str


@dataclass(frozen=True, slots=True)
class Arrow:
    """A line from the end of a job's bars along its row, then down or up to the next one's bars.

    Attributes:
        end: where it begins.
        y: the middle of that row.
        to: where it turns.
        tip: where it ends, in the other row.
        direction: down or up.
    """

    end: str
    y: str
    to: str
    tip: str
    direction: str


@dataclass(frozen=True, slots=True)
class Rect:
    """A bar.

    Attributes:
        kind: its CSS classes.
        height: its class: ``full`` of an attempt, ``low`` of waiting, ``band`` of elements.
        tip: what it says when it is pointed at.
    """

    kind: str
    x: str
    width: str
    height: str
    tip: str


@dataclass(frozen=True, slots=True)
class Label:
    """What an attempt's bar has inside. A place is ``None`` where there is no room."""

    number: int
    number_x: str | None
    state: str
    mark_x: str | None


@dataclass(frozen=True, slots=True)
class AttemptValues:
    """What a job's details say of one attempt."""

    number: int
    state: str
    said: str
    posted: str
    running: str
    ended: str
    submission_id: str
    node: str


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A job that another one names. ``number`` is ``None`` for one that has no row."""

    name: str
    number: int | None = None
    state: str = ""


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The first neighbours, and how many more there are."""

    shown: Sequence[Neighbour]
    more: int


@dataclass(frozen=True, slots=True)
class JobValues:
    """A row and the details that it opens. ``after`` has numbers of rows."""

    number: int
    name: str
    state: str
    said: str
    took: str
    message: str
    first_x: str
    end_x: str
    after: Sequence[int]
    bars: Sequence[Rect]
    labels: Sequence[Label]
    attempts: Sequence[AttemptValues]
    no_attempt: str
    waits_for: Neighbours | None
    runs_after: Neighbours | None
    needed_by: Neighbours | None


def ticks(axis: Axis) -> list[Tick]:
    return [
        Tick(_x(axis, axis.start + at), length(at) if at else "0", utc(axis.start + at))
        for at in _moments(axis)
    ]


def arrows(lanes: Sequence[Lane], axis: Axis) -> list[Arrow]:
    pairs = [(lanes[number], lane) for lane in lanes for number in lane.after]
    return [_arrow(source, target, len(lanes), axis) for source, target in pairs]


#: What is said of a job without attempts: of one that may have had some, and of any other.
_UNSEEN = {"LOST", "UNKNOWN"}
_NO_ATTEMPT_SEEN, _NO_ATTEMPT = "No attempt of it was seen.", "It was never submitted."


def job_values(lanes: Sequence[Lane], axis: Axis) -> list[JobValues]:
    # They are made once for each job, which may be the neighbour of many.
    jobs = [Neighbour(lane.row.name, lane.number, lane.row.known.lower()) for lane in lanes]
    return [_job(lane, jobs, axis) for lane in lanes]


def _job(lane: Lane, jobs: Sequence[Neighbour], axis: Axis) -> JobValues:
    row = lane.row
    return JobValues(
        number=lane.number,
        name=row.name,
        state=row.known.lower(),
        said=row.said,
        took=length(lane.end_at - lane.first_at) if row.attempts else "",
        message=_shorten(row.message),
        first_x=_x(axis, lane.first_at),
        end_x=_x(axis, lane.end_at),
        after=lane.after,
        bars=[*(_rect(bar, axis) for bar in bars_of(lane, axis)), *_band(row, axis)],
        labels=list(_labels(row.attempts, axis)),
        attempts=[_attempt(attempt, axis) for attempt in row.attempts],
        no_attempt=_NO_ATTEMPT_SEEN if row.known in _UNSEEN else _NO_ATTEMPT,
        waits_for=_neighbours((), row.waits_for),
        runs_after=_neighbours([jobs[number] for number in lane.after], lane.strangers),
        needed_by=_neighbours([jobs[number] for number in lane.before], ()),
    )


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


def _moments(axis: Axis) -> list[float]:
    """The moments of the ticks, in seconds since the start."""
    step: float = next(
        (step_s for step_s in _STEPS_S if axis.span_s / step_s <= _TICKS_MAX), _STEPS_S[-1]
    )
    while axis.span_s / step > _TICKS_MAX:
        step *= 2
    return [number * step for number in range(int(axis.span_s / step) + 1)]


def _arrow(source: Lane, target: Lane, count: int, axis: Axis) -> Arrow:
    is_down = target.number > source.number
    return Arrow(
        end=_x(axis, source.end_at),
        y=f"{(source.number + 0.5) / count * 100:.3f}%",
        to=_x(axis, target.first_at),
        tip=f"{(target.number + (0.2 if is_down else 0.8)) / count * 100:.3f}%",
        direction="down" if is_down else "up",
    )


def _rect(bar: Bar, axis: Axis) -> Rect:
    left = min(axis.x(bar.start), 100 - _BAR_MIN)
    width = max(_BAR_MIN, axis.x(bar.end) - left)
    kind = f"{bar.kind} {known_state(bar.outcome).lower()}" if bar.outcome else bar.kind
    tip = f"{bar.words}: {length(bar.end - bar.start)}\n{utc(bar.start)} to {utc(bar.end)}\n"
    height = "low" if bar.kind in ("early", "waiting") else "full"
    return Rect(kind, f"{left:.2f}%", f"{width:.2f}%", height, tip + bar.detail)


def _band(row: TimelineRow, axis: Axis) -> Iterator[Rect]:
    """The elements of an array below the bar of its last attempt: a part for each state."""
    total = sum(row.elements.values())
    if not total or not row.attempts:
        return
    _, running, ended = span_of(row.attempts[-1], axis)
    left, width = axis.x(running), axis.x(ended) - axis.x(running)
    for state, count in row.elements.items():
        part = width * count / total
        if count:
            tip = f"{count} of {total} elements: {state}"
            yield Rect(f"element {state}", f"{left:.2f}%", f"{part:.2f}%", "band", tip)
        left += part


def _labels(attempts: Sequence[Span], axis: Axis) -> Iterator[Label]:
    """The numbers of several attempts, and how all but the last ended, where there is room."""
    for attempt in attempts if len(attempts) > 1 else ():
        _, running, ended = span_of(attempt, axis)
        room = axis.x(ended) - axis.x(running)
        has_mark = room >= _MARK_MIN and attempt is not attempts[-1]
        number_x = _x(axis, running) if room >= _NUMBER_MIN else None
        mark_x = _x(axis, ended) if has_mark else None
        if number_x is not None or mark_x is not None:
            yield Label(attempt.number, number_x, known_state(attempt.outcome).lower(), mark_x)


def _attempt(attempt: Span, axis: Axis) -> AttemptValues:
    posted, running, ended = span_of(attempt, axis)
    is_seen, is_over = attempt.running_at is not None, attempt.ended_at is not None
    not_seen = "not seen"
    if attempt.seen_at is not None:
        not_seen += f"; last seen going on {utc(attempt.seen_at)}"
    return AttemptValues(
        number=attempt.number,
        state=known_state(attempt.outcome).lower(),
        said=attempt.said,
        posted=utc(posted),
        running=f"{utc(running)}, {length(running - posted)} later" if is_seen else "not seen",
        ended=f"{utc(ended)}, {length(ended - running)} later" if is_over else not_seen,
        submission_id=attempt.submission_id,
        node=attempt.node,
    )


def _neighbours(known: Sequence[Neighbour], names: Sequence[str]) -> Neighbours | None:
    """The neighbours that have a row, and then those of which only the name is known."""
    if not known and not names:
        return None
    strangers = [Neighbour(name) for name in names[:NEIGHBOURS_MAX]]
    more = max(0, len(known) + len(names) - NEIGHBOURS_MAX)
    return Neighbours([*known[:NEIGHBOURS_MAX], *strangers][:NEIGHBOURS_MAX], more)


def _x(axis: Axis, at: float) -> str:
    return f"{axis.x(at):.2f}%"


def _shorten(message: str) -> str:
    if len(message) <= MESSAGE_MAX:
        return message
    head, tail = MESSAGE_MAX // 3, MESSAGE_MAX - MESSAGE_MAX // 3
    left_out = len(message) - MESSAGE_MAX
    return f"{message[:head]}\n[… {left_out} characters are left out …]\n{message[-tail:]}"


#: Up to so many jobs all dependencies are drawn; beyond, those of the chosen job.
ALL_LINKS_MAX = 40
#: Pixels of a row, and of its letters, up to so many jobs.
_SIZES = ((40, 30, 13), (150, 22, 12), (10**9, 17, 11))


def page(title: str, rows: Sequence[TimelineRow], began_at: float, now: float) -> str:
    """The whole page.

    Args:
        title: of the experiment.
        rows: its jobs, in the order in which they are shown.
        began_at: when the experiment was handed over, in seconds since 1970.
        now: the moment that the page shows.
    """
    axis = axis_of(rows, began_at, now)
    lanes = lanes_of(rows, axis, began_at)
    style, script = _asset("page.css") + _measures(rows), _asset("page.js")
    has_all_links = len(lanes) <= ALL_LINKS_MAX
    return _template().render(
        which_links="all" if has_all_links else "chosen",
        style_hash=_sha256(style),
        script_hash=_sha256(script),
        style=style,
        script=script,
        title=title,
        facts=_facts(rows, axis, began_at, now),
        counts=_counts(rows),
        start_s=f"{axis.start:.3f}",
        span_s=f"{axis.span_s:.3f}",
        ticks=ticks(axis),
        arrows=arrows(lanes, axis) if has_all_links else (),
        jobs=job_values(lanes, axis),
    )


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
    """Words as they are shown.

    Markup stays as it is: it is the page's style or script, or the result of a macro, whose parts
    were cleaned.
    """
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    return shown(value)


def _facts(rows: Sequence[TimelineRow], axis: Axis, began_at: float, now: float) -> Sequence[str]:
    jobs = f"{len(rows)} job{'' if len(rows) == 1 else 's'}"
    took = f"{'going on for' if axis.is_live else 'took'} {length(axis.span_s)}"
    return jobs, took, f"began {utc(began_at)}", f"page made {utc(now)}"


def _counts(rows: Sequence[TimelineRow]) -> Sequence[tuple[str, int]]:
    counts = Counter(row.known for row in rows)
    return [(state.lower(), counts[state]) for state in STATES if counts[state]]


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
