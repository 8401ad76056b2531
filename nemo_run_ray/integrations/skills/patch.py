"""NeMo-Skills' commands start their tasks on Ray for a cluster file that is for Ray.

NeMo-Skills passes a dictionary around for a cluster. That of a file for Ray says ``executor:
slurm``, because that is NeMo-Skills' word for a cluster: only there it hands over dependencies of
other experiments, groups of several tasks, and detaches. What it asks such a dictionary for, and
has no meaning on Ray, is there with a value that lets it pass.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import importlib.util
import inspect
import os
import re
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml
from nemo_run.core.packaging.base import Packager
from nemo_run.run.experiment import Experiment

from nemo_run_ray.cluster_files.load import Document, load
from nemo_run_ray.cluster_files.resolve import default_values
from nemo_run_ray.errors import ConfigError, UnsupportedNemoRun
from nemo_run_ray.executor import RayExecutor
from nemo_run_ray.fields import is_credential_name, strict_init
from nemo_run_ray.integrations.skills import localhost, reader
from nemo_run_ray.patches import Edit, Patch
from nemo_run_ray.remote.spec import env_key

_PACKAGE = "nemo_skills"
#: The functions that are replaced, by their modules, with the parameters that are read here.
_USED: dict[str, dict[str, tuple[str, ...]]] = {
    "cluster": {
        "read_config": ("config_file",),
        "cluster_download_dir": ("cluster_config", "remote_dir", "local_dir"),
        "cluster_upload": ("cluster_config", "local_file", "remote_dir"),
    },
    "exp": {
        "get_executor": (
            *("cluster_config", "container", "num_nodes", "tasks_per_node", "gpus_per_node"),
            *("job_name", "log_dir", "log_prefix", "dependencies", "extra_package_dirs"),
            *("heterogeneous", "het_group", "with_ray"),
        ),
        "add_task": ("cluster_config", "with_ray", "reuse_code_exp"),
    },
    "server": {"should_get_random_port": ()},
}


class SkillsExecutorPatch(Patch):
    """Replaces functions of NeMo-Skills, in each of its modules that has them.

    The name of a task comes to ``Experiment.add``, which is wrapped.
    """

    name = "skills_executor"
    why = (
        "NeMo-Skills knows Slurm and this machine only; for a cluster file that is for Ray, its "
        "commands start their tasks on Ray."
    )
    retired_by = "an executor for Ray in NeMo-Skills' get_executor"

    def is_needed(self) -> bool:
        return importlib.util.find_spec(_PACKAGE) is not None

    def edits(self) -> Sequence[Edit]:
        utils = f"{_PACKAGE}.pipeline.utils"
        try:
            modules = {name: importlib.import_module(f"{utils}.{name}") for name in _USED}
            pipeline = importlib.import_module(f"{utils}.declarative").Pipeline
        except Exception as error:  # its many dependencies raise what they like
            raise self._unknown(f"{utils} ({type(error).__name__}: {error})") from error
        exp = modules["exp"]
        if not isinstance(getattr(exp, "REUSE_CODE_EXP", None), dict):
            raise self._unknown("REUSE_CODE_EXP")
        edits = [
            Edit(pipeline, "run", _pipeline_run(pipeline.run)),
            Edit(Experiment, "add", _experiment_add(Experiment.add)),
        ]
        replacements: dict[str, Callable[[Any], Any]] = {
            "read_config": _read_config,
            "get_executor": lambda original: _get_executor(original, exp),
            "add_task": _add_task,
            "should_get_random_port": _should_get_random_port,
            "cluster_download_dir": lambda original: _replacing(original, _download),
            "cluster_upload": lambda original: _replacing(original, _upload),
        }
        for module, functions in _USED.items():
            for name, parameters in functions.items():
                original = getattr(modules[module], name, None)
                if not inspect.isfunction(original):
                    raise self._unknown(name)
                lacking = set(parameters) - {*inspect.signature(original).parameters}
                if lacking:
                    raise self._unknown(f"{name}, which has no {', '.join(lacking)}")
                new = replacements[name](original)
                edits += [
                    Edit(other, name, new)
                    for other in list(sys.modules.values())
                    if isinstance(other, ModuleType)
                    and other.__name__.partition(".")[0] == _PACKAGE
                    and vars(other).get(name) is original
                ]
        return edits

    def _unknown(self, target: str) -> UnsupportedNemoRun:
        return UnsupportedNemoRun(
            f"The patch {self.name} does not know {target} of this NeMo-Skills. "
            "Nothing was changed."
        )


PATCH = SkillsExecutorPatch()

# ---------------------------------------------------------------------- the dictionary of a cluster

#: Key of the dictionary of a file for Ray: the file, and its variables.
_KEY = "nemo_run_ray"
_LISTS = ("env_vars", "required_env_vars")
#: Keys that would make NeMo-Skills act for another executor, or use this machine's paths.
_DROPPED = frozenset(
    {"backend", "execution_backend", "with_ray", "ray_endpoint", "ray", "preflight", "mounts"}
    | {"ssh_tunnel", "job_dir", "timeouts", "default_timeout", "executor"}
    | {"account", "partition", "cpu_partition"}
)


def _read(path: Path) -> dict[str, Any] | None:
    """The dictionary of a file that is for Ray.

    Raises:
        ConfigError: it is for Ray, and is wrong.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeError, yaml.YAMLError):
        return None  # NeMo-Skills says itself what is wrong with it
    document = Document(path, values if isinstance(values, dict) else {})
    if not reader.matches(document) or not reader.names_ray(document):
        return None
    load(str(path))
    config = {name: v for name, v in values.items() if name not in _DROPPED and v is not None}
    config.update({kind: list(config.get(kind) or ()) for kind in _LISTS})
    config.update(
        executor="slurm",
        account="",
        # With a partition for CPUs, a task that asks for no GPU is not given one.
        partition="",
        cpu_partition="ray",
        # Every path is the nodes' own.
        mounts=_Mounts(["/:/"]),
    )
    config.setdefault("skip_hf_home_check", True)
    # Two containers may have one image, and nodes of their own: tasks ask for them by their names.
    names = config.get("containers")
    config["containers"] = {name: name for name in names} if names else _NoContainers()
    # The file is read again when the task is handed over.
    config[_KEY] = {"file": str(path.absolute()), **{kind: [*config[kind]] for kind in _LISTS}}
    return config


