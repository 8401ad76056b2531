"""Calls of functions as Ray tasks: batches, a bounded number of tasks at once, retries.

Ray starts the workers and shares the room of the nodes between the tasks of all programs. An item
is in one task at a time, as far as Ray can tell, and ends as a result or as a failure.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import pickle
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from nemo_run_ray.errors import CannotBeSent, ConfigError, PoolClosed, TimedOut, WorkerDied
from nemo_run_ray.fields import LABELS, RESOURCE_MAX, RESOURCE_MIN, are_labels, is_amount, is_whole
from nemo_run_ray.remote import fit
from nemo_run_ray.work.worker import (
    FUNCTIONS_MAX,
    RAISED,
    UNPICKLED,
    CallOutcome,
    remote_task,
)

#: Seconds that a batch should take: a hundred times what a task costs. An item that takes longer
#: travels alone, so that it keeps no other one waiting.
BATCH_S = 0.05
#: Items and bytes of one batch at most.
BATCH_MAX, BATCH_BYTES_MAX = 1000, 2**20
#: Tasks for each worker that the nodes can have: the next one waits in Ray when the first is done.
#: Of tasks that take longer than some seconds none waits in Ray.
TASKS_PER_WORKER, _QUEUED_S = 2, 0.25
#: Further attempts of an item that was lost with its node, whatever its retries are.
LOSSES_MAX = 3
#: Seconds between two looks at the nodes and at futures that were cancelled, and at tasks with a
#: time limit.
_LOOK_S, _LIMIT_LOOK_S = 1.0, 0.2
#: Seconds for which no node is large enough, after which items fail: a node may be joining, and
#: where workers existed their node may come back.
_NEVER_S, _NEVER_AGAIN_S = 5.0, 120.0
#: Seconds for which no task has begun, until the first line about it, and between two.
_FIRST_TELL_S, _TELL_S = 5.0, 30.0
#: Seconds for which no task has begun, after which tasks of other shapes are held back.
_STARVED_S = 10.0


@dataclass(frozen=True)
class Shape:
    """The resources that one worker reserves.

    Attributes:
        resources: by Ray's names (``CPU``, ``GPU``, ``memory`` in bytes, and the cluster's own).
        label_selector: nodes that may have one.
        max_workers: limit of tasks at once; ``None`` is what the nodes can have.
    """

    resources: tuple[tuple[str, float], ...]
    label_selector: tuple[tuple[str, str], ...] = ()
    max_workers: int | None = None

    def options(self) -> dict[str, Any]:
        """The options of the task."""
        amounts = dict(self.resources)
        options: dict[str, Any] = {
            "num_cpus": amounts.pop("CPU", 0),
            "num_gpus": amounts.pop("GPU", 0),
            "memory": int(amounts.pop("memory", 0)) or None,
            "resources": amounts or None,
            "max_retries": 0,
            # Ray takes a strategy or labels.
            "scheduling_strategy": None if self.label_selector else "SPREAD",
            "label_selector": dict(self.label_selector) or None,
        }
        return {name: value for name, value in options.items() if value is not None}

    @property
    def request(self) -> fit.ResourceRequest:
        """The request of one worker."""
        return fit.ResourceRequest(dict(self.resources), dict(self.label_selector))

    def slots(self, nodes: Sequence[fit.Node]) -> int:
        """The number of workers that the nodes can have at once."""
        hosts = fit.hosts(self.request, nodes)
        if not self.resources:  # then max_workers is given, see shape_of
            return (self.max_workers or 0) if hosts else 0
        count = sum(fit.slots(node.resources, dict(self.resources)) for node in hosts)
        return count if self.max_workers is None else min(count, self.max_workers)

    def why_waiting(self, free: Mapping[str, float], slots: int) -> str:
        """Explain a wait for the first worker: Ray does not tell a start from a lack of room."""
        here = {name: free.get(name, 0.0) for name, _ in self.resources}
        return (
            "No worker is ready yet: it starts, or waits for room. Each asks for "
            f"{fit.amounts_text(dict(self.resources))}; the nodes can have {slots} when nothing "
            f"else runs. Free in the cluster: {fit.amounts_text(here)}."
        )


def shape_of(
    cpus: float = 1,
    gpus: float = 0,
    memory: int | None = None,
    resources: Mapping[str, float] | None = None,
    label_selector: Mapping[str, str] | None = None,
    max_workers: int | None = None,
) -> Shape:
    """The shape that a user's arguments describe.

    Raises:
        ConfigError: one of them is wrong.
    """
    if resources is not None and not (
        isinstance(resources, Mapping) and all(isinstance(name, str) for name in resources)
    ):
        raise ConfigError(
            f"resources is {resources!r}; expected is a dict of amounts by the name of a resource."
        )
    if label_selector is not None and not are_labels(label_selector):
        raise ConfigError(f"label_selector is {label_selector!r}; expected is a dict of {LABELS}.")
    amounts = {"CPU": cpus, "GPU": gpus, "memory": memory or 0, **(resources or {})}
    for name, value in amounts.items():
        if not is_amount(value):
            raise ConfigError(f"{name} is {value!r}; expected is a number from 0.")
        if 0 < value < RESOURCE_MIN or value > RESOURCE_MAX:
            raise ConfigError(
                f"{name} is {value!r}; expected is 0, or a number from {RESOURCE_MIN}, the step in "
                f"which Ray counts, to {RESOURCE_MAX}."
            )
    if max_workers is not None and not is_whole(max_workers, 1):
        raise ConfigError(f"max_workers must be greater than 0, and whole; it is {max_workers!r}.")
    reserved = {name: float(value) for name, value in amounts.items() if value}
    if not reserved and max_workers is None:
        raise ConfigError(
            "A worker that reserves nothing needs max_workers: otherwise nothing limits their "
            "number. Expected is cpus above 0, or max_workers."
        )
    labels = tuple(sorted((label_selector or {}).items()))
    return Shape(tuple(sorted(reserved.items())), labels, max_workers)


@dataclass
class Pace:
    """The measured cost of a function's items.

    Attributes:
        seconds: of one item; ``None`` until one has ended.
        median_s: an estimate of the median, which ignores the few items that a busy machine delays.
        result_bytes: of one result.
    """

    seconds: float | None = None
    median_s: float = 0.0
    result_bytes: float = 0.0

    def measured(self, seconds: float, result_bytes: int) -> None:
        """Take the cost of one more item into account."""
        if self.seconds is None:
            self.seconds, self.result_bytes = seconds, float(result_bytes)
            self.median_s = max(seconds, 1e-7)
            return
        self.median_s *= 1.05 if seconds > self.median_s else 1 / 1.05
        self.seconds += 0.2 * (seconds - self.seconds)
        self.result_bytes += 0.2 * (result_bytes - self.result_bytes)

    def batch(self, waiting: int, workers: int, item_bytes: float) -> int:
        """The number of items of the next task."""
        if self.seconds is None:
            return 1
        by_time = BATCH_S / max(self.seconds, 1e-6)
        by_size = BATCH_BYTES_MAX / max(item_bytes, self.result_bytes, 1.0)
        # At the end of the work each worker gets its share.
        by_share = -(-waiting // max(workers * TASKS_PER_WORKER, 1))
        return max(1, min(int(by_time), int(by_size), by_share, BATCH_MAX))

    def window(self, workers: int, item_bytes: float) -> int:
        """The number of items, in tasks or done and not taken, that keeps all workers busy."""
        workers = max(workers, 1)
        batch = self.batch(BATCH_MAX * workers * TASKS_PER_WORKER, workers, item_bytes)
        return workers * batch * (TASKS_PER_WORKER + 1)


@dataclass(eq=False)
class Function:
    """A function that workers call.

    Attributes:
        name: for people.
        digest: of its bytes, by which workers keep it.
        data: the pickled function.
        pace: of its items.
        stored: the reference of ``data`` in Ray's object store, once there.
    """

    name: str
    digest: str
    data: bytes
    pace: Pace = field(default_factory=Pace)
    stored: Any = None


@dataclass(eq=False)
class Item:
    """One call of a function.

    Attributes:
        function: what is called.
        data: its pickled arguments.
        timeout_s: time limit of the call.
        retries: further attempts after a failure.
        future: gets the result, or the last failure.
        failures: attempts that have failed.
        losses: attempts that were lost with a node.
        is_alone: its task has no other item, because a task that had several has failed.
        is_given_up: the caller no longer wants the result.
    """

    function: Function
    data: bytes
    timeout_s: float | None = None
    retries: int = 0
    future: Future[Any] = field(default_factory=Future)
    failures: int = 0
    losses: int = 0
    is_alone: bool = False
    is_given_up: bool = False
    _has_begun: bool = False

    def may_begin(self) -> bool:
        """Whether its result is still wanted; from then on its future cannot be cancelled."""
        if not self.is_given_up and not self._has_begun:
            self._has_begun = self.future.set_running_or_notify_cancel()
            self.is_given_up = not self._has_begun
        return not self.is_given_up

    def give_up(self) -> None:
        """Drop the result; who waits for it learns that, unless it has begun."""
        if not (self._has_begun or self.is_given_up) and self.future.cancel():
            self.future.set_running_or_notify_cancel()
        self.is_given_up = True

    def fail(self, error: BaseException) -> None:
        """End without a result."""
        if self.may_begin() and not self.future.done():
            self.future.set_exception(error)

    def take(self, outcome: CallOutcome) -> BaseException | None:
        """End with the outcome's result, or return why it has none."""
        if outcome.kind == RAISED:
            return _raised(outcome)
        if outcome.kind == UNPICKLED:
            return CannotBeSent(
                f"The result of {self.function.name} cannot be sent back: {outcome.text}"
            )
        try:
            self.future.set_result(pickle.loads(outcome.data))
        except Exception as error:  # of a class that this program cannot import
            self.future.set_exception(error)
        return None

    def timed_out(self) -> TimedOut:
        """The failure of a call that took too long."""
        return TimedOut(
            f"{self.function.name} took longer than {self.timeout_s:g} s, and its worker was ended."
        )


