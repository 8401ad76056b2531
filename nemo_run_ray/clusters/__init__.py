"""Where Ray comes from: a cluster that runs already, one that is started on this machine, or one in
an allocation of Slurm.

A new kind is a new file here, with a subclass of ``base.Cluster`` that is imported below; or when
it is used, if its import takes long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nemo_run_ray.clusters.base import Cluster, Dashboard, from_record
from nemo_run_ray.clusters.existing import ExistingCluster
from nemo_run_ray.clusters.local import LocalCluster

if TYPE_CHECKING:
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


def __getattr__(name: str) -> type:
    """Slurm's part, which is a third of this package's import and which few programs use."""
    if name not in ("Sidecar", "SlurmCluster"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from nemo_run_ray.clusters import slurm

    found: type = getattr(slurm, name)
    return found
