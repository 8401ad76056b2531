"""NeMo-Skills' commands start their tasks on Ray for a cluster file that is for Ray.

NeMo-Skills passes a dictionary around for a cluster. That of a file for Ray says ``executor:
slurm``, because that is NeMo-Skills' word for a cluster: only there it submits dependencies of
other experiments, groups of several tasks, and detaches. What it asks such a dictionary for, and
has no meaning on Ray, is there with a value that lets it pass.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from nemo_run.run.experiment import Experiment

from nemo_run_ray.cluster_files.load import Document, load
from nemo_run_ray.cluster_files.resolve import fields_of
from nemo_run_ray.errors import ConfigError, UnsupportedNemoRun
from nemo_run_ray.executor import RayExecutor
from nemo_run_ray.fields import is_credential_name, strict_init
from nemo_run_ray.integrations.skills import localhost, reader
from nemo_run_ray.patches import Edit, Patch, around
from nemo_run_ray.remote.spec import Json, env_key

_PACKAGE = "nemo_skills"
#: The parameters of ``get_executor`` that are read here.
_PARAMETERS = {
    *("cluster_config", "container", "num_nodes", "tasks_per_node", "gpus_per_node", "job_name"),
    *("log_dir", "log_prefix", "dependencies", "extra_package_dirs", "heterogeneous", "het_group"),
    "with_ray",
}


class SkillsExecutorPatch(Patch):
    """NeMo-Skills knows Slurm and this machine only; for a cluster file that is for Ray, its
    commands start their tasks on Ray.
    """

    name = "skills_executor"
    retired_by = "an executor for Ray in NeMo-Skills' get_executor"

    def is_needed(self) -> bool:
        return importlib.util.find_spec(_PACKAGE) is not None

    def edits(self) -> Sequence[Edit]:
        try:
            utils = importlib.import_module(f"{_PACKAGE}.pipeline.utils")
            originals = {name: getattr(utils, name) for name in _WRAPPERS}
            pipeline = importlib.import_module(f"{utils.__name__}.declarative").Pipeline
            if lacking := _PARAMETERS - inspect.signature(utils.get_executor).parameters.keys():
                raise AttributeError(f"get_executor has no {', '.join(lacking)}")
        except Exception as error:  # its many dependencies raise what they like
            raise UnsupportedNemoRun(
                f"The patch {self.name} does not know this NeMo-Skills ({type(error).__name__}: "
                f"{error}). Nothing was changed."
            ) from error
        edits = [
            self.wrapped(pipeline, "run", _pipeline_run),
            self.wrapped(Experiment, "add", _experiment_add),
        ]
        for name, original in originals.items():
            new = _WRAPPERS[name](original)
            # Its modules import the functions of each other by name.
            edits += [
                Edit(module, name, new)
                for path, module in list(sys.modules.items())
                if path.partition(".")[0] == _PACKAGE and vars(module).get(name) is original
            ]
        return edits


PATCH = SkillsExecutorPatch()

# ---------------------------------------------------------------------- the dictionary of a cluster

#: Key of the dictionary of a file for Ray: the file, and its variables.
_KEY = "nemo_run_ray"
_LISTS = ("env_vars", "required_env_vars")
#: Keys that would make NeMo-Skills act for another executor, or use this machine's paths.
_DROPPED = {
    *("backend", "execution_backend", "with_ray", "ray_endpoint", "ray", "preflight"),
    *("ssh_tunnel", "job_dir", "timeouts", "default_timeout"),
}


class _Mounts(list[str]):
    """The mounts of all paths; one more means nothing, and its source is not on this machine."""

    def append(self, mount: str) -> None:
        """Leave it out."""


class _NoContainers(dict[str, str]):
    """The containers of a file that names none: every task runs in the cluster's own."""

    def __missing__(self, name: str) -> str:
        return ""


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
            # Each part gets a name of its own, and what it must know of the others.
            executors = [copy.copy(executor) for executor in executors]
            for number, role in enumerate(executors):
                if role.role in [other.role for other in executors[:number]]:
                    role.role = f"{role.role}_{number}"
            serving = [role for role in executors if role.is_serving]
            if len(serving) == len(executors):
                del serving[0]  # there is no client in this task: the server is its purpose
            # By the first role of each of Slurm's groups.
            lines = [
                f'export SLURM_JOB_NODELIST_HET_GROUP_{group}="${_host(role)}S" '
                f'SLURM_MASTER_NODE_HET_GROUP_{group}="${_host(role)}"'
                for group, role in {role.het_group: role for role in reversed(executors)}.items()
                if group is not None
            ]
            if lines:  # elsewhere a task may mean Slurm's own
                lines.append(_SCONTROL)
            for role in executors:
                role.service = role in serving
                role.startup_commands = [*role.startup_commands, *lines]
                if not role.service:
                    near = [other for other in serving if other.het_group == role.het_group]
                    role.startup_commands += _of_client(role, near or serving)
        merged: Any = super().merge(executors, num_tasks)
        for role in merged.resource_group:
            if not role.service:
                merged.job_name, merged.log_dir = role.job_name, role.log_dir
        return merged  # type: ignore[no-any-return]


