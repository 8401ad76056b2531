"""The plan of one job: what torchx and the executor say becomes what the node is told.

Nothing here asks a cluster, reads a clock or imports ray; files that a runtime environment names
are read.
"""

from __future__ import annotations

import copy
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_run.core.packaging.base import Packager
from torchx.specs import AppDef

from nemo_run_ray.errors import ConfigError, TooOld
from nemo_run_ray.executor import RayExecutor
from nemo_run_ray.fields import resolve_runtime_env, version_of
from nemo_run_ray.ids import safe_id
from nemo_run_ray.plan.roles import (
    ARRAY,
    SELECTORS_SINCE,
    group_spec,
    needs_group_driver,
    packagers,
    refuse_fields,
    task_spec,
)
from nemo_run_ray.remote.spec import (
    CODE,
    NONCE_KEY,
    SUBMISSION_ID,
    ArraySpec,
    DispatchedJobSpec,
    GroupSpec,
    JobSpec,
    Json,
    OutsideSpec,
    RoleSpec,
)
from nemo_run_ray.remote.status import DISPATCHER_KEY, PERMANENT_KEY, RETRIES_KEY, JobExit

#: Name under which the half on the cluster is sent.
REMOTE_PACKAGE = "nemo_run_ray_remote"
#: Seconds that Ray waits longer than we do before it kills our own process.
_STOP_MARGIN_S = 10
#: Starts of a dispatcher, and of an array's driver, by their jobs when they are killed.
_STARTS = 100
#: Credentials in the address of a package index.
_CREDENTIALS = re.compile(r"(?<=://)[^/\s@'\"]+@")


@dataclass(frozen=True)
class JobPlan:
    """One job, ready to be given addresses and sent.

    Attributes:
        executor: with the values of its cluster file, and without what the spec sees to itself.
        reservation: the parts of Ray's job request that say what to reserve.
        packagers: of the roles whose code is sent, by the role's name.
        secret_places: by name, the other variables or files that hold the values of secrets.
        outside: handles of other experiments' jobs that must have succeeded; the planned one has
            names of experiments too, which the scheduler looks up.
        after: names of the experiment's jobs on this cluster that must have succeeded.
        place: its number in the experiment, from 0.
    """

    job: str
    submission_id: str
    spec: JobSpec | GroupSpec | ArraySpec
    executor: RayExecutor = field(compare=False)
    reservation: Json
    runtime_env: Json
    packagers: dict[str, Packager]
    secret_places: dict[str, tuple[str, ...]]
    outside: tuple[str, ...]
    after: tuple[str, ...] = ()
    place: int = 0

    @property
    def needs_dispatcher(self) -> bool:
        """Whether a dispatcher must look after it on the cluster, before its start or after it."""
        executor = self.executor
        again = executor.retries and not isinstance(self.spec, ArraySpec)  # it retries elements
        limits = executor.max_in_flight, executor.pending_timeout_s, executor.time_s
        return bool(self.after or self.outside or again) or limits != (None, None, None)

    def check_version(self, ray: str) -> None:
        """Check that a cluster's Ray can do what the job asks for.

        Raises:
            TooOld: it cannot.
        """
        has_labels = "entrypoint_label_selector" in self.reservation
        if isinstance(self.spec, GroupSpec):
            has_labels = any(role.spread or role.label_selector for role in self.spec.roles)
        if has_labels and version_of(ray) < SELECTORS_SINCE:
            raise TooOld(
                "Choosing nodes by RayExecutor.label_selector, or by strategy in a group, needs "
                f"Ray 2.54 or newer; the cluster runs {ray}. Upgrade it, or use "
                "resources_per_node with a custom resource of these nodes."
            )

    def tasks(self) -> dict[str, JobSpec]:
        """The tasks, by the names in ``packagers``."""
        if isinstance(self.spec, GroupSpec):
            return {role.name: role.task for role in self.spec.roles}
        task = self.spec.host.task if isinstance(self.spec, ArraySpec) else self.spec
        return {next(iter(self.packagers), ""): task}

    def body(self, code: Mapping[str, str], archives: list[str], nonce: str) -> Json:
        """The body of ``POST /api/jobs/``.

        Args:
            code: URIs of the code archives, by the names in ``packagers``.
            archives: URIs, first of the package, then of the job and of its secrets.
            nonce: tells this submission from any other of the same id.
        """
        variables = dict(self.runtime_env.get("env_vars", {}))
        variables.setdefault(
            "RAY_JOB_STOP_WAIT_TIME_S", str(int(self.spec.grace_s) + _STOP_MARGIN_S)
        )
        # Ray unpacks one archive as the working directory; those of other roles lie beside it.
        uris = list(dict.fromkeys(code.values()))
        if len(uris) > 1:
            variables[CODE] = json.dumps(
                {role: uri.rpartition("/")[2] for role, uri in code.items()}, sort_keys=True
            )
        runtime_env = {
            **self.runtime_env,
            "env_vars": variables,
            "py_modules": [*archives, *uris[1:]],
        }
        if uris:
            runtime_env["working_dir"] = uris[0]
        return {
            "submission_id": self.submission_id,
            "entrypoint": self._entrypoint(self.submission_id, nonce),
            "runtime_env": runtime_env,
            "metadata": {NONCE_KEY: nonce, "nemo_run_job": self.job},
            **self.reservation,
        }

    def dispatched(
        self, body: Json, outside: Sequence[OutsideSpec], dispatcher: str
    ) -> DispatchedJobSpec:
        """The job as a dispatcher gets it, with the body of its first attempt's request."""
        executor = self.executor
        nonce = body["metadata"][NONCE_KEY]
        return DispatchedJobSpec(
            name=self.job,
            id=self.submission_id,
            nonce=nonce,
            body={
                **body,
                "entrypoint": self._entrypoint(SUBMISSION_ID, nonce),
                "metadata": {
                    **body["metadata"],
                    DISPATCHER_KEY: dispatcher,
                    RETRIES_KEY: str(executor.retries),
                    PERMANENT_KEY: ",".join(map(str, executor.permanent_exit_codes)),
                },
            },
            after=self.after,
            outside=tuple(outside),
            retries=executor.retries,
            permanent_exit_codes=tuple(executor.permanent_exit_codes),
            pending_timeout_s=executor.pending_timeout_s,
            time_s=executor.time_s,
            secrets=self.spec.secrets,
        )

    def _entrypoint(self, submission_id: str, nonce: str) -> str:
        arguments = [safe_id(self.job), submission_id, nonce]
        if isinstance(self.spec, ArraySpec):
            # Killed, it is started again, and reads its journal. A stop is for the driver; the
            # shell waits for it.
            line = entrypoint(self.spec.python, ["array", *arguments], again="-eq 137")
            return f"trap '' TERM; {line}"
        kind = "group" if isinstance(self.spec, GroupSpec) else "task"
        return entrypoint(self.spec.python, [kind, *arguments])


