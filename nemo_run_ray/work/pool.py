"""The pool: a function called for many items, or for one, on all nodes of a Ray."""

from __future__ import annotations

import asyncio
import atexit
import inspect
import queue
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from concurrent.futures import CancelledError, Future
from contextlib import nullcontext, suppress
from contextvars import copy_context
from itertools import islice
from typing import Any, Literal, TypeVar

from rich.console import Console
from rich.errors import LiveError
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from nemo_run_ray.errors import CannotBeSent, ConfigError, ItemFailed, WorkError, as_markup
from nemo_run_ray.fields import is_amount, is_whole, nearest
from nemo_run_ray.work import connection
from nemo_run_ray.work.executor import PoolExecutor
from nemo_run_ray.work.tasks import (
    Function,
    Item,
    Scheduler,
    TaskQueue,
    pickle_item,
    shape_of,
)

_In = TypeVar("_In")
_Out = TypeVar("_Out")
#: The arguments of what a worker reserves.
_RESERVED = tuple(inspect.signature(shape_of).parameters)
#: Exceptions that an event loop does not pass on as those of a call.
_OF_A_LOOP = (
    StopIteration,
    SystemExit,
    KeyboardInterrupt,
    GeneratorExit,
    asyncio.CancelledError,
    CancelledError,
)
#: Bytes of items, and of results that wait to be taken, at most.
_BYTES_MAX = 256 * 2**20
#: Items that are taken and sent at once, at most.
_AT_ONCE = 100
#: Seconds after which the window is computed again while the map waits for an item.
_REFILL_S = 0.25
#: Items after which the map can say whether they are too small.
_ENOUGH = 1000
#: Seconds that sending one item and its result costs at least, and a byte of them (measured).
_SENDING_S, _BYTE_S = 20e-6, 2e-9
#: Pools that no one has closed; they are closed before the interpreter takes threads away.
_open: weakref.WeakSet[Pool] = weakref.WeakSet()
#: A program's results may go to standard output.
_err = Console(stderr=True, soft_wrap=True, highlight=False, log_path=False)


class Pool:
    """Workers on all nodes of a Ray. ``connect`` makes one; ``with`` closes it.

    Ray starts workers when there is work; a worker reserves what is asked for while it calls.
    """

    def __init__(self, joined: connection.Connection) -> None:
        self._connection = joined
        self._scheduler = Scheduler(joined.ray, lambda line: _err.log(as_markup(line)))
        self._is_closed = False
        self._closing = threading.Lock()
        if not _open:  # behind Ray's own: what is registered last is called first
            atexit.register(_close_all)
        _open.add(self)

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
        if not self._scheduler.is_here:
            return  # in a fork: the connection is the other process's
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
        try:
            self._scheduler.close()
        finally:
            connection.leave(self._connection)

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
        if not hasattr(items, "__iter__") and not hasattr(items, "__getitem__"):
            raise ConfigError(f"items is {items!r}; expected is a list, or another iterable.")
        _check(timeout_s, retries)
        tasks = self._queue(reserved, self.map)
        mapped = _Map(tasks, tasks.function(function), timeout_s, retries, failures == "yield")
        return self._results(mapped.results(items, ordered, progress))

    def _results(self, results: Iterator[_Out]) -> Iterator[_Out]:
        """The results; this pool lives as long as they are taken."""
        yield from results

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
        tasks = self._queue(reserved, self.call)
        prepared = tasks.function(function)
        data = pickle_item((item,), {}, f"the item of {prepared.name}")
        call = Item(prepared, data, timeout_s, retries, is_alone=True)
        tasks.submit([call])
        try:
            result: _Out = await asyncio.wrap_future(_for_a_loop(call.future))
        except asyncio.CancelledError:
            tasks.give_up([call])
            raise
        return result

    def executor(self, **reserved: Any) -> PoolExecutor:
        """An executor as ``concurrent.futures`` has them.

        Args:
            reserved: what one worker reserves, as in ``map``.
        """
        return PoolExecutor(self._queue(reserved, self.executor), self)

    def _queue(self, reserved: Mapping[str, Any], method: Callable[..., object]) -> TaskQueue:
        """The queue for workers that reserve what a method was asked for."""
        for name in reserved:
            if name not in _RESERVED:
                parameters = inspect.signature(method).parameters.values()
                own = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]
                meant = nearest(name, [*own, *_RESERVED])
                hint = f" Did you mean {meant!r}?" if meant else ""
                raise ConfigError(
                    f"Pool.{method.__name__} has no argument {name!r}.{hint} By name it takes "
                    f"{', '.join([*own, *_RESERVED])}."
                )
        return self._scheduler.queue(shape_of(**reserved))


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
    return Pool(connection.join(address, num_cpus, runtime_env or {}))


