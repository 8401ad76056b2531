"""Pure planning: what torchx and the executor say becomes what the node is told.

Nothing here asks a cluster, reads a clock or imports ray.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nemo_run.core.execution.launcher import FaultTolerance, Torchrun
from torchx.specs import AppDef, Role

from nemo_run_ray.errors import ConfigError
from nemo_run_ray.executor import RayExecutor
from nemo_run_ray.remote.spec import JobSpec

#: Key in a job's metadata of the nonce that makes it ours.
NONCE_KEY = "nemo_run_ray"
#: Name of the package in the job archive.
REMOTE_PACKAGE = "nemo_run_ray_remote"
_RUNNER = "nemo_run.core.runners.fdl_runner"
#: Longest id: Ray makes ``job-driver-<id>.log`` of it, and a file's name has 255 bytes.
ID_MAX = 180
#: Seconds that Ray waits longer than we do before it kills our own process.
_STOP_MARGIN_S = 10
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")
#: NeMo-Run's macros in a command: ``$$${name}`` is the variable's value, ``${name}`` its name.
_MACRO = re.compile(r"(\$\$)?\$\{(\w+)\}")


@dataclass(frozen=True)
class JobPlan:
    """One job, ready to be given addresses and sent.

    Attributes:
        job: its name in NeMo-Run.
        submission_id: its name on the cluster.
        spec: what the node is told.
        request: the parts of Ray's job request that say what to reserve.
        runtime_env: the user's, to which the archives are added.
        runs_here: the code stays where it is.
    """

    job: str
    submission_id: str
    spec: JobSpec
    request: dict[str, Any] = field(default_factory=dict)
    runtime_env: dict[str, Any] = field(default_factory=dict)
    runs_here: bool = False

    @property
    def spec_name(self) -> str:
        """Name of the job inside the job archive; equal for equal jobs of other experiments."""
        return safe_id(self.job)

    def body(self, code: str | None, archives: list[str], nonce: str) -> dict[str, Any]:
        """The body of ``POST /api/jobs/``.

        Args:
            code: URI of the code archive, ``None`` when no code travels.
            archives: URIs of the job archive and of the archive of secrets.
            nonce: tells this submission from any other of the same id.
        """
        variables = dict(self.runtime_env.get("env_vars", {}))
        variables.setdefault("RAY_JOB_STOP_WAIT_TIME_S", str(self._stop_wait_s))
        runtime_env = {**self.runtime_env, "env_vars": variables, "py_modules": archives}
        if code is not None:
            runtime_env["working_dir"] = code
        return {
            "submission_id": self.submission_id,
            "entrypoint": entrypoint(self.spec.python, [self.spec_name, self.submission_id, nonce]),
            "runtime_env": runtime_env,
            "metadata": {NONCE_KEY: nonce, "nemo_run_job": self.job},
            **self.request,
        }

    @property
    def _stop_wait_s(self) -> int:
        return int(self.spec.grace_s) + _STOP_MARGIN_S


def plan(app: AppDef, executor: RayExecutor, submission_id: str, job: str) -> JobPlan:
    """Plan one job.

    Raises:
        ConfigError: a field of the executor is wrong, or asks for what this version cannot do.
    """
    executor.check()
    executor.check_built()
    if len(app.roles) != 1:
        raise ConfigError(
            f"The job {job!r} has {len(app.roles)} roles; this version runs one role in a job."
        )
    role = app.roles[0]
    argv = _argv(role, executor)
    cluster = executor.resolve_cluster()
    ships_nothing = not executor.packager_ships
    runs_here = cluster.runs_here and ships_nothing
    spec = JobSpec(
        argv=tuple(argv),
        env={**_with_macros(role.env, executor), **_macro_environment(executor)},
        python=executor.python if executor.python is not None else cluster.python,
        grace_s=executor.grace_s,
        keep_run_dir=executor.keep_run_dir,
        has_code=not ships_nothing,
        secrets=tuple(executor.secrets),
        config=_config(argv),
    )
    return JobPlan(
        job=job,
        submission_id=submission_id,
        spec=spec,
        request=_reservation(executor),
        runtime_env=dict(executor.runtime_env),
        runs_here=runs_here,
    )


def nonce_of(row: Mapping[str, Any]) -> str:
    """The nonce of the submission that made a row of Ray's job table; empty if none of ours."""
    return str((row.get("metadata") or {}).get(NONCE_KEY, ""))


