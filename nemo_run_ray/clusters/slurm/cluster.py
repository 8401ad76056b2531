"""A Ray cluster in an allocation of Slurm that all clients find by its name."""

from __future__ import annotations

import atexit
import copy
import json
import os
import re
import secrets
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Annotated, ClassVar

from nemo_run.core.execution.slurm import SlurmExecutor
from nemo_run.core.frontend.console.api import CONSOLE
from nemo_run.core.tunnel.client import LocalTunnel, SSHTunnel
from pydantic import Field, InstanceOf, PositiveInt

from nemo_run_ray.clusters import Cluster, ClusterArchive, Dashboard, interrupted
from nemo_run_ray.clusters.slurm.allocations import RENEWAL_S, Allocations, SlurmAllocation
from nemo_run_ray.clusters.slurm.login import Login, key_of
from nemo_run_ray.clusters.slurm.on_login import LEFT_EARLY
from nemo_run_ray.clusters.slurm.script import Sidecar, job_script
from nemo_run_ray.errors import ClusterError, ConfigError, NemoRunRayError, Unanswered, as_markup
from nemo_run_ray.fields import Allowed, Seconds, strict_init
from nemo_run_ray.remote.carried_over import DISPATCHES, IDS, START
from nemo_run_ray.remote.slurm.settings import IDLE_TIMEOUT, RENEW, SIDECARS
from nemo_run_ray.remote.spec import Json

