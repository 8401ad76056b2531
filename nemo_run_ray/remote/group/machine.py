"""The life of a group as a pure table: what happened goes in, what to do comes out.

The driver feeds every event to ``step`` and carries out the actions; it decides nothing itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Callable, Dict, List, Optional, Sequence, Tuple, Union

from ..states import Cause, Life, Phase

#: One replica of one role.
Who = Tuple[str, int]


@dataclass(frozen=True)
class Member:
    """One replica: what it is and where it is."""

    role: str
    index: int
    service: bool
    restarts: int = 0
    life: Life = Life.AWAITED
    code: Optional[int] = None

    @property
    def who(self) -> Who:
        return self.role, self.index


@dataclass(frozen=True)
class Outcome:
    """How the group ends: its exit code, the cause, and the cause in words."""

    code: int
    cause: Cause
    words: str


@dataclass(frozen=True)
class Group:
    """The whole state. Immutable: ``step`` gives a new one."""

    members: Tuple[Member, ...]
    phase: Phase = Phase.PLACING
    outcome: Optional[Outcome] = None


# ---------------------------------------------------------------------- what happens


@dataclass(frozen=True)
class Placed:
    """Every replica has its bundle."""


@dataclass(frozen=True)
class Refused:
    """The cluster will not place the group."""

    cause: Cause
    words: str


@dataclass(frozen=True)
class Prepared:
    """A replica's node is ready to start it."""

    who: Who


@dataclass(frozen=True)
class Unprepared:
    """A replica cannot be started on its node."""

    who: Who
    words: str


@dataclass(frozen=True)
class Ready:
    """A replica runs, and its probe, if it has one, has succeeded."""

    who: Who


@dataclass(frozen=True)
class Unready:
    """A replica's probe did not succeed in time."""

    who: Who
    words: str


@dataclass(frozen=True)
class Exited:
    """All processes of a replica have ended."""

    who: Who
    code: int
    words: str


@dataclass(frozen=True)
class Lost:
    """A replica's node, or our process there, is gone."""

    who: Who
    words: str


@dataclass(frozen=True)
class Stop:
    """Somebody wants the group to end."""

    words: str = "cancelled"


Event = Union[Placed, Refused, Prepared, Unprepared, Ready, Unready, Exited, Lost, Stop]


# ---------------------------------------------------------------------- what to do


@dataclass(frozen=True)
class Prepare:
    """Make a replica's folder and ports on its node."""

    who: Who


@dataclass(frozen=True)
class Start:
    """Start a replica's processes, perhaps again."""

    who: Who


@dataclass(frozen=True)
class End:
    """SIGTERM to a replica's processes, SIGKILL after the grace period."""

    who: Who


@dataclass(frozen=True)
class Finish:
    """Nothing runs any more: leave with this outcome."""

    outcome: Outcome


Action = Union[Prepare, Start, End, Finish]


def step(group: Group, event: Event) -> Tuple[Group, List[Action]]:
    """The state after an event, and what is to be done about it. Defined for every pair."""
    if group.phase is Phase.OVER:
        return group, []
    handler = _HANDLERS[type(event)]
    move = _Move(group)
    handler(move, event)
    move.go_on()
    return move.group, move.actions


@dataclass
class _Move:
    """One step while it is made."""

    group: Group
    actions: List[Action] = field(default_factory=list)

    def member(self, who: Who) -> Member:
        return next(one for one in self.group.members if one.who == who)

    def set(self, who: Who, **values: object) -> None:
        members = tuple(
            replace(one, **values) if one.who == who else one  # type: ignore[arg-type]
            for one in self.group.members
        )
        self.group = replace(self.group, members=members)

    def enter(self, phase: Phase) -> None:
        self.group = replace(self.group, phase=phase)

    def start(self, who: Who) -> None:
        self.set(who, life=Life.STARTED, code=None)
        self.actions.append(Start(who))

    def end(self, who: Who) -> None:
        if self.member(who).life in (Life.STARTED, Life.READY):
            self.set(who, life=Life.STOPPING)
            self.actions.append(End(who))

    def note(self, outcome: Outcome) -> None:
        """The first outcome is the group's."""
        if self.group.outcome is None:
            self.group = replace(self.group, outcome=outcome)

    def fail(self, outcome: Outcome) -> None:
        self.note(outcome)
        self.enter(Phase.ENDING)
        for one in self.group.members:
            self.end(one.who)

    def go_on(self) -> None:
        """Enter the next phases, as far as what is known allows."""
        members = self.group.members
        services = [one for one in members if one.service]
        primaries = [one for one in members if not one.service]
        if self.group.phase is Phase.PREPARING and _all(members, Life.PREPARED):
            self.enter(Phase.SERVICES)
            for one in services:
                self.start(one.who)
            services = [one for one in self.group.members if one.service]
        if self.group.phase is Phase.SERVICES and _all(services, Life.READY):
            self.enter(Phase.PRIMARIES)
            for one in primaries:
                self.start(one.who)
            primaries = [one for one in self.group.members if not one.service]
        if self.group.phase is Phase.PRIMARIES and _all(primaries, Life.ENDED):
            self.fail(Outcome(0, Cause.DONE, "all done"))  # or with the failure noted before
        if self.group.phase is Phase.ENDING and not any(m.life.runs for m in self.group.members):
            self.enter(Phase.OVER)
            assert self.group.outcome is not None  # ENDING is entered with one
            self.actions.append(Finish(self.group.outcome))


