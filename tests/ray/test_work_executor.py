"""``pool.executor()`` under CPython's own tests of executors."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import sysconfig
import time
import unittest
from concurrent import futures
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

#: Where CPython keeps its tests: beside this interpreter, or in Debian's package of them.
_PLACES = (
    Path(sysconfig.get_paths()["stdlib"]),
    Path(f"/usr/lib/python3.{sys.version_info.minor}"),
)
#: Tests of processes that are children of this one, or of an executor's own workers.
_OTHERS = {"test_max_workers_too_large", "test_killed_child"}


def _cpythons() -> ModuleType | None:
    for place in _PLACES:
        path = place / "test" / "test_concurrent_futures.py"
        if path.is_file():
            spec = importlib.util.spec_from_file_location("cpythons_executor_tests", path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
            return module
    return None


@pytest.fixture(scope="module")
def cpython() -> ModuleType:
    if sys.version_info >= (3, 12):
        pytest.skip("its tests of executors have another form")
    found = _cpythons()
    if found is None:
        pytest.skip("CPython's tests are not there (Debian: libpython3.11-testsuite)")
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(found)  # a worker has no such module
    return found


@pytest.mark.parametrize(
    "kind",
    ["WaitTests", "ExecutorTest", pytest.param("AsCompletedTests", marks=pytest.mark.soak)],
)
def test_cpythons_tests_of_executors(pool, cpython, kind):
    mixin = getattr(cpython, kind)

    class Case(mixin, unittest.TestCase):
        worker_count = 4

        def setUp(self) -> None:
            self.executor = pool.executor(max_workers=self.worker_count)
            self.executor_type = pool.executor
            # They expect calls to begin in order, which holds only once the workers have started.
            futures.wait([self.executor.submit(time.sleep, 0.3) for _ in range(4)])

        def tearDown(self) -> None:
            self.executor.shutdown(wait=True)

        def assert_correct_type(self, *_: Any) -> None:
            assert isinstance(self.executor, futures.Executor)

    names = [name for name in unittest.TestLoader().getTestCaseNames(Case) if name not in _OTHERS]
    assert len(names) > 3
    result = unittest.TestResult()
    unittest.TestSuite(map(Case, names)).run(result)
    assert result.testsRun == len(names)
    assert not result.errors + result.failures, "\n".join(
        text for _, text in result.errors + result.failures
    )


def test_after_a_shutdown_nothing_is_taken(pool):
    executor = pool.executor()
    executor.submit(pow, 2, 3)
    executor.shutdown()
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.submit(pow, 2, 3)


def test_a_shutdown_cancels_what_has_not_begun(pool):
    executor = pool.executor(max_workers=1)
    begun = [executor.submit(time.sleep, 0.5) for _ in range(20)]
    time.sleep(0.2)
    executor.shutdown(wait=True, cancel_futures=True)
    assert all(future.done() for future in begun)
    assert sum(future.cancelled() for future in begun) > 10


def test_the_executor_is_what_other_libraries_take(pool):
    with pool.executor() as executor:
        loop = asyncio.new_event_loop()
        assert loop.run_until_complete(loop.run_in_executor(executor, pow, 2, 4)) == 16
        loop.close()
        assert list(executor.map(pow, [2, 3], [5, 2], chunksize=2)) == [32, 9]
        with pytest.raises(ZeroDivisionError):
            list(executor.map(divmod, [1, 1], [1, 0]))
