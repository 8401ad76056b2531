"""Room for a group: requests, refusals, explanations, and the wait for it."""

from __future__ import annotations

import itertools
import types
from unittest.mock import Mock

import pytest

from nemo_run_ray.remote.fit import Node, ResourceRequest, matches
from nemo_run_ray.remote.group import driver
from nemo_run_ray.remote.group.driver import NODE_ID, PlacementGroup, requests_of, why_waiting
from nemo_run_ray.remote.group.machine import Event, Group, Kind, Replica
from nemo_run_ray.remote.hosts.actors import ReplicaHandle
from nemo_run_ray.remote.spec import GroupSpec, JobSpec, RoleSpec
from nemo_run_ray.remote.status import Phase, Reason

GIB = 2.0**30


def node(number: int, labels: dict[str, str] | None = None, **resources: float) -> Node:
    node_id = f"id{number}"
    labels = {NODE_ID: node_id, **(labels or {})}
    return Node(node_id, f"host{number}", "10.0.0.1", labels, resources or {"CPU": 4.0})


def role(name: str, replicas: int = 1, spread: str = "", zone: str = "", **resources) -> RoleSpec:
    return RoleSpec(
        name,
        JobSpec(argv=("true",)),
        replicas,
        spread=spread,
        resources=resources or {"CPU": 1.0},
        label_selector={"zone": zone} if zone else {},
    )


def candidates(request: ResourceRequest, nodes: list[Node]) -> set[str]:
    return {node.node_id for node in nodes if matches(request.selector, node.labels)}


@pytest.mark.parametrize(
    ("roles", "nodes", "why"),
    [
        ([role("a", 3), role("b", CPU=0.5, GPU=1)], [node(1, CPU=2, GPU=1), node(2)], ""),
        (
            [role("a"), role("b", zone="eu")],
            [node(1, {"zone": "us"})],
            "b: no node has the label zone=eu",
        ),
        (
            [role("a", CPU=8, memory=64 * GIB)],
            [node(1, CPU=4, memory=96 * GIB), node(2, CPU=16, memory=32 * GIB)],
            "a: no node has CPU 8, memory 64.00 GiB at once",
        ),
        (
            [role("a", zone="eu", GPU=8)],
            [node(1, {"zone": "eu"}, GPU=4), node(2, GPU=8)],
            "a: the largest node with zone=eu has GPU 4, it asks for 8",
        ),
        ([role("a", TPU=1)], [node(1)], "a: no node has TPU, it asks for 1"),
        (
            [role("a", 2, CPU=3), role("b", CPU=3)],
            [node(1), node(2)],
            "2 node(s), idle, cannot give CPU 9 at once",
        ),
        (
            [role("a", 3, CPU=2)],
            [node(1, CPU=3), node(2, CPU=3)],
            "a: its 3 replicas ask for CPU 2 each",
        ),
        ([role("a", 3, CPU=2)], [node(1), node(2, CPU=3)], ""),
        ([role("a", 3, "SPREAD")], [node(1)], ""),
        ([role("a", 3, "STRICT_SPREAD")], [node(1), node(2)], "a: its 3 replicas"),
        (
            [role("a", zone="eu", CPU=4), role("b", zone="eu", CPU=2)],
            [node(1, {"zone": "eu"}), node(2)],
            "1 node(s), idle, cannot give CPU 6 at once",
        ),
        (
            [role("a", 2, zone="in(a,b)", CPU=4), role("b", 2, zone="in(b,c)", CPU=4)],
            [node(number, {"zone": zone}) for number, zone in enumerate("abc")],
            "3 node(s), idle, cannot give CPU 16 at once",
        ),
        ([role("a", 4, CPU=2), role("b", zone="eu")], [node(1)], "a: its 4 replicas"),
        ([role("a", CPU=3), role("b", zone="eu")], [node(1)], "b: no node has the label zone=eu"),
        ([role("a")], [], "a: the cluster has no living node"),
        # Ten times 0.1 is a little less or more than 1 for a computer, and exactly 1 for Ray.
        ([role("a", 10, GPU=0.1), role("b", 3, CPU=0.1)], [node(1, CPU=0.3, GPU=1)], ""),
        ([role("b", 3, CPU=0.1)], [node(1, CPU=0.2999)], "b: its 3 replicas"),
    ],
)
def test_what_these_nodes_can_never_host_is_named(roles, nodes, why):
    words, is_never = why_waiting(GroupSpec(tuple(roles)), nodes, {})
    assert is_never is bool(why)
    assert f"; {why}" in words


