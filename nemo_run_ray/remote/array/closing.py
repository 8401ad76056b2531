"""Hosts that have nothing to do any more: their notes are removed, then their actors are ended.

``ray`` is passed in.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Dict, List, Sequence

from ..group.machine import name
from .hosts import Host
from .leases import Leases

#: Seconds for one step until a host is ended without it.
_STEP_S = 10.0
#: Seconds between two looks while the driver waits for all of them.
_LOOK_S = 0.02


@dataclass
class _Closing:
    """One host.

    Attributes:
        host: the host.
        run_dirs: names of the run directories whose notes it removes.
        steps: Ray's references to the answers of those calls that were made: ``forget``, ``close``.
        until: when the last step is given up.
    """

    host: Host
    run_dirs: Sequence[str]
    until: float
    steps: List[Any] = field(default_factory=list)


class Closings:
    """All hosts that are on their way out. Nothing waits for them but ``finish``.

    Args:
        ray: the module, connected.
        leases: must be on the head's disk before the notes are removed, which say the same.
    """

    def __init__(self, ray: Any, leases: Leases) -> None:
        self._ray = ray
        self._leases = leases
        self._closings: Dict[int, _Closing] = {}

    def add(self, host: Host, run_dirs: Sequence[str]) -> None:
        """Let a host remove the notes of these run directories, and end."""
        number = host.record.number
        self._closings[number] = _Closing(host, run_dirs, time.monotonic() + _STEP_S)

    def turn(self, now: float) -> None:
        """Go on with all that can."""
        if not self._closings or not self._leases.commit():
            return
        for number, closing in list(self._closings.items()):
            if self._go_on(closing, now):
                del self._closings[number]
                self._ray.kill(closing.host.actor.handle, no_restart=True)

    def finish(self) -> None:
        """Wait until all have ended, as long as two steps may take."""
        until = time.monotonic() + 2 * _STEP_S
        while self._closings and time.monotonic() < until:
            self.turn(time.monotonic())
            time.sleep(_LOOK_S)

    def _go_on(self, closing: _Closing, now: float) -> bool:
        """Make the next call when the last one was answered; whether there is none left."""
        if closing.steps:
            ready, _ = self._ray.wait([closing.steps[-1]], timeout=0)
            if not ready and now < closing.until:
                return False
            if len(closing.steps) == 2:
                return True
        closing.until = now + _STEP_S
        closing.steps.append(self._call(closing.host, closing))
        return False

    def _call(self, host: Host, closing: _Closing) -> Any:
        if closing.steps:
            return host.actor.handle.close.remote()
        order = {"do": "forget", "run_dirs": list(closing.run_dirs)}
        number, host.replica.orders = host.replica.orders, host.replica.orders + 1
        return host.actor.handle.order.remote(name(host.replica.replica_id), number, order)
