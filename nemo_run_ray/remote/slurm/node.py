"""Program of every node of an allocation: reports, shows that it lives, runs Ray and sidecars."""

from __future__ import annotations

import json
import os
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from time import monotonic
from typing import Any, Container, Mapping, Sequence

from ..files import DASHBOARD, EMBEDDED, ENDS_AT, LASTS_S, RENEWS, write_file
from ..node.output import copy_end, log_end, say
from ..node.supervise import TAG, Child, Runner, Supervisor
from ..spec import Env
from .folder import (
    BEAT_S,
    CLUSTER_FAILED,
    JOB_LOGS,
    READY,
    HeadAddress,
    NodeReport,
    RunEnd,
    RunFolder,
)
from .network import choose_ports, way_to
from .settings import SANDBOX, CannotContinue, Settings

#: Seconds of one turn of the loop.
TURN_S = 0.25
#: Seconds between two looks at files that seldom change.
LOOK_S = 1.0
#: Seconds from SIGTERM to SIGKILL. Slurm itself gives 30 s.
GRACE_S = 10.0
#: Nodes that a message lists at most.
LISTED = 8
#: Seconds from the end of a ``ray start`` to the next one.
_RETRY_S = 5.0
#: Copies Ray's logs once, or what has changed in them, with pauses. A process of its own does it,
#: so that a node still shows that it lives: the folder may be slow, and the logs large. The last
#: copy is of all: one that broke off may have torn a file, which is newer than its log then.
_COPY = """\
cd "$1" && mkdir -p "$2" || exit
[ -n "$3" ] || exec cp -rp --parents session_2*/logs "$2"
while sleep "$3"; do cp -rpu --parents session_2*/logs "$2"; done
"""
#: Variables that would lead Ray, or a driver, to another cluster, or describe that.
_FOREIGN = {"RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_TOKEN", DASHBOARD}
_FOREIGN |= {EMBEDDED, ENDS_AT, LASTS_S, RENEWS}
#: Prefixes of PMI's variables, and the values of Slurm's counts and ranks of a step for a program
#: that is no rank of it.
_PMI = ("PMI_", "PMI2_", "PMIX_", "SLURM_PMI")
_ALONE = {
    "SLURM_NTASKS": "1",
    "SLURM_NPROCS": "1",
    "SLURM_NNODES": "1",
    "SLURM_TASKS_PER_NODE": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_PROCID": "0",
    "SLURM_NODEID": "0",
    "SLURM_LOCALID": "0",
}
#: Prefixes of variables by which an MPI in one of Ray's workers takes it for a rank of the step,
#: and the variables among them that only name Slurm's cluster.
_OF_STEP = (*_PMI, "SLURM_", "OMPI_", "MPI_")
_OF_SLURM = {"SLURM_CONF", "SLURM_CLUSTERS"}


