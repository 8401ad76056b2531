"""What a map gives when its items, or its results, cannot all be had."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from nemo_run_ray import errors
from nemo_run_ray import work as pool
from nemo_run_ray.errors import CannotBeSent, ConfigError, ItemFailed
from nemo_run_ray.work import tasks
from nemo_run_ray.work.tasks import Function, Item, call_items
from tests.conftest import wait_for


class Tasks:
    """Runs each item in this process, after what was sent with it."""

    function = pool.Pool._function
    lock = threading.Lock()

    def __init__(self) -> None:
        self._functions = Function

    def submit(self, item: Item) -> None:
        threading.Timer(0.05, self._run, [item]).start()

    def _run(self, item: Item) -> None:
        with self.lock:
            (row,) = call_items(item.function.data, [item.data], None)
            tasks._functions.clear()  # they would be sent to the workers of a later test
        if failure := item.take(*row[:2]):
            item.future.set_exception(failure)

    def give_up(self, items: list[Item]) -> None:
        pass

    def window(self, function: Function, item_bytes: float) -> int:
        return 4


def results(items: Any, function: Any = abs, ordered=True, yields_failures=False) -> Iterator[Any]:
    tasks: Any = Tasks()
    return pool._results(tasks, tasks.function(function), iter(items), ordered, yields_failures)


def broken() -> Iterator[int]:
    yield from (-1, -2, -3)
    raise OSError("the list of items is torn")


@pytest.mark.parametrize("ordered", [True, False])
def test_results_come_before_the_error_of_the_iterable(ordered):
    values = results(broken(), ordered=ordered)
    assert sorted(next(values) for _ in range(3)) == [1, 2, 3]
    with pytest.raises(OSError, match="is torn"):
        next(values)


def slow() -> Iterator[int]:
    yield -1
    time.sleep(0.5)
    yield -2
    pytest.fail("the first result is there, and nobody has got it")


@pytest.mark.parametrize("ordered", [True, False])
def test_a_result_does_not_wait_for_items_that_are_read_slowly(ordered):
    assert next(results(slow(), ordered=ordered)) == 1


def test_results_come_before_the_error_of_an_item_that_cannot_be_sent():
    values = results([-1, -2, threading.Lock(), -4])
    assert [next(values), next(values)] == [1, 2]
    with pytest.raises(CannotBeSent, match="Item 2 of abs cannot be sent"):
        next(values)


def test_what_cannot_be_sent_is_the_failure_of_its_item_where_failures_are_yielded():
    first, second = results([threading.Lock(), -2], yields_failures=True)
    assert isinstance(first.cause, CannotBeSent)
    assert second == 2
    (failed,) = results([1], lambda _: threading.Lock(), yields_failures=True)
    assert isinstance(failed.cause, CannotBeSent)
    assert "<lambda> cannot be sent back: lock: cannot pickle" in str(failed)


def divide(number: int) -> float:
    return 1 / number


def test_a_failure_that_ends_a_program_shows_where_the_function_has_raised():
    with pytest.raises(ItemFailed) as caught:
        list(results([0], divide))
    text = errors.paragraph(caught.value)
    assert text.startswith("Traceback (most recent call last):")
    assert "return 1 / number\n" in text
    assert text.index("ItemFailed: item 0 of divide has failed: Zero") > text.index("in divide")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"failures": "drop"}, "failures is 'drop'; expected is 'raise' or 'yield'"),
        ({"timeout_s": 0}, "timeout_s is 0; expected is a number above 0, or None"),
        ({"retries": -1}, "retries is -1; expected is a whole number from 0"),
    ],
)
def test_wrong_arguments_are_refused_at_the_call(options, message):
    with pytest.raises(ConfigError, match=message):
        pool.Pool.__new__(pool.Pool).map(abs, [1], **options)
    with pytest.raises(ConfigError, match="runtime_env is 'x'; expected is a mapping"):
        pool.connect(runtime_env="x")


class Large:
    """A result of which a test sees whether it still exists."""


def test_an_executor_keeps_no_result():
    tasks: Any = Tasks()
    executor = pool.PoolExecutor(tasks.function, tasks)
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
