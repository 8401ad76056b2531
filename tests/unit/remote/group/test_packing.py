"""Which nodes a group may have: selectors, refusals, explanations, spreading."""

import itertools
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_run_ray.remote.fit import Node, matches, nodes_of
from nemo_run_ray.remote.group.packing import NODE_ID, Bundle, bundles_of, why_never, why_waiting
from nemo_run_ray.remote.spec import GroupSpec, JobSpec, RoleSpec

_TASK = JobSpec(argv=("true",))
_GIB = 2.0**30


def _node(number: int, labels: Mapping[str, str] | None = None, **resources: float) -> Node:
    node_id = f"id{number:04}"
    return Node(
        node_id=node_id,
        host=f"host{number}",
        address=f"10.0.0.{number}",
        labels={NODE_ID: node_id, **(labels or {})},
        resources=resources or {"CPU": 4.0},
    )


def _role(name: str, replicas: int = 1, **values) -> RoleSpec:
    return RoleSpec(name, _TASK, replicas, **{"resources": {"CPU": 1.0}, **values})


def _group(*roles: RoleSpec, strategy: str = "PACK") -> GroupSpec:
    return GroupSpec(roles, strategy)


def _allowed(bundle: Bundle, nodes: list[Node]) -> set[str]:
    return {node.node_id for node in nodes if matches(bundle.selector, node.labels)}


# ---------------------------------------------------------------------- selectors


@pytest.mark.parametrize(
    ("wanted", "label", "answer"),
    [
        ("eu", "eu", True),
        ("eu", "us", False),
        ("eu", None, False),
        ("!eu", "us", True),
        ("!eu", "eu", False),
        ("!eu", None, True),
        ("in(eu,us)", "us", True),
        ("in(eu, us)", "us", True),
        ("in(eu,us)", "asia", False),
        ("in(eu,us)", None, False),
        ("in(eu)", "eu", True),
        ("!in(eu)", "eu", False),
        ("!in(eu,us)", "us", False),
        ("!in(eu,us)", "asia", True),
        ("!in(eu,us)", None, True),
        ("in", "in", True),
        ("eu", "eu-west", False),
        ("eu", "EU", False),
    ],
)
def test_a_selector_of_one_label(wanted, label, answer):
    labels = {"other": "x", **({} if label is None else {"zone": label})}
    assert matches({"zone": wanted}, labels) is answer


def test_every_part_of_a_selector_must_hold():
    labels = {"zone": "eu", "gpu": "h100"}
    assert matches({"zone": "eu", "gpu": "!a100"}, labels)
    assert not matches({"zone": "eu", "gpu": "a100"}, labels)
    assert not matches({"zone": "us", "gpu": "h100"}, labels)


def test_nothing_selected_is_every_node():
    assert matches({}, {})
    assert matches({}, {"zone": "eu"})


def test_only_living_nodes_count():
    row = {
        "NodeID": "a",
        "NodeManagerHostname": "host",
        "NodeManagerAddress": "10.0.0.1",
        "Labels": {"zone": "eu"},
        "Resources": {"CPU": 2.0},
        "Alive": True,
    }
    bare = {**row, "NodeID": "b", "Labels": None, "Resources": None}
    found = nodes_of([row, {**row, "Alive": False}, bare])
    assert found == [
        Node("a", "host", "10.0.0.1", {"zone": "eu"}, {"CPU": 2.0}),
        Node("b", "host", "10.0.0.1", {}, {}),
    ]


# ---------------------------------------------------------------------- never


def test_a_group_that_fits_is_not_refused():
    spec = _group(_role("a", 3), _role("b", resources={"CPU": 0.5, "GPU": 1.0}))
    assert why_never(spec, [_node(1, CPU=2.0), _node(2, CPU=1.5, GPU=1.0)]) is None


def test_labels_that_no_node_has_are_named():
    spec = _group(_role("a"), _role("b", label_selector={"zone": "eu"}))
    why = why_never(spec, [_node(1, {"zone": "us"}), _node(2)])
    assert why is not None
    assert why.startswith("b: ")
    assert "'zone': 'eu'" in why


def test_a_replica_larger_than_any_node_is_told_the_largest():
    spec = _group(_role("a", resources={"CPU": 8.0, "memory": 64 * _GIB}))
    nodes = [_node(1, CPU=4.0, memory=96 * _GIB), _node(2, CPU=16.0, memory=32 * _GIB)]
    why = why_never(spec, nodes)
    assert why is not None
    assert why.startswith("a: ")
    for word in ("CPU 8", "memory 64.00 GiB", "CPU 16", "memory 96.00 GiB"):
        assert word in why


