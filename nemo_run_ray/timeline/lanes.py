"""Where the bars of an experiment's jobs lie in time: pure, and no HTML."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from nemo_run_ray.remote.states import JobState

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
