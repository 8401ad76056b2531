"""Calls of functions as Ray tasks: batches, a bounded number of tasks at once, retries.

Ray starts the workers and shares the room of the nodes between the tasks of all programs. An item
is in one task at a time, as far as Ray can tell, and ends as a result or as a failure.

The task is sent by value and uses the standard library and ray alone, so a cluster needs nothing of
this package. Items and results are pickled here and in the worker, not by Ray: an item that cannot
be pickled is named by its number, and the others of its batch are not affected.
"""

from __future__ import annotations

import faulthandler
import io
import math
import pickle
import queue
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any

from nemo_run_ray.errors import (
    CannotBeSent,
    ConfigError,
    PoolClosed,
    TimedOut,
    WorkerDied,
    WorkError,
)
from nemo_run_ray.fields import is_whole
from nemo_run_ray.remote import fit
from nemo_run_ray.remote.fit import Amounts, Labels
from nemo_run_ray.work.connection import Connection

#: Seconds that a batch should take: sixty times what a task costs the processors of its node and
#: of the client. An item that takes more than half of it travels alone, so that it keeps no other
#: one waiting.
BATCH_S = 0.22
#: Seconds that a batch should take at least, at the end of the work.
BATCH_LEAST_S = 0.01
#: Items and bytes of one batch at most.
BATCH_MAX, BATCH_BYTES_MAX = 1000, 2**20
#: Tasks for each worker that the nodes can have: the next one waits in Ray when the first is done.
TASKS_PER_WORKER = 2
#: Further attempts of an item that was lost with its node, whatever its retries are.
LOSSES_MAX = 3
#: Functions that a worker, and a client, keeps.
FUNCTIONS_MAX = 100
#: Seconds between two looks at the nodes and at futures that were cancelled.
_LOOK_S = 1.0
#: If this program stood still for more seconds, no call counts as late: its answer could not come.
_STILL_S = 1.2
#: Seconds, at least, between two questions to Ray which tasks have begun: an answer takes some ms.
_BEGUN_S = 0.1
#: Seconds for which no node is large enough, after which items fail: one may join, or come back.
_NEVER_S = 120.0
#: Seconds for which no task has begun, until the first line about it, and between two.
_FIRST_TELL_S, _TELL_S = 5.0, 30.0
#: Seconds after which a batch that takes longer than expected returns the results it has.
_BATCH_END_S = 0.5
#: Seconds that the imports of a function may take when its calls have a time limit.
_IMPORT_S = 300.0

_functions: dict[bytes, Callable[..., Any]] = {}


def call_items_on_node(
    function: bytes, items: Sequence[bytes], timeout_s: float | None
) -> Iterator[Any]:
    """Yield the id of this node, then the rows of ``call_items``.

    The client ends the worker when a call takes too long; that time begins after the imports.
    """
    import ray

    _prepare(function, timeout_s)
    yield ray.get_runtime_context().get_node_id()
    yield call_items(function, items, None)


def call_items(
    function: bytes, items: Sequence[bytes], timeout_s: float | None
) -> list[tuple[bytes | None, str, float]]:
    """A row for each item: pickled data, a text, and the seconds it took.

    The data are those of the result, with no text; or of the exception, with its traceback; or
    ``None`` when the result cannot be pickled, with the reason.

    There are fewer rows than items when those took long: other workers may take the rest. By Ray
    Client, which has no tasks that yield, this is the task, and the process ends itself: by a
    thread in C, whatever Python code does.
    """
    from ray import cloudpickle

    _prepare(function, timeout_s)
    rows = []
    until = monotonic() + _BATCH_END_S
    for item in items:
        if timeout_s is not None:
            faulthandler.dump_traceback_later(timeout_s, exit=True, file=2)
        data: bytes | None = b""
        text = ""
        began = monotonic()
        try:
            arguments, named = pickle.loads(item)
            value = _load(function)(*arguments, **named)
        except BaseException as error:  # also SystemExit: it ends the item, not the worker
            text = traceback.format_exc()
            with suppress(Exception):  # any that its own __reduce__ raises
                data = cloudpickle.dumps(error, protocol=5)
        else:
            try:
                data = cloudpickle.dumps(value, protocol=5)
            except Exception as error:
                data, text = None, f"{type(value).__name__}: {error}"
        rows.append((data, text, monotonic() - began))
        if monotonic() >= until:
            break
    faulthandler.cancel_dump_traceback_later()
    return rows


def _prepare(function: bytes, timeout_s: float | None) -> None:
    """Import what a function needs; that is no part of its calls' limit, and has one of its own."""
    if timeout_s is not None:
        faulthandler.dump_traceback_later(_IMPORT_S, exit=True, file=2)
    with suppress(BaseException):  # each item reports it
        _load(function)
    faulthandler.cancel_dump_traceback_later()


