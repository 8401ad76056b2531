"""Where Ray comes from: a cluster that runs already, one that is started on this machine, or one in
an allocation of Slurm.

A new kind is a new file here, with a subclass of ``base.Cluster`` that is imported below.
"""

from nemo_run_ray.clusters.base import Cluster, Dashboard, from_record
from nemo_run_ray.clusters.existing import ExistingCluster
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
