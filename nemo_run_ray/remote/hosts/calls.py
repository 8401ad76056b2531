"""The driver's calls of its actors: orders to replicas, pulls of their reports, and the answers."""

from __future__ import annotations

import json
import time
from typing import Any, Dict, Iterator, List, Mapping, Sequence, Tuple

from ..node.output import write
from ..status import Reason, cause_of
from .actors import ReplicaHandle

#: Seconds to wait for an answer.
_WAIT_S = 0.2
#: Seconds for which an actor keeps the question for reports open.
_PULL_S = 2.0
#: Seconds without an answer until an actor is asked for its reports again. Where an answer was lost
#: with its connection, Ray's client misses it 300 s later, with its own keepalive, or when it has
#: something to send: then all calls on that connection are known to be lost at once.
_UNANSWERED_S = 15.0
#: Seconds for the replicas' processes to remove their folders.
_CLOSE_S = 10.0
#: Reports of a replica, of which each has its kind as ``at``. Those of the kind ``died`` are made
#: here: with ``words``, and as ``cause`` that of an actor which never came up.
Reports = List[Mapping[str, Any]]


class Calls:
    """The orders to actors, and the pulls whose answers are awaited.

    Ray makes a call again while its actor cannot be reached; orders are numbered, and reports
    counted, so that nothing is lost or done twice.
    """

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._awaited: Dict[Any, Tuple[float, ReplicaHandle]] = {}  # since when

    def order(self, replica: ReplicaHandle, order: Mapping[str, Any]) -> None:
        """Give a replica an order; nothing is answered to it."""
        replica.actor.order.remote(replica.orders, dict(order))
        replica.orders += 1

    def pull(self, replica: ReplicaHandle) -> None:
        """Ask an actor for its replica's reports that are not here yet."""
        reference = replica.actor.pull.remote(replica.seen, _PULL_S)
        self._awaited[reference] = time.monotonic(), replica

    def answers(self) -> Iterator[Tuple[ReplicaHandle, Reports]]:
        """Wait a moment for the next answer, and yield all that have arrived.

        An actor is asked again when its reports have been taken.
        """
        now = time.monotonic()
        for reference, (asked_at, replica) in list(self._awaited.items()):
            if now >= asked_at + _UNANSWERED_S and replica.answers:
                del self._awaited[reference]
                self.pull(replica)
        references = list(self._awaited)
        if not references:
            time.sleep(_WAIT_S)
            return
        ready, _ = self._ray.wait(references, num_returns=1, timeout=_WAIT_S)
        if ready:
            ready, _ = self._ray.wait(references, num_returns=len(references), timeout=0)
        for reference in ready:
            replica = self._awaited.pop(reference)[1]
            yield replica, self._reports(replica, reference)
            if not replica.dead:
                self.pull(replica)

    def close(self, replicas: Sequence[ReplicaHandle]) -> bool:
        """Let living actors end their replicas; true if all have confirmed that nothing runs."""
        ends = [replica.actor.close.remote() for replica in replicas]
        try:
            return not ends or all(self._ray.get(ends, timeout=_CLOSE_S))
        except (self._ray.exceptions.RayError, TimeoutError):
            return False

    def _reports(self, replica: ReplicaHandle, reference: Any) -> Reports:
        """The reports of an answer that are new."""
        exceptions, cause = self._ray.exceptions, None
        try:
            node_id, first, reports = self._ray.get(reference)
        except exceptions.RayError as error:
            replica.dead = True
            lines = [line.strip()[:300] for line in str(error).splitlines() if line.strip()]
            words = f"Ray's worker there died: {lines[0] if lines else ''}"
            if isinstance(error, exceptions.RuntimeEnvSetupError):
                write(f"{error}\n")  # the whole error, for readers of the log
                words = f"the runtime environment could not be built: {cause_of(str(error))}"
                cause = Reason.RUNTIME_ENV
            elif getattr(error, "actor_init_failed", False):  # a traceback's last line says why
                words = f"Ray's worker there failed at its start: {lines[-1]}"
                cause = Reason.NOT_STARTED
            return [{"at": "died", "words": words, "cause": cause}]
        replica.answers = True
        new = [json.loads(report) for report in reports[replica.seen - first :]]
        replica.seen += len(new)
        if node_id != replica.node.node_id:
            words = f"Ray has moved the replica to the node {node_id}"
            new.append({"at": "died", "words": words, "cause": None})
        return new