@pytest.mark.parametrize(
    ("roles", "nodes", "free", "words"),
    [
        (
            [role("a", 2, CPU=2), role("b", GPU=1)],
            [node(1, CPU=4), node(2, CPU=4, GPU=1)],
            {"CPU": 6.0, "memory": 5.0},
            "asked CPU 4, GPU 1 in 3 bundle(s); available CPU 6, GPU 0; "
            "b/0 waits: the nodes that can host it are busy (host2)",
        ),
        (
            [role("a"), role("b", CPU=4)],
            [node(1), node(2, CPU=2)],
            {"CPU": 5.0},
            "asked CPU 5 in 2 bundle(s); available CPU 5; "
            "all bundles start together, and the nodes that can take them have too little free",
        ),
        (
            [role("a", memory=1)],
            [node(1, memory=GIB)],
            {},
            "asked memory next to nothing in 1 bundle(s); available memory next to nothing; "
            "a/0 waits: the nodes that can host it are busy (host1)",
        ),
    ],
)
def test_a_group_that_waits_says_why(roles, nodes, free, words):
    assert why_waiting(GroupSpec(tuple(roles)), nodes, free) == (words, False)


def test_a_request_for_every_replica_in_the_order_of_the_roles():
    spec = GroupSpec((role("b", 2, zone="eu"), role("a", GPU=2.0)), "STRICT_SPREAD")
    assert requests_of(spec, [node(1), node(2)]) == [
        ResourceRequest({"CPU": 1.0}, {"zone": "eu"}),
        ResourceRequest({"CPU": 1.0}, {"zone": "eu"}),
        ResourceRequest({"GPU": 2.0}),
    ]


@pytest.mark.parametrize("spread", ["SPREAD", "STRICT_SPREAD"])
@pytest.mark.parametrize("count", [3, 4, 9])
def test_a_role_that_spreads_gets_disjoint_sets_of_the_nodes_that_can_host_it(spread, count):
    able = [node(number, {"zone": "eu"}) for number in range(count)]
    nodes = [node(100), *able, node(101, {"zone": "eu"}, CPU=0.5)]
    *spreading, other = requests_of(GroupSpec((role("a", 3, spread, "eu"), role("b"))), nodes)
    sets = [candidates(request, nodes) for request in spreading]
    assert all(sets)
    assert sorted(itertools.chain(*sets)) == sorted(node.node_id for node in able)
    assert other.selector == {}


def test_nodes_that_another_role_needs_are_the_last_that_one_spreads_to():
    nodes = [node(number, {"zone": "eu"} if number < 4 else {}) for number in range(16)]
    spec = GroupSpec((role("a", 12, "STRICT_SPREAD"), role("b", 4, "STRICT_SPREAD", "eu")))
    for turn in range(20):
        spreading = requests_of(spec, nodes, turn)[:12]
        assert all(candidates(request, nodes[4:]) for request in spreading)


def test_a_mere_preference_to_spread_holds_the_first_time_only():
    spec = GroupSpec((role("a", 2, "SPREAD"),))
    for turn, is_spread in ((0, True), (1, False)):
        requests = requests_of(spec, [node(1), node(2)], turn)
        assert [NODE_ID in request.selector for request in requests] == [is_spread] * 2
    assert requests_of(spec, [node(1)])[1].selector == {}


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_strict_spread_never_lets_two_replicas_share_a_node(count):
    """Too few nodes now; the group must wait for more, not be packed on those."""
    nodes = [node(number) for number in range(count)]
    requests = requests_of(GroupSpec((role("a", 3, "STRICT_SPREAD"),)), nodes)
    for one, other in itertools.combinations(requests, 2):
        assert not candidates(one, [*nodes, node(9)]) & candidates(other, [*nodes, node(9)])


