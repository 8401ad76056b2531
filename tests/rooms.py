"""What Ray's dashboard says of nodes and actors, written by Ray's own code from plain amounts."""

from __future__ import annotations

from dataclasses import dataclass, field

from ray.autoscaler._private.util import parse_usage
from ray.dashboard.utils import to_google_style

GIB = 2**30
#: Ray's name of a placement group.
GROUP = "9bf511ea1b1b1b0b8749ce1c7e2903000000"


@dataclass
class FakeNode:
    """One node.

    Attributes:
        name: of its host; its id is made of it.
        total: what it has, by resource.
        used: what is held of it, that of placement groups among it.
        grouped: reserved by placement groups and used in them, by resource.
        memory: of the machine, all and available.
        disk: free and used bytes.
    """

    name: str
    total: dict[str, float]
    used: dict[str, float] = field(default_factory=dict)
    grouped: dict[str, tuple[float, float]] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    is_head: bool = False
    state: str = "ALIVE"
    memory: tuple[int, int] = (64 * GIB, 48 * GIB)
    disk: tuple[int, int] = (80 * GIB, 20 * GIB)

    @property
    def id(self) -> str:
        return self.name.encode().hex().ljust(56, "0")

    @property
    def resources(self) -> dict[str, float]:
        return {f"node:{self.name}": 1.0, "object_store_memory": 6.9e9, **self.total}

    def in_use(self) -> str:
        """As the autoscaler writes it down."""
        usage = {name: (self.used.get(name, 0.0), total) for name, total in self.resources.items()}
        for name, (reserved, used) in self.grouped.items():
            usage[f"{name}_group_{GROUP}"] = (used, reserved)
            usage[f"{name}_group_0_{GROUP}"] = (used, reserved)
        return "\n".join(parse_usage(usage, verbose=True))

    def in_summary(self) -> dict:
        free, used = self.disk
        total, available = self.memory
        return {
            "hostname": self.name,
            "ip": "192.0.2.1",
            "mem": [total, available, 25.0, total - available],
            "disk": {"/": {"free": 1, "used": 1}, "/tmp/my_ray": {"free": free, "used": used}},
            "raylet": {
                "nodeId": self.id,
                "state": self.state,
                "resources_total": self.resources,
                "labels": {"ray.io/node-id": self.id, **self.labels},
                "isHeadNode": self.is_head,
                "tempDir": "/tmp/my_ray",
            },
        }

    def in_table(self) -> dict:
        return {
            "node_id": self.id,
            "node_ip": "192.0.2.1",
            "node_name": "192.0.2.1",
            "is_head_node": self.is_head,
            "state": self.state,
            "resources_total": self.resources,
            "labels": {"ray.io/node-id": self.id, **self.labels},
        }


def summary(*nodes: FakeNode) -> dict:
    """``/nodes?view=summary``."""
    data = {
        "summary": [node.in_summary() for node in nodes],
        "node_logical_resources": {
            node.id: node.in_use() for node in nodes if node.state == "ALIVE"
        },
    }
    return {"result": True, "msg": "", "data": to_google_style(data)}


def table(rows: list[dict]) -> dict:
    """One table of the state API."""
    return {"result": True, "msg": "", "data": {"result": {"result": rows}}}


def supervisor(job: str, node: FakeNode | None, **resources: float) -> dict:
    """The actor that Ray starts for a job; it waits when it has no node."""
    return {
        "name": f"_ray_internal_job_actor_{job}",
        "class_name": "JobSupervisor",
        "state": "ALIVE" if node else "PENDING_CREATION",
        "job_id": "02000000",
        "node_id": node.id if node else None,
        "required_resources": resources,
        "placement_group_id": None,
    }


def actor(job_id: str, node: FakeNode, group: str = "", **resources: float) -> dict:
    """An actor of a program, in a bundle of a placement group if that is named."""
    if group:
        names = [(f"{name}_group_0_{group}", f"{name}_group_{group}") for name in resources]
        values = list(resources.values())
        resources = {one: values[n] for n, pair in enumerate(names) for one in pair}
        resources |= {f"bundle_group_0_{group}": 0.001, f"bundle_group_{group}": 0.001}
    return {
        "name": "",
        "class_name": "A",
        "state": "ALIVE",
        "job_id": job_id,
        "node_id": node.id,
        "required_resources": resources,
        "placement_group_id": group or None,
    }
