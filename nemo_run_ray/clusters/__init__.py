"""Where Ray comes from."""

from nemo_run_ray.clusters.base import Cluster, Dashboard, from_record
from nemo_run_ray.clusters.existing import ExistingCluster
from nemo_run_ray.clusters.local import LocalCluster

__all__ = ["Cluster", "Dashboard", "ExistingCluster", "LocalCluster", "from_record"]
