"""NeMo-Skills' ``get_executor`` returns a RayExecutor for a cluster file that is for Ray."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from nemo_run.run.experiment import Experiment

from nemo_run_ray.errors import UnsupportedNemoRun
from nemo_run_ray.patches import Edit, Patch

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
        # Only NeMo-Skills' users need what reads cluster files.
        from nemo_run_ray.integrations.skills import functions

        wrappers = {
            name: functions.get_executor(original, exp)
            if name == "get_executor"
            else getattr(functions, name)(original)
            for name, original in found.items()
        }
        self._originals = {wrappers[name]: found[name] for name in found}
        return [
            Edit(pipeline, "run", functions.pipeline_run(run)),
            Edit(Experiment, "add", functions.experiment_add(Experiment.add)),
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
