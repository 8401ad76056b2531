"""Run NeMo-Run tasks on Ray.

Importing registers ``RayExecutor`` with NeMo-Run, lets executors say whether they support groups,
and changes nothing for other executors.
"""

from nemo_run_ray.clusters import ExistingCluster, LocalCluster
from nemo_run_ray.executor import RayExecutor
from nemo_run_ray.nemo import register as _register
from nemo_run_ray.probes import CommandProbe, HttpProbe, PortProbe

__version__ = "0.1.0"
__all__ = [
    "CommandProbe",
    "ExistingCluster",
    "HttpProbe",
    "LocalCluster",
    "PortProbe",
    "RayExecutor",
]

_register()
