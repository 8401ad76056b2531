"""Where the hosts of an array can be started, as Ray says.

``ray`` is passed in.
"""

from __future__ import annotations

import json
from typing import Any, Dict, List, Mapping, Sequence

from ..group.packing import Node, matches
from ..node.output import say
from ..spec import ArraySpec
from .hosts import Host
from .room import Share, shares, slots_in

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
    """

    def __init__(self, ray: Any, spec: ArraySpec) -> None:
        self._ray = ray
        self._spec = spec
        self._tell_at = 0.0

    def shares(self, hosts: Sequence[Host], nodes: Mapping[str, Node], wanted: int) -> List[Share]:
        """The hosts that can be started now.

        Args:
            hosts: that there are.
            nodes: the living nodes.
            wanted: how many elements wait.
        """
        wanted -= sum(host.slots for host in hosts if not host.is_ready)
        if self._spec.max_in_flight is not None:
            used = sum(host.slots for host in hosts)
            wanted = min(wanted, self._spec.max_in_flight - used)
        starting = {host.record.node_id for host in hosts if not host.is_ready}
        available = {
            node_id: resources
            for node_id, resources in self._available().items()
            if node_id in nodes
            and node_id not in starting
            and matches(self._spec.host.label_selector, nodes[node_id].labels)
        }
        return shares(available, self._spec.host.resources, wanted)

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
            need = json.dumps(self._spec.host.resources)
            say(f"no node has room for an element, which needs {need}; waiting")

    def _available(self) -> Dict[str, Dict[str, float]]:
        """What every node has free."""
        state = self._ray._private.state
        found: Dict[str, Dict[str, float]] = state.available_resources_per_node()
        return found
