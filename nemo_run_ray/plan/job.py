"""The plan of one job: what torchx and the executor say becomes what the node is told.

Nothing here asks a cluster, reads a clock or imports ray; files that a runtime environment names
are read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nemo_run.core.packaging.base import Packager
from torchx.specs import AppDef

from nemo_run_ray.errors import ConfigError
from nemo_run_ray.executor import RayExecutor
from nemo_run_ray.fields import is_container, resolve_runtime_env
from nemo_run_ray.ids import safe_id
from nemo_run_ray.plan.array import array_spec, is_array
from nemo_run_ray.plan.request import array_entrypoint, entrypoint
from nemo_run_ray.plan.roles import (
    SELECTORS_SINCE,
    group_spec,
    needs_group_driver,
    packagers,
    single_replica_environment,
    task_spec,
)
from nemo_run_ray.remote.attempts import DISPATCHER_KEY, PERMANENT_KEY, RETRIES_KEY, JobExit
from nemo_run_ray.remote.rows import NONCE_KEY
from nemo_run_ray.remote.spec import (
    CODE,
    SUBMISSION_ID,
    ArraySpec,
    DispatchedJobSpec,
    GroupSpec,
    JobSpec,
    OutsideSpec,
)

#: Seconds that Ray waits longer than we do before it kills our own process.
_STOP_MARGIN_S = 10


@dataclass(frozen=True)
class JobPlan:
    """One job, ready to be given addresses and sent.

    Attributes:
        job: its name in NeMo-Run.
        submission_id: its name on the cluster.
        spec: what the node is told.
        reservation: the parts of Ray's job request that say what to reserve.
        runtime_env: the user's, to which the archives are added.
        packagers: of the roles whose code is sent, by the role's name.
        secret_places: by name, the other variables or files that hold the values of secrets.
        runs_here: the code stays where it is.
        after: names of the experiment's jobs on this cluster that must have succeeded.
        outside: handles of other experiments' jobs that must have succeeded; the planned one has
            names of experiments too, which the scheduler looks up.
        retries: further attempts after a failure.
        permanent_exit_codes: that no further attempt would change.
        max_in_flight: so many of the experiment's jobs at once at most.
        pending_timeout_s: seconds that it may wait for room.
        time_s: seconds that it needs, where the cluster may end before.
    """

    job: str
    submission_id: str
    spec: JobSpec | GroupSpec | ArraySpec
    reservation: dict[str, Any] = field(default_factory=dict)
    runtime_env: dict[str, Any] = field(default_factory=dict)
    packagers: dict[str, Packager] = field(default_factory=dict)
    secret_places: dict[str, tuple[str, ...]] = field(default_factory=dict)
    runs_here: bool = False
    after: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()
    retries: int = 0
    permanent_exit_codes: tuple[int, ...] = ()
    max_in_flight: int | None = None
    pending_timeout_s: float | None = None
    time_s: float | None = None

    @property
    def needs_dispatcher(self) -> bool:
        """Whether a dispatcher must look after it on the cluster, before its start or after it."""
        timed = self.pending_timeout_s is not None or self.time_s is not None
        again = self.retries and not isinstance(self.spec, ArraySpec)  # it retries elements
        return bool(self.after or self.outside or again or self.max_in_flight or timed)

    @property
    def selector_since(self) -> tuple[int, int] | None:
        """First version of Ray that knows the labels by which it chooses nodes, if it does so."""
        has_labels = "entrypoint_label_selector" in self.reservation
        if isinstance(self.spec, GroupSpec):
            has_labels = any(role.spread or role.label_selector for role in self.spec.roles)
        return SELECTORS_SINCE if has_labels else None

    @property
    def spec_name(self) -> str:
        """Name of the job inside the job archive; equal for equal jobs of other experiments."""
        return safe_id(self.job)

    def tasks(self) -> dict[str, JobSpec]:
        """What runs, by the name in ``packagers`` of what is sent for it."""
        if isinstance(self.spec, GroupSpec):
            return {role.name: role.task for role in self.spec.roles}
        task = self.spec.host.task if isinstance(self.spec, ArraySpec) else self.spec
        return {next(iter(self.packagers), ""): task}

    def body(self, code: Mapping[str, str], archives: list[str], nonce: str) -> dict[str, Any]:
        """The body of ``POST /api/jobs/``.

        Args:
            code: URIs of the code archives, by the names in ``packagers``.
            archives: URIs, first of the package, then of the job and of its secrets.
            nonce: tells this submission from any other of the same id.
        """
        variables = dict(self.runtime_env.get("env_vars", {}))
        variables.setdefault("RAY_JOB_STOP_WAIT_TIME_S", str(self._stop_wait_s))
        # Ray unpacks one archive as the working directory; those of other roles lie beside it.
        main, *others = dict.fromkeys(code.values()) or [None]
        if others:
            names = {role: uri.rpartition("/")[2] for role, uri in code.items()}
            variables[CODE] = json.dumps(names, sort_keys=True)
        modules = [*archives, *(uri for uri in others if uri is not None)]
        runtime_env = {**self.runtime_env, "env_vars": variables, "py_modules": modules}
        if main is not None:
            runtime_env["working_dir"] = main
        return {
            "submission_id": self.submission_id,
            "entrypoint": self._entrypoint(self.submission_id, nonce),
            "runtime_env": runtime_env,
            "metadata": {NONCE_KEY: nonce, "nemo_run_job": self.job},
            **self.reservation,
        }

    def dispatched(
        self, body: dict[str, Any], outside: Sequence[OutsideSpec], dispatcher: str
    ) -> DispatchedJobSpec:
        """The job as a dispatcher gets it.

        Args:
            body: of its first attempt's request.
            outside: the jobs behind ``outside``.
            dispatcher: id of the dispatcher.
        """
        metadata = {
            **body["metadata"],
            DISPATCHER_KEY: dispatcher,
            RETRIES_KEY: str(self.retries),
            PERMANENT_KEY: ",".join(str(code) for code in self.permanent_exit_codes),
        }
        return DispatchedJobSpec(
            name=self.job,
            id=self.submission_id,
            nonce=metadata[NONCE_KEY],
            body={
                **body,
                "entrypoint": self._entrypoint(SUBMISSION_ID, metadata[NONCE_KEY]),
                "metadata": metadata,
            },
            after=self.after,
            outside=tuple(outside),
            retries=self.retries,
            permanent_exit_codes=self.permanent_exit_codes,
            pending_timeout_s=None if isinstance(self.spec, GroupSpec) else self.pending_timeout_s,
            time_s=self.time_s,
            secrets=self.spec.secrets,
        )

    def _entrypoint(self, submission_id: str, nonce: str) -> str:
        arguments = [self.spec_name, submission_id, nonce]
        if isinstance(self.spec, ArraySpec):
            return array_entrypoint(self.spec.python, ["array", *arguments])
        kind = "group" if isinstance(self.spec, GroupSpec) else "task"
        return entrypoint(self.spec.python, [kind, *arguments])

    @property
    def _stop_wait_s(self) -> int:
        return int(self.spec.grace_s) + _STOP_MARGIN_S


def plan(app: AppDef, executor: RayExecutor, submission_id: str, job: str) -> JobPlan:
    """Plan one job.

    Raises:
        ConfigError: a field of the executor is wrong, or asks for what this version cannot do.
    """
    executor.check()
    executor = executor.resolved()
    spec, reservation, runtime_env = _request(app, executor)
    is_array_job = isinstance(spec, ArraySpec)
    permanent = (
        (JobExit.SOME_FAILED.value,) if is_array_job else tuple(executor.permanent_exit_codes)
    )
    return JobPlan(
        job=job,
        submission_id=submission_id,
        spec=spec,
        reservation=reservation,
        runtime_env=runtime_env,
        packagers=packagers(app, executor),
        secret_places=joined_places(
            source.secret_places for source in (executor, *executor.resource_group)
        ),
        runs_here=executor.resolve_cluster().runs_here,
        outside=tuple(executor.dependencies),
        retries=executor.retries,
        permanent_exit_codes=permanent,
        max_in_flight=None if is_array_job else executor.max_in_flight,
        # A group gives itself up, as its driver knows whether it is placed.
        pending_timeout_s=None if needs_group_driver(app, executor) else executor.pending_timeout_s,
        time_s=executor.time_s,
    )


def _request(
    app: AppDef, executor: RayExecutor
) -> tuple[JobSpec | GroupSpec | ArraySpec, dict[str, Any], dict[str, Any]]:
    """What the node is told, what Ray reserves for it, and the runtime environment of the job.

    Those of a group or of an array are its driver's affair.
    """
    if is_array(app.roles):
        return array_spec(app.roles[0], executor), {}, {}
    if needs_group_driver(app, executor):
        return group_spec(app, executor), {}, {}
    _check_alone(executor)
    spec = task_spec(app.roles[0], executor)
    spec = spec._replace(env={**spec.env, **single_replica_environment(executor)})
    return spec, _reservation(executor), resolve_runtime_env(executor.runtime_env)


def joined_places(
    several: Iterable[Mapping[str, Sequence[str]]],
) -> dict[str, tuple[str, ...]]:
    """The places of several executors' or jobs' secrets, which are sent together.

    Raises:
        ConfigError: they differ about a secret.
    """
    joined: dict[str, tuple[str, ...]] = {}
    for places in several:
        for name, found in places.items():
            if joined.setdefault(name, tuple(found)) != tuple(found):
                raise ConfigError(
                    f"The secret {name} comes from {', '.join(joined[name])} by one cluster file, "
                    f"and from {', '.join(found)} by another; jobs that are handed over together "
                    "have one value of it. Give them different names, or one file."
                )
    return joined


def _check_alone(executor: RayExecutor) -> None:
    for name in ("service", "ready"):
        if getattr(executor, name):
            raise ConfigError(
                f"RayExecutor.{name} is {getattr(executor, name)!r}, but the task is alone: "
                "services and probes are for the roles of a group (`experiment.add([…], …)`)."
            )


def in_folder(planned: JobPlan, cwd: str) -> JobPlan:
    """The plan of a job on this machine: what ships no code runs in the caller's folder."""
    if isinstance(planned.spec, JobSpec):
        return replace(planned, spec=_moved(planned.spec, cwd))
    if isinstance(planned.spec, ArraySpec):
        host = planned.spec.host._replace(task=_moved(planned.spec.host.task, cwd))
        return replace(planned, spec=planned.spec._replace(host=host))
    return replace(planned, spec=_moved_roles(planned.spec, cwd))


def _moved_roles(spec: GroupSpec, cwd: str) -> GroupSpec:
    roles = tuple(
        # A container does not have the caller's folder.
        role if is_container(role.runtime_env) else role._replace(task=_moved(role.task, cwd))
        for role in spec.roles
    )
    return spec._replace(roles=roles)


def _moved(spec: JobSpec, cwd: str) -> JobSpec:
    return spec if spec.has_code else spec._replace(cwd=cwd)


def _reservation(executor: RayExecutor) -> dict[str, Any]:
    asked: dict[str, Any] = {}
    if executor.cpus_per_node is not None:
        asked["entrypoint_num_cpus"] = executor.cpus_per_node
    if executor.gpus_per_node:
        asked["entrypoint_num_gpus"] = executor.gpus_per_node
    if executor.memory_bytes:
        asked["entrypoint_memory"] = executor.memory_bytes
    if executor.resources_per_node:
        asked["entrypoint_resources"] = dict(executor.resources_per_node)
    if executor.label_selector:
        asked["entrypoint_label_selector"] = dict(executor.label_selector)
    return asked
