"""The elements that wait on a host: for a slot, or for room for another process."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Callable, Deque, Iterator, List, Optional, Sequence, Set

from .progress import Lease
from .starting import Order

#: Seconds until a process is tried again for which the node had no room.
_AGAIN_S = 0.5
#: Seconds in which there must be room; after that what waits is for other nodes.
_ROOM_S = 10.0


class WaitingOrders:
    """They begin in the order in which they came."""

    def __init__(self) -> None:
        self._orders: Deque[Order] = deque()
        self._again_at = 0.0
        self._full_since: Optional[float] = None

    @property
    def are_held_up(self) -> bool:
        """Whether the node has no room for a process, as far as is known."""
        return self._full_since is not None

    def add(self, rows: Sequence[Sequence[Any]]) -> None:
        """Let elements wait: index, attempt and values of each."""
        for element, attempt, values in rows:
            self._orders.append(Order(Lease(element, attempt), values))

    def next(self, can_start: Callable[[], bool]) -> Iterator[Order]:
        """Those that may begin now, as long as there is a slot for the next one."""
        while self._orders and can_start() and time.monotonic() >= self._again_at:
            yield self._orders.popleft()

    def begun(self) -> None:
        """The last one has a process."""
        self._full_since = None

    def hold_up(self, order: Order) -> bool:
        """Let one wait again for whose process the node has no room; false after long waits."""
        now = time.monotonic()
        self._orders.appendleft(order)
        self._again_at = now + _AGAIN_S
        if self._full_since is None:
            self._full_since = now
        return now < self._full_since + _ROOM_S

    def remove(self, leases: Set[Lease]) -> List[Lease]:
        """Let some of these never begin; which ones waited."""
        found = [order.lease for order in self._orders if order.lease in leases]
        self._keep([order for order in self._orders if order.lease not in leases])
        return found

    def remove_last(self, count: int) -> List[Lease]:
        """Let so many of the last ones never begin here."""
        orders = list(self._orders)
        first = max(0, len(orders) - count)
        self._keep(orders[:first])
        return [order.lease for order in reversed(orders[first:])]

    def remove_all(self) -> List[Lease]:
        """Let none begin here; which ones waited."""
        return self.remove_last(len(self._orders))

    def _keep(self, orders: Sequence[Order]) -> None:
        self._orders = deque(orders)
        if not orders:
            self._full_since = None
