"""What a map gives when its items, or its results, cannot all be had."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest

from nemo_run_ray import errors
from nemo_run_ray.errors import CannotBeSent, ConfigError, ItemFailed, WorkError
from nemo_run_ray.work import pool
from nemo_run_ray.work.batching import Pace
from nemo_run_ray.work.executor import PoolExecutor
from nemo_run_ray.work.items import Item, failure_of
from nemo_run_ray.work.pickling import pickle_function
from nemo_run_ray.work.shape import Shape
from nemo_run_ray.work.stream import Stream
from nemo_run_ray.work.worker import CallOutcome, WorkActor
from tests.conftest import wait_for

CPU = Shape((("CPU", 1.0),))


class Engine:
    """Runs each item in this process, after what was sent with it."""

    def __init__(self) -> None:
        self._actor = WorkActor()
        self.given_up: list[Item] = []

    def submit(self, shape: Shape, items: list[Item]) -> None:
        threading.Timer(0.05, self._run, [items]).start()

    def _run(self, items: list[Item]) -> None:
        for item in items:
            (row,) = self._actor.run(item.function.digest, item.function.data, [item.data])
            outcome = CallOutcome(*row)
            failure = failure_of(item, outcome)
            if failure is None:
                item.succeed(outcome)
            else:
                item.future.set_exception(failure)

    def give_up(self, items: list[Item]) -> None:
        self.given_up += items

    def pace(self, shape: Shape, function: object) -> Pace:
        return Pace()

    def window(self, shape: Shape, function: object, item_bytes: float) -> int:
        return 4


def _results(items: Any, function: Any = abs, **options: Any) -> Iterator[Any]:
    stream = Stream(Engine(), CPU, pickle_function(function), None, 0)
    return stream.results(
        items, options.get("ordered", True), options.get("yields_failures", False), False
    )


def _broken() -> Iterator[int]:
    yield from (-1, -2, -3)
    raise OSError("the list of items is torn")


@pytest.mark.parametrize("ordered", [True, False])
def test_results_come_before_the_error_of_the_iterable(ordered):
    results = _results(_broken(), ordered=ordered)
    assert sorted(next(results) for _ in range(3)) == [1, 2, 3]
    with pytest.raises(OSError, match="is torn"):
        next(results)


def test_results_come_before_the_error_of_an_item_that_cannot_be_sent():
    results = _results([-1, -2, threading.Lock(), -4])
    assert [next(results), next(results)] == [1, 2]
    with pytest.raises(CannotBeSent, match="Item 2 of abs cannot be sent"):
        next(results)


def test_a_result_that_cannot_be_sent_back_is_one_of_this_packages_errors():
    (failed,) = _results([1], lambda _: threading.Lock(), yields_failures=True)
    assert isinstance(failed.cause, CannotBeSent)
    assert "<lambda> cannot be sent back: lock: cannot pickle" in str(failed)


def divide(number: int) -> float:
    return 1 / number


def test_a_failure_that_ends_a_program_shows_where_the_function_has_raised():
    with pytest.raises(ItemFailed) as caught:
        list(_results([0], divide))
    text = errors.paragraph(caught.value, caught.tb)
    assert text.startswith("Traceback (most recent call last):")
    assert "return 1 / number\n" in text
    assert "ItemFailed: item 0 of divide has failed: ZeroDivisionError" in text
    assert text.index("ItemFailed") > text.index("in divide")


def test_a_map_of_no_iterable_is_refused_at_its_call():
    made = pool.Pool.__new__(pool.Pool)
    with pytest.raises(ConfigError, match="items is 5; expected is a list"):
        made.map(abs, 5)


def test_an_unknown_argument_is_answered_with_the_nearest_and_with_all():
    made = pool.Pool.__new__(pool.Pool)
    reserved = "cpus, gpus, memory, resources, label_selector, max_workers"
    with pytest.raises(ConfigError) as caught:
        made.map(abs, [1], timeout=5)
    assert str(caught.value) == (
        "Pool.map has no argument 'timeout'. Did you mean 'timeout_s'? By name it takes ordered, "
        f"failures, timeout_s, retries, progress, {reserved}."
    )
    made._engine = Engine()
    with pytest.raises(ConfigError, match=rf"executor has .* Did you mean .*takes {reserved}"):
        made.executor(max_worker=3)


def test_a_cancelled_error_of_the_function_does_not_cancel_the_caller():
    """``asyncio`` takes that class for a cancellation of the task that waits."""

    async def ask(future: Future[Any]) -> None:
        await asyncio.wrap_future(pool._apart(future))

    failed: Future[Any] = Future()
    failed.set_exception(CancelledError("of a thread pool inside"))
    with pytest.raises(WorkError, match="has raised CancelledError: of a thread pool inside"):
        asyncio.run(ask(failed))


class Large:
    """A result of which a test sees whether it is still there."""


def test_an_executor_keeps_no_result():
    executor = PoolExecutor(Engine(), CPU, None)
    gc.collect()
    gc.disable()
    try:
        future = executor.submit(Large)
        found = weakref.ref(future.result(10))
        executor.shutdown()
        assert found() is not None
        del future
        wait_for(lambda: found() is None)  # the other thread has it for a moment
    finally:
        gc.enable()


def test_a_runtime_env_that_is_no_mapping_is_refused():
    with pytest.raises(ConfigError, match="runtime_env is 'x'; expected is a mapping"):
        pool.connect(runtime_env="x")
