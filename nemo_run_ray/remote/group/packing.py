"""Chooses nodes for the replicas of a group, and explains why they do not fit: pure.

Ray places; this only says which nodes a role's replicas may have, and explains a wait.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Dict, List, Mapping, Optional, Sequence, Set

from ..fit import TOLERANCE, Node, amount_text, amounts_text, fits, matches, slots
from ..hosts.actors import ReplicaId, name
from ..spec import GroupSpec

#: Label of every node that holds its id.
NODE_ID = "ray.io/node-id"
#: A text in place of a node's id: no node has it, so the replica waits until asked for again.
_NO_NODE = "none"


@dataclass(frozen=True)
class Bundle:
    """The request of one replica."""

    replica_id: ReplicaId
    resources: Mapping[str, float]
    selector: Mapping[str, str] = field(default_factory=dict)


def bundles_of(spec: GroupSpec, nodes: Sequence[Node] = (), turn: int = 0) -> List[Bundle]:
    """A bundle for every replica of every role, in order.

    Ray has one strategy for all bundles. Replicas of a role that want nodes of their own all the
    same get disjoint sets of nodes to choose from, around a packing of the whole group.

    Args:
        spec: the group.
        nodes: the cluster's; needed for roles that spread.
        turn: how often it was tried: other sets each time, and a mere wish only the first time.
    """
    bundles = _plain(spec)
    apart = {role.name for role in spec.roles if role.spread == "STRICT_SPREAD"}
    apart |= {role.name for role in spec.roles if role.spread and turn == 0}
    if not apart:
        return bundles
    order = sorted(nodes, key=lambda node: node.node_id)
    if turn > 0:  # at random, so that every choice of nodes has its turn, and equal at each call
        random.Random(turn).shuffle(order)
    chosen = _first_fit(bundles, order, apart)
    if not chosen:
        apart = {role.name for role in spec.roles if role.spread == "STRICT_SPREAD"}
    shares = _shares(bundles, order, apart, chosen)
    return [
        replace(
            bundle,
            selector={
                **bundle.selector,
                NODE_ID: f"in({','.join(shares[bundle.replica_id]) or _NO_NODE})",
            },
        )
        if bundle.replica_id[0] in apart
        else bundle
        for bundle in bundles
    ]


def _plain(spec: GroupSpec) -> List[Bundle]:
    """The bundles without what spreads them."""
    return [
        Bundle((role.name, index), role.resources, role.label_selector)
        for role in spec.roles
        for index in range(role.replicas)
    ]


def why_never(spec: GroupSpec, nodes: Sequence[Node]) -> Optional[str]:
    """Explain why these nodes can never host the group, even when idle; ``None`` when they may.

    It is no packing: what is too large in another way is for Ray to say.
    """
    for role in spec.roles:
        bundle = Bundle((role.name, 0), role.resources, role.label_selector)
        trouble = _why_not_one(bundle, nodes)
        if trouble is not None:
            return f"{role.name}: {trouble}"
        hosts = _hosts(bundle, nodes)
        need = {key: amount for key, amount in role.resources.items() if amount}
        if "STRICT_SPREAD" in (role.spread, spec.strategy):
            if role.replicas > len(hosts):
                return (
                    f"{role.name}: its {role.replicas} replicas want nodes of their own "
                    f"(STRICT_SPREAD), and {len(hosts)} node(s) can host one"
                )
        elif role.replicas > sum(slots(node.resources, need) for node in hosts):
            return (
                f"{role.name}: its {role.replicas} replicas ask for {amounts_text(need)} each; "
                f"the {len(hosts)} node(s) that can host one, idle, cannot give that at once"
            )
    bundles = _plain(spec)
    if spec.strategy == "STRICT_PACK" and not any(_fit_one(bundles, node) for node in nodes):
        return f"no node can host all {len(bundles)} replicas at once (STRICT_PACK)"
    if spec.strategy == "STRICT_SPREAD" and len(bundles) > len(nodes):
        return f"its {len(bundles)} replicas want nodes of their own, and there are {len(nodes)}"
    if not fits(_sum(bundles), _total(nodes)):
        shown = {key: amount for key, amount in _total(nodes).items() if key in _sum(bundles)}
        return (
            f"the {len(bundles)} replicas together ask for {amounts_text(_sum(bundles))}; the "
            f"nodes, idle, cannot give that at once ({amounts_text(shown)})"
        )
    return None


def why_waiting(spec: GroupSpec, nodes: Sequence[Node], available: Mapping[str, float]) -> str:
    """One line for a group that waits: asked, available, what does not fit and why."""
    bundles = _plain(spec)
    asked = f"asked {amounts_text(_sum(bundles))} in {len(bundles)} bundle(s)"
    free = {key: available.get(key, 0.0) for key in _sum(bundles)}
    never = why_never(spec, nodes)
    if never is not None:
        return f"{asked}; available {amounts_text(free)}; {never}"
    return f"{asked}; available {amounts_text(free)}; {_busiest(bundles, nodes, free)}"


def _why_not_one(bundle: Bundle, nodes: Sequence[Node]) -> Optional[str]:
    labelled = [node for node in nodes if matches(bundle.selector, node.labels)]
    if not labelled:
        return f"no node has the labels {dict(bundle.selector)}"
    if not any(fits(bundle.resources, node.resources) for node in labelled):
        scope = f" with the labels {dict(bundle.selector)}" if bundle.selector else ""
        best = ", ".join(
            f"{key} {amount_text(key, max(node.resources.get(key, 0.0) for node in labelled))}"
            for key in bundle.resources
        )
        return (
            f"a replica asks for {amounts_text(bundle.resources)}, more than any node{scope} has "
            f"(at most {best})"
        )
    return None


def _busiest(bundles: Sequence[Bundle], nodes: Sequence[Node], free: Mapping[str, float]) -> str:
    scarce = [
        bundle
        for bundle in bundles
        if any(amount > free[key] + TOLERANCE for key, amount in bundle.resources.items())
    ]
    if not scarce and fits(_sum(bundles), free):
        # What is free is known of all nodes together.
        unless = ", unless it lies on nodes that cannot take them" if len(nodes) > 1 else ""
        return f"that is enough: Ray is about to place them{unless}"
    if not scarce:
        return "all bundles start together, and what is free now is too little for all of them"
    bundle = scarce[0]
    hosts = ", ".join(sorted(node.host for node in _hosts(bundle, nodes))[:8])
    return f"{name(bundle.replica_id)} waits: the nodes that can host it are busy ({hosts})"


def _hosts(bundle: Bundle, nodes: Sequence[Node]) -> List[Node]:
    return [
        node
        for node in nodes
        if matches(bundle.selector, node.labels) and fits(bundle.resources, node.resources)
    ]


def _shares(
    bundles: Sequence[Bundle],
    nodes: Sequence[Node],
    apart: Set[str],
    chosen: Mapping[ReplicaId, int],
) -> Dict[ReplicaId, List[str]]:
    """Disjoint sets of nodes for the replicas of each role; empty ones when there are too few."""
    shares: Dict[ReplicaId, List[str]] = {}
    for role in apart:
        replicas = [bundle for bundle in bundles if bundle.replica_id[0] == role]
        taken = {chosen[bundle.replica_id] for bundle in replicas if bundle.replica_id in chosen}
        hosts = {node.node_id for node in _hosts(replicas[0], nodes)}
        free = [
            node.node_id
            for number, node in enumerate(nodes)
            if number not in taken and node.node_id in hosts
        ]
        for index, bundle in enumerate(replicas):
            own = [nodes[chosen[bundle.replica_id]].node_id] if bundle.replica_id in chosen else []
            shares[bundle.replica_id] = own + free[index :: len(replicas)]
    return shares


def _fit_one(bundles: Sequence[Bundle], node: Node) -> bool:
    return all(matches(bundle.selector, node.labels) for bundle in bundles) and fits(
        _sum(bundles), node.resources
    )


def _first_fit(
    bundles: Sequence[Bundle], nodes: Sequence[Node], apart: Set[str]
) -> Dict[ReplicaId, int]:
    """The number of a node for every bundle when all are idle; empty when one fits nowhere.

    Args:
        bundles: of the whole group.
        nodes: in the order in which they are tried.
        apart: roles whose replicas want nodes of their own.
    """
    remaining = [dict(node.resources) for node in nodes]
    roles: List[Set[str]] = [set() for _ in nodes]
    chosen: Dict[ReplicaId, int] = {}
    for bundle in sorted(bundles, key=lambda bundle: -sum(bundle.resources.values())):
        role = bundle.replica_id[0]
        for number, node in enumerate(nodes):
            if not (role in apart and role in roles[number]) and (
                matches(bundle.selector, node.labels) and fits(bundle.resources, remaining[number])
            ):
                break
        else:
            return {}
        for key, amount in bundle.resources.items():
            remaining[number][key] = remaining[number].get(key, 0.0) - amount
        roles[number].add(role)
        chosen[bundle.replica_id] = number
    return chosen


def _sum(bundles: Sequence[Bundle]) -> Dict[str, float]:
    total: Dict[str, float] = {}
    for bundle in bundles:
        for key, amount in bundle.resources.items():
            total[key] = total.get(key, 0.0) + amount
    return total


def _total(nodes: Sequence[Node]) -> Dict[str, float]:
    total: Dict[str, float] = {}
    for node in nodes:
        for key, amount in node.resources.items():
            total[key] = total.get(key, 0.0) + amount
    return total
