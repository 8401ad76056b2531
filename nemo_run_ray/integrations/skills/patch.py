"""NeMo-Skills' ``get_executor`` returns a RayExecutor for a cluster file that is for Ray."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import logging
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

from nemo_run.run.experiment import Experiment

from nemo_run_ray.errors import ConfigError, UnsupportedNemoRun
from nemo_run_ray.integrations.skills import cluster_config
from nemo_run_ray.integrations.skills.executor import IS_RAY_PROGRAM, SkillsExecutor, executor_of
from nemo_run_ray.patches import Edit, Patch

log = logging.getLogger(__name__)

_PACKAGE = "nemo_skills"
_UTILS = f"{_PACKAGE}.pipeline.utils"
#: Parameters of NeMo-Skills' functions that this patch reads.
USED = {
    "read_config": ("config_file",),
    "get_executor": (
        "cluster_config",
        "container",
        "num_nodes",
        "tasks_per_node",
        "gpus_per_node",
        "job_name",
        "log_dir",
        "log_prefix",
        "dependencies",
        "extra_package_dirs",
        "heterogeneous",
        "het_group",
        "with_ray",
    ),
    "add_task": ("cluster_config", "with_ray", "reuse_code_exp"),
    "get_packager": ("extra_package_dirs",),
    "cluster_download_dir": ("cluster_config", "remote_dir", "local_dir"),
    "cluster_upload": ("cluster_config", "local_file", "remote_dir"),
    "should_get_random_port": (),
    "run": ("self",),
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

    def __init__(self) -> None:
        super().__init__()
        #: The functions of NeMo-Skills, by those that take their place.
        self._originals: dict[Callable[..., Any], Callable[..., Any]] = {}

    def is_needed(self) -> bool:
        return importlib.util.find_spec(_PACKAGE) is not None

    def edits(self) -> Sequence[Edit]:
        cluster = self._module(f"{_UTILS}.cluster")
        exp = self._module(f"{_UTILS}.exp")
        found = {
            name: self._function(module, name)
            for module, names in (
                (cluster, ("read_config", "cluster_download_dir", "cluster_upload")),
                (exp, ("get_executor", "add_task")),
                (self._module(f"{_UTILS}.server"), ("should_get_random_port",)),
            )
            for name in names
        }
        self._function(exp, "get_packager")
        pipeline = getattr(self._module(f"{_UTILS}.declarative"), "Pipeline", None)
        run = self._function(pipeline, "run")
        if not isinstance(getattr(exp, "REUSE_CODE_EXP", None), dict):
            raise self._unknown("nemo_skills.pipeline.utils.exp.REUSE_CODE_EXP")
        direct = (
            read_config,
            add_task,
            should_get_random_port,
            cluster_download_dir,
            cluster_upload,
        )
        wrappers = {wrap.__name__: wrap(found[wrap.__name__]) for wrap in direct}
        wrappers["get_executor"] = get_executor(found["get_executor"], exp)
        self._originals = {wrappers[name]: found[name] for name in found}
        return [
            Edit(pipeline, "run", pipeline_run(run)),
            Edit(Experiment, "add", experiment_add(Experiment.add)),
            *(
                Edit(module, name, wrappers[name])
                for name, original in found.items()
                for module in _modules()
                if vars(module).get(name) is original
            ),
        ]

    def refresh(self) -> None:
        """Give modules that were imported while the patch was applied what they would have had."""
        if self._done:
            return
        for module in _modules():
            for name, value in list(vars(module).items()):
                original = self._originals.get(value) if inspect.isfunction(value) else None
                if original is not None:
                    setattr(module, name, original)

    def _module(self, name: str) -> ModuleType:
        try:
            return importlib.import_module(name)
        except Exception as error:  # its many dependencies raise what they like
            raise self._unknown(f"{name} ({type(error).__name__}: {error})") from error

    def _function(self, owner: Any, name: str) -> Callable[..., Any]:
        where = getattr(owner, "__name__", f"{_UTILS}.declarative.Pipeline")
        function = getattr(owner, name, None)
        if not inspect.isfunction(function):
            raise self._unknown(f"{where}.{name}")
        parameters = inspect.signature(function).parameters
        lacking = [used for used in USED[name] if used not in parameters]
        if lacking:
            raise self._unknown(f"{where}.{name}, which has no {', '.join(lacking)}")
        return function

    def _unknown(self, target: str) -> UnsupportedNemoRun:
        return UnsupportedNemoRun(
            f"The patch {self.name} does not know this NeMo-Skills: {target} is not there as it "
            "expects. Nothing was changed."
        )


PATCH = SkillsExecutorPatch()


def _modules() -> Iterator[ModuleType]:
    """The modules of NeMo-Skills that are imported."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == _PACKAGE and isinstance(module, ModuleType):
            yield module


