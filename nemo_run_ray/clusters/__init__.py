"""Kinds of clusters: one that exists, one on this machine, and one in an allocation of Slurm.

A new kind is a new file here with a subclass of ``base.Cluster``, named by ``base._KINDS``. It is
imported below; or when it is used, as those are that start something: then ``_HOMES`` names it too.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from nemo_run_ray.clusters.base import Cluster, ClusterArchive, Dashboard, from_record
from nemo_run_ray.clusters.existing import ExistingCluster

if TYPE_CHECKING:
    from nemo_run_ray.clusters.local import LocalCluster
    from nemo_run_ray.clusters.slurm import Sidecar, SlurmCluster

__all__ = [
    "Cluster",
    "ClusterArchive",
    "Dashboard",
    "ExistingCluster",
    "LocalCluster",
    "Sidecar",
    "SlurmCluster",
    "from_record",
]


_HOMES = {"LocalCluster": "local", "Sidecar": "slurm", "SlurmCluster": "slurm"}


def __getattr__(name: str) -> type:
    """Import a kind that starts something when it is used: that is most of this folder's import."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: type = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    return found
