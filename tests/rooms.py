"""Ray's tables of nodes and of those who hold their resources, made from plain amounts."""

from __future__ import annotations

from dataclasses import dataclass, field

from nemo_run_ray.dashboard.state import ClusterRoom, holdings_of, room_of

GIB = 2**30
#: Ray's name of a placement group.
GROUP = "9bf511ea1b1b1b0b8749ce1c7e2903000000"


@dataclass
class FakeNode:
    """One node; its id is made of its name. A task of some program holds what is used."""

    name: str
    total: dict[str, float]
    used: dict[str, float] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    state: str = "ALIVE"

    @property
    def id(self) -> str:
        return self.name.encode().hex().ljust(56, "0")

    def row(self) -> dict:
        return {
            "node_id": self.id,
            "node_ip": "192.0.2.1",
            "node_name": self.name,
            "state": self.state,
            "resources_total": {
                f"node:{self.name}": 1.0,
                "object_store_memory": 6.9e9,
                **self.total,
            },
            "labels": {"ray.io/node-id": self.id, **self.labels},
        }


def tables(*nodes: FakeNode, actors=(), groups=()) -> dict[str, list[dict]]:
    """All tables that tell the room, by name."""
    return {
        "nodes": [node.row() for node in nodes],
        "actors": list(actors),
        "placement_groups": list(groups),
        "tasks": [actor("99000000", node, **node.used) for node in nodes],
    }


def room(*nodes: FakeNode, **holders) -> ClusterRoom:
    """The room that the package reads from these tables."""
    found = tables(*nodes, **holders)
    held = holdings_of(found["actors"], found["placement_groups"], found["tasks"])
    return room_of(found["nodes"], held)


def answer(rows: object) -> dict:
    """The state API's answer of a table."""
    return {"result": True, "msg": "", "data": {"result": {"result": rows}}}


def supervisor(job: str, node: FakeNode | None, **resources: float) -> dict:
    """The actor that Ray starts for a job; it waits when it has no node."""
    return {
        "name": f"_ray_internal_job_actor_{job}",
        "state": "ALIVE" if node else "PENDING_CREATION",
        "job_id": "02000000",
        "node_id": node.id if node else None,
        "required_resources": resources,
        "placement_group_id": None,
    }


def actor(job_id: str, node: FakeNode, group: str = "", **resources: float) -> dict:
    """An actor or a task of a program, in a placement group if that is named."""
    return {
        "name": "",
        "job_id": job_id,
        "node_id": node.id,
        "required_resources": resources,
        "placement_group_id": group or None,
    }


def placement_group(job_id: str, node: FakeNode, **resources: float) -> dict:
    """A placement group of one bundle."""
    return {
        "placement_group_id": GROUP,
        "creator_job_id": job_id,
        "state": "CREATED",
        "bundles": [{"unit_resources": resources, "node_id": node.id}],
    }
