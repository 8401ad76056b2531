"""Which of the head's addresses the workers reach: a host may have several networks."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from typing import List, Mapping, Optional

from .network import Ports
from .run_folder import NodeReport
from .settings import WrongSetting

#: Seconds that workers get to say what they reach, after the first of them has said it.
_LATE_S = 20.0
_NAMED = 8


class Greeting:
    """Takes connections on all addresses of the head, until one is chosen.

    Args:
        addresses: of the head, the likeliest first.
        workers: how many there are.
        ports: gives it a port, which is free again after ``close``.
    """

    def __init__(self, addresses: List[str], workers: int, ports: Ports) -> None:
        self.addresses = addresses
        self._workers = workers
        self._ports = ports
        self._port = 0
        self._first_told_at: Optional[float] = None
        self._server: Optional[socket.socket] = None
        if len(addresses) > 1 and workers:
            self._port = ports.one()
            self._server = socket.create_server(("", self._port), backlog=4096)
            self._server.setblocking(False)

    @property
    def port(self) -> int:
        """Where to connect; 0 when there is nothing to find out."""
        return self._port

    def _accept(self, server: socket.socket) -> None:
        """Take all connections that wait: the kernel holds a few hundred of them at most."""
        with suppress(OSError):
            while True:
                server.accept()[0].close()

    def close(self) -> None:
        """Take no more connections."""
        if self._server is not None:
            self._server.close()
        self._ports.close()

    def choose(self, reports: Mapping[int, NodeReport]) -> Optional[str]:
        """The first address that every worker reaches; ``None`` until enough have told.

        Raises:
            WrongSetting: there is none.
        """
        if self._server is None:
            return self.addresses[0]
        self._accept(self._server)
        told = [one for rank, one in sorted(reports.items()) if rank and one.reached is not None]
        if not told:
            return None
        if self._first_told_at is None:
            self._first_told_at = time.monotonic()
        if len(told) < self._workers and time.monotonic() - self._first_told_at < _LATE_S:
            return None
        for address in self.addresses:
            if all(address in (node.reached or ()) for node in told):
                self.close()
                return address
        self.close()
        rows = [f"{node.host} reaches {', '.join(node.reached or ()) or 'none'}" for node in told]
        raise WrongSetting(
            f"the workers do not all reach one of its addresses, {', '.join(self.addresses)}: "
            f"{'; '.join(rows[:_NAMED])}. Name the network with NEMO_RUN_RAY_INTERFACE"
        )
