"""The machine alone: every pair of state and event, random lives of random groups, and examples."""

import itertools
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_run_ray.experiment.elements import not_ready
from nemo_run_ray.remote.group import machine
from nemo_run_ray.remote.group.driver import _events_of_report, group_rows
from nemo_run_ray.remote.group.machine import (
    Action,
    End,
    Event,
    Exited,
    Finish,
    Group,
    Lost,
    Outcome,
    Placed,
    PlacementRefused,
    Prepare,
    Prepared,
    Ready,
    ReplicaId,
    ReplicaState,
    Start,
    Stop,
    Unprepared,
    Unready,
    Waiting,
    step,
)
from nemo_run_ray.remote.status import Life, Phase, Reason

_SERVICE, _PRIMARY = ("server", 0), ("train", 0)
_NOTED = Outcome(9, Reason.EXIT_CODE, "noted before")


def _of_the_whole_group() -> list[Event]:
    causes = [Reason.UNSCHEDULABLE, Reason.NOT_PLACED]
    return [Placed(), Stop(), *(PlacementRefused(cause, "no room") for cause in causes)]


def _of_one(replica_id: ReplicaId) -> list[Event]:
    return [
        Prepared(replica_id),
        Unprepared(replica_id, "port taken"),
        Waiting(replica_id, "answered with 301"),
        Ready(replica_id),
        Unready(replica_id, "too late"),
        Exited(replica_id, 0, "exit code 0"),
        Exited(replica_id, 3, "exit code 3"),
        Lost(replica_id, "node died"),
    ]


def _events(whos: Iterable[ReplicaId]) -> list[Event]:
    return [
        *_of_the_whole_group(),
        *(event for replica_id in whos for event in _of_one(replica_id)),
    ]


def _lives(group: Group) -> dict[ReplicaId, Life]:
    return {one.replica_id: one.life for one in group.replicas}


# ---------------------------------------------------------------------- every pair


def _states(phase: Phase) -> Iterator[Group]:
    """A service and a primary in all lives, reachable or not, with and without an outcome."""
    outcomes = [_NOTED] if phase in (Phase.ENDING, Phase.OVER) else [None, _NOTED]
    for lives in itertools.product(Life, Life):
        for restarts, outcome in itertools.product((0, 1), outcomes):
            replicas = (
                ReplicaState(*_SERVICE, True, restarts, lives[0]),
                ReplicaState(*_PRIMARY, False, 0, lives[1]),
            )
            yield Group(replicas, phase, outcome)


def test_the_events_below_are_all_there_are():
    assert {type(event) for event in _events([_SERVICE])} == set(typing.get_args(Event))


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("event", _events([_SERVICE, _PRIMARY]), ids=str)
def test_every_event_has_an_answer_in_every_state(phase, event):
    for group in _states(phase):
        after, actions = step(group, event)
        assert all(isinstance(one, typing.get_args(Action)) for one in actions)
        assert [one.replica_id for one in after.replicas] == [
            one.replica_id for one in group.replicas
        ]
        if group.outcome is not None:
            assert after.outcome == group.outcome
        if after.phase in (Phase.ENDING, Phase.OVER):
            assert after.outcome is not None
        assert [one for one in actions if isinstance(one, Finish)] == (
            [Finish(after.outcome)] if after.phase is Phase.OVER is not group.phase else []
        )


@pytest.mark.parametrize("event", _events([_SERVICE, _PRIMARY]), ids=str)
def test_nothing_happens_once_it_is_over(event):
    for group in _states(Phase.OVER):
        assert step(group, event) == (group, [])


@pytest.mark.parametrize("event", _events([_SERVICE, _PRIMARY]), ids=str)
def test_phases_go_one_way(event):
    order = list(Phase)
    for phase in Phase:
        for group in _states(phase):
            assert order.index(step(group, event)[0].phase) >= order.index(phase)


def test_a_step_leaves_the_state_before_it_as_it_was():
    group = Group((ReplicaState(*_SERVICE, True), ReplicaState(*_PRIMARY, False)))
    step(group, Placed())
    assert group == Group((ReplicaState(*_SERVICE, True), ReplicaState(*_PRIMARY, False)))


# ---------------------------------------------------------------------- random lives


