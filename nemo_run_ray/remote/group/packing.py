"""Where the replicas of a group may go, and why they cannot: pure, over what Ray says of its nodes.

Ray places; this only says which nodes a role's replicas may have, and explains a wait.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Dict, List, Mapping, Optional, Sequence, Set, Tuple

from ..fit import TOLERANCE, Node, amount_text, amounts_text, fits, matches
from ..hosts.actors import ReplicaId, name
from ..spec import GroupSpec

#: Label of every node that holds its id.
NODE_ID = "ray.io/node-id"
#: A text in place of a node's id: no node has it, so the replica waits until asked for again.
_NO_NODE = "none"
#: Steps of the search for a packing before it is given up as undecided.
_SEARCH_STEPS = 20_000
#: Replicas beyond which it is not begun; each is a frame of Python's stack.
_SEARCH_DEPTH = 500


@dataclass(frozen=True)
class Bundle:
    """What one replica asks for."""

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
    found, chosen = _pack(bundles, order, apart)
    if not found:
        chosen = {}
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
    """Why these nodes can never host the group, even when idle; ``None`` when they may."""
    for role in spec.roles:
        bundle = Bundle((role.name, 0), role.resources, role.label_selector)
        trouble = _why_not_one(bundle, nodes)
        if trouble is not None:
            return f"{role.name}: {trouble}"
        hosts = len(_hosts(bundle, nodes))
        spreads = "STRICT_SPREAD" in (role.spread, spec.strategy)
        if spreads and role.replicas > hosts:
            return (
                f"{role.name}: its {role.replicas} replicas want nodes of their own "
                f"(STRICT_SPREAD), and {hosts} node(s) can host one"
            )
    bundles = _plain(spec)
    if spec.strategy == "STRICT_PACK":
        if not any(_fit_one(bundles, node) for node in nodes):
            return f"no node can host all {len(bundles)} replicas at once (STRICT_PACK)"
        return None
    apart = {role.name for role in spec.roles if role.spread == "STRICT_SPREAD"}
    if spec.strategy == "STRICT_SPREAD":
        apart.add("*")
    if _pack(bundles, nodes, apart)[0] is False:
        return (
            f"the {len(bundles)} replicas together ask for {amounts_text(_sum(bundles))}; the "
            f"nodes, idle, cannot give that at once ({amounts_text(_total(nodes))})"
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


def _pack(
    bundles: Sequence[Bundle], nodes: Sequence[Node], apart: Set[str]
) -> Tuple[Optional[bool], Dict[ReplicaId, int]]:
    """Whether the bundles fit on the idle nodes, and on which ones.

    Args:
        bundles: of the whole group.
        nodes: in the order in which they are tried.
        apart: roles whose replicas want nodes of their own; ``*`` is all roles together.

    Returns:
        ``None`` when the search was too long; the number of each bundle's node when they fit.
    """
    order = sorted(
        bundles, key=lambda bundle: (bundle.replica_id[0], -sum(bundle.resources.values()))
    )
    if len(order) > _SEARCH_DEPTH:
        return None, {}
    search = _Search(order, nodes, apart)
    found = search.place(0, 0)
    return found, search.chosen if found else {}


class _Search:
    """The search of ``_pack``; it takes a step back where a bundle fits nowhere."""

    def __init__(self, order: Sequence[Bundle], nodes: Sequence[Node], apart: Set[str]) -> None:
        self._order = order
        self._nodes = nodes
        self._apart = apart
        self._left = [dict(node.resources) for node in nodes]
        self._used: List[List[str]] = [[] for _ in nodes]
        self._steps = 0
        #: The number of each bundle's node, as far as the search has come.
        self.chosen: Dict[ReplicaId, int] = {}

    def place(self, position: int, after: int) -> Optional[bool]:
        """Whether the bundles from this position on fit; ``None`` when the search was too long.

        Args:
            position: of the next bundle.
            after: number of the node that the bundle before it has.
        """
        if position == len(self._order):
            return True
        bundle = self._order[position]
        role = bundle.replica_id[0]
        alike = position > 0 and self._order[position - 1].replica_id[0] == role
        undecided = False
        # Replicas of a role are alike: only placements in the order of the nodes are different.
        for number in range(after if alike else 0, len(self._nodes)):
            self._steps += 1
            if self._steps > _SEARCH_STEPS:
                return None
            if not self._may(bundle, number):
                continue
            before = self._take(bundle, number)
            answer = self.place(position + 1, number)
            self._left[number] = before
            self._used[number].pop()
            if answer:
                return True
            undecided = undecided or answer is None
        return None if undecided else False

    def _may(self, bundle: Bundle, number: int) -> bool:
        """Whether a node may host a bundle beside those that it has already."""
        role, used = bundle.replica_id[0], self._used[number]
        exclusive = role in self._apart and role in used
        if exclusive or ("*" in self._apart and used):
            return False
        return matches(bundle.selector, self._nodes[number].labels) and fits(
            bundle.resources, self._left[number]
        )

    def _take(self, bundle: Bundle, number: int) -> Dict[str, float]:
        """Give a bundle its node, and return what the node had left before."""
        before = self._left[number]
        self._left[number] = {
            key: amount - bundle.resources.get(key, 0.0) for key, amount in before.items()
        }
        self._used[number].append(bundle.replica_id[0])
        self.chosen[bundle.replica_id] = number
        return before


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
            if not key.startswith(("node:", "object_store_memory")):
                total[key] = total.get(key, 0.0) + amount
    return total
