"""Ray's workers as an executor of ``concurrent.futures``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from typing import Any, TypeVar

from nemo_run_ray.work.tasks import Item, TaskQueue, pickle_item

_T = TypeVar("_T")


class PoolExecutor(futures.Executor):
    """Calls functions on Ray's workers. ``Pool.executor`` makes it; its pool closes it too.

    Args:
        tasks: where its calls wait.
        pool: lives as long as this executor.
    """

    def __init__(self, tasks: TaskQueue, pool: object) -> None:
        self._tasks = tasks
        self._pool = pool
        self._lock = threading.Lock()
        self._is_shut_down = False
        self._futures: set[futures.Future[Any]] = set()

    def submit(self, fn: Callable[..., _T], /, *args: Any, **kwargs: Any) -> futures.Future[_T]:
        """See ``concurrent.futures.Executor.submit``.

        Raises:
            CannotBeSent: the function, or an argument, cannot be pickled.
            RuntimeError: the executor was shut down.
        """
        function = self._tasks.function(fn)
        data = pickle_item(args, kwargs, f"the arguments of {function.name}")
        item = Item(function, data, is_alone=True)  # two of one batch could wait for each other
        with self._lock:
            if self._is_shut_down:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._futures.add(item.future)
        # Not with the item: a circle would keep the result until Python looks for circles.
        item.future.add_done_callback(self._forget)
        try:
            self._tasks.submit([item])
        except RuntimeError:
            self._forget(item.future)
            raise
        return item.future

    def map(
        self,
        fn: Callable[..., _T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        **options: Any,
    ) -> Iterator[_T]:
        """See ``concurrent.futures.Executor.map``; ``chunksize`` changes nothing."""
        if chunksize < 1:
            raise ValueError("chunksize must be >= 1.")
        return super().map(fn, *iterables, timeout=timeout, **options)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See ``concurrent.futures.Executor.shutdown``. The pool stays open."""
        with self._lock:
            self._is_shut_down = True
            pending = list(self._futures)
        if cancel_futures:
            for future in pending:
                future.cancel()  # those that have begun continue
        if wait:
            futures.wait(pending)

    def _forget(self, future: futures.Future[Any]) -> None:
        with self._lock:
            self._futures.discard(future)
