"""Where the hosts of an array can be started, as Ray says.

``ray`` is passed in.
"""

from __future__ import annotations

import json
from typing import Any, Collection, Dict, List, Mapping, Sequence

from ..group.packing import Node, matches
from ..node.output import say
from ..spec import ArraySpec
from .hosts import Host
from .room import Share, shares, slots_in, why_never

#: Seconds until a host that has not come up is given up when its node's room seems to have gone to
#: another. Its own part counts as taken too while Ray makes its runtime environment.
_PLACED_S = 900.0
#: Nodes that cannot run elements until no other one need try, when none could so far.
_REFUSALS_MAX = 3
#: Seconds for which a node is left alone where a host could not be started: at first, and at most.
_LEFT_ALONE_S, _LEFT_ALONE_MAX_S = 5.0, 300.0
#: Seconds until a line says that the array waits for room, and between two.
_TELL_S = 30.0


class HostRoom:
    """The room for the elements of one array.

    Args:
        ray: the module, connected.
        spec: the array.
    """

    def __init__(self, ray: Any, spec: ArraySpec) -> None:
        self._ray = ray
        self._spec = spec
        self._tell_at = 0.0
        self._refusals: Dict[str, int] = {}  # in a row, by node
        self._not_before: Dict[str, float] = {}

    def shares(
        self,
        hosts: Sequence[Host],
        nodes: Mapping[str, Node],
        wanted: int,
        running: int,
        now: float,
    ) -> List[Share]:
        """The hosts that can be started now.

        Args:
            hosts: that there are.
            nodes: the living nodes.
            wanted: how many elements wait.
            running: how many may run that none of these hosts has.
            now: the time.
        """
        wanted -= sum(host.slots for host in hosts if not host.is_ready)
        if self._spec.max_in_flight is not None:
            used = sum(host.slots for host in hosts) + running
            wanted = min(wanted, self._spec.max_in_flight - used)
        starting = {host.record.node_id for host in hosts if not host.is_ready}
        available = {
            node_id: resources
            for node_id, resources in self._available().items()
            if node_id in nodes
            and node_id not in starting
            and now >= self._not_before.get(node_id, now)
            and matches(self._spec.host.label_selector, nodes[node_id].labels)
        }
        return shares(available, self._spec.host.resources, wanted)

    def refused(self, node_id: str, now: float) -> None:
        """A host could not be started on a node, or not made ready: leave it alone for a time."""
        count = self._refusals[node_id] = self._refusals.get(node_id, 0) + 1
        left_alone_s = min(_LEFT_ALONE_S * 2 ** min(count - 1, 10), _LEFT_ALONE_MAX_S)
        self._not_before[node_id] = now + left_alone_s

    def works(self, node_id: str) -> None:
        """An element has ended on a node."""
        self._refusals.pop(node_id, None)

    def may_work(self, hosts: Collection[Host]) -> bool:
        """Whether one of these may still show that elements can run, which no other one could."""
        return len(self._refusals) < _REFUSALS_MAX and any(host.slots for host in hosts)

    def is_lost(self, host: Host, now: float) -> bool:
        """Whether Ray cannot place a host that was to be started, since others were quicker."""
        if host.actor.answers or not host.slots or now - host.started_at < _PLACED_S:
            return False
        free = self._available().get(host.record.node_id, {})
        return slots_in(free, self._spec.host.resources) < host.slots

    def tell(self, hosts: Sequence[Host], nodes: Mapping[str, Node], now: float) -> None:
        """Say now and then what is waited for while there is no host."""
        if any(host.slots for host in hosts):
            self._tell_at = now + _TELL_S
        elif now >= self._tell_at:
            self._tell_at = now + _TELL_S
            role = self._spec.host
            why = why_never(nodes.values(), role.resources, role.label_selector)
            if why:
                say(f"no element can begin: {why}; waiting for a node that joins")
            else:
                need = json.dumps(role.resources)
                say(f"no node has room for an element, which needs {need}; waiting")

    def _available(self) -> Dict[str, Dict[str, float]]:
        """What every node has free."""
        state = self._ray._private.state
        found: Dict[str, Dict[str, float]] = state.available_resources_per_node()
        return found
