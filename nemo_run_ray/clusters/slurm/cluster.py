"""A Ray cluster in an allocation of Slurm that all clients find by its name."""

from __future__ import annotations

import atexit
import contextlib
import copy
import os
import re
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from nemo_run.core.execution.slurm import SlurmExecutor
from nemo_run.core.tunnel.client import LocalTunnel, SSHTunnel

from nemo_run_ray.clusters.base import Cluster, ClusterArchive, Dashboard, interrupted
from nemo_run_ray.clusters.slurm.bring_up import BringUp, Progress
from nemo_run_ray.clusters.slurm.life import AllocationLife
from nemo_run_ray.clusters.slurm.lives import Lives
from nemo_run_ray.clusters.slurm.login import Login, forwarded, key_of
from nemo_run_ray.clusters.slurm.looks import Looks
from nemo_run_ray.clusters.slurm.script import Sidecar, script
from nemo_run_ray.clusters.slurm.slurm_queue import SlurmQueue
from nemo_run_ray.errors import ClusterError, ConfigError, NemoRunRayError
from nemo_run_ray.fields import is_amount, is_whole, strict_init
from nemo_run_ray.remote.slurm.settings import repeated

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_SSH_FIELDS = ("host", "user", "port", "identity", "shell", "pre_command")
_HOST = re.sub("[^A-Za-z0-9.-]", "_", socket.gethostname())
#: This process among the users of clusters: a name that no other has.
_USER = f"{_HOST}-{os.getpid()}-{secrets.token_hex(4)}"
#: Held by the thread that brings a cluster up; others of this process wait for it.
_locks: dict[tuple[str, str], threading.Lock] = {}
#: The life of each cluster that this process uses, by host and folder; and the logins, by host.
_used: dict[tuple[str, str], int] = {}
_logins: dict[str, Login] = {}


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
    #: What runs beside Ray on the nodes.
    sidecars: list[Sidecar] = field(default_factory=list)
    #: Leave it when its last user is done; ``nemo-run-ray down --cluster`` ends it.
    keep: bool = False
    #: Seconds without a job after which it ends; ``None`` is never before its walltime.
    idle_timeout_s: int | None = 900
    #: Let chains go on in another allocation when the walltime of this one is over.
    renew: bool = False
    #: Seconds to wait in Slurm's queue; ``None`` is as long as it takes.
    queue_timeout_s: float | None = None

    def __post_init__(self) -> None:
        #: Made from a ledger, which says where the cluster is and not what it asks Slurm for.
        self._is_remembered = False
        _check(self)

    def connect(self) -> Dashboard:
        key = self._key
        if threading.current_thread() is threading.main_thread():
            interrupted.clear()  # of a wait before this one
        with _lock_of(key), Progress() as progress:
            way = self._bring_up(progress)
            try:
                life = way.run()
            except BaseException:
                self._leave(way.held)
                raise
            if key not in _used and not self.keep:
                atexit.register(self._leave_at_exit)
            _used[key] = life.number
            self._looks.saw(life)
            progress.done(f"Ray is up in Slurm job {life.job} of the cluster {self.name!r}.")
        return self._dashboard(life)

    def find(self) -> Dashboard | None:
        life = self._looks.newest()
        if life is None or life.head is None or self._looks.is_over(life):
            return None
        return self._dashboard(life)

    def archive(self, session: str = "") -> ClusterArchive | None:
        if not session:
            return None
        away, series = self._looks.why_away(session), self._looks.series(session)
        reason = away or self._looks.why_gone(session)
        if not series.runs and not reason:
            return None
        return ClusterArchive(reason, series.left_rows(session), series.log, bool(away))

    def keep_dispatch(
        self,
        dispatcher: str,
        ids: Sequence[str],
        body: dict[str, Any],
        archives: Callable[[], Mapping[str, bytes]],
    ) -> None:
        if self.renew:
            self._lives.keep_dispatch(dispatcher, ids, body, archives)

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
        for number in self._joined(_used.pop(self._key, 0)):
            self._lives.detach(number, _USER)

    def stop(self) -> bool:
        """End the allocation now, with all that runs in it; whether there was one."""
        why = "it was ended by `nemo-run-ray down`"
        found = self._lives.cancel_newest(why)
        if found:  # its script may have asked for the next one meanwhile
            self._lives.cancel_newest(why)
        self._looks.forget()
        return found

    def _bring_up(self, progress: Progress) -> BringUp:
        return BringUp(
            name=self.name,
            lives=self._lives,
            queue=SlurmQueue(self._login),
            script=self._script,
            user=_USER,
            keep=self.keep,
            queue_timeout_s=self.queue_timeout_s,
            say=progress.say,
        )

    def _script(self, life: str) -> str:
        if self._is_remembered:
            raise ClusterError(
                f"The cluster {self.name!r} on Slurm has ended, and what it asked Slurm for is not "
                "in the experiment's folder. Run the program again."
            )
        executor = copy.copy(self.executor)
        if self.nodes is not None:
            executor.nodes = self.nodes
        if self.walltime is not None:
            executor.time = self.walltime
        return script(executor, self.name, life, self.sidecars, self.idle_timeout_s, self.renew)

    @property
    def _login(self) -> Login:
        tunnel = self.executor.tunnel
        return _logins.setdefault(key_of(tunnel), Login(tunnel))

    @property
    def _lives(self) -> Lives:
        return Lives(self._login, os.path.join(self.executor.tunnel.job_dir, self.name))

    @property
    def _looks(self) -> Looks:
        return Looks(self._lives)

    @property
    def _key(self) -> tuple[str, str]:
        return self._lives.key

    def _dashboard(self, life: AllocationLife) -> Dashboard:
        assert life.head is not None
        url = life.head.dashboard
        if not self._login.is_here:
            url = forwarded(self._login, life.head.address, life.head.dashboard_port)
        headers = {"Authorization": f"Bearer {life.token}"}
        why_dead = partial(self._why_dead, life)
        series = self._looks.before(life)
        earlier = None if series is None else ClusterArchive(rows=series.rows(), log=series.log)
        return Dashboard(url, headers, why_dead=why_dead, earlier=earlier)

    def _why_dead(self, life: AllocationLife) -> str:
        """Why this life of the cluster can never answer again; empty while it may."""
        with contextlib.suppress(NemoRunRayError):
            now = self._looks.newest()
            if now is None:
                return ""
            why = now.why_over if now.number == life.number else "another one has its name"
            if not why and self._looks.is_over(life):
                why = f"Slurm has no job {life.job} any more"
            if why:
                return f"The cluster {self.name!r} in Slurm job {life.job} has ended: {why}."
        return ""

    def _leave_at_exit(self) -> None:
        self._leave(_used.pop(self._key, 0))

    def _leave(self, number: int) -> None:
        with contextlib.suppress(NemoRunRayError):  # it ends when it has been idle
            for joined in self._joined(number):
                self._lives.leave(joined, _USER)

    def _joined(self, number: int) -> Iterator[int]:
        """The lives that this process uses: a renewal takes it along from the first one."""
        if number:
            yield number
            newest = self._lives.look() if self.renew else None
            if newest is not None and newest.number != number:
                yield newest.number


