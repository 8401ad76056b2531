"""The pool: a function called for many items, or for one, on all nodes of a Ray."""

from __future__ import annotations

import asyncio
import atexit
import inspect
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from typing import Any, Literal, TypeVar

from nemo_run_ray.errors import ConfigError, WorkError
from nemo_run_ray.fields import is_amount, is_whole, nearest
from nemo_run_ray.work import connection
from nemo_run_ray.work.engine import Engine
from nemo_run_ray.work.executor import PoolExecutor
from nemo_run_ray.work.items import Item
from nemo_run_ray.work.pickling import pickle_function, pickle_item
from nemo_run_ray.work.progress import say
from nemo_run_ray.work.shape import Shape, shape_of
from nemo_run_ray.work.stream import Stream

_In = TypeVar("_In")
_Out = TypeVar("_Out")
#: What a worker may reserve, and what it reserves if nothing is said.
_RESERVED: dict[str, Any] = {
    "cpus": 1,
    "gpus": 0,
    "memory": None,
    "resources": None,
    "label_selector": None,
    "max_workers": None,
}
#: Exceptions that an event loop does not pass on as those of a call.
_OF_A_LOOP = (
    StopIteration,
    SystemExit,
    KeyboardInterrupt,
    GeneratorExit,
    asyncio.CancelledError,
    CancelledError,
)
#: Pools that no one has closed; they are closed before the interpreter takes threads away.
_open: weakref.WeakSet[Pool] = weakref.WeakSet()


class Pool:
    """Workers on all nodes of a Ray. ``connect`` makes one; ``with`` closes it.

    Workers are started when there is work, reserve what is asked for, and give it back when they
    have been idle for 20 s.
    """

    def __init__(self, joined: connection.Connection) -> None:
        self._connection = joined
        self._engine = Engine(joined.ray, say)
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
        """End the workers. Work that has not ended fails with ``WorkerDied``."""
        if not self._engine.is_here:
            return  # in a fork: the connection is the other process's
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
        try:
            self._engine.close()
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

        Items are taken from the iterable when there is room for them: a bounded number is on its
        way or waits to be taken. Short items travel together. When a worker dies, the item that it
        was at has failed; where it had several at once, they are run again one by one.

        Args:
            function: of one item.
            items: any iterable, also one that never ends.
            ordered: results come in the order of the items, else as they are ready.
            failures: ``raise`` ends the map at the first item that has failed; ``yield`` gives an
                ``ItemFailed`` in the place of its result, and goes on.
            timeout_s: seconds that one call may take; its worker is ended then.
            retries: of an item after a failure; after the death of a node three come besides.
            progress: show a progress bar; ``None`` shows one on a terminal.
            reserved: of one worker: ``cpus=1``, ``gpus``, ``memory`` in bytes, ``resources`` of
                the cluster's own, ``label_selector``; and ``max_workers``.

        Raises:
            ItemFailed: an item has failed, after its retries.
            CannotBeSent: the function, or an item, cannot be pickled.
        """
        _check_map(items, failures)
        _check(timeout_s, retries)
        shape, prepared = self._shape(reserved, self.map), pickle_function(function)
        stream = Stream(self._engine, shape, prepared, timeout_s, retries)
        return self._results(stream.results(items, ordered, failures == "yield", progress))

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
        prepared = pickle_function(function)
        data = pickle_item((item,), {}, f"the item of {prepared.name}")
        one = Item(prepared, data, timeout_s, retries, is_alone=True)
        self._engine.submit(self._shape(reserved, self.call), [one])
        try:
            found: _Out = await asyncio.wrap_future(_apart(one.future))
        except asyncio.CancelledError:
            self._engine.give_up([one])
            raise
        return found

    def executor(self, **reserved: Any) -> PoolExecutor:
        """An executor as ``concurrent.futures`` has them.

        Args:
            reserved: what one worker reserves, as in ``map``.
        """
        return PoolExecutor(self._engine, self._shape(reserved, self.executor), self)

    def _shape(self, reserved: Mapping[str, Any], method: Callable[..., object]) -> Shape:
        """The shape of a worker, of the arguments that a method passes on."""
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
        shape = shape_of(**{**_RESERVED, **reserved})
        self._engine.check(shape)
        return shape


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
    RAY_ADDRESS. What was started here ends with the last program that uses it; a Ray that was there
    before goes on.

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


def _check_map(items: object, failures: object) -> None:
    if failures not in ("raise", "yield"):
        raise ConfigError(f"failures is {failures!r}; expected is 'raise' or 'yield'.")
    if not hasattr(items, "__iter__") and not hasattr(items, "__getitem__"):
        raise ConfigError(f"items is {items!r}; expected is a list, or another iterable.")


def _check(timeout_s: object, retries: object) -> None:
    if timeout_s is not None and not (is_amount(timeout_s) and timeout_s):
        raise ConfigError(f"timeout_s is {timeout_s!r}; expected is a number above 0, or None.")
    if not is_whole(retries, 0):
        raise ConfigError(f"retries is {retries!r}; expected is a whole number from 0.")


def _apart(future: Future[Any]) -> Future[Any]:
    """A future with the same result, which can be cancelled while the other one runs."""
    other: Future[Any] = Future()

    def pass_on(done: Future[Any]) -> None:
        if done.cancelled() or not other.set_running_or_notify_cancel():
            return
        error = done.exception()
        if isinstance(error, _OF_A_LOOP):  # it would end, or stop, the loop that waits for it
            words = f"the function has raised {type(error).__name__}: {error}"
            wrapped = WorkError(words)
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
