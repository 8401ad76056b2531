"""The element hosts of an array as its driver knows them: where they start, and in which state."""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import dataclass
from enum import Enum
from typing import Any, Dict, List, Mapping, Sequence, Tuple

from ..fit import TOLERANCE, Node, slots
from ..hosts.actors import Actor, Actors, ReplicaHandle, module_function, prepare_order
from ..hosts.relay import PROGRAM
from ..spec import ArraySpec
from .elements import HostRecord

#: Seconds until a node is tried again where no host could begin, at first and at most.
_AGAIN_S, _AGAIN_MAX_S = 5.0, 300.0
#: Seconds until a host is given up that has not come up: others may have got its resources.
_PLACED_S = 900.0


class HostState(Enum):
    """The state of an element host."""

    #: It was started, and is not prepared yet.
    STARTING = "starting"
    READY = "ready"
    #: It was told to end what it runs, and to start nothing.
    ENDING = "ending"
    #: It has ended everything, and was told to remove its notes and folders.
    LEAVING = "leaving"


@dataclass(eq=False)
class Host:
    """One host.

    Attributes:
        record: its record.
        replica: its handle for the driver's calls.
        actor: the actor that passes its orders and reports on.
        slots: how many elements it runs at a time.
        deadline: when it is given up.
        is_asked: it was asked to hand elements back, and has not answered.
        heard_at: when it was ready, or has reported the last end of an element.
        rests_until: when it may have elements again, after its node had no room for more.
    """

    record: HostRecord
    replica: ReplicaHandle
    actor: Actor
    slots: int
    deadline: float = math.inf
    state: HostState = HostState.STARTING
    is_asked: bool = False
    heard_at: float = 0.0
    rests_until: float = 0.0


class HostStarts:
    """Starts hosts, and programs that end what dead ones have left.

    Args:
        ray: the module, connected.
        spec: the array.
        job: name of the job.
        secrets: the values of its secrets.
        config: the job's configuration as Ray gave it to the driver.
        count: number of elements.
    """

    def __init__(
        self,
        ray: Any,
        spec: ArraySpec,
        job: str,
        secrets: Mapping[str, str],
        config: str,
        count: int,
    ) -> None:
        self._ray = ray
        self._spec = spec
        self._job = job
        self._secrets = secrets
        self._config = config
        self._count = count
        self._actors, self._program = Actors(ray), ray.remote(module_function())

    def start(self, record: HostRecord, node: Node, count: int) -> Host:
        """Start the actor of a host on a node; Ray keeps its resources for the slots."""
        role = self._spec.host
        resources = {key: amount * count for key, amount in role.resources.items()}
        replica = ReplicaHandle(
            (role.name, record.number), role, node, 0, record.tag, record.run_dir
        )
        actor = self._actors.start([replica], resources, self._on(node.node_id), "array.host")
        return Host(record, replica, actor, count, time.monotonic() + _PLACED_S)

    def prepare(self, host: Host) -> Dict[str, Any]:
        """The order that makes a host ready."""
        return {
            **prepare_order(host.replica, self._job, self._secrets, self._config),
            "slots": host.slots,
            "gpus": self._spec.host.resources.get("GPU", 0.0),
            "runs": self._spec.runs,
            "targets": self._spec.targets,
            "elements": self._spec.elements,
            "count": self._count,
        }

    def sweep(self, node_id: str, swept: Sequence[HostRecord], forgotten: Sequence[str]) -> Any:
        """Start the program of ``notes.py`` on a node; a reference for ``swept``."""
        rows = [[record.number, record.tag, record.run_dir] for record in swept]
        request = json.dumps({"sweep": rows, "forget": list(forgotten)})
        env = self._spec.host.runtime_env.get("env_vars") or {}  # where temporary files are
        task = self._program.options(
            num_cpus=0, max_retries=0, scheduling_strategy=self._on(node_id)
        )
        return task.remote(self._actors.package, PROGRAM, f"{__package__}.notes", request, env)

    def swept(self, reference: Any) -> Mapping[str, Any] | None:
        """The answer of a sweep; ``None`` when it is not there yet."""
        if not self._ray.wait([reference], timeout=0)[0]:
            return None
        try:
            answer: Mapping[str, Any] = json.loads(self._ray.get(reference))
        except self._ray.exceptions.RayError as error:
            return {"swept": [], "remaining": f"{type(error).__name__}: {error}"}
        return answer

    def _on(self, node_id: str) -> Any:
        strategies = self._ray.util.scheduling_strategies
        return strategies.NodeAffinitySchedulingStrategy(node_id, soft=False)


def hosts_to_start(
    available: Mapping[str, Mapping[str, float]], need: Mapping[str, float], wanted: int
) -> List[Tuple[str, int]]:
    """The hosts to start, as nodes and slots: evenly over the nodes that have room.

    Args:
        available: what each node has free.
        need: of one element; never empty.
        wanted: how many elements they are to run at a time in all.
    """
    rooms = sorted((slots(resources, need), node) for node, resources in available.items())
    gpus = need.get("GPU", 0.0)
    # Ray gives an actor a part of one GPU, or whole ones.
    most = max(1, int(1.0 / gpus + TOLERANCE)) if gpus % 1 else sys.maxsize
    planned = []
    for index, (room, node) in enumerate(rooms):
        count = min(room, max(0, wanted) // (len(rooms) - index))
        wanted -= count
        while count > 0:
            planned.append((node, min(most, count)))
            count -= most
    return planned


class Backoff:
    """The nodes that are tried again later, after twice as long each time."""

    def __init__(self) -> None:
        self._counts: Dict[str, int] = {}
        self._not_before: Dict[str, float] = {}

    def add(self, node_id: str, now: float) -> int:
        """Note a failure; how many there were in a row."""
        count = self._counts.get(node_id, 0)
        if now >= self._not_before.get(node_id, 0.0):  # several hosts of a node count once
            count = self._counts[node_id] = count + 1
        self._not_before[node_id] = now + min(_AGAIN_S * 2 ** min(count - 1, 10), _AGAIN_MAX_S)
        return count

    def forget(self, node_id: str) -> None:
        self._counts.pop(node_id, None)
        self._not_before.pop(node_id, None)

    def is_over(self, node_id: str, now: float) -> bool:
        """Whether a node may be used."""
        return now >= self._not_before.get(node_id, 0.0)
