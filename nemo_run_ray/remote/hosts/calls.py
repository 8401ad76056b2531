"""The driver's calls of its actors: orders to replicas, pulls of their reports, and the answers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

from ..node.output import write
from ..status import cause_of
from .actors import Actor, ReplicaHandle, actor_of, name

#: Seconds to wait for an answer.
_WAIT_S = 0.2
#: Seconds for which an actor keeps the question for reports open.
_PULL_S = 2.0
#: Seconds until a call is made again whose actor could not be reached.
_AGAIN_S = 1.0
#: Seconds without an answer until an actor is asked for its reports again. Where an answer was lost
#: with its connection, Ray's client misses it 300 s later, with its own keepalive, or when it has
#: something to send: then all calls on that connection are known to be lost at once.
_UNANSWERED_S = 15.0
#: Seconds for the replicas' processes to remove their folders.
_CLOSE_S = 10.0


@dataclass(frozen=True)
class _Call:
    """A call of an actor whose answer is awaited: an order to a replica, or a pull for all."""

    actor: Actor
    replica: Optional[ReplicaHandle] = None
    order: Optional[Mapping[str, Any]] = None
    number: int = 0


class Pulled(NamedTuple):
    """An actor's answer to a pull.

    Attributes:
        actor: the actor.
        node_id: of the node that it is on.
        reports: by replica the number of the first report, and the reports.
    """

    actor: Actor
    node_id: str
    reports: Mapping[str, Tuple[int, List[str]]]


class Died(NamedTuple):
    """An actor that cannot answer any more.

    Attributes:
        actor: the actor.
        words: why.
        is_env: whether it never came up, since its runtime environment could not be built.
        is_start: whether it never came up, since it failed at its start.
    """

    actor: Actor
    words: str
    is_env: bool = False
    is_start: bool = False


Answer = Union[Pulled, Died]


class Calls:
    """The calls whose answers are awaited, and those that must be made again.

    A call is repeated while its actor cannot be reached; orders are numbered, and reports counted,
    so that nothing is lost or done twice.

    Args:
        ray: the module, connected.
        gather_s: seconds for which an actor waits for more reports once it has one. Many small
            ones cost more to send than to make.
    """

    def __init__(self, ray: Any, gather_s: float = 0.0) -> None:
        self._ray = ray
        self._gather_s = gather_s
        self._awaited: Dict[Any, _Call] = {}
        self._asked_at: Dict[Any, float] = {}  # of the pulls among them
        self._again: List[Tuple[float, _Call]] = []

    def order(self, replica: ReplicaHandle, order: Mapping[str, Any]) -> None:
        """Give a replica an order; nothing is answered to it."""
        self._make(_Call(actor_of(replica), replica, order, replica.orders))
        replica.orders += 1

    def pull(self, actor: Actor) -> None:
        """Ask an actor for its replicas' reports that are not here yet."""
        self._make(_Call(actor))

    def repeat(self) -> None:
        """Make those calls again that are due."""
        now = time.monotonic()
        for reference, asked_at in list(self._asked_at.items()):
            call = self._awaited[reference]
            if now >= asked_at + _UNANSWERED_S and call.actor.answers:
                self._forget(reference)
                self._make(call)
        again, self._again = self._again, []
        for due_at, call in again:
            if now >= due_at:
                self._make(call)
            else:
                self._again.append((due_at, call))

    def answers(self) -> Iterator[Answer]:
        """Wait a moment for the next answer, and go through all that are there."""
        if not self._awaited:
            time.sleep(_WAIT_S)
            return
        ready, _ = self._ray.wait(list(self._awaited), num_returns=1, timeout=_WAIT_S)
        if ready:
            count = len(self._awaited)
            ready, _ = self._ray.wait(list(self._awaited), num_returns=count, timeout=0)
        for reference in ready:
            answer = self._answer(self._forget(reference), reference)
            if answer is not None:
                yield answer

    def close(self, actors: Sequence[Actor]) -> bool:
        """Let living actors end their replicas; true if all have confirmed that nothing runs."""
        ends = [actor.handle.close.remote() for actor in actors]
        ready: List[Any] = []
        if ends:
            ready, _ = self._ray.wait(ends, num_returns=len(ends), timeout=_CLOSE_S)
        confirmed = [self._has_ended(reference) for reference in ready]
        return len(confirmed) == len(ends) and all(confirmed)

    def _make(self, call: _Call) -> None:
        if call.replica is None or call.order is None:
            seen = {name(replica.replica_id): replica.seen for replica in call.actor.replicas}
            reference = call.actor.handle.pull.remote(seen, _PULL_S, self._gather_s)
            self._asked_at[reference] = time.monotonic()
        else:
            key = name(call.replica.replica_id)
            reference = call.actor.handle.order.remote(key, call.number, dict(call.order))
        self._awaited[reference] = call

    def _forget(self, reference: Any) -> _Call:
        """Await a call's answer no more."""
        self._asked_at.pop(reference, None)
        return self._awaited.pop(reference)

    def _answer(self, call: _Call, reference: Any) -> Optional[Answer]:
        try:
            answer = self._ray.get(reference)
        except self._ray.exceptions.ActorUnavailableError:
            self._again.append((time.monotonic() + _AGAIN_S, call))  # its node may come back
            return None
        except self._ray.exceptions.RayError as error:
            call.actor.dead = True
            is_env = isinstance(error, self._ray.exceptions.RuntimeEnvSetupError)
            is_start = bool(getattr(error, "actor_init_failed", False))
            return Died(call.actor, self._why_dead(error), is_env, is_start)
        call.actor.answers = True
        return Pulled(call.actor, *answer) if call.replica is None else None

    def _why_dead(self, error: Exception) -> str:
        if isinstance(error, self._ray.exceptions.RuntimeEnvSetupError):
            write(f"{error}\n")  # the whole error, for readers of the log
            return f"the runtime environment could not be built: {cause_of(str(error))}"
        if getattr(error, "actor_init_failed", False):  # of a traceback the last line is the error
            return f"Ray's worker there failed at its start: {_lines(error)[-1]}"
        return f"Ray's worker there died: {_lines(error)[0]}"

    def _has_ended(self, reference: Any) -> bool:
        try:
            return bool(self._ray.get(reference))
        except self._ray.exceptions.RayError:
            return False


def _lines(error: BaseException) -> List[str]:
    lines = [line.strip()[:300] for line in str(error).splitlines() if line.strip()]
    return lines or [type(error).__name__]
