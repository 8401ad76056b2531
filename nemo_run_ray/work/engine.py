"""The thread in which all workers of a pool are looked after."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from nemo_run_ray.errors import ConfigError, PoolClosed, WorkerDied
from nemo_run_ray.work.batching import Pace
from nemo_run_ray.work.items import Item, fail_all
from nemo_run_ray.work.pickling import Function
from nemo_run_ray.work.shape import Shape
from nemo_run_ray.work.work_queue import WorkQueue
from nemo_run_ray.work.worker import worker_class

#: Seconds between two looks at what takes too long, and while only idle workers are there.
_TURN_S, _IDLE_TURN_S = 0.1, 1.0
#: Seconds that a turn must be late until they count as no time of the workers' calls.
_STOOD_STILL_S = 1.0
#: Seconds between two looks at what the cluster has free.
_ROOM_S = 1.0


class Engine:
    """Gives items to workers in a thread of its own; every method may be called from any thread.

    Args:
        ray: the module, connected.
        say: prints a line for people.
    """

    def __init__(self, ray: Any, say: Callable[[str], None]) -> None:
        self._ray = ray
        self._say = say
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._queues: dict[Shape, WorkQueue] = {}
        self._lock = threading.Lock()
        self._closed: BaseException | None = None
        self._pid = os.getpid()
        self._checked: set[Shape] = set()
        self._starved_at: dict[Shape, float] = {}
        self._room: dict[str, float] = {}
        self._room_at = float("-inf")
        self._expected_at = math.inf  # when the next turn begins at the latest
        self._thread = threading.Thread(target=self._run, name="nemo-run-ray-work", daemon=True)
        self._thread.start()

    def check(self, shape: Shape) -> None:
        """Check that Ray takes workers of a shape.

        Raises:
            ConfigError: it does not.
        """
        if shape in self._checked:
            return
        try:
            self._ray.remote(worker_class()).options(**shape.options())
        except (ValueError, TypeError) as error:
            raise ConfigError(f"Ray has no such workers: {error}") from error
        self._checked.add(shape)

    def submit(self, shape: Shape, items: list[Item]) -> None:
        """Let items wait for workers of a shape.

        Raises:
            PoolClosed: the engine has been closed, or is that of the process which forked this.
        """
        if not self.is_here:
            raise PoolClosed(
                f"This pool belongs to process {self._pid}, which forked this one, and Ray's "
                "connection does not outlive a fork. Start the process by multiprocessing's "
                "'spawn' or 'forkserver', and call work.connect() in it."
            )
        with self._lock:  # what is put before the close is ended by it
            if self._closed is not None:
                raise PoolClosed(f"The pool takes no more work: {self._closed}")
            self._events.put(lambda: self._add(shape, items))

    def give_up(self, items: Iterable[Item]) -> None:
        """End items whose results nobody wants any more."""
        given_up = list(items)
        self._events.put(partial(self._give_up, given_up))

    def pace(self, shape: Shape, function: Function) -> Pace:
        """What items of a function have cost on workers of a shape."""
        work_queue = self._queues.get(shape)
        return Pace() if work_queue is None else work_queue.pace(function)

    def window(self, shape: Shape, function: Function, item_bytes: float) -> int:
        """How many items of a function keep all workers of a shape busy."""
        work_queue = self._queues.get(shape)
        slots = 1 if work_queue is None else work_queue.slots
        return self.pace(shape, function).window(slots, item_bytes)

    @property
    def is_here(self) -> bool:
        """Whether its thread is in this process, which may be a fork of that one."""
        return os.getpid() == self._pid

    def close(self) -> None:
        """End all workers; items that have not ended fail."""
        with self._lock:
            if self._closed is None:
                self._closed = WorkerDied("The pool was closed.")
        self._events.put(lambda: None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _queue(self, shape: Shape) -> WorkQueue:
        if shape not in self._queues:
            self._queues[shape] = WorkQueue(self._ray, shape, self._events.put, self._say)
        return self._queues[shape]

    def _give_up(self, items: list[Item]) -> None:
        for work_queue in self._queues.values():
            work_queue.give_up(items)

    def _run(self) -> None:
        try:
            while self._closed is None:
                self._turn()
        except BaseException as error:  # a fault of this thread must not leave callers waiting
            with self._lock:
                self._closed = error
            raise
        finally:
            self._end()

    def _add(self, shape: Shape, items: list[Item]) -> None:
        try:
            self._queue(shape).add(items)
        except Exception as error:
            fail_all(items, error)

    def _turn(self) -> None:
        first = self._next_event()
        now = time.monotonic()  # before all that has come until now is taken, which may last
        if now >= self._expected_at + _STOOD_STILL_S:  # the program was stopped, or had no turn
            for work_queue in self._queues.values():
                work_queue.shift(now - self._expected_at)
        first()
        for _ in range(self._events.qsize()):
            self._events.get_nowait()()
        starved = self._starved(now)
        for shape, work_queue in self._queues.items():
            waited_s = max((starved.get(name, 0.0) for name, _ in shape.resources), default=0.0)
            try:
                work_queue.step(now, 0.0 if work_queue.is_starved else waited_s)
            except Exception as error:  # other shapes go on
                work_queue.fail_all(error)
                work_queue.end_workers()

    def _next_event(self) -> Callable[[], None]:
        """What is to be done next; nothing when there is none for a moment."""
        busy = any(work_queue.is_busy for work_queue in self._queues.values())
        there = any(work_queue.has_workers for work_queue in self._queues.values())
        wait_s = _TURN_S if busy else _IDLE_TURN_S if there else None
        self._expected_at = math.inf if wait_s is None else time.monotonic() + wait_s
        with contextlib.suppress(queue.Empty):
            return self._events.get(timeout=wait_s)
        return lambda: None

    def _starved(self, now: float) -> dict[str, float]:
        """For how many seconds items without a worker have waited, by the resource they need."""
        for shape, work_queue in self._queues.items():
            if work_queue.is_starved:
                self._starved_at.setdefault(shape, now)
            else:
                self._starved_at.pop(shape, None)
        if not self._starved_at or len(self._queues) < 2:
            return {}
        if now >= self._room_at:
            self._room_at = now + _ROOM_S
            with contextlib.suppress(self._ray.exceptions.RayError, RuntimeError, OSError):
                self._room = self._ray.available_resources()
        found: dict[str, float] = {}
        for shape, since in self._starved_at.items():
            asked = dict(shape.resources)
            lacking = [name for name in asked if self._room.get(name, 0.0) < asked[name]]
            for name in lacking or asked:  # where all of it is free, no node has it at once
                found[name] = max(found.get(name, 0.0), now - since)
        return found

    def _end(self) -> None:
        error = self._closed or WorkerDied("The pool was closed.")
        for event in self._left():
            try:
                event()  # items that were submitted before the close
            except Exception:
                continue  # what it was about fails below, like all that has not ended
        for work_queue in self._queues.values():
            work_queue.fail_all(error)
        for work_queue in self._queues.values():
            work_queue.end_workers()

    def _left(self) -> list[Callable[[], None]]:
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._events.get_nowait())
        return found