def in_folder(planned: JobPlan, cwd: str) -> JobPlan:
    """The plan of a job that runs on this machine in the caller's folder."""
    return replace(planned, spec=replace(planned.spec, cwd=cwd))


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


def entrypoint(python: str | None, arguments: list[str]) -> str:
    """The shell line that Ray runs: the remote half's ``run`` with these arguments.

    ``-I`` keeps the user's files from shadowing the standard library in our process; the archives
    are put behind it. Without a given interpreter it takes python3, then that of the ``ray``
    command, then python, the first that is recent enough.
    """
    code = (
        'import os,sys;sys.path+=os.environ["PYTHONPATH"].split(":");'
        f"from {REMOTE_PACKAGE}.__main__ import main;sys.exit(main(sys.argv[1:]))"
    )
    words = shlex.join(["-I", "-c", code, "run", *arguments])
    if python is not None:
        return f"exec {shlex.quote(python)} {words}"
    serves = shlex.quote("import sys;sys.exit(sys.version_info<(3,9))")
    return (
        'for p in python3 "$(sed -n "1s/^#! *//p" "$(command -v ray)" 2>/dev/null)" python; do '
        f'[ -n "$p" ] && "$p" -I -c {serves} 2>/dev/null && exec "$p" {words}; done; '
        'echo "nemo_run_ray| no Python of version 3.9 or newer on this node: set '
        'RayExecutor(python=...)"; exit 127'
    )


def describe(planned: JobPlan, cluster: str, travels: list[str]) -> str:
    """The request for people, as a dry run prints it. Secrets are named, never shown.

    Args:
        cluster: the cluster in words.
        travels: what would be uploaded, in words.
    """
    spec = planned.spec
    lines = [
        f"Ray job   {planned.submission_id}",
        f"cluster   {cluster}",
        f"command   {shlex.join(spec.argv)}",
        f"reserves  {_words(planned.request) or 'nothing'}",
        f"folder    {spec.cwd or 'a private run directory on the node'}",
    ]
    lines += [f"travels   {one}" for one in travels]
    if planned.runtime_env:
        lines.append(f"runtime   {planned.runtime_env}")
    lines += [f"env       {name}={value}" for name, value in sorted(spec.env.items())]
    lines += [f"secret    {name}=***" for name in spec.secrets]
    return "\n".join(lines)


def _words(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name.removeprefix('entrypoint_')}={value}" for name, value in values.items()
    )


def _argv(role: Role, executor: RayExecutor) -> list[str]:
    """The exact words of the command.

    NeMo-Run's torchrun component quotes its words for a shell; there is none here, so each is
    unquoted again. A word that is not one quoted word stays as it is.
    """
    words = role.args
    if isinstance(executor.get_launcher(), (Torchrun, FaultTolerance)):
        words = [_unquote(word) for word in words]
    return [_macro(word, executor) for word in (role.entrypoint, *words)]


def _with_macros(env: Mapping[str, str], executor: RayExecutor) -> dict[str, str]:
    return {name: _macro(value, executor) for name, value in env.items()}


def _macro(text: str, executor: RayExecutor) -> str:
    """The text with NeMo-Run's macros replaced, and nothing else: a ``$$`` of the user's stays."""
    values = vars(executor.macro_values())

    def replace_one(match: re.Match[str]) -> str:
        value, name = match.groups()
        if name not in values:
            return match.group()
        return f"${values[name]}" if value else str(values[name])

    return _MACRO.sub(replace_one, text)


def _unquote(word: str) -> str:
    try:
        parts = shlex.split(word)
    except ValueError:
        return word
    return parts[0] if len(parts) == 1 else word


def _config(argv: list[str]) -> str | None:
    """Where NeMo-Run's serialised task is below the root of the run directory."""
    if _RUNNER not in argv or not argv[-1].startswith("/nemo_run/configs/"):
        return None
    return argv[-1].lstrip("/")


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