@st.composite
def _groups(draw) -> Group:
    services = [False, *draw(st.lists(st.booleans(), max_size=3))]
    replicas = []
    for number, service in enumerate(draw(st.permutations(services))):
        restarts = draw(st.integers(0, 2)) if service else 0
        for index in range(draw(st.integers(1, 3))):
            replicas.append(ReplicaState(f"role{number}", index, service, restarts))
    return Group(tuple(replicas))


@dataclass
class World:
    """What the actions make of the nodes: which processes run, are ready, exited with what."""

    group: Group
    prepared: set[ReplicaId] = field(default_factory=set)  # told to prepare
    answered: set[ReplicaId] = field(default_factory=set)
    running: set[ReplicaId] = field(default_factory=set)
    ended: set[ReplicaId] = field(default_factory=set)  # told to end
    ready: set[ReplicaId] = field(default_factory=set)
    codes: dict[ReplicaId, int] = field(default_factory=dict)
    starts: dict[ReplicaId, int] = field(default_factory=dict)
    finish: Outcome | None = None

    def feed(self, event: Event) -> list[Action]:
        before = self.group
        self._happens(event)
        self.group, actions = step(self.group, event)
        if self.finish is not None:
            assert (self.group, actions) == (before, [])
        for action in actions:
            assert self.finish is None, "something is to be done after the end"
            self._do(action)
        assert {one.replica_id for one in self.group.replicas if one.life.runs} == self.running
        if before.outcome is not None:
            assert self.group.outcome == before.outcome
        return actions

    def _happens(self, event: Event) -> None:
        if isinstance(event, (Exited, Lost)) and event.replica_id in self.running:
            self.running.discard(event.replica_id)
            self.ready.discard(event.replica_id)
            self.ended.discard(event.replica_id)
            if isinstance(event, Exited):
                self.codes[event.replica_id] = event.code
        elif isinstance(event, Ready) and event.replica_id in self.running:
            self.ready.add(event.replica_id)
        elif isinstance(event, Prepared):
            self.answered.add(event.replica_id)

    def _do(self, action: Action) -> None:
        if isinstance(action, Finish):
            assert not self.running
            assert action.outcome == self.group.outcome
            self.finish = action.outcome
            assert action.outcome.code or self._all_primaries_succeeded
            return
        replica = next(one for one in self.group.replicas if one.replica_id == action.replica_id)
        if isinstance(action, Prepare):
            assert action.replica_id not in self.prepared
            self.prepared.add(action.replica_id)
        elif isinstance(action, Start):
            assert action.replica_id not in self.running
            assert self.group.phase in (Phase.SERVICES, Phase.PRIMARIES)
            assert self.prepared == self.answered == {one.replica_id for one in self.group.replicas}
            assert replica.service or self._services <= self.ready
            self.starts[action.replica_id] = self.starts.get(action.replica_id, 0) + 1
            self.running.add(action.replica_id)
        else:
            assert action.replica_id in self.running - self.ended
            self.ended.add(action.replica_id)

    @property
    def _services(self) -> set[ReplicaId]:
        return {one.replica_id for one in self.group.replicas if one.service}

    @property
    def primaries(self) -> set[ReplicaId]:
        return {one.replica_id for one in self.group.replicas if not one.service}

    @property
    def _all_primaries_succeeded(self) -> bool:
        return all(self.codes.get(replica_id) == 0 for replica_id in self.primaries)

    def plausible(self) -> list[Event]:
        """What can really happen next."""
        found: list[Event] = []
        if self.group.phase is Phase.PLACING:
            found.append(Placed())
        for replica_id, life in _lives(self.group).items():
            if life is Life.AWAITED and replica_id in self.prepared:
                found.append(Prepared(replica_id))
            if replica_id in self.running:
                found += [Ready(replica_id)] if replica_id not in self.ready else []
                found += [Exited(replica_id, code, f"exit code {code}") for code in (0, 0, 3, 143)]
        return found

    def goes_well(self) -> None:
        """Nodes answer, probes succeed, primaries exit, and whatever is told to end ends."""
        restarts = sum(one.restarts for one in self.group.replicas)
        for _ in range(6 * (len(self.group.replicas) + restarts)):
            if self.finish is not None:
                return
            event = self._next_good_thing()
            assert event is not None, f"nothing can happen any more in {self.group}"
            self.feed(event)
        assert self.finish is not None

    def _next_good_thing(self) -> Event | None:
        if self.group.phase is Phase.PLACING:
            return Placed()
        for replica_id, life in _lives(self.group).items():
            if self.group.phase is Phase.PREPARING and life is Life.AWAITED:
                return Prepared(replica_id)
            if replica_id in self.ended or (
                replica_id in self.running and replica_id in self.primaries
            ):
                return Exited(replica_id, 0, "exit code 0")
            if replica_id in self.running - self.ready and self.group.phase is not Phase.ENDING:
                return Ready(replica_id)
        return None


