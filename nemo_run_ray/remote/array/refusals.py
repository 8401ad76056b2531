"""Nodes where hosts of an array could not begin: how long each is left alone, and when to give up.

Pure.
"""

from __future__ import annotations

from enum import Enum
from typing import Collection, Dict, Set

#: Seconds for which a node is left alone: at first, and at most.
_LEFT_ALONE_S, _LEFT_ALONE_MAX_S = 5.0, 300.0
#: Hosts that have died on a node before they were ready, without a reason, until it counts as one
#: that cannot run elements. Any may be killed once.
_DEATHS_MAX = 5
#: So many nodes that cannot run elements stand for those that no host could be tried on, and so
#: many failures on one node to make the runtime environment, which is the same for all.
_NODES_MAX = _ENVS_MAX = 3


class Refusal(str, Enum):
    """How a host could not begin."""

    #: It has died, or was killed, and has not told why.
    DIED = "died"
    #: It has told why.
    TOLD = "told"
    #: Its runtime environment could not be made.
    RUNTIME_ENV = "runtime_env"


class Refusals:
    """The nodes where no host could begin since an element has ended there."""

    def __init__(self) -> None:
        self._counts: Dict[str, int] = {}  # in a row, by node
        self._envs: Dict[str, int] = {}  # those of them that were for the runtime environment
        self._cannot: Set[str] = set()
        self._not_before: Dict[str, float] = {}

    def add(self, node_id: str, now: float, refusal: Refusal) -> None:
        """A host could not begin on a node.

        Args:
            node_id: of the node.
            now: the time.
            refusal: how.
        """
        count = self._counts.get(node_id, 0)
        if not self.left_alone_s(node_id, now):  # what ends several hosts of a node counts once
            count = self._counts[node_id] = count + 1
            if refusal is Refusal.RUNTIME_ENV:
                self._envs[node_id] = self._envs.get(node_id, 0) + 1
        if refusal is not Refusal.DIED or count >= _DEATHS_MAX:
            self._cannot.add(node_id)
        left_alone_s = min(_LEFT_ALONE_S * 2 ** min(count - 1, 10), _LEFT_ALONE_MAX_S)
        self._not_before[node_id] = now + left_alone_s

    def forget(self, node_id: str) -> None:
        """An element has ended on a node."""
        self._counts.pop(node_id, None)
        self._envs.pop(node_id, None)
        self._not_before.pop(node_id, None)
        self._cannot.discard(node_id)

    def left_alone_s(self, node_id: str, now: float) -> float:
        """For how much longer a node is left alone; 0 when it is not."""
        return max(0.0, self._not_before.get(node_id, now) - now)

    def are_all(self, trying: Collection[str], fitting: Collection[str]) -> bool:
        """Whether nothing says any more that a node could run elements.

        Args:
            trying: ids of the nodes where hosts are.
            fitting: those of the living nodes that could have an element.
        """
        cannot, refused = self._cannot & set(fitting), self._counts.keys() & set(fitting)
        if set(trying) - self._cannot or not self._cannot:
            return False
        has_env_failed = any(self._envs.get(node_id, 0) >= _ENVS_MAX for node_id in cannot)
        if has_env_failed and refused <= cannot:  # else one of them is tried again soon
            return True
        return len(cannot) >= _NODES_MAX or cannot == set(fitting)