def test_only_nodes_with_the_labels_are_compared():
    spec = _group(_role("a", resources={"GPU": 8.0}, label_selector={"zone": "eu"}))
    why = why_never(spec, [_node(1, {"zone": "eu"}, GPU=4.0), _node(2, GPU=8.0)])
    assert why is not None
    assert "GPU 4" in why
    assert "'zone': 'eu'" in why


def test_a_resource_that_no_node_has():
    why = why_never(_group(_role("a", resources={"TPU": 1.0})), [_node(1)])
    assert why is not None
    assert "TPU 0" in why


def test_replicas_that_are_too_large_together():
    spec = _group(_role("a", 2, resources={"CPU": 3.0}), _role("b", resources={"CPU": 3.0}))
    why = why_never(spec, [_node(1, CPU=4.0), _node(2, CPU=4.0)])
    assert why is not None
    assert "3 replicas" in why
    assert "CPU 9" in why


def test_a_sum_that_fits_can_still_be_too_much_for_the_nodes_of_one_role():
    spec = _group(_role("a", 3, resources={"CPU": 2.0}))
    assert "3 replicas ask for CPU 2" in str(
        why_never(spec, [_node(1, CPU=3.0), _node(2, CPU=3.0)])
    )
    assert why_never(spec, [_node(1, CPU=4.0), _node(2, CPU=3.0)]) is None


def test_strict_pack_wants_one_node_for_all():
    spec = _group(_role("a", 2, resources={"CPU": 3.0}), strategy="STRICT_PACK")
    why = why_never(spec, [_node(1, CPU=4.0), _node(2, CPU=5.0)])
    assert why is not None
    assert "STRICT_PACK" in why
    assert why_never(spec, [_node(1, CPU=4.0), _node(2, CPU=6.0)]) is None


def test_strict_pack_wants_that_node_to_have_every_roles_labels():
    roles = _role("a", label_selector={"zone": "eu"}), _role("b", label_selector={"gpu": "h100"})
    spec = _group(*roles, strategy="STRICT_PACK")
    apart = [_node(1, {"zone": "eu"}), _node(2, {"gpu": "h100"})]
    assert "STRICT_PACK" in str(why_never(spec, apart))
    assert why_never(spec, [*apart, _node(3, {"zone": "eu", "gpu": "h100"})]) is None


def test_strict_spread_wants_a_node_for_each_replica():
    spec = _group(_role("a", 3), strategy="STRICT_SPREAD")
    why = why_never(spec, [_node(1), _node(2), _node(3, CPU=0.5)])
    assert why is not None
    assert why.startswith("a: ")
    assert "STRICT_SPREAD" in why
    assert why_never(spec, [_node(1), _node(2), _node(3)]) is None


def test_strict_spread_wants_a_node_for_each_replica_of_all_roles():
    spec = _group(_role("a", 2), _role("b", 2), strategy="STRICT_SPREAD")
    assert why_never(spec, [_node(1), _node(2), _node(3)]) is not None
    assert why_never(spec, [_node(number) for number in range(4)]) is None


def test_a_role_that_spreads_strictly_wants_nodes_of_its_own_only_among_itself():
    spec = _group(_role("a", 2, spread="STRICT_SPREAD"), _role("b", 2))
    assert "a: its 2 replicas" in str(why_never(spec, [_node(1)]))
    assert why_never(spec, [_node(1), _node(2)]) is None


def test_a_role_that_only_wishes_to_spread_is_not_refused():
    assert why_never(_group(_role("a", 3, spread="SPREAD")), [_node(1)]) is None


def test_no_node_at_all_is_a_refusal_without_an_error():
    assert why_never(_group(_role("a")), []) is not None


def test_fractions_add_up():
    """Ten times 0.1 is a little less or more than 1 for a computer, and exactly 1 for Ray."""
    spec = _group(_role("a", 10, resources={"GPU": 0.1}), _role("b", 3, resources={"CPU": 0.1}))
    assert why_never(spec, [_node(1, CPU=0.3, GPU=1.0)]) is None
    assert why_never(spec, [_node(1, CPU=0.2999, GPU=1.0)]) is not None


_SELECTORS = [{}, {"zone": "eu"}, {"zone": "!eu"}, {"zone": "in(eu,us)"}, {"zone": "!in(us)"}]
_ZONES = [{}, {"zone": "eu"}, {"zone": "us"}, {"zone": "asia"}]
#: In tenths, so that who computes in whole numbers makes no error.
_AMOUNTS = st.dictionaries(st.sampled_from(["CPU", "GPU"]), st.integers(1, 20), min_size=1)


