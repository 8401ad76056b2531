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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from nemo_run.core.execution.slurm import SlurmExecutor
from nemo_run.core.frontend.console.api import CONSOLE
from nemo_run.core.tunnel.client import LocalTunnel, SSHTunnel

from nemo_run_ray.clusters.base import Cluster, ClusterArchive, Dashboard, interrupted
from nemo_run_ray.clusters.slurm.allocations import LEFT_EARLY, Allocations, SlurmAllocation
from nemo_run_ray.clusters.slurm.bring_up import BringUp
from nemo_run_ray.clusters.slurm.login import Login, forwarded, key_of
from nemo_run_ray.clusters.slurm.script import Sidecar, script
from nemo_run_ray.errors import ClusterError, ConfigError, NemoRunRayError, as_markup
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
            if not (self._of_name.is_used or self.keep):
                atexit.register(self._leave)
            self._of_name.is_used = True
            try:
                allocation = way.run()
            except BaseException:
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
