"""RayExecutor: the fields that users set, their checks, and the hooks that NeMo-Run calls."""

# No postponed annotations, and none with "|": the command line of NeMo-Run 0.11 parses values by
# the types themselves, and knows Optional and Union only.

import copy
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Optional, Union

from nemo_run.core.execution.base import Executor, ExecutorMacros
from nemo_run.core.execution.launcher import FaultTolerance, Launcher, Torchrun
from nemo_run.core.packaging.base import Packager

from nemo_run_ray import runtime_env as runtime_envs
from nemo_run_ray.checks import is_amount, refuse, strict_init
from nemo_run_ray.clusters import Cluster, ExistingCluster, LocalCluster
from nemo_run_ray.errors import ConfigError
from nemo_run_ray.probes import Probe

#: Name of the torchx scheduler, and the beginning of every handle.
SCHEDULER = "ray_jobs"
#: Name of the ledger in an experiment's folder.
LEDGER = "ray_jobs.jsonl"
STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
#: Resources with a field of their own.
_OWN_FIELDS = ("CPU", "GPU", "memory", "object_store_memory")
#: Fields that are times.
_SECONDS = ("grace_s", "pending_timeout_s")
#: The smallest part of a resource that Ray gives away.
RESOURCE_MIN = 0.0001
_LAUNCHERS = ("torchrun", "ft")
_UNITS = {"B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGTP", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
_MEMORY = re.compile(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)\s*")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TYPES: tuple[tuple[tuple[str, ...], type, str], ...] = (
    (("resources_per_node", "label_selector", "runtime_env", "ports", "env_vars"), dict, "a dict"),
    (("secrets", "dependencies", "resource_group", "permanent_exit_codes"), list, "a list"),
    (
        ("service", "keep_run_dir", "wait_for_nodes", "allow_unknown_runtime_env"),
        bool,
        "True or False",
    ),
    (("role", "strategy"), str, "a text"),
)


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

    #: Where to run; ``None`` is ``LocalCluster()``, an embedded Ray on this machine.
    cluster: Optional[Cluster] = None
    #: Short for ``cluster=ExistingCluster(url=address)``.
    address: Optional[str] = None
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
    #: Passed to Ray: ``pip``, ``image_uri``, ``env_vars`` … ``working_dir`` is ours.
    runtime_env: dict[str, Any] = field(default_factory=dict)
    #: Let ``runtime_env`` have fields that Ray's documentation does not list: those of a newer Ray
    #: and of plug-ins of the cluster. Ray says nothing of a field that it does not know, and the
    #: task would run without it; so they are refused otherwise.
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
    #: Wait for nodes to join when those that are there can never host it (an autoscaler).
    wait_for_nodes: bool = False
    #: The roles' executors, when this is the executor of a whole group; ``merge`` sets it.
    resource_group: list[Any] = field(default_factory=list)
    #: At most so many of the experiment's jobs at once; ``None`` is what the head's memory allows.
    max_in_flight: Optional[int] = None
    #: Seconds after which a job that was not placed is given up. With ``None``, what a dispatcher
    #: hands over waits for ever, and other jobs for as long as Ray lets them (900 s).
    pending_timeout_s: Optional[float] = None
    #: Exit codes that no further attempt would change, such as that of a usage error.
    permanent_exit_codes: list[int] = field(default_factory=list)
    #: Seconds from SIGTERM to SIGKILL.
    grace_s: float = 10
    #: Handles of jobs that must have succeeded.
    dependencies: list[str] = field(default_factory=list)
    #: Leave the run directory on the node.
    keep_run_dir: bool = False
    #: The cluster's interpreter; ``None`` takes the first that serves.
    python: Optional[str] = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for register in ON_SUBCLASS:
            register(cls)

    def __post_init__(self) -> None:
        self.check()

    def check(self, role: str = "") -> None:
        """Check every field; called again before a submission, since fields can be assigned.

        Args:
            role: its name in a group, for the message.

        Raises:
            ConfigError: the first field that is wrong.
        """
        try:
            self._check_fields()
        except ConfigError as error:
            if not role:
                raise
            raise ConfigError(f"The role {role!r}: {error}") from error

    def _check_fields(self) -> None:
        self._check_types()
        if self.cluster is not None and self.address is not None:
            raise ConfigError(
                f"RayExecutor has both cluster={self.cluster!r} and address={self.address!r}; "
                "address is short for ExistingCluster, so give one of them."
            )
        if self.cluster is not None and not isinstance(self.cluster, Cluster):
            refuse("cluster", self.cluster, "one of nemo_run_ray.clusters, such as LocalCluster()")
        if self.address is not None:
            ExistingCluster(url=self.address)
        self._check_numbers()
        runtime_envs.check(self.runtime_env, self.allow_unknown_runtime_env)
        self._check_names()
        if self.strategy not in STRATEGIES:
            refuse("strategy", self.strategy, f"one of {', '.join(STRATEGIES)}")
        self._check_launcher()

    def resolve_cluster(self) -> Cluster:
        """The cluster that the fields name."""
        if self.address is not None:
            return ExistingCluster(url=self.address)
        return self.cluster if self.cluster is not None else LocalCluster()

    @property
    def packager_ships(self) -> bool:
        """Whether code travels; NeMo-Run's base packager is the one that ships nothing."""
        return type(self.packager) is not Packager

    @property
    def memory_bytes(self) -> int | None:
        """``memory_per_node`` in bytes."""
        return None if self.memory_per_node is None else parse_memory(self.memory_per_node)

    # ------------------------------------------------------------------ what NeMo-Run calls

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
        if len(executors) == 1 and executors[0].resource_group:
            found = len(executors[0].resource_group)
            if found != num_tasks:
                raise ConfigError(
                    f"RayExecutor.resource_group has {found} executors for the {num_tasks} tasks "
                    "of the group; it is for NeMo-Run to set. Give the group a list of executors."
                )
            return executors[0]
        if len(executors) == 1:
            executors = [copy.deepcopy(executors[0]) for _ in range(num_tasks)]
        first = executors[0]
        for number, one in enumerate(executors):
            if not isinstance(one, cls) or one.resource_group:
                raise ConfigError(
                    f"The executor of the role {number} of a group is {one!r}; allowed is a "
                    "RayExecutor that is not that of another group."
                )
            one.check(one.role or str(number))
            if one.resolve_cluster().record() != first.resolve_cluster().record():
                raise ConfigError(
                    f"The roles {first.role or '0'!r} and {one.role or str(number)!r} of a group "
                    f"have different clusters: {first.resolve_cluster()!r} and "
                    f"{one.resolve_cluster()!r}. A group is placed on one cluster; give all of its "
                    "executors the same RayExecutor.cluster or address."
                )
        merged = cls(
            cluster=first.resolve_cluster(),
            grace_s=max(one.grace_s for one in executors),
            retries=max((one.retries for one in executors if not one.service), default=0),
            permanent_exit_codes=sorted(
                {code for one in executors for code in one.permanent_exit_codes}
            ),
            max_in_flight=min(
                (one.max_in_flight for one in executors if one.max_in_flight is not None),
                default=None,
            ),
            dependencies=list(
                dict.fromkeys(handle for one in executors for handle in one.dependencies)
            ),
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
                "Choose another id, or look at the old run with "
                f"`nemo-run-ray status {exp_id}`."
            )
        self.experiment_id = exp_id
        self.experiment_dir = exp_dir
        self.job_dir = os.path.join(exp_dir, task_dir)

    def nnodes(self) -> int:
        return self.nodes

    def nproc_per_node(self) -> int:
        return self.ntasks_per_node

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

    # ------------------------------------------------------------------ checks

    def _check_types(self) -> None:
        """Texts are sequences too, and ``"false"`` is true: check before anything is iterated."""
        for names, kind, allowed in _TYPES:
            for name in names:
                if not isinstance(getattr(self, name), kind):
                    # A secret given by its value must not be shown, not even as refused.
                    value = "not a list" if name == "secrets" else getattr(self, name)
                    refuse(name, value, allowed)
        for one in self.resource_group:
            if not isinstance(one, RayExecutor):
                refuse("resource_group", self.resource_group, "a list of RayExecutors")
        if self.ready is not None and (
            not isinstance(self.ready, Probe) or type(self.ready) is Probe
        ):
            refuse("ready", self.ready, "a PortProbe, an HttpProbe, a CommandProbe or None")
        if self.python is not None and (not isinstance(self.python, str) or not self.python):
            refuse("python", self.python, "a path, a program's name, or None")
        for handle in self.dependencies:
            if not isinstance(handle, str) or not handle.startswith(f"{SCHEDULER}://"):
                allowed = f"a list of handles of Ray jobs, {SCHEDULER}://nemo_run/<job's id>"
                refuse("dependencies", self.dependencies, allowed)
        for code in self.permanent_exit_codes:
            if isinstance(code, bool) or not isinstance(code, int) or not 1 <= code <= 255:
                refuse("permanent_exit_codes", self.permanent_exit_codes, "numbers from 1 to 255")

    def _check_numbers(self) -> None:
        for name in ("nodes", "ntasks_per_node"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                refuse(name, value, "a whole number from 1")
        if isinstance(self.retries, bool) or not isinstance(self.retries, int) or self.retries < 0:
            refuse("retries", self.retries, "a whole number from 0")
        if self.max_in_flight is not None and (
            isinstance(self.max_in_flight, bool)
            or not isinstance(self.max_in_flight, int)
            or self.max_in_flight < 1
        ):
            refuse("max_in_flight", self.max_in_flight, "a whole number from 1, or None")
        for name in ("cpus_per_node", "pending_timeout_s"):
            if getattr(self, name) is not None:
                _check_amount(name, getattr(self, name))
        for name in ("gpus_per_node", "grace_s"):
            _check_amount(name, getattr(self, name))
        if self.gpus_per_node > 1 and self.gpus_per_node != int(self.gpus_per_node):
            refuse("gpus_per_node", self.gpus_per_node, "a fraction below 1 or a whole number")
        for name, amount in self.resources_per_node.items():
            _check_amount(f"resources_per_node[{name!r}]", amount)
            if not isinstance(name, str) or not name or name in _OWN_FIELDS:
                allowed = f"custom resources; {', '.join(_OWN_FIELDS)} have fields of their own"
                refuse("resources_per_node", self.resources_per_node, allowed)
        if self.memory_per_node is not None:
            parse_memory(self.memory_per_node)
        for name, port in self.ports.items():
            if not isinstance(name, str) or not name or name.startswith("_"):
                refuse("ports", name, "names that do not begin with '_'")
            if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
                refuse(f"ports[{name!r}]", port, "a whole number from 0 to 65535")
        fixed = [port for port in self.ports.values() if port]
        if len(set(fixed)) < len(fixed):
            refuse("ports", self.ports, "different numbers, or 0 for a free one")

    def _check_names(self) -> None:
        for name in self.secrets:
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise ConfigError(
                    "RayExecutor.secrets holds something that is no name of an environment "
                    "variable (not shown here, in case it is a value); allowed are names, such as "
                    "['HF_TOKEN'], whose values are taken from the environment."
                )
        for name, value in self.env_vars.items():
            if not isinstance(name, str) or not name or "=" in name or "\0" in name:
                refuse("env_vars", name, "names of environment variables")
            if not isinstance(value, str) or "\0" in value:
                refuse(f"env_vars[{name!r}]", value, "a text without NUL")
            if name in self.secrets:
                refuse("env_vars", name, "a name that is not in secrets too")
        for name in self.secrets:
            if name in self.runtime_env.get("env_vars", {}):
                refuse("runtime_env['env_vars']", name, "a name that is not in secrets too")
        for name, value in self.label_selector.items():
            if not isinstance(name, str) or not isinstance(value, str):
                refuse("label_selector", self.label_selector, "texts by label")

    def _check_launcher(self) -> None:
        launcher = self.launcher
        if self.resource_group and launcher is not None and type(launcher) is not Launcher:
            refuse("launcher", launcher, "None for a group; set it on the executor of a role")
        if isinstance(launcher, str):
            if launcher not in _LAUNCHERS:
                refuse("launcher", launcher, f"None or one of {', '.join(_LAUNCHERS)}")
        elif launcher is not None:
            if type(launcher) not in (Launcher, Torchrun, FaultTolerance):
                refuse("launcher", launcher, "None, Torchrun or FaultTolerance")
            if launcher.nsys_profile:
                refuse("launcher.nsys_profile", True, "False: profiling on Ray is not built yet")


def parse_memory(value: int | str) -> int:
    """Bytes of ``"64GiB"``, ``"500 MB"`` or a plain number.

    Raises:
        ConfigError: no number, a negative one, or an unknown unit.
    """
    allowed = f"bytes, or a number with one of the units {', '.join(_UNITS)}"
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        refuse("memory_per_node", value, allowed)
    if isinstance(value, int):
        if value < 0:
            refuse("memory_per_node", value, allowed)
        return value
    match = _MEMORY.fullmatch(value)
    if match is None or (match.group(2) or "B") not in _UNITS:
        refuse("memory_per_node", value, allowed)
    return int(float(match.group(1)) * _UNITS[match.group(2) or "B"])


def _check_amount(name: str, value: Any) -> None:
    if name not in _SECONDS and is_amount(value) and 0 < value < RESOURCE_MIN:
        refuse(name, value, f"0 or a number from {RESOURCE_MIN}, the step in which Ray counts")
    if not is_amount(value):
        refuse(name, value, "a number from 0")
