"""One node's part in the cluster: it reports, shows that it lives, starts Ray and its sidecars,
watches them and ends them."""

from __future__ import annotations

import fcntl
import json
import os
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set

from ..dashboard import DASHBOARD, EMBEDDED
from ..files import ENDS_AT, LASTS_S, RENEWS, own_folder, write_file
from ..node.output import say
from ..node.supervise import TAG, Child, Runner, Supervisor
from .folder import (
    BEAT_S,
    CLUSTER_FAILED,
    JOB_LOGS,
    READY,
    HeadAddress,
    NodeReport,
    RunEnd,
    RunFolder,
    keep_job_logs,
)
from .network import Ports, reachable, way_to
from .settings import NODE_PORTS, SANDBOX, Settings, WrongSetting

if TYPE_CHECKING:
    from ..node.probe import Probing  # most nodes do without it

#: Seconds of one turn of the loop.
TURN_S = 0.25
#: Seconds between two looks at files that seldom change.
LOOK_S = 1.0
#: Seconds from SIGTERM to SIGKILL. Slurm itself gives 30 s.
GRACE_S = 10.0
#: Seconds from the end of a ``ray start`` to the next one.
_RETRY_S = 5.0
#: Seconds that the head waits at the end until the others have ended their processes. The job's
#: script waits for the head 5 s longer.
_LEAVE_S = 20.0
#: Seconds in which a worker that reaches no address of the head tries again.
_DISCOVERY_S = 30.0
_NOT_FOUND = 127
_TEMP_ROOT = "/tmp"
#: Most seconds for the last copy of Ray's logs: the job's script waits for the head to end.
_COPY_S = 10.0
#: Copies what has changed in Ray's logs, once or with pauses. A process of its own does it, so that
#: a node still shows that it lives: the folder may be slow, and the logs large. A copy that breaks
#: off leaves a torn file that is newer than its log: all are copied again after it.
_COPY = """\
copy() {
  cd "$1" && mkdir -p "$2" || return
  newer=-u code=0
  [ ! -e "$2/.unfinished" ] || newer=
  touch "$2/.unfinished" || return
  for name in session_2*; do
    [ -d "$name/logs" ] || continue
    mkdir -p "$2/$name" && cp -rp $newer "$name/logs" "$2/$name/" || code=1
  done
  [ $code -eq 0 ] && rm "$2/.unfinished"
}
[ -n "$3" ] || { copy "$1" "$2"; exit; }
while sleep "$3"; do copy "$1" "$2"; done
"""
#: Variables that would lead Ray, or a driver, to another cluster, or describe that.
_FOREIGN = {"RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_TOKEN", DASHBOARD}
_FOREIGN |= {EMBEDDED, ENDS_AT, LASTS_S, RENEWS}
#: Prefixes of PMI's variables, and Slurm's variables of a step: counts, ranks and lists of nodes.
_PMI = ("PMI_", "PMI2_", "PMIX_", "SLURM_PMI", "SLURM_PMIX")
_COUNTS = ["SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NNODES", "SLURM_TASKS_PER_NODE"]
_COUNTS += ["SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_STEP_TASKS_PER_NODE"]
_RANKS = ("SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID")
#: Prefixes of variables by which an MPI in one of Ray's workers takes it for a rank of the step,
#: and the variables among them that only name Slurm's cluster.
_OF_STEP = ("SLURM_", "OMPI_", "MPI_", "PMI_", "PMI2_", "PMIX_")
_OF_SLURM = {"SLURM_CONF", "SLURM_CLUSTERS"}
#: The part at the end of a log in which its last lines are looked for.
_TAIL_BYTES, _TAIL_LINES = 8192, 12


class _Sidecar(NamedTuple):
    """A sidecar that was started."""

    name: str
    child: Child
    log: str
    probing: Optional[Probing]


