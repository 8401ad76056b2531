"""Run NeMo-Run tasks on Ray.

Importing registers ``RayExecutor`` with NeMo-Run, lets executors say whether they support groups,
and changes nothing for other executors.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from nemo_run_ray.clusters import ExistingCluster
from nemo_run_ray.executor import RayExecutor
from nemo_run_ray.fields import CommandProbe, HttpProbe, PortProbe
from nemo_run_ray.nemo import register as _register

if TYPE_CHECKING:
    from nemo_run_ray.clusters import LocalCluster, Sidecar, SlurmCluster
    from nemo_run_ray.experiment.job import RemoteJob
    from nemo_run_ray.plan.array import array
    from nemo_run_ray.plan.folder_packager import FolderPackager

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
    "LocalCluster": "nemo_run_ray.clusters",
    "Sidecar": "nemo_run_ray.clusters",
    "SlurmCluster": "nemo_run_ray.clusters",
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


_register()
