"""Where Ray comes from: a cluster that runs already, one that is started on this machine, or one in
an allocation of Slurm.

A new kind is a new file here with a subclass of ``base.Cluster``, and a line in
``base.IMPORTED_LATE`` if it starts something: such a module is imported when it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from nemo_run_ray.clusters.base import IMPORTED_LATE, Cluster, Dashboard, from_record
from nemo_run_ray.clusters.existing import ExistingCluster

if TYPE_CHECKING:
    from nemo_run_ray.clusters.local import LocalCluster
    from nemo_run_ray.clusters.slurm import Sidecar, SlurmCluster

__all__ = [
    "Cluster",
    "Dashboard",
    "ExistingCluster",
    "LocalCluster",
    "Sidecar",
    "SlurmCluster",
    "from_record",
]


#: What is imported when it is used, and the kind of cluster whose module has it.
_KINDS = {"LocalCluster": "local", "Sidecar": "slurm", "SlurmCluster": "slurm"}


def __getattr__(name: str) -> type:
    if name not in _KINDS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: type = getattr(importlib.import_module(IMPORTED_LATE[_KINDS[name]]), name)
    return found
