"""What the processes of a group are told about each other, as environment variables: pure."""

from __future__ import annotations

import re
from typing import Dict, Mapping

from ..hosts.actors import ReplicaId
from ..spec import GroupSpec, RoleSpec

#: Port of a role's first replica on which its processes find each other; not the user's.
RENDEZVOUS = "_rendezvous"


def variables(
    spec: GroupSpec,
    replica_id: ReplicaId,
    hosts: Mapping[ReplicaId, str],
    ports: Mapping[ReplicaId, Mapping[str, int]],
) -> Dict[str, str]:
    """The variables of one replica.

    Every role's addresses by the role's name (docs/groups.md), NeMo-Run's macros, and for roles
    without a launcher what ``torch.distributed`` reads.

    Args:
        spec: the group.
        replica_id: the replica.
        hosts: address of every replica's node.
        ports: every replica's ports by name.
    """
    found: Dict[str, str] = {}
    for number, role in enumerate(spec.roles):
        replicas = [(role.name, index) for index in range(role.replicas)]
        prefix = f"NEMO_RUN_{key(role.name)}"
        found[f"{prefix}_HOST"] = hosts[replicas[0]]
        found[f"{prefix}_HOSTS"] = ",".join(hosts[replica] for replica in replicas)
        found[f"NEMO_RUN_HET_GROUP_HOST_{number}"] = hosts[replicas[0]]
        for port in role.ports:
            if port != RENDEZVOUS:
                # A replica asks for its own ports by the name by which others ask for the first's.
                own = replica_id if replica_id[0] == role.name else replicas[0]
                found[f"{prefix}_PORT_{key(port)}"] = str(ports[own][port])
                found[f"{prefix}_PORTS_{key(port)}"] = ",".join(
                    str(ports[replica][port]) for replica in replicas
                )
    return {**found, **_own(spec, replica_id, hosts, ports)}


def key(name: str) -> str:
    """A name as part of a variable's name: upper case, ``_`` for all but letters and digits."""
    return re.sub(r"[^A-Z0-9]", "_", name.upper())


def _own(
    spec: GroupSpec,
    replica_id: ReplicaId,
    hosts: Mapping[ReplicaId, str],
    ports: Mapping[ReplicaId, Mapping[str, int]],
) -> Dict[str, str]:
    role = next(role for role in spec.roles if role.name == replica_id[0])
    head = (role.name, 0)
    found = {
        "NEMO_RUN_HEAD_NODE_IP": hosts[head],
        "NEMO_RUN_NUM_NODES": str(role.replicas),
        "NEMO_RUN_NODE_RANK": str(replica_id[1]),
        "NEMO_RUN_NPROC_PER_NODE": str(role.processes),
    }
    if RENDEZVOUS in role.ports:
        found["NEMO_RUN_RDZV_PORT"] = str(ports[head][RENDEZVOUS])
        if not role.ranked:
            found.update(_torchrun(role, replica_id, hosts))
    if role.ranked:
        found.update(
            NODE_RANK=str(replica_id[1]),
            WORLD_SIZE=str(role.replicas * role.processes),
            LOCAL_WORLD_SIZE=str(role.processes),
            MASTER_ADDR=hosts[head],
            MASTER_PORT=found["NEMO_RUN_RDZV_PORT"],
        )
    return found


def _torchrun(
    role: RoleSpec, replica_id: ReplicaId, hosts: Mapping[ReplicaId, str]
) -> Dict[str, str]:
    """What torchrun must not find out by the host's own name.

    It hosts the rendezvous only where that name resolves to the rendezvous' address, and gives the
    name to the workers as ``MASTER_ADDR``; beside ``127.0.0.1`` in /etc/hosts (Debian) both fail.
    """
    found = {
        "PET_RDZV_CONF": f"is_host={int(replica_id[1] == 0)}",
        "PET_LOCAL_ADDR": hosts[replica_id],
    }
    return {name: value for name, value in found.items() if name not in role.task.env}