def _live(data: st.DataObject, steps: int, stranger: bool = True) -> World:
    """A group to which things happen, plausible ones more often than others."""
    world = World(data.draw(_groups()))
    nonsense = _events([one.replica_id for one in world.group.replicas])
    for _ in range(data.draw(st.integers(0, steps))):
        plausible = world.plausible()
        rare = stranger and data.draw(st.integers(0, 19)) == 0
        pool = nonsense if rare or not plausible else plausible
        world.feed(data.draw(st.sampled_from(pool)))
    return world


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_whatever_happens_the_rules_hold_and_the_group_can_finish(data):
    world = _live(data, 40)
    world.goes_well()
    assert world.group.phase is Phase.OVER
    for event in _events([one.replica_id for one in world.group.replicas]):
        assert world.feed(event) == []


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_events_in_any_order_break_no_rule(data):
    world = World(data.draw(_groups()))
    events = _events([one.replica_id for one in world.group.replicas])
    for event in data.draw(st.lists(st.sampled_from(events), max_size=40)):
        world.feed(event)


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_a_stop_ends_all_that_runs_and_then_the_group(data):
    world = _live(data, 30, stranger=False)
    world.feed(Stop())
    assert world.group.phase in (Phase.ENDING, Phase.OVER)
    assert world.ended == world.running
    assert world.group.outcome is not None
    for replica_id in sorted(world.running):
        assert world.finish is None
        assert not [
            one for one in world.feed(Exited(replica_id, 143, "")) if isinstance(one, Start)
        ]
    assert world.finish is not None


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_when_nothing_goes_wrong_the_code_is_0_and_each_starts_once(data):
    world = World(data.draw(_groups()))
    world.goes_well()
    assert world.finish == Outcome(0, Reason.NONE, "all done")
    assert world.starts == {one.replica_id: 1 for one in world.group.replicas}


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_a_service_is_started_once_more_than_it_has_restarts_at_most(data):
    group = data.draw(_groups())
    world = World(group)
    for _ in range(60):
        plausible = [one for one in world.plausible() if not isinstance(one, Exited)]
        early = [
            Exited(replica_id, 3, "") for replica_id in sorted(world.running - world.primaries)
        ]
        if not plausible + early:
            break
        world.feed(data.draw(st.sampled_from(plausible + early)))
    for one in group.replicas:
        assert world.starts.get(one.replica_id, 0) <= 1 + one.restarts


# ---------------------------------------------------------------------- examples


def _group(restarts: int = 0) -> Group:
    """One service, a primary role of two replicas, and another primary role."""
    return Group(
        (
            ReplicaState("server", 0, True, restarts),
            ReplicaState("train", 0, False),
            ReplicaState("train", 1, False),
            ReplicaState("eval", 0, False),
        )
    )


_SERVER, _TRAIN0, _TRAIN1, _EVAL = ("server", 0), ("train", 0), ("train", 1), ("eval", 0)


def _after(group: Group, *events: Event) -> tuple[Group, list[Action]]:
    """The state after all events, and the actions of the last one."""
    actions: list[Action] = []
    for event in events:
        group, actions = step(group, event)
    return group, actions


def _in(phase: Phase, restarts: int = 0) -> Group:
    """The group, led into a phase by what leads there."""
    way: list[tuple[Phase, list[Event]]] = [
        (Phase.PLACING, []),
        (Phase.PREPARING, [Placed()]),
        (
            Phase.SERVICES,
            [Prepared(replica_id) for replica_id in (_SERVER, _TRAIN0, _TRAIN1, _EVAL)],
        ),
        (Phase.PRIMARIES, [Ready(_SERVER)]),
        (Phase.ENDING, [Exited(replica_id, 0, "") for replica_id in (_TRAIN0, _TRAIN1, _EVAL)]),
        (Phase.OVER, [Exited(_SERVER, 143, "")]),
    ]
    group = _group(restarts)
    for reached, events in way:
        group, _ = _after(group, *events)
        assert group.phase is reached
        if reached is phase:
            break
    return group


