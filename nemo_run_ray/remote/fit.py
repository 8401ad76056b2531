"""Whether a request fits on a node, ever and now, and why not: pure.

Ray places; this only explains. It is used for groups, arrays, the status of a task and `doctor`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Iterable, Mapping, Sequence

from .spec import Json

#: Amounts of resources by Ray's names, and labels of a node or what a selector wants of them.
Amounts = Mapping[str, float]
Labels = Mapping[str, str]
#: Ray counts in steps of 0.0001.
TOLERANCE = 1e-5
#: Keys of Ray's job request that reserve amounts, and Ray's names of what they reserve.
_RESERVES = {
    "entrypoint_num_cpus": "CPU",
    "entrypoint_num_gpus": "GPU",
    "entrypoint_memory": "memory",
}
#: Number of a label's values that a message shows.
_VALUES_MAX = 5


@dataclass(frozen=True)
class Node:
    """One living node."""

    node_id: str
    host: str
    address: str
    labels: Labels = field(default_factory=dict)
    #: All that it can give, busy or not.
    resources: Amounts = field(default_factory=dict)
    #: The free amounts, a moment ago; ``None`` when the cluster does not say.
    free: Amounts | None = None


@dataclass(frozen=True)
class ResourceRequest:
    """The request of a replica, a task or an element.

    Attributes:
        resources: amounts by Ray's names; nothing of which it asks for none.
        selector: labels of the nodes that may host it, in Ray's grammar.
    """

    resources: Amounts = field(default_factory=dict)
    selector: Labels = field(default_factory=dict)

    def __str__(self) -> str:
        where = f" on a node with {_labels(self.selector)}" if self.selector else ""
        what = amounts_text(self.resources) if self.resources or not where else "a place"
        return f"{what}{where}"

    def __bool__(self) -> bool:
        return bool(self.resources or self.selector)


def request_of(reservation: Json) -> ResourceRequest:
    """The request of a job, by the parts of Ray's job request that reserve something."""
    resources = {name: float(reservation.get(key) or 0) for key, name in _RESERVES.items()}
    resources |= reservation.get("entrypoint_resources") or {}
    return ResourceRequest(
        {name: amount for name, amount in resources.items() if amount},
        reservation.get("entrypoint_label_selector") or {},
    )


def nodes_of(rows: Iterable[Json]) -> list[Node]:
    """The living nodes of ``ray.nodes()``."""
    return [
        Node(
            row["NodeID"],
            row["NodeManagerHostname"],
            row["NodeManagerAddress"],
            row.get("Labels") or {},
            row.get("Resources") or {},
        )
        for row in rows
        if row.get("Alive")
    ]


def fits(asked: Amounts, there: Amounts) -> bool:
    """Whether amounts suffice, as exactly as Ray counts."""
    return all(amount <= there.get(key, 0.0) + TOLERANCE for key, amount in asked.items())


def matches(selector: Labels, labels: Labels) -> bool:
    """Whether a node's labels satisfy a selector of Ray: ``v``, ``!v``, ``in(a,b)``, ``!in(a)``."""
    for key, wanted in selector.items():
        negated = wanted.startswith("!")
        text = wanted.removeprefix("!")
        inside = text.startswith("in(") and text.endswith(")")
        values = [value.strip() for value in text[3:-1].split(",")] if inside else [text]
        if (labels.get(key) in values) is negated:
            return False
    return True


def slots(available: Amounts, need: Amounts) -> int:
    """The number of times that ``need``, which is not empty, is available."""
    return min(
        int((available.get(name, 0.0) + TOLERANCE) / amount) for name, amount in need.items()
    )


def labelled(selector: Labels, nodes: Sequence[Node]) -> list[Node]:
    """The nodes with such labels."""
    return [node for node in nodes if matches(selector, node.labels)]


def hosts(request: ResourceRequest, nodes: Sequence[Node]) -> list[Node]:
    """The nodes that can take it when they are idle."""
    able = labelled(request.selector, nodes)
    return [node for node in able if fits(request.resources, node.resources)]


def scarce(request: ResourceRequest, node: Node) -> list[str]:
    """The resources of which a node has too little free, as all where it does not say."""
    free = node.free or {}
    return [name for name, amount in request.resources.items() if not fits({name: amount}, free)]


def best(request: ResourceRequest, nodes: Sequence[Node]) -> Node | None:
    """The node that lacks least now, among those that can take it when idle."""

    def lacks(node: Node) -> tuple[float, str]:
        free = node.free or {}
        parts = (
            max(0.0, amount - free.get(name, 0.0)) / amount
            for name, amount in request.resources.items()
        )
        return sum(parts), node.node_id

    return min(hosts(request, nodes), key=lacks, default=None)


def why_not(request: ResourceRequest, nodes: Sequence[Node]) -> str:
    """The reason why no node can ever take it, even when idle; empty when one can."""
    if hosts(request, nodes):
        return ""
    if not nodes:
        return "the cluster has no living node"
    able, shown = labelled(request.selector, nodes), _labels(request.selector)
    for name, value in request.selector.items():
        if not labelled({name: value}, nodes):
            values = sorted({node.labels[name] for node in nodes if name in node.labels})
            others = ", ".join(values[:_VALUES_MAX]) + (" …" if len(values) > _VALUES_MAX else "")
            have = f"; the nodes have {name}={others}" if values else f"; none has {name}"
            return f"no node has the label {_labels({name: value})}{have}"
    if not able:
        return f"no node has all of the labels {shown}"
    scope = f" with {shown}" if shown else ""
    for name, amount in request.resources.items():
        most = max(node.resources.get(name, 0.0) for node in able)
        if not fits({name: amount}, {name: most}):
            asked = f"it asks for {amount_text(name, amount)}"
            if not most:
                return f"no node{scope} has {name}, {asked}"
            return f"the largest node{scope} has {name} {amount_text(name, most)}, {asked}"
    return f"no node{scope} has {amounts_text(request.resources)} at once"


def free_text(request: ResourceRequest, node: Node) -> str:
    """A node's amounts of the requested resources, total and free."""
    free = node.free or {}
    return ", ".join(
        f"{name} {amount_text(name, free.get(name, 0.0))} of "
        f"{amount_text(name, node.resources.get(name, 0.0))} free"
        for name in sorted(request.resources)
    )


def _labels(selector: Labels) -> str:
    """Labels, or what a selector wants of them, for people."""
    return ", ".join(
        f"{name}: {value}" if value.startswith(("!", "in(")) else f"{name}={value}"
        for name, value in sorted(selector.items())
    )


def amounts_text(resources: Amounts) -> str:
    """Amounts of resources for people: ``CPU 2, memory 1.00 GiB``."""
    shown = [f"{name} {amount_text(name, resources[name])}" for name in sorted(resources)]
    return ", ".join(shown) or "nothing"


def amount_text(key: str, amount: float) -> str:
    """The amount of one resource for people."""
    if key == "memory":
        return "next to nothing" if amount < 2**20 else f"{amount / 2**30:.2f} GiB"
    return f"{amount:g}"
