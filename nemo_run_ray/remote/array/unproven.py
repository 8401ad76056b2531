"""Hosts of which it is not known yet that nothing of them runs: pure.

What they had in hand is leased again only when that is proven: by another host on their node, which
ends what they have left, or by the death of the node.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Collection, Dict, List, Mapping, Sequence, Set

from ..node_death import NODE_DEAD_S
from .hosts import HostRecord

#: Seconds until a node gets another host that ends what is left there, when the last one has died:
#: at first, and at most.
_SWEEP_AGAIN_S, _SWEEP_AGAIN_MAX_S = 5.0, 60.0


@dataclass
class Steps:
    """What is to be done now.

    Attributes:
        proven: numbers of hosts of which nothing runs any more.
        to_sweep: by node the hosts of which a new one there must end what is left.
    """

    proven: List[int] = field(default_factory=list)
    to_sweep: Dict[str, List[HostRecord]] = field(default_factory=dict)


class Unproven:
    """These hosts, and what they had in hand.

    Args:
        records: all hosts that there have ever been, by their numbers; it grows.
        held: by number what each host of an earlier driver had, with the attempts.
        node_dead_s: seconds from a node's death until nothing of it runs.

    Attributes:
        unconfirmed: nodes that were not waited for at the end, where processes may go on.
    """

    def __init__(
        self,
        records: Sequence[HostRecord],
        held: Mapping[int, Dict[int, int]],
        node_dead_s: float = NODE_DEAD_S,
    ) -> None:
        self._records = records
        self._held = {record.number: dict(held.get(record.number, {})) for record in records}
        self._node_dead_s = node_dead_s
        self._slots: Dict[int, int] = {}  # of hosts of this driver
        self._dead_since: Dict[str, float] = {}  # nodes, as far as this driver knows
        self._sweep_at: Dict[str, float] = {}
        self._sweepers_died: Dict[str, int] = {}  # by node
        self.unconfirmed: Set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._held)

    @property
    def node_ids(self) -> Set[str]:
        """Where they are."""
        return {self._records[number].node_id for number in self._held}

    def abandon(self) -> List[Dict[int, int]]:
        """Wait for none of them any longer; what each of them had in hand."""
        return list(self._held.values())

    @property
    def running(self) -> int:
        """How many elements may run at most."""
        return sum(
            min(len(held), self._slots.get(number, len(held)))
            for number, held in self._held.items()
        )

    def add(self, number: int, in_hand: Mapping[int, int], slots: int = 0) -> None:
        """A host is dead, or its actor is.

        Args:
            number: of the host.
            in_hand: the elements that it had, with their attempts.
            slots: how many of them it ran at a time.
        """
        self._held.setdefault(number, {}).update(in_hand)
        self._slots[number] = slots

    def sweeper_died(self, node_id: str, now: float) -> None:
        """The host has died that was to end what others have left on a node."""
        count = self._sweepers_died[node_id] = self._sweepers_died.get(node_id, 0) + 1
        again_s = min(_SWEEP_AGAIN_S * 2 ** min(count - 1, 10), _SWEEP_AGAIN_MAX_S)
        self._sweep_at[node_id] = now + again_s

    def sweeper_closed(self, node_id: str) -> None:
        """Such a host has ended as it should."""
        self._sweepers_died.pop(node_id, None)

    def held(self, number: int) -> Dict[int, int]:
        """What a host had in hand, of which the end is not known."""
        return self._held.get(number, {})

    def proven(self, number: int) -> Dict[int, int]:
        """Nothing of a host runs any more; what it had in hand."""
        self._slots.pop(number, None)
        return self._held.pop(number, {})

    def steps(
        self, now: float, alive: Collection[str], sweeping: Collection[int], is_ending: bool
    ) -> Steps:
        """What is to be done.

        Args:
            now: the time.
            alive: ids of the living nodes.
            sweeping: numbers of the hosts of which another one ends what is left.
            is_ending: the array is being ended. Then nothing runs a second time, and a dead node
                need not be waited for.
        """
        found = Steps()
        for number in [number for number in self._held if number not in sweeping]:
            record = self._records[number]
            if record.node_id not in alive:
                if self._is_over(record, now, is_ending):
                    found.proven.append(number)
            elif now >= self._sweep_at.get(record.node_id, now):
                found.to_sweep.setdefault(record.node_id, []).append(record)
        return found

    def _is_over(self, record: HostRecord, now: float, is_ending: bool) -> bool:
        """Whether nothing of a host can run again whose node Ray counts as dead."""
        since = self._dead_since.setdefault(record.node_id, now)
        if not self._held[record.number] or now >= since + self._node_dead_s:
            return True
        if is_ending:
            self.unconfirmed.add(record.node_id)
        return is_ending