def test_placed_prepares_every_replica():
    group, actions = step(_group(), Placed())
    assert actions == [Prepare(one.replica_id) for one in group.replicas]


def test_services_start_when_the_last_replica_is_prepared():
    group = _in(Phase.PREPARING)
    group, actions = _after(group, Prepared(_EVAL), Prepared(_TRAIN1), Prepared(_SERVER))
    assert (group.phase, actions) == (Phase.PREPARING, [])
    group, actions = step(group, Prepared(_TRAIN0))
    assert actions == [Start(_SERVER)]


def test_primaries_start_when_the_last_service_is_ready():
    replicas = (
        ReplicaState("a", 0, True),
        ReplicaState("a", 1, True),
        ReplicaState("b", 0, True),
        _group().replicas[3],
    )
    group, _ = _after(Group(replicas), Placed(), *(Prepared(one.replica_id) for one in replicas))
    group, actions = _after(group, Ready(("a", 1)), Ready(("b", 0)))
    assert (group.phase, actions) == (Phase.SERVICES, [])
    group, actions = step(group, Ready(("a", 0)))
    assert (group.phase, actions) == (Phase.PRIMARIES, [Start(_EVAL)])


def test_without_services_primaries_start_as_soon_as_all_are_prepared():
    group = Group((ReplicaState("train", 0, False), ReplicaState("train", 1, False)))
    group, actions = _after(group, Placed(), Prepared(_TRAIN1), Prepared(_TRAIN0))
    assert (group.phase, actions) == (Phase.PRIMARIES, [Start(_TRAIN0), Start(_TRAIN1)])


def test_when_the_last_primary_is_done_the_services_are_ended():
    group, actions = _after(_in(Phase.PRIMARIES), *(Exited(w, 0, "") for w in (_TRAIN0, _TRAIN1)))
    assert (group.phase, actions) == (Phase.PRIMARIES, [])
    group, actions = step(group, Exited(_EVAL, 0, ""))
    assert (group.phase, actions) == (Phase.ENDING, [End(_SERVER)])
    group, actions = step(group, Exited(_SERVER, 137, "killed by SIGKILL"))
    assert actions == [Finish(Outcome(0, Reason.NONE, "all done"))]


@pytest.mark.parametrize("phase", [Phase.SERVICES, Phase.PRIMARIES])
@pytest.mark.parametrize(("code", "group_code"), [(0, 1), (1, 1), (3, 3), (139, 139)])
def test_a_service_that_ends_early_fails_the_group(phase, code, group_code):
    group, actions = step(_in(phase), Exited(_SERVER, code, f"exit code {code}"))
    assert group.outcome is not None
    assert (group.outcome.code, group.outcome.cause) == (group_code, Reason.SERVICE_ENDED)
    assert "server/0" in group.outcome.words
    assert f"exit code {code}" in group.outcome.words
    if phase is Phase.SERVICES:
        assert actions == [Finish(group.outcome)]
    else:
        assert actions == [End(_TRAIN0), End(_TRAIN1), End(_EVAL)]


@pytest.mark.parametrize("code", [0, 3])
def test_a_service_is_started_again_while_primaries_run(code):
    group, actions = step(_in(Phase.PRIMARIES, restarts=1), Exited(_SERVER, code, ""))
    assert actions == [Start(_SERVER)]
    assert (group.phase, group.outcome) == (Phase.PRIMARIES, None)
    assert _lives(group)[_SERVER] is Life.STARTED
    group, actions = step(group, Ready(_SERVER))
    assert actions == []  # the primaries run already
    group, actions = step(group, Exited(_SERVER, 4, "exit code 4"))
    assert actions == [End(_TRAIN0), End(_TRAIN1), End(_EVAL)]
    assert group.outcome is not None
    assert (group.outcome.code, group.outcome.cause) == (4, Reason.SERVICE_ENDED)