class RemoteTraceback(Exception):
    """The traceback of an exception where it was raised."""

    @property
    def traceback_elsewhere(self) -> str:
        """For ``errors.py``, which prints it above a failure that ends the program."""
        return str(self.args[0])

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


def _raised(outcome: CallOutcome) -> BaseException:
    """The exception of the function, with its traceback in the worker as the cause."""
    try:
        error = pickle.loads(outcome.data) if outcome.data else None
    except Exception:  # of a class that this program cannot import, or that wants other arguments
        error = None
    if not isinstance(error, BaseException):
        lines = outcome.text.strip().splitlines()
        error = RuntimeError(lines[-1] if lines else "it raised")
    try:
        error.__cause__ = RemoteTraceback(outcome.text)
    except AttributeError:  # a frozen dataclass
        error = RuntimeError(repr(error))
        error.__cause__ = RemoteTraceback(outcome.text)
    return error


@dataclass(eq=False)
class _RayTask:
    """A Ray task and the items that it has.

    Attributes:
        ref: what the task yields; of Ray Client the reference of its result.
        items: of the task.
        begun_at: when it was first seen to run; of Ray Client when it was sent.
        node_id: where it runs.
    """

    ref: Any
    items: list[Item]
    begun_at: float | None = None
    node_id: str = ""

    @property
    def deadline(self) -> float:
        """When it takes too long, once it has begun."""
        limit_s = self.items[0].timeout_s
        if self.begun_at is None or limit_s is None:
            return math.inf
        if len(self.items) > 1:  # which of them takes too long shows when each runs by itself
            limit_s += 2 * len(self.items) * (self.items[0].function.pace.seconds or 0.0)
        return self.begun_at + limit_s


