"""Ray's workers as an executor of ``concurrent.futures``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from typing import Any, TypeVar

from nemo_run_ray.work.engine import Engine
from nemo_run_ray.work.items import Item
from nemo_run_ray.work.pickling import pickle_function, pickle_item
from nemo_run_ray.work.shape import Shape

_T = TypeVar("_T")


class PoolExecutor(futures.Executor):
    """Calls functions on Ray's workers. ``Pool.executor`` makes it; its pool closes it too.

    Args:
        engine: of the pool.
        shape: what each worker reserves.
        pool: lives as long as this executor.
    """

    def __init__(self, engine: Engine, shape: Shape, pool: object) -> None:
        self._engine = engine
        self._pool = pool
        self._shape = shape
        self._lock = threading.Lock()
        self._is_shut_down = False
        self._futures: set[futures.Future[Any]] = set()

    def submit(self, fn: Callable[..., _T], /, *args: Any, **kwargs: Any) -> futures.Future[_T]:
        """See ``concurrent.futures.Executor.submit``.

        Raises:
            CannotBeSent: the function, or an argument, cannot be pickled.
            RuntimeError: the executor was shut down.
        """
        function = pickle_function(fn)
        data = pickle_item(args, kwargs, f"the arguments of {function.name}")
        item = Item(function, data, is_alone=True)  # two of one batch could wait for each other
        with self._lock:
            if self._is_shut_down:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._futures.add(item.future)
        # Not with the item: a circle would keep the result until Python looks for circles.
        item.future.add_done_callback(self._forget)
        try:
            self._engine.submit(self._shape, [item])
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
        """See ``concurrent.futures.Executor.shutdown``. The pool's workers stay."""
        with self._lock:
            self._is_shut_down = True
            left = list(self._futures)
        if cancel_futures:
            for future in left:
                future.cancel()  # those that a worker has go on
        if wait:
            futures.wait(left)

    def _forget(self, future: futures.Future[Any]) -> None:
        with self._lock:
            self._futures.discard(future)