def _all(members: Sequence[Member], life: Life) -> bool:
    return all(one.life is life for one in members)


def _placed(move: _Move, event: Placed) -> None:
    if move.group.phase is Phase.PLACING:
        move.enter(Phase.PREPARING)
        move.actions += [Prepare(one.who) for one in move.group.members]


def _refused(move: _Move, event: Refused) -> None:
    if move.group.phase is Phase.PLACING:
        move.fail(Outcome(1, event.cause, event.words))


def _prepared(move: _Move, event: Prepared) -> None:
    if move.member(event.who).life is Life.AWAITED:
        move.set(event.who, life=Life.PREPARED)


def _unprepared(move: _Move, event: Unprepared) -> None:
    if move.member(event.who).life is Life.AWAITED:
        move.fail(Outcome(1, Cause.NOT_PREPARED, f"{name(event.who)}: {event.words}"))


def _ready(move: _Move, event: Ready) -> None:
    if move.member(event.who).life is Life.STARTED:
        move.set(event.who, life=Life.READY)


def _unready(move: _Move, event: Unready) -> None:
    if move.member(event.who).life is Life.STARTED:
        move.fail(Outcome(1, Cause.NOT_READY, f"{name(event.who)}: {event.words}"))


def _exited(move: _Move, event: Exited) -> None:
    member = move.member(event.who)
    if not member.life.runs:
        return
    move.set(event.who, life=Life.ENDED, code=event.code)
    if member.life is Life.STOPPING:
        return
    if not member.service:
        _primary_exited(move, member, event)
    elif member.restarts > 0:
        move.set(event.who, restarts=member.restarts - 1)
        move.start(event.who)
    else:
        words = f"the service {name(event.who)} ended before the primaries: {event.words}"
        move.fail(Outcome(event.code or 1, Cause.SERVICE_ENDED, words))


def _primary_exited(move: _Move, member: Member, event: Exited) -> None:
    if event.code == 0:
        return
    move.note(Outcome(event.code, Cause.EXIT_CODE, f"{name(event.who)}: {event.words}"))
    for other in move.group.members:  # those of its role wait for it, for ever
        if other.role == member.role:
            move.end(other.who)


def _lost(move: _Move, event: Lost) -> None:
    if move.group.phase is Phase.PLACING:
        return
    if move.member(event.who).life in (Life.ENDED, Life.LOST):
        return  # its work was done: the group can still succeed without its node
    move.set(event.who, life=Life.LOST)
    move.fail(Outcome(1, Cause.NODE_DIED, f"{name(event.who)}: {event.words}"))


def _stop(move: _Move, event: Stop) -> None:
    move.fail(Outcome(143, Cause.CANCELLED, event.words))


_HANDLERS: Dict[type, Callable[[_Move, Event], None]] = {
    Placed: _placed,  # type: ignore[dict-item]
    Refused: _refused,  # type: ignore[dict-item]
    Prepared: _prepared,  # type: ignore[dict-item]
    Unprepared: _unprepared,  # type: ignore[dict-item]
    Ready: _ready,  # type: ignore[dict-item]
    Unready: _unready,  # type: ignore[dict-item]
    Exited: _exited,  # type: ignore[dict-item]
    Lost: _lost,  # type: ignore[dict-item]
    Stop: _stop,  # type: ignore[dict-item]
}


def name(who: Who) -> str:
    """``role/replica``, as it stands before the lines of its output."""
    return f"{who[0]}/{who[1]}"
