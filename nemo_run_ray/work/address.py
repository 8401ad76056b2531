"""Which Ray a program asks for, and whether something listens there."""

from __future__ import annotations

import os
import re
import socket
import time
from contextlib import suppress

from nemo_run_ray.errors import ConfigError

#: What leads a Ray program to its cluster; Ray and this package read it, in child processes too.
ADDRESS = "RAY_ADDRESS"
#: ``ip:port`` of a GCS, or the address of a Ray Client server.
_DRIVER_ADDRESS = re.compile(r"(?:ray://)?(?:[\w.-]+|\[[0-9a-fA-F:.]+\]):(?P<port>\d+)")
_MAX_PORT = 65535
#: Seconds in which an address must take a connection: a head that starts does so a little later.
_LISTENS_S = 5.0
_AGAIN_S = 0.2


def is_given(address: str | None) -> bool:
    """Whether the program itself names a Ray, or leaves that to RAY_ADDRESS."""
    return address not in (None, "", "auto")


def asked_for(address: str | None) -> str:
    """The address of the Ray that is asked for; ``""`` for the embedded one.

    Raises:
        ConfigError: it is not the address of a Ray.
    """
    if is_given(address):
        return _checked(str(address))
    found = os.environ.get(ADDRESS, "").strip()
    if found == "auto":
        raise ConfigError(
            f"{ADDRESS} is 'auto', by which Ray searches this machine and may find a Ray that is "
            "dead. Set it to the address that `ray start` has printed, or unset it to use the "
            "embedded Ray."
        )
    return "" if found in ("", "local") else _checked(found)


def is_same(address: str, other: str) -> bool:
    """Whether two addresses lead to one place: a host has several names."""
    return address == other or _place(address) == _place(other)


def _place(address: str) -> tuple[str, str]:
    host, _, port = address.rpartition(":")
    with suppress(OSError, UnicodeError):  # nothing knows it, or it is longer than a name may be
        host = socket.gethostbyname(host)
    return host, port


def check_listens(address: str) -> None:
    """Check that an address takes connections, and not as a web server does.

    Ray itself asks for minutes and ends the whole program then, by SIGTERM (2.60).

    Raises:
        ConnectionError: nothing takes a connection there within 5 s, or a web server does.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    deadline = time.monotonic() + _LISTENS_S
    while True:
        left = max(deadline - time.monotonic(), _AGAIN_S)
        try:
            with socket.create_connection((host.strip("[]"), int(port)), left) as connection:
                # What stands before a Ray Client server may speak both.
                is_web = not address.startswith("ray://") and _is_web(connection)
            break
        except OSError as error:
            refused = isinstance(error, ConnectionRefusedError)
            if not refused or time.monotonic() + _AGAIN_S >= deadline:
                raise ConnectionError(str(error)) from error
        time.sleep(_AGAIN_S)
    if is_web:
        raise ConnectionError("a web server listens there, as Ray's dashboard does")


def _is_web(connection: socket.socket) -> bool:
    """Whether a server speaks HTTP 1, which no GCS does; that answers too."""
    connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
    try:
        return connection.recv(5) == b"HTTP/"
    except TimeoutError:
        return False  # Ray finds out


def _checked(address: str) -> str:
    parts = _DRIVER_ADDRESS.fullmatch(address)
    if parts is not None and 1 <= int(parts["port"]) <= _MAX_PORT:
        return address
    hint = "ip:port of Ray's GCS on a node of the cluster, or ray://host:10001 from elsewhere"
    if parts is not None:
        hint += f", with a port from 1 to {_MAX_PORT}"
    if address.startswith(("http://", "https://")):
        raise ConfigError(
            f"{address} is the address of a dashboard, which takes jobs and not calls. Expected is "
            f"{hint}. A task of RayExecutor(address={address!r}) is on the cluster, and "
            "work.connect() in it needs no address."
        )
    raise ConfigError(f"The address of a Ray is {address!r}; expected is {hint}.")