class Clock:
    """Seconds that pass only in a sleep."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Ray:
    """Nodes and placement groups as Ray tells of them; it refuses what it does not know."""

    __version__ = "2.60.0"

    def __init__(self, clock: Clock, cpus: dict[str, float]) -> None:
        self.clock = clock
        self.cpus = cpus
        self.free_at = float("inf")
        self.state = "NO_RESOURCES"
        self.asked: list[dict] = []
        self.removed = 0
        self.where = list(cpus)
        self.util = types.SimpleNamespace(
            placement_group=self._create,
            placement_group_table=self._table,
            remove_placement_group=self._remove,
        )

    def nodes(self) -> list[dict]:
        return [
            {
                "NodeID": name,
                "Alive": True,
                "NodeManagerHostname": f"host-{name}",
                "NodeManagerAddress": "10.0.0.1",
                "Resources": {"CPU": cpus},
                "Labels": {"ray.io/node-id": name},
            }
            for name, cpus in self.cpus.items()
        ]

    def available_resources(self) -> dict[str, float]:
        return {"CPU": 0.0}

    def _create(self, bundles, strategy="PACK", name="", bundle_label_selector=None):
        self.asked.append({"bundles": bundles, "selectors": bundle_label_selector})
        number = len(self.asked)

        def wait(seconds: float) -> bool:
            return number == len(self.asked) and self.clock.now >= self.free_at

        return types.SimpleNamespace(wait=wait, count=len(bundles))

    def _table(self, group) -> dict:
        places = {number: self.where[number % len(self.where)] for number in range(group.count)}
        return {"stats": {"scheduling_state": self.state}, "bundles_to_node_id": places}

    def _remove(self, group) -> None:
        self.removed += 1


@pytest.fixture
def clock(monkeypatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(driver, "time", found)
    monkeypatch.setattr(driver, "monotonic", found.monotonic)
    return found


@pytest.fixture
def ray(clock) -> Ray:
    return Ray(clock, {"a": 4.0, "b": 4.0})


def group(cpus: float = 1.0, replicas: int = 1, **fields) -> GroupSpec:
    task, spread = JobSpec(("true",)), fields.pop("spread", "")
    role = RoleSpec("worker", task, replicas, resources={"CPU": cpus}, spread=spread)
    return GroupSpec((role,), **fields)


def wait(waiting: PlacementGroup, clock: Clock, seconds: float) -> list[Event | None]:
    """The answers of all looks until there is an event or the time is up."""
    until, answers = clock.now + seconds, [None]
    while clock.now < until and answers[-1] is None:
        answers.append(waiting.look())
    return answers[1:]


def test_a_group_that_waits_looks_about_once_a_second_and_says_each_30_s_what_is_missing(
    ray, clock, capfd
):
    assert 100 < len(wait(PlacementGroup(ray, group()), clock, 100)) < 120
    lines = [one for one in capfd.readouterr().out.splitlines() if "waiting for room" in one]
    assert len(lines) == 4
    assert "asked CPU 1 in 1 bundle(s); available CPU 0" in lines[0]
    assert "worker/0 waits: the nodes that can host it are busy (host-a, host-b)" in lines[0]


@pytest.mark.parametrize(
    ("fields", "state", "seconds", "cause", "words"),
    [
        (
            {"cpus": 5},
            "",
            (3, 10),
            Reason.UNSCHEDULABLE,
            "asked CPU 5 in 1 bundle(s); available CPU 0; "
            "worker: the largest node has CPU 4, it asks for 5",
        ),
        (
            {"strategy": "STRICT_PACK"},
            "INFEASIBLE",
            (3, 10),
            Reason.UNSCHEDULABLE,
            "asked CPU 1 in 1 bundle(s); available CPU 0; "
            "no nodes of this cluster can host the group (STRICT_PACK)",
        ),
        (
            {"placing_timeout_s": 20, "cpus": 5, "wait_for_nodes": True},
            "",
            (20, 22),
            Reason.NOT_PLACED,
            "not placed within 20 s: asked CPU 5",
        ),
    ],
)
def test_a_group_is_refused_in_time_and_with_the_reason(
    ray, clock, fields, state, seconds, cause, words
):
    began_at, ray.state = clock.now, state
    refusal = wait(PlacementGroup(ray, group(**fields)), clock, 60)[-1]
    assert refusal is not None
    assert (refusal.kind, refusal.cause) == (Kind.REFUSED, cause)
    assert refusal.words.startswith(words)
    assert seconds[0] <= clock.now - began_at < seconds[1]


def test_a_node_that_died_since_is_no_room(ray, clock):
    ray.free_at = clock.now
    waiting = PlacementGroup(ray, group(replicas=2))
    del ray.cpus["b"]
    assert waiting.look() is None
    ray.where = ["a"]
    assert waiting.look() == Event(Kind.PLACED)


def test_a_role_that_spreads_tries_other_nodes_while_it_waits(ray, clock):
    wait(PlacementGroup(ray, group(replicas=2, spread="STRICT_SPREAD")), clock, 30)
    assert 5 <= len(ray.asked) <= 12
    assert ray.removed == len(ray.asked) - 1
    for one in ray.asked:
        chosen = [selector["ray.io/node-id"] for selector in one["selectors"]]
        assert sorted(chosen) == ["in(a)", "in(b)"]


@pytest.mark.parametrize(
    ("runtime_env", "limit_s"),
    [
        ({"py_executable": "/opt/python"}, 90),
        ({"py_executable": "/opt/python", "env_vars": {"A": "b"}, "config": {}}, 90),
        ({"py_executable": "uv run --with torch"}, 690),
        ({"py_executable": "a", "uv": [], "config": {"setup_timeout_seconds": 1800}}, 1890),
    ],
)
def test_a_worker_that_never_comes_up_by_its_py_executable_ends_the_group(
    monkeypatch, clock, runtime_env, limit_s
):
    never = role("main")._replace(runtime_env=runtime_env)
    made = driver.GroupDriver.__new__(driver.GroupDriver)
    handle = ReplicaHandle(("main", 0), never, node(1), "tag", "dir")
    made._group = Group({("main", 0): Replica(("main", 0), False, handle=handle)}, Phase.PREPARING)
    made._ray = types.SimpleNamespace(nodes=list)
    made._actors = types.SimpleNamespace(answers=list)
    made._watch_at, made._tell_at, made._placed_at = 0.0, float("inf"), clock.now
    monkeypatch.setattr(driver, "nodes_of", lambda rows: [node(1)])
    clock.now += limit_s - 1
    made._turn()
    assert made._group.phase is Phase.PREPARING
    clock.now += 6
    made._turn()
    assert made._group.phase is Phase.OVER
    assert made._group.outcome.cause is Reason.RUNTIME_ENV
    assert "node host1 (10.0.0.1) has come up by py_exec" in made._group.outcome.words


def test_replicas_of_a_node_that_are_alike_share_an_actor(monkeypatch):
    roles = [role("a", 3), role("b"), role("c", CPU=2.0), role("d", 2, GPU=1.0)]
    roles += role("e")._replace(runtime_env={"pip": ["x"]}), role("f")
    monkeypatch.setattr(driver, "code_of", lambda one: "code" if one.name == "f" else "")
    made = driver.GroupDriver.__new__(driver.GroupDriver)
    made._spec, made._submission_id = GroupSpec(tuple(roles)), "exp.job"
    keys = [(one.name, index) for one in roles for index in range(one.replicas)]
    made._group = Group({key: Replica(key, False) for key in keys})
    made._ray, made._actors = Mock(), Mock()
    made._start_actors(Mock(nodes=[node(1), node(1), node(2), *[node(1)] * 6]))
    started = [call.args[0] for call in made._actors.start.call_args_list]
    found = [[keys.index(one.replica_id) for one in handles] for handles in started]
    assert found == [[0, 1, 3], [2], [4], [5], [6], [7], [8]]