def _get_executor(original: Any, bound: inspect.BoundArguments) -> SkillsExecutor:
    """The executor of one part of a task.

    Raises:
        ConfigError: the task asks for what there is on Slurm only, a required variable is not set,
            a credential has another value than in the environment, or the file is wrong.
    """
    call = bound.arguments
    if call.get("ray_template") is not None:
        raise ConfigError(
            "ray_template is a script for Slurm; leave it out, the task runs on a Ray cluster."
        )
    exp = sys.modules[original.__module__]
    exp.REUSE_CODE_EXP.clear()  # it would take the code of an experiment on Ray over a tunnel
    config, role, het_group = call["cluster_config"], call["log_prefix"], None
    is_sandbox = role.startswith(_SANDBOX)
    clear, secrets = {}, []
    # The variables that NeMo-Skills has added to those of the file.
    added = [(kind, e) for kind in _LISTS for e in config[kind] if e not in config[_KEY][kind]]
    for kind, entry in added:
        name, equals, value = (part.strip() for part in str(entry).partition("="))
        found = os.path.expandvars(value) if equals else os.environ.get(name)
        if found is None:
            if kind == "required_env_vars":
                raise ConfigError(f"The variable {name} is required, and is not set; set it.")
            continue
        if not any(map(is_credential_name, [name, *re.findall(r"\$\{?(\w+)", value)])):
            clear[name] = found
        elif found == os.environ.get(name):
            secrets.append(name)
        else:
            raise ConfigError(
                f"NeMo-Skills gives {name} a value for one task, and it looks like a credential, "
                "or has one in it (it is not shown here). Set it in your environment instead."
            )
    fields = {
        # Clients know one address of a sandbox, and two of them on one node would share a port.
        "nodes": 1 if is_sandbox else call["num_nodes"],
        "ntasks_per_node": call["tasks_per_node"],
        "gpus_per_node": call["gpus_per_node"] or 0,
    }
    if fields["nodes"] > 1:
        fields["strategy"] = "STRICT_SPREAD"  # as Slurm's nodes are different ones
    is_ray_program = call["with_ray"] or config[_KEY].get("with_ray")
    if is_ray_program and not role.startswith((_SERVER, _SANDBOX)):
        # Its actors get the nodes; what the task itself reserved would be missing for them.
        clear["GPUS_PER_NODE"] = str(fields["gpus_per_node"])
        fields = {"nodes": 1, "cpus_per_node": None}
    if call["heterogeneous"]:
        het_group = call["het_group"]
        role = f"{role}-{het_group}"
    file = config[_KEY]["file"]
    packager = exp.get_packager(extra_package_dirs=tuple(call["extra_package_dirs"] or ()) or None)
    return SkillsExecutor(
        cluster=file,
        image=call["container"] or None,
        role=role,
        het_group=het_group,
        job_name=str(call["job_name"] or "").replace("/", "-"),
        log_dir=str(call["log_dir"] or ""),
        env_vars=clear,
        secrets=secrets,
        dependencies=list(call["dependencies"] or ()),
        packager=fields_of(load(file)).get("packager") or packager,
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


def _of_client(role: SkillsExecutor, serving: Sequence[SkillsExecutor]) -> Iterator[str]:
    """Commands for a task that talks to servers and a sandbox of its group."""
    servers = []
    for other in serving:
        host = _host(other)
        if other.role.startswith(_SANDBOX):
            yield f'export NEMO_SKILLS_SANDBOX_HOST="${{NEMO_SKILLS_SANDBOX_HOST:-${host}}}"'
        else:
            servers.append(f'"${host}"')
    if servers:
        # On Slurm the first node of the job is also the server's.
        yield f'export SLURM_MASTER_NODE="${{MASTER_ADDR:-{servers[0][1:-1]}}}"'
        # The replica's own address is that of its number in the list of its role's.
        own = f'"$(cut -d, -f$((NODE_RANK + 1)) <<< "${_host(role)}S")"'
        program = shlex.quote(Path(localhost.__file__).read_text(encoding="utf-8"))
        yield (f'python3 -I -c {program} "${{nemo_run_ray_argv[@]: -1}}" {own} {" ".join(servers)}')


# ------------------------------------------------------ functions that take the place of theirs

#: Whether the cluster file that was read last is for Ray.
_LAST_IS_FOR_RAY: ContextVar[bool] = ContextVar("last_is_for_ray", default=False)


def _on_ray(replacement: Any) -> Any:
    """The wrapper of a function for the calls with the dictionary of a file for Ray."""

    @around
    def replacing(original: Any, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(original).bind(*args, **kwargs)
        config = bound.arguments["cluster_config"]
        if _KEY not in config:
            if reader.names_ray(Document(Path("cluster_config"), dict(config))):
                raise ConfigError(
                    "This cluster_config is for Ray, and was not read by the patch "
                    "skills_executor: apply the patch before get_cluster_config reads the file."
                )
            return original(*args, **kwargs)
        bound.apply_defaults()
        return replacement(original, bound)

    return replacing


@around
def _read_config(original: Any, config_file: Any) -> Any:
    path = Path(config_file)
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    document = Document(path, values if isinstance(values, dict) else {})
    is_for_ray = reader.matches(document) and reader.names_ray(document)
    _LAST_IS_FOR_RAY.set(is_for_ray)
    if not is_for_ray:
        return original(config_file)
    load(str(path))
    config = {name: v for name, v in values.items() if name not in _DROPPED and v is not None}
    lists = {kind: list(config.get(kind) or ()) for kind in _LISTS}
    names = config.get("containers")
    return {
        "skip_hf_home_check": True,
        **config,
        **lists,
        "executor": "slurm",
        "account": "",
        # With a partition for CPUs, a task that asks for no GPU is not given one.
        "partition": "",
        "cpu_partition": "ray",
        # Every path is the nodes' own.
        "mounts": _Mounts(["/:/"]),
        # Two containers may have one image, and nodes of their own: tasks ask for their names.
        "containers": {name: name for name in names} if names else _NoContainers(),
        # The file is read again when the task is submitted.
        _KEY: {"file": str(path.absolute()), **copy.deepcopy(lists)},
    }


@_on_ray
def _add_task(original: Any, bound: inspect.BoundArguments) -> Any:
    call = bound.arguments
    # With `with_ray` NeMo-Skills would mark the task as one for Slurm, and leave out the sandbox.
    call["cluster_config"] = _for_task(
        call["cluster_config"], call.pop("with_ray"), call["reuse_code_exp"]
    )
    return original(*bound.args, **bound.kwargs)


@around
def _pipeline_run(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """``Pipeline.run``, which does the same as ``add_task`` for each of its jobs."""
    if _KEY in self.cluster_config:
        config = _for_task(self.cluster_config, self.with_ray, self.reuse_code_exp)
        self = copy.copy(self)
        self.cluster_config, self.with_ray = config, False
    return original(self, *args, **kwargs)


def _for_task(config: Json, with_ray: bool, reuse_code_exp: Any) -> Json:
    """The dictionary of a cluster, which also says whether the task is a Ray program.

    Raises:
        ConfigError: it would use the code of an experiment again, which NeMo-Skills does over a
            tunnel.
    """
    if reuse_code_exp is not None:
        raise ConfigError(
            f"reuse_code_exp is {getattr(reuse_code_exp, '_title', reuse_code_exp)!r}, and an "
            "experiment on Ray keeps no code that another one could use. Leave it out: the code "
            "of the current folder travels with every experiment."
        )
    return {**config, _KEY: {**config[_KEY], "with_ray": with_ray}}


@dataclass
class _RandomPort:
    """Whether ports are random; on Ray they are, as no task has a node to itself.

    NeMo-Skills asks before it reads the cluster file, and uses the answer afterwards.
    """

    of_skills: bool

    def __bool__(self) -> bool:
        return _LAST_IS_FOR_RAY.get() or self.of_skills


@around
def _should_get_random_port(original: Any, *args: Any, **kwargs: Any) -> Any:
    return _RandomPort(original(*args, **kwargs))


@around
def _experiment_add(
    original: Any, self: Any, task: Any, executor: Any = None, name: str = "", *args: Any, **kw: Any
) -> Any:
    """``Experiment.add``, which gets NeMo-Skills' name of a task; there every one is "nemo-run"."""
    parts = executor if isinstance(executor, list) else [executor]
    mine = [part for part in parts if isinstance(part, SkillsExecutor)]
    if mine and name == "nemo-run":
        name = min(mine, key=lambda part: part.is_serving).job_name or name
    return original(self, task, executor, name, *args, **kw)


@_on_ray
def _download(original: object, bound: inspect.BoundArguments) -> None:
    """Copy a folder that this machine sees."""
    source = Path(bound.arguments["remote_dir"])
    if not source.is_dir():
        raise ConfigError(
            f"NeMo-Skills looks for the folder {source} of the nodes on this machine, which "
            "has none of that name. Run the command where this machine sees the nodes' paths."
        )
    shutil.copytree(source, Path(bound.arguments["local_dir"], source.name), dirs_exist_ok=True)


@_on_ray
def _upload(original: object, bound: inspect.BoundArguments) -> None:
    """Copy to a path that this machine sees."""
    shutil.copy(bound.arguments["local_file"], bound.arguments["remote_dir"])


#: The wrappers of functions of NeMo-Skills, which replace them in each of its modules.
_WRAPPERS: Json = {
    "read_config": _read_config,
    "should_get_random_port": _should_get_random_port,
    "get_executor": _on_ray(_get_executor),
    "add_task": _add_task,
    "cluster_download_dir": _download,
    "cluster_upload": _upload,
}
