"""The addresses and ports of one node."""

from __future__ import annotations

import fcntl
import socket
import struct
from contextlib import suppress
from typing import Dict, Iterable, List, Mapping, Optional, Tuple

from .folder import NodeReport
from .settings import HEAD_PORTS, NODE_PORTS, CannotContinue, Settings

#: Ports are taken from this range: below those that the kernel gives to connections (from 32768
#: on), and above those of most services.
_FIRST, _END = 10240, 32768
#: The first port if the kernel's begin lower (from 9000 on, on some machines).
_FIRST_OF_FEW = 1200
_RANGE = "/proc/sys/net/ipv4/ip_local_port_range"
#: Ports of one node of one cluster. Each of Ray's workers needs one.
_BLOCK = 1024
#: With fewer blocks from ``_FIRST`` on, two clusters on a node would not get one each.
_BLOCKS_MIN = 4
#: In a block, those in front are for Ray's services, the rest for its workers.
_SERVICES = 32
#: Ports for workers when the user has set the first or the last alone; as many as NeMo-Run's.
_WORKERS = 256
#: Ray's own numbers, which people and NeMo-Run's ``port_forward`` expect; used where they are free.
_EXPECTED = {"PORT": 6379, "DASHBOARD_PORT": 8265, "RAY_CLIENT_SERVER_PORT": 10001}
_SIOCGIFADDR = 0x8915
_CONNECT_S = 2.0
#: Workers that a message lists at most.
_LISTED = 8


def addresses_by_interface() -> Dict[str, str]:
    """The IPv4 address of every network interface that has one, without the loopback."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with suppress(OSError):  # it has none
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                address = socket.inet_ntoa(answer[20:24])
                if not address.startswith("127."):
                    addresses[name] = address
    return addresses


def head_addresses(host: str, interface: str) -> List[str]:
    """Addresses under which the other nodes may reach this one, the likeliest first.

    Args:
        host: Slurm's name of this node; the addresses of that name come first.
        interface: the one to use, or empty.

    Raises:
        CannotContinue: there is no such interface, or none at all.
    """
    own = addresses_by_interface()
    if not own or interface not in ("", *own):
        raise CannotContinue(
            f"node {host} lacks the network interface {interface!r} of NEMO_RUN_RAY_INTERFACE, or "
            f"an IPv4 address; it has {own or 'none'}"
        )
    if interface:
        return [own[interface]]
    resolved: List[str] = []
    with suppress(OSError):  # the name is unknown here
        rows = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
        resolved = [str(row[4][0]) for row in rows if row[4][0] in own.values()]
    return list(dict.fromkeys([*resolved, *own.values()]))


def way_to(address: str) -> str:
    """The address of this node on the way to another; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return str(probe.getsockname()[0])


def reachable(addresses: Iterable[str], port: int) -> List[str]:
    """The addresses that take a connection from here."""
    reached = []
    for address in addresses:
        with suppress(OSError):
            socket.create_connection((address, port), _CONNECT_S).close()
            reached.append(address)
    return reached


class Ports:
    """The ports of one node's Ray, in a block that nobody else uses.

    Two clusters that begin at the same moment may choose the same: a `ray start` that fails is
    tried again, with other ports.

    Args:
        wanted: ports that the user has set, by variable.
        is_head: whether the head's are needed.
        salt: a number, for a first choice in which two jobs seldom meet.
    """

    def __init__(self, wanted: Mapping[str, int], is_head: bool, salt: int) -> None:
        self._wanted = wanted
        self._names = [*(HEAD_PORTS if is_head else ()), *NODE_PORTS]
        self._salt = salt

    def choose(self) -> Dict[str, int]:
        """A port for each variable.

        Raises:
            CannotContinue: one that the user has set is taken, or no block of ports is free.
        """
        wanted = {name: port for name, port in self._wanted.items() if name in self._names}
        taken = [
            f"{name}={port}"
            for name, port in wanted.items()
            if not name.endswith("WORKER_PORT") and not _is_free(port)
        ]
        if taken:
            raise CannotContinue(
                f"{', '.join(taken)} is taken on node {socket.gethostname()}. Set another port, or "
                "leave the variable out: then a free one is used"
            )
        first = self.block()
        low, high = first + _SERVICES, first + _BLOCK - 1
        if "MIN_WORKER_PORT" in wanted:
            high = min(wanted["MIN_WORKER_PORT"] + _WORKERS, 65535)
        elif "MAX_WORKER_PORT" in wanted:
            low = max(wanted["MAX_WORKER_PORT"] - _WORKERS, 1)
        chosen = {"MIN_WORKER_PORT": low, "MAX_WORKER_PORT": high, **wanted}
        for number, name in enumerate(self._names):
            if name not in chosen:
                port = _EXPECTED.get(name, 0)
                # Not a port that Ray's workers get, or that the kernel gives to connections.
                is_ours = port < _range()[1] and not first <= port < first + _BLOCK
                chosen[name] = port if port and is_ours and _is_free(port) else first + number
        return chosen

    def block(self) -> int:
        """The first port of a block whose ports for services are all free.

        Raises:
            CannotContinue: there is none.
        """
        start, end = _range()
        blocks = (end - start) // _BLOCK
        for number in range(blocks):
            first = start + (self._salt + number) % blocks * _BLOCK
            if all(map(_is_free, range(first, first + _SERVICES))):
                return first
        raise CannotContinue(
            f"no block of ports from {start} to {end - 1} is free on node {socket.gethostname()}"
        )


def _range() -> Tuple[int, int]:
    """The first port that may be taken, and the first one behind them."""
    with open(_RANGE, encoding="ascii") as file:
        end = min(int(file.read().split()[0]), _END)
    return (_FIRST if end - _FIRST >= _BLOCKS_MIN * _BLOCK else _FIRST_OF_FEW), end


def _is_free(port: int) -> bool:
    with suppress(OSError), socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Ray's servers do
        probe.bind(("", port))
        return True
    return False


class AddressDiscovery:
    """Finds the address of the head that all workers reach: a host may have several networks.

    It takes connections on all addresses of the head until one is chosen.

    Args:
        addresses: of the head, the likeliest first.
        settings: of the head.
        ports: gives it a port, which is free again when Ray's are chosen.
    """

    def __init__(self, addresses: List[str], settings: Settings, ports: Ports) -> None:
        self.addresses = addresses
        self._workers = max(settings.min_workers, 1)
        self._server: Optional[socket.socket] = None
        #: Takes the connections; 0 if there is only one candidate.
        self.port = 0
        if len(addresses) > 1 and settings.nodes > 1:
            self.port = ports.block()
            self._server = socket.create_server(("", self.port), backlog=4096)
            self._server.setblocking(False)

    def choose(self, reports: Mapping[int, NodeReport]) -> Optional[str]:
        """The first address that all workers reach; ``None`` until the needed ones have reported.

        Raises:
            CannotContinue: no address is reached by all.
        """
        if self._server is None:
            return self.addresses[0]
        with suppress(OSError):  # the kernel holds only a few hundred connections that wait
            while True:
                self._server.accept()[0].close()
        reached = {row.host: row.reached for row in reports.values() if row.reached is not None}
        if len(reached) < self._workers:
            return None
        self._server.close()
        for address in self.addresses:
            if all(address in own for own in reached.values()):
                return address
        rows = [f"{host} reaches {', '.join(own) or 'none'}" for host, own in reached.items()]
        raise CannotContinue(
            f"the workers do not all reach one of its addresses, {', '.join(self.addresses)}: "
            f"{'; '.join(rows[:_LISTED])}. Name the network with NEMO_RUN_RAY_INTERFACE"
        )
