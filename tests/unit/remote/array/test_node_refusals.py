"""When nodes where hosts could not begin are tried again, and when an array gives up."""

import pytest

from nemo_run_ray.remote.array.hosts import Refusals


@pytest.mark.parametrize(
    ("cannot", "trying", "fitting", "gives_up"),
    [
        ("", "", "", False),
        ("a", "", "a", True),
        ("a", "", "ab", False),
        ("ab", "", "ab", True),
        ("ab", "c", "abc", False),
        ("abc", "", "abcde", True),
        ("abc", "de", "abcde", False),
        ("abc", "a", "abc", True),
        ("abc", "", "cd", False),
    ],
)
def test_an_array_gives_up_when_no_node_could_run_it_or_three(cannot, trying, fitting, gives_up):
    refusals = Refusals()
    for node in cannot:
        refusals.add(node, 0.0, is_explained=True)
    assert refusals.are_all(trying, fitting) is gives_up


def test_a_node_is_left_alone_for_twice_as_long_each_time_and_five_minutes_at_most():
    refusals = Refusals()
    found, now = [], 100.0
    for _ in range(8):
        refusals.add("a", now, is_explained=True)
        found.append(refusals.again_in_s("a", now))
        now += found[-1]
    assert found == [5, 10, 20, 40, 80, 160, 300, 300]
    assert refusals.again_in_s("a", now - 1) == 1
    refusals.forget("a")
    assert refusals.again_in_s("a", now - 1) == 0
    assert not refusals.are_all("", "a")


def test_a_host_may_die_four_times_without_a_reason():
    refusals = Refusals()
    for number in range(4):
        for _ in range(8):  # several of its hosts, by one cause
            refusals.add("a", 1000.0 * number, is_explained=False)
    assert not refusals.are_all("", "a")
    refusals.add("a", 4000.0, is_explained=False)
    assert refusals.are_all("", "a")