#: This process among the users of clusters: a name that no other has.
_USER = re.sub(
    "[^A-Za-z0-9.-]", "_", f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
)
#: The allocations of each cluster, by host and folder; and the logins, by host.
_allocations: dict[tuple[str, str], Allocations] = {}
_logins: dict[str, Login] = {}
#: Seconds between two looks at the folder of the cluster.
_LOOK_S = 2.0
#: Seconds after which a claimed allocation that Slurm does not know is passed over. Its client has
#: died, or it waits for Slurm for longer than anybody waits for `sbatch`.
_CLAIM_S = 45.0
#: Errors of `sbatch` that do not say whether the controller has the job.
_AWAY = ("Unable to contact", "timed out", "Connection refused", "Zero Bytes", "temporarily")


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
    #: Let the allocation continue when its last user is done, until ``idle_timeout_s``;
    #: ``nemo-run-ray down --cluster`` ends it.
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
        _SlurmFields.check("SlurmCluster", vars(self))
        title, executor = f"SlurmCluster {self.name!r}", self.executor
        names = [sidecar.name for sidecar in self.sidecars]
        if len(set(names)) < len(names):
            raise ConfigError(
                f"{title} has sidecars with the names {names}; give each a name of its own: "
                "messages and logs tell them apart by it."
            )
        if not re.fullmatch(r"/[\w/.,:@+=-]*", executor.tunnel.job_dir or "", re.ASCII):
            raise ConfigError(
                f"The tunnel of {title} has job_dir={executor.tunnel.job_dir!r}; expected is the "
                "absolute path of a folder that all nodes share, of letters, digits and the "
                "characters / . , : @ + = _ -, since the scripts of Slurm and NeMo-Run take no "
                "others."
            )
        if executor.env_vars.get("RAY_AUTH_MODE", "token") != "token":
            raise ConfigError(
                f"{title} needs Ray's token; leave RAY_AUTH_MODE out of env_vars of its executor."
            )

    @property
    def title(self) -> str:
        return f"{self.name} on Slurm"

    def connect(self) -> Dashboard:
        if threading.current_thread() is threading.main_thread():
            interrupted.clear()  # of a wait before this one
        with self._own_allocations.lock:
            was_used = self._own_allocations.is_used
            if not (was_used or self.keep):
                atexit.register(self._leave)
            self._own_allocations.is_used = True
            way = BringUp(self, self._own_allocations)
            try:
                allocation = way.run()
            except BaseException:
                if not was_used:  # else jobs of this program may run in it
                    self._leave()
                raise
            if way.said:
                way.say(f"Ray is up in Slurm job {allocation.job} of the cluster {self.name!r}.")
        return self._dashboard(allocation)

    def find(self) -> Dashboard | None:
        newest = self._own_allocations.newest()
        if newest is None or newest.head is None or newest.why_over or newest.is_lost:
            return None
        return self._dashboard(newest)

    def archive(self, session: str = "") -> ClusterArchive | None:
        return self._own_allocations.archive(session) if session else None

    def keep_dispatch(
        self,
        dispatcher: str,
        ids: Sequence[str],
        body: Json,
        archives: Callable[[], Mapping[str, bytes]],
    ) -> None:
        allocations = self._own_allocations
        if self.renew and allocations.ask("keep_dispatch", dispatcher=dispatcher):
            files = archives()
            last = {
                START: json.dumps({"body": body, "archives": list(files)}).encode(),
                # It says that the others are whole.
                IDS: "\n".join([dispatcher, *ids, ""]).encode(),
            }
            for name, data in {**files, **last}.items():
                self._login.put(data, f"{allocations.folder}/{DISPATCHES}/{dispatcher}/{name}")

    def record(self) -> Json:
        tunnel = self.executor.tunnel
        names = ("host", "user", "port", "identity", "shell", "pre_command")
        way = {name: getattr(tunnel, name) for name in names if not self._login.is_here}
        return {
            "kind": self.kind,
            "name": self.name,
            "renew": self.renew,
            "tunnel": {"job_dir": tunnel.job_dir, **way},
        }

    @classmethod
    def of_record(cls, values: Json) -> SlurmCluster:
        given = values["tunnel"]
        tunnel = SSHTunnel(**given) if "host" in given else LocalTunnel(**given)
        executor = SlurmExecutor(account="", tunnel=tunnel)
        found = cls(executor=executor, name=values["name"], renew=values.get("renew", False))
        found._is_remembered = True
        return found

    def detach(self) -> None:
        if self._own_allocations.is_used:
            self._own_allocations.ask("detach", user=_USER)
            self._own_allocations.is_used = False

    def stop(self) -> bool:
        """End the allocation now, with all that runs in it; whether there was one."""
        why = "it was ended by `nemo-run-ray down`"
        is_ended = self._own_allocations.stop(why)
        if is_ended:  # its script may have asked for the next one meanwhile
            self._own_allocations.stop(why)
        return is_ended

    def _script(self, folder: str) -> str:
        """The job's script, for an allocation in that folder."""
        if self._is_remembered:
            raise ClusterError(
                f"The cluster {self.name!r} on Slurm has ended, and what it asked Slurm for is not "
                "in the experiment's folder. Run the program again."
            )
        executor = copy.copy(self.executor)
        executor.nodes = self.nodes or executor.nodes
        executor.time = self.walltime or executor.time
        variables = {
            IDLE_TIMEOUT: str(self.idle_timeout_s or ""),
            RENEW: "1" if self.renew else "",
            SIDECARS: json.dumps([sidecar.spec() for sidecar in self.sidecars]),
        }
        return job_script(self.name, executor, folder, variables)

    @property
    def _login(self) -> Login:
        key = key_of(self.executor.tunnel)
        # If several threads make one, all use the first; it connects when it is used.
        return _logins.get(key) or _logins.setdefault(key, Login(self.executor.tunnel))

    @property
    def _own_allocations(self) -> Allocations:
        """The allocations of this cluster, as this process knows them."""
        login, folder = self._login, os.path.join(self.executor.tunnel.job_dir, self.name)
        return _allocations.setdefault((login.key, folder), Allocations(login, folder))

    def _dashboard(self, allocation: SlurmAllocation) -> Dashboard:
        login, head = self._login, allocation.head
        assert head
        url, place = head.dashboard, ""
        if not login.is_here:
            url, place = login.forward(head.address, head.dashboard_port), f" on {login.name}"
        return Dashboard(
            url,
            {"Authorization": f"Bearer {allocation.token}"},
            token_at=f"{self._own_allocations.path(allocation.number)}/{allocation.run}/token{place}",
            why_dead=partial(self._why_dead, allocation),
            earlier=self._own_allocations.earlier(allocation),
        )

    def _why_dead(self, allocation: SlurmAllocation) -> str:
        """Explain why an allocation can never answer again; empty while it may."""
        newest = None
        with suppress(NemoRunRayError):
            newest = self._own_allocations.newest()
        if not newest:
            return ""
        why = "another one has its name"
        if newest.number == allocation.number:
            lost = f"Slurm has no job {newest.job} any more" if newest.is_lost else ""
            why = newest.why_over or lost
        if not why:
            return ""
        return f"The cluster {self.name!r} in Slurm job {allocation.job} has ended: {why}."

    def _leave(self) -> None:
        if self._own_allocations.is_used:
            self._own_allocations.is_used = False
            with suppress(NemoRunRayError):  # it ends when it has been idle
                self._own_allocations.ask("leave", user=_USER)