class NodeProgram(ABC):
    """The program of one node: one loop.

    Args:
        settings: of this node.
        folder: that all nodes share.
        tag: for the environment of everything that is started.
        env: of the job.
    """

    def __init__(self, settings: Settings, folder: RunFolder, tag: str, env: Env):
        self.settings, self.folder, self.env, self._tag = settings, folder, env, tag
        self.children = Supervisor()
        self.report = NodeReport(host=settings.host, log=settings.node_log)
        self._published: NodeReport | None = None
        #: The environment of Ray on this node, and of what runs beside it.
        self.ray_env = ray_environment(env, settings, f"{settings.run}/token")
        self.ray: Child | None = None
        #: Ranks whose life this node depends on, and those among them that show none.
        self.watched: set[int] = {0}
        self.dead: set[int] = set()
        self.starts = 0
        self.began = monotonic()
        self._sidecars: list[tuple[str, Child | None, str, Any]] = []
        self._beside: list[Child] = []  # what stays when Ray is started again
        self.leaves_at = float("inf")
        self._beaten_at = self._looked_at = float("-inf")
        #: In this turn the files that seldom change are read.
        self.looks = True

    @abstractmethod
    def step(self) -> RunEnd | None:
        """One turn of the loop; the end when the run is over."""

    @abstractmethod
    def ray_start_argv(self, ports: Mapping[str, int]) -> list[str]:
        """``ray start`` with the options that this kind of node has, for the next try."""

    def run(self, runner: Runner) -> int:
        """Take part until the run is over; the exit code of this node's task."""
        try:
            self._begin()
            end: RunEnd | None = None
            while not end:
                self.beat()
                self.children.reap()
                self._watch_sidecars()
                self.publish()
                self.looks = monotonic() - self._looked_at >= LOOK_S
                if self.looks:
                    self._looked_at = monotonic()
                end = self.step()
                time.sleep(TURN_S)
                order = runner.order()
                if order == b"":
                    raise CannotContinue(self._why_no_watchdog())
                if order is not None and not end:
                    end = RunEnd(143, "the job was cancelled")
                    if time.time() + 1 >= (self.settings.ends_at or float("inf")):
                        end = RunEnd(143, "Slurm's time limit has ended the job")
        except Exception as error:  # whatever it is, this node ends its processes
            kind = "" if isinstance(error, CannotContinue) else f"{type(error).__name__}: "
            end = failure(self.settings, f"{kind}{error}")
        return self.leave(end)

    def _why_no_watchdog(self) -> str:
        """Say why the watchdog of this node's processes is gone."""
        why, reports = "the watchdog of this node's processes was killed", self.folder.reports()
        absent = [host for rank, host in enumerate(self.settings.hosts) if rank not in reports]
        if absent and self.folder.text(READY) is None:
            why += (
                ". Slurm kills a step that it cannot start on every node, and this program has not "
                f"begun on {listed(absent)}; slurmd's log there may say why"
            )
        return why

    def leave(self, end: RunEnd) -> int:
        """End all processes of this node, and report it; the exit code of its task."""
        # Until then the head waits for the others; the job's script waits for the head 5 s longer.
        self.leaves_at = monotonic() + 20.0
        self.children.stop(GRACE_S)
        if self.settings.allocation:
            self.keep_job_logs(12.0)  # Slurm ends this program soon
        if self.settings.log_sync_s:
            copy, deadline = self._copy_logs(""), max(self.leaves_at, monotonic() + 1.0)
            while copy.code is None and monotonic() < deadline:
                time.sleep(0.05)
                self.children.reap()
        if not self.env.get("RAY_TEMP_DIR"):
            import shutil  # no node needs it to start

            shutil.rmtree(os.path.dirname(self.settings.temp_dir), ignore_errors=True)
        self.publish(left=True)
        return 0

    def keep_job_logs(self, limit_s: float, only: Container[str] | None = None) -> None:
        """Copy the logs of this node's jobs, the newest first; of a long log only its end is kept.

        Args:
            limit_s: no copy begins later.
            only: the names of the logs to copy; ``None`` copies all.
        """
        import glob  # no node needs it to start

        deadline = monotonic() + limit_s
        paths = glob.glob(f"{self.settings.temp_dir}/session_2*/logs/job-driver-*.log")
        with suppress(OSError):  # one is removed meanwhile
            paths.sort(key=os.path.getmtime, reverse=True)
        for path in paths:
            name = os.path.basename(path)
            if monotonic() < deadline and (only is None or name in only):
                with suppress(OSError):
                    copy_end(path, f"{self.settings.run}/{JOB_LOGS}/{name}", 64 * 2**20)

    def start(self, argv: Sequence[str], log: str, env: Env, cwd: str | None = None) -> Child:
        with open(log, "ab") as output:
            return self.children.add(Child(argv, {**env, TAG: self._tag}, cwd, output))

    def _copy_logs(self, pause_s: object) -> Child:
        """Copy Ray's own logs on this node to where NeMo-RL has them."""
        folder = f"{self.settings.logs}/ray/{self.settings.host if self.settings.rank else ''}"
        argv = ["sh", "-c", _COPY, "copy", self.settings.temp_dir, folder, str(pause_s)]
        return self.start(argv, os.devnull, os.environ)

    def publish(self, **fields: Any) -> None:
        """Change this node's report; if it cannot be written now, a later turn writes it."""
        self.report = self.report._replace(**fields)
        if self.report != self._published:
            with suppress(OSError):
                self.folder.write(f"nodes/{self.settings.rank}.json", self.report)
                self._published = self.report

    def say(self, text: str) -> None:
        """Write a line into the job's own log."""
        say(f"{self.settings.host}: {text}")

    def start_ray(self) -> None:
        """Start Ray on this node.

        Raises:
            CannotContinue: there is no port for it.
        """
        self.starts += 1
        settings = self.settings
        ports = choose_ports(settings.ports, not settings.rank, int(settings.job.split(".")[0]))
        argv = self.ray_start_argv(ports)
        argv += [f"--{name.lower().replace('_', '-')}={port}" for name, port in ports.items()]
        # The second one is how NeMo-RL sees that Slurm has started its Ray.
        resources = {"worker_units": settings.worker_units, "slurm_managed_ray_cluster": 1}
        argv += [f"--resources={json.dumps(resources)}", "--disable-usage-stats", "--block"]
        if settings.cpus:
            # Ray counts the CPUs of the machine, which may not all be the job's.
            argv.append(f"--num-cpus={settings.cpus}")
        if self.env.get("RAY_DEBUG") == "legacy":
            argv.append("--ray-debugger-external")
        argv = with_pre_start(argv, self.env.get("NEMO_RUN_RAY_PRE_START", ""), self.ray_env)
        self.ray = self.start(argv, settings.node_log, self.ray_env)

    def watch_ray(self) -> None:
        """Start Ray again when it has ended before the cluster was ready.

        On a busy machine `ray start` gives its own processes up after 15 to 30 s, as often as it is
        tried. So no number of tries ends it, but the time in which the cluster must be ready.

        Raises:
            CannotContinue: Ray is over on this node.
        """
        # Once the run is over, Ray has a reason to end.
        if not self.ray or self.ray.code is None or self.folder.end():
            return
        why = ""
        if self.ray.code == 127:
            why = ": there is no program 'ray', or none that a command before it needs"
        how = f"has ended: {self.ray.ending}{why}{log_end(self.settings.node_log)}"
        if why or self.folder.text(READY) is not None:
            raise CannotContinue(f"Ray {how}")
        if monotonic() - self.ray.ended_at >= _RETRY_S:
            self.say(f"`ray start` has ended: {self.ray.ending}. It is started again.")
            self.publish(retried=f"try {self.starts} of `ray start` {how}")
            self.children.stop(GRACE_S, keep=self._beside)
            self.start_ray()

    def _begin(self) -> None:
        """Start what comes before Ray."""
        settings = self.settings
        while self.folder.text("job") is None:
            if monotonic() - self.began >= settings.share_limit_s:
                raise CannotContinue(
                    f"the folder {settings.run} is not shared: this node has not seen within "
                    f"{settings.share_limit_s:g} s what the job's script has written there"
                )
            time.sleep(TURN_S)
        if not self.env.get("RAY_TEMP_DIR"):
            hold_folder(os.path.dirname(settings.temp_dir))
        # A node without a first heartbeat is not missed, and to remove old folders takes minutes.
        self.folder.beat()
        os.makedirs(settings.temp_dir, exist_ok=True)
        if settings.log_sync_s:
            self._beside.append(self._copy_logs(settings.log_sync_s))
        for sidecar in settings.sidecars:
            log = settings.log(f"{sidecar.name}-{settings.host}")
            if sidecar.name == SANDBOX and settings.sandbox_ports:  # where NeMo-RL looks for it
                log = f"{settings.sandbox_ports}/sandbox-{settings.rank}.log"
            env = {**self.ray_env, **sidecar.env}
            child, probing = None, None
            if sidecar.command:
                child = self.start(["bash", "-c", sidecar.command], log, env)
                self._beside.append(child)
            if sidecar.probe:
                from ..node.probe import Probing  # most nodes do without it

                probing = Probing(sidecar.probe, "127.0.0.1", {}, {**env, TAG: self._tag})
            self._sidecars.append((sidecar.name, child, log, probing))

    def beat(self) -> None:
        """Show that this node lives, and look at those that it depends on, after a pause."""
        if monotonic() - self._beaten_at >= BEAT_S:
            self._beaten_at = monotonic()
            with suppress(OSError):  # the others notice if it fails for long
                self.folder.beat()
            self.dead = self.folder.silent(self.watched)

    def _watch_sidecars(self) -> None:
        """Ask the probes.

        Raises:
            CannotContinue: a sidecar has died, or is not ready in time.
        """
        for name, child, log, probing in self._sidecars:
            why = ""
            if child and child.code is not None:
                why = f"has ended: {child.ending}"
            elif name not in self.report.ready:
                answer = probing.step() if probing else ""
                if answer:
                    why = f"is {answer}"
                elif answer is not None:
                    self.publish(ready=(*self.report.ready, name))
                    ports = self.settings.sandbox_ports
                    if name == SANDBOX and ports:
                        with suppress(OSError):  # for others to read; we have our own file
                            write_file(f"{ports}/SANDBOX_READY_{self.settings.host}", "")
            if why:
                raise CannotContinue(f"the sidecar {name} {why}{log_end(log)}")


