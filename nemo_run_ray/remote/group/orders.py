"""What the driver orders replicas to do, as their processes read it (``replica.py``)."""

from __future__ import annotations

from typing import Any, Dict, Mapping

from ..hosts.actors import ReplicaHandle, ReplicaId, code_of, key_of, passed_on
from ..spec import GroupSpec
from .addresses import variables


class Orders:
    """The orders to the replicas of one group.

    Args:
        spec: the group.
        job: name of the job.
        secrets: the values of the group's secrets by name.
        config: the job's configuration as Ray gave it to the driver.
    """

    def __init__(self, spec: GroupSpec, job: str, secrets: Mapping[str, str], config: str) -> None:
        self._spec = spec
        self._job = job
        self._secrets = secrets
        self._config = config

    def prepare(self, replica: ReplicaHandle) -> Dict[str, Any]:
        """The order to make a replica's folder and to reserve its ports."""
        return {
            "do": "prepare",
            "role": replica.role.to_json(),
            "index": replica.replica_id[1],
            "job": self._job,
            "run_dir": replica.run_dir,
            "code": key_of(code_of(replica.role)),
            "address": replica.node.address,
            "tag": replica.tag,
            "given": passed_on(replica.role, self._config),
            "secrets": {secret: self._secrets[secret] for secret in replica.role.task.secrets},
        }

    def start(
        self, replica: ReplicaHandle, replicas: Mapping[ReplicaId, ReplicaHandle]
    ) -> Dict[str, Any]:
        """The order to start a replica's processes, with the addresses of all replicas."""
        hosts = {replica_id: handle.node.address for replica_id, handle in replicas.items()}
        ports = {replica_id: handle.ports for replica_id, handle in replicas.items()}
        env = variables(self._spec, replica.replica_id, hosts, ports)
        return {"do": "start", "env": env}

    def end(self) -> Dict[str, Any]:
        """The order to end a replica's processes."""
        return {"do": "end"}