class _Map:
    """One map: a bounded number of items in tasks, results in order or as they come."""

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
        #: Numbers of items that have ended, and ``None`` when the source has changed.
        self._done: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        #: Items that are in tasks, or done and not taken, by number.
        self._live: dict[int, Item] = {}
        self._bytes = self._sent = self._sent_bytes = 0
        #: Of the iterable, or of an item that cannot be sent: raised after the results before it.
        self._error: Exception | None = None

    def results(self, items: Iterable[Any], ordered: bool, progress: bool | None) -> Iterator[Any]:
        """See ``Pool.map``."""
        ready, turn = set[int](), 0
        is_shown = sys.stderr.isatty() if progress is None else progress
        total = len(items) if isinstance(items, Sized) else None
        source = _ItemSource(items, wake=lambda: self._done.put(None))
        try:
            with _Bar(self._function.name, total) if is_shown else nullcontext() as bar:
                while True:
                    self._fill(source)
                    if not self._live and (self._error is not None or source.is_over):
                        if self._error is not None:
                            raise self._error
                        self._warn_of_small_items()
                        return
                    self._wait(ready, source)
                    numbers = sorted(ready)
                    if ordered:
                        numbers = [one for place, one in enumerate(numbers, turn) if place == one]
                    for number in numbers:
                        ready.discard(number)
                        turn = number + 1
                        if bar is not None:
                            bar.advance()
                        yield self._take(number)
        finally:
            source.close()
            self._tasks.give_up(list(self._live.values()))

    def _fill(self, source: _ItemSource) -> None:
        """Send items while there is room for them; results go before further ones."""
        average = self._bytes / max(len(self._live), 1)
        each = average + self._function.pace.result_bytes
        window = self._tasks.window(self._function, average)
        window = min(window, int(_BYTES_MAX / max(each, 1.0)) + 1)
        while len(self._live) < window and (self._done.empty() or not self._live):
            items: list[Item] = []
            try:
                if self._error is None:
                    for value in source.take(min(window - len(self._live), _AT_ONCE)):
                        items.append(self._prepare(value))
            except Exception as error:
                self._error = error
            if wanted := [item for item in items if not item.future.done()]:
                self._tasks.submit(wanted)
            if not items or self._error is not None:
                return

    def _prepare(self, value: Any) -> Item:
        """The next item; one that cannot be sent has failed already, where failures are yielded."""
        number, data, failure = self._sent, b"", None
        try:
            data = pickle_item((value,), {}, f"item {number} of {self._function.name}")
        except CannotBeSent as error:
            if not self._yields_failures:
                raise
            failure = error
        item = Item(self._function, data, self._timeout_s, self._retries)
        if failure is not None:
            item.future.set_exception(failure)
        item.future.add_done_callback(lambda _: self._done.put(number))
        self._live[number] = item
        self._bytes += len(data)
        self._sent += 1
        self._sent_bytes += len(data)
        return item

    def _wait(self, ready: set[int], source: _ItemSource) -> None:
        """Wait until an item has ended, or there is another one, and note all that have ended.

        While items remain the wait is short, because the cluster may have room for them by now.
        """
        with suppress(queue.Empty):
            number = self._done.get(timeout=None if source.is_over else _REFILL_S)
            while True:
                if number is not None:
                    ready.add(number)
                number = self._done.get_nowait()

    def _take(self, number: int) -> Any:
        item = self._live.pop(number)
        self._bytes -= len(item.data)
        error = item.future.exception()
        if error is None:
            return item.future.result()
        failed = ItemFailed(number, error, self._function.name)
        if self._yields_failures:
            return failed
        raise failed from error

    def _warn_of_small_items(self) -> None:
        pace = self._function.pace
        if self._sent < _ENOUGH or pace.seconds is None:
            return
        sending_s = _SENDING_S + _BYTE_S * (self._sent_bytes / self._sent + pace.result_bytes)
        if pace.median_s < sending_s:
            warnings.warn(
                f"An item of {self._function.name} takes {pace.median_s * 1e6:.0f} µs, and sending "
                f"it about {sending_s * 1e6:.0f} µs: put more work into each item, such as a list "
                "of what are items now.",
                RuntimeWarning,
                stacklevel=3,
            )