def test_a_service_that_starts_again_before_the_primaries_is_waited_for_again():
    replicas = (
        ReplicaState("a", 0, True, 1),
        ReplicaState("b", 0, True),
        ReplicaState("train", 0, False),
    )
    group, _ = _after(Group(replicas), Placed(), *(Prepared(one.replica_id) for one in replicas))
    group, actions = _after(group, Ready(("a", 0)), Exited(("a", 0), 1, ""))
    assert actions == [Start(("a", 0))]
    group, actions = step(group, Ready(("b", 0)))
    assert (group.phase, actions) == (Phase.SERVICES, [])
    group, actions = step(group, Ready(("a", 0)))
    assert actions == [Start(_TRAIN0)]


def test_what_the_probe_gets_is_shown_until_the_service_is_ready_or_starts_again(capfd):
    replica = SimpleNamespace(replica_id=_SERVER)
    report = {"at": "waiting", "words": "not ready for 30 s: /health is answered with 301, not 200"}

    def shown(group: Group) -> list[str]:
        return not_ready(group_rows(group, {}, ""))

    group, actions = _after(_in(Phase.SERVICES, restarts=1), *_events_of_report(replica, report))
    assert actions == []
    assert shown(group) == [f"server/0 is {report['words']}"]
    assert f"nemo_run_ray| server/0 is {report['words']}" in capfd.readouterr().out
    assert shown(step(group, Ready(_SERVER))[0]) == []
    assert shown(step(group, Exited(_SERVER, 1, ""))[0]) == []


def test_only_the_replica_that_ended_is_started_again_and_only_its_restarts_are_used():
    replicas = (
        ReplicaState("a", 0, True, 1),
        ReplicaState("a", 1, True, 1),
        ReplicaState("train", 0, False),
    )
    group, _ = _after(Group(replicas), Placed(), *(Prepared(one.replica_id) for one in replicas))
    group, actions = step(group, Exited(("a", 1), 1, ""))
    assert actions == [Start(("a", 1))]
    assert [one.restarts for one in group.replicas] == [1, 0, 0]


@pytest.mark.parametrize("restarts", [0, 2])
def test_a_service_that_is_not_ready_in_time_fails_the_group(restarts):
    group, actions = step(_in(Phase.SERVICES, restarts), Unready(_SERVER, "refused"))
    assert group.outcome == Outcome(1, Reason.NOT_READY, "server/0: refused")
    assert actions == [End(_SERVER)]
    _, actions = step(group, Exited(_SERVER, 143, ""))
    assert actions == [Finish(group.outcome)]


def test_a_service_that_is_not_ready_in_time_after_a_restart_fails_the_group():
    group, _ = step(_in(Phase.PRIMARIES, restarts=1), Exited(_SERVER, 1, ""))
    group, actions = step(group, Unready(_SERVER, "refused"))
    assert group.outcome == Outcome(1, Reason.NOT_READY, "server/0: refused")
    assert actions == [End(_SERVER), End(_TRAIN0), End(_TRAIN1), End(_EVAL)]


def test_the_first_failing_primarys_code_wins_while_other_roles_go_on():
    group, actions = step(_in(Phase.PRIMARIES), Exited(_EVAL, 5, "exit code 5"))
    assert (group.phase, actions) == (Phase.PRIMARIES, [])
    assert {_lives(group)[replica_id] for replica_id in (_SERVER, _TRAIN0, _TRAIN1)} == {
        Life.READY,
        Life.STARTED,
    }
    group, actions = step(group, Exited(_TRAIN0, 7, "exit code 7"))
    assert actions == [End(_TRAIN1)]
    group, actions = step(group, Exited(_TRAIN1, 143, ""))
    assert actions == [End(_SERVER)]
    group, actions = step(group, Exited(_SERVER, 0, ""))
    assert actions == [Finish(Outcome(5, Reason.EXIT_CODE, "eval/0: exit code 5"))]


def test_replicas_of_a_failing_primarys_role_are_ended_and_their_codes_do_not_count():
    group, actions = step(_in(Phase.PRIMARIES), Exited(_TRAIN1, 3, "exit code 3"))
    assert actions == [End(_TRAIN0)]
    group, _ = _after(group, Exited(_TRAIN0, 143, "killed"), Exited(_EVAL, 0, ""))
    assert group.phase is Phase.ENDING
    assert group.outcome == Outcome(3, Reason.EXIT_CODE, "train/1: exit code 3")


