"""An embedded Ray on this machine, for one user and one Python environment.

All processes of the user meet in one folder::

    ray_local/<environment>/
        lock          held while a process starts, joins, leaves or stops it
        state.json    where it is, who uses it, whether it is kept
        token         what every request must carry; for the owner only
        ray.log       what `ray start` printed
        archive/<session>/   the archive of one that is gone
            reason           why, as the end of a sentence
            jobs.json        its job table, if its last user stopped it
            logs/            ray.log and job-driver-<id>.log of each job

A state file is believed only when the process that it names has the identity that it says. The last
process to leave stops the cluster, unless it is kept or a job still runs.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import Any, ClassVar

from nemo_run.config import get_nemorun_home
from nemo_run.core.frontend.console.api import CONSOLE
from pydantic import NonNegativeInt, PositiveInt

from nemo_run_ray.clusters import Cluster, ClusterArchive, Dashboard
from nemo_run_ray.errors import ClusterError, ConfigError
from nemo_run_ray.fields import Allowed, PositiveSeconds, strict_init
from nemo_run_ray.remote import CALLERS_TMPDIR
from nemo_run_ray.remote.dashboard import DashboardClient, Unanswered
from nemo_run_ray.remote.files import (
    DASHBOARD,
    EMBEDDED,
    ENDS_AT,
    LASTS_S,
    LIFE,
    RENEWS,
    RUN,
    open_own,
    why_untrusted,
    write_file,
)
from nemo_run_ray.remote.local_watch import is_running, process_identity
from nemo_run_ray.remote.node.output import copy_end, log_end
from nemo_run_ray.remote.node.supervise import descendants, kill, marked
from nemo_run_ray.remote.slurm.network import can_bind
from nemo_run_ray.remote.spec import Json, job_rows, rows_in
from nemo_run_ray.remote.status import is_active

#: Ray's own folder in that of the cluster.
RAY_FOLDER = "r"
#: File in the folder of a cluster that this package has made: no other one is removed.
MARKER = ".nemo_run_ray"
#: Variables of a cluster in which this program may run itself.
_OF_ANOTHER = {"RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_API_SERVER_ADDRESS"}
_OF_ANOTHER |= {DASHBOARD, LIFE, RUN, ENDS_AT, LASTS_S, RENEWS}
_START_LIMIT_S, _LOCK_LIMIT_S = 120.0, 180.0
#: A raylet gives its agents 15 s to start, whatever its options are (Ray 2.60), and on a busy
#: machine they may need longer: a start that fails after more seconds than these is tried again.
_SLOW_S, _STARTS = 10.0, 3
#: Bytes of each log that are kept in the archive: its end.
_LOG_BYTES = 64 * 1024**2
_WATCH = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from remote.local_watch import main; main(*sys.argv[2:4], float(sys.argv[4]))"
)


class _LocalFields(Allowed):
    num_cpus: PositiveInt | None
    num_gpus: NonNegativeInt | None
    keep: bool
    idle_timeout_s: PositiveSeconds


@dataclass
class LocalState:
    """The text of ``state.json``, which names processes by their pid and identity."""

    pid: int  # of `ray start`
    born: str | None
    url: str
    root: str
    gcs: str = ""
    size: list[int | None] = field(default_factory=lambda: [None, None])
    #: Without it nothing runs, and `ray start` outlives one that ends by itself.
    raylet: list[Any] = field(default_factory=list)
    keep: bool = False
    #: A run was detached: it outlives its last user, until it is idle.
    detached: bool = False
    users: list[list[Any]] = field(default_factory=list)

    @property
    def is_alive(self) -> bool:
        """Whether it may run jobs."""
        return self.is_there and (not self.raylet or is_running(*self.raylet))

    @property
    def is_there(self) -> bool:
        """Whether ``ray start`` runs, which ends when one of Ray's processes is killed."""
        return is_running(self.pid, self.born)


