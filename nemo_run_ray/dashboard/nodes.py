"""The nodes of a cluster and who holds them, from what Ray's dashboard and state API answer: pure.

Seen on Ray 2.60:

- ``/nodes?view=summary`` has every node with host, address, labels, totals, memory and disk, and in
  ``nodeLogicalResources`` what is in use, as text. That text is there under both of Ray's
  autoscalers; ``/api/cluster_status`` has numbers, but under the older one only. It is up to 5 s
  old. Without ``nocache=1`` the dashboard gives the answer that it made for the last request, be
  that minutes ago, and makes a new one for the next.
- Ray writes the keys of that answer, names of labels and resources among them, in its own style:
  ``gpu_kind`` is ``gpuKind`` there. ``/api/v0/nodes?detail=true`` has them as they are, and labels
  and totals only.
- ``/api/v0/actors?detail=true`` has what every actor reserves and where. A job reserves by an
  actor of Ray's, which has the job's id in its name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nemo_run_ray.remote.rows import fits

#: Name of the actor that Ray starts for a job, before the job's submission id.
_SUPERVISOR = "_ray_internal_job_actor_"
#: A line of what is in use: ``1.0/2.0 CPU (0.5 used of 1.0 reserved in placement groups)``.
_IN_USE = re.compile(
    r"(?P<used>[\d.e+-]+\w*?)/(?P<total>[\d.e+-]+\w*?) (?P<name>.+?)"
    r"(?: \((?P<grouped>\S+) used of (?P<reserved>\S+) reserved in placement groups\))?"
)
_AMOUNT = re.compile(r"(-?[\d.]+(?:e[+-]?\d+)?)([KMGTP]i)?B?")
_UNITS = {None: 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
#: A resource of a bundle of a placement group, or of any of its bundles.
_OF_GROUP = re.compile(r"(?P<name>.+)_group_(?:\d+_)?[0-9a-f]{16,}")
#: Resources that nobody asks for: one for each node, and what Ray needs for itself.
_HIDDEN = re.compile(r"node:|object_?[sS]tore_?[mM]emory$|bundle$")
_HEAD = ("node:__internal_head__", "node:InternalHead")


@dataclass(frozen=True)
class Disk:
    """A file system of a node, in bytes."""

    path: str
    free_bytes: float
    used_bytes: float


@dataclass(frozen=True)
class ClusterNode:
    """One living node.

    Attributes:
        node_id: hexadecimal.
        host: its name.
        address: of the network.
        labels: by name; the names may be in the dashboard's style, see ``key_of``.
        total: all that it can give, busy or not, by resource.
        free: what nobody holds, a moment ago; ``None`` when the cluster does not say.
        grouped: what placement groups reserve there, used or not.
        is_head: Ray's head runs there.
        memory: bytes of memory, all and available; ``None`` when the cluster does not say.
        disk: the file system with Ray's files; ``None`` when the cluster does not say.
    """

    node_id: str
    host: str
    address: str
    labels: Mapping[str, str] = field(default_factory=dict)
    total: Mapping[str, float] = field(default_factory=dict)
    free: Mapping[str, float] | None = None
    grouped: Mapping[str, float] = field(default_factory=dict)
    is_head: bool = False
    memory: tuple[float, float] | None = None
    disk: Disk | None = None


@dataclass(frozen=True)
class Holding:
    """What one actor reserves on one node.

    Attributes:
        node_id: of the node.
        submission_id: of the job that it was started for; empty of a program's own actors.
        job_id: Ray's number of the program that made it.
        resources: by name; those of a placement group's bundle under their plain names.
        is_grouped: they are of a placement group.
    """

    node_id: str
    submission_id: str
    job_id: str
    resources: Mapping[str, float]
    is_grouped: bool


def key_of(name: str) -> str:
    """The name of a label or resource in the dashboard's style, which is equal for both forms."""
    first, *others = name.split("_")
    return first + "".join(word.title() for word in others)


def amount_of(resources: Mapping[str, float], name: str) -> float:
    """The amount of a resource, whatever style its name is in."""
    if name in resources:
        return resources[name]
    return next((amount for key, amount in resources.items() if key_of(key) == key_of(name)), 0.0)


def nodes_of_summary(answer: Mapping[str, Any]) -> list[ClusterNode]:
    """The living nodes of ``/nodes?view=summary``.

    Raises:
        KeyError, TypeError, ValueError: the answer has another form.
    """
    data = answer["data"]
    in_use = _texts(data.get("nodeLogicalResources"))
    return [
        _node(row, in_use.get(row["raylet"]["nodeId"]))
        for row in data["summary"]
        if row["raylet"].get("state") == "ALIVE"
    ]


