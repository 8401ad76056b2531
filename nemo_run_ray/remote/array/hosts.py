"""The hosts of elements as the driver holds them: how they are started, and what they have in hand.

``ray`` is passed in. The actors are those of groups: one passes the orders and reports of one host.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from dataclasses import dataclass, field
from typing import Any, Dict, List, Mapping, NamedTuple, Sequence

from .. import FOLDER
from ..fit import Node
from ..hosts.actors import (
    Actor,
    ReplicaHandle,
    actor_class,
    code_of,
    key_of,
    name,
    passed_on,
    tar,
)
from ..node.rundir import jobs_folder
from ..spec import ArraySpec
from ..trust import open_own
from .progress import Lease

#: The module that the process of a host runs.
_PROGRAM = "array.host"


class HostRecord(NamedTuple):
    """What is written down of a host before it may start anything.

    Attributes:
        number: of the host, over all drivers of the array.
        node_id: where it is.
        tag: in the environment of all its processes.
        run_dir: name of its run directory.
    """

    number: int
    node_id: str
    tag: str
    run_dir: str


@dataclass(eq=False)
class Host:
    """One host.

    Attributes:
        record: which one.
        replica: what the driver's calls know it by.
        slots: how many elements it runs at a time; 0 only ends what earlier hosts have left.
        in_hand: the elements that it has, with their attempts.
        is_ready: it is prepared.
        is_idle: it was told to end and has ended everything.
        is_closing: it was told to end, since nothing waited.
        is_asked: it was asked to hand elements back, and has not answered.
        heard_at: when it was ready, or has told of the last end of an element.
        rests_until: when it may have elements again, after its node had no room for more.
        sweeps: earlier hosts that it is to end.
        swept: those of them that it has ended.
    """

    record: HostRecord
    replica: ReplicaHandle
    actor: Actor
    slots: int
    started_at: float
    in_hand: Dict[int, int] = field(default_factory=dict)
    is_ready: bool = False
    is_idle: bool = False
    is_closing: bool = False
    is_asked: bool = False
    heard_at: float = 0.0
    rests_until: float = 0.0
    sweeps: Dict[int, HostRecord] = field(default_factory=dict)
    swept: List[HostRecord] = field(default_factory=list)

    @property
    def may_have_more(self) -> bool:
        """Whether elements may be leased to it."""
        return self.is_ready and not self.is_closing

    def gives(self, lease: Lease) -> bool:
        """Take an attempt from it; false when it has not got it."""
        has = self.in_hand.get(lease.element) == lease.attempt
        if has:
            del self.in_hand[lease.element]
        return has


class HostStarts:
    """Starts hosts.

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
        self._class = ray.remote(actor_class())
        self._package = ray.put(tar(os.path.dirname(FOLDER), os.path.dirname(jobs_folder())))
        self._codes: List[Any] = []
        self._keys: List[str] = []
        if spec.host.task.has_code:
            folder = code_of(spec.host)
            self._codes, self._keys = [ray.put(tar(folder))], [key_of(folder)]

    def start(self, record: HostRecord, node: Node, slots: int) -> Host:
        """Start the actor of a host on a node; Ray keeps its resources for the slots."""
        role = self._spec.host
        resources = {key: amount * slots for key, amount in role.resources.items()} if slots else {}
        affinity = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        memory = resources.pop("memory", None)
        options = self._class.options(
            num_cpus=resources.pop("CPU", 0),
            num_gpus=resources.pop("GPU", 0),
            memory=int(memory) if memory else None,
            resources=resources,
            max_concurrency=8,
            runtime_env=(role.runtime_env if slots else _folder_of(role.runtime_env)) or None,
            scheduling_strategy=affinity(node.node_id, soft=False),
        )
        replica = ReplicaHandle(
            replica_id=(role.name, record.number),
            role=role,
            node=node,
            bundle=0,
            tag=record.tag,
            run_dir=record.run_dir,
        )
        places = [(name(replica.replica_id), record.tag, record.run_dir, _PROGRAM)]
        keys, codes = (self._keys, self._codes) if slots else ([], [])
        handle = options.remote(places, keys, self._package, *codes)
        replica.actor = Actor(handle, [replica])
        return Host(record, replica, replica.actor, slots, time.monotonic())

    def prepare(self, host: Host) -> Dict[str, Any]:
        """The order that makes a host ready."""
        role = self._spec.host
        return {
            "do": "prepare",
            "role": role.to_json(),
            "index": host.record.number,
            "job": self._job,
            "run_dir": host.record.run_dir,
            "code": key_of(code_of(role)) if role.task.has_code else "",
            "address": host.replica.node.address,
            "tag": host.record.tag,
            "given": passed_on(role, self._config),
            "secrets": {secret: self._secrets[secret] for secret in role.task.secrets},
            "slots": host.slots,
            "gpus": role.resources.get("GPU", 0.0),
            "runs": self._spec.runs,
            "targets": self._spec.targets,
            "elements": self._spec.elements,
            "count": self._count,
        }


def _folder_of(runtime_env: Mapping[str, Any]) -> Dict[str, Any]:
    """What decides in a runtime environment where hosts have their folders and their notes."""
    variables = runtime_env.get("env_vars") or {}
    kept = {name: value for name, value in variables.items() if name in ("TMPDIR", "TEMP", "TMP")}
    return {"env_vars": kept} if kept else {}


class HostBook:
    """All hosts that there have ever been, in a file beside the journal.

    Args:
        path: of the file.
        job_id: submission id of the job's first attempt.
    """

    def __init__(self, path: str, job_id: str) -> None:
        self._path = path
        self._job_id = job_id
        self.records: List[HostRecord] = []
        self._good = 0  # bytes that are whole
        if os.path.lexists(path):
            with open(open_own(path, os.O_RDONLY), encoding="utf-8") as file:
                lines = [line for line in file if line.endswith("\n")]
            self.records = [HostRecord(*json.loads(line)) for line in lines]
            self._good = sum(len(line.encode()) for line in lines)

    def add(self, node_ids: Sequence[str]) -> List[HostRecord]:
        """Write down a new host for each of these nodes, and return when the disk has it."""
        records = []
        for number, node_id in enumerate(node_ids, start=len(self.records)):
            nonce = secrets.token_hex(8)
            tag, run_dir = f"{nonce}.{number}", f"{self._job_id}~host-{number}-{nonce}"
            records.append(HostRecord(number, node_id, f"{self._job_id}/{tag}", run_dir))
        data = "".join(json.dumps(record) + "\n" for record in records).encode()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with open(open_own(self._path, flags), "ab") as file:
            file.truncate(self._good)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self._good += len(data)
        self.records += records
        return records
