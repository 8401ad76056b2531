"""The executor of a task of NeMo-Skills, from the arguments of its ``get_executor``."""

from __future__ import annotations

import copy
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_run.core.packaging.base import Packager

from nemo_run_ray.cluster_files.load import load
from nemo_run_ray.cluster_files.resolve import default_values
from nemo_run_ray.errors import ConfigError
from nemo_run_ray.executor import RayExecutor
from nemo_run_ray.fields import strict_init
from nemo_run_ray.integrations.skills import localhost
from nemo_run_ray.integrations.skills.cluster_config import added_variables, file_of
from nemo_run_ray.remote.spec import env_key

#: The task that is being added is a Ray program, which asks the cluster for its resources itself.
IS_RAY_PROGRAM: ContextVar[bool] = ContextVar("is_ray_program", default=False)
#: Beginnings of NeMo-Skills' ``log_prefix``, which says what a part of a task does.
_SERVER, _SANDBOX = "server", "sandbox"
#: A role of a job of several Slurm groups, with the group's number.
_HET_ROLE = re.compile(r".*-(\d+)")


@strict_init
@dataclass(kw_only=True)
class SkillsExecutor(RayExecutor):
    """A ``RayExecutor`` whose groups are tasks of NeMo-Skills: a client, its servers, a sandbox."""

    #: NeMo-Skills' name of the task, such as ``gen1-rs0-chunk1``.
    job_name: str = ""
    #: Folder of the nodes in which NeMo-Skills' users look for the logs of the task.
    log_dir: str = ""

    @property
    def log_copy(self) -> str:
        name = self.job_name.replace("/", "-")
        return f"{self.log_dir}/main_{name}" if self.log_dir else ""

    @property
    def is_serving(self) -> bool:
        """Whether it is a server or a sandbox."""
        return self.role.startswith((_SERVER, _SANDBOX))

    @classmethod
    def merge(cls, executors: list[RayExecutor], num_tasks: int) -> RayExecutor:
        """The executor of a whole task; its servers and its sandbox run until the client is done.

        Args:
            executors: one for each part of the task, or the merged one of a saved experiment.
            num_tasks: how many parts the task has.

        Raises:
            ConfigError: the executors are of different clusters, or one is wrong.
        """
        if len(executors) > 1:
            executors = _as_roles(executors)
        merged = super().merge(executors, num_tasks)
        for role in merged.resource_group:
            if isinstance(role, cls) and isinstance(merged, cls) and not role.service:
                merged.job_name, merged.log_dir = role.job_name, role.log_dir
        return merged


def executor_of(call: Mapping[str, Any], packager: Packager) -> SkillsExecutor:
    """The executor for a call of ``get_executor``.

    Args:
        call: its arguments, by their names.
        packager: of NeMo-Skills, for a file that says nothing of the code.

    Raises:
        ConfigError: the task asks for what there is on Slurm only, or the file is wrong.
    """
    if call.get("ray_template") is not None:
        raise ConfigError(
            "ray_template is a script for Slurm; leave it out, the task runs on a Ray cluster."
        )
    file = file_of(call["cluster_config"])
    of_file = default_values(load(file)).get("packager")
    variables = added_variables(call["cluster_config"])
    role = call["log_prefix"]
    fields = {
        "nodes": call["num_nodes"],
        "ntasks_per_node": call["tasks_per_node"],
        "gpus_per_node": call["gpus_per_node"] or 0,
        "env_vars": dict(variables.clear),
    }
    if role.startswith(_SANDBOX):
        fields["nodes"] = 1  # clients know one address; two of them on one node share a port
    elif call["num_nodes"] > 1:
        fields["strategy"] = "STRICT_SPREAD"  # as Slurm's nodes are different ones
    if IS_RAY_PROGRAM.get() and not role.startswith((_SERVER, _SANDBOX)):
        # Its actors get the nodes; what the task itself reserved would be missing for them.
        gpus = {"GPUS_PER_NODE": str(fields["gpus_per_node"])}
        fields = {"nodes": 1, "cpus_per_node": None, "env_vars": {**variables.clear, **gpus}}
    return SkillsExecutor(
        cluster=file,
        image=call["container"] or None,
        role=f"{role}-{call['het_group']}" if call["heterogeneous"] else role,
        job_name=str(call["job_name"] or ""),
        log_dir=str(call["log_dir"] or ""),
        secrets=list(variables.secrets),
        dependencies=list(call["dependencies"] or ()),
        packager=packager if of_file is None else of_file,
        startup_commands=[RANKS],
        **fields,
    )


