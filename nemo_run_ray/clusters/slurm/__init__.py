"""A cluster that is brought up in an allocation of Slurm when it is needed.

``cluster.py`` is what users see. ``login.py`` runs commands where Slurm is, ``lives.py`` reads and
writes the folder in which all clients and the allocation meet, ``slurm_queue.py`` asks Slurm,
``bring_up.py`` waits for Ray, ``script.py`` makes the job's script, and ``forward.py`` leads to a
dashboard behind SSH.
"""

from nemo_run_ray.clusters.slurm.cluster import SlurmCluster
from nemo_run_ray.clusters.slurm.script import Sidecar

__all__ = ["Sidecar", "SlurmCluster"]