class _SlurmFields(Allowed):
    executor: InstanceOf[SlurmExecutor]
    name: Annotated[str, Field(pattern="^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$")] = Field(
        description="allowed are up to 100 letters, digits, '_', '.' and '-', "
        "the first one a letter or a digit"
    )
    nodes: PositiveInt | None
    walltime: str | None = Field(description="allowed is a time limit such as '04:00:00', or None")
    keep: bool
    idle_timeout_s: PositiveInt | None
    queue_timeout_s: Seconds | None
    renew: bool
    sidecars: list[InstanceOf[Sidecar]]


# ------------------------------------------------------ the way of a client to it


class BringUp:
    """One client's way to a cluster that is ready."""

    def __init__(self, cluster: SlurmCluster, allocations: Allocations, user: str = _USER):
        self.cluster, self.allocations, self.user = cluster, allocations, user
        #: Shown last; empty if there was no wait.
        self.said = ""
        self._joined = self._submissions = 0
        self._began = monotonic()

    def run(self) -> SlurmAllocation:
        """The allocation to use, with this client among its users.

        Raises:
            ClusterError: Slurm does not take the job, Ray does not come up in it, or it waits in
                the queue for too long.
        """
        has_answered = False
        while True:
            try:
                newest = self.allocations.look()
                has_answered = True
                allocation = self._step(newest)
                if allocation:
                    return allocation
            except Unanswered as error:
                if not has_answered and monotonic() - self._began >= 60.0:
                    raise ClusterError(
                        f"The cluster {self.cluster.name!r} cannot be looked for: {error}"
                    ) from error
                self.say(str(error))
            if interrupted.wait(_LOOK_S):
                raise ClusterError(
                    f"Interrupted while waiting for the cluster {self.cluster.name!r} on Slurm. "
                    "Its job is taken out of the queue, or ends when it starts, unless another "
                    "program waits for it."
                )

    def say(self, text: str) -> None:
        if text != self.said:
            self.said = text
            CONSOLE.log(as_markup(text))

    def _step(self, newest: SlurmAllocation | None) -> SlurmAllocation | None:
        """Do what is next for the newest allocation, and return it once it is ready."""
        why = _why_unusable(newest) if newest else ""
        if newest and why:
            if not newest.why_over:  # Slurm has no job of it: tell the other clients
                self.allocations.ask(
                    "note",
                    number=newest.number,
                    name="over" if newest.job else "stop",
                    text=why,
                )
            self._raise_if_failed(newest, why)
        if not newest:  # nobody has brought the cluster up yet
            self._claim(1)
        elif why and newest.asks_for_next:  # it is being renewed: its script submits the next one
            self.say(f"The allocation of the cluster {self.cluster.name!r} is being renewed.")
        elif why:  # it is over, and any client may submit the next one
            self._claim(newest.number + 1)
        elif self._joined != newest.number:  # this client is not among its users yet
            self.allocations.ask("join", number=newest.number, user=self.user)
            self._joined = newest.number
            return self._step(self.allocations.look())  # it may have ended meanwhile
        elif newest.claimed == self.user and not newest.is_sent:  # it is this client's to submit
            self._submit(newest.number, self.cluster._script(self.allocations.path(newest.number)))
        elif newest.end or not newest.head or not newest.token or newest.is_queued:
            self._wait(newest)  # for Slurm, or for Ray
        else:  # it is ready
            if self.cluster.keep:
                self.allocations.ask("note", number=newest.number, name="keep")
            return newest
        return None

    def _claim(self, number: int) -> None:
        """Submit the job of the next allocation, unless another client is faster."""
        # Make the script first: if that fails, nothing is claimed.
        script = self.cluster._script(self.allocations.path(number))
        if self.allocations.ask("claim", number=number, user=self.user):
            self._joined = number
            self._submit(number, script)

    def _submit(self, number: int, script: str) -> None:
        """Submit the job of an allocation that this client has claimed."""
        if not interrupted.is_set():
            self._submissions += 1
            self.say(f"Submitting a job to Slurm for the cluster {self.cluster.name!r} …")
            self.allocations.ask("submit", number=number, script=script)

    def _raise_if_failed(self, newest: SlurmAllocation, why: str) -> None:
        """Tell the user that the job which this client waited for has failed.

        Another job would fail again, so no client that waited submits one. It returns where one is
        worth submitting.

        Raises:
            ClusterError: Slurm does not take the job, or Ray did not come up in it.
        """
        if newest.number != self._joined or newest.head:
            return  # this client did not wait for it, or Ray was up
        if why == LEFT_EARLY or not (newest.job or newest.refused):
            return  # nobody waited for it any more, or Slurm never had it
        # Slurm's controller may have been away when the job was submitted.
        if any(words in newest.refused for words in _AWAY) and self._submissions < 4:
            return
        name, why = self.cluster.name, why.rstrip(".")
        if newest.refused:
            raise ClusterError(
                f"Slurm does not take the job of the cluster {name!r}: {why}. Correct the "
                "SlurmExecutor."
            )
        log = ""
        if "\n" not in why:
            with suppress(ClusterError):
                log = self.allocations.ask("log_end", number=newest.number, job=newest.job)
        raise ClusterError(
            f"Ray did not come up in Slurm job {newest.job} of the cluster {name!r}: {why}. "
            f"{log}".rstrip()
        )

    def _wait(self, newest: SlurmAllocation) -> None:
        """Say what is waited for, and give up when it takes too long."""
        # Slurm may have said that it waits before Ray began.
        waits = newest.is_queued and bool(newest.head or newest.end or not newest.run)
        if waits and newest.queued:
            reason, start = newest.queued["reason"], newest.queued["start"]
            what = "waits in the queue"
            if reason not in ("", "None", "(null)"):
                what += f": {reason}"
            if start != "N/A":
                what += f"; Slurm expects it to start at {start}"
        elif newest.end:
            what, waits = "is to start again", True
        elif not (newest.run or newest.queued):
            what, waits = "is submitted", True
        else:
            what = "starts Ray on its nodes"
        where = f"of the cluster {self.cluster.name!r}"
        self.say(f"Slurm job {newest.job or '…'} {where} {what}.")
        limit_s = self.cluster.queue_timeout_s
        if limit_s is not None and waits and monotonic() - self._began >= limit_s:
            raise ClusterError(
                f"Slurm job {newest.job} {where} has not started within "
                f"queue_timeout_s={limit_s:g}: it {what}."
            )


def _why_unusable(newest: SlurmAllocation) -> str:
    """The reason why no client waits for an allocation any more; empty while it may be of use."""
    if newest.may_start_again:
        return ""
    if newest.why_over:
        return newest.why_over
    if newest.is_lost:
        return f"Slurm has no job {newest.job} any more; `sacct -j {newest.job}` may say why"
    has_no_job = newest.slurm_answered and not newest.queued
    if has_no_job and newest.unchanged_s >= (RENEWAL_S if newest.is_renewal else _CLAIM_S):
        return "its client ended before Slurm had the job"
    return ""
