"""CPU work spread over the nodes of a Ray, from any Python program.

from nemo_run_ray import work

with work.connect() as pool:
    for result in pool.map(verify, items, timeout_s=30, retries=2):
        ...
    value = await pool.call(verify, item)      # in a server with an event loop
"""

from __future__ import annotations

import asyncio
import atexit
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent import futures
from contextlib import closing, suppress
from functools import lru_cache, partial
from operator import length_hint
from typing import Any, Literal, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from nemo_run_ray.errors import (
    CannotBeSent,
    ConfigError,
    ItemFailed,
    PoolClosed,
    TimedOut,
    VersionMismatch,
    WorkerDied,
)
from nemo_run_ray.fields import is_amount, is_whole
from nemo_run_ray.remote.spec import Json
from nemo_run_ray.work.connection import Connection, join, leave, requirements
from nemo_run_ray.work.tasks import (
    FUNCTIONS_MAX,
    Function,
    Item,
    TaskQueue,
    pickle_arguments,
)

__all__ = [
    "CannotBeSent",
    "ItemFailed",
    "Pool",
    "PoolClosed",
    "PoolExecutor",
    "TimedOut",
    "VersionMismatch",
    "WorkerDied",
    "connect",
    "requirements",
]
_In = TypeVar("_In")
_Out = TypeVar("_Out")
#: Bytes of items, and of results that wait to be taken, at most.
_BYTES_MAX = 256 * 2**20


class Pool:
    """Workers on all nodes of a Ray. ``connect`` makes one; ``with`` closes it.

    Ray starts workers when there is work; a worker reserves what is asked for while it calls.
    """

    def __init__(self, joined: Connection):
        #: The address of the Ray that does the work.
        self.address = joined.address
        self._connection = joined
        self._queues: dict[str, TaskQueue] = {}
        # Equal functions share what was measured.
        self._functions = lru_cache(FUNCTIONS_MAX)(Function)
        self._lock = threading.Lock()
        self._is_closed = False
        atexit.register(self.close)  # before Ray's own end: what is registered last is called first

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End what runs. Work that has not ended fails with ``WorkerDied``."""
        if self._is_closed or self._connection.is_of_parent:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        for tasks in self._queues.values():
            tasks.close()
        leave(self._connection)

    def map(
        self,
        function: Callable[[_In], _Out],
        items: Iterable[_In],
        *,
        ordered: bool = True,
        failures: Literal["raise", "yield"] = "raise",
        timeout_s: float | None = None,
        retries: int = 0,
        progress: bool | None = None,
        **reserved: Any,
    ) -> Iterator[_Out]:
        """The results of a function for many items, while they come in.

        Items are taken from the iterable when there is room for them: a bounded number is in tasks
        or waits to be taken. Short items travel together. When a worker dies, its item has failed;
        where it had several at once, they are run again one by one.

        Args:
            function: of one item.
            items: any iterable, also one that never ends.
            ordered: results come in the order of the items, else as they are ready.
            failures: ``raise`` ends the map at the first item that has failed; ``yield`` gives an
                ``ItemFailed`` in the place of its result, and continues.
            timeout_s: seconds that one call may take; its worker is ended then.
            retries: of an item after a failure; after the death of a node it has three more.
            progress: show a progress bar; ``None`` shows one on a terminal.
            reserved: of one worker: ``cpus=1``, ``gpus``, ``memory`` in bytes, ``resources`` of
                the cluster's own, ``label_selector``; and ``max_workers``.

        Raises:
            ItemFailed: an item has failed, after its retries.
            CannotBeSent: the function, or an item, cannot be pickled.
        """
        if failures not in ("raise", "yield"):
            raise ConfigError(f"failures is {failures!r}; expected is 'raise' or 'yield'.")
        _check(timeout_s, retries)
        tasks, prepared = self._queue(reserved), self._function(function)
        results = _results(
            tasks,
            prepared,
            iter(items),
            ordered,
            failures == "yield",
            timeout_s=timeout_s,
            retries=retries,
        )
        if progress or (progress is None and sys.stderr.isatty()):
            return _with_bar(results, prepared.name, length_hint(items) or None)
        return results

    async def call(
        self,
        function: Callable[[_In], _Out],
        item: _In,
        *,
        timeout_s: float | None = None,
        retries: int = 0,
        **reserved: Any,
    ) -> _Out:
        """The result of a function for one item, for programs with an event loop.

        A call that is cancelled ends its worker. Arguments are those of ``map``.

        Raises:
            TimedOut: it took longer than ``timeout_s``.
            WorkerDied: its worker has died.
            CannotBeSent: the function, or the item, cannot be pickled.
            Exception: what the function has raised.
        """
        _check(timeout_s, retries)
        tasks, prepared = self._queue(reserved), self._function(function)
        data = pickle_arguments(f"The item of {prepared.name}", item)
        call = Item(prepared, data, timeout_s, retries, is_alone=True)
        tasks.submit(call)
        try:
            return await asyncio.wrap_future(call.future)
        except asyncio.CancelledError:
            tasks.give_up([call])
            raise

    def executor(self, **reserved: Any) -> PoolExecutor:
        """An executor as ``concurrent.futures`` has them, for workers as in ``map``."""
        return PoolExecutor(self._function, self._queue(reserved))

    def _queue(self, reserved: Json) -> TaskQueue:
        """The queue for workers that reserve this."""
        key = repr(sorted(reserved.items()))
        with self._lock:
            if self._is_closed:
                raise PoolClosed("The pool takes no more work: it was closed.")
            if key not in self._queues:
                self._queues[key] = TaskQueue(self._connection, **reserved)
            return self._queues[key]

    def _function(self, function: Callable[..., Any]) -> Function:
        """The function as workers get it."""
        name = getattr(function, "__qualname__", type(function).__name__)
        if not callable(function):
            raise CannotBeSent(f"{function!r} is not callable; expected is a function of one item.")
        return self._functions(name, pickle_arguments(f"The function {name}", function))


def connect(
    address: str | None = None,
    *,
    num_cpus: int | None = None,
    runtime_env: Json | None = None,
) -> Pool:
    """A pool on the Ray that this program belongs to.

    That is the one at ``address``, else the one that RAY_ADDRESS names (of the cluster, in a task
    of NeMo-Run), else the embedded Ray of this machine, which is started when it does not run. A
    process has one connection; further pools share it, and child processes find the cluster by
    RAY_ADDRESS. What was started here ends with the last program that uses it; a Ray that existed
    before continues.

    Args:
        address: ``ip:port`` of a Ray's GCS, on a node of it; ``ray://host:10001`` from elsewhere;
            ``"auto"`` is the same as ``None``.
        num_cpus: of an embedded Ray that has to be started.
        runtime_env: Ray's, for the workers: ``working_dir``, ``pip`` …

    Raises:
        VersionMismatch: the cluster's Ray or Python is not this program's.
        Unreachable: no Ray answers there.
        ConfigError: an argument is wrong.
    """
    if not isinstance(runtime_env, (Mapping, type(None))):
        raise ConfigError(f"runtime_env is {runtime_env!r}; expected is a mapping, as Ray has it.")
    return Pool(join(address, num_cpus, runtime_env or {}))


class PoolExecutor(futures.Executor):
    """Calls functions on Ray's workers. ``Pool.executor`` makes it; its pool closes it too."""

    def __init__(self, function: Callable[..., Function], tasks: TaskQueue):
        self._function = function
        self._tasks = tasks
        self._lock = threading.Lock()
        self._is_shut_down = False
        self._futures: set[futures.Future[Any]] = set()

    def submit(self, fn: Callable[..., _Out], /, *args: Any, **kwargs: Any) -> futures.Future[_Out]:
        """See ``concurrent.futures.Executor.submit``.

        Raises:
            CannotBeSent: the function, or an argument, cannot be pickled.
            RuntimeError: the executor was shut down.
        """
        function = self._function(fn)
        item = Item(
            function,
            pickle_arguments(f"The arguments of {function.name}", *args, **kwargs),
            is_alone=True,  # two of one batch could wait for each other
        )
        with self._lock:
            if self._is_shut_down:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._tasks.submit(item)
            self._futures.add(item.future)
        item.future.add_done_callback(self._futures.discard)
        return item.future

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