@strict_init
@dataclass(kw_only=True)
class LocalCluster(Cluster):
    """An embedded Ray, started when it is needed. Token authentication is always on.

    The dashboard listens on 127.0.0.1, and other parts of Ray on all interfaces. The last program
    that uses it stops it when it ends. It stays while a job runs, also after ``detach=True``; then,
    or when a program was killed, it stops when no program uses it and no job has run for
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
        _LocalFields.check("LocalCluster", vars(self))

    @property
    def title(self) -> str:
        return "the embedded Ray"

    def connect(self) -> Dashboard:
        with self._locked():
            state = self._read()
            if not state:
                self._remove_dead()
                kept = "" if self.keep else " `nemo-run-ray up` keeps it between runs."
                CONSOLE.log(f"Starting an embedded Ray on this machine (about 10 s) …{kept}")
                return self._dashboard(self._start())
            if (self.num_cpus, self.num_gpus) not in ((None, None), tuple(state.size)):
                cpus, gpus = ("all" if size is None else size for size in state.size)
                CONSOLE.log(
                    f"The embedded Ray is up already, with {cpus} CPUs and {gpus} GPUs of this "
                    "machine, and stays as it is. To change that: nemo-run-ray down"
                )
            self._join(state)
        return self._dashboard(state)

    def find(self) -> Dashboard | None:
        state = self._read()
        return self._dashboard(state) if state else None

    def record(self) -> Json:
        return {"kind": self.kind, "state_dir": str(self._path)}

    def driver_environment(self) -> dict[str, str]:
        """The variables by which a Ray program on this machine finds it, while it runs.

        Raises:
            ClusterError: it does not run.
        """
        state = self._read()
        if not state:
            raise ClusterError("The embedded Ray has ended. Run the program again.")
        return {"RAY_ADDRESS": state.gcs, **self._credentials}

    def stop(self) -> None:
        """Stop it now, with all that runs on it, if there is one."""
        with self._locked():
            self._remove_dead()

    @property
    def _path(self) -> Path:
        """The folder that all processes of the user meet in; Ray's run in another folder."""
        if self.state_dir is not None:
            return Path(self.state_dir).absolute()
        environment = hashlib.sha256(sys.prefix.encode()).hexdigest()[:8]
        return Path(get_nemorun_home(), "ray_local", environment).absolute()

    @property
    def _log(self) -> Path:
        return self._path / "ray.log"

    @property
    def _token(self) -> Path:
        return self._path / "token"

    @property
    def _credentials(self) -> dict[str, str]:
        """The variables by which Ray, and its programs, have the token."""
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self._token)}

    def _dashboard(self, state: LocalState) -> Dashboard:
        return Dashboard(
            state.url,
            {"Authorization": f"Bearer {self._token.read_text()}"},
            why_dead=partial(self._why_dead, state),
            token_at=str(self._token),
        )

    def _start(self, tries: int = _STARTS) -> LocalState:
        """Start Ray, wait until a node has joined it, and join it too. The lock is held."""
        began = monotonic()
        folder = tempfile.gettempdir()
        # Linux limits the name of a Unix socket to 107 bytes; Ray puts up to 75 behind its folder,
        # which has 14 in that of temporary files.
        if len(os.fsencode(folder)) > 107 - 75 - 14:
            folder = "/tmp"
        root = tempfile.mkdtemp(prefix="nray-", dir=folder)  # 0700, whatever Ray makes inside
        Path(root, MARKER).touch()
        # Ray's workers have the ports from 10002 to 19999, the kernel those from 32768 on.
        ports = filter(can_bind, random.sample(range(20000, 32768), 100))
        port, dashboard_port, client_port = islice(ports, 3)
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
            *(f"--port={port}", f"--dashboard-port={dashboard_port}"),
            # Ray's default, 10001, may be another Ray's, and `ray start` ends when it is taken.
            *(f"--ray-client-server-port={client_port}", "--dashboard-agent-listen-port=0"),
            *("--include-dashboard=true", "--dashboard-host=127.0.0.1", "--disable-usage-stats"),
            f"--temp-dir={root}/{RAY_FOLDER}",
        ]
        sizes = {"cpus": self.num_cpus, "gpus": self.num_gpus}
        command += [f"--num-{name}={size}" for name, size in sizes.items() if size is not None]
        state = LocalState(
            0,
            "",
            f"http://127.0.0.1:{dashboard_port}",
            root,
            f"127.0.0.1:{port}",
            [*sizes.values()],
        )
        try:
            # This is written first: if this client dies here, the next one finds what to remove.
            self._write(state)
            with self._usable(), open(self._log, "wb") as output:
                process = subprocess.Popen(
                    command,
                    env=self._environment(root),
                    cwd=root,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            threading.Thread(target=process.wait, daemon=True).start()  # collects it
            state.pid, state.born = process.pid, process_identity(process.pid)
            self._write(state)
            self._await_node(state, process)
            for pid in descendants(state.pid):
                with suppress(OSError):
                    if not state.raylet and Path(f"/proc/{pid}/comm").read_text() == "raylet\n":
                        state.raylet = [pid, process_identity(pid)]
            self._join(state)
            # This ends the Ray when it is idle, and ends with it, by its environment.
            _detached(
                'exec "$@"',
                *(sys.executable, "-I", "-S", "-c", _WATCH, str(Path(__file__).parents[1])),
                *(str(self._path), root, str(self.idle_timeout_s)),
                env={**os.environ, EMBEDDED: root},
            )
            return state
        except BaseException as error:
            is_slow = _SLOW_S <= monotonic() - began < _START_LIMIT_S
            self._stop(state)
            if tries == 1 or not is_slow or not isinstance(error, ClusterError):
                raise
        CONSOLE.log("Ray was too slow on this busy machine. Starting it again …")
        return self._start(tries - 1)

    def _await_node(self, state: LocalState, process: subprocess.Popen[bytes]) -> None:
        """Wait for a node: the dashboard may answer for long before one can run a job."""
        deadline = monotonic() + _START_LIMIT_S
        while state.is_alive:
            with suppress(Unanswered):
                dashboard = self._client(state)
                if dashboard.alive_nodes():
                    dashboard.table()
                    return
            if monotonic() >= deadline:
                raise ClusterError(
                    f"No node joined the embedded Ray at {state.url} within {_START_LIMIT_S:.0f} "
                    f"s{log_end(self._log)}"
                )
            time.sleep(0.1)
        raise ClusterError(
            f"The embedded Ray did not start: `ray start` ended with exit code {process.wait()}. "
            "Correct what its log names, or give RayExecutor the address of a cluster"
            f"{log_end(self._log)}"
        )

    @contextmanager
    def _usable(self) -> Iterator[None]:
        """Raise a ConfigError for a full disk, or another user's file or folder."""
        try:
            why = why_untrusted(str(self._path))
            if why:
                raise PermissionError(errno.EPERM, why)
            yield
        except OSError as error:
            raise ConfigError(
                f"The embedded Ray cannot use its folder {self._path}: {error.strerror}. Set "
                "NEMORUN_HOME (or LocalCluster.state_dir, where you gave it) to a folder that you "
                "may write to."
            ) from error

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the folder alone, among all processes."""
        from filelock import FileLock, Timeout

        lock = FileLock(self._path / "lock")
        with self._usable():
            self._path.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                lock.acquire(timeout=1.0)
            except Timeout:
                CONSOLE.log("Another process is starting or stopping the embedded Ray; waiting …")
                try:
                    lock.acquire(timeout=_LOCK_LIMIT_S)
                except Timeout as error:
                    raise ClusterError(
                        "Another process has been starting or stopping the embedded Ray for "
                        f"{_LOCK_LIMIT_S:.0f} s (lock {lock.lock_file}); end it or wait for it."
                    ) from error
        try:
            yield
        finally:
            lock.release()

    def _read(self) -> LocalState | None:
        """The state of a cluster that lives, else ``None``."""
        state = self._read_any()
        return state if state and state.is_alive else None

    def _remove_dead(self) -> None:
        """Stop the cluster, or remove what one has left that died. The lock is held."""
        state = self._read_any()
        if state:
            self._stop(state)

    def _read_any(self) -> LocalState | None:
        # Without a file, or with another program's, no process has joined one.
        with self._usable(), suppress(FileNotFoundError, ValueError, TypeError):
            given = dict(json.loads((self._path / "state.json").read_text(encoding="utf-8")))
            # Another version of this package may have written it.
            known = LocalState.__dataclass_fields__
            return LocalState(**{name: value for name, value in given.items() if name in known})
        return None

    def _write(self, state: LocalState) -> None:
        with self._usable():
            write_file(self._path / "state.json", json.dumps(vars(state)))

    def _client(self, state: LocalState) -> DashboardClient:
        return DashboardClient(state.url, self._token.read_text, timeout_s=5.0)

    def _environment(self, root: str) -> dict[str, str]:
        """The environment of the embedded Ray; writes a new token."""
        self._token.unlink(missing_ok=True)
        with open(self._token, "x", opener=open_own) as file:
            file.write(secrets.token_hex(32))
        return {
            # How often Ray builds a runtime environment. Each time starts anew and takes 20 s
            # for ``pip``, which itself repeats what the network drops; Ray's default is three.
            "RUNTIME_ENV_RETRY_TIMES": "1",
            **{name: value for name, value in os.environ.items() if name not in _OF_ANOTHER},
            **self._credentials,
            "RAY_USAGE_STATS_ENABLED": "0",
            "TMPDIR": root,  # Ray's helpers leave folders in it; jobs get the caller's again
            CALLERS_TMPDIR: os.environ.get("TMPDIR", ""),
            EMBEDDED: root,
        }

    def _why_dead(self, state: LocalState) -> str:
        """Explain why a cluster cannot answer any more; empty while its processes live."""
        last = self._read_any()
        if state.is_alive:
            return ""
        if not last or last.root != state.root:
            return f"The embedded Ray at {state.url} has been stopped."
        return ClusterArchive(_died(state, self._log)).sentence

    def archive(self, session: str = "") -> ClusterArchive | None:
        """The archive of a session; an empty name is the last one, unless it was stopped."""
        last, folder = self._read_any(), self._path / "archive" / session
        with suppress(OSError):
            reason, rows = (folder / "reason").read_text(encoding="utf-8"), folder / "jobs.json"
            text = rows.read_text(encoding="utf-8") if rows.exists() else ""
            return ClusterArchive(reason, rows_in(text), _logs_in(folder))
        if not last or last.is_alive:
            return None
        with self._locked():  # until another process has stopped it
            now = self._read_any()
        if now != last:
            return self.archive(session)
        ray = Path(last.root, RAY_FOLDER, session)
        if session and not ray.exists():
            return None
        return ClusterArchive(_died(last, self._log), log=_logs_in(ray))

    def _join(self, state: LocalState) -> None:
        """Note that this process uses the cluster, until its end."""
        me = [os.getpid(), process_identity(os.getpid())]
        if me not in state.users:
            atexit.register(self._leave, os.getpid())
        state.users = [user for user in state.users if is_running(*user) and user != me] + [me]
        state.keep = state.keep or self.keep
        self._write(state)

    def _stop(self, state: LocalState, jobs: list[Any] | None = None) -> None:
        """End the cluster's processes and archive its logs and job table. The lock is held."""
        family, has_died = {}, not state.is_alive
        if state.is_there:
            # Those that changed their title have lost the environment that marks them.
            family = {pid: process_identity(pid) for pid in descendants(state.pid)}
            kill(state.pid, signal.SIGTERM)
        mark = f"{EMBEDDED}={state.root}".encode()
        deadline = monotonic() + 20.0
        while pids := {
            *marked(mark),
            *(pid for pid, born in family.items() if is_running(pid, born)),
        }:
            if monotonic() > deadline or not state.is_there:
                for pid in pids:
                    kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        archives = self._path / "archive"
        with suppress(OSError):  # on a full disk: the next start must not fail for it
            for session in Path(state.root).glob(f"{RAY_FOLDER}/session_2*"):
                folder = archives / session.name
                logs = folder / "logs"
                logs.mkdir(parents=True, exist_ok=True)
                for path in (*session.glob("logs/job-driver-*.log"), self._log):
                    if path.exists():
                        copy_end(str(path), str(logs / path.name), _LOG_BYTES)
                reason = "the embedded Ray that had it has been stopped"
                if has_died:
                    reason = _died(state, logs / self._log.name)
                if jobs is not None:
                    write_file(folder / "jobs.json", json.dumps(jobs))
                write_file(folder / "reason", reason)
            for path in sorted(archives.glob("*/reason"), key=os.path.getmtime)[:-20]:
                shutil.rmtree(path.parent, ignore_errors=True)
        if Path(state.root, MARKER).exists():
            # Environments of packages make 100,000 files of it, which nobody should wait for.
            # Programs of one that has died may still write there for some seconds.
            again = '; sleep 3; rm -rf "$1"; sleep 12; rm -rf "$1"' if has_died else ""
            _detached(f'rm -rf "$1"{again}', state.root)
        self._token.unlink(missing_ok=True)
        (self._path / "state.json").unlink(missing_ok=True)

    def detach(self) -> None:
        with self._locked():
            state = self._read()
            if state:
                state.detached = True
                self._write(state)

    def _leave(self, pid: int) -> None:
        """Stop it if it is unused, as the exit handler of a process, which its forks run too."""
        if pid == os.getpid():
            self.stop_unused(is_idle=False)

    def stop_unused(self, is_idle: bool = True) -> None:
        """Stop it, unless somebody else uses it, keeps it or runs a job on it.

        After a detached run only when it was idle: its end is noted before.
        """
        pid = os.getpid()
        with self._locked():
            state = self._read()
            if not state:
                return self._remove_dead()
            state.users = [user for user in state.users if user[0] != pid and is_running(*user)]
            if not (state.users or state.keep or (state.detached and not is_idle)):
                try:
                    jobs = self._client(state).table()
                except Unanswered as error:
                    what = f"It is not known whether jobs run on the embedded Ray ({error})"
                else:
                    busy = sum(map(is_active, job_rows(jobs)))
                    if not busy:
                        return self._stop(state, jobs)
                    what = f"{busy} job(s) still run on the embedded Ray"
                CONSOLE.log(f"{what}, which stays up. Stop it with: nemo-run-ray down")
            self._write(state)


def _detached(line: str, *words: str, env: dict[str, str] | None = None) -> None:
    """Start a line of the shell that continues without this process."""
    command = ["sh", "-c", f"{{ {line}; }} </dev/null >/dev/null 2>&1 &", "sh", *words]
    subprocess.run(command, env=env, cwd="/", start_new_session=True, check=False)


def _logs_in(folder: Path) -> Callable[[str], Path | None]:
    return lambda name: next(folder.glob(f"logs/job-driver-{name}.log"), None)


def _died(state: LocalState, its_log: Path) -> str:
    """Say that it has died, as the end of a sentence."""
    end = log_end(its_log)
    guess = "" if "\n    | " in end else "; the machine's out-of-memory killer may have ended it"
    return f"the embedded Ray at {state.url} has died: its process or raylet is gone{guess}{end}"
