"""RayExecutor: the fields that users set, and the hooks that NeMo-Run calls."""

# No postponed annotations, and none with "|": the command line of NeMo-Run 0.11 parses values by
# the types themselves, and knows Optional and Union only.

import copy
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Optional, Union

from nemo_run.core.execution.base import Executor, ExecutorMacros
from nemo_run.core.packaging.base import Packager

from nemo_run_ray.clusters import Cluster
from nemo_run_ray.clusters.existing import ExistingCluster
from nemo_run_ray.errors import ConfigError
from nemo_run_ray.fields import (
    Probe,
    check_executor,
    parse_memory,
    refuse,
    refuse_credentials,
    strict_init,
    variables_of,
)
from nemo_run_ray.ids import LEDGER

#: Variables that name the cluster file of executors that name none. The second is that of
#: NeMo-Skills, and counts where its file is for Ray.
FILE_VARIABLES = ("NEMO_RUN_RAY_CLUSTER", "NEMO_SKILLS_CONFIG")
_GUARD = 'Put what starts the run below `if __name__ == "__main__":`.'
#: Called with every new subclass of ``RayExecutor``, so that NeMo-Run's registries know it too.
ON_SUBCLASS: list[Callable[[type], None]] = []


@strict_init
@dataclass(kw_only=True)
class RayExecutor(Executor):
    """Runs NeMo-Run tasks as jobs of a Ray cluster.

    Example:
        ``run.run(task, executor=RayExecutor(address="http://ray-head:8265", gpus_per_node=1))``

    Raises:
        ConfigError: a field is unknown or its value is not allowed; the message names the field,
            the value and what is allowed.
    """

    #: The cluster, or the name or the path of a cluster file. ``None`` is the file that
    #: NEMO_RUN_RAY_CLUSTER names, else ``LocalCluster()``, an embedded Ray on this machine.
    cluster: Optional[Union[Cluster, str]] = None
    #: Short for ``cluster=ExistingCluster(url=address)``.
    address: Optional[str] = None
    #: Pool of the cluster file: its labels, image and resources, under the fields given here.
    pool: Optional[str] = None
    #: Container image, or its name in the cluster file, which says how a task gets it there.
    image: Optional[str] = None
    #: Look first whether the cluster can run it; ``None`` is what the cluster file says.
    preflight: Optional[bool] = None
    #: Replicas of the task, each with its own bundle of resources.
    nodes: int = 1
    #: Processes in each replica.
    ntasks_per_node: int = 1
    #: CPUs that one replica reserves; ``None`` reserves nothing.
    cpus_per_node: Optional[float] = None
    #: GPUs that one replica reserves.
    gpus_per_node: float = 0
    #: Memory that one replica reserves: bytes, or a text such as ``"64GiB"``.
    memory_per_node: Optional[Union[int, str]] = None
    #: Ray's custom resources that one replica reserves.
    resources_per_node: dict[str, float] = field(default_factory=dict)
    #: Labels of the nodes that may host it (Ray's label selectors).
    label_selector: dict[str, str] = field(default_factory=dict)
    #: Ray's placement strategy for the replicas.
    strategy: str = "PACK"
    #: Ray's fields: ``pip``, ``image_uri``, ``env_vars`` …; the packager sets ``working_dir``.
    runtime_env: dict[str, Any] = field(default_factory=dict)
    #: Let ``runtime_env`` have fields that Ray's documentation does not list: a plug-in's, say.
    allow_unknown_runtime_env: bool = False
    #: Names of variables of the caller's environment that the task gets; the values are written
    #: nowhere but into an archive of their own on the cluster.
    secrets: list[str] = field(default_factory=list)
    #: Name of this task as a role of a group.
    role: str = ""
    #: The role runs until the primary roles are done.
    service: bool = False
    #: Probe that says when the service is ready: PortProbe, HttpProbe or CommandProbe.
    ready: Optional[Probe] = None
    #: Named ports of the role; 0 is a free one.
    ports: dict[str, int] = field(default_factory=dict)
    #: A group that no node can host waits for nodes (an autoscaler) instead of failing. Tasks and
    #: arrays never fail for that reason; see ``pending_timeout_s``.
    wait_for_nodes: bool = False
    # The roles' executors, when this is the executor of a whole group; ``merge`` sets it.
    resource_group: list[Any] = field(default_factory=list)
    #: At most so many of the experiment's jobs, and of an array's elements, at once; ``None`` is
    #: what the head's memory allows.
    max_in_flight: Optional[int] = None
    #: Seconds after which a job that was not placed is given up. With ``None``, what a dispatcher
    #: submits waits for ever, and other jobs for as long as Ray lets them (900 s).
    pending_timeout_s: Optional[float] = None
    #: Seconds that the task needs: it is not started when its cluster on Slurm ends before.
    time_s: Optional[float] = None
    #: Exit codes that no further attempt would change, such as that of a usage error.
    permanent_exit_codes: list[int] = field(default_factory=list)
    #: Seconds from SIGTERM to SIGKILL.
    grace_s: float = 10
    #: Jobs that must have succeeded before: handles of Ray jobs, or titles or ids of experiments,
    #: for all of their jobs; a title means its newest experiment.
    dependencies: list[str] = field(default_factory=list)
    #: Leave the run directory on the node.
    keep_run_dir: bool = False
    #: The cluster's interpreter; ``None`` is a Python 3.9 or newer of the node: its ``python3``,
    #: its ``python``, or that of Ray.
    python: Optional[str] = None
    #: ``"login"`` starts the command, word by word, from a login shell: its profile sets ``PATH``.
    entrypoint_shell: Optional[str] = None
    #: Shell commands that run before the task, in the shell that starts it; each must succeed.
    startup_commands: list[str] = field(default_factory=list)
    #: Bytes of a log that the experiment's folder keeps when a job has ended, the last ones of a
    #: longer log; 0 keeps none, ``None`` keeps all.
    keep_logs_max_bytes: Optional[int] = 64 * 1024**2
    # Fields that the code gives, which win over a cluster file; the executor sets it itself.
    given_fields: list[str] = field(default_factory=list, compare=False)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for register in ON_SUBCLASS:
            register(cls)

    def __new__(cls, *args: Any, **given: Any) -> Any:
        self = super().__new__(cls)
        self._given = frozenset(given)
        return self

    def __post_init__(self) -> None:
        if isinstance(self.cluster, os.PathLike):
            self.cluster = os.fspath(self.cluster)
        # A saved executor is built with all its fields, and says which of them were given.
        given: frozenset[str] = self.__dict__.pop("_given")
        if "given_fields" not in given:
            self.given_fields = sorted(given)
        # Not saved, so these are no fields: where the cluster file takes the values of secrets
        # from, and the name of the file whose values a resolved executor has.
        self.secret_places: Mapping[str, Sequence[str]] = {}
        self.resolved_from = ""
        self.check()
        if self.address == "auto":  # what another process finds in its environment is another one
            self.address = ExistingCluster(url=self.address).url

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        # A field that is assigned later is given in code too.
        if "resolved_from" in self.__dict__ and name in self.__dataclass_fields__:
            self.__dict__["given_fields"] = sorted({*self.given_fields, name})

    def resolved(self) -> "RayExecutor":
        """The executor with the values of its cluster file; itself when it names none.

        Raises:
            ConfigError: the file is wrong, or does not have what the fields name.
        """
        if self.file_name() or self.pool or self.image or self.resource_group:
            # Imported when it is needed, for its libraries; it is above this module.
            from nemo_run_ray.cluster_files.resolve import resolve

            return resolve(self)
        return self

    def file_name(self) -> str | None:
        """The name of the cluster file, by the fields or the environment."""
        if isinstance(self.cluster, str):
            return self.cluster
        if self.cluster or self.address is not None:
            return None
        return next(filter(None, map(os.environ.get, FILE_VARIABLES)), None)

    def clone(self) -> "RayExecutor":
        # NeMo-Run adds this copy to an experiment. Fiddle, which makes it, would show all fields
        # in an error of the constructor.
        self.refuse_credentials()
        return super().clone()  # type: ignore[no-any-return]

    def refuse_credentials(self) -> None:
        """Refuse variables that hold a credential in clear."""
        for what, variables in variables_of(self).items():
            refuse_credentials(what, variables)

    def check(self, role: str = "") -> None:
        """Check every field; called again before a submission, since fields can be assigned."""
        cluster, address = self.cluster, self.address
        is_name = isinstance(cluster, str) and cluster.strip() and "://" not in cluster
        try:
            if not (cluster is None or is_name or isinstance(cluster, Cluster)):
                refuse(
                    "RayExecutor.cluster",
                    cluster,
                    "a cluster such as SlurmCluster(…), or a cluster file's name (an address is "
                    "for RayExecutor.address)",
                )
            if address is not None:
                ExistingCluster(url=address)
                if cluster:
                    raise ConfigError(
                        f"RayExecutor has both cluster={cluster!r} and address={address!r}; "
                        "address is short for ExistingCluster, so give one of them."
                    )
            check_executor(self)
        except ConfigError as error:
            raise ConfigError(f"The role {role!r}: {error}" if role else str(error)) from error

    def resolve_cluster(self) -> Cluster:
        """The cluster that the fields name."""
        found = self.resolved()
        if found.address is not None:
            return ExistingCluster(url=found.address)
        if isinstance(found.cluster, Cluster):
            return found.cluster
        from nemo_run_ray.clusters.local import LocalCluster  # most programs need none

        return LocalCluster()

    @property
    def packager_ships(self) -> bool:
        """Whether code is sent; NeMo-Run's base packager is the one that sends nothing."""
        return type(self.packager) is not Packager

    @property
    def memory_bytes(self) -> int | None:
        """``memory_per_node`` in bytes."""
        return None if self.memory_per_node is None else parse_memory(self.memory_per_node)

    @property
    def log_copy(self) -> str:
        """Beginning of the path of a second file for the log of the ended job; empty for none."""
        return ""

    @classmethod
    def supports_job_group(cls) -> bool:
        """NeMo-Run's ``JobGroup`` may use it."""
        return True

    @classmethod
    def merge(cls, executors: list["RayExecutor"], num_tasks: int) -> "RayExecutor":
        """The executor of a whole group.

        Args:
            executors: one for all tasks, or one for each; or the merged one of a saved experiment.
            num_tasks: how many tasks the group has.

        Raises:
            ConfigError: the executors are of different clusters, or one is wrong.
        """
        if len(executors) == 1:
            if executors[0].resource_group:
                return executors[0]
            executors = [copy.deepcopy(executors[0]) for _ in range(num_tasks)]
        for number, executor in enumerate(executors):
            if not isinstance(executor, cls) or executor.resource_group:
                raise ConfigError(
                    f"The executor of the role {number} of a group is {executor!r}; allowed is a "
                    "RayExecutor that is not that of another group."
                )
            executor.check(executor.role or str(number))
        cluster_of_roles(executors)
        first, roles = executors[0], [executor.resolved() for executor in executors]
        sizes = [role.keep_logs_max_bytes for role in roles]
        merged = cls(
            # Names stay names: they are resolved when the group is launched.
            cluster=first.cluster,
            address=first.address,
            preflight=any(role.preflight for role in roles),
            grace_s=max(role.grace_s for role in roles),
            retries=max((role.retries for role in roles if not role.service), default=0),
            permanent_exit_codes=sorted({c for role in roles for c in role.permanent_exit_codes}),
            max_in_flight=min(filter(None, (role.max_in_flight for role in roles)), default=None),
            time_s=max(filter(None, (role.time_s for role in roles)), default=None),
            keep_logs_max_bytes=None if None in sizes else max(filter(None, sizes), default=0),
            dependencies=list(dict.fromkeys(one for role in roles for one in role.dependencies)),
            experiment_id=first.experiment_id,
            job_dir=first.job_dir,
            resource_group=list(executors),
        )
        merged.experiment_dir = first.experiment_dir
        return merged

    def assign(self, exp_id: str, exp_dir: str, task_id: str, task_dir: str) -> None:
        if os.path.exists(os.path.join(exp_dir, LEDGER)):
            raise ConfigError(
                f"The experiment {exp_id} has run already: {exp_dir} holds its ledger {LEDGER}. "
                f"Choose another id, or look at the old run with `nemo-run-ray status {exp_id}`."
            )
        # NeMo-Run runs a program again to find the functions of its ``__main__``. On a node it
        # would launch itself, and wait for its own end; a look at an experiment would launch it.
        if frame := _top_level("__external_main__"):  # ``maybe_load_external_main``
            raise ConfigError(
                f"{frame.f_code.co_filename}, line {frame.f_lineno}, launches what was launched "
                "already: NeMo-Run runs this program again to find the functions of its __main__. "
                f"{_GUARD}"
            )
        for what, name in (("experiment", exp_id), ("task", task_id)):
            if "/" in name:
                raise ConfigError(
                    f"The name of the {what} {name!r} has a '/', and NeMo-Run makes folders of "
                    "such names and then does not find them. Choose another name, such as "
                    f"{name.replace('/', '-')!r}."
                )
        self.experiment_id = exp_id
        self.experiment_dir = exp_dir
        self.job_dir = os.path.join(exp_dir, task_dir)

    def nnodes(self) -> int:
        return self.resolved().nodes

    def nproc_per_node(self) -> int:
        return self.resolved().ntasks_per_node

    def macro_values(self) -> ExecutorMacros:
        return ExecutorMacros(
            head_node_ip_var="NEMO_RUN_HEAD_NODE_IP",
            nproc_per_node_var="NEMO_RUN_NPROC_PER_NODE",
            num_nodes_var="NEMO_RUN_NUM_NODES",
            node_rank_var="NEMO_RUN_NODE_RANK",
            het_group_host_var="NEMO_RUN_HET_GROUP_HOST",
        )

    def package_configs(self, *cfgs: tuple[str, str]) -> list[str]:
        super().package_configs(*cfgs)
        return [f"/nemo_run/configs/{name}" for name, _ in cfgs]


