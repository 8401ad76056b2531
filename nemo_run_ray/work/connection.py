"""The connection of a program to a Ray: one a process, which child processes find too."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from nemo_run_ray.clusters import LocalCluster
from nemo_run_ray.errors import (
    ConfigError,
    NemoRunRayError,
    Unreachable,
    VersionMismatch,
)

#: The variable by which Ray and this package find the cluster, in child processes too.
ADDRESS = "RAY_ADDRESS"
#: ``ip:port`` of a GCS, or the address of a Ray Client server.
_DRIVER_ADDRESS = re.compile(r"(?:ray://)?(?:[\w.-]+|\[[0-9a-fA-F:.]+\]):(?P<port>\d+)")
_MAX_PORT = 65535
#: Seconds in which an address must take a connection: a head that starts does so a little later.
_LISTENS_S = 5.0
_AGAIN_S = 0.2
#: The two blocks of Ray's message about versions: the cluster's and this process's.
_VERSIONS = re.compile(r"Ray: (\S+)\s+Python: (\S+)")
#: Ray gives a GCS up no sooner, in seconds.
_GIVEN_UP_S = 30.0
_lock = threading.Lock()
#: Whether ray was imported here when RAY_AUTH_MODE was set: it keeps that for the process's life.
_has_read_token = False


class Connection:
    """This process's connection to one Ray, which all of its pools share.

    Attributes:
        ray: the module, connected.
        address: of the cluster.
    """

    def __init__(
        self, address: str | None, num_cpus: int | None, runtime_env: Mapping[str, Any]
    ) -> None:
        loaded: Any = sys.modules.get("ray")
        self.ray = loaded
        self.pid = os.getpid()
        self.runtime_env = dict(runtime_env)
        self._users = 0
        self._set: dict[str, str | None] = {}
        # A program that has called ray.init() itself keeps that connection, and so do its pools.
        self._owns = loaded is None or not loaded.is_initialized()
        if not self._owns:
            self.address = str(loaded.get_runtime_context().gcs_address)
            is_client = loaded.util.client.ray.is_connected()
            if not (is_client and str(address).startswith("ray://")):
                _check_same(self.address, address)
            if runtime_env:
                raise ConfigError(
                    "This program has called ray.init() itself, so that workers have the runtime "
                    "environment that was given there: give runtime_env to ray.init()."
                )
            if not os.environ.get(ADDRESS, "").startswith("ray://"):  # else Ray Client's own
                self._hand_over({ADDRESS: self.address})
            return
        wanted = asked_for(address)
        variables = _variables(wanted) if wanted else _embedded(num_cpus)
        self.address = variables[ADDRESS]
        if loaded is not None:
            _check_imported(variables)
        self._hand_over(variables)
        try:
            import ray

            global _has_read_token
            _has_read_token = _has_read_token or variables.get("RAY_AUTH_MODE") == "token"
            self.ray = ray
            self._init()
        except BaseException:
            self._take_back()
            raise

    def enter(self) -> None:
        """Count one more pool."""
        self._users += 1

    def leave(self) -> bool:
        """Count one pool less; whether it was the last, so that the connection is closed."""
        self._users -= 1
        if self._users:
            return False
        if self._owns:
            self.ray.shutdown()
        self._take_back()
        return True

    def _init(self) -> None:
        options: dict[str, Any] = {"address": self.address, "log_to_driver": False}
        if self.runtime_env:
            options["runtime_env"] = self.runtime_env
        if not self.address.startswith("ray://"):
            options["logging_level"] = logging.WARNING
        with _translated(self.address), _outlived():
            try:
                self.ray.init(**options)
            except (ValueError, TypeError) as error:
                if not self.runtime_env:
                    raise
                words = " ".join(str(error).split())[:300].rstrip(".")
                raise ConfigError(
                    f"Ray has not taken the address {self.address} and runtime_env="
                    f"{self.runtime_env!r}: {words}. Correct them in work.connect()."
                ) from error

    def _hand_over(self, variables: Mapping[str, str]) -> None:
        """Let child processes, and Ray in this one, find the cluster."""
        for name, value in variables.items():
            self._set[name] = os.environ.get(name)
            os.environ[name] = value

    def _take_back(self) -> None:
        for name, before in self._set.items():
            if before is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = before
        self._set.clear()


_current: Connection | None = None


def join(address: str | None, num_cpus: int | None, runtime_env: Mapping[str, Any]) -> Connection:
    """This process's connection, made if there is none.

    Args:
        address: of a cluster; ``None`` and ``"auto"`` are RAY_ADDRESS, and without it the embedded
            Ray.
        num_cpus: of an embedded Ray that is started; ``None`` is all of this machine's.
        runtime_env: Ray's, of the workers.

    Raises:
        ConfigError: the address is not one, or this process is connected to another one.
        VersionMismatch: the cluster has another Ray or Python.
        ClusterError: the cluster cannot be reached or started.
    """
    global _current
    with _lock:
        if _current is None:
            _current = Connection(address, num_cpus, runtime_env)
        else:
            _check_joins(_current, address, runtime_env)
        _current.enter()
        return _current


def _check_joins(current: Connection, address: str | None, runtime_env: Mapping[str, Any]) -> None:
    """Refuse a pool that a connection cannot serve."""
    if current.pid != os.getpid():
        raise ConfigError(
            f"Process {current.pid} is connected to a Ray and has forked this one, which cannot "
            "connect. Start it by multiprocessing's 'spawn' or 'forkserver'."
        )
    _check_same(current.address, address)
    if runtime_env and dict(runtime_env) != current.runtime_env:
        raise ConfigError(
            f"This process is connected with runtime_env={current.runtime_env!r}, and has one at a "
            f"time; asked for is {dict(runtime_env)!r}. Close the other pools before."
        )


def _check_same(connected: str, address: str | None) -> None:
    """Refuse a program that names another Ray than the one that it is connected to."""
    if is_given(address) and not is_same(asked_for(address), connected):
        raise ConfigError(
            f"This process is connected to the Ray at {connected}, and a process has one Ray at a "
            f"time; {address} was asked for. Close that connection before."
        )


def leave(connection: Connection) -> None:
    """Give a connection back; the last pool closes it."""
    global _current
    with _lock:
        if connection.leave() and connection is _current:
            _current = None


def requirements() -> list[str]:
    """Requirements that give a child environment the same Ray as this one has.

    Ray wants the same Python too, ``platform.python_version()``; no requirement can say that.
    """
    return [f"ray[default]=={importlib.metadata.version('ray')}"]


def _check_imported(variables: Mapping[str, str]) -> None:
    """Refuse a cluster with a token to a program whose ray was imported without one.

    Ray reads that when it is imported (2.60), and sends none later.
    """
    name = "RAY_AUTH_MODE"
    has_read = _has_read_token or os.environ.get(name) == "token"
    if variables.get(name) == "token" and not has_read:
        raise ConfigError(
            f"The embedded Ray wants a token, and ray was imported before work.connect(): it has "
            f"read already that there is none. Call work.connect() before the first `import ray`, "
            f"or set {name}=token in the environment of the program."
        )


def _variables(address: str) -> dict[str, str]:
    """The variables of a Ray that somebody else has started, and that takes connections."""
    with _translated(address):
        check_listens(address)
    return {ADDRESS: address}


def _embedded(num_cpus: int | None) -> dict[str, str]:
    """The variables of the embedded Ray, which is started if it does not run."""
    cluster = LocalCluster(num_cpus=num_cpus)
    with _translated("the embedded Ray"):
        cluster.connect()
    return cluster.driver_environment()


@contextmanager
def _translated(address: str) -> Iterator[None]:
    """Raise what Ray raises at a connection as an error of this package."""
    try:
        yield
    except NemoRunRayError:
        raise
    except RuntimeError as error:
        found = _VERSIONS.findall(str(error))
        if len(found) != 2:
            raise
        raise VersionMismatch(_mismatch(address, *found)) from error
    except (ConnectionError, ValueError) as error:
        words = " ".join(str(error).split())[:300].rstrip(".") + "."
        raise Unreachable(
            f"No Ray can be reached at {address}: {words} Give the address of one that runs, as "
            f"`ray start` has printed it (its GCS mostly has port 6379), or unset {ADDRESS} to use "
            "an embedded Ray."
        ) from error


@contextmanager
def _outlived() -> Iterator[None]:
    """Go on where Ray ends the program, as it does when no GCS has answered for minutes (2.60).

    It sends SIGTERM, and its handler in the main thread raises ``SystemExit``. An earlier one is
    another's.
    """
    began = time.monotonic()
    try:
        yield
    except SystemExit as error:
        if error.code != signal.SIGTERM or time.monotonic() - began < _GIVEN_UP_S:
            raise
        raise ConnectionError("what listens there has not answered as the GCS of a Ray") from error


def _mismatch(address: str, cluster: tuple[str, str], own: tuple[str, str]) -> str:
    install = f"pip install 'ray[default]=={cluster[0]}'"
    step = f"Install it here: {install}"
    if own[1] != cluster[1]:
        step = f"Make an environment with Python {cluster[1]} here, and in it: {install}"
    return (
        f"The Ray at {address} is version {cluster[0]} with Python {cluster[1]}; this program has "
        f"{own[0]} with Python {own[1] or platform.python_version()}. Both must be the same. {step}"
    )


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
