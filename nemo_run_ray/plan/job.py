"""The plan of one job: what torchx and the executor say becomes what the node is told.

Nothing here asks a cluster, reads a clock or imports ray; files that a runtime environment names
are read.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
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
    OutsideSpec,
    RoleSpec,
)
from nemo_run_ray.remote.status import DISPATCHER_KEY, PERMANENT_KEY, RETRIES_KEY, JobExit

#: Name under which the half on the cluster is sent.
REMOTE_PACKAGE = "nemo_run_ray_remote"
#: Seconds that Ray waits longer than we do before it kills our own process.
_STOP_MARGIN_S = 10
#: Starts of a dispatcher, and of an array's driver, by their jobs when they are killed.
_DISPATCHER_STARTS, _ARRAY_STARTS = 100, 20
#: Credentials in the address of a package index.
_CREDENTIALS = re.compile(r"(?<=://)[^/\s@'\"]+@")


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

    @property
    def spec_name(self) -> str:
        """Name of the job inside the job archive; equal for equal jobs of other experiments."""
        return safe_id(self.job)

    def tasks(self) -> dict[str, JobSpec]:
        """The tasks, by the names in ``packagers``."""
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
        stop_wait_s = int(self.spec.grace_s) + _STOP_MARGIN_S
        variables.setdefault("RAY_JOB_STOP_WAIT_TIME_S", str(stop_wait_s))
        # Ray unpacks one archive as the working directory; those of other roles lie beside it.
        uris = list(dict.fromkeys(code.values()))
        if len(uris) > 1:
            names = {role: uri.rpartition("/")[2] for role, uri in code.items()}
            variables[CODE] = json.dumps(names, sort_keys=True)
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
            time_s=self.time_s,
            secrets=self.spec.secrets,
        )

    def _entrypoint(self, submission_id: str, nonce: str) -> str:
        arguments = [self.spec_name, submission_id, nonce]
        if isinstance(self.spec, ArraySpec):
            # Killed, it is started again, and reads its journal. A stop is for the driver; the
            # shell waits for it.
            find, start = _start(self.spec.python, ["array", *arguments])
            return f"trap '' TERM; {_again(find, start, _ARRAY_STARTS, '-eq 137')}"
        kind = "group" if isinstance(self.spec, GroupSpec) else "task"
        return entrypoint(self.spec.python, [kind, *arguments])


def plan(app: AppDef, executor: RayExecutor, submission_id: str, job: str) -> JobPlan:
    """Plan one job.

    Raises:
        ConfigError: a field of the executor is wrong, or asks for what this version cannot do.
    """
    executor.check()
    executor = executor.resolved()
    reservation: dict[str, Any] = {}
    runtime_env: dict[str, Any] = {}
    permanent = tuple(executor.permanent_exit_codes)
    max_in_flight, pending_timeout_s = executor.max_in_flight, executor.pending_timeout_s
    spec: JobSpec | GroupSpec | ArraySpec
    # What a group or an array reserves is its driver's affair.
    if any(role.entrypoint == ARRAY for role in app.roles):
        from nemo_run_ray.plan.array import array_spec  # most programs have no array

        spec = array_spec(app.roles, executor)
        permanent, max_in_flight = (JobExit.SOME_FAILED.value,), None
    elif needs_group_driver(app, executor):
        spec = group_spec(app, executor)
        pending_timeout_s = None  # the driver gives up, as it knows whether the group is placed
    else:
        why = "but the task is alone: it is for the roles of a group (`experiment.add([…], …)`)."
        refuse_fields(executor, ("service", "ready"), why)
        spec = task_spec(app.roles[0], executor)
        # The variables behind NeMo-Run's macros.
        alone = {"HEAD_NODE_IP": "127.0.0.1", "NPROC_PER_NODE": str(executor.ntasks_per_node)}
        alone |= {"NUM_NODES": "1", "NODE_RANK": "0"}
        env = {f"NEMO_RUN_{name}": value for name, value in alone.items()}
        spec = spec._replace(env={**spec.env, **env})
        reservation = _reservation(executor)
        runtime_env = resolve_runtime_env(executor.runtime_env)
    sources = (executor, *executor.resource_group)
    return JobPlan(
        job=job,
        submission_id=submission_id,
        spec=spec,
        reservation=reservation,
        runtime_env=runtime_env,
        packagers=packagers(app, executor),
        secret_places=joined_places(source.secret_places for source in sources),
        outside=tuple(executor.dependencies),
        retries=executor.retries,
        permanent_exit_codes=permanent,
        max_in_flight=max_in_flight,
        pending_timeout_s=pending_timeout_s,
        time_s=executor.time_s,
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


def _reservation(executor: RayExecutor) -> dict[str, Any]:
    """The fields of Ray's request; ``cpus_per_node=0`` reserves none, where Ray reserves one."""
    asked = {
        "entrypoint_num_cpus": executor.cpus_per_node,
        "entrypoint_num_gpus": executor.gpus_per_node or None,
        "entrypoint_memory": executor.memory_bytes or None,
        "entrypoint_resources": dict(executor.resources_per_node) or None,
        "entrypoint_label_selector": dict(executor.label_selector) or None,
    }
    return {name: amount for name, amount in asked.items() if amount is not None}


# ---------------------------------------------------------------------- the shell lines


def entrypoint(python: str | None, arguments: Sequence[str]) -> str:
    """The shell line that Ray runs and shows: the remote half with these arguments.

    Args:
        python: the interpreter; ``None`` is python3 or python, and ``remote/start.py`` looks for
            another one if that does not serve.
        arguments: the kind of the job, and what ``remote/__main__.py`` gets behind it.
    """
    find, start = _start(python, arguments)
    return f"{find}exec {start}"


