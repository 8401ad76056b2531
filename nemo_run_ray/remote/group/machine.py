"""State machine of a group: services start first, primaries when they are ready; pure.

The driver feeds every event to ``step`` and carries out the actions; it decides nothing itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Callable, Dict, List, Optional, Sequence, Tuple, Union

from ..hosts.actors import ReplicaId, name
from ..status import Life, Phase, Reason


@dataclass(frozen=True)
class ReplicaState:
    """One replica: what it is and where it is."""

    role: str
    index: int
    service: bool
    restarts: int = 0
    life: Life = Life.AWAITED
    code: Optional[int] = None
    #: Last answer to its probe while it is started and not ready; empty at first.
    waits_for: str = ""

    @property
    def replica_id(self) -> ReplicaId:
        return self.role, self.index


@dataclass(frozen=True)
class Outcome:
    """The end of the group: its exit code, the cause, and a sentence about it."""

    code: int
    cause: Reason
    words: str


@dataclass(frozen=True)
class Group:
    """The whole state, immutable: ``step`` gives a new one."""

    replicas: Tuple[ReplicaState, ...]
    phase: Phase = Phase.PLACING
    outcome: Optional[Outcome] = None

    def replica(self, replica_id: ReplicaId) -> ReplicaState:
        return next(replica for replica in self.replicas if replica.replica_id == replica_id)


# ---------------------------------------------------------------------- what happens


@dataclass(frozen=True)
class Placed:
    """Every replica has its bundle."""


@dataclass(frozen=True)
class PlacementRefused:
    """The cluster will not place the group."""

    cause: Reason
    words: str


@dataclass(frozen=True)
class Prepared:
    """A replica's node is ready to start it."""

    replica_id: ReplicaId


@dataclass(frozen=True)
class Unprepared:
    """A replica cannot be started on its node."""

    replica_id: ReplicaId
    words: str
    cause: Reason = Reason.NOT_STARTED


@dataclass(frozen=True)
class Waiting:
    """A replica's probe has not succeeded so far."""

    replica_id: ReplicaId
    words: str


@dataclass(frozen=True)
class Ready:
    """A replica runs, and its probe, if it has one, has succeeded."""

    replica_id: ReplicaId


@dataclass(frozen=True)
class Unready:
    """A replica's probe did not succeed in time."""

    replica_id: ReplicaId
    words: str


@dataclass(frozen=True)
class Exited:
    """All processes of a replica have ended."""

    replica_id: ReplicaId
    code: int
    words: str


@dataclass(frozen=True)
class Lost:
    """A replica's node, or our process there, is gone."""

    replica_id: ReplicaId
    words: str


@dataclass(frozen=True)
class Stop:
    """The group is told to end."""

    words: str = "cancelled"


Event = Union[
    Placed, PlacementRefused, Prepared, Unprepared, Waiting, Ready, Unready, Exited, Lost, Stop
]


# ---------------------------------------------------------------------- what to do


@dataclass(frozen=True)
class Prepare:
    """Make a replica's folder and ports on its node."""

    replica_id: ReplicaId


@dataclass(frozen=True)
class Start:
    """Start a replica's processes, perhaps again."""

    replica_id: ReplicaId


@dataclass(frozen=True)
class End:
    """Send SIGTERM to a replica's processes, and SIGKILL after the grace period."""

    replica_id: ReplicaId


@dataclass(frozen=True)
class Finish:
    """Nothing runs any more: leave with this outcome."""

    outcome: Outcome


Action = Union[Prepare, Start, End, Finish]


def step(group: Group, event: Event) -> Tuple[Group, List[Action]]:
    """The state after an event, and what is to be done about it; defined for every pair."""
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

    def replica(self, replica_id: ReplicaId) -> ReplicaState:
        return self.group.replica(replica_id)

    def set(self, replica_id: ReplicaId, **values: object) -> None:
        replicas = tuple(
            replace(replica, **values) if replica.replica_id == replica_id else replica  # type: ignore[arg-type]
            for replica in self.group.replicas
        )
        self.group = replace(self.group, replicas=replicas)

    def enter(self, phase: Phase) -> None:
        self.group = replace(self.group, phase=phase)

    def start(self, replica_id: ReplicaId) -> None:
        self.set(replica_id, life=Life.STARTED, code=None, waits_for="")
        self.actions.append(Start(replica_id))

    def end(self, replica_id: ReplicaId) -> None:
        if self.replica(replica_id).life in (Life.STARTED, Life.READY):
            self.set(replica_id, life=Life.STOPPING)
            self.actions.append(End(replica_id))

    def note(self, outcome: Outcome) -> None:
        """The first outcome is the group's."""
        if self.group.outcome is None:
            self.group = replace(self.group, outcome=outcome)

    def fail(self, outcome: Outcome) -> None:
        self.note(outcome)
        self.enter(Phase.ENDING)
        for replica in self.group.replicas:
            self.end(replica.replica_id)

    def go_on(self) -> None:
        """Enter the next phases, as far as what is known allows."""
        replicas = self.group.replicas
        services = [replica for replica in replicas if replica.service]
        primaries = [replica for replica in replicas if not replica.service]
        if self.group.phase is Phase.PREPARING and _all(replicas, Life.PREPARED):
            self.enter(Phase.SERVICES)
            for replica in services:
                self.start(replica.replica_id)
            services = [replica for replica in self.group.replicas if replica.service]
        if self.group.phase is Phase.SERVICES and _all(services, Life.READY):
            self.enter(Phase.PRIMARIES)
            for replica in primaries:
                self.start(replica.replica_id)
            primaries = [replica for replica in self.group.replicas if not replica.service]
        if self.group.phase is Phase.PRIMARIES and _all(primaries, Life.ENDED):
            self.fail(Outcome(0, Reason.NONE, "all done"))  # or with the failure noted before
        if self.group.phase is Phase.ENDING and not any(m.life.runs for m in self.group.replicas):
            self.enter(Phase.OVER)
            assert self.group.outcome is not None  # ENDING is entered with one
            self.actions.append(Finish(self.group.outcome))


