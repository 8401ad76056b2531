"""A Ray cluster in an allocation of Slurm that all clients find by its name."""

from __future__ import annotations

import atexit
import contextlib
import copy
import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from nemo_run.core.execution.slurm import SlurmExecutor
from nemo_run.core.frontend.console.api import CONSOLE
from nemo_run.core.tunnel.client import LocalTunnel, SSHTunnel

from nemo_run_ray.clusters.base import Cluster, ClusterArchive, Dashboard, interrupted
from nemo_run_ray.clusters.slurm.allocations import (
    LEFT_EARLY,
    RENEWAL_S,
    Allocations,
    QueuedJob,
    SlurmAllocation,
)
from nemo_run_ray.clusters.slurm.login import Login, forwarded, key_of
from nemo_run_ray.clusters.slurm.script import Sidecar, script
from nemo_run_ray.errors import ClusterError, ConfigError, NemoRunRayError, Unanswered, as_markup
from nemo_run_ray.fields import Check, allow, every, is_amount, strict_init, whole
from nemo_run_ray.remote.carried_over import DISPATCHES, IDS, START

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_JOB_DIR = re.compile(r"/[\w/.,:@+=-]*", re.ASCII)
_SSH_FIELDS = ("host", "user", "port", "identity", "shell", "pre_command")
_HOST = re.sub("[^A-Za-z0-9.-]", "_", socket.gethostname())
#: This process among the users of clusters: a name that no other has.
_USER = f"{_HOST}-{os.getpid()}-{secrets.token_hex(4)}"
#: The allocations of each cluster, by host and folder; and the logins, by host.
_allocations: dict[tuple[str, str], Allocations] = {}
_logins: dict[str, Login] = {}
#: Seconds between two looks at the folder of the cluster.
_LOOK_S = 2.0
#: Seconds after which a claimed allocation that Slurm does not know is passed over. Its client has
#: died, or it waits for Slurm for longer than anybody waits for `sbatch`.
_CLAIM_S = 45.0
#: Seconds within which the host with Slurm must answer for the first time.
_FIRST_ANSWER_S = 60.0
#: Number of submissions to a controller of Slurm that gives no answer.
_SUBMISSIONS = 4
#: Errors of `sbatch` that do not say whether the controller has the job.
_AWAY = ("Unable to contact", "timed out", "Connection refused", "Zero Bytes", "temporarily")
_NO_REASON = ("", "None", "(null)")


