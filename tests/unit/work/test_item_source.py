"""Items of a map that come from an iterable which waits, fails or never ends."""

import itertools
import queue
import threading
import time

import pytest

from nemo_run_ray.work.source import ItemSource


def taken(source, count):
    """So many items, as soon as they are there."""
    found, deadline = [], time.monotonic() + 10
    while len(found) < count and time.monotonic() < deadline:
        found += source.take(count - len(found))
    return found


def test_a_list_is_taken_as_far_as_there_is_room():
    source = ItemSource([1, 2, 3], wake=lambda: None)
    assert source.take(2) == [1, 2]
    assert not source.is_over
    assert source.take(2) == [3]
    assert source.is_over


def test_no_more_is_read_than_there_is_room_for():
    read = []

    def numbers():
        for number in range(1000):
            read.append(number)
            yield number

    source = ItemSource(numbers(), wake=lambda: None)
    assert taken(source, 3) == [0, 1, 2]
    time.sleep(0.2)
    assert len(read) <= 6
    source.close()


def test_an_item_that_is_there_is_given_while_the_next_one_is_waited_for():
    more, woken = queue.SimpleQueue(), threading.Event()

    def numbers():
        yield 1
        yield more.get(timeout=30)

    source = ItemSource(numbers(), wake=woken.set)
    assert taken(source, 1) == [1]
    woken.clear()
    assert source.take(100) == []
    more.put(2)
    assert woken.wait(10)
    assert taken(source, 1) == [2]


def test_what_the_iterable_raises_comes_after_its_items():
    def numbers():
        yield 1
        raise KeyError("x")

    source = ItemSource(numbers(), wake=lambda: None)
    assert taken(source, 1) == [1]
    with pytest.raises(KeyError):
        taken(source, 1)


def test_a_closed_one_is_read_no_further():
    before = set(threading.enumerate())
    source = ItemSource(itertools.count(), wake=lambda: None)
    (reader,) = set(threading.enumerate()) - before
    assert taken(source, 1) == [0]
    assert reader.is_alive(), "it waits for room"
    source.close()
    reader.join(10)
    assert not reader.is_alive()
