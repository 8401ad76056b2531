"""The connection of a program to a Ray: one a process, which child processes find too."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import monotonic
from typing import Any

from nemo_run_ray.clusters.local import LocalCluster
from nemo_run_ray.errors import ConfigError, NemoRunRayError, Unreachable, VersionMismatch
from nemo_run_ray.remote.spec import Json

#: The variable by which Ray and this package find the cluster, in child processes too.
ADDRESS = "RAY_ADDRESS"
_AUTH_MODE = "RAY_AUTH_MODE"
#: Ray gives a GCS up no sooner, in seconds: an earlier SIGTERM is another's.
_GIVEN_UP_S = 30.0
_lock = threading.Lock()
#: Whether ray was imported here when RAY_AUTH_MODE was set: it keeps that for the process's life.
_has_read_token = False


class Connection:
    """This process's connection to one Ray, which all of its pools share."""

    def __init__(self, address: str | None, num_cpus: int | None, runtime_env: Json):
        global _has_read_token
        self.ray: Any = sys.modules.get("ray")
        self.users = 0  # open pools
        self._pid = os.getpid()
        self._environment: dict[str, str | None] = {}
        self.owns, self._runtime_env = True, dict(runtime_env)
        # A program that has called ray.init() itself keeps that connection, and so do its pools.
        if self.ray and self.ray.is_initialized():
            self.owns, self._runtime_env = False, {}
            self.address = str(self.ray.get_runtime_context().gcs_address)
            self.check(address, runtime_env)
            if not os.environ.get(ADDRESS, "").startswith("ray://"):  # else Ray Client's own
                self._set_environment({ADDRESS: self.address})
            return
        self.address = _asked_for(address)
        with _translated(self.address or "the embedded Ray", runtime_env):
            variables = {ADDRESS: self.address}
            if self.address:
                # Ray itself asks for minutes, and then ends the whole program by SIGTERM (2.60).
                host, _, port = self.address.removeprefix("ray://").rpartition(":")
                socket.create_connection((host.strip("[]"), int(port)), 5.0).close()
            else:
                cluster = LocalCluster(num_cpus=num_cpus)
                cluster.connect()
                variables = cluster.driver_environment()
                self.address = variables[ADDRESS]
                if self.ray and not _has_read_token and os.environ.get(_AUTH_MODE) != "token":
                    raise ConfigError(
                        "The embedded Ray wants a token, and ray was imported before "
                        "work.connect(): it has read already that there is none. Call "
                        "work.connect() before the first `import ray`, or set "
                        f"{_AUTH_MODE}=token in the environment of the program."
                    )
                _has_read_token = True
            self._set_environment(variables)
            import ray

            self.ray = ray
            # By ray:// Ray warns of it.
            quiet = {} if self.address.startswith("ray://") else {"logging_level": logging.WARNING}
            began = monotonic()
            try:
                ray.init(
                    self.address,
                    log_to_driver=False,
                    runtime_env=self._runtime_env or None,
                    **quiet,
                )
            except BaseException as error:
                self.restore_environment()
                # Ray sends SIGTERM when no GCS has answered (2.60).
                is_sigterm = isinstance(error, SystemExit) and error.code == signal.SIGTERM
                if not is_sigterm or monotonic() - began < _GIVEN_UP_S:
                    raise
                raise ConnectionError(
                    "what listens there has not answered as the GCS of a Ray"
                ) from error

    def check(self, address: str | None, runtime_env: Json) -> None:
        """Refuse a pool that this connection cannot serve."""
        self.check_process()
        is_same = address in (None, "", "auto", self.address) or (
            self.ray.util.client.ray.is_connected() and str(address).startswith("ray://")
        )
        if not is_same or (runtime_env and dict(runtime_env) != self._runtime_env):
            asked = f"another runtime_env (of {', '.join(runtime_env)})" if is_same else address
            raise ConfigError(
                f"This process is connected to the Ray at {self.address}, and has one connection "
                f"at a time; {asked} was asked for. Close the other pools before, or give it to "
                "ray.init() where the program calls that itself."
            )

    @property
    def is_of_parent(self) -> bool:
        """Whether another process has connected, and has forked this one."""
        return self._pid != os.getpid()

    def check_process(self) -> None:
        """Refuse a process that was forked from the one that has connected."""
        if self.is_of_parent:
            raise ConfigError(
                f"Process {self._pid} is connected to a Ray and has forked this one, which cannot "
                "use that connection. Start it by multiprocessing's 'spawn' or 'forkserver', and "
                "call work.connect() in it."
            )

    def _set_environment(self, variables: Mapping[str, str]) -> None:
        """Let child processes, and Ray in this one, find the cluster."""
        self._environment = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)

    def restore_environment(self) -> None:
        """Undo that."""
        for name, before in self._environment.items():
            os.environ.pop(name, None)
            if before is not None:
                os.environ[name] = before


