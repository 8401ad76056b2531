"""The format of a cluster file, after a reader has made plain values of it.

Every key is a field here, and its description is what the docs print.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

_Texts = dict[str, str]
_Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Amounts = dict[str, _Amount]


class _Part(BaseModel):
    """A section: unknown keys are refused, and no value is bent into another type."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True
    )


class LocalPart(_Part):
    """The embedded Ray of this machine."""

    num_cpus: int | None = None
    """CPUs that Ray may give away."""
    num_gpus: int | None = None
    """GPUs that Ray may give away."""
    keep: bool = False
    """Keep it running after its last user is done, until `nemo-run-ray down`."""
    idle_timeout_s: float = 600.0
    """Seconds without a user and without a running job after which it stops."""


class SidecarPart(_Part):
    """A command beside Ray."""

    name: str
    """Its name, for messages and its log."""
    command: str
    """A line for bash."""
    everywhere: bool = True
    """On every node, or on the head's alone."""
    port: int | None = None
    """It is ready when this port takes connections."""


class SlurmPart(_Part):
    """Ray in an allocation of Slurm, with the fields of SlurmCluster and its SlurmExecutor."""

    account: str
    """Slurm's account."""
    job_dir: str
    """A folder that all nodes share, absolute."""
    partition: str | None = None
    """Slurm's partition."""
    host: str | None = None
    """A login node to reach by SSH; without it, this machine."""
    user: str | None = None
    """Your name on that host."""
    port: int | None = None
    """Its port of SSH."""
    identity: str | None = None
    """File of your private key."""
    name: str | None = None
    """Name of the cluster; users of the same name share it. Default: the file's name."""
    nodes: int = 1
    """Nodes of the allocation."""
    walltime: str | None = None
    """Its time limit: `04:00:00`."""
    gpus_per_node: int | None = None
    """GPUs of each node."""
    cpus_per_task: int | None = None
    """CPUs of each node."""
    mem: str | None = None
    """Memory of each node, as Slurm writes it."""
    qos: str | None = None
    """Slurm's quality of service."""
    exclusive: bool | None = None
    """Share the nodes with nobody."""
    container_image: str | None = None
    """Image of the nodes (pyxis)."""
    container_mounts: list[str] = []
    """Folders in the container."""
    setup_lines: str | None = None
    """Shell lines before Ray starts."""
    env_vars: _Texts = {}
    """Variables of the script and of Ray, written as they are."""
    sbatch: dict[str, str | int | bool] = {}
    """Further options of sbatch, by name."""
    keep: bool = False
    """Keep it running after its last user is done, until it is idle for `idle_timeout_s`."""
    idle_timeout_s: int | None = 900
    """Seconds without a job after which it ends."""
    renew: bool = False
    """Continue chains in another allocation when the walltime of this one is over."""
    queue_timeout_s: float | None = None
    """Seconds to wait in Slurm's queue."""
    sidecars: list[SidecarPart] = []
    """What runs beside Ray."""


class ClusterPart(_Part):
    """The place of jobs: a dashboard's address, the embedded Ray, or an allocation of Slurm."""

    address: str | None = None
    """Address of Ray's dashboard, in the form of `RayExecutor.address`."""
    local: LocalPart | None = None
    """The embedded Ray of this machine, with its fields."""
    slurm: SlurmPart | None = None
    """Ray in an allocation of Slurm; see docs/guides/slurm.md."""
    token_variable: str | None = None
    """Variable of your environment that holds Ray's token."""
    headers: _Texts = {}
    """Extra headers; `${NAME}` in a value is a variable of your environment."""
    verify: bool | str = True
    """Check the certificate, or a file with the CA, from the file's folder."""


class EnvPart(_Part):
    """Variables of every task. What looks like a credential becomes a secret."""

    set: _Texts = {}
    """Variables with their values."""
    forward: list[str] = []
    """Variables that get your value, where you have one; `NAME_*` is allowed."""
    required: list[str] = []
    """Variables that get your value, and must have one."""
    value_from: dict[str, list[str]] = {}
    """Other places for the value of a variable in `forward` or `required`: names of your variables,
    or paths (with a `/`) of files that hold the value. The first place that exists is used.
    """


class PoolPart(_Part):
    """Nodes of one kind, and what a task gets there unless its own fields say otherwise."""

    label_selector: _Texts = {}
    """Labels of its nodes."""
    image: str | None = None
    """Container image: a name in `images`, or the image itself."""
    cpus_per_node: float | None = None
    """CPUs that one replica reserves."""
    gpus_per_node: float | None = None
    """GPUs that one replica reserves."""
    memory_per_node: int | str | None = None
    """Memory that one replica reserves: bytes or `64GiB`."""
    resources_per_node: _Amounts = {}
    """Custom resources that one replica reserves."""
    env_vars: _Texts = {}
    """Variables of its tasks."""
    address: str | None = None
    """Address of another dashboard, if these nodes have one."""
    notes: str = ""
    """For people; `nemo-run-ray clusters` shows it."""


class LabelPart(_Part):
    """A label that some node must have."""

    key: str
    """Name of the label."""
    value: str
    """Its value."""


class PreflightPart(_Part):
    """Checks before the first job of an experiment is sent."""

    enabled: bool = False
    """Look before every experiment."""
    require_address: bool = False
    """The cluster must be one that exists, with an address."""
    strict: bool = False
    """What the cluster does not tell counts as broken."""
    only_required: bool = False
    """Before a start, check only what the keys below require."""
    required_labels: list[LabelPart] = []
    """Labels that a living node must have."""
    min_resources: _Amounts = {}
    """Totals that the cluster must have: `CPU`, `GPU`, `memory`, others."""


class ClusterFile(_Part):
    """A whole cluster file."""

    cluster: ClusterPart = ClusterPart()
    """Where jobs run."""
    defaults: dict[str, Any] = {}
    """Any field of RayExecutor that a text, number, list or table can give."""
    env: EnvPart = EnvPart()
    """Variables of every task."""
    secrets: list[str] = []
    """Variables whose values every task gets as secrets; they must be set."""
    images: _Texts = {}
    """Container images by a name."""
    images_as: Literal["label", "image_uri", "none"] = "label"
    """How a task gets its image: by the labels of nodes that run it, by Ray's `image_uri`, or not
    at all (all nodes have the same).
    """
    image_labels: dict[str, _Texts] = {}
    """Labels of the nodes of an image: by its name, the image, or a pattern."""
    image_label_key: str | None = None
    """Label that holds the image's name, for those not in `image_labels`."""
    pools: dict[str, PoolPart] = {}
    """Nodes by kind."""
    preflight: PreflightPart = PreflightPart()
    """Checks before the first job of an experiment is sent."""