# ------------------------------------------------------ functions that take the place of theirs

#: NeMo-Skills' name of every task in its experiment.
_EVERY_TASK = "nemo-run"
#: Whether the cluster file that was read last is for Ray.
_IS_FOR_RAY: ContextVar[bool] = ContextVar("is_for_ray", default=False)

#: Parameters of ``get_executor`` that mean nothing on Ray, in all versions of NeMo-Skills.
_OF_SLURM = frozenset(
    {"mounts", "partition", "account", "qos", "time_min", "overlap"}
    | {"slurm_kwargs", "sbatch_kwargs", "extra_srun_args", "total_het_groups", "ray_template"}
)


def read_config(original: Callable[..., Any]) -> Callable[..., Any]:
    """NeMo-Skills' ``read_config``, which knows files for Ray."""

    @functools.wraps(original)
    def wrapper(config_file: Any) -> Any:
        path = Path(config_file)
        for_ray = cluster_config.read(path)
        _IS_FOR_RAY.set(for_ray is not None)
        if for_ray is not None:
            return for_ray
        return cluster_config.with_file(original(config_file), path)

    return wrapper


def get_executor(original: Callable[..., Any], exp: ModuleType) -> Callable[..., Any]:
    """NeMo-Skills' ``get_executor``, which gives a ``SkillsExecutor`` for a file for Ray."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        call = bound.arguments
        with_ray = call["with_ray"]
        config = cluster_config.for_ray(call["cluster_config"], with_ray)
        if config is None:
            return original(*args, **kwargs)
        _tell_unknown(bound, signature)
        _forget_code(exp.REUSE_CODE_EXP)
        dirs = call["extra_package_dirs"]
        packager = exp.get_packager(extra_package_dirs=tuple(dirs) if dirs is not None else None)
        with _ray_program(with_ray or IS_RAY_PROGRAM.get()):
            return executor_of({**call, "cluster_config": config}, packager)

    return wrapper


def add_task(original: Callable[..., Any]) -> Callable[..., Any]:
    """NeMo-Skills' ``add_task``, without what it would do to a task on Ray as to one on Slurm."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        call = bound.arguments
        # With it NeMo-Skills would mark the task as one for Slurm, and leave out the sandbox.
        with_ray = call.pop("with_ray", False)
        config = cluster_config.for_ray(call["cluster_config"], with_ray)
        if config is None:
            return original(*args, **kwargs)
        _refuse_code(call.get("reuse_code_exp"))
        call["cluster_config"] = config
        with _ray_program(with_ray):
            return original(*bound.args, **bound.kwargs)

    return wrapper


def pipeline_run(original: Callable[..., Any]) -> Callable[..., Any]:
    """NeMo-Skills' ``Pipeline.run``, which does the same as ``add_task`` for each of its jobs."""

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {"cluster_config": self.cluster_config, "with_ray": self.with_ray}
        config = cluster_config.for_ray(self.cluster_config, self.with_ray)
        if config is None:
            return original(self, *args, **kwargs)
        _refuse_code(self.reuse_code_exp)
        vars(self).update(cluster_config=config, with_ray=False)
        try:
            with _ray_program(given["with_ray"]):
                return original(self, *args, **kwargs)
        finally:
            vars(self).update(given)

    return wrapper


