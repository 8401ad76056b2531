"""A Ray cluster in an allocation of Slurm that all clients find by its name."""

from __future__ import annotations

import atexit
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
    #: Leave it when its last user is done, until ``idle_timeout_s``;
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
        with self._of_name.lock:
            was_used = self._of_name.is_used
            if not (was_used or self.keep):
                atexit.register(self._leave)
            self._of_name.is_used = True
            way = BringUp(self, self._of_name)
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
        body: Json,
        archives: Callable[[], Mapping[str, bytes]],
    ) -> None:
        allocations = self._of_name
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
        named = {"kind": self.kind, "name": self.name, "renew": self.renew}
        return {**named, "tunnel": {"job_dir": tunnel.job_dir, **way}}

    @classmethod
    def of_record(cls, values: Json) -> SlurmCluster:
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
        is_ended = self._of_name.stop(why)
        if is_ended:  # its script may have asked for the next one meanwhile
            self._of_name.stop(why)
        return is_ended

    def _script(self, folder: str) -> str:
        """The job's script, for an allocation in that folder."""
        if self._is_remembered:
            raise ClusterError(
                f"The cluster {self.name!r} on Slurm has ended, and what it asked Slurm for is not "
                "in the experiment's folder. Run the program again."
            )
        return job_script(self, folder)

    @property
    def _login(self) -> Login:
        key = key_of(self.executor.tunnel)
        if key not in _logins:
            _logins[key] = Login(self.executor.tunnel)
        return _logins[key]

    @property
    def _of_name(self) -> Allocations:
        """The allocations of this cluster, as this process knows them."""
        login, folder = self._login, os.path.join(self.executor.tunnel.job_dir, self.name)
        return _allocations.setdefault((login.key, folder), Allocations(login, folder))

    def _dashboard(self, allocation: SlurmAllocation) -> Dashboard:
        login, head = self._login, allocation.head
        assert head is not None
        url, place = head.dashboard, ""
        if not login.is_here:
            url, place = login.forward(head.address, head.dashboard_port), f" on {login.name}"
        return Dashboard(
            url,
            {"Authorization": f"Bearer {allocation.token}"},
            token_at=f"{self._of_name.path(allocation.number)}/{allocation.run}/token{place}",
            why_dead=partial(self._why_dead, allocation),
            earlier=self._of_name.earlier(allocation),
        )

    def _why_dead(self, allocation: SlurmAllocation) -> str:
        """Explain why an allocation can never answer again; empty while it may."""
        newest = None
        with suppress(NemoRunRayError):
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
            with suppress(NemoRunRayError):  # it ends when it has been idle
                self._of_name.ask("leave", user=_USER)


class _SlurmFields(Allowed):
    executor: InstanceOf[SlurmExecutor]
    name: Annotated[str, Field(pattern="^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$")] = Field(
        description="allowed are up to 100 letters, digits, '_', '.' and '-', with no sign first"
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

    def __init__(self, cluster: SlurmCluster, allocations: Allocations, user: str = _USER) -> None:
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
                if allocation is not None:
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
        if newest is None or self._passes_over(newest):
            if newest is not None and newest.is_renewing:
                self.say(f"The allocation of the cluster {self.cluster.name!r} is being renewed.")
                return None
            number = 1 if newest is None else newest.number + 1
            # One that cannot be made claims nothing.
            script = self.cluster._script(self.allocations.path(number))
            if self.allocations.ask("claim", number=number, user=self.user):
                self._joined = number
                self._submit(number, script)
        elif self._joined != newest.number:
            self.allocations.ask("join", number=newest.number, user=self.user)
            self._joined = newest.number
            return self._step(self.allocations.look())  # it may have ended meanwhile
        elif newest.claimed == self.user and not newest.is_sent:
            self._submit(newest.number, self.cluster._script(self.allocations.path(newest.number)))
        elif newest.end or not newest.head or not newest.token or newest.is_queued:
            self._wait(newest)
        else:
            if self.cluster.keep:
                self.allocations.ask("note", number=newest.number, name="keep")
            return newest
        return None

    def _submit(self, number: int, script: str) -> None:
        """Submit the job of an allocation that this client has claimed."""
        if not interrupted.is_set():
            self._submissions += 1
            self.say(f"Submitting a job to Slurm for the cluster {self.cluster.name!r} …")
            self.allocations.ask("submit", number=number, script=script)

    def _passes_over(self, newest: SlurmAllocation) -> bool:
        """Whether an allocation is over; one that Slurm has no job of is given up.

        Raises:
            ClusterError: this client waited for it, and it has not come up.
        """
        if newest.may_start_again:
            return False
        why = newest.why_over
        if not why and newest.has_queue and newest.queued is None:  # Slurm has no job of it
            if newest.job:
                why = f"Slurm has no job {newest.job} any more; `sacct -j {newest.job}` may say why"
            elif newest.jobless_s >= (RENEWAL_S if newest.renewed else _CLAIM_S):
                why = "its client ended before Slurm had the job"
            if why:
                self.allocations.ask("note", number=newest.number, name="stop", text=why)
        # Of several clients that wait, none submits again what would fail again; but Slurm's
        # controller may have been away when the job was submitted.
        is_away = any(words in newest.refused for words in _AWAY)
        if (
            why not in ("", LEFT_EARLY)
            and newest.number == self._joined
            and newest.head is None
            and (newest.job or newest.refused)
            and not (is_away and self._submissions < 4)
        ):
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
        return bool(why)

    def _wait(self, newest: SlurmAllocation) -> None:
        """Say what is waited for, and give up when it takes too long."""
        what = "starts Ray on its nodes"
        # Slurm may have said that it waits before Ray began.
        waits = newest.is_queued and bool(newest.head or newest.end or not newest.run)
        if waits and newest.queued:
            reason, start = newest.queued["reason"], newest.queued["start"]
            what = "waits in the queue"
            if reason not in ("", "None", "(null)"):
                what += f": {reason}"
            if start != "N/A":
                what += f"; Slurm expects it to start at {start}"
        elif newest.end or not (newest.run or newest.queued):
            what, waits = "is to start again" if newest.end else "is submitted", True
        where = f"of the cluster {self.cluster.name!r}"
        self.say(f"Slurm job {newest.job or '…'} {where} {what}.")
        limit_s = self.cluster.queue_timeout_s
        if limit_s is not None and waits and monotonic() - self._began >= limit_s:
            raise ClusterError(
                f"Slurm job {newest.job} {where} has not started within "
                f"queue_timeout_s={limit_s:g}: it {what}."
            )