def _load(function: bytes) -> Callable[..., Any]:
    if function not in _functions:
        if len(_functions) >= FUNCTIONS_MAX:
            _functions.clear()
        ((_functions[function],), _) = pickle.loads(function)
    return _functions[function]


class RemoteTraceback(Exception):
    """The traceback of an exception where it was raised."""

    @property
    def traceback_elsewhere(self) -> str:
        """For ``errors.py``, which prints it above a failure that ends the program."""
        return str(self.args[0])

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


@dataclass(eq=False)
class Function:
    """A function that workers call, and the measured cost of its items."""

    name: str
    #: It, pickled.
    data: bytes
    #: Its reference in Ray's object store, once it is there.
    stored: Any = None
    #: The time of one item; infinite until one has ended.
    seconds: float = math.inf
    #: The size of one result.
    result_bytes: float = 0.0

    def measured(self, seconds: float, result_bytes: int) -> None:
        """Take the cost of one more item into account."""
        if self.seconds == math.inf:
            self.seconds, self.result_bytes = seconds, result_bytes
        self.seconds += 0.2 * (seconds - self.seconds)
        self.result_bytes += 0.2 * (result_bytes - self.result_bytes)

    def batch(self, waiting: int, workers: int, item_bytes: float) -> int:
        """The number of items of the next task: one until the cost is known."""
        by_time = BATCH_S / max(self.seconds, 1e-6)
        by_size = BATCH_BYTES_MAX / max(item_bytes, self.result_bytes, 1.0)
        # At the end of the work each worker gets its share, if that is worth a task.
        by_share = -(-waiting // max(workers * TASKS_PER_WORKER, 1))
        by_share = max(by_share, int(BATCH_LEAST_S / max(self.seconds, 1e-6)))
        return max(1, min(int(by_time), int(by_size), by_share, BATCH_MAX))


@dataclass(eq=False)
class Item:
    """One call of a function."""

    function: Function
    #: Its pickled arguments.
    data: bytes
    timeout_s: float | None = None
    #: Further attempts after a failure.
    retries: int = 0
    #: Its task has no other item.
    is_alone: bool = False
    #: Gets the result, or the last failure.
    future: Future[Any] = field(default_factory=Future)
    #: Attempts that have failed, and those that were lost with a node.
    failures: int = 0
    losses: int = 0
    _has_begun: bool = False

    def begin(self) -> bool:
        """Whether its result is still wanted; from then on its future cannot be cancelled."""
        if not self._has_begun:
            self._has_begun = True
            self.future.set_running_or_notify_cancel()
        return not self.future.done()

    def fail(self, error: BaseException) -> None:
        """End without a result."""
        if self.begin():
            self.future.set_exception(error)

    def take(self, data: bytes | None, text: str) -> BaseException | None:
        """End with the result of a row, or return why it has none."""
        if data is None:
            return CannotBeSent(f"The result of {self.function.name} cannot be sent back: {text}")
        try:
            value = pickle.loads(data)
            if not text:
                self.future.set_result(value)
                return None
            stops = isinstance(value, (StopIteration, CancelledError))
            if stops or not isinstance(value, Exception):
                # It would stop, or end, what waits for the result.
                value = WorkError(f"the function has raised {type(value).__name__}: {value}")
            value.__cause__ = RemoteTraceback(text)
        except Exception as error:  # it has no class here, or cannot be changed
            if not text:
                return error
            value = RuntimeError(text.strip().splitlines()[-1])
            value.__cause__ = RemoteTraceback(text)
        return value  # type: ignore[no-any-return]

    def timed_out(self) -> TimedOut:
        """The failure of a call that took too long."""
        return TimedOut(
            f"{self.function.name} took longer than {self.timeout_s:g} s, and its worker was ended."
        )


@dataclass(eq=False)
class _RayTask:
    """A Ray task and the items that it has."""

    #: The generator of the task's results; of Ray Client the reference of its one result.
    ref: Any
    items: list[Item]
    #: When it was first seen to run; of Ray Client when it was sent.
    begun_at: float | None = None
    node_id: str = ""

    @property
    def deadline(self) -> float:
        """When it takes too long, once it has begun."""
        if not self.begun_at:
            return math.inf
        # Which of several takes too long shows when each runs by itself.
        batch_s = _BATCH_END_S if len(self.items) > 1 else 0.0
        return self.begun_at + batch_s + (self.items[0].timeout_s or math.inf)


class TaskQueue:
    """The items that wait for workers which reserve the same, and those that are in tasks.

    Any thread may call ``submit``, ``give_up``, ``window`` and ``close``; the rest runs in a thread
    of the queue's own.

    Raises:
        ConfigError: Ray takes no such tasks.
    """

    def __init__(
        self,
        connection: Connection,
        cpus: float = 1,
        gpus: float = 0,
        memory: int | None = None,
        resources: Amounts | None = None,
        label_selector: Labels | None = None,
        max_workers: int | None = None,
    ):
        self._ray = connection.ray
        self._by_client = self._ray.util.client.ray.is_connected()
        self._ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        task = self._ray.remote(call_items if self._by_client else call_items_on_node)
        try:
            self._task = task.options(
                num_cpus=cpus,
                num_gpus=gpus,
                memory=memory,
                resources=resources,
                label_selector=label_selector,
                # Ray takes a strategy or labels.
                scheduling_strategy=None if label_selector else "SPREAD",
                max_retries=0,
            )
        except (ValueError, TypeError) as error:
            raise ConfigError(f"Ray has no such workers: {error}.") from error
        amounts = {"CPU": cpus, "GPU": gpus, "memory": memory, **(resources or {})}
        reserved = {name: float(amount) for name, amount in amounts.items() if amount}
        if not (is_whole(max_workers, 1) or (max_workers is None and reserved)):
            raise ConfigError(
                "max_workers must be greater than 0, and whole; a worker that reserves nothing "
                f"needs it, since nothing else limits their number. It is {max_workers!r}."
            )
        self._request = fit.ResourceRequest(reserved, label_selector or {})
        self._max_workers = max_workers
        self._connection = connection
        self._events = queue.SimpleQueue[Callable[[], Any]]()
        self._lock = threading.Lock()
        self._closed: BaseException | None = None
        self._waiting = deque[Item]()
        self._calls = set[_RayTask]()
        self._slots = 1
        self._look_at = self._ask_at = self._send_at = 0.0
        # When to say that no task begins, and to fail since no node is large enough.
        self._tell_at: float | None = None
        self._never_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="nemo-run-ray-work", daemon=True)
        self._thread.start()

    def window(self, function: Function, item_bytes: float) -> int:
        """The number of items, in tasks or done and not taken, that keeps all workers busy."""
        workers = max(self._slots, 1)
        batch = function.batch(BATCH_MAX * workers * TASKS_PER_WORKER, workers, item_bytes)
        return 2 * workers * batch * TASKS_PER_WORKER  # twice what can be in tasks

    def submit(self, item: Item) -> None:
        """Let an item wait for a worker.

        Raises:
            PoolClosed: the pool is closed.
            ConfigError: it is that of the process which forked this one.
        """
        if not self._post(lambda: self._waiting.append(item)):  # the deque of that moment
            raise PoolClosed(f"The pool takes no more work: {self._closed}")

    def give_up(self, items: Sequence[Item]) -> None:
        """End items whose results nobody wants any more."""
        self._post(partial(self._end, items, CancelledError()))

    def close(self) -> None:
        """End all tasks; items that have not ended fail."""
        with self._lock:
            self._closed = self._closed or WorkerDied("The pool was closed.")
        self._events.put(lambda: None)
        self._thread.join()

    def _post(self, event: Callable[[], Any]) -> bool:
        """Let the queue's thread call a function; whether it still does so."""
        self._connection.check_process()
        with self._lock:  # what is posted before the close is ended by it
            if self._closed is None:
                self._events.put(event)
            return self._closed is None

    def _run(self) -> None:
        try:
            while self._closed is None:
                if not (is_busy := bool(self._waiting or self._calls)):
                    self._tell_at = self._never_at = None
                began = monotonic()
                event = None
                with suppress(queue.Empty):
                    event = self._events.get(timeout=0.2 if is_busy else None)
                waited_s = monotonic() - began
                for call in self._calls if waited_s > _STILL_S else ():
                    if call.begun_at:
                        call.begun_at += waited_s
                with suppress(queue.Empty):
                    while event:
                        event()
                        event = self._events.get_nowait()
                self._step(monotonic())
        except BaseException as error:  # a fault of this thread must not leave callers waiting
            with self._lock:
                self._closed = error
            raise
        finally:
            while not self._events.empty():
                with suppress(Exception):  # what it is about fails below
                    self._events.get_nowait()()
            self._end(self._unended(), self._closed or WorkerDied("The pool was closed."))

    def _unended(self) -> list[Item]:
        return [*(item for call in self._calls for item in call.items), *self._waiting]

    def _step(self, now: float) -> None:
        """Send what waits, and end what takes too long."""
        if now >= self._ask_at:
            self._ask_at = now + _BEGUN_S
            self._ask_for_begun()
            for call in [] if self._by_client else list(self._calls):
                if now >= call.deadline:
                    self._cancel(call)
                    self._has_failed(call.items, call.items[0].timed_out())
        if now >= self._look_at:
            self._look_at = now + _LOOK_S
            self._end([one for one in self._waiting if one.future.cancelled()], CancelledError())
            with suppress(self._ray.exceptions.RayError, RuntimeError, OSError):
                self._look(now)  # else the head does not answer
        while self._waiting and now >= self._send_at:
            first = self._waiting[0]
            function, most, size_bytes = first.function, self._slots, len(first.data)
            if function.seconds <= 0.25:  # of longer ones none waits in Ray
                most *= TASKS_PER_WORKER
            if len(self._calls) >= min(most, self._max_workers or most):
                return
            most = function.batch(len(self._waiting), self._slots, size_bytes)
            batch = [self._waiting.popleft()]
            while self._waiting and len(batch) < most and not first.is_alone:
                item = self._waiting[0]
                size_bytes += len(item.data)
                is_like = item.function is function and item.timeout_s == first.timeout_s
                if item.is_alone or not is_like or size_bytes > BATCH_BYTES_MAX:
                    break
                batch.append(self._waiting.popleft())
            if batch := [item for item in batch if item.begin()]:
                self._send(batch)

    def _end(self, items: Sequence[Item], error: BaseException) -> None:
        for item in items:
            item.fail(error)
        self._waiting = deque(item for item in self._waiting if not item.future.done())
        for call in list(self._calls):
            if all(item.future.done() for item in call.items):
                self._cancel(call)

    def _look(self, now: float) -> None:
        """Look at the nodes: how many workers they can have, and which of them have died."""
        nodes, amounts = fit.nodes_of(self._ray.nodes()), self._request.resources
        most = self._max_workers
        # Where a worker reserves nothing, max_workers is given.
        slots = sum(
            fit.slots(node.resources, amounts) if amounts else most or 0
            for node in fit.hosts(self._request, nodes)
        )
        self._slots = min(slots, most or slots)
        alive = {"", *(node.node_id for node in nodes)}
        # Where a host has lost its power, Ray itself notices some minutes later.
        for call in list(self._calls):
            if call.begun_at and call.node_id not in alive:
                self._cancel(call)
                self._was_lost(call, self._ray.exceptions.NodeDiedError("Its node has died."))
        if self._slots or not self._never_at:
            self._never_at = now + _NEVER_S
        elif now >= self._never_at:
            self._end(
                self._unended(),
                WorkerDied(f"No node can have a worker: {fit.why_not(self._request, nodes)}."),
            )
        if not self._tell_at or any(call.begun_at for call in self._calls):
            self._tell_at = now + _FIRST_TELL_S
        elif now >= self._tell_at:
            self._tell_at = now + _TELL_S
            all_free = self._ray.available_resources()
            free = {name: all_free.get(name, 0.0) for name in amounts}
            print(  # Ray does not tell a start from a lack of room
                "No worker is ready yet: it starts, or waits for room. Each asks for "
                f"{fit.amounts_text(amounts)}; the nodes can have {self._slots} "
                f"when nothing else runs. Free in the cluster: {fit.amounts_text(free)}.",
                file=sys.stderr,
            )

    def _ask_for_begun(self) -> None:
        """Ask Ray which tasks have begun; by Ray Client a task counts as begun when it is sent.

        It must be asked often: of a task that has failed Ray drops what it has yielded and nobody
        has read.
        """
        unseen = {call.ref: call for call in self._calls if not call.begun_at}
        if unseen:
            refs = [*unseen]
            for ref in self._ray.wait(refs, num_returns=len(refs), timeout=0)[0]:
                self._read_begin(unseen[ref])

    def _read_begin(self, call: _RayTask) -> None:
        """Read what a task has yielded first, unless that was done."""
        if not call.begun_at:
            with suppress(self._ray.exceptions.RayError, StopIteration):
                call.node_id, call.begun_at = self._ray.get(next(call.ref)), monotonic()

    def _send(self, items: list[Item]) -> None:
        function = items[0].function
        try:
            if function.stored is None:
                function.stored = self._ray.put(function.data)
            ref = self._task.remote(
                function.stored, [item.data for item in items], items[0].timeout_s
            )
        except Exception as error:  # such as a full object store: other items are not affected
            self._has_failed(items, error)
            return
        call = _RayTask(ref, items, monotonic() if self._by_client else None)
        self._calls.add(call)
        take_rows = partial(self._has_rows, call)
        if self._by_client:
            self._watch(call, ref, take_rows)
        else:  # it yields the rows last; _read_begin has taken the node's id by then
            self._watch(call, ref.completed(), lambda _: self._watch(call, next(ref), take_rows))

    def _watch(self, call: _RayTask, ref: Any, ready: Callable[[Any], None]) -> None:
        """Pass the value of a task's reference on, or the task's loss, in the queue's thread."""

        def look(done: Future[Any]) -> None:
            if call not in self._calls:
                return  # it was cancelled
            if (error := done.exception()) is None:
                self._read_begin(call)
                ready(done.result())
                return
            for failed in [] if self._by_client else call.ref:
                with suppress(self._ray.exceptions.RayError):
                    self._ray.get(failed)  # Ray prints errors that nobody takes
            self._was_lost(call, error)

        ref.future().add_done_callback(lambda done: self._post(partial(look, done)))

    def _has_rows(self, call: _RayTask, rows: Sequence[tuple[bytes | None, str, float]]) -> None:
        self._calls.discard(call)
        self._tell_at = None
        self._waiting.extendleft(reversed(call.items[len(rows) :]))
        for item, (data, text, seconds) in zip(call.items, rows, strict=False):
            item.function.measured(seconds, len(data or b""))
            failure = None if item.future.done() else item.take(data, text)
            if failure is not None:
                self._has_failed([item], failure)

    def _was_lost(self, call: _RayTask, error: BaseException) -> None:
        """The worker of a task has died, or its node, or no worker could be started there."""
        self._calls.discard(call)
        exceptions, first = self._ray.exceptions, call.items[0]
        no_start = exceptions.RuntimeEnvSetupError
        lost = (exceptions.NodeDiedError, exceptions.ObjectLostError, no_start)
        crashed = (exceptions.WorkerCrashedError, exceptions.OutOfMemoryError)
        # The call may have ended the worker before its begin was seen; or it was dead before.
        most = 1 if isinstance(error, crashed) else LOSSES_MAX
        if (not call.begun_at or isinstance(error, lost)) and first.losses < most:
            others = (one for one in self._calls if one.begun_at)
            # A node on which no worker can start uses up no attempt while others can. It fails at
            # once, and would get all items.
            is_local = isinstance(error, no_start) and not self._by_client and any(others)
            self._send_at = monotonic() + is_local
            for item in call.items:
                item.losses += not is_local
                item.is_alone |= isinstance(error, crashed)
            self._waiting.extendleft(reversed(call.items))
            return
        if self._by_client and monotonic() >= call.deadline:
            error = first.timed_out()
        elif isinstance(error, exceptions.RayError):
            has_run = call.begun_at or isinstance(error, crashed)
            error = WorkerDied(
                f"The worker for {first.function.name} "
                f"{'has died' if has_run else 'could not be started'}: "
                f"{' '.join(str(error).split())[:500]}"
            )
        self._has_failed(call.items, error)

    def _has_failed(self, items: Sequence[Item], error: BaseException) -> None:
        """A task has failed: run each of several items by itself, to find the one that did it."""
        items = [item for item in items if not item.future.done()]
        for item in items:
            if len(items) > 1:
                item.is_alone = True
            else:
                item.failures += 1
            if item.failures > item.retries:
                item.fail(error)
        self._waiting.extendleft(reversed(items))

    def _cancel(self, call: _RayTask) -> None:
        """End a task with its worker."""
        self._calls.discard(call)
        with suppress(Exception):  # the connection may be closed, and the task with it
            self._ray.cancel(call.ref, force=True)


def pickle_arguments(what: str, /, *arguments: Any, **named: Any) -> bytes:
    """The arguments of one call as bytes; ``what`` begins the message.

    Raises:
        CannotBeSent: one of them cannot be pickled; the message names what it holds.
    """
    from ray import cloudpickle
    from ray.util import inspect_serializability

    try:
        return bytes(cloudpickle.dumps((arguments, named), protocol=5))
    except Exception as error:  # any that an object's own __reduce__ raises
        culprits = []
        for part in (*arguments, *named.values()):
            with suppress(Exception):  # the search calls the object's own code
                _, failures = inspect_serializability(part, "it", print_file=io.StringIO())
                culprits += [
                    f"{'.'.join(map(str, one.path))} is of type {type(one.obj).__name__}; "
                    for one in failures
                ]
        text = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise CannotBeSent(
            f"{what} cannot be sent to a worker: {min(culprits, default='')}{text}. "
            "Send what it is made from, and make it in the function."
        ) from error