def _in_tenths(amounts: Mapping[str, int]) -> dict[str, float]:
    return {key: amount / 10 for key, amount in amounts.items()}


@st.composite
def _clusters(draw, count: int) -> list[tuple[dict[str, int], Node]]:
    capacities = st.fixed_dictionaries({"CPU": st.integers(0, 50), "GPU": st.integers(0, 30)})
    return [
        (there, _node(number, draw(st.sampled_from(_ZONES)), **_in_tenths(there)))
        for number, there in enumerate(draw(st.lists(capacities, min_size=1, max_size=count)))
    ]


@st.composite
def _roles(draw, count: int, replicas: int, spreads: list[str]) -> list[tuple[dict, RoleSpec]]:
    found = []
    for number in range(draw(st.integers(1, count))):
        asked = draw(_AMOUNTS)
        role = _role(
            f"r{number}",
            draw(st.integers(1, replicas)),
            resources=_in_tenths(asked),
            label_selector=draw(st.sampled_from(_SELECTORS)),
            spread=draw(st.sampled_from(spreads)),
        )
        found.append((asked, role))
    return found


class Packing:
    """Replicas on nodes, counted in tenths by the rules and nothing else."""

    def __init__(self, cluster: list[tuple[dict[str, int], Node]], strategy: str) -> None:
        self._left = [dict(there) for there, _ in cluster]
        self._nodes = [node for _, node in cluster]
        self._strategy = strategy
        self._used: list[list[str]] = [[] for _ in cluster]

    def put(self, asked: Mapping[str, int], role: RoleSpec, number: int) -> bool:
        used = self._used[number]
        others = [one for index, one in enumerate(self._used) if index != number and one]
        if (
            not matches(role.label_selector, self._nodes[number].labels)
            or any(self._left[number].get(key, 0) < amount for key, amount in asked.items())
            or (self._strategy == "STRICT_SPREAD" and used)
            or (self._strategy == "STRICT_PACK" and others)
            or (role.spread == "STRICT_SPREAD" and role.name in used)
        ):
            return False
        for key, amount in asked.items():
            self._left[number][key] -= amount
        used.append(role.name)
        return True


_STRATEGIES = st.sampled_from(["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"])


@given(_clusters(5), _roles(4, 4, ["", "", "SPREAD", "STRICT_SPREAD"]), _STRATEGIES, st.randoms())
@settings(max_examples=300, deadline=None)
def test_what_first_fit_places_is_never_refused(cluster, roles, strategy, random):
    packing = Packing(cluster, strategy)
    nodes = [node for _, node in cluster]
    replicas = [one for one in roles for _ in range(one[1].replicas)]
    random.shuffle(replicas)
    placed = all(
        any(packing.put(asked, role, number) for number in range(len(nodes)))
        for asked, role in replicas
    )
    why = why_never(_group(*(role for _, role in roles), strategy=strategy), nodes)
    assert why is None or not placed


# ---------------------------------------------------------------------- waiting


def test_a_group_that_waits_says_what_it_asks_what_there_is_and_who_waits():
    spec = _group(_role("a", 2, resources={"CPU": 2.0}), _role("b", resources={"GPU": 1.0}))
    nodes = [_node(1, CPU=4.0), _node(2, CPU=4.0, GPU=1.0)]
    words = why_waiting(spec, nodes, {"CPU": 6.0, "memory": 5.0})
    assert "asked CPU 4, GPU 1 in 3 bundle(s)" in words
    assert "available CPU 6, GPU 0;" in words
    assert "b/0 waits" in words
    assert "host2" in words
    assert "host1" not in words
    assert "\n" not in words


@pytest.mark.parametrize(
    ("cpus", "free", "words"),
    [
        ((4.0, 2.0), 5.0, "that is enough: Ray is about to place them, unless it lies on "),
        ((5.0,), 5.0, "available CPU 5; that is enough: Ray is about to place them"),
        ((4.0, 2.0), 4.0, "available CPU 4; all bundles start together, and what is free now is "),
    ],
)
def test_a_group_that_waits_although_each_bundle_may_fit_blames_none(cpus, free, words):
    spec = _group(_role("a"), _role("b", resources={"CPU": 4.0}))
    nodes = [_node(number, CPU=amount) for number, amount in enumerate(cpus)]
    found = why_waiting(spec, nodes, {"CPU": free})
    assert words in found
    assert ("unless" in found) == (len(cpus) > 1 and free == 5.0)