class Worker(NodeProgram):
    """A node that is not the head: it joins the head's Ray, and stays while the head lives."""

    _head: HeadAddress | None = None

    def step(self) -> RunEnd | None:
        if 0 in self.dead:
            raise CannotContinue(
                f"the head's program writes nothing into {self.settings.run} any more; this node "
                "ends its processes"
            )
        if self.looks or not self._head:
            end = self.folder.end()
            if end:
                return end
            head = self.folder.read("nodes/0.json", NodeReport)
            limit_s = self.settings.start_limit_s
            # A head that has begun gives the start up itself, and knows why.
            if not (head or self._head) and monotonic() - self.began >= limit_s:
                raise CannotContinue(f"no head was there within {limit_s:g} s")
            # A `ray start` that waits for the Ray before, or has joined it, would not notice for
            # minutes that the head has started it again.
            if head and head.ray and HeadAddress(*head.ray) != self._head:
                if self._head:
                    self.say("The head has started Ray again, and so does this node.")
                    self.children.stop(GRACE_S, keep=self._beside)
                self._head = HeadAddress(*head.ray)
                self.publish(address=way_to(self._head.address))
                self.start_ray()
        self.watch_ray()
        return None

    def ray_start_argv(self, ports: Mapping[str, int]) -> list[str]:
        assert self._head
        gcs, own = self._head.gcs, self.report.address
        return ["ray", "start", f"--address={gcs}", f"--node-ip-address={own}"]

    def leave(self, end: RunEnd) -> int:
        if not self.folder.end():
            why = end.why if end.code == CLUSTER_FAILED else failure(self.settings, end.why).why
            say(why)  # without a shared folder nothing else has it
            self.publish(failed=why)  # the other nodes continue, and must know why
        return super().leave(end)


