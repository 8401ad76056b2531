"""Where the hosts of an array can be started, as Ray says.

``ray`` is passed in.
"""

from __future__ import annotations

import json
from typing import Any, Collection, Dict, List, Sequence

from ..fit import Node, nodes_of
from ..group.packing import matches
from ..node.output import say
from ..spec import ArraySpec
from .hosts import Host
from .refusals import Refusals
from .room import Share, shares, slots_in, why_never

#: Seconds until a host that has not come up is given up when its node's room seems to have gone to
#: another. Its own part counts as taken too while Ray makes its runtime environment.
_PLACED_S = 900.0
#: Seconds until a line says that the array waits for room, and between two.
_TELL_S = 30.0


class HostRoom:
    """The room for the elements of one array.

    Args:
        ray: the module, connected.
        spec: the array.

    Attributes:
        nodes: the living ones by their ids, as the last look has found them.
        refusals: the nodes where hosts could not begin.
    """

    def __init__(self, ray: Any, spec: ArraySpec) -> None:
        self._ray = ray
        self._spec = spec
        self._tell_at = 0.0
        self.nodes: Dict[str, Node] = {}
        self.refusals = Refusals()

    def look(self) -> None:
        """Ask Ray for the nodes."""
        self.nodes = {node.node_id: node for node in nodes_of(self._ray.nodes())}

    def shares(
        self,
        hosts: Sequence[Host],
        wanted: int,
        running: int,
        now: float,
    ) -> List[Share]:
        """The hosts that can be started now.

        Args:
            hosts: that there are.
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
            if node_id in self.nodes
            and node_id not in starting
            and not self.refusals.left_alone_s(node_id, now)
            and matches(self._spec.host.label_selector, self.nodes[node_id].labels)
        }
        return shares(available, self._spec.host.resources, wanted)

    def can_none(self, hosts: Collection[Host]) -> bool:
        """Whether nothing says any more that a node could run elements."""
        role = self._spec.host
        if any(host.slots and host.is_ready for host in hosts):  # its elements may be long
            return False
        fitting = [
            node.node_id
            for node in self.nodes.values()
            if matches(role.label_selector, node.labels)
            and slots_in(node.resources, role.resources)
        ]
        return self.refusals.are_all([host.record.node_id for host in hosts if host.slots], fitting)

    def is_lost(self, host: Host, now: float) -> bool:
        """Whether Ray cannot place a host that was to be started, since others were quicker."""
        if host.actor.answers or not host.slots or now - host.started_at < _PLACED_S:
            return False
        free = self._available().get(host.record.node_id, {})
        return slots_in(free, self._spec.host.resources) < host.slots

    def tell(self, hosts: Sequence[Host], now: float) -> None:
        """Say now and then what is waited for while there is no host."""
        if any(host.slots for host in hosts):
            self._tell_at = now + _TELL_S
        elif now >= self._tell_at:
            self._tell_at = now + _TELL_S
            say(self._waits_for(now))

    def _waits_for(self, now: float) -> str:
        role = self._spec.host
        why = why_never(self.nodes.values(), role.resources, role.label_selector)
        if why:
            return f"no element can begin: {why}; waiting for a node that joins"
        alone = [self.refusals.left_alone_s(node_id, now) for node_id in self.nodes]
        if any(alone):
            count, least_s = sum(map(bool, alone)), min(filter(None, alone))
            return (
                f"hosts could not begin on {count} node(s); one is tried again in {least_s:.0f} s"
            )
        need = json.dumps(role.resources)
        return f"no node has room for an element, which needs {need}; waiting"

    def _available(self) -> Dict[str, Dict[str, float]]:
        """What every node has free."""
        state = self._ray._private.state
        found: Dict[str, Dict[str, float]] = state.available_resources_per_node()
        return found
