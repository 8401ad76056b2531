"""``slurm_ray``: Ray in a Slurm allocation comes up by one step, whatever the number of nodes."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import shlex
from collections.abc import Sequence
from typing import Any, cast

from nemo_run.core.tunnel.client import SSHTunnel

from nemo_run_ray import ssh
from nemo_run_ray.patches import Edit, Patch, original

_MODULE = "nemo_run.run.ray.slurm"
_FIELDS = ("template_name", "template_dir")
_PARAMETERS = {"materialize": ("self",), "create": ("self", "dryrun")}


class SlurmRayPatch(Patch):
    name = "slurm_ray"
    why = (
        "RayCluster and RayJob on Slurm, and tasks that use a Ray cluster there, start Ray with "
        "one srun for all nodes and wait for files, not for answers of the Slurm controller."
    )
    retired_by = "a template of NeMo-Run that starts all nodes by one step (ray.sub.j2)"

    def edits(self) -> Sequence[Edit]:
        request, cluster = self._class("SlurmRayRequest"), self._class("SlurmRayCluster")
        fields = getattr(request, "__dataclass_fields__", {})
        for name in _FIELDS:
            self.must(name in fields, f"SlurmRayRequest.{name}")
        edits = []
        for owner, name, wrap in (
            (request, "materialize", _with_our_template),
            (cluster, "create", _with_log_folder),
        ):
            method = self.method(owner, name, *_PARAMETERS[name])
            edits.append(Edit(owner, name, wrap(method)))
        return edits

    def _class(self, name: str) -> type:
        found = None
        with contextlib.suppress(ImportError):
            found = getattr(importlib.import_module(_MODULE), name, None)
        self.must(isinstance(found, type), f"{_MODULE}.{name}")
        return cast(type, found)


PATCH = SlurmRayPatch()


def _with_our_template(materialize: Any) -> Any:
    @functools.wraps(materialize)
    def wrapper(self: Any) -> Any:
        from nemo_run_ray.clusters.slurm.script import TEMPLATES, template_folder

        if self.template_dir is not None or self.template_name not in TEMPLATES:
            return materialize(self)  # the user's own template
        with template_folder() as folder:
            self.template_dir = folder
            try:
                return materialize(self)
            finally:
                self.template_dir = None

    return wrapper


def _with_log_folder(create: Any) -> Any:
    """Slurm writes the job's log into a folder that NeMo-Run does not make: the job fails."""

    @functools.wraps(create)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original(create, "create")).bind(self, *args, **kwargs)
        if not given.arguments.get("dryrun"):
            tunnel = self.executor.tunnel
            if isinstance(tunnel, SSHTunnel) and not (
                tunnel.session and tunnel.session.is_connected
            ):
                ssh.connect(tunnel)  # NeMo-Run continues on it; its own would accept any host key
            folder = os.path.join(tunnel.job_dir, self.name, "logs")
            tunnel.run(f"mkdir -p {shlex.quote(folder)}")
        return create(self, *args, **kwargs)

    return wrapper