def should_get_random_port(original: Callable[..., Any]) -> Callable[..., Any]:
    """NeMo-Skills' ``should_get_random_port``; no task has a node of a Ray cluster to itself."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return _RandomPort(original(*args, **kwargs))

    return wrapper


def experiment_add(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Experiment.add``, which gets NeMo-Skills' name of a task; there every one is "nemo-run"."""

    @functools.wraps(original)
    def wrapper(
        self: Any, task: Any, executor: Any = None, name: str = "", *args: Any, **kwargs: Any
    ) -> Any:
        given = executor if isinstance(executor, list) else [executor]
        if name == _EVERY_TASK and given and isinstance(given[0], SkillsExecutor):
            client = next((role for role in given if not role.is_serving), given[0])
            name = client.job_name.replace("/", "-") or name
        return original(self, task, executor, name, *args, **kwargs)

    return wrapper


class _RandomPort:
    """Whether ports are random: NeMo-Skills asks before it reads the cluster file, and uses the
    answer afterwards.

    Args:
        of_skills: what NeMo-Skills says for other clusters.
    """

    def __init__(self, of_skills: bool) -> None:
        self._of_skills = of_skills

    def __bool__(self) -> bool:
        return _IS_FOR_RAY.get() or self._of_skills


def cluster_download_dir(original: Callable[..., Any]) -> Callable[..., Any]:
    """NeMo-Skills' ``cluster_download_dir``, which copies a folder that this machine sees."""

    def copy(call: Mapping[str, Any]) -> None:
        source = Path(call["remote_dir"])
        if not source.is_dir():
            raise ConfigError(
                f"NeMo-Skills looks for the folder {source} of the nodes on this machine, which "
                "has none of that name. Run the command where this machine sees the nodes' paths."
            )
        shutil.copytree(source, Path(call["local_dir"]) / source.name, dirs_exist_ok=True)

    return _by_copying(original, copy)


def cluster_upload(original: Callable[..., Any]) -> Callable[..., Any]:
    """NeMo-Skills' ``cluster_upload``, which copies to a path that this machine sees."""
    return _by_copying(original, lambda call: shutil.copy(call["local_file"], call["remote_dir"]))


def _by_copying(
    original: Callable[..., Any], copy: Callable[[Mapping[str, Any]], object]
) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs).arguments
        if cluster_config.for_ray(call["cluster_config"]) is None:
            return original(*args, **kwargs)
        copy(call)

    return wrapper


@contextlib.contextmanager
def _ray_program(is_ray_program: bool) -> Iterator[None]:
    """Say of the tasks that are added meanwhile whether they are Ray programs."""
    token = IS_RAY_PROGRAM.set(bool(is_ray_program))
    try:
        yield
    finally:
        IS_RAY_PROGRAM.reset(token)


def _refuse_code(experiment: Any) -> None:
    """Refuse to use the code of an experiment again, which NeMo-Skills does over a tunnel."""
    if experiment is not None:
        raise ConfigError(
            f"reuse_code_exp is {getattr(experiment, '_title', experiment)!r}, and an experiment "
            "on Ray keeps no code that another one could use. Leave it out: the code of the "
            "current folder travels with every experiment."
        )


def _tell_unknown(bound: inspect.BoundArguments, signature: inspect.Signature) -> None:
    """Say what is asked for and does nothing, because this package does not know it."""
    for name, value in bound.arguments.items():
        is_known = name in _OF_SLURM or name in USED["get_executor"]
        if not is_known and value != signature.parameters[name].default:
            log.warning("get_executor of NeMo-Skills: %s is not known here; not used on Ray.", name)


def _forget_code(experiments: dict[str, Any]) -> None:
    """Drop experiments on Ray from those whose code NeMo-Skills uses again over a tunnel."""
    for key, experiment in list(experiments.items()):
        if not getattr(experiment, "tunnels", None):
            del experiments[key]
