"""When nodes where hosts could not begin are tried again, and when an array gives up."""

import pytest

from nemo_run_ray.remote.array.hosts import Refusal, Refusals


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
        refusals.add(node, 0.0, Refusal.TOLD)
    assert refusals.are_all(trying, fitting) is gives_up


def test_a_node_is_left_alone_for_twice_as_long_each_time_and_five_minutes_at_most():
    refusals = Refusals()
    found, now = [], 100.0
    for _ in range(8):
        refusals.add("a", now, Refusal.TOLD)
        found.append(refusals.left_alone_s("a", now))
        now += found[-1]
    assert found == [5, 10, 20, 40, 80, 160, 300, 300]
    assert refusals.left_alone_s("a", now - 1) == 1
    refusals.forget("a")
    assert refusals.left_alone_s("a", now - 1) == 0
    assert not refusals.are_all("", "a")


def test_a_host_may_die_four_times_without_a_reason():
    refusals = Refusals()
    for number in range(4):
        for _ in range(8):  # several of its hosts, by one cause
            refusals.add("a", 1000.0 * number, Refusal.DIED)
    assert not refusals.are_all("", "a")
    refusals.add("a", 4000.0, Refusal.DIED)
    assert refusals.are_all("", "a")


def test_three_failures_to_make_the_runtime_environment_on_one_node_are_enough():
    """It is the same for all, and the others may be busy for hours."""
    refusals = Refusals()
    for number in range(3):
        assert not refusals.are_all("", "ab")
        for _ in range(2):  # several of its hosts, at once
            refusals.add("a", 1000.0 * number, Refusal.RUNTIME_ENV)
    assert not refusals.are_all("b", "ab"), "the other one may show that it works"
    assert refusals.are_all("", "ab")
    refusals.forget("a")
    refusals.add("a", 9000.0, Refusal.RUNTIME_ENV)
    assert not refusals.are_all("", "ab")


def test_a_node_whose_host_died_once_is_tried_before_the_runtime_environment_ends_all():
    refusals = Refusals()
    refusals.add("b", 0.0, Refusal.DIED)
    for number in range(3):
        refusals.add("a", 1000.0 * number, Refusal.RUNTIME_ENV)
    assert not refusals.are_all("", "abc")
    refusals.add("b", 4000.0, Refusal.TOLD)
    assert refusals.are_all("", "abc")
