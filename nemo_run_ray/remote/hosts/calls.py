"""The driver's calls of its actors: orders to replicas, pulls of their reports, and the answers."""

from __future__ import annotations

import time
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


class _Call(NamedTuple):
    """A call of an actor: an order to a replica, or a pull for all of them."""

    actor: Actor
    replica: Optional[ReplicaHandle] = None
    order: Mapping[str, Any] = {}
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
        self._awaited: Dict[Any, Tuple[float, _Call]] = {}  # since when
        self._again: List[Tuple[float, _Call]] = []  # not before

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
        for reference, (asked_at, call) in list(self._awaited.items()):
            if now >= asked_at + _UNANSWERED_S and call.replica is None and call.actor.answers:
                del self._awaited[reference]
                self._make(call)
        due = [call for due_at, call in self._again if now >= due_at]
        self._again = [(due_at, call) for due_at, call in self._again if now < due_at]
        for call in due:
            self._make(call)

    def answers(self) -> Iterator[Answer]:
        """Wait a moment for the next answer, and yield all that have arrived."""
        references = list(self._awaited)
        if not references:
            time.sleep(_WAIT_S)
            return
        ready, _ = self._ray.wait(references, num_returns=1, timeout=_WAIT_S)
        if ready:
            ready, _ = self._ray.wait(references, num_returns=len(references), timeout=0)
        for reference in ready:
            answer = self._answer(self._awaited.pop(reference)[1], reference)
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
        if call.replica is None:
            seen = {name(replica.replica_id): replica.seen for replica in call.actor.replicas}
            reference = call.actor.handle.pull.remote(seen, _PULL_S, self._gather_s)
        else:
            key = name(call.replica.replica_id)
            reference = call.actor.handle.order.remote(key, call.number, dict(call.order))
        self._awaited[reference] = time.monotonic(), call

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
