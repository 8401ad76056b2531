"""What a map gives when its items, or its results, cannot all be had."""

from __future__ import annotations

import asyncio
import gc
import itertools
import queue
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest

from nemo_run_ray import errors
from nemo_run_ray.errors import CannotBeSent, ConfigError, ItemFailed, WorkError
from nemo_run_ray.work import pool
from nemo_run_ray.work.executor import PoolExecutor
from nemo_run_ray.work.tasks import Function, Item, pickle_function
from nemo_run_ray.work.worker import CallOutcome, call_items_by_client
from tests.conftest import wait_for


class Tasks:
    """Runs each item in this process, after what was sent with it."""

    def function(self, function: Any) -> Function:
        return pickle_function(function)

    def submit(self, items: list[Item]) -> None:
        threading.Timer(0.05, self._run, [items]).start()

    def _run(self, items: list[Item]) -> None:
        for item in items:
            function = item.function
            (row,) = call_items_by_client(function.digest, function.data, [item.data], None)
            if failure := item.take(CallOutcome(*row)):
                item.future.set_exception(failure)

    def give_up(self, items: list[Item]) -> None:
        pass

    def window(self, function: Function, item_bytes: float) -> int:
        return 4


def results(items: Any, function: Any = abs, ordered=True, yields_failures=False) -> Iterator[Any]:
    mapped = pool._Map(Tasks(), pickle_function(function), None, 0, yields_failures)
    return mapped.results(items, ordered, False)


def broken() -> Iterator[int]:
    yield from (-1, -2, -3)
    raise OSError("the list of items is torn")


@pytest.mark.parametrize("ordered", [True, False])
def test_results_come_before_the_error_of_the_iterable(ordered):
    values = results(broken(), ordered=ordered)
    assert sorted(next(values) for _ in range(3)) == [1, 2, 3]
    with pytest.raises(OSError, match="is torn"):
        next(values)


def test_results_come_before_the_error_of_an_item_that_cannot_be_sent():
    values = results([-1, -2, threading.Lock(), -4])
    assert [next(values), next(values)] == [1, 2]
    with pytest.raises(CannotBeSent, match="Item 2 of abs cannot be sent"):
        next(values)


def test_a_result_that_cannot_be_sent_back_is_the_failure_of_its_item():
    (failed,) = results([1], lambda _: threading.Lock(), yields_failures=True)
    assert isinstance(failed.cause, CannotBeSent)
    assert "<lambda> cannot be sent back: lock: cannot pickle" in str(failed)


def divide(number: int) -> float:
    return 1 / number


def test_a_failure_that_ends_a_program_shows_where_the_function_has_raised():
    with pytest.raises(ItemFailed) as caught:
        list(results([0], divide))
    text = errors.paragraph(caught.value, caught.tb)
    assert text.startswith("Traceback (most recent call last):")
    assert "return 1 / number\n" in text
    assert text.index("ItemFailed: item 0 of divide has failed: Zero") > text.index("in divide")


def test_wrong_arguments_are_refused_at_the_call():
    made = pool.Pool.__new__(pool.Pool)
    with pytest.raises(ConfigError, match="items is 5; expected is a list"):
        made.map(abs, 5)
    with pytest.raises(ConfigError) as caught:
        made.map(abs, [1], timeout=5)
    assert str(caught.value) == (
        "Pool.map has no argument 'timeout'. Did you mean 'timeout_s'? By name it takes ordered, "
        "failures, timeout_s, retries, progress, cpus, gpus, memory, resources, label_selector, "
        "max_workers."
    )
    with pytest.raises(ConfigError, match=r"executor has .* Did you mean .*takes cpus, gpus"):
        made.executor(max_worker=3)
    with pytest.raises(ConfigError, match="runtime_env is 'x'; expected is a mapping"):
        pool.connect(runtime_env="x")


def test_a_cancelled_error_of_the_function_does_not_cancel_the_caller():
    """``asyncio`` takes that class for a cancellation of the task that waits."""

    async def ask(future: Future[Any]) -> None:
        await asyncio.wrap_future(pool._for_a_loop(future))

    failed: Future[Any] = Future()
    failed.set_exception(CancelledError("of a thread pool inside"))
    with pytest.raises(WorkError, match="has raised CancelledError: of a thread pool inside"):
        asyncio.run(ask(failed))


class Large:
    """A result of which a test sees whether it still exists."""


def test_an_executor_keeps_no_result():
    executor = PoolExecutor(Tasks(), None)
    gc.collect()
    gc.disable()
    try:
        future = executor.submit(Large)
        result = weakref.ref(future.result(10))
        executor.shutdown()
        assert result() is not None
        del future
        wait_for(lambda: result() is None)  # the other thread has it for a moment
    finally:
        gc.enable()


def taken(source, count):
    items, deadline = [], time.monotonic() + 10
    while len(items) < count and time.monotonic() < deadline:
        items += source.take(count - len(items))
    return items


def test_a_list_is_taken_as_far_as_there_is_room():
    source = pool._ItemSource([1, 2, 3], wake=lambda: None)
    assert source.take(2) == [1, 2]
    assert not source.is_over
    assert source.take(2) == [3]
    assert source.is_over


def test_an_iterable_is_read_no_further_than_there_is_room_and_ends_when_closed():
    read = []
    before = set(threading.enumerate())
    numbers = (read.append(number) or number for number in itertools.count())
    source = pool._ItemSource(numbers, wake=lambda: None)
    (reader,) = set(threading.enumerate()) - before
    assert taken(source, 3) == [0, 1, 2]
    time.sleep(0.2)
    assert len(read) <= 6
    source.close()
    reader.join(10)
    assert not reader.is_alive()


def test_an_item_is_given_while_the_next_one_is_waited_for():
    more, woken = queue.SimpleQueue(), threading.Event()

    def numbers():
        yield 1
        yield more.get(timeout=30)
        raise KeyError("x")

    source = pool._ItemSource(numbers(), wake=woken.set)
    assert taken(source, 1) == [1]
    woken.clear()
    assert source.take(100) == []
    more.put(2)
    assert woken.wait(10)
    assert taken(source, 1) == [2]
    with pytest.raises(KeyError):
        taken(source, 1)
