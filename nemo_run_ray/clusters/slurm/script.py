"""The script of an allocation: NeMo-Run's own request, filled into this package's template."""

from __future__ import annotations

import copy
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_run_ray.clusters.slurm.sidecar import Sidecar
from nemo_run_ray.remote.slurm.settings import IDLE_TIMEOUT, RENEW, SIDECARS
from nemo_run_ray.remote.variables import LIFE
from nemo_run_ray.slurm_script import TEMPLATES, template_folder


def script(
    executor: Any,
    name: str,
    life: str,
    sidecars: Sequence[Sidecar],
    idle_timeout_s: int | None,
    renew: bool,
) -> str:
    """The text for ``sbatch``.

    Args:
        executor: NeMo-Run's for Slurm; it stays as it is.
        name: of the cluster.
        life: folder of the allocation, in which all its files are.
        sidecars: that run beside Ray.
        idle_timeout_s: after which an allocation without a job ends.
        renew: whether another one goes on with the dispatches of this one.
    """
    from nemo_run.run.ray.slurm import SlurmRayRequest

    ours = {
        LIFE: life,
        IDLE_TIMEOUT: "" if idle_timeout_s is None else str(idle_timeout_s),
        RENEW: "1" if renew else "",
        SIDECARS: json.dumps([sidecar.row() for sidecar in sidecars]) if sidecars else "",
    }
    filled = _filled(executor, life, ours, renew)
    with template_folder() as templates:
        request = SlurmRayRequest(
            name=name,
            cluster_dir=life,
            template_name=TEMPLATES[0],
            template_dir=templates,
            executor=filled,
            launch_cmd=["sbatch", "--parsable"],
        )
        return str(request.materialize())


def _filled(executor: Any, life: str, variables: Mapping[str, str], renew: bool) -> Any:
    """A copy of an executor with folders of the allocation and more variables."""
    # NeMo-Run's request fills in what is missing, and writes variables as they are.
    filled = copy.copy(executor)
    filled.job_details = copy.deepcopy(executor.job_details)
    filled.job_details.folder = os.path.join(life, "logs")
    quoted = {key: shlex.quote(value) for key, value in variables.items()}
    filled.env_vars = {**executor.env_vars, **quoted}
    if renew:
        # In a container too, the nodes read what the allocations before have left.
        folder = os.path.dirname(os.path.dirname(life))
        filled.container_mounts = [*executor.container_mounts, f"{folder}:{folder}"]
    return filled
