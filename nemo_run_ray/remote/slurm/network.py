"""The addresses and ports of one node."""

from __future__ import annotations

import fcntl
import socket
import struct
from contextlib import suppress
from typing import Mapping

from .settings import HEAD_PORTS, NODE_PORTS, CannotContinue

#: Ports are taken from this range: below those that the kernel gives to connections (from 32768
#: on), and above those of most services.
_FIRST, _END = 10240, 32768
#: The first port if the kernel's begin lower (from 9000 on, on some machines).
_FIRST_OF_FEW = 1200
#: Ports of one node of one cluster. Each of Ray's workers needs one.
_BLOCK = 1024
#: In a block, those in front are for Ray's services, the rest for its workers.
_SERVICES = 32
#: Ray's own numbers, which people and NeMo-Run's ``port_forward`` expect; used where they are free.
_EXPECTED = {"PORT": 6379, "DASHBOARD_PORT": 8265, "RAY_CLIENT_SERVER_PORT": 10001}
#: An address that no host has.
_ELSEWHERE = "192.0.2.1"


def head_address(host: str, interface: str) -> str:
    """The address of this node, the head, for the other nodes.

    Args:
        host: Slurm's name of this node.
        interface: the network interface that Ray shall use; empty for an address of that name that
            this node has, or the one by which it reaches others.

    Raises:
        CannotContinue: there is no such interface, or no network.
    """
    try:
        if not interface:
            with suppress(OSError):  # the name is unknown here
                for address in socket.gethostbyname_ex(host)[2]:
                    if not address.startswith("127.") and can_bind(0, address):
                        return address
            return way_to(_ELSEWHERE)
        request = struct.pack("256s", interface.encode()[:15])
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
            return socket.inet_ntoa(answer[20:24])
    except OSError as error:
        way = f"network interface {interface!r}" if interface else "name or the way to others"
        raise CannotContinue(
            f"node {host} has no IPv4 address for the head by its {way} ({error}). "
            "NEMO_RUN_RAY_INTERFACE names the interface to use"
        ) from error


def way_to(address: str) -> str:
    """The address of this node on the way to another; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return str(probe.getsockname()[0])


def choose_ports(wanted: Mapping[str, int], is_head: bool, salt: int) -> dict[str, int]:
    """Ports for one node's Ray by their variables, in a block that nobody else uses.

    Two clusters that begin at the same moment may choose the same: a `ray start` that fails is
    tried again, with other ports.

    Args:
        wanted: ports that the user has set.
        is_head: whether the head's are needed.
        salt: a number, for a first choice in which two jobs seldom meet.

    Raises:
        CannotContinue: one that the user has set is taken, or no block of ports is free.
    """
    names = [*(HEAD_PORTS if is_head else ()), *NODE_PORTS]
    wanted = {name: port for name, port in wanted.items() if name in names}
    for name, port in wanted.items():
        if not name.endswith("WORKER_PORT") and not can_bind(port):
            raise CannotContinue(
                f"{name}={port} is taken on node {socket.gethostname()}. Set another port, or "
                "leave the variable out: then a free one is used"
            )
    with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
        end = min(int(file.read().split()[0]), _END)
    if end - _FIRST_OF_FEW < _BLOCK:  # the kernel gives away nearly all: a free port has to do
        end = _END
    # With fewer blocks, two clusters on a node would not get one each.
    start = _FIRST if end - _FIRST >= 4 * _BLOCK else _FIRST_OF_FEW
    blocks = (end - start) // _BLOCK
    for number in range(blocks):
        first = start + (salt + number) % blocks * _BLOCK
        if all(map(can_bind, range(first, first + _SERVICES))):
            break
    else:
        raise CannotContinue(
            f"no block of ports from {start} to {end - 1} is free on node {socket.gethostname()}"
        )
    workers = {"MIN_WORKER_PORT": first + _SERVICES, "MAX_WORKER_PORT": first + _BLOCK - 1}
    # Where the user sets one of them alone: as many as NeMo-Run's.
    if "MIN_WORKER_PORT" in wanted:
        workers["MAX_WORKER_PORT"] = min(wanted["MIN_WORKER_PORT"] + 256, 65535)
    elif "MAX_WORKER_PORT" in wanted:
        workers["MIN_WORKER_PORT"] = max(wanted["MAX_WORKER_PORT"] - 256, 1)
    chosen = {**workers, **wanted}
    for number, name in enumerate(names):
        if name not in chosen:
            port = _EXPECTED.get(name, 0)
            # Not a port that Ray's workers get, or that the kernel gives to connections.
            is_ours = 0 < port < end and not first <= port < first + _BLOCK
            chosen[name] = port if is_ours and can_bind(port) else first + number
    return chosen


def can_bind(port: int, address: str = "") -> bool:
    """Whether a server may listen on a port of this machine; 0 asks for the address alone."""
    with suppress(OSError), socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Ray's servers do
        probe.bind((address, port))
        return True
    return False
