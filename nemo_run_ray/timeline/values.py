"""What the page shows, as plain values: places in percent of the axis, times and lengths as text.

Foreign words are in them as they came; the page's template cleans and escapes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from nemo_run_ray.timeline.lanes import (
    Axis,
    Bar,
    Lane,
    Span,
    TimelineRow,
    bars_of,
    known_state,
    span_of,
)

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
