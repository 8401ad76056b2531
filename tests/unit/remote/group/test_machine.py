"""The machine alone: every state and event, random events of random groups, and examples."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_run_ray.experiment.job import not_ready
from nemo_run_ray.remote.group.driver import event_of, group_rows
from nemo_run_ray.remote.group.machine import (
    END,
    PREPARE,
    START,
    Event,
    Group,
    Kind,
    Outcome,
    Replica,
    ReplicaId,
    ReplicaOrder,
)
from nemo_run_ray.remote.status import Phase, Reason, ReplicaState

SERVER, TRAIN0, TRAIN1, EVAL = ("server", 0), ("train", 0), ("train", 1), ("eval", 0)
PLACED, STOP = Event(Kind.PLACED), Event(Kind.STOP, words="cancelled")
DONE = Outcome(0, Reason.NONE, "exit code 0")


def exited(replica_id: ReplicaId, code: int = 0) -> Event:
    return Event(Kind.EXITED, replica_id, f"exit code {code}", code)


def prepared(*replica_ids: ReplicaId) -> list[Event]:
    return [Event(Kind.PREPARED, replica_id) for replica_id in replica_ids]


def ready(*replica_ids: ReplicaId) -> list[Event]:
    return [Event(Kind.READY, replica_id) for replica_id in replica_ids]


def all_events(replica_ids: Iterable[ReplicaId]) -> list[Event]:
    of_group = (Kind.PLACED, Kind.REFUSED, Kind.STOP)
    return [
        *(Event(kind, None, "words", cause=Reason.NOT_PLACED) for kind in of_group),
        *(
            Event(kind, replica_id, "words", code)
            for replica_id in replica_ids
            for kind in Kind
            if kind not in of_group
            for code in ((0, 3) if kind is Kind.EXITED else (0,))
        ),
    ]


@st.composite
def groups(draw) -> Group:
    services = [False, *draw(st.lists(st.booleans(), max_size=3))]
    replicas = [
        ((f"role{number}", index), service, draw(st.integers(0, 2)) if service else 0)
        for number, service in enumerate(draw(st.permutations(services)))
        for index in range(draw(st.integers(1, 3)))
    ]
    return group_of(*replicas)


@dataclass
class World:
    """The nodes as the orders change them: the processes that run, are ready, exited and how."""

    group: Group
    prepared: set[ReplicaId] = field(default_factory=set)
    running: set[ReplicaId] = field(default_factory=set)
    ended: set[ReplicaId] = field(default_factory=set)
    ready: set[ReplicaId] = field(default_factory=set)
    codes: dict[ReplicaId, int] = field(default_factory=dict)
    starts: dict[ReplicaId, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.primaries = {key for key, one in self.group.replicas.items() if not one.service}

    @property
    def is_over(self) -> bool:
        return self.group.phase is Phase.OVER

    def step(self, event: Event) -> list[ReplicaOrder]:
        replica_id = event.replica_id
        if event.kind in (Kind.EXITED, Kind.LOST) and replica_id in self.running:
            for those in (self.running, self.ready, self.ended):
                those.discard(replica_id)
            if event.kind is Kind.EXITED:
                self.codes[replica_id] = event.code
        elif event.kind is Kind.READY and replica_id in self.running:
            self.ready.add(replica_id)
        before = copy.deepcopy(self.group)
        orders = self.group.step(event)
        for order in orders:
            self._carry_out(*order)
        assert {key for key, one in self.group.replicas.items() if one.life.runs} == self.running
        if self.is_over:
            assert not self.running
            assert self.group.outcome is not None
            is_good = all(self.codes.get(key) == 0 for key in self.primaries)
            assert self.group.outcome.code or is_good
        if before.phase is Phase.OVER:
            assert (self.group, orders) == (before, [])
        if before.outcome is not None:
            assert self.group.outcome == before.outcome
        return orders

    def _carry_out(self, order: str, replica_id: ReplicaId) -> None:
        if order == PREPARE:
            assert replica_id not in self.prepared
            self.prepared.add(replica_id)
        elif order == START:
            assert replica_id not in self.running
            assert self.group.phase in (Phase.SERVICES, Phase.PRIMARIES)
            assert self.prepared == set(self.group.replicas)
            is_service = replica_id not in self.primaries
            assert is_service or set(self.group.replicas) - self.primaries <= self.ready
            self.starts[replica_id] = self.starts.get(replica_id, 0) + 1
            self.running.add(replica_id)
        else:
            assert order == END
            assert replica_id in self.running - self.ended
            self.ended.add(replica_id)

    def plausible(self) -> list[Event]:
        """The events that can really happen next."""
        found = [PLACED] if self.group.phase is Phase.PLACING else []
        for key, replica in self.group.replicas.items():
            if replica.life is ReplicaState.AWAITED and key in self.prepared:
                found += prepared(key)
            if key in self.running:
                found += ready(key) if key not in self.ready else []
                found += [exited(key, code) for code in (0, 0, 3, 143)]
        return found

    def end_well(self) -> None:
        """Nodes answer, probes succeed, primaries exit, and whatever must end ends."""
        while not self.is_over:
            event = next(
                event
                for event in self.plausible()
                if event.kind is not Kind.EXITED
                or event.replica_id in self.ended
                or (event.code == 0 and event.replica_id in self.primaries)
            )
            self.step(event)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_whatever_happens_the_rules_hold_and_the_group_can_finish(data):
    world = World(data.draw(groups()))
    anything = all_events(world.group.replicas)
    for _ in range(data.draw(st.integers(0, 40))):
        is_rare = data.draw(st.integers(0, 9)) == 0
        world.step(data.draw(st.sampled_from((not is_rare and world.plausible()) or anything)))
    world.end_well()


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_a_stop_ends_all_that_runs_and_then_the_group(data):
    world = World(data.draw(groups()))
    for _ in range(data.draw(st.integers(0, 30))):
        world.step(data.draw(st.sampled_from(world.plausible() or [STOP])))
    world.step(STOP)
    assert world.ended == world.running
    for replica_id in sorted(world.running):
        assert not world.is_over
        assert START not in [order for order, _ in world.step(exited(replica_id, 143))]
    assert world.is_over


def group_of(*replicas: tuple[ReplicaId, bool, int]) -> Group:
    return Group({key: Replica(key, service, restarts) for key, service, restarts in replicas})


def after(group: Group, *events: Event) -> list[ReplicaOrder]:
    """The orders of the last event."""
    orders: list[ReplicaOrder] = []
    for event in events:
        orders = group.step(event)
    return orders


def group_in(phase: Phase, restarts: int = 0) -> Group:
    """A service, a primary role of two replicas and another primary role, led into a phase."""
    primaries = [(key, False, 0) for key in (TRAIN0, TRAIN1, EVAL)]
    group = group_of((SERVER, True, restarts), *primaries)
    ways = {
        Phase.PREPARING: [PLACED],
        Phase.SERVICES: prepared(SERVER, TRAIN0, TRAIN1, EVAL),
        Phase.PRIMARIES: ready(SERVER),
        Phase.ENDING: [exited(TRAIN0), exited(TRAIN1), exited(EVAL)],
    }
    for reached, events in ways.items():
        if group.phase is not phase:
            after(group, *events)
            assert group.phase is reached
    return group


def ends(*replica_ids: ReplicaId) -> list[ReplicaOrder]:
    return [(END, replica_id) for replica_id in replica_ids]


def test_the_probes_answer_is_shown_until_the_service_is_ready_or_starts_again(capfd):
    report = {"at": "waiting", "words": "not ready for 30 s: /health is answered with 301, not 200"}
    for event in (*ready(SERVER), exited(SERVER, 1)):
        group = group_in(Phase.SERVICES, restarts=1)
        waits = event_of(SimpleNamespace(replica_id=SERVER), report)
        assert waits is not None
        assert after(group, waits) == []
        assert not_ready(group_rows(group, "")) == [f"server/0 is {report['words']}"]
        assert f"nemo_run_ray| server/0 is {report['words']}" in capfd.readouterr().out
        after(group, event)
        assert not_ready(group_rows(group, "")) == []


def lost(replica_id: ReplicaId, cause: Reason = Reason.NODE_DIED) -> Event:
    return Event(Kind.LOST, replica_id, "node n1 died", cause=cause)


def early(code: int, group_code: int) -> Outcome:
    words = f"the service server/0 ended before the primaries: exit code {code}"
    return Outcome(group_code, Reason.SERVICE_ENDED, words)


def died(name: str, reason: Reason = Reason.NODE_DIED) -> Outcome:
    return Outcome(1, reason, f"{name}: node n1 died")


_ENV = Reason.RUNTIME_ENV
_LATE = Event(Kind.UNREADY, SERVER, "refused")
_NOT_READY = Outcome(1, Reason.NOT_READY, "server/0: refused")
_STOPPED = Outcome(143, Reason.CANCELLED, "cancelled")
_PRIMARIES = ends(TRAIN0, TRAIN1, EVAL)
_NO_ROOM = Event(Kind.REFUSED, None, "CPU 900", cause=Reason.UNSCHEDULABLE)
_NEVER = Outcome(1, Reason.UNSCHEDULABLE, "CPU 900")
_NO_UV = Event(Kind.UNPREPARED, TRAIN1, "no uv", cause=_ENV)
_FIVE = Outcome(5, Reason.EXIT_CODE, "eval/0: exit code 5")


@pytest.mark.parametrize(
    ("phase", "restarts", "events", "orders", "outcome"),
    [
        (Phase.PRIMARIES, 0, [exited(TRAIN0), exited(TRAIN1), exited(EVAL)], ends(SERVER), DONE),
        (Phase.SERVICES, 0, [exited(SERVER)], [], early(0, 1)),
        (Phase.PRIMARIES, 0, [exited(SERVER, 139)], _PRIMARIES, early(139, 139)),
        (Phase.PRIMARIES, 1, [exited(SERVER, 3)], [(START, SERVER)], None),
        (Phase.PRIMARIES, 1, [exited(SERVER, 3), exited(SERVER, 4)], _PRIMARIES, early(4, 4)),
        (Phase.SERVICES, 2, [_LATE], ends(SERVER), _NOT_READY),
        (Phase.PRIMARIES, 1, [exited(SERVER, 1), _LATE], ends(SERVER) + _PRIMARIES, _NOT_READY),
        (Phase.PRIMARIES, 0, [exited(EVAL, 5), exited(TRAIN0, 7)], ends(TRAIN1), _FIVE),
        (
            Phase.PRIMARIES,
            0,
            [exited(EVAL, 5), exited(TRAIN0, 7), exited(TRAIN1, 143)],
            ends(SERVER),
            _FIVE,
        ),
        (Phase.PRIMARIES, 0, [exited(TRAIN0), lost(TRAIN0)], [], None),
        (Phase.ENDING, 0, [lost(SERVER)], [], DONE),
        (Phase.PRIMARIES, 0, [lost(SERVER)], _PRIMARIES, died("server/0")),
        (Phase.PREPARING, 0, [lost(EVAL)], [], died("eval/0")),
        (Phase.PREPARING, 0, [lost(EVAL, _ENV)], [], died("eval/0", _ENV)),
        (Phase.PRIMARIES, 0, [lost(SERVER, _ENV)], _PRIMARIES, died("server/0")),
        (Phase.PLACING, 0, [STOP], [], _STOPPED),
        (Phase.PRIMARIES, 2, [STOP, exited(SERVER, 1)], [], _STOPPED),
        (Phase.PLACING, 0, [_NO_ROOM], [], _NEVER),
        (Phase.PREPARING, 0, [_NO_UV], [], Outcome(1, _ENV, "train/1: no uv")),
    ],
)
def test_events_give_orders_and_the_first_outcome_counts(phase, restarts, events, orders, outcome):
    group = group_in(phase, restarts)
    assert after(group, *events) == orders
    assert group.outcome == outcome
    is_over = outcome is not None and not any(one.life.runs for one in group.replicas.values())
    assert (group.phase is Phase.OVER) == is_over
