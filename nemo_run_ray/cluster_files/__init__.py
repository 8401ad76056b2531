"""Files that say where and how to run: cluster, defaults, images, pools, variables."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nemo_run_ray.executor import RayExecutor

#: Name the cluster file of executors that name none. The second is that of NeMo-Skills, and counts
#: where its file is for Ray.
DEFAULTS = ("NEMO_RUN_RAY_CLUSTER", "NEMO_SKILLS_CONFIG")


def file_name(executor: RayExecutor) -> str | None:
    """The name of the cluster file that an executor uses, by its field or the environment."""
    if isinstance(executor.cluster, str):
        return executor.cluster
    if executor.cluster is not None or executor.address is not None:
        return None
    return next((os.environ[name] for name in DEFAULTS if os.environ.get(name)), None)


def from_file(executor: RayExecutor) -> RayExecutor:
    """The executor with what its cluster file says; itself when it names none.

    Raises:
        ConfigError: the file is wrong, or does not have what the executor names.
    """
    if file_name(executor) or executor.pool or executor.image or executor.resource_group:
        # Imported when it is needed, for its libraries.
        from nemo_run_ray.cluster_files.resolve import resolve

        return resolve(executor)
    return executor
