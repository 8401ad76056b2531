"""Whether a node can take one replica of a task, ever and now, and in words why not: pure.

Ray places; this only explains. Groups have words of their own (``remote/group/packing.py``), which
their drivers find on the cluster.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_run_ray.dashboard.state import ClusterNode, amount_of, key_of
from nemo_run_ray.remote.group.packing import amount_text, fits, matches, words

#: Keys of Ray's job request that reserve amounts, and Ray's names of what they reserve.
_RESERVES = {
    "entrypoint_num_cpus": "CPU",
    "entrypoint_num_gpus": "GPU",
    "entrypoint_memory": "memory",
}
#: So many values of a label are shown.
_VALUES_MAX = 5


@dataclass(frozen=True)
class Ask:
    """What one replica asks for.

    Attributes:
        resources: amounts by Ray's names; nothing of which it asks for none.
        selector: labels of the nodes that may host it, in Ray's grammar.
    """

    resources: Mapping[str, float] = field(default_factory=dict)
    selector: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        if not self.selector:
            return words(self.resources)
        what = words(self.resources) if self.resources else "a place"
        return f"{what} on a node with {_labels(self.selector)}"

    def __bool__(self) -> bool:
        return bool(self.resources or self.selector)

    @property
    def key(self) -> Hashable:
        """What those that ask for the same have in common."""
        return tuple(sorted(self.resources.items())), tuple(sorted(self.selector.items()))


def ask_of(reservation: Mapping[str, Any]) -> Ask:
    """What a job asks for.

    Args:
        reservation: the parts of Ray's job request that say so.
    """
    resources = {name: float(reservation.get(key) or 0) for key, name in _RESERVES.items()}
    resources |= reservation.get("entrypoint_resources") or {}
    return Ask(
        {name: amount for name, amount in resources.items() if amount},
        reservation.get("entrypoint_label_selector") or {},
    )


def hosts(ask: Ask, nodes: Sequence[ClusterNode]) -> list[ClusterNode]:
    """The nodes that can take it when they are idle."""
    return [node for node in labelled(ask.selector, nodes) if fits(ask.resources, _of(ask, node))]


def labelled(selector: Mapping[str, str], nodes: Sequence[ClusterNode]) -> list[ClusterNode]:
    """The nodes with such labels."""
    wanted = {key_of(name): value for name, value in selector.items()}
    return [
        node
        for node in nodes
        if matches(wanted, {key_of(name): value for name, value in node.labels.items()})
    ]


def has_room(ask: Ask, node: ClusterNode) -> bool:
    """Whether a node can take it now; not so when it does not say what is free."""
    return node.free is not None and not scarce(ask, node)


def scarce(ask: Ask, node: ClusterNode) -> list[str]:
    """The resources of which a node has too little free."""
    free = node.free or {}
    return [
        name
        for name, amount in ask.resources.items()
        if not fits({name: amount}, {name: amount_of(free, name)})
    ]


def best(ask: Ask, nodes: Sequence[ClusterNode]) -> ClusterNode | None:
    """The node that lacks least now, among those that can take it when idle."""

    def lacks(node: ClusterNode) -> tuple[float, str]:
        free = node.free or {}
        missing = [
            max(0.0, amount - amount_of(free, name)) / amount
            for name, amount in ask.resources.items()
        ]
        return sum(missing), node.node_id

    return min(hosts(ask, nodes), key=lacks, default=None)


def why_never(ask: Ask, nodes: Sequence[ClusterNode]) -> str:
    """Why none of these nodes can ever take it, even when idle; empty when one can."""
    if hosts(ask, nodes):
        return ""
    if not nodes:
        return "the cluster has no living node"
    found = labelled(ask.selector, nodes)
    if not found:
        return _why_no_label(ask.selector, nodes)
    scope = f" with {_labels(ask.selector)}" if ask.selector else ""
    for name, amount in ask.resources.items():
        most = max(amount_of(node.total, name) for node in found)
        if not fits({name: amount}, {name: most}):
            asked = amount_text(name, amount)
            if not most:
                return f"no node{scope} has {name}, it asks for {asked}"
            has = amount_text(name, most)
            return f"the largest node{scope} has {name} {has}, it asks for {asked}"
    return f"no node{scope} has {words(ask.resources)} at once"


def free_words(ask: Ask, node: ClusterNode) -> str:
    """What a node has of what is asked for, in total and free."""
    texts = []
    for name in sorted(ask.resources):
        total = amount_text(name, amount_of(node.total, name))
        if node.free is None:
            texts.append(f"{name} {total}")
            continue
        texts.append(f"{name} {amount_text(name, amount_of(node.free, name))} of {total} free")
    return ", ".join(texts)


def label_text(name: str, value: str) -> str:
    """A label, or what a selector wants of it, for people."""
    return f"{name}: {value}" if value.startswith(("!", "in(")) else f"{name}={value}"


def _why_no_label(selector: Mapping[str, str], nodes: Sequence[ClusterNode]) -> str:
    for name, value in selector.items():
        if labelled({name: value}, nodes):
            continue
        values = sorted(
            {
                found
                for node in nodes
                for label, found in node.labels.items()
                if key_of(label) == key_of(name)
            }
        )
        shown = ", ".join(values[:_VALUES_MAX]) + (" …" if len(values) > _VALUES_MAX else "")
        there = f"; the nodes have {name}={shown}" if values else f"; none has {name}"
        return f"no node has the label {label_text(name, value)}{there}"
    return f"no node has all of the labels {_labels(selector)}"


def _labels(selector: Mapping[str, str]) -> str:
    return ", ".join(label_text(name, value) for name, value in sorted(selector.items()))


def _of(ask: Ask, node: ClusterNode) -> dict[str, float]:
    return {name: amount_of(node.total, name) for name in ask.resources}
