"""The folder in which all processes of a user meet for one embedded Ray::

    ray_local/<environment>/
        lock          held while a process starts, joins, leaves or stops it
        state.json    where it is, who uses it, whether it is kept
        token         what every request must carry; for the owner only
        ray.log       what `ray start` printed
        archive/<session>/   what is left of one that is gone
            reason           why, as the end of a sentence
            jobs.json        its job table, if its last user stopped it
            logs/            ray.log and job-driver-<id>.log of each job, if it died

A state file is believed only when the process that it names has the identity that it says. The last
process to leave stops the cluster, unless it is kept or a job still runs.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import re
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from nemo_run.core.frontend.console.api import CONSOLE

from nemo_run_ray.clusters.base import ClusterArchive
from nemo_run_ray.clusters.local_watch import ask, lives, process_identity
from nemo_run_ray.errors import ClusterError, ConfigError
from nemo_run_ray.remote.dashboard import DASHBOARD, EMBEDDED
from nemo_run_ray.remote.files import ENDS_AT, LASTS_S, LIFE, RENEWS, RUN, replacing, write_file
from nemo_run_ray.remote.node.output import CUT
from nemo_run_ray.remote.node.supervise import descendants, kill, marked
from nemo_run_ray.remote.rows import job_rows, rows_in
from nemo_run_ray.remote.status import is_active
from nemo_run_ray.remote.trust import open_own, why_untrusted

log = logging.getLogger(__name__)

#: Ray's own folder in that of the cluster.
RAY_FOLDER = "r"
#: File in the folder of a cluster that this package has made: no other one is removed.
MARKER = ".nemo_run_ray"
#: Ray's variable for how often it builds a runtime environment.
_TRIES = "RUNTIME_ENV_RETRY_TIMES"
#: Variables of a cluster in which this program may run itself.
_OF_ANOTHER = {"RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_API_SERVER_ADDRESS"}
_OF_ANOTHER |= {DASHBOARD, LIFE, RUN, ENDS_AT, LASTS_S, RENEWS}
_STOP_LIMIT_S = 20.0
#: Seconds for an answer of the dashboard.
_ANSWER_S = 5.0
_LOCK_LIMIT_S = 180.0
#: Seconds after which a user who waits for the folder is told what for.
_SILENT_S = 1.0
#: Seconds that a caller waits for a folder's removal, which continues without it.
_REMOVE_WAIT_S = 5.0
#: Archives that are kept, those of them that keep logs, and bytes of each log: its end.
_ARCHIVES, _WITH_LOGS, _LOG_BYTES = 50, 5, 64 * 1024**2
#: Bytes of that end in which the beginning of a line is looked for.
_LINE_BYTES = 64 * 1024
#: Lines of the log of `ray start` that a message shows, and their length.
_LINES_SHOWN, _LINE_MAX = 6, 300
#: Lines in which `ray start` says how to use what it has started, or repeats information and
#: warnings that its processes had logged.
_CHATTER = re.compile(
    r"\s(INFO|SUCC) \w+\.py:\d+ -- |\[state-dump\]|\[\d{4}-\d\d-\d\d [\d:,.]+ [IW] \d"
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
#: Clusters that this process started, by pid: it is their parent and has to collect them.
children: dict[int, subprocess.Popen[bytes]] = {}


@dataclass
class LocalState:
    """The text of ``state.json``, which names ``ray start`` by its pid and identity."""

    pid: int
    born: str
    url: str
    root: str
    #: Pid and identity of its raylet, without which nothing runs; `ray start` may outlive it.
    raylet: list[Any] = field(default_factory=list)
    size: list[int | None] = field(default_factory=lambda: [None, None])
    #: Number of times that it tries to build a runtime environment.
    env_tries: int | None = None
    keep: bool = False
    #: A run was detached: it outlives its last user, until it is idle.
    detached: bool = False
    users: list[list[Any]] = field(default_factory=list)

    @property
    def lives(self) -> bool:
        """Whether the cluster may run jobs."""
        return not self.dead_process

    @property
    def dead_process(self) -> str:
        """The process that a cluster has died by; empty while it lives."""
        if not lives(self.pid, self.born):
            return f"process {self.pid}"
        is_alive = not self.raylet or lives(*self.raylet)
        return "" if is_alive else f"raylet (process {self.raylet[0]})"


class StateFolder:
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
        """Explain why a cluster cannot answer any more; empty while its processes live."""
        if state.lives:
            return ""
        last = self._read_any()
        if last is None or last.pid != state.pid:
            return f"The embedded Ray at {state.url} has been stopped."
        return ClusterArchive(_died(state, state.dead_process, self.log)).sentence

    def archive(self, session: str) -> ClusterArchive | None:
        """The archive of a session; an empty name is the last one, unless it was stopped."""
        folder = self.path / "archive" / session
        with contextlib.suppress(OSError):
            reason = (folder / "reason").read_text(encoding="utf-8")
            rows = folder / "jobs.json"
            text = rows.read_text(encoding="utf-8") if rows.exists() else ""
            return ClusterArchive(reason, rows_in(text), _logs_in(folder / "logs"))
        last = self._read_any()
        if last is None or last.lives:
            return None
        ray = Path(last.root, RAY_FOLDER, session)
        if not ray.exists() and session:
            return None
        reason = _died(last, last.dead_process, self.log)
        return ClusterArchive(reason, log=_logs_in(ray / "logs"))

    def join(self, state: LocalState, keep: bool) -> None:
        """Note that this process uses the cluster, until its end."""
        me = [os.getpid(), process_identity(os.getpid()) or ""]
        if me not in state.users or (keep and not state.keep):
            state.users = [user for user in state.users if lives(*user)]
            state.users.append(me)
            state.keep = state.keep or keep
            self.write(state)
        if (os.getpid(), self.path) not in self._joined:
            self._joined.add((os.getpid(), self.path))
            atexit.register(self.leave, os.getpid())

    def stop(self, state: LocalState, jobs: list[Any] | None = None) -> None:
        """End the cluster's processes and archive what is left of it. The lock is held.

        Args:
            state: of the cluster.
            jobs: its job table.
        """
        family = {}
        dead_process = state.dead_process
        if lives(state.pid, state.born):
            # Those that changed their title have lost the environment that marks them.
            family = {pid: process_identity(pid) for pid in descendants(state.pid)}
            kill(state.pid, signal.SIGTERM)
        mark = f"{EMBEDDED}={state.root}".encode()
        deadline = time.monotonic() + _STOP_LIMIT_S
        while pids := {*marked(mark), *(pid for pid, born in family.items() if lives(pid, born))}:
            if time.monotonic() > deadline or not lives(state.pid, state.born):
                for pid in pids:
                    kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        if state.pid in children:
            children.pop(state.pid).wait()
        self._archive(state, dead_process, jobs)
        _remove(Path(state.root), has_died=bool(dead_process))
        self._token.unlink(missing_ok=True)
        self._state.unlink(missing_ok=True)

    def _archive(self, state: LocalState, dead_process: str, jobs: list[Any] | None) -> None:
        """Archive a cluster whose processes have ended, before its folder is removed.

        What cannot be kept (a full disk) is told in a warning: the next start must not fail for it.
        """
        for session in Path(state.root).glob(f"{RAY_FOLDER}/session_*"):
            if session.is_symlink():
                continue
            folder = self.path / "archive" / session.name
            reason = "the embedded Ray that had it has been stopped"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                if dead_process:
                    logs = folder / "logs"
                    logs.mkdir(exist_ok=True)
                    for path in (*session.glob("logs/job-driver-*.log"), self.log):
                        if path.exists():
                            _copy_end(path, logs / path.name)
                    reason = _died(state, dead_process, logs / self.log.name)
                if jobs is not None:
                    write_file(folder / "jobs.json", json.dumps(jobs))
                write_file(folder / "reason", reason)
            except OSError as error:
                log.warning("What is left of the embedded Ray is not kept in %s: %s", folder, error)
        reasons = (self.path / "archive").glob("session_*/reason")
        by_age = sorted(reasons, key=lambda path: path.stat().st_mtime, reverse=True)
        newest = [path.parent for path in by_age]
        with_logs = [folder / "logs" for folder in newest if (folder / "logs").exists()]
        for folder in (*newest[_ARCHIVES:], *with_logs[_WITH_LOGS:]):
            shutil.rmtree(folder, ignore_errors=True)

    def leave(self, pid: int, is_idle: bool = False) -> None:
        """Stop it if nobody else uses it; a detached run keeps it until it is idle."""
        if pid != os.getpid():
            return  # a forked child runs these exit handlers too
        with self.locked():
            state = self.read()
            if state is None:
                return
            state.users = [user for user in state.users if user[0] != pid and lives(*user)]
            if not (state.users or state.keep or (state.detached and not is_idle)):
                try:
                    jobs = ask(f"{state.url}/api/jobs/", self.token(), _ANSWER_S)
                    busy = sum(is_active(row) for row in job_rows(jobs))
                except (OSError, ValueError) as error:
                    what = f"It is not known whether jobs run on the embedded Ray ({error})"
                else:
                    if not busy:
                        self.stop(state, jobs)
                        return
                    what = f"{busy} job(s) still run on the embedded Ray"
                CONSOLE.log(f"{what}, which stays up. Stop it with: nemo-run-ray down")
            self.write(state)


def _logs_in(folder: Path) -> Callable[[str], Path | None]:
    def log_of(submission_id: str) -> Path | None:
        path = folder / f"job-driver-{submission_id}.log"
        return path if path.is_file() else None

    return log_of


def _died(state: LocalState, process: str, its_log: Path) -> str:
    """Say that a process of it has died, as the end of a sentence."""
    return f"the embedded Ray at {state.url} has died: its {process} is gone. {end_of_log(its_log)}"


def _remove(root: Path, has_died: bool) -> None:
    """Remove the folder of a cluster; a large one is removed while the caller continues.

    Environments of packages make 100,000 files of it, for which a start would wait a minute. Of a
    cluster that has died, programs may still write there for some seconds.
    """
    if not (root / MARKER).exists():
        log.warning("%s is not removed: it is not the folder of an embedded Ray.", root)
        return
    again = 'sleep 3; rm -rf "$1"; sleep 12; rm -rf "$1";' if has_died else ""
    line = f'{{ rm -rf "$1"; {again} }} </dev/null >/dev/null 2>&1 &'
    command = ["sh", "-c", line, "sh", str(root)]
    subprocess.run(command, cwd="/", start_new_session=True, check=False)
    deadline = time.monotonic() + _REMOVE_WAIT_S
    while root.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def _copy_end(path: Path, to: Path) -> None:
    missing = max(0, path.stat().st_size - _LOG_BYTES)
    with open(path, "rb") as whole, replacing(to) as end:
        whole.seek(missing)
        if missing:
            beginning = whole.read(_LINE_BYTES)
            dropped = beginning.find(b"\n") + 1
            end.write(f"{CUT}{missing + dropped} bytes of this log are not kept\n".encode())
            end.write(beginning[dropped:])
        shutil.copyfileobj(whole, end)
    shutil.copystat(path, to)  # its time says when the job was seen last


def end_of_log(path: Path) -> str:
    """The last lines that `ray start` printed, with the path of the file."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return f"Its log {path} cannot be read: {error.strerror}."
    lines = (line.rstrip() for line in _COLOUR.sub("", text).splitlines())
    shown = [line[:_LINE_MAX] for line in lines if line and not _CHATTER.search(line)]
    if not shown:
        return (
            f"Its log {path} does not say why. A process that is killed without a word has often "
            "met the machine's out-of-memory killer."
        )
    return "\n  ".join([f"The end of its log {path}:", *shown[-_LINES_SHOWN:]])


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


def raylet_of(pid: int) -> list[Any]:
    """The raylet that ``ray start`` has started, by its pid and identity; empty without one."""
    for child in descendants(pid):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{child}/comm").read_text().strip() == "raylet":
                return [child, process_identity(child)]
    return []


def env_tries() -> int:
    """The number of times that an embedded Ray tries to build a runtime environment.

    Ray's default is three times. Each starts from nothing and takes 20 s for ``pip`` here, and pip
    itself repeats what the network drops.
    """
    given = os.environ.get(_TRIES, "")
    return int(given) if given.strip().isdecimal() else 1
