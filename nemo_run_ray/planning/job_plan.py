"""Pure planning: what torchx and the executor say becomes what the node is told.

Nothing here asks a cluster, reads a clock or imports ray.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nemo_run.core.packaging.base import Packager
from torchx.specs import AppDef

from nemo_run_ray.errors import ConfigError
from nemo_run_ray.executor import RayExecutor
from nemo_run_ray.planning.roles import (
    group_spec,
    needs_group_driver,
    packagers,
    selector_since,
    task_spec,
)
from nemo_run_ray.remote.attempts import DISPATCHER_KEY, NONCE_KEY, PERMANENT_KEY, RETRIES_KEY
from nemo_run_ray.remote.spec import (
    CODE,
    DispatchedJobSpec,
    GroupSpec,
    JobSpec,
    OutsideSpec,
    ProbeSpec,
)
from nemo_run_ray.runtime_env import is_container, resolve

#: Name of the package in the job archive.
REMOTE_PACKAGE = "nemo_run_ray_remote"
#: Longest id: Ray makes ``job-driver-<id>.log`` of it, and a file's name has 255 bytes.
ID_MAX = 180
#: Seconds that Ray waits longer than we do before it kills our own process.
_STOP_MARGIN_S = 10
#: How often one dispatcher's job starts it, when it is killed again and again.
_DISPATCHER_STARTS = 100
#: What ``_find`` has found, in shell.
_FOUND = '"$p"'
#: Credentials in the address of a package index.
_CREDENTIALS = re.compile(r"(?<=://)[^/\s@'\"]+@")
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class JobPlan:
    """One job, ready to be given addresses and sent.

    Attributes:
        job: its name in NeMo-Run.
        submission_id: its name on the cluster.
        spec: what the node is told.
        reservation: the parts of Ray's job request that say what to reserve.
        runtime_env: the user's, to which the archives are added.
        packagers: of the roles whose code travels, by the role's name.
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
        """Whether somebody must look after it on the cluster, before its start or after its end."""
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
        modules = [*archives, *(one for one in others if one is not None)]
        runtime_env = {**self.runtime_env, "env_vars": variables, "py_modules": modules}
        if main is not None:
            runtime_env["working_dir"] = main
        kind = "group" if isinstance(self.spec, GroupSpec) else "task"
        line = entrypoint(self.spec.python, [kind, self.spec_name, self.submission_id, nonce])
        return {
            "submission_id": self.submission_id,
            "entrypoint": line,
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
            body={**body, "metadata": metadata},
            after=self.after,
            outside=tuple(outside),
            retries=self.retries,
            permanent_exit_codes=self.permanent_exit_codes,
            pending_timeout_s=self.pending_timeout_s,
            secrets=self.spec.secrets,
        )

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


def nonce_of(row: Mapping[str, Any]) -> str:
    """The nonce of the submission that made a row of Ray's job table; empty if none of ours."""
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


def job_id(experiment_id: str, job: str) -> str:
    """Submission id of an experiment's job: the same at every call.

    Names with dots can be cut in two ways; ``submit_once`` refuses an id that is another job's.
    """
    return _shorten(f"{safe_id(experiment_id)}.{safe_id(job)}")


def safe_id(name: str) -> str:
    """The name in characters that are safe in an id, a file's name and a URL.

    A name that had to change gets a hash, so that different names stay different.
    """
    safe = _UNSAFE.sub("_", name)
    if safe == name and safe.strip("."):
        return safe
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{safe.strip('.')}-{digest[:8]}"


def _shorten(name: str) -> str:
    if len(name) <= ID_MAX:
        return name
    return f"{name[: ID_MAX - 11]}-{hashlib.sha256(name.encode()).hexdigest()[:10]}"


def entrypoint(python: str | None, arguments: Sequence[str]) -> str:
    """The shell line that Ray runs and shows: the remote half with these arguments.

    Args:
        python: the interpreter; ``None`` is python3 or python, and ``remote/start.py`` looks for
            another one if that does not serve.
        arguments: the kind of the job, and what ``remote/__main__.py`` gets behind it.
    """
    if python is not None:
        return f"exec {_start(shlex.quote(python), arguments)}"
    return f"{_find(['python3', 'python'])}exec {_start(_FOUND, arguments)}"


