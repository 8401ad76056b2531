"""The format of a cluster file, after a reader has made plain values of it.

Every key is a field here, and its description is what ``docs/clusters.md`` prints.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

_Texts = dict[str, str]
_Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Amounts = dict[str, _Amount]
_Memory = int | str


class _Part(BaseModel):
    """A section: unknown keys are refused, and no value is bent into another type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class LocalPart(_Part):
    """The embedded Ray of this machine."""

    num_cpus: Annotated[int | None, Field(description="CPUs that Ray may give away.")] = None
    num_gpus: Annotated[int | None, Field(description="GPUs that Ray may give away.")] = None
    keep: Annotated[bool, Field(description="Leave it when its last user is done.")] = False
    idle_timeout_s: Annotated[
        float,
        Field(description="Seconds without a user and a job that runs after which it stops."),
    ] = 600.0


class SidecarPart(_Part):
    """A command beside Ray."""

    name: Annotated[str, Field(description="Its name, for messages and its log.")]
    command: Annotated[str, Field(description="A line for bash.")]
    everywhere: Annotated[bool, Field(description="On every node, or on the head's alone.")] = True
    port: Annotated[
        int | None, Field(description="It is ready when this port takes connections.")
    ] = None


class SlurmPart(_Part):
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


class ClusterPart(_Part):
    """Where jobs run: a dashboard's address, the embedded Ray, or an allocation of Slurm."""

    address: Annotated[
        str | None,
        Field(description="Of Ray's dashboard, as `RayExecutor.address` takes it."),
    ] = None
    local: Annotated[
        LocalPart | None, Field(description="The embedded Ray of this machine, with its fields.")
    ] = None
    slurm: Annotated[
        SlurmPart | None, Field(description="Ray in an allocation of Slurm; see docs/slurm.md.")
    ] = None
    token_variable: Annotated[
        str | None,
        Field(description="Variable of your environment that holds Ray's token."),
    ] = None
    headers: Annotated[
        _Texts,
        Field(description="Extra headers; `${NAME}` in a value is a variable of your environment."),
    ] = {}
    verify: Annotated[
        bool | str,
        Field(description="Check the certificate, or a file with the CA, from the file's folder."),
    ] = True


class EnvPart(_Part):
    """Variables of every task. What looks like a credential becomes a secret."""

    set: Annotated[_Texts, Field(description="Variables with their values.")] = {}
    forward: Annotated[
        list[str],
        Field(
            description="Variables that get your value, where you have one; `NAME_*` is allowed."
        ),
    ] = []
    required: Annotated[
        list[str], Field(description="Variables that get your value, and must have one.")
    ] = []
    value_from: Annotated[
        dict[str, list[str]],
        Field(
            description="Where the value of a variable in `forward` or `required` comes from, "
            "instead of yours of the same name: the first that is there of these variables of "
            "yours, or files with the value (a path has a `/`)."
        ),
    ] = {}


class PoolPart(_Part):
    """Nodes of one kind, and what a task gets there unless its own fields say otherwise."""

    label_selector: Annotated[_Texts, Field(description="Labels of its nodes.")] = {}
    image: Annotated[
        str | None, Field(description="Container image: a name in `images`, or the image itself.")
    ] = None
    cpus_per_node: Annotated[float | None, Field(description="CPUs that one replica reserves.")] = (
        None
    )
    gpus_per_node: Annotated[float | None, Field(description="GPUs that one replica reserves.")] = (
        None
    )
    memory_per_node: Annotated[
        _Memory | None, Field(description="Memory that one replica reserves: bytes or `64GiB`.")
    ] = None
    resources_per_node: Annotated[
        _Amounts, Field(description="Custom resources that one replica reserves.")
    ] = {}
    env_vars: Annotated[_Texts, Field(description="Variables of its tasks.")] = {}
    address: Annotated[
        str | None, Field(description="Of another dashboard, if these nodes have one.")
    ] = None
    notes: Annotated[str, Field(description="For people; `nemo-run-ray clusters` shows it.")] = ""


class LabelPart(_Part):
    """A label that some node must have."""

    key: Annotated[str, Field(description="Name of the label.")]
    value: Annotated[str, Field(description="Its value.")]


class PreflightPart(_Part):
    """What is looked at before the first job of an experiment is sent."""

    enabled: Annotated[bool, Field(description="Look before every experiment.")] = False
    require_address: Annotated[
        bool, Field(description="The cluster must be one that exists, with an address.")
    ] = False
    strict: Annotated[
        bool, Field(description="What the cluster does not tell counts as broken.")
    ] = False
    only_required: Annotated[
        bool,
        Field(description="Look at nothing before a start but at what the keys below require."),
    ] = False
    required_labels: Annotated[
        list[LabelPart], Field(description="Labels that a living node must have.")
    ] = []
    min_resources: Annotated[
        _Amounts,
        Field(description="Totals that the cluster must have: `CPU`, `GPU`, `memory`, others."),
    ] = {}


class ClusterFile(_Part):
    """A whole cluster file."""

    cluster: Annotated[ClusterPart, Field(description="Where jobs run.")] = ClusterPart()
    defaults: Annotated[
        dict[str, Any],
        Field(description="Any field of RayExecutor that a text, number, list or table can give."),
    ] = {}
    env: Annotated[EnvPart, Field(description="Variables of every task.")] = EnvPart()
    secrets: Annotated[
        list[str],
        Field(description="Variables whose values every task gets as secrets; they must be set."),
    ] = []
    images: Annotated[_Texts, Field(description="Container images by a name.")] = {}
    images_as: Annotated[
        Literal["label", "image_uri", "none"],
        Field(
            description="How a task gets its image: by the labels of nodes that run it, by Ray's "
            "`image_uri`, or not at all (all nodes have the same)."
        ),
    ] = "label"
    image_labels: Annotated[
        dict[str, _Texts],
        Field(description="Labels of the nodes of an image: by its name, the image, or a pattern."),
    ] = {}
    image_label_key: Annotated[
        str | None,
        Field(description="Label that holds the image's name, for those not in `image_labels`."),
    ] = None
    pools: Annotated[dict[str, PoolPart], Field(description="Nodes by kind.")] = {}
    preflight: Annotated[PreflightPart, Field(description="What is looked at before a start.")] = (
        PreflightPart()
    )
