"""The driver's calls of its actors: orders to replicas, pulls of their reports, and the answers."""

from __future__ import annotations

import time
from typing import (
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Union,
)

from ..node.output import write
from ..status import Reason, cause_of
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
    make: Callable[[], Any]
    is_pull: bool


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
        cause: the kind of the reason when it never came up; else ``None``.
    """

    actor: Actor
    words: str
    cause: Optional[Reason] = None


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
        actor = actor_of(replica)
        arguments = name(replica.replica_id), replica.orders, dict(order)
        self._make(_Call(actor, lambda: actor.handle.order.remote(*arguments), is_pull=False))
        replica.orders += 1

    def pull(self, actor: Actor) -> None:
        """Ask an actor for its replicas' reports that are not here yet."""

        def make() -> Any:
            seen = {name(replica.replica_id): replica.seen for replica in actor.replicas}
            return actor.handle.pull.remote(seen, _PULL_S, self._gather_s)

        self._make(_Call(actor, make, is_pull=True))

    def repeat(self) -> None:
        """Make those calls again that are due."""
        now = time.monotonic()
        for reference, (asked_at, call) in list(self._awaited.items()):
            if now >= asked_at + _UNANSWERED_S and call.is_pull and call.actor.answers:
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
        self._awaited[call.make()] = time.monotonic(), call

    def _answer(self, call: _Call, reference: Any) -> Optional[Answer]:
        exceptions = self._ray.exceptions
        try:
            answer = self._ray.get(reference)
        except exceptions.ActorUnavailableError:
            self._again.append((time.monotonic() + _AGAIN_S, call))  # its node may come back
            return None
        except exceptions.RayError as error:
            call.actor.dead = True
            if isinstance(error, exceptions.RuntimeEnvSetupError):
                write(f"{error}\n")  # the whole error, for readers of the log
                words = f"the runtime environment could not be built: {cause_of(str(error))}"
                return Died(call.actor, words, Reason.RUNTIME_ENV)
            lines = [line.strip()[:300] for line in str(error).splitlines() if line.strip()]
            if getattr(error, "actor_init_failed", False):  # the last line of a traceback says why
                words = f"Ray's worker there failed at its start: {lines[-1]}"
                return Died(call.actor, words, Reason.NOT_STARTED)
            return Died(call.actor, f"Ray's worker there died: {lines[0] if lines else ''}")
        call.actor.answers = True
        return Pulled(call.actor, *answer) if call.is_pull else None

    def _has_ended(self, reference: Any) -> bool:
        try:
            return bool(self._ray.get(reference))
        except self._ray.exceptions.RayError:
            return False
