"""An embedded Ray on this machine, for one user and one Python environment.

How processes find and leave it, and who stops it, is in ``local_state.py``.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from nemo_run.config import get_nemorun_home
from nemo_run.core.frontend.console.api import CONSOLE

from nemo_run_ray.clusters import local_watch
from nemo_run_ray.clusters.base import Cluster, ClusterArchive, Dashboard
from nemo_run_ray.clusters.local_state import (
    MARKER,
    RAY_FOLDER,
    LocalState,
    StateFolder,
    children,
    end_of_log,
    env_tries,
    raylet_of,
)
from nemo_run_ray.clusters.local_watch import ask, process_identity
from nemo_run_ray.errors import ClusterError, ConfigError
from nemo_run_ray.fields import is_amount, strict_init
from nemo_run_ray.remote.dashboard import EMBEDDED

#: Linux limits the name of a Unix socket to 107 bytes; Ray puts up to 75 behind its folder.
_TEMP_ROOT_MAX_BYTES = 107 - 75
#: File in Ray's folder with the address of its GCS, and seconds in which it must be there.
_CURRENT, _CURRENT_S = "ray_current_cluster", 20.0
_START_LIMIT_S = 120.0
#: A raylet gives its agents 15 s to start, whatever its options are (Ray 2.60), and on a busy
#: machine they may need longer: a start that fails after more seconds than these is tried again.
_SLOW_S, _STARTS = 10.0, 3
#: Seconds for an answer of the dashboard.
_ANSWER_S = 5.0
_PORTS_TRIED = 100


@strict_init
@dataclass(kw_only=True)
class LocalCluster(Cluster):
    """An embedded Ray, started when it is needed. Token authentication is always on.

    The dashboard listens on 127.0.0.1, and other parts of Ray on all interfaces. A client that
    stays attached stops the cluster when the last user leaves and nothing runs on it. After a
    detached run, or when a client was killed, it stops when it has been idle for
    ``idle_timeout_s``. ``keep=True`` and ``nemo-run-ray up`` keep it.
    """

    kind: ClassVar[str] = "local"
    python = sys.executable
    runs_here = True

    #: CPUs that Ray may give away; ``None`` is all of this machine's.
    num_cpus: int | None = None
    #: GPUs that Ray may give away; ``None`` is what Ray finds.
    num_gpus: int | None = None
    #: Leave it running at the end; ``nemo-run-ray down`` stops it.
    keep: bool = False
    #: Seconds without a user and without a running job after which it stops; only the program that
    #: starts it decides.
    idle_timeout_s: float = 600.0
    #: Folder of its state; ``None`` is ``ray_local/<environment>`` in NeMo-Run's home.
    state_dir: str | None = None

    def __post_init__(self) -> None:
        for name in ("num_cpus", "num_gpus"):
            value = getattr(self, name)
            least = 1 if name == "num_cpus" else 0
            whole = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and (not whole or value < least):
                raise ConfigError(
                    f"LocalCluster.{name} is {value!r}; allowed is a whole number from {least}, or "
                    "None for all that this machine has."
                )
        if not isinstance(self.keep, bool):
            raise ConfigError(f"LocalCluster.keep is {self.keep!r}; allowed is True or False.")
        if not is_amount(self.idle_timeout_s) or not self.idle_timeout_s:
            raise ConfigError(
                f"LocalCluster.idle_timeout_s is {self.idle_timeout_s!r}; allowed is a number of "
                "seconds above 0."
            )

    def connect(self) -> Dashboard:
        with self._folder.locked():
            state = self._folder.read()
            if state is None:
                self._folder.remove_dead()
                return self._dashboard(self._start())
            if (self.num_cpus, self.num_gpus) not in ((None, None), tuple(state.size)):
                CONSOLE.log(
                    f"The embedded Ray is up with num_cpus, num_gpus = {state.size}, not with "
                    f"{[self.num_cpus, self.num_gpus]}. To change that: nemo-run-ray down"
                )
            self._folder.join(state, self.keep)
        return self._dashboard(state)

    def find(self) -> Dashboard | None:
        state = self._folder.read()
        return None if state is None else self._dashboard(state)

    def archive(self, session: str = "") -> ClusterArchive | None:
        return self._folder.archive(session)

    def record(self) -> dict[str, Any]:
        return {"kind": self.kind, "state_dir": str(self._folder.path)}

    def detach(self) -> None:
        with self._folder.locked():
            state = self._folder.read()
            if state is not None and not state.keep and not state.detached:
                state.detached = True
                self._folder.write(state)
                CONSOLE.log(
                    "The embedded Ray stays up for it, and stops when it has been idle for a while."
                )

    def driver_environment(self) -> dict[str, str]:
        """The variables by which a Ray program on this machine finds it, while it runs.

        Raises:
            ClusterError: it does not run.
        """
        deadline = time.monotonic() + _CURRENT_S
        while (state := self._folder.read()) is not None:
            # `ray start` writes it last of all, a moment after a node can run jobs.
            with contextlib.suppress(FileNotFoundError):
                address = Path(state.root, RAY_FOLDER, _CURRENT).read_text(encoding="utf-8")
                return {"RAY_ADDRESS": address.strip(), **self._folder.credentials()}
            if time.monotonic() >= deadline:
                break
            time.sleep(0.1)
        raise ClusterError(
            "The embedded Ray has ended, or does not say where its GCS is. Run the program again; "
            "if that does not help: nemo-run-ray down, and then the program."
        )

    def stop(self) -> None:
        """Stop it now, with all that runs on it, if there is one."""
        with self._folder.locked():
            self._folder.remove_dead()

    def stop_unused(self) -> None:
        """Stop it, unless somebody uses it, keeps it or runs a job on it."""
        self._folder.leave(os.getpid(), is_idle=True)

    @property
    def _folder(self) -> StateFolder:
        if self.state_dir is not None:
            return StateFolder(Path(self.state_dir))
        environment = hashlib.sha256(sys.prefix.encode()).hexdigest()[:8]
        return StateFolder(Path(get_nemorun_home()) / "ray_local" / environment)

    def _dashboard(self, state: LocalState) -> Dashboard:
        headers = {"Authorization": f"Bearer {self._folder.token()}"}
        why_dead = partial(self._folder.why_dead, state)
        return Dashboard(state.url, headers, why_dead=why_dead, env_tries=state.env_tries)

    def _start(self) -> LocalState:
        """Start Ray, wait until a node has joined it, and join it too. The lock is held."""
        CONSOLE.log("Starting an embedded Ray on this machine (about 10 s) …")
        for _ in range(_STARTS - 1):
            began = time.monotonic()
            try:
                return self._start_once()
            except ClusterError:
                if not _SLOW_S <= time.monotonic() - began < _START_LIMIT_S:
                    raise
            CONSOLE.log("Ray was too slow on this busy machine. Starting it again …")
        return self._start_once()

    def _start_once(self) -> LocalState:
        root = _temp_root()
        port = _free_port()
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
        command += ["--port=0", "--dashboard-agent-listen-port=0"]
        # Ray's default, 10001, may be another Ray's, and `ray start` ends when it cannot have it.
        command += [f"--ray-client-server-port={_free_port()}"]
        command += ["--dashboard-host=127.0.0.1", f"--dashboard-port={port}"]
        command += [
            "--include-dashboard=true",
            "--disable-usage-stats",
            f"--temp-dir={root}/{RAY_FOLDER}",
        ]
        for flag, value in (("num-cpus", self.num_cpus), ("num-gpus", self.num_gpus)):
            if value is not None:
                command.append(f"--{flag}={value}")
        # This is written first: if this client dies here, the next one finds what to clean up.
        size = [self.num_cpus, self.num_gpus]
        url, tries = f"http://127.0.0.1:{port}", env_tries()
        state = LocalState(pid=0, born="", url=url, root=root, size=size, env_tries=tries)
        try:
            self._folder.write(state)
            process = self._launch(command, root)
            state.pid, state.born = process.pid, process_identity(process.pid) or ""
            self._folder.write(state)
            self._await_node(state, process)
            state.raylet = raylet_of(process.pid)
            self._folder.join(state, self.keep)
            self._watch(root)
        except BaseException:
            self._folder.stop(state)
            raise
        return state

    def _launch(self, command: list[str], root: str) -> subprocess.Popen[bytes]:
        with self._folder.new_log() as log:
            process = subprocess.Popen(
                command,
                env=self._folder.environment(root),
                cwd=root,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        children[process.pid] = process
        return process

    def _watch(self, root: str) -> None:
        """Start what ends this Ray when it is idle. It ends with the Ray, by its environment."""
        file, home = str(local_watch.__file__), str(self._folder.path)
        words = [sys.executable, "-I", "-S", file, home, root, str(self.idle_timeout_s)]
        subprocess.run(
            ["sh", "-c", '"$@" </dev/null >/dev/null 2>&1 &', "sh", *words],
            env={**os.environ, EMBEDDED: root},
            cwd="/",
            start_new_session=True,
            check=False,
        )

    def _await_node(self, state: LocalState, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + _START_LIMIT_S
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise ClusterError(
                    "The embedded Ray did not start: `ray start` ended with exit code "
                    f"{process.returncode}. Correct what its log names, or give RayExecutor "
                    f"the address of a cluster. {end_of_log(self._folder.log)}"
                )
            with contextlib.suppress(OSError, KeyError, TypeError):  # not listening yet
                # The dashboard may answer for long before a node can run a job.
                nodes = ask(f"{state.url}/api/v0/nodes", self._folder.token(), _ANSWER_S)
                if any(node["state"] == "ALIVE" for node in nodes["data"]["result"]["result"]):
                    ask(f"{state.url}/api/jobs/", self._folder.token(), _ANSWER_S)
                    return
            time.sleep(0.1)
        raise ClusterError(
            f"No node joined the embedded Ray at {state.url} within {_START_LIMIT_S:.0f} s. "
            f"{end_of_log(self._folder.log)}"
        )


def _temp_root() -> str:
    for folder in (tempfile.gettempdir(), "/tmp"):
        root = tempfile.mkdtemp(prefix="nray-", dir=folder)  # 0700, whatever Ray makes inside
        if len(os.fsencode(root)) <= _TEMP_ROOT_MAX_BYTES:
            Path(root, MARKER).touch()
            return root
        os.rmdir(root)
    raise ClusterError(
        f"No folder with a short enough path for Ray's sockets: {tempfile.gettempdir()} and /tmp "
        f"need {_TEMP_ROOT_MAX_BYTES} bytes or less with our name in it. Set TMPDIR to a short one."
    )


def _free_port() -> int:
    """A port that is free now, and that the kernel gives to no connection until Ray takes it.

    Ray's workers have those from 10002 to 19999.
    """
    with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
        end = int(file.read().split()[0])
    ports = range(20000, end)
    for port in random.sample(ports, min(len(ports), _PORTS_TRIED)):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    with socket.socket() as probe:  # the kernel gives all of them to connections
        probe.bind(("", 0))
        found: int = probe.getsockname()[1]
        return found