def plan(app: AppDef, executor: RayExecutor, submission_id: str, job: str) -> JobPlan:
    """Plan one job.

    Raises:
        ConfigError: a field of the executor is wrong, or asks for what this version cannot do.
    """
    executor.check()
    executor = copy.copy(executor.resolved())
    reservation: Json = {}
    runtime_env: Json = {}
    spec: JobSpec | GroupSpec | ArraySpec
    # What a group or an array reserves is its driver's affair.
    if any(role.entrypoint == ARRAY for role in app.roles):
        from nemo_run_ray.plan.array import array_spec  # most programs have no array

        spec = array_spec(app.roles, executor)
        executor.permanent_exit_codes = [JobExit.SOME_FAILED.value]
        executor.max_in_flight = None
    elif needs_group_driver(app, executor):
        spec = group_spec(app, executor)
        executor.pending_timeout_s = None  # the driver gives up: it knows whether it is placed
    else:
        refuse_fields(
            executor,
            ("service", "ready"),
            "but the task is alone: it is for the roles of a group (`experiment.add([…], …)`).",
        )
        spec = task_spec(app.roles[0], executor)
        macros = {  # the variables behind NeMo-Run's macros
            "NEMO_RUN_HEAD_NODE_IP": "127.0.0.1",
            "NEMO_RUN_NPROC_PER_NODE": str(executor.ntasks_per_node),
            "NEMO_RUN_NUM_NODES": "1",
            "NEMO_RUN_NODE_RANK": "0",
        }
        spec = spec._replace(env={**spec.env, **macros})
        # `cpus_per_node=0` reserves none, where Ray reserves one.
        asked = {
            "entrypoint_num_cpus": executor.cpus_per_node,
            "entrypoint_num_gpus": executor.gpus_per_node or None,
            "entrypoint_memory": executor.memory_bytes or None,
            "entrypoint_resources": dict(executor.resources_per_node) or None,
            "entrypoint_label_selector": dict(executor.label_selector) or None,
        }
        reservation = {name: amount for name, amount in asked.items() if amount is not None}
        runtime_env = resolve_runtime_env(executor.runtime_env)
    return JobPlan(
        job,
        submission_id,
        spec,
        executor,
        reservation,
        runtime_env,
        packagers=packagers(app, executor),
        secret_places=joined_places(
            source.secret_places for source in (executor, *executor.resource_group)
        ),
        outside=tuple(executor.dependencies),
    )


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
                    f"and from {', '.join(found)} by another; jobs that are submitted together "
                    "have one value of it. Give them different names, or one file."
                )
    return joined


