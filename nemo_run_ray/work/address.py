"""Which Ray a program asks for, and whether something listens there."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys

from nemo_run_ray.errors import ConfigError

#: What leads a Ray program to its cluster; Ray and this package read it, in child processes too.
ADDRESS = "RAY_ADDRESS"
#: Ray's word for a Ray that runs on this machine.
AUTO = "auto"
#: Ray's word for a Ray of the program's own, which the embedded one is.
_LOCAL = "local"
#: ``ip:port`` of a GCS, or the address of a Ray Client server.
_DRIVER_ADDRESS = re.compile(r"(?:ray://)?(?P<host>[\w.-]+|\[[0-9a-fA-F:.]+\]):(?P<port>\d+)")
#: Seconds in which an address must take a connection.
_LISTENS_S = 5.0
#: Seconds that Ray may search in. It takes 5 s where it finds a Ray that lives.
_SEARCH_S = 60.0
_SEARCH = """
import ray
ray.init("auto", log_to_driver=False)
print("found", ray.get_runtime_context().gcs_address)
"""
#: How Ray's message begins where the versions differ.
_MISMATCH = "Version mismatch"
_FOUND = re.compile(r"^found (\S+)$", re.MULTILINE)


def asked_for(address: str | None) -> str:
    """The address of the Ray that is asked for: ``""`` for the embedded one, or ``AUTO``.

    Args:
        address: given by the program; ``None`` or ``"auto"`` is RAY_ADDRESS where that is set.

    Raises:
        ConfigError: it is not the address of a Ray.
    """
    if address not in (None, AUTO):
        return _checked(address)
    found = os.environ.get(ADDRESS, "").strip()
    if found in ("", _LOCAL):
        return address or ""
    return found if found == AUTO else _checked(found)


def search() -> str:
    """The address of a Ray that runs on this machine, as Ray itself finds it.

    In a process of its own: where Ray finds one that is dead, by what that has left in /tmp/ray, it
    asks for two minutes and ends its process then (2.60).

    Raises:
        ConnectionError: Ray has found none.
        RuntimeError: Ray's words, when it has found one of another version.
    """
    env = {name: value for name, value in os.environ.items() if name != ADDRESS}
    words = [sys.executable, "-c", _SEARCH]
    try:
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=_SEARCH_S)
    except subprocess.TimeoutExpired as error:
        raise ConnectionError(
            f"the Ray that has run last on this machine has not answered within {_SEARCH_S:g} s"
        ) from error
    found = _FOUND.search(done.stdout)
    if found is None:
        raise _failure(done.stderr)
    return found.group(1)


def check_listens(address: str) -> None:
    """Check that an address takes connections.

    Ray itself asks for two minutes and ends the whole program then, by SIGTERM (2.60).

    Raises:
        ConnectionError: nothing takes a connection there.
    """
    parts = _DRIVER_ADDRESS.fullmatch(address)
    assert parts is not None, address
    try:
        socket.create_connection(
            (parts["host"].strip("[]"), int(parts["port"])), _LISTENS_S
        ).close()
    except (OSError, OverflowError) as error:
        raise ConnectionError(str(error)) from error


def _failure(told: str) -> Exception:
    """What Ray has raised in its own process, as this process would have got it."""
    at = told.rfind(_MISMATCH)
    if at >= 0:
        return RuntimeError(told[at:])
    return ConnectionError((told.strip().splitlines() or ["Ray has said nothing"])[-1])


def _checked(address: str) -> str:
    if not address or _DRIVER_ADDRESS.fullmatch(address):
        return address
    hint = "ip:port of Ray's GCS on a node of the cluster, or ray://host:10001 from elsewhere"
    if address.startswith(("http://", "https://")):
        raise ConfigError(
            f"{address} is the address of a dashboard, which takes jobs and not calls. Expected is "
            f"{hint}. A task of RayExecutor(address={address!r}) is on the cluster, and "
            "work.connect() in it needs no address."
        )
    raise ConfigError(f"The address of a Ray is {address!r}; expected is {hint}.")