def _lock_of(key: tuple[str, str]) -> threading.Lock:
    return _locks.setdefault(key, threading.Lock())


def _check(cluster: SlurmCluster) -> None:
    """Raise for a field that has a wrong value."""
    allowed = _allowed(cluster)
    for name, (is_right, what) in allowed.items():
        if not is_right:
            raise ConfigError(
                f"SlurmCluster.{name} is {getattr(cluster, name)!r}; allowed is {what}."
            )
    twice = repeated([sidecar.name for sidecar in cluster.sidecars])
    if twice:
        raise ConfigError(
            f"SlurmCluster {cluster.name!r} has two sidecars with the name {twice[0]!r}; give each "
            "its own: messages and logs tell them apart by it."
        )
    executor = cluster.executor
    if not os.path.isabs(executor.tunnel.job_dir or ""):
        raise ConfigError(
            f"The tunnel of SlurmCluster {cluster.name!r} has job_dir="
            f"{executor.tunnel.job_dir!r}; expected is the absolute path of a folder that all "
            "nodes share: tunnel=run.LocalTunnel(job_dir='/shared/me/jobs')."
        )
    odd = re.search(r"[^\w/.,:@+=-]", executor.tunnel.job_dir, re.ASCII)
    if odd:
        raise ConfigError(
            f"The tunnel of SlurmCluster {cluster.name!r} has job_dir="
            f"{executor.tunnel.job_dir!r} with {odd.group()!r} in it, which the scripts of Slurm "
            "and NeMo-Run do not take; use letters, digits and the characters / . , : @ + = _ -."
        )
    if executor.array is not None:
        raise ConfigError(
            f"The executor of SlurmCluster {cluster.name!r} has array={executor.array!r}; a "
            "cluster is one job: leave it out."
        )
    mode = executor.env_vars.get("RAY_AUTH_MODE", "token")
    if mode != "token":
        raise ConfigError(
            f"SlurmCluster {cluster.name!r} needs Ray's token, and env_vars of its executor has "
            f"RAY_AUTH_MODE={mode!r}; leave that out. A Ray before 2.52 knows no tokens."
        )


def _allowed(cluster: SlurmCluster) -> dict[str, tuple[bool, str]]:
    """For each field, whether its value is allowed, and which values are."""
    idle, queue, walltime = cluster.idle_timeout_s, cluster.queue_timeout_s, cluster.walltime
    named = isinstance(cluster.name, str) and _NAME.fullmatch(cluster.name) is not None
    sidecars = isinstance(cluster.sidecars, list)
    return {
        "executor": (isinstance(cluster.executor, SlurmExecutor), "a run.SlurmExecutor"),
        "name": (named, "letters, digits, '_', '.' and '-'"),
        "nodes": (cluster.nodes is None or is_whole(cluster.nodes, 1), "a whole number from 1"),
        "walltime": (walltime is None or isinstance(walltime, str), "a text as '04:00:00'"),
        "keep": (isinstance(cluster.keep, bool), "True or False"),
        "idle_timeout_s": (idle is None or is_whole(idle, 1), "whole seconds from 1, or None"),
        "queue_timeout_s": (queue is None or is_amount(queue), "a number of seconds, or None"),
        "renew": (isinstance(cluster.renew, bool), "True or False"),
        "sidecars": (
            sidecars and all(isinstance(sidecar, Sidecar) for sidecar in cluster.sidecars),
            "a list of Sidecar(…)",
        ),
    }