def nodes_of_table(rows: Iterable[Mapping[str, Any]]) -> list[ClusterNode]:
    """The living nodes of ``/api/v0/nodes``, of which it is not told what is free."""
    return [
        ClusterNode(
            node_id=str(row["node_id"]),
            host=_text(row.get("node_name")),
            address=_text(row.get("node_ip")),
            labels=_texts(row.get("labels")),
            total=_shown(_amounts(row.get("resources_total"))),
            is_head=bool(row.get("is_head_node")),
        )
        for row in rows
        if row["state"] == "ALIVE"
    ]


def with_names(nodes: Iterable[ClusterNode], table: Iterable[ClusterNode]) -> list[ClusterNode]:
    """The nodes of the summary with labels and totals under the names that the table has."""
    named = {node.node_id: node for node in table}
    return [
        replace(node, labels=named[node.node_id].labels, total=named[node.node_id].total)
        if node.node_id in named
        else node
        for node in nodes
    ]


def holdings_of(rows: Iterable[Mapping[str, Any]]) -> list[Holding]:
    """What the living actors of ``/api/v0/actors?detail=true`` reserve."""
    return [
        Holding(
            node_id=str(row["node_id"]),
            submission_id=name.removeprefix(_SUPERVISOR) if name.startswith(_SUPERVISOR) else "",
            job_id=_text(row.get("job_id")),
            resources=_ungrouped(_amounts(row.get("required_resources"))),
            is_grouped=bool(row.get("placement_group_id")),
        )
        for row in rows
        if row.get("state") == "ALIVE" and row.get("node_id")
        for name in [_text(row.get("name"))]
    ]


# ---------------------------------------------------------------------- one row


def _node(row: Mapping[str, Any], in_use: str | None) -> ClusterNode:
    raylet = row["raylet"]
    told = total = _amounts(raylet.get("resourcesTotal"))
    free: dict[str, float] | None = None
    grouped: dict[str, float] = {}
    if in_use is not None:
        names, held, grouped = _held(in_use)
        # The text rounds amounts of memory; its names are as they were given.
        total = {name: told.get(key_of(name), amount) for name, amount in names.items()}
        free = {name: max(0.0, total[name] - held[name]) for name in total}
    memory: Any = row.get("mem")
    return ClusterNode(
        node_id=str(raylet["nodeId"]),
        host=_text(row.get("hostname")) or _text(raylet.get("nodeManagerHostname")),
        address=_text(row.get("ip")) or _text(raylet.get("nodeManagerAddress")),
        labels=_texts(raylet.get("labels")),
        total=_shown(total),
        free=None if free is None else _shown(free),
        grouped=grouped,
        is_head=bool(raylet.get("isHeadNode")) or any(name in told for name in _HEAD),
        memory=(float(memory[0]), float(memory[1])) if fits(memory, [float]) else None,
        disk=_disk(row.get("disk") or {}, _text(raylet.get("tempDir")) or "/tmp"),
    )


def _held(in_use: str) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Total, what is held, and what placement groups reserve, by resource.

    Ray's first number counts of placement groups what is used in them, not what they reserve.
    """
    total, held, grouped = {}, {}, {}
    for line in in_use.splitlines():
        found = _IN_USE.fullmatch(line.strip())
        if found is None:
            continue
        name = found["name"]
        total[name], held[name] = _amount(found["total"]), _amount(found["used"])
        if found["reserved"]:
            grouped[name] = _amount(found["reserved"])
            held[name] += grouped[name] - _amount(found["grouped"])
    return total, held, grouped


def _amount(text: str) -> float:
    found = _AMOUNT.fullmatch(text)
    amount = float(found[1]) * _UNITS[found[2]] if found else math.inf
    if not math.isfinite(amount):
        raise ValueError(f"{text!r} is no amount of a resource")
    return amount


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _texts(value: Any) -> dict[str, str]:
    return value if fits(value, {str: str}) else {}


def _amounts(value: Any) -> dict[str, float]:
    return dict(value) if fits(value, {str: float}) else {}


def _ungrouped(resources: Mapping[str, float]) -> dict[str, float]:
    """Amounts under their plain names: a bundle's are there twice, with and without its number."""
    found: dict[str, float] = {}
    for name, amount in resources.items():
        of_group = _OF_GROUP.fullmatch(name)
        plain = of_group["name"] if of_group else name
        found[plain] = max(found.get(plain, 0.0), amount)
    return _shown(found)


def _shown(resources: Mapping[str, float]) -> dict[str, float]:
    return {name: amount for name, amount in resources.items() if not _HIDDEN.match(name)}


def _disk(disks: Mapping[str, Any], folder: str) -> Disk | None:
    for path in (folder, "/tmp", "/"):
        found: Any = disks.get(key_of(path))
        if fits(found, {"free": float, "used": float}):
            return Disk(path, float(found["free"]), float(found["used"]))
    return None
