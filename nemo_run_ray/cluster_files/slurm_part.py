"""The section of a cluster file that describes an allocation of Slurm."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import nemo_run as run
from pydantic import BaseModel, ConfigDict, Field

from nemo_run_ray.clusters import Sidecar, SlurmCluster
from nemo_run_ray.errors import ConfigError
from nemo_run_ray.fields import PortProbe

_SSH = ("host", "user", "port", "identity")
_OWN = ("name", "nodes", "walltime", "keep", "idle_timeout_s", "renew", "queue_timeout_s")
_NOT_SLURMS = {*_SSH, *_OWN, "job_dir", "sbatch", "sidecars"}


class _SlurmPart(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class SidecarPart(_SlurmPart):
    """A command beside Ray."""

    name: Annotated[str, Field(description="Its name, for messages and its log.")]
    command: Annotated[str, Field(description="A line for bash.")]
    everywhere: Annotated[bool, Field(description="On every node, or on the head's alone.")] = True
    port: Annotated[
        int | None, Field(description="It is ready when this port takes connections.")
    ] = None


class SlurmPart(_SlurmPart):
    """Ray in an allocation of Slurm, with the fields of SlurmCluster and its SlurmExecutor."""

    account: Annotated[str, Field(description="Slurm's account.")]
    job_dir: Annotated[str, Field(description="A folder that all nodes share, absolute.")]
    partition: Annotated[str | None, Field(description="Slurm's partition.")] = None
    host: Annotated[
        str | None, Field(description="A login node to reach by SSH; without it, this machine.")
    ] = None
    user: Annotated[str | None, Field(description="Your name on that host.")] = None
    port: Annotated[int | None, Field(description="Its port of SSH.")] = None
    identity: Annotated[str | None, Field(description="File of your private key.")] = None
    name: Annotated[
        str | None, Field(description="Who names the same shares one; default: the file's name.")
    ] = None
    nodes: Annotated[int, Field(ge=1, description="Nodes of the allocation.")] = 1
    walltime: Annotated[str | None, Field(description="Its time limit: `04:00:00`.")] = None
    gpus_per_node: Annotated[int | None, Field(description="GPUs of each node.")] = None
    cpus_per_task: Annotated[int | None, Field(description="CPUs of each node.")] = None
    mem: Annotated[str | None, Field(description="Memory of each node, as Slurm writes it.")] = None
    qos: Annotated[str | None, Field(description="Slurm's quality of service.")] = None
    exclusive: Annotated[bool | None, Field(description="Share the nodes with nobody.")] = None
    container_image: Annotated[str | None, Field(description="Image of the nodes (pyxis).")] = None
    container_mounts: Annotated[list[str], Field(description="Folders in the container.")] = []
    setup_lines: Annotated[str | None, Field(description="Shell lines before Ray starts.")] = None
    env_vars: Annotated[
        dict[str, str],
        Field(description="Variables of the script and of Ray, written as they are."),
    ] = {}
    sbatch: Annotated[
        dict[str, str | int | bool], Field(description="Further options of sbatch, by name.")
    ] = {}
    keep: Annotated[bool, Field(description="Leave it when its last user is done.")] = False
    idle_timeout_s: Annotated[
        int | None, Field(description="Seconds without a job after which it ends.")
    ] = 900
    renew: Annotated[
        bool, Field(description="Chains go on in another allocation when its walltime is over.")
    ] = False
    queue_timeout_s: Annotated[
        float | None, Field(description="Seconds to wait in Slurm's queue.")
    ] = None
    sidecars: Annotated[list[SidecarPart], Field(description="What runs beside Ray.")] = []


def slurm_cluster(part: SlurmPart, path: Path) -> SlurmCluster:
    """The cluster of a section.

    Args:
        part: the section.
        path: of its file, for the cluster's default name and the key's file.

    Raises:
        ConfigError: a value is not allowed.
    """
    fields: dict[str, Any] = part.model_dump(exclude=_NOT_SLURMS, exclude_none=True)
    executor = run.SlurmExecutor(
        **fields,
        ntasks_per_node=1,
        additional_parameters=dict(part.sbatch) or None,
        tunnel=_tunnel(part, path),
    )
    own = {name: getattr(part, name) for name in _OWN if name != "name"}
    return SlurmCluster(
        executor=executor,
        name=part.name if part.name is not None else path.stem,
        sidecars=[_sidecar(sidecar) for sidecar in part.sidecars],
        **own,
    )


def _tunnel(part: SlurmPart, path: Path) -> run.LocalTunnel | run.SSHTunnel:
    if part.host is None:
        given = [name for name in _SSH if getattr(part, name) is not None]
        if given:
            raise ConfigError(
                f"`{given[0]}` says how to log in, and there is no `host` to log in to; add it, or "
                "leave that out to use Slurm's commands of this machine."
            )
        return run.LocalTunnel(job_dir=part.job_dir)
    if part.user is None:
        raise ConfigError(f"`host` is {part.host!r}, and there is no `user` to log in as; add it.")
    identity = part.identity
    if identity is not None:
        identity = str(path.parent / Path(identity).expanduser())
    return run.SSHTunnel(
        host=part.host, user=part.user, port=part.port, identity=identity, job_dir=part.job_dir
    )


def _sidecar(part: SidecarPart) -> Sidecar:
    ready = None if part.port is None else PortProbe(part.port)
    return Sidecar(part.name, part.command, everywhere=part.everywhere, ready=ready)
