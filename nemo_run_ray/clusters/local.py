"""An embedded Ray on this machine, for one user and one Python environment.

All processes of the user find the same one through a folder of NeMo-Run's home::

    ray_local/<environment>/
        lock          held while somebody starts, joins, leaves or stops it
        state.json    where it is, who uses it, whether it is to be kept
        token         what every request must carry; for the owner only
        ray.log       what Ray printed at its start

A state file is believed only when the process that it names was born when it says. Whoever leaves
last stops the cluster, unless it is to be kept or something still runs on it.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import psutil
from filelock import FileLock, Timeout
from nemo_run.config import get_nemorun_home
from nemo_run.core.frontend.console.api import CONSOLE

from nemo_run_ray.checks import named_fields
from nemo_run_ray.clusters.base import Cluster, Dashboard
from nemo_run_ray.errors import ClusterError, ConfigError

#: Linux limits the name of a Unix socket to 107 bytes; Ray puts up to 75 behind its folder.
_TEMP_ROOT_MAX_BYTES = 107 - 75
#: In the environment of every process of an embedded Ray, so that a stop finds them all.
_MARK = "NEMO_RUN_RAY_LOCAL"
_START_LIMIT_S = 120.0
_STOP_LIMIT_S = 20.0
_LOCK_LIMIT_S = 180.0
#: Clusters that this process started, by pid: it is their parent and has to collect them.
_children: dict[int, subprocess.Popen[bytes]] = {}


@named_fields
@dataclass(kw_only=True)
class LocalCluster(Cluster):
    """An embedded Ray, started when it is needed. Token authentication is always on.

    The dashboard listens on 127.0.0.1. A client that stays attached stops the cluster when the last
    user leaves and nothing runs on it; ``keep=True``, a detached run or ``nemo-run-ray up`` keep
    it.
    """

    kind: ClassVar[str] = "local"

    #: CPUs that Ray may give away; ``None`` is all of this machine's.
    num_cpus: int | None = None
    #: GPUs that Ray may give away; ``None`` is what Ray finds.
    num_gpus: int | None = None
    #: Leave it running at the end; ``nemo-run-ray down`` stops it.
    keep: bool = False
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

    @property
    def python(self) -> str | None:
        return sys.executable

    @property
    def runs_here(self) -> bool:
        return True

    def connect(self) -> Dashboard:
        with self._home.locked():
            state = self._home.read()
            if state is None:
                self._home.bury()
                state = self._start()
            elif (self.num_cpus, self.num_gpus) not in ((None, None), tuple(state.size)):
                CONSOLE.log(
                    f"The embedded Ray is up with num_cpus, num_gpus = {state.size}, not with "
                    f"{[self.num_cpus, self.num_gpus]}. To change that: nemo-run-ray down"
                )
            self._home.join(state, self.keep)
        return self._dashboard(state)

    def find(self) -> Dashboard | None:
        state = self._home.read()
        return None if state is None else self._dashboard(state)

    def record(self) -> dict[str, Any]:
        return {"kind": self.kind, "state_dir": str(self._home.path)}

    def release(self, detach: bool) -> None:
        if not detach:
            return
        with self._home.locked():
            state = self._home.read()
            if state is not None and not state.keep:
                state.keep = True
                self._home.write(state)
                CONSOLE.log("The embedded Ray stays up for it. Stop it with: nemo-run-ray down")

    def stop(self) -> None:
        """Stop it now, with all that runs on it, if there is one."""
        with self._home.locked():
            self._home.bury()

    @property
    def _home(self) -> _Home:
        if self.state_dir is not None:
            return _Home(Path(self.state_dir))
        environment = hashlib.sha256(sys.prefix.encode()).hexdigest()[:8]
        return _Home(Path(get_nemorun_home()) / "ray_local" / environment)

    def _dashboard(self, state: _State) -> Dashboard:
        return Dashboard(state.url, {"Authorization": f"Bearer {self._home.token()}"})

    def _start(self) -> _State:
        """Start Ray and wait until its dashboard answers. The lock is held."""
        CONSOLE.log("Starting an embedded Ray on this machine (about 10 s) …")
        root = _temp_root()
        port = _free_port()
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
        command += ["--port=0", "--dashboard-agent-listen-port=0"]
        command += ["--dashboard-host=127.0.0.1", f"--dashboard-port={port}"]
        command += ["--include-dashboard=true", "--disable-usage-stats", f"--temp-dir={root}/r"]
        for flag, value in (("num-cpus", self.num_cpus), ("num-gpus", self.num_gpus)):
            if value is not None:
                command.append(f"--{flag}={value}")
        # Written first: whoever comes after a client that dies here finds what to clean up.
        size = [self.num_cpus, self.num_gpus]
        state = _State(pid=0, born="", url=f"http://127.0.0.1:{port}", root=root, size=size)
        self._home.write(state)
        with open(self._home.log, "wb") as log:
            process = subprocess.Popen(
                command,
                env=self._home.environment(root),
                cwd=root,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        _children[process.pid] = process
        state.pid, state.born = process.pid, _birth(process.pid) or ""
        self._home.write(state)
        try:
            self._await_dashboard(state, process)
        except BaseException:
            self._home.stop(state)
            raise
        return state

    def _await_dashboard(self, state: _State, process: subprocess.Popen[bytes]) -> None:
        import httpx

        dashboard = self._dashboard(state)
        deadline = time.monotonic() + _START_LIMIT_S
        with httpx.Client(headers=dashboard.headers, trust_env=False, timeout=5) as client:
            while time.monotonic() < deadline:
                if process.poll() is not None:
                    raise ClusterError(
                        "The embedded Ray did not start: `ray start` ended with exit code "
                        f"{process.returncode}. Its last words: {self._home.last_words()}. Mend "
                        "that, or give RayExecutor the address of a cluster."
                    )
                try:
                    # The job table needs more than the version: the head's agent must be up too.
                    if client.get(f"{state.url}/api/jobs/").status_code == 200:
                        return
                except httpx.TransportError:
                    pass  # not listening yet
                time.sleep(0.1)
        raise ClusterError(
            f"The embedded Ray did not answer at {state.url} within {_START_LIMIT_S:.0f} s. Its "
            f"last words: {self._home.last_words()}. Its log is {self._home.log}."
        )


@dataclass
class _State:
    """What ``state.json`` holds."""

    pid: int
    born: str
    url: str
    root: str
    size: list[int | None] = field(default_factory=lambda: [None, None])
    keep: bool = False
    users: list[list[Any]] = field(default_factory=list)


class _Home:
    """The folder that all processes of the user meet in."""

    #: Folders that this process has joined and will leave at its end.
    _joined: ClassVar[set[tuple[int, Path]]] = set()

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = path / "ray.log"
        self._state = path / "state.json"
        self._token = path / "token"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Alone in the folder, among all processes.

        Raises:
            ClusterError: another process has held it for ``_LOCK_LIMIT_S``.
        """
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = FileLock(self.path / "lock", timeout=_LOCK_LIMIT_S)
        try:
            lock.acquire()
        except Timeout as error:
            raise ClusterError(
                f"Another process has been starting or stopping the embedded Ray for "
                f"{_LOCK_LIMIT_S:.0f} s (lock {self.path / 'lock'}); end it or wait for it."
            ) from error
        try:
            yield
        finally:
            lock.release()

    def read(self) -> _State | None:
        """The state of a cluster that lives, else ``None``."""
        state = self._read_any()
        return state if state is not None and _lives(state.pid, state.born) else None

    def bury(self) -> None:
        """Remove what a cluster left whose first process was killed. The lock is held."""
        state = self._read_any()
        if state is not None:
            self.stop(state)

    def _read_any(self) -> _State | None:
        try:
            return _State(**json.loads(self._state.read_text(encoding="utf-8")))
        except (FileNotFoundError, ValueError, TypeError):
            return None  # none, or not one of ours: then nobody has joined it

    def write(self, state: _State) -> None:
        temporary = self._state.with_suffix(".new")
        temporary.write_text(json.dumps(vars(state)), encoding="utf-8")
        temporary.replace(self._state)

    def token(self) -> str:
        return self._token.read_text(encoding="utf-8").strip()

    def environment(self, root: str) -> dict[str, str]:
        """The environment of the embedded Ray; writes a new token."""
        self._token.unlink(missing_ok=True)
        with open(os.open(self._token, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        dropped = ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_API_SERVER_ADDRESS")
        env = {name: value for name, value in os.environ.items() if name not in dropped}
        return env | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self._token),
            "RAY_USAGE_STATS_ENABLED": "0",
            "TMPDIR": root,  # Ray's helpers leave folders in it; jobs get the caller's again
            "NEMO_RUN_RAY_TMPDIR": os.environ.get("TMPDIR", ""),
            _MARK: root,
        }

    def last_words(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return " / ".join(line.strip() for line in lines[-5:]) or "none"

    def join(self, state: _State, keep: bool) -> None:
        """Note that this process uses the cluster, until its end."""
        me = [os.getpid(), _birth(os.getpid()) or ""]
        if me not in state.users or (keep and not state.keep):
            state.users = [user for user in state.users if _lives(*user)]
            state.users.append(me)
            state.keep = state.keep or keep
            self.write(state)
        if (os.getpid(), self.path) not in self._joined:
            self._joined.add((os.getpid(), self.path))
            atexit.register(self._leave, os.getpid())

    def stop(self, state: _State) -> None:
        """End the cluster's processes and remove what they left. The lock is held."""
        if _lives(state.pid, state.born):
            _signal(psutil.Process(state.pid).terminate)
        deadline = time.monotonic() + _STOP_LIMIT_S
        while _marked(state.root):
            if time.monotonic() > deadline or not _lives(state.pid, state.born):
                for process in _marked(state.root):
                    _signal(process.kill)
            time.sleep(0.05)
        if state.pid in _children:
            _children.pop(state.pid).wait()
        shutil.rmtree(state.root, ignore_errors=True)
        self._token.unlink(missing_ok=True)
        self._state.unlink(missing_ok=True)

    def _leave(self, pid: int) -> None:
        if pid != os.getpid():
            return  # a forked child runs our exit handlers too
        with self.locked():
            state = self.read()
            if state is None:
                return
            state.users = [user for user in state.users if user[0] != pid and _lives(*user)]
            if state.users or state.keep or self._is_busy(state):
                self.write(state)
            else:
                self.stop(state)

    def _is_busy(self, state: _State) -> bool:
        """Whether jobs run on it; when it cannot tell, it is left alone."""
        import httpx

        headers = {"Authorization": f"Bearer {self.token()}"}
        try:
            answer = httpx.get(f"{state.url}/api/jobs/", headers=headers, trust_env=False)
            jobs = answer.raise_for_status().json()
        except (httpx.HTTPError, ValueError) as error:
            CONSOLE.log(
                f"The embedded Ray at {state.url} does not say whether jobs run on it ({error}); "
                "it stays up. Stop it with: nemo-run-ray down"
            )
            return True
        busy = [job for job in jobs if job["status"] in ("PENDING", "RUNNING")]
        if busy:
            CONSOLE.log(
                f"{len(busy)} job(s) still run on the embedded Ray, which stays up for them. Stop "
                "it with: nemo-run-ray down"
            )
        return bool(busy)


def _birth(pid: int) -> str | None:
    """Names the process of that pid for good; ``None`` when there is none, or a zombie.

    Ticks since the boot, and which boot: a wall clock that is set does not change them.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    if fields[0] in (b"Z", b"X"):
        return None
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{int(fields[19])}"


def _lives(pid: int, born: str) -> bool:
    """Whether the process of that pid is the one that was born then."""
    return born == _birth(pid)


def _marked(root: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            is_marked = process.environ().get(_MARK) == root
            if is_marked and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # ended, or another user's
    return found


def _signal(send: Callable[[], None]) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):  # it was faster
        send()


def _temp_root() -> str:
    for folder in (tempfile.gettempdir(), "/tmp"):
        root = tempfile.mkdtemp(prefix="nray-", dir=folder)  # 0700, whatever Ray makes inside
        if len(os.fsencode(root)) <= _TEMP_ROOT_MAX_BYTES:
            return root
        os.rmdir(root)
    raise ClusterError(
        f"No folder with a short enough path for Ray's sockets: {tempfile.gettempdir()} and /tmp "
        f"need {_TEMP_ROOT_MAX_BYTES} bytes or less with our name in it. Set TMPDIR to a short one."
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