@strict_init
@dataclass(kw_only=True)
class SlurmCluster(Cluster):
    """Ray in an allocation of Slurm, brought up when it is needed and found by its name.

    The first client submits a job and waits for Ray; others of the same name and folder use it. It
    ends when its last user has left and no job runs, when no job has run for ``idle_timeout_s``, or
    at its walltime.

    Example:
        ``RayExecutor(cluster=SlurmCluster(executor=run.SlurmExecutor(…), name="team"))``

    Raises:
        ConfigError: a value is not allowed.
    """

    kind: ClassVar[str] = "slurm"

    #: Account, partition, GPUs, container and tunnel of the allocation. The tunnel's ``job_dir`` is
    #: a folder that all nodes share; the cluster's own is ``<job_dir>/<name>``.
    executor: SlurmExecutor
    #: All that name the same cluster use the same allocation.
    name: str = "ray"
    #: Nodes of the allocation; ``None`` is the executor's.
    nodes: int | None = None
    #: Its time limit as Slurm writes it, such as ``"04:00:00"``; ``None`` is the executor's.
    walltime: str | None = None
    #: Commands that run beside Ray on the nodes.
    sidecars: list[Sidecar] = field(default_factory=list)
    #: Leave it when its last user is done; ``nemo-run-ray down --cluster`` ends it.
    keep: bool = False
    #: Seconds without a job after which it ends; ``None`` is never before its walltime.
    idle_timeout_s: int | None = 900
    #: Continue chains in another allocation when the walltime of this one is over.
    renew: bool = False
    #: Seconds to wait in Slurm's queue; ``None`` is as long as it takes.
    queue_timeout_s: float | None = None

    def __post_init__(self) -> None:
        #: Made from a ledger, which says where the cluster is and not what it asks Slurm for.
        self._is_remembered = False
        _check(self)

    @property
    def title(self) -> str:
        return f"{self.name} on Slurm"

    def connect(self) -> Dashboard:
        if threading.current_thread() is threading.main_thread():
            interrupted.clear()  # of a wait before this one
        with self._of_name.lock:
            way = BringUp(
                name=self.name,
                allocations=self._of_name,
                script=self._script,
                user=_USER,
                keep=self.keep,
                queue_timeout_s=self.queue_timeout_s,
                say=_say,
            )
            was_used = self._of_name.is_used
            if not (was_used or self.keep):
                atexit.register(self._leave)
            self._of_name.is_used = True
            try:
                allocation = way.run()
            except BaseException:
                if not was_used:  # else jobs of this program may run in it
                    self._leave()
                raise
            if way.said:
                _say(f"Ray is up in Slurm job {allocation.job} of the cluster {self.name!r}.")
        return self._dashboard(allocation)

    def find(self) -> Dashboard | None:
        newest = self._of_name.newest()
        if newest is None or newest.head is None or newest.why_over or newest.is_lost:
            return None
        return self._dashboard(newest)

    def archive(self, session: str = "") -> ClusterArchive | None:
        return self._of_name.archive(session) if session else None

    def keep_dispatch(
        self,
        dispatcher: str,
        ids: Sequence[str],
        body: dict[str, Any],
        archives: Callable[[], Mapping[str, bytes]],
    ) -> None:
        allocations = self._of_name
        if not self.renew or not allocations.ask("keep_dispatch", dispatcher=dispatcher):
            return
        folder = os.path.join(allocations.folder, DISPATCHES, dispatcher)
        files = archives()
        start = json.dumps({"body": body, "archives": list(files)}).encode()
        # The last one says that the others are whole.
        last = {START: start, IDS: "\n".join([dispatcher, *ids, ""]).encode()}
        for name, data in {**files, **last}.items():
            self._login.put(data, os.path.join(folder, name))

    def record(self) -> dict[str, Any]:
        tunnel = self.executor.tunnel
        way = {name: getattr(tunnel, name) for name in _SSH_FIELDS if not self._login.is_here}
        found = {"kind": self.kind, "name": self.name, "tunnel": {"job_dir": tunnel.job_dir, **way}}
        return {**found, "renew": True} if self.renew else found

    @classmethod
    def of_record(cls, values: dict[str, Any]) -> SlurmCluster:
        given = values["tunnel"]
        tunnel = SSHTunnel(**given) if "host" in given else LocalTunnel(**given)
        executor = SlurmExecutor(account="", tunnel=tunnel)
        found = cls(executor=executor, name=values["name"], renew=values.get("renew", False))
        found._is_remembered = True
        return found

    def detach(self) -> None:
        if self._of_name.is_used:
            self._of_name.ask("detach", user=_USER)
            self._of_name.is_used = False

    def stop(self) -> bool:
        """End the allocation now, with all that runs in it; whether there was one."""
        why = "it was ended by `nemo-run-ray down`"
        is_ended = self._of_name.cancel_newest(why)
        if is_ended:  # its script may have asked for the next one meanwhile
            self._of_name.cancel_newest(why)
        return is_ended

    def _script(self, folder: str) -> str:
        if self._is_remembered:
            raise ClusterError(
                f"The cluster {self.name!r} on Slurm has ended, and what it asked Slurm for is not "
                "in the experiment's folder. Run the program again."
            )
        executor = copy.copy(self.executor)
        executor.nodes = executor.nodes if self.nodes is None else self.nodes
        executor.time = executor.time if self.walltime is None else self.walltime
        return script(executor, self.name, folder, self.sidecars, self.idle_timeout_s, self.renew)

    @property
    def _login(self) -> Login:
        tunnel = self.executor.tunnel
        return _logins.setdefault(key_of(tunnel), Login(tunnel))

    @property
    def _of_name(self) -> Allocations:
        """The allocations of this cluster, as this process knows them."""
        login, folder = self._login, os.path.join(self.executor.tunnel.job_dir, self.name)
        return _allocations.setdefault((login.key, folder), Allocations(login, folder))

    def _dashboard(self, allocation: SlurmAllocation) -> Dashboard:
        assert allocation.head is not None
        url = allocation.head.dashboard
        if not self._login.is_here:
            url = forwarded(self._login, allocation.head.address, allocation.head.dashboard_port)
        headers = {"Authorization": f"Bearer {allocation.token}"}
        why_dead = partial(self._why_dead, allocation)
        earlier = self._of_name.earlier(allocation)
        return Dashboard(url, headers, why_dead=why_dead, earlier=earlier)

    def _why_dead(self, allocation: SlurmAllocation) -> str:
        """Explain why an allocation can never answer again; empty while it may."""
        newest = None
        with contextlib.suppress(NemoRunRayError):
            newest = self._of_name.newest()
        if newest is None:
            return ""
        why = "another one has its name"
        if newest.number == allocation.number:
            lost = f"Slurm has no job {newest.job} any more" if newest.is_lost else ""
            why = newest.why_over or lost
        ended = f"The cluster {self.name!r} in Slurm job {allocation.job} has ended"
        return f"{ended}: {why}." if why else ""

    def _leave(self) -> None:
        if self._of_name.is_used:
            self._of_name.is_used = False
            with contextlib.suppress(NemoRunRayError):  # it ends when it has been idle
                self._of_name.ask("leave", user=_USER, why=LEFT_EARLY)


