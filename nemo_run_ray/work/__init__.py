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
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from concurrent import futures
from contextlib import closing, suppress
from contextvars import copy_context
from functools import partial
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
    WorkError,
)
from nemo_run_ray.fields import is_amount, is_whole
from nemo_run_ray.work.connection import Connection, join, leave, requirements
from nemo_run_ray.work.tasks import Function, Item, Scheduler, TaskQueue, pickle_arguments

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
#: Seconds after which the window is computed again: the cluster may have room for more items.
_REFILL_S = 0.25
#: Items after which the map can say whether they are too small.
_ENOUGH = 1000
#: Seconds that sending one item and its result costs at least, and a byte of them (measured).
_SENDING_S, _BYTE_S = 20e-6, 2e-9


class Pool:
    """Workers on all nodes of a Ray. ``connect`` makes one; ``with`` closes it.

    Ray starts workers when there is work; a worker reserves what is asked for while it calls.
    """

    def __init__(self, joined: Connection) -> None:
        self._connection = joined
        self._scheduler = Scheduler(joined)
        self._is_closed = False
        atexit.register(self.close)  # before Ray's own end: what is registered last is called first

    @property
    def address(self) -> str:
        """The address of the Ray that does the work."""
        return self._connection.address

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
        self._scheduler.close()
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
        tasks, prepared = self._scheduler.queue(**reserved), self._scheduler.function(function)
        mapped = _Map(tasks, prepared, timeout_s, retries, failures == "yield")
        results = mapped.results(iter(items), ordered)
        if progress or (progress is None and sys.stderr.isatty()):
            total = len(items) if isinstance(items, Sized) else None
            return _with_bar(results, prepared.name, total)
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
        tasks, prepared = self._scheduler.queue(**reserved), self._scheduler.function(function)
        data = pickle_arguments(f"The item of {prepared.name}", item)
        call = Item(prepared, data, timeout_s, retries, is_alone=True)
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def wake(_: object) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(ended.set)

        call.future.add_done_callback(wake)
        tasks.submit(call)
        try:
            await ended.wait()
        except asyncio.CancelledError:
            tasks.give_up([call])
            raise
        error = call.future.exception()
        # Such an error would end, or stop, the loop that waits for it.
        if isinstance(error, StopIteration) or not isinstance(error, (Exception, type(None))):
            name = type(error).__name__
            raise WorkError(f"the function has raised {name}: {error}") from error
        result: _Out = call.future.result()
        return result

    def executor(self, **reserved: Any) -> PoolExecutor:
        """An executor as ``concurrent.futures`` has them.

        Args:
            reserved: what one worker reserves, as in ``map``.
        """
        return PoolExecutor(self._scheduler, self._scheduler.queue(**reserved))


def connect(
    address: str | None = None,
    *,
    num_cpus: int | None = None,
    runtime_env: Mapping[str, Any] | None = None,
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

    def __init__(self, scheduler: Scheduler, tasks: TaskQueue) -> None:
        self._scheduler = scheduler
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
        function = self._scheduler.function(fn)
        data = pickle_arguments(f"The arguments of {function.name}", *args, **kwargs)
        item = Item(function, data, is_alone=True)  # two of one batch could wait for each other
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


class _Map:
    """One map: a bounded number of items in tasks, results in order or as they come.

    Its iterable may wait for a network, or for results of this map: it is read in a thread of its
    own, as ``multiprocessing``'s ``imap`` does it.
    """

    def __init__(
        self,
        tasks: TaskQueue,
        function: Function,
        timeout_s: float | None,
        retries: int,
        yields_failures: bool,
    ) -> None:
        self._tasks = tasks
        self._function = function
        self._timeout_s = timeout_s
        self._retries = retries
        self._yields_failures = yields_failures
        #: Numbers of items that have ended, and ``None`` at the end of the iterable.
        self._done: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        #: Items that are in tasks, or done and not taken, by number, and their bytes.
        self._live: dict[int, Item] = {}
        self._bytes = self._sent = self._sent_bytes = 0
        self._is_closed = False
        #: It is notified when there is room for further items.
        self._room = threading.Condition()
        #: Of the iterable, or of an item that cannot be sent: raised after the results before it.
        self._error: BaseException | None = None

    def results(self, items: Iterator[Any], ordered: bool) -> Iterator[Any]:
        """See ``Pool.map``."""
        run, name = copy_context().run, "nemo-run-ray-items"
        threading.Thread(target=run, args=(self._send_all, items), name=name, daemon=True).start()
        ended, turn, has_all = set[int](), 0, False
        try:
            while self._live or not has_all:
                number = self._done.get()
                if number is None:
                    has_all = True
                elif not ordered:
                    yield self._take(number)
                else:
                    ended.add(number)
                    while turn in ended:
                        ended.discard(turn)
                        turn += 1
                        yield self._take(turn - 1)
            if self._error is not None:
                raise self._error
            self._warn_of_small_items()
        finally:
            with self._room:
                self._is_closed = True
                self._room.notify()
            self._tasks.give_up(list(self._live.values()))

    def _send_all(self, items: Iterator[Any]) -> None:
        try:
            while self._waits_for_room():
                item = self._prepare(next(items))
                with self._room:
                    if self._is_closed:
                        return
                    if not item.future.done():
                        self._tasks.submit(item)
                    number, self._sent = self._sent, self._sent + 1
                    self._live[number] = item
                    self._bytes += len(item.data)
                    self._sent_bytes += len(item.data)
                item.future.add_done_callback(partial(self._has_ended, number))
        except StopIteration:
            pass
        except BaseException as error:  # the caller's thread raises it
            self._error = error
        finally:
            self._done.put(None)

    def _has_ended(self, number: int, _: object) -> None:
        self._done.put(number)

    def _waits_for_room(self) -> bool:
        """Wait until a further item may be sent; whether one is still wanted."""
        with self._room:
            while not self._is_closed:
                average = self._bytes / max(len(self._live), 1)
                each = max(average + self._function.result_bytes, 1.0)
                window = self._tasks.window(self._function, average)
                if len(self._live) < min(window, int(_BYTES_MAX / each) + 1):
                    return True
                self._room.wait(_REFILL_S)
            return False

    def _prepare(self, value: Any) -> Item:
        """The next item; one that cannot be sent has failed already, where failures are yielded."""
        try:
            data = pickle_arguments(f"Item {self._sent} of {self._function.name}", value)
        except CannotBeSent as error:
            if not self._yields_failures:
                raise
            item = Item(self._function, b"")
            item.fail(error)
            return item
        return Item(self._function, data, self._timeout_s, self._retries)

    def _take(self, number: int) -> Any:
        with self._room:
            item = self._live.pop(number)
            self._bytes -= len(item.data)
            self._room.notify()
        error = item.future.exception()
        if error is None:
            return item.future.result()
        failed = ItemFailed(number, error, self._function.name)
        if self._yields_failures:
            return failed
        raise failed from error

    def _warn_of_small_items(self) -> None:
        function = self._function
        if self._sent < _ENOUGH:
            return
        sending_s = _SENDING_S + _BYTE_S * (self._sent_bytes / self._sent + function.result_bytes)
        if 0 < function.median_s < sending_s:
            warnings.warn(
                f"An item of {function.name} takes {function.median_s * 1e6:.0f} µs, and sending "
                f"it about {sending_s * 1e6:.0f} µs: put more work into each item, such as a list "
                "of what are items now.",
                RuntimeWarning,
                stacklevel=3,
            )


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