def test_a_group_that_waits_for_ever_says_why():
    spec = _group(_role("a", resources={"CPU": 64.0}))
    nodes = [_node(1)]
    words = why_waiting(spec, nodes, {"CPU": 4.0})
    assert "asked CPU 64 in 1 bundle(s)" in words
    assert "available CPU 4;" in words
    assert str(why_never(spec, nodes)) in words


def test_a_group_that_asks_for_nothing_in_particular_can_be_explained():
    words = why_waiting(_group(_role("a", resources={"memory": 1})), [_node(1, memory=_GIB)], {})
    assert "next to nothing" in words


# ---------------------------------------------------------------------- bundles


def test_a_bundle_for_every_replica_in_the_order_of_the_roles():
    spec = _group(_role("b", 2, label_selector={"zone": "eu"}), _role("a", resources={"GPU": 2.0}))
    assert bundles_of(spec) == [
        Bundle(("b", 0), {"CPU": 1.0}, {"zone": "eu"}),
        Bundle(("b", 1), {"CPU": 1.0}, {"zone": "eu"}),
        Bundle(("a", 0), {"GPU": 2.0}, {}),
    ]


def test_the_groups_own_strategy_needs_no_sets_of_nodes():
    spec = _group(_role("a", 2), strategy="STRICT_SPREAD")
    assert [one.selector for one in bundles_of(spec, [_node(1), _node(2)])] == [{}, {}]


@pytest.mark.parametrize("spread", ["SPREAD", "STRICT_SPREAD"])
@pytest.mark.parametrize("count", [3, 4, 5, 9])
def test_a_role_that_spreads_gets_disjoint_sets_of_the_nodes_that_can_host_it(spread, count):
    hosts = [_node(number, {"zone": "eu"}) for number in range(count)]
    others = [_node(100), _node(101, {"zone": "eu"}, CPU=0.5)]
    nodes = [others[0], *hosts, others[1]]
    spec = _group(_role("a", 3, spread=spread, label_selector={"zone": "eu"}), _role("b"))
    bundles = bundles_of(spec, nodes)
    sets = [_allowed(one, nodes) for one in bundles[:3]]
    assert all(sets)
    assert set.union(*sets) == {one.node_id for one in hosts}
    assert sum(map(len, sets)) == count
    assert all(one.selector["zone"] == "eu" for one in bundles[:3])
    assert bundles[3].selector == {}


def test_a_mere_wish_to_spread_holds_the_first_time_only():
    nodes = [_node(1), _node(2)]
    spec = _group(_role("a", 2, spread="SPREAD"))
    assert all(NODE_ID in one.selector for one in bundles_of(spec, nodes, turn=0))
    assert all(one.selector == {} for one in bundles_of(spec, nodes, turn=1))


def test_a_wish_that_too_few_nodes_can_grant_is_dropped():
    spec = _group(_role("a", 2, spread="SPREAD"))
    assert all(one.selector == {} for one in bundles_of(spec, [_node(1)]))


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_strict_spread_never_lets_two_replicas_share_a_node(count):
    """Too few nodes now; the group must wait for more, not be packed on those."""
    nodes = [_node(number) for number in range(count)]
    bundles = bundles_of(_group(_role("a", 3, spread="STRICT_SPREAD")), nodes)
    for one, other in itertools.combinations(bundles, 2):
        newcomer = _node(999)
        assert not _allowed(one, [*nodes, newcomer]) & _allowed(other, [*nodes, newcomer])


def test_other_turns_give_other_sets():
    nodes = [_node(number) for number in range(5)]
    spec = _group(_role("a", 2, spread="STRICT_SPREAD"))
    seen = set()
    for turn in range(5):
        bundles = bundles_of(spec, nodes, turn)
        first, second = (frozenset(_allowed(one, nodes)) for one in bundles)
        assert not first & second
        seen.add(frozenset([first, second]))
    assert len(seen) > 1


@pytest.mark.parametrize(("hosts", "replicas"), [(3, 2), (4, 2), (5, 2), (5, 3), (6, 3), (6, 4)])
def test_any_nodes_that_are_free_are_found_on_some_turn(hosts, replicas):
    """Replicas that spread wait while each of their sets lacks a free node; no choice of free
    nodes may be out of reach for ever."""
    nodes = [_node(number) for number in range(hosts)]
    spec = _group(_role("a", replicas, spread="STRICT_SPREAD"))
    turns = [[_allowed(one, nodes) for one in bundles_of(spec, nodes, turn)] for turn in range(200)]
    for free in itertools.combinations([one.node_id for one in nodes], replicas):
        assert any(all(share & set(free) for share in shares) for shares in turns), free