def cluster_of_roles(executors: Sequence[RayExecutor]) -> Cluster:
    """The cluster that all roles of a group have."""
    first = executors[0]
    cluster = first.resolve_cluster()
    for number, executor in enumerate(executors):
        other = executor.resolve_cluster()
        if cluster.record() != other.record():
            raise ConfigError(
                f"The roles {first.role or '0'!r} and {executor.role or str(number)!r} of a group "
                f"have different clusters: {cluster!r} and {other!r}. A group is placed on one "
                "cluster; give all of its executors the same RayExecutor.cluster or address, and "
                "pools of a cluster file that have no address of their own."
            )
    return cluster


def check_guard() -> None:
    """Refuse to launch a function of ``__main__`` from a program that never asks for its name.

    The node runs the whole program again to find the function, and would launch it again.
    """
    frame = _top_level("__main__")
    if not frame:
        return
    file = frame.f_code.co_filename
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return  # a notebook's cell, or standard input: no program that runs again
    if not re.search(r"__name__\s*[!=]=|[!=]=\s*__name__", text):
        raise ConfigError(
            f"{file}, line {frame.f_lineno}, launches a function of its own program, and the node "
            f"runs that program again to find the function. {_GUARD}"
        )


def _top_level(module: str) -> FrameType | None:
    """The frame of the top-level code of a module, if that code has led here."""
    for frame, _ in traceback.walk_stack(sys._getframe()):
        if frame.f_globals.get("__name__") == module and frame.f_code.co_name == "<module>":
            return frame
    return None
