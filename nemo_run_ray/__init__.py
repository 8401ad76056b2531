"""Run NeMo-Run tasks on Ray.

Importing registers ``RayExecutor`` with NeMo-Run, lets executors say whether they support groups,
and changes nothing for other executors.
"""

from __future__ import annotations

import importlib
import logging
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from nemo_run_ray.clusters.existing import ExistingCluster
from nemo_run_ray.executor import RayExecutor
from nemo_run_ray.fields import CommandProbe, HttpProbe, PortProbe

if TYPE_CHECKING:
    from nemo_run_ray.clusters.local import LocalCluster
    from nemo_run_ray.clusters.slurm import Sidecar, SlurmCluster
    from nemo_run_ray.experiment.job import RemoteJob
    from nemo_run_ray.plan.array import array
    from nemo_run_ray.plan.folder_packager import FolderPackager

log = logging.getLogger(__name__)
__version__ = "0.1.0"
__all__ = [
    "CommandProbe",
    "ExistingCluster",
    "FolderPackager",
    "HttpProbe",
    "LocalCluster",
    "PortProbe",
    "RayExecutor",
    "Sidecar",
    "SlurmCluster",
    "array",
    "find",
]

#: The modules of names that are imported when they are used, which halves this package's import.
_HOMES = {
    "FolderPackager": "nemo_run_ray.plan.folder_packager",
    "LocalCluster": "nemo_run_ray.clusters.local",
    "Sidecar": "nemo_run_ray.clusters.slurm",
    "SlurmCluster": "nemo_run_ray.clusters.slurm",
    "array": "nemo_run_ray.plan.array",
}


def find(name: str) -> list[RemoteJob]:
    """The jobs of an experiment, or one job.

    A job has an ``id``, a ``name``, a ``status`` (state, reason, detail, node …), ``attempts``,
    ``log(follow=False)``, ``wait(timeout_s)`` and ``cancel()``. Looking changes nothing.

    Args:
        name: an experiment's id, or its title (then its newest one); a handle of NeMo-Run's; or a
            job's id on the cluster.

    Returns:
        The jobs in the order in which they were added; one of a handle or a job's id.

    Raises:
        JobError: no such job was submitted from this NeMo-Run home.
    """
    from nemo_run_ray.experiment import job

    return job.find(name)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _register() -> None:
    """Tell NeMo-Run about ``RayExecutor``.

    A NeMo-Run that keeps its registries elsewhere gets one warning, and everything else of it, and
    of the programs that import this package, works on.
    """
    try:
        from nemo_run_ray import nemo

        nemo.register()
    except (ImportError, AttributeError, KeyError, TypeError) as error:
        log.warning(
            "RayExecutor cannot be used with NeMo-Run %s, whose registries are not those that "
            "nemo_run_ray knows (%s: %s). Install a version of nemo_run_ray for it.",
            version("nemo-run"),
            type(error).__name__,
            error,
        )


_register()
