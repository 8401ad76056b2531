"""How many elements each node can run at a time: pure, over what Ray says of its nodes."""

from __future__ import annotations

from typing import Collection, Dict, List, Mapping, NamedTuple

from ..fit import Node
from ..group.packing import TOLERANCE, amount_text, matches


class Share(NamedTuple):
    """A host that can be started.

    Attributes:
        node_id: where.
        slots: for so many elements at a time.
    """

    node_id: str
    slots: int


def slots_in(available: Mapping[str, float], need: Mapping[str, float]) -> int:
    """For how many elements at a time these resources suffice."""
    fits = [int((available.get(name, 0.0) + TOLERANCE) / amount) for name, amount in need.items()]
    return min(fits)


def why_never(nodes: Collection[Node], need: Mapping[str, float], labels: Mapping[str, str]) -> str:
    """Why no node can ever have an element, in words; empty when one can.

    Args:
        nodes: the living ones, with all that they have when nothing else runs.
        need: of one element.
        labels: that a node must have.
    """
    fitting = [node.resources for node in nodes if matches(labels, node.labels)]
    if not fitting:
        return f"no node has the labels {dict(labels)}" if labels else "no node is alive"
    if any(slots_in(resources, need) for resources in fitting):
        return ""
    for name, amount in need.items():
        most = max(resources.get(name, 0.0) for resources in fitting)
        if most < amount:
            return (
                f"an element asks for {name} {amount_text(name, amount)}, "
                f"and the largest node has {amount_text(name, most)}"
            )
    return f"no node has {', '.join(need)} at once as an element asks for"


def shares(
    available: Mapping[str, Mapping[str, float]], need: Mapping[str, float], wanted: int
) -> List[Share]:
    """The hosts to start: evenly over the nodes that have room.

    Args:
        available: what each node has free.
        need: of one element; never empty.
        wanted: for so many elements at a time in all.
    """
    left = {node: slots_in(resources, need) for node, resources in available.items()}
    given: Dict[str, int] = {}
    while wanted > 0 and any(left.values()):
        for node in sorted(left, key=lambda name: -left[name]):
            if wanted > 0 and left[node] > 0:
                left[node] -= 1
                given[node] = given.get(node, 0) + 1
                wanted -= 1
    return [share for node, slots in given.items() for share in _cut(node, slots, need)]


def _cut(node: str, slots: int, need: Mapping[str, float]) -> List[Share]:
    """One host for all slots; Ray gives one actor a part of a GPU, or whole ones."""
    gpus = need.get("GPU", 0.0)
    if gpus == 0.0 or gpus == int(gpus):
        return [Share(node, slots)]
    together = max(1, int(1.0 / gpus + TOLERANCE))
    sizes = [together] * (slots // together)
    if slots % together:
        sizes.append(slots % together)
    return [Share(node, size) for size in sizes]
