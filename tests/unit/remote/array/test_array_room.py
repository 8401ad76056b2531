"""Hosts where there is room, and how many elements each has in hand."""

from nemo_run_ray.remote.array.elements import ElementPace
from nemo_run_ray.remote.array.hosts import Share, shares


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
