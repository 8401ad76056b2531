"""``slurm_ray``: Ray in a Slurm allocation comes up by one step, whatever the number of nodes."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from typing import Any

from nemo_run.core.tunnel.client import SSHTunnel
from nemo_run.run.ray.slurm import SlurmRayCluster, SlurmRayRequest

from nemo_run_ray import ssh
from nemo_run_ray.patches import Edit, Patch, around


class SlurmRayPatch(Patch):
    """RayCluster and RayJob on Slurm, and tasks that use a Ray cluster there, start Ray with one
    srun for all nodes and wait for files, not for answers of the Slurm controller.
    """

    name = "slurm_ray"
    retired_by = "a template of NeMo-Run that starts all nodes by one step (ray.sub.j2)"

    def edits(self) -> Sequence[Edit]:
        fields = SlurmRayRequest.__dataclass_fields__.keys()
        self.must({"template_name", "template_dir"} <= fields, "SlurmRayRequest")
        return [
            self.wrapped(SlurmRayRequest, "materialize", _with_our_template),
            self.wrapped(SlurmRayCluster, "create", _with_log_folder),
        ]


PATCH = SlurmRayPatch()


@around
def _with_our_template(materialize: Any, self: Any) -> Any:
    from nemo_run_ray.clusters.slurm.script import TEMPLATES, template_folder

    if self.template_dir is not None or self.template_name not in TEMPLATES:
        return materialize(self)  # the user's own template
    with template_folder() as folder:
        return materialize(dataclasses.replace(self, template_dir=folder))


@around
def _with_log_folder(create: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Slurm writes the job's log into a folder that NeMo-Run does not make: the job fails."""
    if not kwargs.get("dryrun"):
        tunnel = self.executor.tunnel
        if isinstance(tunnel, SSHTunnel) and not isinstance(tunnel.session, ssh.Session):
            tunnel.session = ssh.Session(tunnel)  # NeMo-Run's own takes any host key
        folder = f"{tunnel.job_dir}/{self.name}/logs"
        tunnel.run(f"mkdir -p {shlex.quote(folder)}")
    return create(self, *args, **kwargs)
