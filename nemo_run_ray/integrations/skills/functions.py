"""The functions that take the place of NeMo-Skills' own; each leaves other clusters to that."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import shutil
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

from nemo_run_ray.errors import ConfigError
from nemo_run_ray.integrations.skills import cluster_config
from nemo_run_ray.integrations.skills.executor import IS_RAY_PROGRAM, SkillsExecutor, executor_of
from nemo_run_ray.integrations.skills.patch import USED

log = logging.getLogger(__name__)

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
    signature = inspect.signature(original)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        if cluster_config.for_ray(given["cluster_config"]) is None:
            return original(*args, **kwargs)
        source = Path(given["remote_dir"])
        if not source.is_dir():
            raise ConfigError(
                f"NeMo-Skills looks for the folder {source} of the nodes on this machine, which "
                "has none of that name. Run the command where this machine sees the nodes' paths."
            )
        shutil.copytree(source, Path(given["local_dir"]) / source.name, dirs_exist_ok=True)

    return wrapper


def cluster_upload(original: Callable[..., Any]) -> Callable[..., Any]:
    """NeMo-Skills' ``cluster_upload``, which copies to a path that this machine sees."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        if cluster_config.for_ray(given["cluster_config"]) is None:
            return original(*args, **kwargs)
        shutil.copy(given["local_file"], given["remote_dir"])

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