def listed(hosts: Sequence[str]) -> str:
    """The first of the hosts, and how many more there are."""
    more = f" and {len(hosts) - LISTED} more" if len(hosts) > LISTED else ""
    return f"{', '.join(hosts[:LISTED])}{more}"


def failure(settings: Settings, why: str) -> RunEnd:
    """The end of a run with a node that cannot continue."""
    return RunEnd(CLUSTER_FAILED, f"node {settings.host} (rank {settings.rank}): {why}")


def hold_folder(path: str) -> int:
    """Make Ray's folder, and remove those of this user's runs that were killed here.

    Returns:
        A descriptor of it with a lock, which this process has while it lives. Nodes that share the
        folder share the lock.

    Raises:
        CannotContinue: it is another user's.
    """
    import fcntl  # after the start no node needs these
    import shutil

    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    for entry in os.scandir(os.path.dirname(path)):
        if entry.name.startswith(f"nrr-{os.getuid()}-"):
            with suppress(OSError):  # its program lives, or it is another user's
                held = os.open(entry.path, flags)
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(entry.path, ignore_errors=True)
                os.close(held)
    while True:
        os.makedirs(path, 0o700, exist_ok=True)
        with suppress(FileNotFoundError):  # another program has just removed it
            if os.lstat(path).st_uid != os.getuid():
                raise CannotContinue(
                    f"the folder {path} for Ray is another user's; set RAY_TEMP_DIR to your own"
                )
            held = os.open(path, flags)
            fcntl.flock(held, fcntl.LOCK_SH)
            if os.path.samestat(os.fstat(held), os.lstat(path)):
                return held


def with_pre_start(argv: list[str], pre_start: str, env: Env) -> list[str]:
    """The command after the user's commands, whose exports it gets.

    The variables of the step in ``env`` are unset for it: Ray's workers would have them for ever.
    """
    step = [name for name in env if name.startswith(_OF_STEP) and name.isidentifier()]
    unset = f"unset {' '.join(sorted({*step} - _OF_SLURM))}"
    return ["bash", "-c", f'{pre_start}\n{unset}\nexec "$@"', "pre-start", *argv]


def ray_environment(base: Env, settings: Settings, token_path: str) -> dict[str, str]:
    """The environment of Ray on this node, and of what runs beside it.

    Token authentication is on, unless the user has set ``RAY_AUTH_MODE``. Nothing in it makes a
    program one rank of many: the step has a task on every node, and MPI, Lightning and NVSHMEM
    would wait for the others.
    """
    alone = {**_ALONE, "SLURM_STEP_NODELIST": settings.host}
    env = {
        name: alone.get(name, value)
        for name, value in base.items()
        if name not in _FOREIGN and not name.startswith(_PMI)
    }
    env.setdefault("RAY_AUTH_MODE", "token")
    if env["RAY_AUTH_MODE"] == "token":
        env["RAY_AUTH_TOKEN_PATH"] = token_path
    # A node that ends has nothing to hand over: the others end with it.
    env.setdefault("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "0")
    # Ray notes the last cluster of this machine there, and must not find another job's.
    env["RAY_TMPDIR"] = settings.temp_dir
    return env


def driver_environment(ray_env: Env, head: HeadAddress) -> dict[str, str]:
    """The variables by which a program finds this cluster and may use it."""
    names = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_TMPDIR")
    env = {name: ray_env[name] for name in names if name in ray_env}
    return {**env, "RAY_ADDRESS": head.gcs, "RAY_API_SERVER_ADDRESS": head.dashboard}
