"""State machine of a group: services start first, primaries when they are ready; pure.

The driver feeds every event to ``Group.step`` and carries out the orders; it decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Iterable, NamedTuple

from ..hosts.actors import ReplicaId, name
from ..status import Phase, Reason, ReplicaState


@dataclass
class Replica:
    """One replica and where it is."""

    replica_id: ReplicaId
    service: bool
    restarts: int = 0
    life: ReplicaState = ReplicaState.AWAITED
    code: int | None = None
    #: Last answer to its probe while it is started and not ready; empty at first.
    waits_for: str = ""
    #: Its ``ReplicaHandle``, once it has a node; for the driver alone.
    handle: Any = None


class Outcome(NamedTuple):
    """The end of the group: its exit code, the cause, and a sentence about it."""

    code: int
    cause: Reason
    words: str


class Kind(str, Enum):
    """Kinds of events. Those of a replica are also the kinds of the reports from its node."""

    #: Every replica has its bundle.
    PLACED = "placed"
    #: The cluster will not place the group.
    REFUSED = "refused"
    #: The group must end.
    STOP = "stop"
    #: The replica's node is ready to start it.
    PREPARED = "prepared"
    #: The replica cannot be started on its node.
    UNPREPARED = "unprepared"
    #: The probe has not succeeded so far.
    WAITING = "waiting"
    #: The replica runs, and its probe, if it has one, has succeeded.
    READY = "ready"
    #: The probe did not succeed in time.
    UNREADY = "unready"
    #: All processes of the replica have ended.
    EXITED = "exited"
    #: The node, or the process of this package on it, is gone.
    LOST = "lost"


class Event(NamedTuple):
    """An event of the whole group, or of one replica."""

    kind: Kind
    replica_id: ReplicaId | None = None
    words: str = ""
    code: int = 0
    cause: Reason = Reason.NOT_STARTED


#: Orders to a replica: make its folder and ports on its node; start its processes, perhaps again;
#: send them SIGTERM, and SIGKILL after the grace period.
PREPARE, START, END = "prepare", "start", "end"
#: One of them, and the replica.
ReplicaOrder = tuple[str, ReplicaId]


@dataclass
class Group:
    """The state of a group. Its outcome counts when the phase is ``OVER``."""

    replicas: dict[ReplicaId, Replica]
    phase: Phase = Phase.PLACING
    outcome: Outcome | None = None
    _orders: list[ReplicaOrder] = field(default_factory=list)

    def step(self, event: Event) -> list[ReplicaOrder]:
        """Take an event and return the orders; defined for every state and event."""
        self._orders = []
        if self.phase is Phase.OVER:
            return []
        if event.replica_id:
            self._of_replica(self.replicas[event.replica_id], event)
        elif event.kind is Kind.STOP:
            self._fail(143, Reason.CANCELLED, event.words)
        elif self.phase is Phase.PLACING and event.kind is Kind.PLACED:
            self.phase = Phase.PREPARING
            self._orders = [(PREPARE, replica_id) for replica_id in self.replicas]
        elif self.phase is Phase.PLACING:
            self._fail(1, event.cause, event.words)
        self._next_phase()
        return self._orders

    def _of_replica(self, replica: Replica, event: Event) -> None:
        kind, life, who = event.kind, replica.life, name(replica.replica_id)
        words = f"{who}: {event.words}"
        if kind is Kind.LOST:
            # What has ended may lose its node: the group can still succeed.
            if life not in (ReplicaState.ENDED, ReplicaState.LOST):
                replica.life = ReplicaState.LOST
                self._fail(
                    1, event.cause if life is ReplicaState.AWAITED else Reason.NODE_DIED, words
                )
        elif kind is Kind.EXITED and life.runs:
            replica.life, replica.code = ReplicaState.ENDED, event.code
            if life is ReplicaState.STOPPING:
                return
            if replica.service and replica.restarts > 0:
                replica.restarts -= 1
                self._start([replica])
            elif replica.service:
                words = f"the service {who} ended before the primaries: {event.words}"
                self._fail(event.code or 1, Reason.SERVICE_ENDED, words)
            elif event.code:
                self.outcome = self.outcome or Outcome(event.code, Reason.EXIT_CODE, words)
                # The others of its role would wait for it.
                role = replica.replica_id[0]
                self._end(one for key, one in self.replicas.items() if key[0] == role)
        elif life is ReplicaState.AWAITED and kind is Kind.PREPARED:
            replica.life = ReplicaState.PREPARED
        elif life is ReplicaState.AWAITED and kind is Kind.UNPREPARED:
            self._fail(1, event.cause, words)
        elif life is ReplicaState.STARTED and kind is Kind.WAITING:
            replica.waits_for = event.words
        elif life is ReplicaState.STARTED and kind is Kind.READY:
            replica.life = ReplicaState.READY
        elif life is ReplicaState.STARTED and kind is Kind.UNREADY:
            self._fail(1, Reason.NOT_READY, words)

    def _next_phase(self) -> None:
        """Enter the next phases, as far as the replicas allow."""
        replicas = self.replicas.values()
        services = [replica for replica in replicas if replica.service]
        primaries = [replica for replica in replicas if not replica.service]
        if self.phase is Phase.PREPARING and _all(replicas, ReplicaState.PREPARED):
            self.phase = Phase.SERVICES
            self._start(services)
        if self.phase is Phase.SERVICES and _all(services, ReplicaState.READY):
            self.phase = Phase.PRIMARIES
            self._start(primaries)
        if self.phase is Phase.PRIMARIES and _all(primaries, ReplicaState.ENDED):
            self._fail(0, Reason.NONE, "exit code 0")  # or with the failure noted before
        if self.phase is Phase.ENDING and not any(replica.life.runs for replica in replicas):
            self.phase = Phase.OVER

    def _start(self, replicas: Iterable[Replica]) -> None:
        for replica in replicas:
            replica.life, replica.code, replica.waits_for = ReplicaState.STARTED, None, ""
            self._orders.append((START, replica.replica_id))

    def _end(self, replicas: Iterable[Replica]) -> None:
        for replica in replicas:
            if replica.life in (ReplicaState.STARTED, ReplicaState.READY):
                replica.life = ReplicaState.STOPPING
                self._orders.append((END, replica.replica_id))

    def _fail(self, code: int, cause: Reason, words: str) -> None:
        """End the group; the first outcome is its own."""
        self.outcome = self.outcome or Outcome(code, cause, words)
        self.phase = Phase.ENDING
        self._end(self.replicas.values())


def _all(replicas: Iterable[Replica], life: ReplicaState) -> bool:
    return all(replica.life is life for replica in replicas)