class TaskQueue:
    """The items that wait for workers of one shape, and those that are in tasks.

    Any thread may call ``function``, ``submit``, ``give_up`` and ``window``; the rest runs in the
    scheduler's thread.
    """

    def __init__(self, scheduler: Scheduler, shape: Shape) -> None:
        self._scheduler = scheduler
        self._ray = scheduler.ray
        self._by_client = self._ray.util.client.ray.is_connected()
        self._shape = shape
        self._lock = threading.Lock()
        self._functions: OrderedDict[str, Function] = OrderedDict()
        self._waiting: deque[Item] = deque()
        self._calls: set[_RayTask] = set()
        self._slots = 1
        self._look_at = 0.0
        self._alive: set[str] = set()
        self._never_since: float | None = None
        #: Since when tasks wait and none has begun.
        self._starved_since: float | None = None
        self._tell_at = 0.0
        self._has_had_workers = False
        try:
            self._task = remote_task(self._ray).options(**shape.options())
        except (ValueError, TypeError) as error:
            raise ConfigError(f"Ray has no such workers: {error}") from error

    def function(self, function: Callable[..., Any]) -> Function:
        """The function as workers get it; equal ones share their pace.

        Raises:
            CannotBeSent: it is not callable, or cannot be pickled; the message names what it holds.
        """
        pickled = pickle_function(function)
        with self._lock:
            known = self._functions.setdefault(pickled.digest, pickled)
            self._functions.move_to_end(pickled.digest)
            while len(self._functions) > FUNCTIONS_MAX:
                self._functions.popitem(last=False)
            return known

    def window(self, function: Function, item_bytes: float) -> int:
        """The number of a function's items that keeps all workers busy."""
        return function.pace.window(self._slots, item_bytes)

    def submit(self, items: Sequence[Item]) -> None:
        """Let items wait for a worker.

        Raises:
            PoolClosed: the pool is closed, or is that of the process which forked this one.
        """
        self._scheduler.post(lambda: self._waiting.extend(items))  # the deque of that moment

    def give_up(self, items: Sequence[Item]) -> None:
        """End items whose results nobody wants any more."""
        with suppress(PoolClosed):
            self._scheduler.post(partial(self._give_up, items))

    @property
    def is_busy(self) -> bool:
        """Whether an item waits or is in a task."""
        return bool(self._waiting or self._calls)

    @property
    def look_s(self) -> float:
        """Seconds until it must be looked at again."""
        has_limits = any(call.items[0].timeout_s is not None for call in self._calls)
        return _LIMIT_LOOK_S if has_limits else _LOOK_S

    def is_starved(self, now: float) -> bool:
        """Whether tasks wait, and none has begun, for long."""
        since = self._starved_since
        return self.is_busy and since is not None and now >= since + _STARVED_S

    def step(self, now: float, is_held_back: bool) -> None:
        """Send what waits, unless tasks of another shape have found no room for long."""
        if now >= self._look_at:
            self._look_at = now + _LOOK_S
            self._give_up([item for item in self._waiting if item.future.cancelled()])
            if self.is_busy:
                with suppress(self._ray.exceptions.RayError, RuntimeError, OSError):
                    self._look(now)  # else the head does not answer
        for call in [one for one in self._calls if one.items[0].timeout_s is not None]:
            if self._has_begun(call) and now >= call.deadline and not self._is_over(call):
                self._cancel(call)
                self._has_failed(call.items, call.items[0].timed_out())
        while self._waiting and not is_held_back:
            seconds, most = self._waiting[0].function.pace.seconds, self._slots
            if seconds is not None and seconds <= _QUEUED_S:
                most *= TASKS_PER_WORKER
            if len(self._calls) >= min(most, self._shape.max_workers or most):
                return
            self._send(self._next_batch())

    def end(self, error: BaseException) -> None:
        """Let all items fail, and end their tasks."""
        items = [item for call in self._calls for item in call.items] + list(self._waiting)
        self._waiting.clear()
        for call in list(self._calls):
            self._cancel(call)
        for item in items:
            item.fail(error)

    def _look(self, now: float) -> None:
        """Look at the nodes: how many workers they can have, and which of them have died."""
        nodes = fit.nodes_of(self._ray.nodes())
        self._slots = self._shape.slots(nodes)
        wait_s = _NEVER_AGAIN_S if self._has_had_workers else _NEVER_S
        if self._slots:
            self._never_since = None
        elif self._never_since is None:
            self._never_since = now
        elif now - self._never_since >= wait_s:
            reason = fit.why_not(self._shape.request, nodes)
            self.end(WorkerDied(f"No node can have a worker: {reason}."))
        died = self._alive - (alive := {node.node_id for node in nodes})
        self._alive = alive
        # Where a host has lost its power, Ray itself notices some minutes later.
        for call in list(self._calls):
            if self._has_begun(call) and call.node_id in died:
                self._cancel(call)
                lost = self._ray.exceptions.NodeDiedError("Its node has died.")
                self._has_no_answer(call, lost, has_begun=True)
        if not self._calls or any(map(self._has_begun, self._calls)):
            self._starved_since = None
        elif self._starved_since is None:
            self._starved_since, self._tell_at = now, now + _FIRST_TELL_S
        elif now >= self._tell_at:
            self._tell_at = now + _TELL_S
            self._scheduler.say(
                self._shape.why_waiting(self._ray.available_resources(), self._slots)
            )

    def _has_begun(self, call: _RayTask) -> bool:
        """Whether a task has begun; by Ray Client nobody knows, and it is assumed."""
        if call.begun_at is None and call.ref.next_ready():
            with suppress(self._ray.exceptions.RayError, StopIteration):
                call.node_id, call.begun_at = self._ray.get(next(call.ref)), time.monotonic()
        return call.begun_at is not None

    def _is_over(self, call: _RayTask) -> bool:
        """Whether a task has ended, or ends itself: this program may have stood still."""
        return self._by_client or bool(self._ray.wait([call.ref.completed()], timeout=0)[0])

    def _watch(self, ref: Any, ended: Callable[[Future[Any]], None]) -> None:
        """Call a function in the scheduler's thread when a reference is ready."""

        def post(done: Future[Any]) -> None:
            with suppress(PoolClosed):
                self._scheduler.post(partial(ended, done))

        ref.future().add_done_callback(post)

    def _next_batch(self) -> list[Item]:
        """The items at the front that can be in one task."""
        first = self._waiting[0]
        pace = first.function.pace
        most = pace.batch(len(self._waiting), self._slots, len(first.data))
        batch, size_bytes = [self._waiting.popleft()], len(first.data)
        for item in list(islice(self._waiting, 0 if first.is_alone else most - 1)):
            size_bytes += len(item.data)
            is_like = item.function is first.function and item.timeout_s == first.timeout_s
            if item.is_alone or not is_like or size_bytes > BATCH_BYTES_MAX:
                break
            batch.append(self._waiting.popleft())
        return [item for item in batch if item.may_begin()]

    def _send(self, items: list[Item]) -> None:
        if not items:
            return
        function = items[0].function
        try:
            if function.stored is None:
                function.stored = self._ray.put(function.data)
            data = [item.data for item in items]
            ref = self._task.remote(function.digest, function.stored, data, items[0].timeout_s)
        except Exception as error:  # such as a full object store: other items are not affected
            self._has_failed(items, error)
            return
        call = _RayTask(ref, items, time.monotonic() if self._by_client else None)
        self._calls.add(call)
        self._watch(ref if self._by_client else ref.completed(), partial(self._ended, call))

    def _ended(self, call: _RayTask, done: Future[Any]) -> None:
        """A task has ended; what it has yielded before is there."""
        if call not in self._calls:
            return  # it was cancelled
        error = done.exception()
        has_begun = self._has_begun(call)
        if error is not None:
            if not self._by_client:
                for ref in call.ref:  # Ray prints errors that nobody takes
                    with suppress(self._ray.exceptions.RayError):
                        self._ray.get(ref)
            self._has_no_answer(call, error, has_begun)
        elif self._by_client:
            self._has_answer(call, done.result())
        else:
            self._watch(next(call.ref), partial(self._has_rows, call))

    def _has_rows(self, call: _RayTask, done: Future[Any]) -> None:
        if call not in self._calls:
            return
        error = done.exception()
        if error is None:
            self._has_answer(call, done.result())
        else:
            self._has_no_answer(call, error, has_begun=True)

    def _has_answer(self, call: _RayTask, rows: list[tuple[Any, ...]]) -> None:
        self._calls.discard(call)
        self._has_had_workers, self._starved_since = True, None
        self._waiting.extendleft(reversed(call.items[len(rows) :]))
        for item, row in zip(call.items, rows, strict=False):
            outcome = CallOutcome(*row)
            item.function.pace.measured(outcome.seconds, len(outcome.data))
            failure = None if item.is_given_up else item.take(outcome)
            if failure is not None:
                self._try_again(item, failure)

    def _has_no_answer(self, call: _RayTask, error: BaseException, has_begun: bool) -> None:
        """The worker of a task has died, or its node, or no worker could be started there."""
        self._calls.discard(call)
        exceptions = self._ray.exceptions
        lost = (exceptions.NodeDiedError, exceptions.ObjectLostError)
        first, name = call.items[0], call.items[0].function.name
        if (isinstance(error, lost) or not has_begun) and first.losses < LOSSES_MAX:
            for item in call.items:
                item.losses += 1
            self._waiting.extendleft(reversed(call.items))
            return
        if self._by_client and time.monotonic() >= call.deadline:
            error = first.timed_out()
        elif isinstance(error, exceptions.RayError):
            subject = f"The worker that ran {name} has died"
            if not has_begun:
                subject = f"No worker could be started for {name}"
            error = WorkerDied(f"{subject}: {_one_line(error)}")
        self._has_failed(call.items, error)

    def _has_failed(self, items: Sequence[Item], error: BaseException) -> None:
        """A task has failed: run each of several items by itself, to find the one that did it."""
        items = [item for item in items if not item.is_given_up]
        if len(items) == 1:
            self._try_again(items[0], error)
            return
        for item in items:
            item.is_alone = True
        self._waiting.extendleft(reversed(items))

    def _try_again(self, item: Item, error: BaseException) -> None:
        item.failures += 1
        if item.failures <= item.retries:
            self._waiting.appendleft(item)
        else:
            item.fail(error)

    def _give_up(self, items: Sequence[Item]) -> None:
        if not items:
            return
        for item in items:
            item.give_up()
        self._waiting = deque(item for item in self._waiting if not item.is_given_up)
        for call in list(self._calls):
            if all(item.is_given_up for item in call.items):
                self._cancel(call)

    def _cancel(self, call: _RayTask) -> None:
        """End a task with its worker."""
        self._calls.discard(call)
        with suppress(Exception):  # the connection may be closed, and the task with it
            self._ray.cancel(call.ref, force=True)