def _results(
    tasks: TaskQueue,
    function: Function,
    items: Iterator[Any],
    ordered: bool,
    yields_failures: bool,
    **limits: Any,
) -> Iterator[Any]:
    """See ``Pool.map``; the limits are those of each item.

    The iterable is read here, in the caller's thread, as ``concurrent.futures`` reads it.
    """
    done, ended = queue.SimpleQueue[int](), set[int]()
    live: dict[int, Item] = {}  # in tasks, or ended and not taken
    sent = size_bytes = 0
    has_read = True  # an item since the last result
    error: Exception | None = None  # of the iterable: raised after the results before it
    try:
        while live or error is None:
            average = size_bytes / max(len(live), 1)
            most = min(
                tasks.window(function, average),
                1 + _BYTES_MAX / max(average + function.result_bytes, 1.0),
            )
            while not done.empty():
                ended.add(done.get())
            number = next(iter(live if ordered else ended), -1)
            if error is None and len(live) < most and not (number in ended and has_read):
                has_read = True
                try:
                    data = pickle_arguments(f"Item {sent} of {function.name}", next(items))
                    item = Item(function, data, **limits)
                    tasks.submit(item)
                except Exception as raised:  # also StopIteration
                    if not (yields_failures and isinstance(raised, CannotBeSent)):
                        error = raised
                        continue
                    item = Item(function, b"")
                    item.fail(raised)
                live[sent] = item
                size_bytes += len(item.data)
                item.future.add_done_callback(partial(lambda number, _: done.put(number), sent))
                sent += 1
                continue
            if number not in ended:
                with suppress(queue.Empty):  # the cluster may have room for more items
                    ended.add(done.get(timeout=0.25))
                continue
            ended.discard(number)
            item = live.pop(number)
            size_bytes -= len(item.data)
            if (cause := item.future.exception()) is None:
                yield item.future.result()
            else:
                failed = ItemFailed(number, cause, function.name)
                if not yields_failures:
                    raise failed from cause
                yield failed
            has_read = False  # the workers need items, too
        if error is not None and not isinstance(error, StopIteration):
            raise error
    finally:
        tasks.give_up(list(live.values()))


def _with_bar(results: Iterator[_Out], name: str, total: int | None) -> Iterator[_Out]:
    """The results, below a progress bar on standard error.

    What is printed on a terminal stands above the bar; a file or a pipe gets it as it is.
    """
    console = Console(stderr=True)
    with closing(results), Progress(console=console, redirect_stdout=sys.stdout.isatty()) as bar:  # type: ignore[type-var]
        yield from bar.track(results, total, description=escape(name))


def _check(timeout_s: object, retries: object) -> None:
    if timeout_s is not None and not (is_amount(timeout_s) and timeout_s):
        raise ConfigError(f"timeout_s is {timeout_s!r}; expected is a number above 0, or None.")
    if not is_whole(retries, 0):
        raise ConfigError(f"retries is {retries!r}; expected is a whole number from 0.")
