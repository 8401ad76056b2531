"""Hosts where there is room, and how many elements each has in hand."""

import pytest

from nemo_run_ray.remote.array.elements import ElementPace
from nemo_run_ray.remote.array.hosts import Share, shares, slots_in, why_never
from nemo_run_ray.remote.fit import Node


def test_slots_are_what_the_scarcest_resource_allows():
    assert slots_in({"CPU": 4.0, "GPU": 2.0}, {"CPU": 1.0, "GPU": 1.0}) == 2
    assert slots_in({"CPU": 0.9999999}, {"CPU": 1.0}) == 1, "Ray counts in steps of 0.0001"
    assert slots_in({"CPU": 4.0}, {"CPU": 1.0, "gold": 1.0}) == 0


def test_hosts_are_spread_evenly_and_no_more_than_wanted():
    available = {"a": {"CPU": 4.0}, "b": {"CPU": 2.0}, "c": {}}
    assert sorted(shares(available, {"CPU": 1.0}, 100)) == [Share("a", 4), Share("b", 2)]
    assert sorted(shares(available, {"CPU": 1.0}, 3)) == [Share("a", 2), Share("b", 1)]
    assert shares(available, {"CPU": 1.0}, 0) == []
    assert shares(available, {"CPU": 8.0}, 10) == []


def test_parts_of_a_gpu_are_shared_by_the_slots_of_one_host():
    found = shares({"a": {"GPU": 2.0}}, {"GPU": 0.25}, 100)
    assert found == [Share("a", 4), Share("a", 4)]
    assert shares({"a": {"GPU": 4.0}}, {"GPU": 2.0}, 100) == [Share("a", 2)]


NODES = [
    Node("a", "a", "a", {"zone": "x"}, {"CPU": 8.0}),
    Node("b", "b", "b", {"zone": "y"}, {"CPU": 2.0, "GPU": 1.0}),
]


@pytest.mark.parametrize(
    ("need", "labels", "words"),
    [
        ({"CPU": 8.0}, {}, ""),
        ({"CPU": 9.0}, {}, "an element asks for CPU 9, and the largest node has 8"),
        ({"CPU": 4.0}, {"zone": "y"}, "an element asks for CPU 4, and the largest node has 2"),
        ({"CPU": 4.0, "GPU": 1.0}, {}, "no node has CPU, GPU at once as an element asks for"),
        ({"CPU": 1.0}, {"zone": "z"}, "no node has the labels {'zone': 'z'}"),
    ],
)
def test_what_no_node_can_ever_have_is_told(need, labels, words):
    assert why_never(NODES, need, labels) == words


def test_short_elements_wait_at_their_host_and_long_ones_do_not():
    pace = ElementPace()
    assert pace.held(4) == 4
    pace.measured(0.001)
    assert pace.held(4) == 4 + 4 * 64
    pace = ElementPace()
    pace.measured(1.0)
    assert pace.held(4) == 4 + 2
    pace = ElementPace()
    pace.measured(60.0)
    assert pace.held(4) == 4
