"""The plan of one job: what torchx and the executor say becomes what the node is told.

Nothing here asks a cluster, reads a clock or imports ray; files that a runtime environment names
are read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nemo_run.core.packaging.base import Packager
from torchx.specs import AppDef

from nemo_run_ray.errors import ConfigError
from nemo_run_ray.executor import RayExecutor
from nemo_run_ray.ids import safe_id
from nemo_run_ray.planning.entrypoints import entrypoint
from nemo_run_ray.planning.roles import (
    group_spec,
    needs_group_driver,
    packagers,
    selector_since,
    task_spec,
)
from nemo_run_ray.remote.attempts import DISPATCHER_KEY, NONCE_KEY, PERMANENT_KEY, RETRIES_KEY
from nemo_run_ray.remote.rows import JobRow
from nemo_run_ray.remote.spec import (
    CODE,
    SUBMISSION_ID,
    DispatchedJobSpec,
    GroupSpec,
    JobSpec,
    OutsideSpec,
)
from nemo_run_ray.runtime_env import is_container, resolve

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
        selector_since: first version of Ray that knows what it asks for, if it matters.
        runs_here: the code stays where it is.
        after: names of the experiment's jobs on this cluster that must have succeeded.
        outside: handles of other experiments' jobs that must have succeeded.
        retries: further attempts after a failure.
        permanent_exit_codes: that no further attempt would change.
        max_in_flight: so many of the experiment's jobs at once at most.
        pending_timeout_s: seconds that it may wait for room.
    """

    job: str
    submission_id: str
    spec: JobSpec | GroupSpec
    reservation: dict[str, Any] = field(default_factory=dict)
    runtime_env: dict[str, Any] = field(default_factory=dict)
    packagers: dict[str, Packager] = field(default_factory=dict)
    selector_since: tuple[int, int] | None = None
    runs_here: bool = False
    after: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()
    retries: int = 0
    permanent_exit_codes: tuple[int, ...] = ()
    max_in_flight: int | None = None
    pending_timeout_s: float | None = None

    @property
    def needs_dispatcher(self) -> bool:
        """Whether a dispatcher must look after it on the cluster, before its start or after it."""
        timed = self.pending_timeout_s is not None
        return bool(self.after or self.outside or self.retries or self.max_in_flight or timed)

    @property
    def spec_name(self) -> str:
        """Name of the job inside the job archive; equal for equal jobs of other experiments."""
        return safe_id(self.job)

    def body(self, code: Mapping[str, str], archives: list[str], nonce: str) -> dict[str, Any]:
        """The body of ``POST /api/jobs/``.

        Args:
            code: URIs of the code archives, by the names in ``packagers``.
            archives: URIs of the job archive and of the archive of secrets.
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
            pending_timeout_s=self.pending_timeout_s,
            secrets=self.spec.secrets,
        )

    def _entrypoint(self, submission_id: str, nonce: str) -> str:
        kind = "group" if isinstance(self.spec, GroupSpec) else "task"
        return entrypoint(self.spec.python, [kind, self.spec_name, submission_id, nonce])

    @property
    def _stop_wait_s(self) -> int:
        return int(self.spec.grace_s) + _STOP_MARGIN_S


def plan(app: AppDef, executor: RayExecutor, submission_id: str, job: str) -> JobPlan:
    """Plan one job.

    Raises:
        ConfigError: a field of the executor is wrong, or asks for what this version cannot do.
    """
    executor.check()
    ships = packagers(app, executor)
    spec: JobSpec | GroupSpec
    if needs_group_driver(app, executor):
        spec, reservation, runtime_env = group_spec(app, executor), {}, {}
    else:
        _check_alone(executor)
        spec = task_spec(app.roles[0], executor)
        spec = replace(spec, env={**spec.env, **_macro_environment(executor)})
        reservation, runtime_env = _reservation(executor), resolve(executor.runtime_env)
    return JobPlan(
        job=job,
        submission_id=submission_id,
        spec=spec,
        reservation=reservation,
        runtime_env=runtime_env,
        packagers=ships,
        selector_since=selector_since(spec, executor),
        runs_here=executor.resolve_cluster().runs_here,
        outside=tuple(executor.dependencies),
        retries=executor.retries,
        permanent_exit_codes=tuple(executor.permanent_exit_codes),
        max_in_flight=executor.max_in_flight,
        # A group gives itself up: its driver knows whether it is placed.
        pending_timeout_s=None if needs_group_driver(app, executor) else executor.pending_timeout_s,
    )


def _check_alone(executor: RayExecutor) -> None:
    for name in ("service", "ready"):
        if getattr(executor, name):
            raise ConfigError(
                f"RayExecutor.{name} is {getattr(executor, name)!r}, but the task is alone: "
                "services and probes are for the roles of a group (`experiment.add([…], …)`)."
            )
    if executor.wait_for_nodes:
        raise ConfigError(
            "RayExecutor.wait_for_nodes is True, but the task is alone: Ray itself waits for a "
            "node that can take it. Leave the field out."
        )


def nonce_of(row: JobRow) -> str:
    """The nonce of the submission that made a row of Ray's job table; empty if it has none."""
    return str((row.get("metadata") or {}).get(NONCE_KEY, ""))


def in_folder(planned: JobPlan, cwd: str) -> JobPlan:
    """The plan of a job on this machine: what ships no code runs in the caller's folder."""
    spec = planned.spec
    if isinstance(spec, JobSpec):
        return replace(planned, spec=_moved(spec, cwd))
    roles = tuple(
        # A container does not have the caller's folder.
        role if is_container(role.runtime_env) else replace(role, task=_moved(role.task, cwd))
        for role in spec.roles
    )
    return replace(planned, spec=replace(spec, roles=roles))


def _moved(spec: JobSpec, cwd: str) -> JobSpec:
    return spec if spec.has_code else replace(spec, cwd=cwd)


def _macro_environment(executor: RayExecutor) -> dict[str, str]:
    return {
        "NEMO_RUN_HEAD_NODE_IP": "127.0.0.1",
        "NEMO_RUN_NPROC_PER_NODE": str(executor.ntasks_per_node),
        "NEMO_RUN_NUM_NODES": "1",
        "NEMO_RUN_NODE_RANK": "0",
    }


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
