"""The folder in which all processes of a user meet for one embedded Ray::

    ray_local/<environment>/
        lock          held while a process starts, joins, leaves or stops it
        state.json    where it is, who uses it, whether it is to be kept
        left/         what is known of those that are over, see ``left_behind.py``
        token         what every request must carry; for the owner only
        ray.log       what Ray printed at its start

A state file is believed only when the process that it names has the identity that it says. The last
process to leave stops the cluster, unless it is to be kept or something still runs on it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from nemo_run.core.frontend.console.api import CONSOLE

from nemo_run_ray.clusters import left_behind
from nemo_run_ray.clusters.left_behind import RAY_FOLDER
from nemo_run_ray.clusters.local_dashboard import jobs_of
from nemo_run_ray.clusters.start_log import end_of_log
from nemo_run_ray.errors import ClusterError, ConfigError, Unanswered
from nemo_run_ray.remote.files import write_file
from nemo_run_ray.remote.node.supervise import descendants, kill, marked
from nemo_run_ray.remote.states import is_active
from nemo_run_ray.remote.trust import open_own, why_untrusted
from nemo_run_ray.remote.variables import (
    DASHBOARD,
    EMBEDDED,
    ENDS_AT,
    LASTS_S,
    LIFE,
    RENEWS,
    RUN,
)

#: Ray's variable for how often it builds a runtime environment.
_TRIES = "RUNTIME_ENV_RETRY_TIMES"
#: Variables of a cluster in which this program may run itself.
_OF_ANOTHER = {"RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_API_SERVER_ADDRESS"}
_OF_ANOTHER |= {DASHBOARD, LIFE, RUN, ENDS_AT, LASTS_S, RENEWS}
_STOP_LIMIT_S = 20.0
_LOCK_LIMIT_S = 180.0
#: Seconds in which `ray start` notices that a process of its own has died.
_LAST_WORDS_S = 3.0
#: Seconds after which a user who waits for the folder is told what for.
_SILENT_S = 1.0
#: Pids of `ray start` processes that outlive their raylet and have no more to say.
_silent: set[int] = set()
#: Clusters that this process started, by pid: it is their parent and has to collect them.
children: dict[int, subprocess.Popen[bytes]] = {}


@dataclass
class LocalState:
    """What ``state.json`` holds: the process of ``ray start`` is named by its pid and identity."""

    pid: int
    born: str
    url: str
    root: str
    #: Pid and identity of its raylet, without which nothing runs; `ray start` goes on without it.
    raylet: list[Any] = field(default_factory=list)
    size: list[int | None] = field(default_factory=lambda: [None, None])
    #: How often it builds a runtime environment; ``None`` of one that an older version started.
    env_tries: int | None = None
    keep: bool = False
    #: A run was detached: it outlives its last user, until it is idle.
    detached: bool = False
    users: list[list[Any]] = field(default_factory=list)

    @property
    def lives(self) -> bool:
        """Whether the cluster may run jobs."""
        return _lives(self.pid, self.born) and (not self.raylet or _lives(*self.raylet))

    def dead_process(self, ray_log: Path) -> tuple[str, Path]:
        """The process that a cluster has died by, and the log that says why."""
        if not self.raylet or not _lives(self.pid, self.born):
            return f"process {self.pid}", ray_log
        logs = sorted(Path(self.root, RAY_FOLDER).glob("session_2*/logs/raylet.out"))
        return f"raylet (process {self.raylet[0]})", logs[-1] if logs else ray_log


class Home:
    """The folder that all processes of the user meet in."""

    #: Folders that this process has joined and will leave at its end.
    _joined: ClassVar[set[tuple[int, Path]]] = set()

    def __init__(self, path: Path) -> None:
        self.path = path = path.absolute()  # Ray's processes run in another folder
        self.log = path / "ray.log"
        self._state = path / "state.json"
        self._token = path / "token"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder alone, among all processes.

        Raises:
            ConfigError: the folder cannot be made or written to.
            ClusterError: another process has held it for ``_LOCK_LIMIT_S``.
        """
        from filelock import FileLock, Timeout

        lock = FileLock(self.path / "lock", timeout=_LOCK_LIMIT_S)
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._require_trusted()
            try:
                lock.acquire(timeout=_SILENT_S)
            except Timeout:
                CONSOLE.log("Another process is starting or stopping the embedded Ray; waiting …")
                lock.acquire()
        except Timeout as error:
            raise ClusterError(
                f"Another process has been starting or stopping the embedded Ray for "
                f"{_LOCK_LIMIT_S:.0f} s (lock {self.path / 'lock'}); end it or wait for it."
            ) from error
        except OSError as error:
            raise _unusable(self.path, error) from error
        try:
            yield
        finally:
            lock.release()

    def read(self) -> LocalState | None:
        """The state of a cluster that lives, else ``None``."""
        state = self._read_any()
        return state if state is not None and state.lives else None

    def remove_dead(self) -> None:
        """Stop the cluster, or remove what one has left that died. The lock is held."""
        state = self._read_any()
        if state is not None:
            self.stop(state)

    def _require_trusted(self) -> None:
        why = why_untrusted(str(self.path))
        if why:
            raise ConfigError(
                f"The embedded Ray cannot use its folder {self.path}. {why}. NEMORUN_HOME (or "
                "LocalCluster.state_dir, where you gave it) says where it is."
            )

    def _read_any(self) -> LocalState | None:
        self._require_trusted()
        try:
            return LocalState(**json.loads(self._state.read_text(encoding="utf-8")))
        except (FileNotFoundError, ValueError, TypeError):
            return None  # none, or another program's: then no process has joined it
        except OSError as error:
            raise _unusable(self.path, error) from error

    def write(self, state: LocalState) -> None:
        with _writing(self.path):
            write_file(self._state, json.dumps(vars(state)))

    def new_log(self) -> BinaryIO:
        """An empty log for the process that is about to start."""
        with _writing(self.path):
            return open(self.log, "wb")

    def token(self) -> str:
        return self._token.read_text(encoding="utf-8").strip()

    def credentials(self) -> dict[str, str]:
        """The variables by which Ray, and its programs, have the token."""
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self._token)}

    def environment(self, root: str) -> dict[str, str]:
        """The environment of the embedded Ray; writes a new token."""
        with _writing(self.path):
            self._token.unlink(missing_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with open(open_own(str(self._token), flags), "w") as file:
                file.write(secrets.token_hex(32))
        env = {name: value for name, value in os.environ.items() if name not in _OF_ANOTHER}
        return env | {
            **self.credentials(),
            "RAY_USAGE_STATS_ENABLED": "0",
            _TRIES: str(env_tries()),
            "TMPDIR": root,  # Ray's helpers leave folders in it; jobs get the caller's again
            "NEMO_RUN_RAY_TMPDIR": os.environ.get("TMPDIR", ""),
            EMBEDDED: root,
        }

    def why_dead(self, state: LocalState) -> str:
        """Why a cluster cannot answer any more; empty while its processes live."""
        if state.lives:
            return ""
        _await_last_words(state)
        last = self._read_any()
        if last is None or last.pid != state.pid:
            return f"The embedded Ray at {state.url} has been stopped."
        process, log = state.dead_process(self.log)
        return f"The embedded Ray at {state.url} has died: its {process} is gone. {end_of_log(log)}"

    def why_gone(self, session: str) -> str:
        """Why the cluster of a session is gone, as the end of a sentence; empty if it may live, or
        if nothing is known of it."""
        told = left_behind.why(self.path, session)
        last = self._read_any()
        if told or last is None or not os.path.exists(Path(last.root, RAY_FOLDER, session)):
            return told
        if last.lives:
            return ""
        _await_last_words(last)
        return left_behind.why_dead(*last.dead_process(self.log))

    def why_down(self) -> str:
        """Why the cluster that was here last is gone; empty when it lives, or was stopped."""
        last = self._read_any()
        return "" if last is None else self.why_dead(last)

    def left_log(self, session: str, submission_id: str) -> Path | None:
        """The log of a job on a cluster that has died."""
        last = self._read_any()
        root = Path(last.root) if last is not None and not last.lives else None
        return left_behind.log_of(self.path, root, session, submission_id)

    def join(self, state: LocalState, keep: bool) -> None:
        """Note that this process uses the cluster, until its end."""
        me = [os.getpid(), process_identity(os.getpid()) or ""]
        if me not in state.users or (keep and not state.keep):
            state.users = [user for user in state.users if _lives(*user)]
            state.users.append(me)
            state.keep = state.keep or keep
            self.write(state)
        if (os.getpid(), self.path) not in self._joined:
            self._joined.add((os.getpid(), self.path))
            atexit.register(self.leave, os.getpid())

    def stop(self, state: LocalState) -> None:
        """End the cluster's processes and remove what nobody needs of it. The lock is held."""
        family = {}
        dead = None if state.lives else state.dead_process(self.log)
        if _lives(state.pid, state.born):
            # Those that changed their title have lost the environment that marks them.
            family = {pid: process_identity(pid) for pid in descendants(state.pid)}
            kill(state.pid, signal.SIGTERM)
        mark = f"{EMBEDDED}={state.root}".encode()
        deadline = time.monotonic() + _STOP_LIMIT_S
        while left := {*marked(mark), *(pid for pid, born in family.items() if _lives(pid, born))}:
            if time.monotonic() > deadline or not _lives(state.pid, state.born):
                for pid in left:
                    kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        if state.pid in children:
            children.pop(state.pid).wait()
        left_behind.keep(Path(state.root), self.path, dead)
        left_behind.remove(Path(state.root), dead is not None)
        self._token.unlink(missing_ok=True)
        self._state.unlink(missing_ok=True)

    def leave(self, pid: int, is_idle: bool = False) -> None:
        """Stop it if nobody else uses it; a detached run keeps it until it is idle."""
        if pid != os.getpid():
            return  # a forked child runs these exit handlers too
        with self.locked():
            state = self.read()
            if state is None:
                return
            state.users = [user for user in state.users if user[0] != pid and _lives(*user)]
            is_kept = state.keep or (state.detached and not is_idle)
            if state.users or is_kept or self._is_busy(state):
                self.write(state)
            else:
                self.stop(state)

    def _is_busy(self, state: LocalState) -> bool:
        """Whether jobs run on it; when that cannot be told, it is left alone."""
        try:
            jobs = jobs_of(state.url, self.token())
        except Unanswered as error:
            CONSOLE.log(
                f"The embedded Ray at {state.url} does not say whether jobs run on it ({error}); "
                "it stays up. Stop it with: nemo-run-ray down"
            )
            return True
        busy = [job for job in jobs if is_active(job)]
        if busy:
            CONSOLE.log(
                f"{len(busy)} job(s) still run on the embedded Ray, which stays up for them. Stop "
                "it with: nemo-run-ray down"
            )
        return bool(busy)


def _await_last_words(state: LocalState) -> None:
    """Wait while `ray start` may still say what has died besides the raylet; then it ends."""
    deadline = time.monotonic() + _LAST_WORDS_S
    while state.pid not in _silent and _lives(state.pid, state.born):
        if time.monotonic() > deadline:
            _silent.add(state.pid)
        time.sleep(0.05)


def _unusable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"The embedded Ray cannot use its folder {folder}: {error.strerror}. Set NEMORUN_HOME (or "
        "LocalCluster.state_dir, where you gave it) to a folder that you may write to."
    )


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:  # a full disk, another user's file
        raise _unusable(folder, error) from error


def process_identity(pid: int) -> str | None:
    """A lasting name of the process of that pid; ``None`` when there is none, or a zombie.

    It consists of the boot and the ticks since then: a wall clock that is set changes neither.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    if fields[0] in (b"Z", b"X"):
        return None
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{int(fields[19])}"


def raylet_of(pid: int) -> list[Any]:
    """The raylet that ``ray start`` has started, by its pid and identity; empty without one."""
    for child in descendants(pid):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{child}/comm").read_text().strip() == "raylet":
                return [child, process_identity(child)]
    return []


def env_tries() -> int:
    """How often an embedded Ray builds a runtime environment.

    Ray's default is three times. Each starts from nothing and takes 20 s for ``pip`` here, and pip
    itself repeats what the network drops.
    """
    given = os.environ.get(_TRIES, "")
    return int(given) if given.strip().isdecimal() else 1


def _lives(pid: int, born: str | None) -> bool:
    """Whether the process of that pid is the one with that identity."""
    return born is not None and born == process_identity(pid)
