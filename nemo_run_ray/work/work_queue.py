"""The items that wait for workers of one shape, and what becomes of each of them.

All of it runs in the engine's thread. An item is with one worker at a time, as far as Ray can tell,
and leaves this module as a result or as a failure: it is never lost. ``ray`` is passed in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from time import monotonic
from typing import Any

from nemo_run_ray.errors import TimedOut, WorkerDied
from nemo_run_ray.work.batching import Pace, alike
from nemo_run_ray.work.crew import Call, Crew, WorkerHandle
from nemo_run_ray.work.functions import Functions
from nemo_run_ray.work.items import Item, fail_all, failure_of, words_of
from nemo_run_ray.work.pickling import Function
from nemo_run_ray.work.shape import Shape
from nemo_run_ray.work.worker import CallOutcome

#: Seconds between two looks for items that were cancelled while they waited.
_SWEEP_S = 1.0
#: Seconds beyond the time of its items in which a worker may import what their function needs.
_LOAD_S = 300.0
#: Seconds without an item after which a worker may have died of something else than the next one.
_IDLE_S = 0.5
#: Seconds in which that is known of a worker that was dead before it was sent an item.
_FOUND_DEAD_S = 5.0
#: How often an item is tried again because its node has died, whatever its retries are.
NODE_DEATHS_MAX = 3


class WorkQueue:
    """Workers that reserve the same, and the items that wait for them.

    Args:
        ray: the module, connected.
        shape: what each worker reserves.
        notify: takes a function that the engine's thread shall call.
        say: prints a line for people.
    """

    def __init__(
        self,
        ray: Any,
        shape: Shape,
        notify: Callable[[Callable[[], None]], None],
        say: Callable[[str], None],
    ) -> None:
        self._ray = ray
        self._notify = notify
        self._crew = Crew(ray, shape, notify, say)
        self._waiting: deque[Item] = deque()
        self._functions = Functions(ray)
        self._sweep_at = float("-inf")

    @property
    def slots(self) -> int:
        """How many workers the cluster can have."""
        return self._crew.slots

    @property
    def is_busy(self) -> bool:
        """Whether something waits or runs."""
        return bool(self._waiting) or self._crew.is_busy

    @property
    def has_workers(self) -> bool:
        return bool(self._crew.workers)

    def pace(self, function: Function) -> Pace:
        """What items of a function have cost."""
        return self._functions.pace(function)

    def add(self, items: Iterable[Item]) -> None:
        """Let items wait for a worker."""
        for item in items:
            item.function = self._functions.same(item.function)
            self._waiting.append(item)

    def shift(self, seconds: float) -> None:
        """Do not count some seconds, in which answers could not be taken."""
        for worker in self._crew.workers:
            if worker.calls:
                worker.since += seconds

    @property
    def is_starved(self) -> bool:
        """Whether something waits and there is no worker for it."""
        return bool(self._waiting) and not self._crew.ready

    def step(self, now: float, starved_s: float) -> None:
        """Start what is missing, give workers what waits, end what takes too long.

        Args:
            now: the time; all answers that had come by then have been taken.
            starved_s: for which workers of another shape have waited for the room of these.
        """
        if broken := self._crew.step(now, len(self._waiting), starved_s):
            fail_all(self._waiting, WorkerDied(broken))
            self._waiting.clear()
        if now >= self._sweep_at:  # who waits for what was cancelled is told, also without a worker
            self._sweep_at = now + _SWEEP_S
            self.give_up([item for item in self._waiting if item.future.cancelled()])
        for worker, why in self._crew.settle(now):
            self._end(worker, why)
        self._feed()
        for worker in [busy for busy in self._crew.workers if busy.calls and not busy.doubt]:
            if now >= _deadline(worker, self.pace(worker.calls[0].items[0].function)):
                self._end(worker, "")

    def give_up(self, items: Sequence[Item]) -> None:
        """End items whose results nobody wants any more."""
        for item in items:
            item.give_up()
        if not items:
            return
        self._waiting = deque(item for item in self._waiting if not item.is_given_up)
        for worker in [busy for busy in self._crew.workers if busy.calls]:
            if all(item.is_given_up for item in worker.calls[0].items):
                self._end(worker, "")

    def fail_all(self, error: BaseException) -> None:
        """Let everything fail that has not ended."""
        for call in [call for worker in self._crew.workers for call in worker.calls]:
            fail_all(call.items, error)
        fail_all(self._waiting, error)
        self._waiting.clear()

    def end_workers(self) -> None:
        """End all workers."""
        for worker in list(self._crew.workers):
            self._crew.end(worker)

    def _feed(self) -> None:
        while self._waiting:
            items = self._next_batch()
            held = 1 if items[0].is_alone else self.pace(items[0].function).held(len(items))
            if (worker := self._crew.free(held)) is None:
                return
            for _ in items:
                self._waiting.popleft()
            if wanted := [item for item in items if item.may_begin()]:
                self._call(worker, wanted)

    def _next_batch(self) -> list[Item]:
        """The items at the front that the next call shall have."""
        first = self._waiting[0]
        pace = self.pace(first.function)
        most = pace.batch(len(self._waiting), self._crew.ready, len(first.data))
        return alike(self._waiting, most)

    def _call(self, worker: WorkerHandle, items: list[Item]) -> None:
        function, call = items[0].function, Call(worker, items)
        worker.begin(call, monotonic())
        try:
            stored, data = self._functions.stored(function), [item.data for item in items]
            worker.load(function.digest, stored, self._notify)
            answer = worker.handle.run.remote(function.digest, stored, data).future()
        except Exception as error:  # such as a full object store: other items go on
            worker.calls.remove(call)
            self._apart(items, error)
            return
        answer.add_done_callback(lambda done: self._notify(partial(self._answered, call, done)))

    def _answered(self, call: Call, answer: Future[Any]) -> None:
        worker = call.worker
        if worker not in self._crew.workers:
            return  # it was ended meanwhile: its items are with others
        if (error := answer.exception()) is not None:
            self._has_no_answer(call, error)
            return
        worker.done(call, monotonic())
        pace = self.pace(call.items[0].function)
        rows = answer.result()
        self._waiting.extendleft(reversed(call.items[len(rows) :]))
        for item, row in zip(call.items, rows, strict=False):
            outcome = CallOutcome(*row)
            pace.measured(outcome.seconds, len(outcome.data))
            failure = failure_of(item, outcome)
            if item.is_given_up:
                continue
            if failure is None:
                item.succeed(outcome)
            else:
                _try_again(item, failure, self._waiting)
        if worker.calls and all(item.is_given_up for item in worker.calls[0].items):
            self._end(worker, "")
        elif worker.calls and worker.broken:
            self._has_no_answer(worker.calls[0], worker.broken)

    def _has_no_answer(self, call: Call, error: BaseException) -> None:
        """The worker of a call is dead, or cannot be reached and may still run."""
        worker = call.worker
        if worker.doubt:
            return  # what has become of it is being found out
        if call is not worker.calls[0]:
            worker.broken = error  # the answer of the call before is on its way
        elif isinstance(error, self._ray.exceptions.ActorUnavailableError):
            self._crew.doubt(worker, words_of(error), monotonic())
        else:
            self._end(worker, words_of(error))

    def _apart(self, items: Sequence[Item], error: BaseException) -> None:
        """A call has failed: send each of several items by itself, to find the guilty one."""
        wanted = [item for item in items if not item.is_given_up]
        if len(items) > 1:
            for item in wanted:
                item.is_alone = True
            self._waiting.extendleft(reversed(wanted))
        elif wanted:
            _try_again(wanted[0], error, self._waiting)

    def _end(self, worker: WorkerHandle, why: str) -> None:
        """End a worker, if it still lives: the item that it was at has failed, the others wait.

        Args:
            worker: that is dead, or takes too long.
            why: it has died, in Ray's words; empty when it takes too long, or is not wanted.
        """
        self._crew.end(worker)
        first, *others = worker.calls
        back = [item for call in others for item in call.items if not item.is_given_up]
        self._waiting.extendleft(reversed(back))
        item, is_one = first.items[0], len(first.items) == 1 and not first.items[0].is_given_up
        if is_one and _is_innocent(item, worker, why, self._crew):
            self._waiting.appendleft(item)
        else:
            self._apart(first.items, _why_lost(item, why))


def _deadline(worker: WorkerHandle, pace: Pace) -> float:
    """When what a worker does now takes too long."""
    items = worker.calls[0].items
    limit_s = items[0].timeout_s
    if limit_s is None:
        return float("inf")
    if len(items) > 1:  # which of them takes too long is found out one by one
        limit_s += (pace.seconds or 0.0) * len(items) * 2
    if not worker.functions.get(worker.calls[0].digest):
        limit_s += _LOAD_S
    return worker.since + limit_s


def _is_innocent(item: Item, worker: WorkerHandle, why: str, crew: Crew) -> bool:
    """Whether something else than an item may have ended its worker; noted, for it has an end."""
    if why and crew.was_cut_off(worker, why) and item.node_deaths < NODE_DEATHS_MAX:
        item.node_deaths += 1
        return True
    has_died_soon = bool(why) and monotonic() < worker.since + _FOUND_DEAD_S
    was_dead = has_died_soon and worker.idle_s >= _IDLE_S and not item.has_met_dead
    item.has_met_dead |= was_dead
    return was_dead


def _why_lost(item: Item, why: str) -> BaseException:
    """The failure of an item whose worker has died, or was ended where nothing says why."""
    name = item.function.name
    if why:
        return WorkerDied(f"The worker that ran {name} has died: {why}")
    return TimedOut(f"{name} took longer than {item.timeout_s or 0:g} s, and its worker was ended.")


def _try_again(item: Item, error: BaseException, waiting: deque[Item]) -> None:
    """Let an item that has failed wait again, or fail for good."""
    item.attempts += 1
    if item.attempts <= item.retries:
        waiting.appendleft(item)
    else:
        item.future.set_exception(error)