def test_a_role_that_failed_does_not_make_the_others_successful():
    group, _ = _after(_in(Phase.PRIMARIES), Exited(_EVAL, 5, "exit code 5"))
    group, actions = _after(group, Exited(_TRAIN0, 0, ""), Exited(_TRAIN1, 0, ""))
    assert actions == [End(_SERVER)]
    assert group.outcome is not None
    assert group.outcome.code == 5


@pytest.mark.parametrize("replica_id", [_SERVER, _TRAIN0, _EVAL])
@pytest.mark.parametrize("phase", [Phase.PREPARING, Phase.SERVICES, Phase.PRIMARIES])
def test_a_lost_node_fails_the_group(phase, replica_id):
    before = _in(phase)
    group, actions = step(before, Lost(replica_id, "node n1 died"))
    assert group.outcome is not None
    assert (group.outcome.code, group.outcome.cause) == (1, Reason.NODE_DIED)
    assert machine.name(replica_id) in group.outcome.words
    assert "node n1 died" in group.outcome.words
    others = [
        End(one.replica_id)
        for one in before.replicas
        if one.life.runs and one.replica_id != replica_id
    ]
    assert actions == (others or [Finish(group.outcome)])


def test_a_lost_node_is_nothing_while_placing():
    assert step(_in(Phase.PLACING), Lost(_SERVER, "")) == (_in(Phase.PLACING), [])


def test_a_node_lost_while_ending_is_no_longer_waited_for():
    group, actions = step(_in(Phase.ENDING), Lost(_SERVER, "node died"))
    assert actions == [Finish(Outcome(0, Reason.NONE, "all done"))]
    assert group.phase is Phase.OVER


def test_the_node_of_a_primary_that_is_done_may_go():
    group, _ = step(_in(Phase.PRIMARIES), Exited(_TRAIN0, 0, ""))
    assert step(group, Lost(_TRAIN0, "node died")) == (group, [])


@pytest.mark.parametrize("phase", [Phase.PLACING, Phase.PREPARING])
def test_a_stop_before_anything_runs_finishes_at_once(phase):
    group, actions = step(_in(phase), Stop())
    assert actions == [Finish(Outcome(143, Reason.CANCELLED, "cancelled"))]
    assert group.phase is Phase.OVER


@pytest.mark.parametrize(
    ("phase", "running"),
    [
        (Phase.SERVICES, [_SERVER]),
        (Phase.PRIMARIES, [_SERVER, _TRAIN0, _TRAIN1, _EVAL]),
    ],
)
def test_a_stop_ends_what_runs(phase, running):
    group, actions = step(_in(phase), Stop("by a user"))
    assert actions == [End(replica_id) for replica_id in running]
    assert step(group, Stop()) == (group, [])  # once is enough
    group, actions = _after(group, *(Exited(replica_id, 0, "") for replica_id in running))
    assert actions == [Finish(Outcome(143, Reason.CANCELLED, "by a user"))]


def test_a_stop_while_ending_changes_nothing():
    assert step(_in(Phase.ENDING), Stop()) == (_in(Phase.ENDING), [])


def test_a_service_that_ends_after_a_stop_is_not_started_again():
    group, _ = step(_in(Phase.PRIMARIES, restarts=2), Stop())
    group, actions = step(group, Exited(_SERVER, 1, ""))
    assert actions == []
    assert _lives(group)[_SERVER] is Life.ENDED


@pytest.mark.parametrize("cause", [Reason.UNSCHEDULABLE, Reason.NOT_PLACED])
def test_a_refused_placing_finishes_with_its_cause(cause):
    group, actions = step(_in(Phase.PLACING), PlacementRefused(cause, "CPU 900"))
    assert actions == [Finish(Outcome(1, cause, "CPU 900"))]
    assert group.phase is Phase.OVER


def test_an_unprepared_replica_finishes_the_group():
    group, _ = step(_in(Phase.PREPARING), Prepared(_SERVER))
    _, actions = step(group, Unprepared(_TRAIN1, "port 80 is taken"))
    words = "train/1: port 80 is taken"
    assert actions == [Finish(Outcome(1, Reason.NOT_STARTED, words))]
    _, actions = step(group, Unprepared(_TRAIN1, "port 80 is taken", Reason.RUNTIME_ENV))
    assert actions == [Finish(Outcome(1, Reason.RUNTIME_ENV, words))]


def test_who_is_in_words_as_in_the_prefix_of_its_lines():
    assert machine.name(("train", 12)) == "train/12"
