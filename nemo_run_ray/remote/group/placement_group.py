"""Waits until the cluster has room for a whole group, and says what is missing.

``ray`` is passed in: only the driver imports it.
"""

from __future__ import annotations

import inspect
import time
from typing import Any, Dict, List, Optional, Tuple

from ..fit import Node, nodes_of
from ..node.output import say
from ..spec import GroupSpec
from ..states import Reason
from . import packing

#: Seconds between two looks at the placement group, at first and later on.
_LOOK_S, _LOOK_MAX_S = 0.1, 1.0
#: Seconds until a group whose roles spread tries other nodes.
_OTHERS_S = 3.0
#: Seconds between two lines about a group that waits, and until the first.
_TELL_S, _FIRST_TELL_S = 30.0, 3.0
#: Seconds for which a group must look infeasible: nodes may be joining right now.
_INFEASIBLE_S = 3.0
#: Resources that every Ray knows; others are the cluster's own.
_COMMON = {"CPU", "GPU", "memory"}


class NoRoom(Exception):
    """The group will not be placed."""

    def __init__(self, cause: Reason, words: str) -> None:
        super().__init__(words)
        self.cause = cause
        self.words = words


class PlacementGroup:
    """One placement group for all replicas: all get their nodes, or none does."""

    def __init__(self, ray: Any, spec: GroupSpec) -> None:
        self._ray = ray
        self._spec = spec
        self._began_at = time.monotonic()
        self._tell_at = self._began_at + _FIRST_TELL_S
        self._infeasible_since: Optional[float] = None
        self._turn = 0
        self._others_at = self._began_at + _OTHERS_S
        self._pause_s = _LOOK_S
        self._known: Optional[List[Node]] = None
        self._never: Optional[str] = None
        self.waits_for = ""
        self.group = self._ask()

    def look(self) -> bool:
        """Whether the group has its room now; this waits a moment for it.

        Raises:
            NoRoom: it never will, or not in time.
        """
        if self.group.wait(0) and self._is_alive():
            return True
        time.sleep(self._pause_s)  # Ray's own wait takes whole seconds only: 0.2 is none at all
        self._pause_s = min(self._pause_s * 1.3, _LOOK_MAX_S)
        now = time.monotonic()
        nodes = nodes_of(self._ray.nodes())
        if nodes != self._known:
            self._known, self._never = nodes, packing.why_never(self._spec, nodes)
        never = self._never or self._ray_says_never()
        if never is None:
            self._infeasible_since = None
        elif self._infeasible_since is None:
            self._infeasible_since = now
        elif now - self._infeasible_since >= _INFEASIBLE_S and not self._spec.wait_for_nodes:
            raise NoRoom(Reason.UNSCHEDULABLE, self._in_words(nodes, never))
        limit_s = self._spec.placing_timeout_s
        if limit_s is not None and now - self._began_at >= limit_s:
            words = self._in_words(nodes, never)
            raise NoRoom(Reason.NOT_PLACED, f"not placed within {limit_s:g} s: {words}")
        if now >= self._tell_at:
            self.waits_for = self._in_words(nodes, never)
            say(f"waiting for room for {now - self._began_at:.0f} s: {self.waits_for}")
            self._tell_at = now + _TELL_S
        if now >= self._others_at and any(role.spread for role in self._spec.roles):
            self._others_at, self._turn = now + _OTHERS_S, self._turn + 1
            self.leave()
            self.group = self._ask()
        return False

    def nodes(self) -> Tuple[Node, ...]:
        """The node of every replica, in the order of the bundles."""
        known = {node.node_id: node for node in nodes_of(self._ray.nodes())}
        where = self._ray.util.placement_group_table(self.group)["bundles_to_node_id"]
        return tuple(known[where[number]] for number in sorted(where))

    def leave(self) -> None:
        """Give everything back."""
        self._ray.util.remove_placement_group(self.group)

    def _is_alive(self) -> bool:
        """Whether its nodes still live; Ray places the bundles of a dead one anew."""
        alive = {node.node_id for node in nodes_of(self._ray.nodes())}
        where = self._ray.util.placement_group_table(self.group)["bundles_to_node_id"]
        return set(where.values()) <= alive

    def _ask(self) -> Any:
        nodes = nodes_of(self._ray.nodes())
        bundles = packing.bundles_of(self._spec, nodes, self._turn)
        create = self._ray.util.placement_group
        options: Dict[str, Any] = {}
        if any(bundle.selector for bundle in bundles):
            if "bundle_label_selector" in inspect.signature(create).parameters:
                options["bundle_label_selector"] = [dict(bundle.selector) for bundle in bundles]
            else:
                self._do_without_labels()
        wanted = [dict(bundle.resources) for bundle in bundles]
        return create(wanted, strategy=self._spec.strategy, **options)

    def _do_without_labels(self) -> None:
        version = self._ray.__version__
        for role in self._spec.roles:
            own = sorted(set(role.resources) - _COMMON)
            if role.spread or (role.label_selector and not own):
                what = "spreading its replicas" if role.spread else "label_selector"
                raise NoRoom(
                    Reason.UNSCHEDULABLE,
                    f"{role.name}: {what} needs Ray 2.47 or newer on the cluster, which has "
                    f"{version}; give resources_per_node with a custom resource of the nodes",
                )
            if role.label_selector:
                say(
                    f"{role.name}: Ray {version} knows no labels for groups; the custom resources "
                    f"{', '.join(own)} say where it goes"
                )

    def _ray_says_never(self) -> Optional[str]:
        stats = self._ray.util.placement_group_table(self.group).get("stats", {})
        if stats.get("scheduling_state") == "INFEASIBLE":
            return "no nodes of this cluster can host the group"
        return None

    def _in_words(self, nodes: Any, never: Optional[str]) -> str:
        words = packing.why_waiting(self._spec, nodes, self._ray.available_resources())
        return words if never is None or never in words else f"{words}; {never}"
