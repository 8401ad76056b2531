"""Hosts that have nothing to do any more: their notes are removed, then their actors are ended.

``ray`` is passed in.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set

from ..hosts.actors import name
from .hosts import Host, HostRecord
from .leases import Leases

#: Seconds for one step until a host is ended without it: more than an actor waits for its host.
_STEP_S = 15.0
#: Seconds between two looks while the driver waits for all of them.
_LOOK_S = 0.02


class Closed(NamedTuple):
    """A host whose actor was ended.

    Attributes:
        host: the host.
        left: the hosts whose notes and processes may still be there, itself among them; none when
            it has ended as it should.
    """

    host: Host
    left: Sequence[HostRecord]


@dataclass
class _Closing:
    """One host.

    Attributes:
        host: the host.
        records: the hosts whose notes it removes.
        until: when the last step is given up.
        steps: Ray's references to the answers of those calls that were made: ``forget``, ``close``.
    """

    host: Host
    records: Sequence[HostRecord]
    until: float
    steps: List[Any] = field(default_factory=list)


class Closings:
    """All hosts that are on their way out. Nothing waits for them but ``finish``.

    Args:
        ray: the module, connected.
        leases: they say the same as the notes, which are removed when the head's disk has them.
    """

    def __init__(self, ray: Any, leases: Leases) -> None:
        self._ray = ray
        self._leases = leases
        self._closings: Dict[int, _Closing] = {}

    @property
    def node_ids(self) -> Set[str]:
        """Where they are."""
        return {closing.host.record.node_id for closing in self._closings.values()}

    def add(self, host: Host, records: Sequence[HostRecord]) -> None:
        """Let a host remove the notes of these hosts, and end."""
        number = host.record.number
        self._closings[number] = _Closing(host, records, time.monotonic() + _STEP_S)

    def turn(self, now: float) -> Iterator[Closed]:
        """Go on with all that can.

        Yields:
            A host that has ended, has died, or has not answered in time.
        """
        if not self._closings or not self._leases.can_write or not self._leases.commit():
            return
        for number, closing in list(self._closings.items()):
            try:
                has_ended = self._go_on(closing, now)
            except self._ray.exceptions.RayError:
                has_ended = False
            if has_ended is None:
                continue
            del self._closings[number]
            self._ray.kill(closing.host.actor.handle, no_restart=True)
            yield Closed(closing.host, () if has_ended else closing.records)

    def finish(self) -> List[Closed]:
        """Wait until all have ended, as long as two steps may take and the disk is not full."""
        closed: List[Closed] = []
        until = time.monotonic() + 2 * _STEP_S
        while self._closings and self._leases.can_write and time.monotonic() < until:
            closed += self.turn(time.monotonic())
            time.sleep(_LOOK_S)
        return closed

    def _go_on(self, closing: _Closing, now: float) -> Optional[bool]:
        """Make the next call when the last one was answered.

        Returns:
            Whether the host has ended; ``None`` as long as that is not known.
        """
        if closing.steps:
            ready, _ = self._ray.wait([closing.steps[-1]], timeout=0)
            answer = bool(ready) and self._ray.get(ready[0])
            if not ready and now < closing.until:
                return None
            if len(closing.steps) == 2:
                return bool(answer)
        closing.until = now + _STEP_S
        closing.steps.append(self._call(closing.host, closing))
        return None

    def _call(self, host: Host, closing: _Closing) -> Any:
        if closing.steps:
            return host.actor.handle.close.remote(True)  # else it may not have read the first order
        order = {"do": "forget", "run_dirs": [record.run_dir for record in closing.records]}
        number, host.replica.orders = host.replica.orders, host.replica.orders + 1
        return host.actor.handle.order.remote(name(host.replica.replica_id), number, order)
