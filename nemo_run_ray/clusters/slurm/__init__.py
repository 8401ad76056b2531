"""A cluster that is brought up in an allocation of Slurm when it is needed.

``cluster.py`` is what users see, and waits for Ray. ``allocations.py`` judges what
``on_login.py`` answers, which runs where Slurm is; ``login.py`` reaches that host and the dashboard
behind it, and ``script.py`` makes the job's script.
"""

from nemo_run_ray.clusters.slurm.cluster import SlurmCluster
from nemo_run_ray.clusters.slurm.script import Sidecar

__all__ = ["Sidecar", "SlurmCluster"]