def _say(text: str) -> None:
    CONSOLE.log(as_markup(text))


_FLAG = allow(lambda value: isinstance(value, bool), "True or False")
_FIELDS: dict[str, Check] = {
    "executor": allow(lambda value: isinstance(value, SlurmExecutor), "a run.SlurmExecutor"),
    "name": allow(
        lambda value: isinstance(value, str) and _NAME.fullmatch(value),
        "letters, digits, '_', '.' and '-'",
    ),
    "nodes": whole(1, none=True),
    "walltime": allow(lambda value: isinstance(value, str), "a text as '04:00:00'", none=True),
    "keep": _FLAG,
    "idle_timeout_s": whole(1, none=True),
    "queue_timeout_s": allow(is_amount, "a number of seconds", none=True),
    "renew": _FLAG,
    "sidecars": every(lambda value: isinstance(value, Sidecar), "a list of Sidecar(…)"),
}


def _check(cluster: SlurmCluster) -> None:
    """Raise for a field that has a wrong value."""
    for name, check in _FIELDS.items():
        check(f"SlurmCluster.{name}", getattr(cluster, name))
    title, executor = f"SlurmCluster {cluster.name!r}", cluster.executor
    names = [sidecar.name for sidecar in cluster.sidecars]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"{title} has sidecars with the names {names}; give each a name of its own: messages "
            "and logs tell them apart by it."
        )
    if not _JOB_DIR.fullmatch(executor.tunnel.job_dir or ""):
        raise ConfigError(
            f"The tunnel of {title} has job_dir={executor.tunnel.job_dir!r}; expected is the "
            "absolute path of a folder that all nodes share, of letters, digits and the characters "
            "/ . , : @ + = _ -, since the scripts of Slurm and NeMo-Run take no others."
        )
    if executor.array is not None:
        raise ConfigError(
            f"The executor of {title} has array={executor.array!r}; a cluster is one job: leave it "
            "out."
        )
    mode = executor.env_vars.get("RAY_AUTH_MODE", "token")
    if mode != "token":
        raise ConfigError(
            f"{title} needs Ray's token, and env_vars of its executor has RAY_AUTH_MODE={mode!r}; "
            "leave that out. A Ray before 2.52 knows no tokens."
        )


