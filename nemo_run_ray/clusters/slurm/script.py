"""The script of an allocation: NeMo-Run's own request, filled into this package's template."""

from __future__ import annotations

import copy
import json
import os
import shlex
from collections.abc import Sequence
from typing import Any

from nemo_run_ray.clusters.slurm.sidecar import Sidecar
from nemo_run_ray.remote.slurm.settings import IDLE_TIMEOUT, LIFE
from nemo_run_ray.slurm_script import TEMPLATES, template_folder

_SIDECARS = "NEMO_RUN_RAY_SIDECARS"


def script(
    executor: Any,
    name: str,
    life: str,
    sidecars: Sequence[Sidecar],
    idle_timeout_s: int | None,
) -> str:
    """The text for ``sbatch``.

    Args:
        executor: NeMo-Run's for Slurm; it stays as it is.
        name: of the cluster.
        life: folder of the allocation, in which all its files are.
        sidecars: that run beside Ray.
        idle_timeout_s: after which an allocation without a job ends.
    """
    from nemo_run.run.ray.slurm import SlurmRayRequest

    ours = {
        LIFE: life,
        IDLE_TIMEOUT: "" if idle_timeout_s is None else str(idle_timeout_s),
        _SIDECARS: json.dumps([one.row() for one in sidecars]) if sidecars else "",
    }
    # NeMo-Run's request fills in what is missing, and writes variables as they are.
    filled = copy.copy(executor)
    filled.job_details = copy.deepcopy(executor.job_details)
    filled.job_details.folder = os.path.join(life, "logs")
    quoted = {key: shlex.quote(value) for key, value in ours.items()}
    filled.env_vars = {**executor.env_vars, **quoted}
    request = SlurmRayRequest(
        name=name,
        cluster_dir=life,
        template_name=TEMPLATES[0],
        template_dir=template_folder(),
        executor=filled,
        launch_cmd=["sbatch", "--parsable"],
    )
    text: str = request.materialize()
    return text