class NodeProgram(ABC):
    """The program of one node: one loop.

    Args:
        settings: of this node.
        folder: that all nodes share.
        tag: for the environment of everything that is started.
        env: of the job.
    """

    def __init__(
        self, settings: Settings, folder: RunFolder, tag: str, env: Mapping[str, str]
    ) -> None:
        self.settings = settings
        self.folder = folder
        self.env = env
        self.children = Supervisor()
        self.report = NodeReport(host=settings.host, log=settings.node_log)
        self._tag = tag
        self._published: Optional[NodeReport] = None
        number = settings.job.partition(".")[0]
        self.ports = Ports(settings.ports, settings.is_head, int(number))
        self.ray: Optional[Child] = None
        #: The nodes among the ``watched`` that show no life.
        self.dead: Set[int] = set()
        self.starts = 0
        self.began = time.monotonic()
        self._restart_at: Optional[float] = None
        self._temp_lock: Optional[int] = None  # held as long as this process lives
        self._sidecars: List[_Sidecar] = []
        self._copies: List[Child] = []
        self._logs: Set[str] = set()
        self.leaves_at = float("inf")
        self._beaten_at = self._end_looked_at = float("-inf")

    @abstractmethod
    def announce(self) -> None:
        """Show the other nodes that this one has begun."""

    @abstractmethod
    def step(self) -> Optional[RunEnd]:
        """One turn of the loop; the end when the run is over."""

    @abstractmethod
    def ray_start_argv(self) -> List[str]:
        """``ray start`` with all its options, for the next try."""

    @abstractmethod
    def failed(self, why: str) -> RunEnd:
        """The end of the run for this node, which cannot continue."""

    @abstractmethod
    def watched(self) -> Set[int]:
        """The ranks whose life this node depends on."""

    def run(self, runner: Runner) -> int:
        """Take part until the run is over; the exit code of this node's task."""
        end = RunEnd(CLUSTER_FAILED, f"node {self.settings.host}: the node program has failed")
        try:
            end = self._begin() or self._loop(runner)
        except WrongSetting as error:
            end = self.failed(str(error))
        except OSError as error:
            end = self.failed(f"{type(error).__name__}: {error}")
        finally:
            code = self.leave(end)
        return code

    def leave(self, end: RunEnd) -> int:
        """End all processes of this node, and report it; the exit code of its task."""
        self.leaves_at = time.monotonic() + _LEAVE_S
        self.children.stop(GRACE_S)
        if self.settings.allocation:
            keep_job_logs(self.settings.temp_dir, self.folder.file(JOB_LOGS))
        if self._copies:
            left_s = max(self.leaves_at - time.monotonic(), 1.0)
            deadline = time.monotonic() + min(left_s, _COPY_S)
            copy = self._copy_logs("")
            while copy.code is None and time.monotonic() < deadline:
                time.sleep(0.05)
                self.children.reap()
        if self._temp_lock is not None:
            import shutil  # no node needs it to start

            shutil.rmtree(os.path.dirname(self.settings.temp_dir), ignore_errors=True)
        self.publish(left=True)
        return 0

    def start(
        self, argv: Sequence[str], log: str, env: Mapping[str, str], cwd: Optional[str] = None
    ) -> Child:
        """Start a command. Its log may be that of another job, so the first one truncates it."""
        mode = "ab" if log in self._logs else "wb"
        self._logs.add(log)
        with open(log, mode) as output:
            return self.children.start(argv, {**env, TAG: self._tag}, cwd, output)

    def _copy_logs(self, pause_s: object) -> Child:
        argv = ["sh", "-c", _COPY, "copy", self.settings.temp_dir, self.settings.ray_logs]
        return self.start([*argv, str(pause_s)], os.devnull, os.environ)

    def end_ray(self) -> None:
        """End Ray on this node, before it is started again."""
        beside = [*self._copies, *(sidecar.child for sidecar in self._sidecars)]
        self.children.stop(GRACE_S, keep=beside)

    def publish(self, **fields: Any) -> None:
        """Change this node's report; if it cannot be written now, a later turn writes it."""
        self.report = self.report._replace(**fields)
        if self.report != self._published:
            with suppress(OSError):
                self.folder.publish_report(self.report)
                self._published = self.report

    def say(self, text: str) -> None:
        """Write a line into the job's own log."""
        say(f"{self.settings.host}: {text}")

    def ray_env(self) -> Dict[str, str]:
        """The environment of Ray on this node, and of what runs beside it."""
        return ray_environment(self.env, self.settings, self.folder.file("token"))

    def start_ray(self) -> None:
        """Start Ray on this node.

        Raises:
            WrongSetting: there is no port for it.
        """
        self.starts += 1
        self._restart_at = None
        argv, env = self.ray_start_argv(), self.ray_env()
        argv = with_pre_start(argv, self.settings.pre_start, env)
        self.ray = self.start(argv, self.settings.node_log, env)

    def watch_ray(self) -> str:
        """The reason why Ray is over on this node; empty while it runs or is started again.

        On a busy machine `ray start` gives its own processes up after 15 to 30 s, as often as it is
        tried. So no number of tries ends it, but the time in which the cluster must be ready.
        """
        # Once the run is over, Ray has a reason to end.
        if self.ray is None or self.ray.code is None or self.folder.end() is not None:
            return ""
        log = self.settings.node_log
        how = f"has ended: {self.ray.ending}. Its log, {log}, ends with:{_tail(log)}"
        if self.ray.code == _NOT_FOUND:
            return f"there is no program 'ray', or none that a command before it needs. Ray {how}"
        if self.folder.text(READY) is not None:
            return f"Ray {how}"
        if self._restart_at is None:
            self.say(f"`ray start` has ended: {self.ray.ending}. It is started again.")
            self.publish(retried=f"try {self.starts} of `ray start` {how}")
            self.end_ray()
            self._restart_at = time.monotonic() + _RETRY_S
        elif time.monotonic() >= self._restart_at:
            self.start_ray()
        return ""

    def _begin(self) -> Optional[RunEnd]:
        """Start what comes before Ray; the end if this node cannot take part."""
        if not self._sees_script():
            return self.failed(
                f"the folder {self.settings.run} is not shared: this node has not seen within "
                f"{self.settings.share_limit_s:g} s what the job's script has written there"
            )
        self.folder.prepare()
        os.makedirs(self.settings.logs, exist_ok=True)
        self.folder.beat()
        if not self.settings.is_sidecar_step:
            if not self.env.get("RAY_TEMP_DIR"):
                self._temp_lock = make_private(os.path.dirname(self.settings.temp_dir))
            os.makedirs(self.settings.temp_dir, exist_ok=True)
            if self.settings.log_sync_s is not None:
                self._copies.append(self._copy_logs(self.settings.log_sync_s))
        self.announce()
        self._start_sidecars()
        return None

    def _sees_script(self) -> bool:
        """Wait until this node sees the file of the job's script; whether it does in time."""
        deadline = time.monotonic() + self.settings.share_limit_s
        while self.folder.text("job") is None:
            if time.monotonic() >= deadline:
                return False
            time.sleep(TURN_S)
        return True

    def _loop(self, runner: Runner) -> RunEnd:
        while True:
            order = runner.order()
            if order is not None:
                return self._cancelled(order)
            self.beat()
            self.children.reap()
            why = self._watch_sidecars()
            if why:
                return self.failed(why)
            self.publish()
            end = self._published_end() or self.step()
            if end is not None:
                return end
            time.sleep(TURN_S)

    def _cancelled(self, order: bytes) -> RunEnd:
        """Slurm, or another process, asks this program to end."""
        if not order:
            return self.failed("the watchdog of this node's processes was killed")
        at = self.settings.ends_at
        if at is not None and time.time() >= at - 1:
            return RunEnd(143, "Slurm's time limit has ended the job")
        return RunEnd(143, "the job was cancelled")

    def _published_end(self) -> Optional[RunEnd]:
        if time.monotonic() - self._end_looked_at < LOOK_S:
            return None
        self._end_looked_at = time.monotonic()
        return self.folder.end()

    def beat(self) -> None:
        """Show that this node lives, and look at those that it depends on, after a pause."""
        if time.monotonic() - self._beaten_at >= BEAT_S:
            self._beaten_at = time.monotonic()
            with suppress(OSError):  # the others notice if it fails for long
                self.folder.beat()
            self.dead = self.folder.silent(self.watched())

    def _start_sidecars(self) -> None:
        for sidecar in self.settings.sidecars:
            if sidecar.is_separate != self.settings.is_sidecar_step:
                continue
            log = self.settings.sidecar_log(sidecar, self.settings.rank, self.settings.host)
            env = {**self.ray_env(), **sidecar.env}
            child, probing = self.start(["bash", "-c", sidecar.command], log, env), None
            if sidecar.probe is not None:
                from ..node.probe import Probing

                probing = Probing(sidecar.probe, "127.0.0.1", {}, {**env, TAG: self._tag})
            self._sidecars.append(_Sidecar(sidecar.name, child, log, probing))

    def _watch_sidecars(self) -> str:
        """Ask the probes; the reason if a sidecar has died or never becomes ready."""
        for name, child, log, probing in self._sidecars:
            why: Optional[str] = None
            if child.code is not None:
                when = "" if name in self.report.ready else " before it was ready"
                why = f"has ended{when}: {child.ending}"
            elif name not in self.report.ready:
                answer = probing.step() if probing is not None else ""
                if answer == "":
                    self._sidecar_is_ready(name)
                elif answer is not None:
                    why = f"is {answer}"
            if why is not None:
                return f"the sidecar {name} {why}. Its log, {log}, ends with:{_tail(log)}"
        return ""

    def _sidecar_is_ready(self, name: str) -> None:
        self.publish(ready=(*self.report.ready, name))
        folder = self.settings.sandbox_ports
        if name == SANDBOX and folder:
            with suppress(OSError):  # for others to read; we have our own file
                write_file(os.path.join(folder, f"SANDBOX_READY_{self.settings.host}"), "")