class Scheduler:
    """Sends the items of a pool to Ray, in a thread of its own.

    Args:
        ray: the module, connected.
        say: prints a line for people.
    """

    def __init__(self, ray: Any, say: Callable[[str], None]) -> None:
        self.ray = ray
        self.say = say
        self._events: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._queues: dict[Shape, TaskQueue] = {}
        self._lock = threading.Lock()
        self._closed: BaseException | None = None
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="nemo-run-ray-work", daemon=True)
        self._thread.start()

    def queue(self, shape: Shape) -> TaskQueue:
        """The queue of a shape.

        Raises:
            ConfigError: Ray takes no such tasks.
        """
        with self._lock:
            if shape not in self._queues:
                self._queues[shape] = TaskQueue(self, shape)
            return self._queues[shape]

    def post(self, event: Callable[[], Any]) -> None:
        """Run something in the scheduler's thread.

        Raises:
            PoolClosed: the pool is closed, or is that of the process which forked this one.
        """
        if not self.is_here:
            raise PoolClosed(
                f"This pool belongs to process {self._pid}, which forked this one, and Ray's "
                "connection does not outlive a fork. Start the process by multiprocessing's "
                "'spawn' or 'forkserver', and call work.connect() in it."
            )
        with self._lock:  # what is posted before the close is ended by it
            if self._closed is not None:
                raise PoolClosed(f"The pool takes no more work: {self._closed}")
            self._events.put(event)

    @property
    def is_here(self) -> bool:
        """Whether its thread is in this process, which may be a fork of that one."""
        return os.getpid() == self._pid

    def close(self) -> None:
        """End all tasks; items that have not ended fail."""
        with self._lock:
            if self._closed is None:
                self._closed = WorkerDied("The pool was closed.")
        self._events.put(lambda: None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._closed is None:
                self._turn()
        except BaseException as error:  # a fault of this thread must not leave callers waiting
            with self._lock:
                self._closed = error
            raise
        finally:
            while not self._events.empty():
                with suppress(Exception):  # what it is about fails below
                    self._events.get_nowait()()
            for task_queue in self._queues.values():
                task_queue.end(self._closed or WorkerDied("The pool was closed."))

    def _turn(self) -> None:
        with self._lock:
            queues = list(self._queues.values())
        with suppress(queue.Empty):
            waits_s = [one.look_s for one in queues if one.is_busy]
            self._events.get(timeout=min(waits_s, default=None))()
            for _ in range(self._events.qsize()):
                self._events.get_nowait()()
        now = time.monotonic()
        with self._lock:
            queues = list(self._queues.values())
        starved = [one for one in queues if one.is_starved(now)]
        for task_queue in queues:
            try:
                task_queue.step(now, is_held_back=bool(starved) and task_queue not in starved)
            except Exception as error:  # other shapes are not affected
                task_queue.end(error)


def pickle_function(function: Any) -> Function:
    """The function as bytes; see ``TaskQueue.function``."""
    name = getattr(function, "__qualname__", None) or type(function).__name__
    if not callable(function):
        raise CannotBeSent(f"{function!r} is not callable; expected is a function of one item.")
    data = _dumps(function, f"the function {name}", [function])
    return Function(name, hashlib.sha256(data).hexdigest(), data)


def pickle_item(arguments: Sequence[Any], named: Mapping[str, Any], what: str) -> bytes:
    """The arguments of one call as bytes.

    Args:
        arguments: those without a name.
        named: those with a name.
        what: is sent, for the message.

    Raises:
        CannotBeSent: one of them cannot be pickled.
    """
    return _dumps((tuple(arguments), dict(named)), what, [*arguments, *named.values()])


def _dumps(value: Any, what: str, parts: Sequence[Any]) -> bytes:
    """A value as bytes; ``parts`` are searched for what cannot be pickled."""
    from ray import cloudpickle

    try:
        return bytes(cloudpickle.dumps(value, protocol=5))
    except Exception as error:  # any that an object's own __reduce__ raises
        culprit = next(filter(None, map(_culprit, parts)), "")
        text = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise CannotBeSent(
            f"{what[:1].upper()}{what[1:]} cannot be sent to a worker: {culprit}{text}. "
            "Send what it is made from, and make it in the function."
        ) from error


def _culprit(value: Any) -> str:
    """The object inside that cannot be pickled, by Ray's own search."""
    from ray.util import inspect_serializability

    try:
        _, failures = inspect_serializability(value, name="it", print_file=io.StringIO())
    except Exception:  # the search calls the object's own code, which has failed before
        return ""
    named = []
    for failure in failures:
        path = [str(part) for part in getattr(failure, "path", ()) if part is not None]
        text = ".".join(path or [str(getattr(failure, "name", "it"))])
        named.append(f"{text} is of type {type(failure.obj).__name__}; ")
    return min(named, default="")


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:500] or type(error).__name__
