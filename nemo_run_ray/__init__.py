"""Run NeMo-Run tasks on Ray.

Importing registers ``RayExecutor`` with NeMo-Run and changes nothing for other executors.
"""

from nemo_run_ray.clusters import ExistingCluster, LocalCluster
from nemo_run_ray.executor import RayExecutor
from nemo_run_ray.plugin import register as _register

__version__ = "0.1.0"
__all__ = ["ExistingCluster", "LocalCluster", "RayExecutor"]

_register()