class _ItemSource:
    """The items of a map, taken from what the caller gives.

    An iterable may wait for a network, or for results of its own map: it is read in a thread of its
    own, as ``multiprocessing``'s ``imap`` does it. A list, a tuple or a range needs no thread.

    Args:
        items: of the map.
        wake: is called, in any thread, when there is an item after there was none, or the end.
    """

    def __init__(self, items: Iterable[Any], wake: Callable[[], None]) -> None:
        self._items = iter(items)
        self._wake = wake
        self._read: deque[Any] = deque()
        self._most = 0
        self._has_ended = self._is_closed = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._has_thread = not isinstance(items, (list, tuple, range))
        if self._has_thread:
            run, name = copy_context().run, "nemo-run-ray-items"
            threading.Thread(target=run, args=(self._run,), name=name, daemon=True).start()

    @property
    def is_over(self) -> bool:
        """Whether all items have been taken."""
        with self._changed:
            return self._has_ended and not self._read and self._error is None

    def take(self, most: int) -> list[Any]:
        """At most ``most`` items, without waiting for any; as many are read ahead.

        Raises:
            BaseException: what the iterable has raised, when the items before it have been taken.
        """
        if not self._has_thread:
            items = list(islice(self._items, most))
            self._has_ended = len(items) < most
            return items
        with self._changed:
            items = [self._read.popleft() for _ in range(min(most, len(self._read)))]
            self._most = most - len(items)
            self._changed.notify()
            if self._error is not None and not items:
                raise self._error
            return items

    def close(self) -> None:
        """Take no further item."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _run(self) -> None:
        try:
            while self._may_read():
                value = next(self._items)
                with self._changed:
                    self._read.append(value)
                    is_first = len(self._read) == 1
                if is_first:
                    self._wake()
        except StopIteration:
            pass
        except BaseException as error:  # the caller's thread raises it
            self._error = error
        with self._changed:
            self._has_ended = True
        self._wake()

    def _may_read(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: len(self._read) < self._most or self._is_closed)
            return not self._is_closed


class _Bar:
    """A progress bar: how many items have ended, and of how many if that is known."""

    def __init__(self, name: str, total: int | None) -> None:
        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        name_column = TextColumn("{task.description}", markup=False)
        # What is printed on a terminal stands above the bar; a file or a pipe gets it as it is.
        is_terminal = sys.stdout.isatty()
        self._bar = Progress(name_column, *columns, console=_err, redirect_stdout=is_terminal)
        self._task = self._bar.add_task(name, total=total)

    def __enter__(self) -> _Bar:
        with suppress(LiveError):  # Rich before 14.1 shows one at a time: the outer one
            self._bar.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._bar.stop()

    def advance(self) -> None:
        """Count one more item."""
        self._bar.advance(self._task)


def _check(timeout_s: object, retries: object) -> None:
    if timeout_s is not None and not (is_amount(timeout_s) and timeout_s):
        raise ConfigError(f"timeout_s is {timeout_s!r}; expected is a number above 0, or None.")
    if not is_whole(retries, 0):
        raise ConfigError(f"retries is {retries!r}; expected is a whole number from 0.")


def _for_a_loop(future: Future[Any]) -> Future[Any]:
    """A future with the same result, which can be cancelled while the other one runs."""
    other: Future[Any] = Future()

    def pass_on(done: Future[Any]) -> None:
        if done.cancelled() or not other.set_running_or_notify_cancel():
            return
        error = done.exception()
        if isinstance(error, _OF_A_LOOP):  # it would end, or stop, the loop that waits for it
            wrapped = WorkError(f"the function has raised {type(error).__name__}: {error}")
            wrapped.__cause__ = error
            other.set_exception(wrapped)
        elif error is not None:
            other.set_exception(error)
        else:
            other.set_result(done.result())

    future.add_done_callback(pass_on)
    return other


def _close_all() -> None:
    for pool in list(_open):
        pool.close()