_current: Connection | None = None


def join(address: str | None, num_cpus: int | None, runtime_env: Json) -> Connection:
    """This process's connection, made if there is none.

    Raises:
        ConfigError: the address is not one, or this process is connected to another one.
        VersionMismatch: the cluster has another Ray or Python.
        ClusterError: the cluster cannot be reached or started.
    """
    global _current
    with _lock:
        if not _current:
            _current = Connection(address, num_cpus, runtime_env)
        else:
            _current.check(address, runtime_env)
        _current.users += 1
        return _current


def leave(connection: Connection) -> None:
    """Give a connection back; the last pool closes it."""
    global _current
    with _lock:
        connection.users -= 1
        if not connection.users:
            if connection.owns:
                connection.ray.shutdown()
            connection.restore_environment()
            _current = None


def requirements() -> list[str]:
    """Requirements that give a child environment the same Ray as this one has.

    Ray wants the same Python too, ``platform.python_version()``; no requirement can say that.
    """
    return [f"ray[default]=={importlib.metadata.version('ray')}"]


@contextmanager
def _translated(address: str, runtime_env: Json) -> Iterator[None]:
    """Raise what Ray raises at a connection as an error of this package."""
    try:
        yield
    except NemoRunRayError:
        raise
    except RuntimeError as error:
        # Ray's message has two blocks: the cluster's and this process's.
        versions = re.findall(r"Ray: (\S+)\s+Python: (\S+)", str(error))
        if len(versions) != 2:
            raise
        (ray, python), (own_ray, own_python) = versions
        raise VersionMismatch(
            f"The Ray at {address} is version {ray} with Python {python}; this program has "
            f"{own_ray} with Python {own_python}. Both must be the same. In an environment with "
            f"Python {python}: pip install 'ray[default]=={ray}'"
        ) from error
    except (OSError, OverflowError, ValueError, TypeError) as error:
        environment = f" with a runtime_env of {', '.join(runtime_env)}" if runtime_env else ""
        raise Unreachable(
            f"No Ray can be reached at {address}{environment}: "
            f"{' '.join(str(error).split())[:300].rstrip('.')}. Give the address of one that "
            "runs, as `ray start` has printed it (its GCS mostly has port 6379), or unset "
            f"{ADDRESS} to use an embedded Ray."
        ) from error


def _asked_for(address: str | None) -> str:
    """The address of the Ray that is asked for; ``""`` for the embedded one.

    Raises:
        ConfigError: it is not the address of a Ray.
    """
    if address in (None, "", "auto"):
        address = os.environ.get(ADDRESS, "").strip()
        if address in ("", "local"):
            return ""
    if not re.fullmatch(r"(?!.*:8265$)(?:ray://)?(?:[^/:\[\]]+|\[[^/\]]+\]):\d{1,5}", str(address)):
        raise ConfigError(
            f"The address of a Ray is {address!r}; expected is ip:port of its GCS on a node of the "
            "cluster, or ray://host:10001 from elsewhere. What begins with http://, and port 8265, "
            "is a dashboard's, which takes jobs and not calls: a task of RayExecutor is on the "
            "cluster, and work.connect() in it needs no address."
        )
    return str(address)