class Worker(NodeProgram):
    """A node that is not the head: it joins the head's Ray, and stays while the head lives.

    In the step for sidecars it only runs those.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._head: Optional[HeadAddress] = None
        self._address = ""
        self._was_ready = False
        self._looked_at = float("-inf")

    def announce(self) -> None:
        self.publish()

    def step(self) -> Optional[RunEnd]:
        if self.settings.is_sidecar_step:
            return None
        if 0 in self.dead:
            why = f"the head's program writes nothing into {self.settings.run} any more"
            self.say(f"{why}; this node ends its processes.")
            return RunEnd(CLUSTER_FAILED, why)
        if self._head is None:
            self._join(self.folder.report_of(0))
            return None
        self._follow()
        why = self.watch_ray()
        return self.failed(why) if why else None

    def ray_start_argv(self) -> List[str]:
        assert self._head is not None
        argv = ["ray", "start", f"--address={self._head.gcs}", f"--node-ip-address={self._address}"]
        return argv + node_options(self.settings, self.ports.choose())

    def failed(self, why: str) -> RunEnd:
        """Report it to the head, which decides; without a shared folder only the log has it."""
        end = self.folder.end()
        if end is not None:  # the head has ended, and Ray with it
            return end
        self.say(why)
        self.publish(failed=why)
        return RunEnd(CLUSTER_FAILED, why)

    def leave(self, end: RunEnd) -> int:
        if self.folder.end() is None and not self.report.failed:
            self.publish(failed=end.why)  # the other nodes continue, and must know why it does not
        return super().leave(end)

    def watched(self) -> Set[int]:
        return {0}

    def _join(self, head: Optional[NodeReport]) -> None:
        elapsed_s = time.monotonic() - self.began
        if head is None:  # one that has begun gives the start up itself, and knows why
            if elapsed_s >= self.settings.start_limit_s:
                raise WrongSetting(f"no head was there within {self.settings.start_limit_s:g} s")
            return
        if self.report.reached is None and head.test_port:
            reached = reachable(head.candidates, head.test_port)
            if reached or elapsed_s >= _DISCOVERY_S:
                self.publish(reached=reached)
        if head.ray:
            self._head = HeadAddress(*head.ray)
            self._address = way_to(self._head.address)
            self.publish(address=self._address)
            self.start_ray()

    def _follow(self) -> None:
        """Join again if the head has started its Ray again; after it was ready it never does.

        A `ray start` that waits for the Ray before, or has joined it, would not notice for minutes.
        """
        if time.monotonic() - self._looked_at < LOOK_S or self._was_ready:
            return
        self._looked_at = time.monotonic()
        self._was_ready = self.folder.text(READY) is not None
        head = self.folder.report_of(0)
        if head is not None and head.ray and HeadAddress(*head.ray) != self._head:
            self.say("The head has started Ray again, and so does this node.")
            self._head = HeadAddress(*head.ray)
            self.end_ray()
            self.start_ray()


def temp_dir_of(job: str) -> str:
    """Ray's folder; short, since Linux limits the names of the sockets inside.

    It lies in a folder of this user alone: Ray lets everybody write into its own.
    """
    return os.path.join(own_folder(os.path.join(_TEMP_ROOT, f"nrr-{os.getuid()}-{job}")), "r")


def make_private(path: str) -> int:
    """Make a folder, and remove those of this user's runs that were killed here.

    Returns:
        A descriptor that holds the folder for this process, also when it is killed. Nodes that
        share it hold it together.

    Raises:
        WrongSetting: it is another user's.
    """
    import shutil  # the first files of the other nodes are there by now

    def opened(path: str) -> int:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)

    for name in os.listdir(_TEMP_ROOT):
        if name.startswith(f"nrr-{os.getuid()}-"):
            with suppress(OSError):  # its program lives, or another one has just removed it
                folder = opened(os.path.join(_TEMP_ROOT, name))
                try:
                    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(os.path.join(_TEMP_ROOT, name), ignore_errors=True)
                finally:
                    os.close(folder)
    while True:
        os.makedirs(path, mode=0o700, exist_ok=True)
        if os.lstat(path).st_uid != os.getuid():
            raise WrongSetting(
                f"the folder {path} for Ray is another user's. Set RAY_TEMP_DIR to one of your own"
            )
        with suppress(FileNotFoundError):  # another program has just removed it
            held = opened(path)
            fcntl.flock(held, fcntl.LOCK_SH)
            if os.path.samestat(os.fstat(held), os.lstat(path)):
                return held
            os.close(held)


def node_options(settings: Settings, ports: Mapping[str, int]) -> List[str]:
    """The options of ``ray start`` that every node has."""
    # The second one is how NeMo-RL sees that Slurm has started its Ray.
    resources = {"worker_units": settings.worker_units, "slurm_managed_ray_cluster": 1}
    options = [f"--{option}={ports[name]}" for name, option in NODE_PORTS.items()]
    options += [f"--resources={json.dumps(resources)}", "--disable-usage-stats", "--block"]
    if settings.cpus is not None:
        # Ray counts the CPUs of the machine, which may not all be the job's.
        options.append(f"--num-cpus={settings.cpus}")
    if settings.debugger:
        options.append("--ray-debugger-external")
    return options


def with_pre_start(argv: List[str], pre_start: str, env: Mapping[str, str]) -> List[str]:
    """The command after the user's commands, whose exports it gets.

    The variables of the step in ``env`` are unset for it: Ray's workers would have them for ever.
    """
    step = [name for name in env if name.startswith(_OF_STEP) and name.isidentifier()]
    unset = f"unset {' '.join(sorted({*step} - _OF_SLURM))}"
    return ["bash", "-c", f'{pre_start}\n{unset}\nexec "$@"', "pre-start", *argv]


def ray_environment(base: Mapping[str, str], settings: Settings, token_path: str) -> Dict[str, str]:
    """The environment of Ray on this node, and of what runs beside it.

    Token authentication is on, unless the user has set ``RAY_AUTH_MODE``. Nothing in it makes a
    program one rank of many: the step has a task on every node, and MPI, Lightning and NVSHMEM
    would wait for the others.
    """
    env = {
        name: value
        for name, value in base.items()
        if name not in _FOREIGN and not name.startswith(_PMI)
    }
    env.update((name, "1") for name in _COUNTS if name in env)
    env.update((name, "0") for name in _RANKS if name in env)
    if "SLURM_STEP_NODELIST" in env:
        env["SLURM_STEP_NODELIST"] = settings.host
    env.setdefault("RAY_AUTH_MODE", "token")
    if env["RAY_AUTH_MODE"] == "token":
        env["RAY_AUTH_TOKEN_PATH"] = token_path
    # A node that ends has nothing to hand over: the others end with it.
    env.setdefault("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "0")
    # Ray notes the last cluster of this machine there, and must not find another job's.
    env["RAY_TMPDIR"] = settings.temp_dir
    return env


def driver_environment(ray_env: Mapping[str, str], head: HeadAddress) -> Dict[str, str]:
    """The variables by which a program finds this cluster and may use it."""
    names = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_TMPDIR")
    env = {name: ray_env[name] for name in names if name in ray_env}
    return {**env, "RAY_ADDRESS": head.gcs, "RAY_API_SERVER_ADDRESS": head.dashboard}


def _tail(path: str) -> str:
    """The last lines of a log, each behind ``| ``; empty without a log."""
    with suppress(OSError), open(path, "rb") as file:
        file.seek(max(os.fstat(file.fileno()).st_size - _TAIL_BYTES, 0))
        lines = file.read().decode(errors="replace").split("\n")
        lines = [line.rstrip() for line in lines if line.strip()][-_TAIL_LINES:]
        return "".join(f"\n    | {line}" for line in lines)
    return ""