def dispatcher_entrypoint(pythons: Sequence[str], submission_id: str, nonce: str) -> str:
    """The shell line of a dispatcher: killed by a signal, it is started again.

    Args:
        pythons: interpreters that the jobs name, tried first; they may not be on the head.
        submission_id: of the dispatcher.
        nonce: of the dispatch.
    """
    find, start = _start(None, ["dispatch", submission_id, nonce], pythons)
    killed = "the dispatcher was killed (exit code $code) and is started again"
    return _again(find, start, _DISPATCHER_STARTS, "-gt 128", f'echo "nemo_run_ray| {killed}"; ')


def _start(
    python: str | None, arguments: Sequence[str], pythons: Sequence[str] = ()
) -> tuple[str, str]:
    """Shell text that finds a Python, and text that starts the remote half by it.

    The first that runs is taken: one may be the shim of a version manager that has no version.
    """
    found, find = "" if python is None else shlex.quote(python), ""
    if python is None:
        found, names = '"$p"', " ".join(map(shlex.quote, [*pythons, "python3", "python"]))
        find = f'for p in {names}; do {found} -S -c "" 2>/dev/null && break; done; '
    return find, f"{found} -S -m {REMOTE_PACKAGE}.start {shlex.join(arguments)}"


def _again(find: str, start: str, count: int, unless: str, note: str = "") -> str:
    """A shell line that starts a program again while its exit code fulfils a condition."""
    return (
        f"{find}for start in $(seq {count}); do {start}; code=$?; [ $code {unless} ] || break; "
        f"{note}sleep 1; done; exit $code"
    )


# ---------------------------------------------------------------------- the text of a dry run


def describe(planned: JobPlan, cluster: str, uploads: list[str]) -> str:
    """The request for people, as a dry run prints it. Secrets are named, never shown.

    Args:
        cluster: the cluster in words.
        uploads: what would be uploaded, in words.
    """
    spec = planned.spec
    codes = ", ".join(map(str, planned.permanent_exit_codes))
    unless = f", unless it ends with exit code {codes}" if codes else ""
    has_retries = planned.retries and planned.needs_dispatcher
    limit, timeout_s = planned.max_in_flight, planned.pending_timeout_s
    rows: _Rows = [
        ("Ray job", planned.submission_id),
        ("cluster", cluster),
        ("after", ", ".join([*planned.after, *planned.outside])),
        ("retries", f"{planned.retries}{unless}" if has_retries else ""),
        ("at once", limit and f"{limit} of the experiment's jobs"),
        ("give up", timeout_s and f"when not placed within {timeout_s:g} s"),
        ("starts", planned.time_s and f"when its allocation lasts {planned.time_s:g} s more"),
    ]
    sends: _Rows = [("sends", upload) for upload in uploads]
    if isinstance(spec, JobSpec):
        rows += [*_describe_task(spec, planned.reservation, planned.runtime_env), *sends]
    elif isinstance(spec, ArraySpec):
        targets = (" ".join(str(part) for part in target if part) for target in spec.targets)
        failures = spec.max_failures
        rows += [
            ("elements", f"of {spec.elements}; each changes {', '.join(targets)}"),
            ("at once", spec.max_in_flight or "as many as there is room for"),
            ("retries", f"{spec.retries} of each element"),
            ("ends", None if failures is None else f"when more than {failures} elements failed"),
            *_describe_role(spec.host),
            *sends,
        ]
    else:
        rows += [("strategy", f"{spec.strategy}, all {len(spec.roles)} role(s) at once or none")]
        rows += sends
        for role in spec.roles:
            kind = "service" if role.service else "primary"
            copies = f"{role.replicas} replica(s) of {role.processes} process(es)"
            rows += [("", ""), ("role", f"{role.name}, {kind}, {copies}"), *_describe_role(role)]
    return "\n".join(f"{title:<10}{value}".rstrip() for title, value in rows if value or not title)


_Rows = list[tuple[str, Any]]


def _describe_role(role: RoleSpec) -> _Rows:
    ports = {name: port or "free" for name, port in role.ports.items() if name[0] != "_"}
    ready, probe = "", role.ready
    if probe is not None:
        ready = shlex.join(probe.command) if probe.kind == "command" else f"port {probe.port}"
        if probe.kind == "http":
            ready += f", GET {probe.path} gives {probe.status}"
        ready += f"; every {probe.interval_s:g} s, at most {probe.timeout_s:g} s"
    return [
        *_describe_task(role.task, role.resources, role.runtime_env),
        ("labels", role.label_selector),
        ("ports", _listed(ports)),
        ("ready", ready),
    ]


def _describe_task(
    spec: JobSpec, reserves: Mapping[str, Any], runtime_env: Mapping[str, Any]
) -> _Rows:
    return [
        ("command", shlex.join(spec.argv)),
        ("shell", "bash -l: the node's profile sets PATH" if spec.login_shell else ""),
        *(("before", command.replace("\n", f"\n{'':10}")) for command in spec.startup),
        ("reserves", _listed(reserves) or "nothing"),
        ("python", spec.python),
        ("folder", spec.cwd or "a private run directory on the node"),
        ("runtime", runtime_env and _CREDENTIALS.sub("***@", str(dict(runtime_env)))),
        *(("env", f"{name}={value}") for name, value in sorted(spec.env.items())),
        *(("secret", f"{name}=***") for name in spec.secrets),
    ]


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name.removeprefix('entrypoint_')}={value}" for name, value in values.items()
    )