def _as_roles(executors: Sequence[RayExecutor]) -> list[RayExecutor]:
    """The parts of a task, each with a name of its own and with what it must know of the others."""
    roles = [copy.copy(executor) for executor in executors]
    _name(roles)
    serving = [role for role in roles if isinstance(role, SkillsExecutor) and role.is_serving]
    if len(serving) == len(roles):
        del serving[0]  # there is no client in this task: the server is its purpose
    for role in serving:
        role.service = True
    lines = het_groups(_het_groups(roles))
    for role in roles:
        role.startup_commands = [*role.startup_commands, *lines]
        if not role.service:
            own = [other.role for other in serving if _number_of(other) == _number_of(role)]
            names = own or [other.role for other in serving]
            servers = [name for name in names if not name.startswith(_SANDBOX)]
            sandbox = next((name for name in names if name.startswith(_SANDBOX)), None)
            role.startup_commands += client(role.role, servers, sandbox)
    return roles


def _number_of(role: RayExecutor) -> int | None:
    """The number of the role's group in a job of several Slurm groups."""
    match = _HET_ROLE.match(role.role)
    return None if match is None else int(match[1])


def _name(roles: Sequence[RayExecutor]) -> None:
    """Number the roles of one name."""
    count = Counter(role.role for role in roles)
    number: Counter[str] = Counter()
    for role in roles:
        name = role.role
        if count[name] > 1:
            role.role = f"{name}_{number[name]}"
            number[name] += 1


def _het_groups(roles: Sequence[RayExecutor]) -> dict[int, str]:
    """The first role of each of Slurm's groups."""
    found: dict[int, str] = {}
    for role in roles:
        number = _number_of(role)
        if number is not None:
            found.setdefault(number, role.role)
    return found


#: Slurm's names for what a replica knows. On a Ray cluster that itself runs on Slurm, Slurm has set
#: them for its own tasks, so they are overwritten.
RANKS = (
    'export SLURM_PROCID="${RANK:-0}" SLURM_LOCALID="${LOCAL_RANK:-0}" '
    'SLURM_NODEID="${NODE_RANK:-0}" SLURM_MASTER_NODE="${MASTER_ADDR:-127.0.0.1}"'
)
#: The host names of a list, as ``scontrol show hostnames`` prints them.
_SCONTROL = "scontrol() { printf '%s\\n' \"${@:3}\" | tr , '\\n'; }; export -f scontrol"


def het_groups(roles: Mapping[int, str]) -> list[str]:
    """Commands that tell the addresses of a job of several Slurm groups.

    Args:
        roles: the first role of each of Slurm's groups, by the group's number.
    """
    if not roles:
        return []
    lines = []
    for number, role in sorted(roles.items()):
        hosts = f"NEMO_RUN_{env_key(role)}_HOST"
        lines.append(
            f'export SLURM_JOB_NODELIST_HET_GROUP_{number}="${hosts}S" '
            f'SLURM_MASTER_NODE_HET_GROUP_{number}="${hosts}"'
        )
    return [*lines, _SCONTROL]


def client(role: str, servers: Sequence[str], sandbox: str | None) -> list[str]:
    """Commands for a task that talks to servers and a sandbox of its group.

    Args:
        role: of the task.
        servers: the roles that serve.
        sandbox: the role that runs code, if there is one.
    """
    lines = []
    if sandbox is not None:
        host = f"$NEMO_RUN_{env_key(sandbox)}_HOST"
        lines.append(f'export NEMO_SKILLS_SANDBOX_HOST="${{NEMO_SKILLS_SANDBOX_HOST:-{host}}}"')
    if servers:
        # On Slurm the first node of the job is also the server's.
        first = f"NEMO_RUN_{env_key(servers[0])}_HOST"
        lines.append(f'export SLURM_MASTER_NODE="${{MASTER_ADDR:-${first}}}"')
        # The replica's own address is that of its number in the list of its role's.
        own = f'"$(cut -d, -f$((NODE_RANK + 1)) <<< "$NEMO_RUN_{env_key(role)}_HOSTS")"'
        hosts = " ".join(f'"$NEMO_RUN_{env_key(server)}_HOST"' for server in servers)
        program = shlex.quote(_program())
        lines.append(f'python3 -I -c {program} "${{nemo_run_ray_argv[@]: -1}}" {own} {hosts}')
    return lines


def _program() -> str:
    """The text of the program that serves at ``localhost``, without what is said about it."""
    text = Path(localhost.__file__).read_text(encoding="utf-8")
    return "# Reaches the servers of the group at localhost.\n" + text.partition('"""\n\n')[2]