# ------------------------------------------------------ the way of a client to it


@dataclass
class BringUp:
    """One client's way to a cluster that is ready.

    Attributes:
        name: of the cluster.
        allocations: of the cluster.
        script: makes the job's script, of the folder of its allocation.
        user: name of this client among the users.
        keep: whether the cluster stays when nobody uses it.
        queue_timeout_s: how long to wait in Slurm's queue; ``None`` for as long as it takes.
        say: shows what is waited for, at each change.
        clock: seconds that only grow.
        pause: waits for some seconds; returns whether the wait was interrupted.
    """

    name: str
    allocations: Allocations
    script: Callable[[str], str]
    user: str
    keep: bool
    queue_timeout_s: float | None
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    pause: Callable[[float], bool] = interrupted.wait
    _joined: int = 0
    _submissions: int = 0
    _answered: bool = False
    #: Shown last; empty if there was no wait.
    said: str = ""
    _began: float = 0.0
    #: When an allocation without a job was seen first, by its number.
    _jobless_since: tuple[int, float] = (0, 0.0)
    #: The run whose job Slurm starts again.
    _requeued: str | None = None

    def run(self) -> SlurmAllocation:
        """The allocation to use, with this client among its users.

        Raises:
            ClusterError: Slurm does not take the job, Ray does not come up in it, or it waits in
                the queue for too long.
        """
        self._began = self.clock()
        while True:
            try:
                allocation = self._step()
            except Unanswered as error:
                if not self._answered and self.clock() - self._began >= _FIRST_ANSWER_S:
                    raise ClusterError(
                        f"The cluster {self.name!r} cannot be looked for: {error}"
                    ) from error
                self._say(str(error))
                allocation = None
            if allocation is not None:
                return allocation
            if self.pause(_LOOK_S):
                raise ClusterError(
                    f"Interrupted while waiting for the cluster {self.name!r} on Slurm. Its job is "
                    "taken out of the queue, or ends when it starts, unless another program waits "
                    "for it."
                )

    def _say(self, text: str) -> None:
        if text != self.said:
            self.said = text
            self.say(text)

    def _step(self) -> SlurmAllocation | None:
        allocation = self.allocations.look()
        self._answered = True
        if allocation is None or self._passes_over(allocation):
            if allocation is not None and allocation.is_renewing:
                self._say(f"The allocation of the cluster {self.name!r} is being renewed.")
            else:
                self._claim_next(allocation)
            return None
        if self._joined != allocation.number:
            self.allocations.ask("join", number=allocation.number, user=self.user)
            self._joined = allocation.number
            return self._step()  # it may have ended meanwhile
        if allocation.claimed == self.user and not allocation.is_sent:
            self._submit(allocation.number)
        elif (
            allocation.end is not None
            or not (allocation.head and allocation.token)
            or self._starts_again(allocation)
        ):
            self._wait(allocation)
        else:
            if self.keep:
                self.allocations.ask("note", number=allocation.number, name="keep")
            return allocation
        return None

    def _passes_over(self, allocation: SlurmAllocation) -> bool:
        """Whether an allocation is over; one that Slurm has no job of is given up.

        Raises:
            ClusterError: this client waited for it, and it has not come up.
        """
        if (
            allocation.end is not None
            and not (allocation.stop or allocation.over)
            and self._starts_again(allocation)
        ):
            return False
        if allocation.stop and not allocation.why_over:
            with contextlib.suppress(ClusterError):  # Slurm may not have heard of it
                self.allocations.cancel(allocation, allocation.stop)
        why = allocation.why_over or allocation.stop or self._give_up_lost(allocation)
        # Of several clients that wait, none submits again what would fail again.
        waited = allocation.number == self._joined and allocation.head is None and why != LEFT_EARLY
        if (
            why
            and waited
            and (allocation.job or allocation.refused)
            and not self._was_unheard(allocation)
        ):
            log = "" if allocation.refused or "\n" in why else self.allocations.log_end(allocation)
            raise ClusterError(_why_not_up(self.name, allocation, why, log))
        return bool(why)

    def _was_unheard(self, allocation: SlurmAllocation) -> bool:
        """Whether Slurm's controller was away when the allocation's job was submitted."""
        away = any(words in allocation.refused for words in _AWAY)
        return away and self._submissions < _SUBMISSIONS

    def _give_up_lost(self, allocation: SlurmAllocation) -> str:
        """Give up an allocation that Slurm has no job of, and return why; empty otherwise."""
        if self._jobless_since[0] != allocation.number:
            self._jobless_since = allocation.number, self.clock()
        if not allocation.has_queue or allocation.queued is not None:
            return ""
        if allocation.job:
            job = allocation.job
            why = f"Slurm has no job {job} any more; `sacct -j {job}` may say why"
        elif self.clock() - self._jobless_since[1] >= (
            RENEWAL_S if allocation.renewed else _CLAIM_S
        ):
            why = "its client ended before Slurm had the job"
        else:
            return ""
        self.allocations.ask("note", number=allocation.number, name="over", text=why)
        return why

    def _starts_again(self, allocation: SlurmAllocation) -> bool:
        """Whether Slurm starts the job of an allocation again, whose last start is over.

        It takes the nodes away from an allocation that was ready, which may have written its end.
        """
        if allocation.has_queue and (allocation.queued is None or allocation.queued.waits):
            self._requeued = None if allocation.queued is None else allocation.run
        return self._requeued == allocation.run  # without an answer it is as it was

    def _claim_next(self, last: SlurmAllocation | None) -> None:
        """Claim the next allocation and submit its job, unless another client does."""
        number = 1 if last is None else last.number + 1
        # One that cannot be made claims nothing.
        script = self.script(self.allocations.path(number))
        if self.allocations.ask("claim", number=number, user=self.user):
            self._joined = number
            self._submit(number, script)

    def _submit(self, number: int, script: str = "") -> None:
        """Submit the job of an allocation that this client has claimed."""
        if interrupted.is_set():
            return
        self._submissions += 1
        self._say(f"Submitting a job to Slurm for the cluster {self.name!r} …")
        script = script or self.script(self.allocations.path(number))
        self.allocations.ask("submit", number=number, script=script)

    def _wait(self, allocation: SlurmAllocation) -> None:
        """Say what is waited for, and give up when it takes too long."""
        waited = self.clock() - self._began
        has_begun = bool(allocation.run) and allocation.end is None
        job = None if has_begun and allocation.head is None else allocation.queued
        if job is not None and job.waits:
            what = f"waits in the queue{_why_waits(job)}"
            has_begun = False
        elif allocation.end is not None:
            what = "is to start again"
        else:
            what = "starts Ray on its nodes" if has_begun or job is not None else "is submitted"
        self._say(f"Slurm job {allocation.job or '…'} of the cluster {self.name!r} {what}.")
        late = self.queue_timeout_s is not None and waited >= self.queue_timeout_s
        if late and not has_begun:
            raise ClusterError(
                f"Slurm job {allocation.job} of the cluster {self.name!r} has not started within "
                f"queue_timeout_s={self.queue_timeout_s:g}: it {what}."
            )


def _why_not_up(name: str, allocation: SlurmAllocation, why: str, log: str) -> str:
    end = "" if why.endswith(".") else "."
    if allocation.refused:
        return (
            f"Slurm does not take the job of the cluster {name!r}: {why}{end} Correct the "
            "SlurmExecutor."
        )
    message = (
        f"Ray did not come up in Slurm job {allocation.job} of the cluster {name!r}: {why}{end}"
    )
    return f"{message} {log}" if log else message


def _why_waits(job: QueuedJob) -> str:
    """The reason and the expected start of a job that waits, as the end of a sentence."""
    reason = "" if job.reason in _NO_REASON else f": {job.reason}"
    return reason if job.start == "N/A" else f"{reason}; Slurm expects it to start at {job.start}"
