"""The workers of one shape: started while items wait, ended when they are idle for long."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any

from nemo_run_ray.work.doubt import Doubt
from nemo_run_ray.work.items import Item, words_of
from nemo_run_ray.work.shape import Shape
from nemo_run_ray.work.worker import FUNCTIONS_MAX, worker_class

#: Workers in a row that die before they begin, after which the items fail.
_FALSE_STARTS_MAX = 12
#: Seconds for which none is started then where others live.
_AGAIN_S = 30.0
#: In Ray's words of an actor that has died with its node (2.60).
_NODE_DIED = "its node has died"
#: Seconds between two looks at the cluster's size while items wait.
_LOOK_S = 1.0
#: Seconds until an idle worker gives its CPUs back.
IDLE_S = 20.0
#: Seconds for which others must have waited for room until idle workers give theirs, and busy ones.
_YIELD_S, _LEAVE_S = 0.5, 10.0
#: Seconds of a call until its worker is sent something, and again after twice as long each time.
#: Where an answer was lost with its connection, Ray's client learns that when it sends, or else by
#: its own keepalive, after 300 s: so it is not worth while for longer.
_PROBE_S, _PROBE_MAX_S = 15.0, 300.0
#: Seconds for which no node must be large enough: one may be joining, and where there have been
#: workers their node may come back.
_NEVER_S, _BACK_S = 5.0, 120.0
#: Seconds until the first line about workers that wait for room, and between two.
_FIRST_TELL_S, _TELL_S = 5.0, 30.0


@dataclass(eq=False)
class Call:
    """A batch of items that a worker has."""

    worker: WorkerHandle
    items: list[Item]

    @property
    def digest(self) -> str:
        """Of their function."""
        return self.items[0].function.digest


@dataclass(eq=False)
class WorkerHandle:
    """An actor and its calls in their order: the first one is what it does now.

    Attributes:
        handle: Ray's, of the actor.
        since: when the first call began, or when it became idle.
        node_id: empty until the worker has begun.
        calls: that have not been answered.
        functions: whether each function that it was sent is loaded, by digest.
        broken: the error of a later call, while the answer of an earlier one is on its way.
        doubt: what is found out about it while it cannot be reached; it gets no call meanwhile.
        is_leaving: it gets no further call, since workers of another shape wait for its room.
        probe_s: age of the first call at which the connection is tried.
        idle_s: for how long it had nothing to do before the first call.
    """

    handle: Any
    since: float
    node_id: str = ""
    calls: list[Call] = field(default_factory=list)
    functions: dict[str, bool] = field(default_factory=dict)
    broken: BaseException | None = None
    doubt: Doubt | None = None
    is_leaving: bool = False
    probe_s: float = _PROBE_S
    idle_s: float = 0.0

    def may_hold(self, calls: int) -> bool:
        """Whether it can take another call, of so many; none waits behind an item that is alone."""
        is_alone = bool(self.calls) and self.calls[-1].items[0].is_alone
        return len(self.calls) < calls and not is_alone

    def begin(self, call: Call, now: float) -> None:
        """Take another call."""
        if not self.calls:
            self.idle_s = now - self.since
            self.since, self.probe_s = now, _PROBE_S
        self.calls.append(call)

    def load(self, digest: str, stored: Any, notify: Callable[[Callable[[], None]], None]) -> None:
        """Let it load a function, if it has not got it; a call's time begins when that is done.

        Args:
            digest: of the function.
            stored: the function in Ray's object store.
            notify: takes a function that the engine's thread shall call.
        """
        if digest in self.functions:
            return
        for old in list(self.functions)[: -FUNCTIONS_MAX + 1]:  # the worker has dropped them, too
            del self.functions[old]
        answer = self.handle.load.remote(digest, stored).future()
        self.functions[digest] = False
        answer.add_done_callback(lambda _: notify(partial(self._has_loaded, digest)))

    def _has_loaded(self, digest: str) -> None:
        self.functions[digest] = True
        if self.calls and self.calls[0].digest == digest:
            self.since = monotonic()

    def done(self, call: Call, now: float) -> None:
        """Be done with a call; the next one begins."""
        self.calls.remove(call)
        self.since, self.probe_s, self.idle_s = now, _PROBE_S, 0.0

    def probe(self, now: float) -> None:
        """Try the connection now and then, while a call has no answer."""
        if self.calls and self.probe_s < _PROBE_MAX_S and now >= self.since + self.probe_s:
            self.probe_s *= 2
            # The call's own answer says what has become of it; Ray prints errors that nobody takes.
            self.handle.begin.remote().future().add_done_callback(lambda done: done.exception())


class Crew:
    """The workers that there are.

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
        self._shape = shape
        self._notify = notify
        self._say = say
        self._class = ray.remote(worker_class())
        self._look_at = self._doubt_at = self._leave_at = self._start_at = float("-inf")
        self._false_starts = 0
        self._broken = self._why_never = ""
        self._has_had_workers = False
        self._known_nodes: list[dict[str, Any]] = []
        self._never_since: float | None = None
        self._tell_at: float | None = None
        self.workers: list[WorkerHandle] = []
        #: How many workers the cluster can have.
        self.slots = 1

    @property
    def is_busy(self) -> bool:
        return any(worker.calls for worker in self.workers)

    @property
    def ready(self) -> int:
        """How many workers have begun."""
        return sum(1 for worker in self.workers if worker.node_id and not worker.doubt)

    def free(self, held: int) -> WorkerHandle | None:
        """The worker that should get the next call; ``None`` when all have ``held`` of them."""
        found = [
            worker
            for worker in self.workers
            if worker.node_id and not worker.doubt and not worker.is_leaving
            if worker.may_hold(held)
        ]
        return min(found, key=lambda one: len(one.calls), default=None)

    def step(self, now: float, waiting: int, starved_s: float) -> str:
        """Start workers for what waits, and end idle ones.

        Args:
            now: the time.
            waiting: items that no worker has.
            starved_s: for which workers of another shape have waited for the room of these: idle
                ones give it back, and later half of the others when their calls have ended.

        Returns:
            Why those items can have no worker; empty while they may.
        """
        if starved_s >= _LEAVE_S:
            if now >= self._leave_at:  # the others need time to come up
                self._leave_at = now + _LEAVE_S
                for worker in self.workers[len(self.workers) // 2 :]:
                    worker.is_leaving = True
        elif waiting and now >= self._look_at:
            self._look_at = now + _LOOK_S
            self._grow(now, waiting)
        with suppress(self._ray.exceptions.RayError, RuntimeError, OSError):  # its head is away
            for worker in [one for one in self.workers if not one.doubt]:
                worker.probe(now)
        idle_s = 0.0 if starved_s >= _YIELD_S else IDLE_S
        for worker in [one for one in self.workers if not one.calls]:
            if worker.is_leaving or (not waiting and now - worker.since >= idle_s):
                self.end(worker)
        broken, self._broken = self._broken or (self._why_never if waiting else ""), ""
        return broken

    def end(self, worker: WorkerHandle) -> None:
        """End a worker at once; another one takes its place when it is needed."""
        self.workers.remove(worker)
        self._look_at = float("-inf")
        # Ray would connect again where the program, or its end, has closed the connection.
        if self._ray.is_initialized():
            with suppress(self._ray.exceptions.RayError, RuntimeError, OSError):
                self._ray.kill(worker.handle)  # else it is gone with its cluster

    def doubt(self, worker: WorkerHandle, why: str, now: float) -> None:
        """Find out what has become of a worker that cannot be reached.

        Args:
            worker: that has calls.
            why: it cannot be reached, in Ray's words.
            now: the time.
        """
        worker.doubt = Doubt(self._ray, worker.handle, why, self._notify, now)

    def settle(self, now: float) -> list[tuple[WorkerHandle, str]]:
        """Go on with all doubts: the workers of which there is none any more, and Ray's words."""
        in_doubt = [(worker, worker.doubt) for worker in self.workers if worker.doubt]
        if in_doubt and now >= self._doubt_at:
            self._doubt_at = now + _LOOK_S
            alive = self._alive()
            for worker, doubt in in_doubt:
                doubt.step(now, worker.node_id in alive)
        return [(worker, doubt.why) for worker, doubt in in_doubt if doubt.is_over]

    def was_cut_off(self, worker: WorkerHandle, why: str) -> bool:
        """Whether something else than its item has ended a worker: its node, or the network."""
        if worker.doubt and worker.doubt.is_lost:
            return True
        return _NODE_DIED in why or worker.node_id not in self._alive()

    def _alive(self) -> set[str]:
        return {row["NodeID"] for row in self._nodes() if row["Alive"]}

    def _nodes(self) -> list[dict[str, Any]]:
        """Ray's nodes; those of the last look while its head does not answer."""
        with suppress(self._ray.exceptions.RayError, RuntimeError, OSError):
            self._known_nodes = self._ray.nodes()
        return self._known_nodes

    def _grow(self, now: float, waiting: int) -> None:
        if now < self._start_at and self.ready:
            return
        nodes = self._nodes()
        self.slots = self._shape.slots(nodes)
        if self.slots == 0:
            self._never_since = now if self._never_since is None else self._never_since
            wait_s = _BACK_S if self._has_had_workers else _NEVER_S
            if now - self._never_since >= wait_s:
                self._why_never = self._shape.why_never(nodes)
            return
        self._never_since, self._why_never = None, ""
        busy = sum(1 for worker in self.workers if worker.calls)
        for _ in range(min(self.slots, busy + waiting) - len(self.workers)):
            self._start(now)
        self._tell(now)

    def _start(self, now: float) -> None:
        worker = WorkerHandle(self._class.options(**self._shape.options()).remote(), since=now)
        self.workers.append(worker)
        answer = worker.handle.begin.remote().future()
        answer.add_done_callback(lambda done: self._notify(partial(self._begun, worker, done)))

    def _begun(self, worker: WorkerHandle, answer: Future[Any]) -> None:
        if worker not in self.workers:
            return
        error = answer.exception()
        if error is None:
            worker.node_id, worker.since = answer.result(), monotonic()
            self._false_starts, self._tell_at, self._has_had_workers = 0, None, True
            return
        self.workers.remove(worker)
        is_away = isinstance(error, self._ray.exceptions.ActorUnavailableError)
        if is_away or _NODE_DIED in words_of(error):
            return  # a node with many of them would be enough for the most
        self._false_starts += 1
        is_env = isinstance(error, self._ray.exceptions.RuntimeEnvSetupError)
        if not (is_env or self._false_starts >= _FALSE_STARTS_MAX):
            return
        self._false_starts = 0
        if self.ready:  # on other nodes they can: the items wait for those
            if monotonic() >= self._start_at:  # those that were started together say it once
                self._say(f"A worker could not be started, and others go on: {words_of(error)}")
            self._start_at = monotonic() + _AGAIN_S
        else:
            self._broken = f"No worker could be started: {words_of(error)}"

    def _tell(self, now: float) -> None:
        """Say what is waited for while there is no worker at all."""
        if self.ready:
            return
        if self._tell_at is None:
            self._tell_at = now + _FIRST_TELL_S
        elif now >= self._tell_at:
            self._tell_at = now + _TELL_S
            with suppress(self._ray.exceptions.RayError, RuntimeError, OSError):  # its head is away
                self._say(self._shape.why_waiting(self._ray.available_resources(), self.slots))