class _Mounts(list[str]):
    """The mounts of all paths; one more means nothing, and its source is not on this machine."""

    def append(self, mount: str) -> None:
        """Leave it out."""


class _NoContainers(dict[str, str]):
    """The containers of a file that names none: every task runs in the cluster's own."""

    def __missing__(self, name: str) -> str:
        return ""


def _is_for_ray(config: Any) -> bool:
    return isinstance(config, Mapping) and _KEY in config


def _added_variables(config: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """The variables that NeMo-Skills has added to those of the file, and the names of secrets.

    Raises:
        ConfigError: one is required and not set, or a credential has another value than in the
            environment.
    """
    clear: dict[str, str] = {}
    secrets: list[str] = []
    for kind in _LISTS:
        for entry in config.get(kind) or ():
            if entry in config[_KEY][kind]:
                continue
            name, equals, value = (part.strip() for part in str(entry).partition("="))
            found = os.path.expandvars(value) if equals else os.environ.get(name)
            if found is None and kind == "required_env_vars":
                raise ConfigError(f"The variable {name} is required, and is not set; set it.")
            if found is None:
                continue
            if not any(map(is_credential_name, [name, *re.findall(r"\$\{?(\w+)", value)])):
                clear[name] = found
            elif found == os.environ.get(name):
                secrets.append(name)
            else:
                raise ConfigError(
                    f"NeMo-Skills gives {name} a value for one task, and it looks like a "
                    "credential, or has one in it (it is not shown here). Set it in your "
                    "environment instead."
                )
    return clear, secrets


# ---------------------------------------------------------------------- the executor of a task

#: Beginnings of NeMo-Skills' ``log_prefix``, which says what a part of a task does.
_SERVER, _SANDBOX = "server", "sandbox"


@strict_init
@dataclass(kw_only=True)
class SkillsExecutor(RayExecutor):
    """A ``RayExecutor`` whose groups are tasks of NeMo-Skills: a client, its servers, a sandbox."""

    #: NeMo-Skills' name of the task, such as ``gen1-rs0-chunk1``.
    job_name: str = ""
    #: Folder of the nodes in which NeMo-Skills' users look for the logs of the task.
    log_dir: str = ""
    #: Number of the part's group in a job of several Slurm groups.
    het_group: int | None = None

    @property
    def log_copy(self) -> str:
        return f"{self.log_dir}/main_{self.job_name}" if self.log_dir else ""

    @property
    def is_serving(self) -> bool:
        """Whether it is a server or a sandbox."""
        return self.role.startswith((_SERVER, _SANDBOX))

    @classmethod
    def merge(cls, executors: list[Any], num_tasks: int) -> RayExecutor:
        """The executor of a whole task; its servers and its sandbox run until the client is done.

        Args:
            executors: one for each part of the task, or the merged one of a saved experiment.
            num_tasks: how many parts the task has.

        Raises:
            ConfigError: the executors are of different clusters, or one is wrong.
        """
        if len(executors) > 1:
            executors = _as_roles(executors)
        merged: Any = super().merge(executors, num_tasks)
        for role in merged.resource_group:
            if not role.service:
                merged.job_name, merged.log_dir = role.job_name, role.log_dir
        return merged  # type: ignore[no-any-return]


def _executor_of(
    call: Mapping[str, Any], packager: Packager, is_ray_program: bool
) -> SkillsExecutor:
    """The executor for a call of ``get_executor``.

    Args:
        call: its arguments, by their names.
        packager: of NeMo-Skills, for a file that says nothing of the code.
        is_ray_program: whether the task asks the cluster for its resources itself.

    Raises:
        ConfigError: the task asks for what there is on Slurm only, or the file is wrong.
    """
    if call.get("ray_template") is not None:
        raise ConfigError(
            "ray_template is a script for Slurm; leave it out, the task runs on a Ray cluster."
        )
    file, role = call["cluster_config"][_KEY]["file"], call["log_prefix"]
    clear, secrets = _added_variables(call["cluster_config"])
    fields = {
        "nodes": call["num_nodes"],
        "ntasks_per_node": call["tasks_per_node"],
        "gpus_per_node": call["gpus_per_node"] or 0,
        "env_vars": clear,
    }
    if role.startswith(_SANDBOX):
        fields["nodes"] = 1  # clients know one address; two of them on one node share a port
    elif call["num_nodes"] > 1:
        fields["strategy"] = "STRICT_SPREAD"  # as Slurm's nodes are different ones
    if is_ray_program and not role.startswith((_SERVER, _SANDBOX)):
        # Its actors get the nodes; what the task itself reserved would be missing for them.
        clear["GPUS_PER_NODE"] = str(fields["gpus_per_node"])
        fields = {"nodes": 1, "cpus_per_node": None, "env_vars": clear}
    return SkillsExecutor(
        cluster=file,
        image=call["container"] or None,
        role=f"{role}-{call['het_group']}" if call["heterogeneous"] else role,
        het_group=call["het_group"] if call["heterogeneous"] else None,
        job_name=str(call["job_name"] or "").replace("/", "-"),
        log_dir=str(call["log_dir"] or ""),
        secrets=secrets,
        dependencies=list(call["dependencies"] or ()),
        packager=default_values(load(file)).get("packager") or packager,
        startup_commands=[_RANKS],
        **fields,
    )


#: Slurm's names for what a replica knows. On a Ray cluster that itself runs on Slurm, Slurm has set
#: them for its own tasks, so they are overwritten.
_RANKS = (
    'export SLURM_PROCID="${RANK:-0}" SLURM_LOCALID="${LOCAL_RANK:-0}" '
    'SLURM_NODEID="${NODE_RANK:-0}" SLURM_MASTER_NODE="${MASTER_ADDR:-127.0.0.1}"'
)
#: The host names of a list, as ``scontrol show hostnames`` prints them.
_SCONTROL = "scontrol() { printf '%s\\n' \"${@:3}\" | tr , '\\n'; }; export -f scontrol"


def _host(role: RayExecutor) -> str:
    """The variable with the address of a role's first replica."""
    return f"NEMO_RUN_{env_key(role.role)}_HOST"


def _as_roles(executors: Sequence[SkillsExecutor]) -> list[SkillsExecutor]:
    """The parts of a task, each with a name of its own and with what it must know of the others."""
    roles = [copy.copy(executor) for executor in executors]
    for name, count in Counter(role.role for role in roles).items():
        for number, role in enumerate([role for role in roles if role.role == name]):
            role.role = f"{name}_{number}" if count > 1 else name
    serving = [role for role in roles if role.is_serving]
    if len(serving) == len(roles):
        del serving[0]  # there is no client in this task: the server is its purpose
    # The first role of each of Slurm's groups.
    groups = {role.het_group: role for role in reversed(roles) if role.het_group is not None}
    lines = [
        f'export SLURM_JOB_NODELIST_HET_GROUP_{number}="${_host(role)}S" '
        f'SLURM_MASTER_NODE_HET_GROUP_{number}="${_host(role)}"'
        for number, role in sorted(groups.items())
    ]
    lines += [_SCONTROL] if lines else []
    for role in roles:
        role.service = role in serving
        role.startup_commands = [*role.startup_commands, *lines]
        if not role.service:
            near = [other for other in serving if other.het_group == role.het_group] or serving
            role.startup_commands += _of_client(role, near)
    return roles


def _of_client(role: SkillsExecutor, serving: Sequence[SkillsExecutor]) -> list[str]:
    """Commands for a task that talks to servers and a sandbox of its group."""
    lines = []
    servers = [_host(other) for other in serving if not other.role.startswith(_SANDBOX)]
    for sandbox in (_host(other) for other in serving if other.role.startswith(_SANDBOX)):
        lines.append(f'export NEMO_SKILLS_SANDBOX_HOST="${{NEMO_SKILLS_SANDBOX_HOST:-${sandbox}}}"')
    if servers:
        # On Slurm the first node of the job is also the server's.
        lines.append(f'export SLURM_MASTER_NODE="${{MASTER_ADDR:-${servers[0]}}}"')
        # The replica's own address is that of its number in the list of its role's.
        own = f'"$(cut -d, -f$((NODE_RANK + 1)) <<< "${_host(role)}S")"'
        hosts = " ".join(f'"${server}"' for server in servers)
        program = shlex.quote(localhost_program())
        lines.append(f'python3 -I -c {program} "${{nemo_run_ray_argv[@]: -1}}" {own} {hosts}')
    return lines


def localhost_program() -> str:
    """The text of the program that serves at ``localhost``, without what is said about it."""
    text = Path(localhost.__file__).read_text(encoding="utf-8")
    return "# Reaches the servers of the group at localhost.\n" + text.partition('"""\n\n')[2]


# ------------------------------------------------------ functions that take the place of theirs

#: NeMo-Skills' name of every task in its experiment.
_EVERY_TASK = "nemo-run"
#: Whether the cluster file that was read last is for Ray.
_LAST_IS_FOR_RAY: ContextVar[bool] = ContextVar("last_is_for_ray", default=False)
#: Whether the task that is being added is a Ray program, which reserves its resources itself.
_IS_RAY_PROGRAM: ContextVar[bool] = ContextVar("is_ray_program", default=False)


def _read_config(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(config_file: Any) -> Any:
        config = _read(Path(config_file))
        _LAST_IS_FOR_RAY.set(config is not None)
        return original(config_file) if config is None else config

    return wrapper


def _replacing(
    original: Callable[..., Any], on_ray: Callable[[inspect.BoundArguments], Any]
) -> Callable[..., Any]:
    """The function, with another one for the calls with the dictionary of a file for Ray."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        if not _is_for_ray(bound.arguments["cluster_config"]):
            return original(*args, **kwargs)
        bound.apply_defaults()
        return on_ray(bound)

    return wrapper


def _get_executor(original: Callable[..., Any], exp: ModuleType) -> Callable[..., Any]:
    def on_ray(bound: inspect.BoundArguments) -> SkillsExecutor:
        call = bound.arguments
        for key, experiment in list(exp.REUSE_CODE_EXP.items()):
            # NeMo-Skills would use the code of an experiment on Ray again, over a tunnel.
            if not getattr(experiment, "tunnels", None):
                del exp.REUSE_CODE_EXP[key]
        dirs = call["extra_package_dirs"]
        packager = exp.get_packager(extra_package_dirs=tuple(dirs) if dirs is not None else None)
        return _executor_of(call, packager, call["with_ray"] or _IS_RAY_PROGRAM.get())

    return _replacing(original, on_ray)


def _add_task(original: Callable[..., Any]) -> Callable[..., Any]:
    def on_ray(bound: inspect.BoundArguments) -> Any:
        _refuse_code(bound.arguments["reuse_code_exp"])
        # With it NeMo-Skills would mark the task as one for Slurm, and leave out the sandbox.
        with _ray_program(bound.arguments.pop("with_ray")):
            return original(*bound.args, **bound.kwargs)

    return _replacing(original, on_ray)


def _pipeline_run(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Pipeline.run``, which does the same as ``add_task`` for each of its jobs."""

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_for_ray(self.cluster_config):
            return original(self, *args, **kwargs)
        _refuse_code(self.reuse_code_exp)
        with_ray, self.with_ray = self.with_ray, False
        try:
            with _ray_program(with_ray):
                return original(self, *args, **kwargs)
        finally:
            self.with_ray = with_ray

    return wrapper


@contextlib.contextmanager
def _ray_program(is_ray_program: Any) -> Iterator[None]:
    """Say of the tasks that are added meanwhile whether they are Ray programs."""
    token = _IS_RAY_PROGRAM.set(bool(is_ray_program))
    try:
        yield
    finally:
        _IS_RAY_PROGRAM.reset(token)


def _refuse_code(experiment: Any) -> None:
    """Refuse to use the code of an experiment again, which NeMo-Skills does over a tunnel."""
    if experiment is not None:
        raise ConfigError(
            f"reuse_code_exp is {getattr(experiment, '_title', experiment)!r}, and an experiment "
            "on Ray keeps no code that another one could use. Leave it out: the code of the "
            "current folder travels with every experiment."
        )


class _RandomPort:
    """Whether ports are random; on Ray they are, as no task has a node to itself.

    NeMo-Skills asks before it reads the cluster file, and uses the answer afterwards.
    """

    def __init__(self, of_skills: bool) -> None:
        self._of_skills = of_skills

    def __bool__(self) -> bool:
        return _LAST_IS_FOR_RAY.get() or self._of_skills


def _should_get_random_port(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return _RandomPort(original(*args, **kwargs))

    return wrapper


def _experiment_add(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Experiment.add``, which gets NeMo-Skills' name of a task; there every one is "nemo-run"."""

    @functools.wraps(original)
    def wrapper(
        self: Any, task: Any, executor: Any = None, name: str = "", *args: Any, **kwargs: Any
    ) -> Any:
        parts = executor if isinstance(executor, list) else [executor]
        if name == _EVERY_TASK and parts and isinstance(parts[0], SkillsExecutor):
            client = next((part for part in parts if not part.is_serving), parts[0])
            name = client.job_name or name
        return original(self, task, executor, name, *args, **kwargs)

    return wrapper


def _download(bound: inspect.BoundArguments) -> None:
    """Copy a folder that this machine sees."""
    source = Path(bound.arguments["remote_dir"])
    if not source.is_dir():
        raise ConfigError(
            f"NeMo-Skills looks for the folder {source} of the nodes on this machine, which "
            "has none of that name. Run the command where this machine sees the nodes' paths."
        )
    target = Path(bound.arguments["local_dir"]) / source.name
    shutil.copytree(source, target, dirs_exist_ok=True)


def _upload(bound: inspect.BoundArguments) -> None:
    """Copy to a path that this machine sees."""
    shutil.copy(bound.arguments["local_file"], bound.arguments["remote_dir"])