# ---------------------------------------------------------------------- the shell lines


def entrypoint(
    python: str | None,
    arguments: Sequence[str],
    pythons: Sequence[str] = (),
    again: str = "",
) -> str:
    """The shell line that Ray runs and shows: the remote half with these arguments.

    Args:
        python: the interpreter; ``None`` is the first that runs of ``pythons``, python3 and python
            (one may be the shim of a version manager that has no version), and ``remote/start.py``
            looks for another one if that does not serve.
        arguments: the kind of the job, and what ``remote/__main__.py`` gets behind it.
        again: a condition for the exit code; while it is fulfilled, the program is started again.
    """
    names = shlex.join([*pythons, "python3", "python"])
    find = f'for p in {names}; do "$p" -S -c "" 2>/dev/null && break; done; '
    if python is not None:
        find = f"p={shlex.quote(python)}; "
    start = f'"$p" -S -m {REMOTE_PACKAGE}.start {shlex.join(arguments)}'
    if not again:
        return f"{find}exec {start}"
    return (
        f"{find}for start in $(seq {_STARTS}); do {start}; code=$?; [ $code {again} ] || break; "
        'echo "nemo_run_ray| it was killed (exit code $code) and is started again"; sleep 1; done; '
        "exit $code"
    )


# ---------------------------------------------------------------------- the text of a dry run


def describe(planned: JobPlan, cluster: str, uploads: list[str]) -> str:
    """The request for people, as a dry run prints it. Secrets are named, never shown."""
    spec = planned.spec
    limits = dict(vars(planned.executor))
    rows: list[tuple[str, Any]]
    if isinstance(spec, GroupSpec):
        rows = [("strategy", f"{spec.strategy}, all {len(spec.roles)} role(s) at once or none")]
        owns = planned.executor.resource_group or [planned.executor]
        for role, own in zip(spec.roles, owns, strict=True):
            title = (
                f"{role.name}, {'service' if role.service else 'primary'}, "
                f"{role.replicas} replica(s) of {role.processes} process(es)"
            )
            rows += [("", ""), ("role", title), *_of_role(role)]
            rows.append(("ready", own.ready))
    elif isinstance(spec, ArraySpec):
        limits |= spec._asdict()
        most = "" if spec.max_failures is None else str(spec.max_failures)
        rows = [("max_failures", most), *_of_role(spec.host)]
    else:
        rows = [*_of_task(spec, planned.runtime_env), *planned.reservation.items()]
    names = ("retries", "permanent_exit_codes", "max_in_flight", "pending_timeout_s", "time_s")
    rows = [
        ("Ray job", planned.submission_id),
        ("cluster", cluster),
        ("after", (*planned.after, *planned.outside)),
        *((name, limits[name]) for name in names),
        *(("sends", upload) for upload in uploads),
        *rows,
    ]
    return "\n".join(
        f"{title.removeprefix('entrypoint_'):<22}{_text(value)}".rstrip()
        for title, value in rows
        if value or not title
    )


def _of_role(role: RoleSpec) -> Iterator[tuple[str, Any]]:
    yield from _of_task(role.task, role.runtime_env)
    yield "reserves", role.resources
    yield "label_selector", role.label_selector
    yield "ports", {name: port or "free" for name, port in role.ports.items() if name[0] != "_"}
    yield "restarts", role.restarts
    yield "strategy", role.spread


def _of_task(task: JobSpec, runtime_env: Json) -> Iterator[tuple[str, Any]]:
    yield "command", shlex.join(task.argv)
    yield "entrypoint_shell", "login" if task.login_shell else ""
    yield from (("startup command", command) for command in task.startup)
    yield "python", task.python
    yield "folder", task.cwd or "a private run directory on the node"
    yield "grace_s", task.grace_s
    yield "runtime_env", runtime_env
    yield from (("env", f"{name}={value}") for name, value in task.env.items())
    yield "secrets", task.secrets


def _text(value: Any) -> str:
    if isinstance(value, dict):
        value = ", ".join(f"{name}={inner}" for name, inner in value.items())
    elif isinstance(value, (list, tuple)):
        value = ", ".join(map(str, value))
    return _CREDENTIALS.sub("***@", str(value)).replace("\n", f"\n{'':22}")