def _all(replicas: Sequence[ReplicaState], life: Life) -> bool:
    return all(replica.life is life for replica in replicas)


def _placed(move: _Move, event: Placed) -> None:
    if move.group.phase is Phase.PLACING:
        move.enter(Phase.PREPARING)
        move.actions += [Prepare(replica.replica_id) for replica in move.group.replicas]


def _refused(move: _Move, event: PlacementRefused) -> None:
    if move.group.phase is Phase.PLACING:
        move.fail(Outcome(1, event.cause, event.words))


def _prepared(move: _Move, event: Prepared) -> None:
    if move.replica(event.replica_id).life is Life.AWAITED:
        move.set(event.replica_id, life=Life.PREPARED)


def _unprepared(move: _Move, event: Unprepared) -> None:
    if move.replica(event.replica_id).life is Life.AWAITED:
        move.fail(Outcome(1, event.cause, f"{name(event.replica_id)}: {event.words}"))


def _waiting(move: _Move, event: Waiting) -> None:
    if move.replica(event.replica_id).life is Life.STARTED:
        move.set(event.replica_id, waits_for=event.words)


def _ready(move: _Move, event: Ready) -> None:
    if move.replica(event.replica_id).life is Life.STARTED:
        move.set(event.replica_id, life=Life.READY)


def _unready(move: _Move, event: Unready) -> None:
    if move.replica(event.replica_id).life is Life.STARTED:
        move.fail(Outcome(1, Reason.NOT_READY, f"{name(event.replica_id)}: {event.words}"))


def _exited(move: _Move, event: Exited) -> None:
    replica = move.replica(event.replica_id)
    if not replica.life.runs:
        return
    move.set(event.replica_id, life=Life.ENDED, code=event.code)
    if replica.life is Life.STOPPING:
        return
    if not replica.service:
        _primary_exited(move, replica, event)
    elif replica.restarts > 0:
        move.set(event.replica_id, restarts=replica.restarts - 1)
        move.start(event.replica_id)
    else:
        words = f"the service {name(event.replica_id)} ended before the primaries: {event.words}"
        move.fail(Outcome(event.code or 1, Reason.SERVICE_ENDED, words))


def _primary_exited(move: _Move, replica: ReplicaState, event: Exited) -> None:
    if event.code == 0:
        return
    move.note(Outcome(event.code, Reason.EXIT_CODE, f"{name(event.replica_id)}: {event.words}"))
    for other in move.group.replicas:  # those of its role wait for it, for ever
        if other.role == replica.role:
            move.end(other.replica_id)


def _lost(move: _Move, event: Lost) -> None:
    if move.group.phase is Phase.PLACING:
        return
    if move.replica(event.replica_id).life in (Life.ENDED, Life.LOST):
        return  # its work was done: the group can still succeed without its node
    move.set(event.replica_id, life=Life.LOST)
    move.fail(Outcome(1, Reason.NODE_DIED, f"{name(event.replica_id)}: {event.words}"))


def _stop(move: _Move, event: Stop) -> None:
    move.fail(Outcome(143, Reason.CANCELLED, event.words))


_HANDLERS: Dict[type, Callable[[_Move, Event], None]] = {
    Placed: _placed,  # type: ignore[dict-item]
    PlacementRefused: _refused,  # type: ignore[dict-item]
    Prepared: _prepared,  # type: ignore[dict-item]
    Unprepared: _unprepared,  # type: ignore[dict-item]
    Waiting: _waiting,  # type: ignore[dict-item]
    Ready: _ready,  # type: ignore[dict-item]
    Unready: _unready,  # type: ignore[dict-item]
    Exited: _exited,  # type: ignore[dict-item]
    Lost: _lost,  # type: ignore[dict-item]
    Stop: _stop,  # type: ignore[dict-item]
}