def dispatcher_entrypoint(pythons: Sequence[str], submission_id: str, nonce: str) -> str:
    """The shell line of a dispatcher: killed by a signal, it is started again.

    Args:
        pythons: interpreters that the jobs name, tried first; they may not be on the head.
        submission_id: of the dispatcher.
        nonce: of the dispatch.
    """
    line = _start(_FOUND, ["dispatch", submission_id, nonce])
    return (
        f"{_find([*pythons, 'python3', 'python'])}"
        f"for start in $(seq {_DISPATCHER_STARTS}); do {line}; code=$?; "
        "[ $code -gt 128 ] || break; "
        'echo "nemo_run_ray| the dispatcher was killed (exit code $code) and is started again"; '
        "sleep 1; done; "
        "exit $code"
    )


def _find(pythons: Sequence[str]) -> str:
    """Shell text that finds the first of these that runs; one may be the shim of a version manager
    that has no version."""
    names = " ".join(shlex.quote(one) for one in pythons)
    return f'for p in {names}; do {_FOUND} -c "" 2>/dev/null && break; done; '


def _start(python: str, arguments: Sequence[str]) -> str:
    return f"{python} -m {REMOTE_PACKAGE}.start {shlex.join(arguments)}"


def describe(planned: JobPlan, cluster: str, travels: list[str]) -> str:
    """The request for people, as a dry run prints it. Secrets are named, never shown.

    Args:
        cluster: the cluster in words.
        travels: what would be uploaded, in words.
    """
    spec = planned.spec
    lines = [f"Ray job   {planned.submission_id}", f"cluster   {cluster}"]
    lines += _describe_turn(planned)
    if isinstance(spec, JobSpec):
        lines += _describe_task(spec, _words(planned.reservation), planned.runtime_env)
        return "\n".join(lines + [f"travels   {one}" for one in travels])
    lines.append(f"strategy  {spec.strategy}, all {len(spec.roles)} role(s) at once or none")
    lines += [f"travels   {one}" for one in travels]
    for role in spec.roles:
        kind = "service" if role.service else "primary"
        copies = f"{role.replicas} replica(s) of {role.processes} process(es)"
        lines += ["", f"role      {role.name}, {kind}, {copies}"]
        lines += _describe_task(role.task, _words(role.resources), role.runtime_env)
        if role.label_selector:
            lines.append(f"labels    {role.label_selector}")
        ports = {name: port or "free" for name, port in role.ports.items() if name[0] != "_"}
        if ports:
            lines.append(f"ports     {_words(ports)}")
        if role.ready is not None:
            lines.append(f"ready     {_describe_probe(role.ready)}")
    return "\n".join(lines)


def _describe_turn(planned: JobPlan) -> list[str]:
    """What the dispatcher will see to."""
    lines = []
    if planned.after or planned.outside:
        lines.append(f"after     {', '.join([*planned.after, *planned.outside])}")
    if planned.retries:
        codes = ", ".join(str(code) for code in planned.permanent_exit_codes)
        unless = f", unless it ends with exit code {codes}" if codes else ""
        lines.append(f"retries   {planned.retries}{unless}")
    if planned.max_in_flight is not None:
        lines.append(f"at once   {planned.max_in_flight} of the experiment's jobs")
    if planned.pending_timeout_s is not None:
        lines.append(f"give up   when not placed within {planned.pending_timeout_s:g} s")
    return lines


def _describe_task(spec: JobSpec, reserves: str, runtime_env: Mapping[str, Any]) -> list[str]:
    lines = [
        f"command   {shlex.join(spec.argv)}",
        f"reserves  {reserves or 'nothing'}",
        f"folder    {spec.cwd or 'a private run directory on the node'}",
    ]
    if runtime_env:
        lines.append(f"runtime   {_CREDENTIALS.sub('***@', str(dict(runtime_env)))}")
    lines += [f"env       {name}={value}" for name, value in sorted(spec.env.items())]
    lines += [f"secret    {name}=***" for name in spec.secrets]
    return lines


def _describe_probe(probe: ProbeSpec) -> str:
    if probe.kind == "command":
        what = shlex.join(probe.command)
    else:
        what = f"port {probe.port}"
        what += f", GET {probe.path} gives {probe.status}" if probe.kind == "http" else ""
    return f"{what}; every {probe.interval_s:g} s, at most {probe.timeout_s:g} s"


def _words(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name.removeprefix('entrypoint_')}={value}" for name, value in values.items()
    )


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
