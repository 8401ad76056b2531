"""Turns each torchx role and its executor into what the half on the cluster reads."""

from __future__ import annotations

import re
import shlex
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from nemo_run.core.execution.launcher import FaultTolerance, Launcher, Torchrun
from nemo_run.run.torchx_backend.components import ft_launcher, torchrun
from torchx.specs import AppDef, Role

from nemo_run_ray.errors import ConfigError
from nemo_run_ray.executor import RayExecutor
from nemo_run_ray.remote.group.addresses import RENDEZVOUS, key
from nemo_run_ray.remote.spec import GroupSpec, JobSpec, RoleSpec
from nemo_run_ray.runtime_env import brings_python, is_container, resolve

#: Longest name of a role: it is part of a folder's name on the node.
ROLE_MAX = 48
_ROLE = re.compile(r"[A-Za-z0-9_.-]+")
_RUNNER = "nemo_run.core.runners.fdl_runner"
#: NeMo-Run's macros in a command: ``$$${name}`` is the variable's value, ``${name}`` its name.
_MACRO = re.compile(r"(\$\$)?\$\{(\w+)\}")
#: Fields of NeMo-Run's FaultTolerance that its component takes as they are.
_FAULT_TOLERANCE = (
    "workload_check_interval",
    "initial_rank_heartbeat_timeout",
    "rank_heartbeat_timeout",
    "rank_termination_signal",
    "log_level",
    "max_restarts",
)
_SPREADS = ("SPREAD", "STRICT_SPREAD")
#: Fields that say something about one role only.
_OF_ROLES = (
    "nodes",
    "ntasks_per_node",
    "cpus_per_node",
    "gpus_per_node",
    "memory_per_node",
    "resources_per_node",
    "label_selector",
    "strategy",
    "runtime_env",
    "allow_unknown_runtime_env",
    "secrets",
    "role",
    "service",
    "ready",
    "ports",
    "pending_timeout_s",
    "wait_for_nodes",
    "keep_run_dir",
    "python",
)


def needs_group_driver(app: AppDef, executor: RayExecutor) -> bool:
    """Whether a job needs the group's driver: several roles, replicas, processes, or ports.

    A task in a container does too. Ray combines a container with no archives, which every job has;
    the actors of a group get theirs by the object store.
    """
    launched = isinstance(executor.get_launcher(), (Torchrun, FaultTolerance))
    several = executor.ntasks_per_node > 1 and not launched
    return bool(
        executor.resource_group
        or len(app.roles) != 1
        or executor.nodes > 1
        or several
        or executor.ports
        or is_container(executor.runtime_env)
    )


def task_spec(role: Role, executor: RayExecutor) -> JobSpec:
    """What one process of a role runs."""
    for secret in executor.secrets:
        if secret in role.env:
            raise ConfigError(
                f"{role_name(role, executor)}: RayExecutor.secrets names {secret}, which the task, "
                "or the executor of its group, sets in clear too; leave it out there."
            )
    argv = _argv(role, executor)
    return JobSpec(
        argv=tuple(argv),
        env={name: _macro(value, executor) for name, value in role.env.items()},
        python=_python(executor),
        grace_s=executor.grace_s,
        keep_run_dir=executor.keep_run_dir,
        has_code=executor.packager_ships,
        secrets=tuple(executor.secrets),
        config=_config(argv),
    )


def _python(executor: RayExecutor) -> str | None:
    """The interpreter of a task: the one that is asked for, then that of its runtime environment,
    then the cluster's.

    ``None`` is what the node's ``PATH`` gives, where Ray has put the Python of ``pip``, ``uv`` or
    ``conda`` first, and in a container that of the image.
    """
    if executor.python is not None or brings_python(executor.runtime_env):
        return executor.python
    return executor.resolve_cluster().python


def group_spec(app: AppDef, executor: RayExecutor) -> GroupSpec:
    """The roles of a group, or of a task with several replicas.

    Raises:
        ConfigError: the roles do not go together; the message names role and field.
    """
    _check_whole(executor)
    executors = _executors(app, executor)
    roles = []
    for role, own in zip(app.roles, executors, strict=True):
        if own is not executor:
            _check_own(role_name(role, own), own)
            # What plug-ins set on the group's executor is in role.env already.
            role = _launched(replace(role, env={**own.env_vars, **role.env}), own)
        roles.append(_role_spec(role, own, len(executors)))
    _check_together(roles)
    strategies = {own.strategy for own in executors}
    # One that is asked for in a container, or by some roles only, may not be on the head.
    pythons = {None if is_container(own.runtime_env) else own.python for own in executors}
    limits = [own.pending_timeout_s for own in executors if own.pending_timeout_s is not None]
    return GroupSpec(
        roles=tuple(_spread(roles, executors)),
        strategy=strategies.pop() if _is_common(strategies, len(roles)) else "PACK",
        wait_for_nodes=any(own.wait_for_nodes for own in executors),
        placing_timeout_s=min(limits) if limits else None,
        python=(pythons.pop() if len(pythons) == 1 else None) or executor.resolve_cluster().python,
    )


def packagers(app: AppDef, executor: RayExecutor) -> dict[str, Any]:
    """The packager of every role that ships code, by the role's name."""
    return {
        role_name(role, own): own.packager
        for role, own in zip(app.roles, _executors(app, executor), strict=True)
        if own.packager_ships
    }


def _executors(app: AppDef, executor: RayExecutor) -> list[RayExecutor]:
    """One for each role; those that ship no code get the group's packager, which plug-ins set."""
    found: list[RayExecutor] = executor.resource_group or [executor]
    if len(found) != len(app.roles):
        raise ConfigError(
            f"The job {app.name!r} has {len(app.roles)} roles and {len(found)} executor(s); give a "
            "list of tasks to `experiment.add`, and one executor or one for each."
        )
    if executor.resource_group and executor.packager_ships:
        for one in found:
            if not one.packager_ships:
                one.packager = executor.packager
    return found


def role_name(role: Role, executor: RayExecutor) -> str:
    """The name that the user gave, or else NeMo-Run's."""
    return executor.role or str(role.name)


def _role_spec(role: Role, executor: RayExecutor, count: int) -> RoleSpec:
    name = role_name(role, executor)
    if not _ROLE.fullmatch(name) or len(name) > ROLE_MAX:
        raise ConfigError(
            f"The role {name!r} cannot have this name; allowed are up to {ROLE_MAX} letters, "
            "digits, '_', '.' and '-'. Set RayExecutor.role."
        )
    launched = isinstance(executor.get_launcher(), (Torchrun, FaultTolerance))
    processes = 1 if launched else executor.ntasks_per_node
    several = executor.nodes * executor.ntasks_per_node > 1
    task = task_spec(role, executor)
    ports = dict(executor.ports)
    if several:
        ports[RENDEZVOUS] = 0
        task = replace(task, argv=tuple(_free_rendezvous(word, executor) for word in task.argv))
    _check_probe(name, executor, count)
    return RoleSpec(
        name=name,
        task=task,
        replicas=executor.nodes,
        processes=processes,
        ranked=several and not launched,
        service=executor.service,
        restarts=executor.retries,
        ports=ports,
        ready=executor.ready.spec() if executor.ready is not None else None,
        resources=_resources(executor),
        label_selector=dict(executor.label_selector),
        runtime_env=resolve(executor.runtime_env),
    )


def _resources(executor: RayExecutor) -> dict[str, float]:
    asked = {
        "CPU": executor.cpus_per_node or 0,
        "GPU": executor.gpus_per_node,
        "memory": executor.memory_bytes or 0,
        **executor.resources_per_node,
    }
    # Ray refuses an empty bundle; a byte of memory is what every node can spare.
    return {name: amount for name, amount in asked.items() if amount} or {"memory": 1}


# ---------------------------------------------------------------------- what goes together


def _check_whole(executor: RayExecutor) -> None:
    """Refuse what a plug-in sets on the executor of a whole group, where it would do nothing."""
    if not executor.resource_group:
        return
    plain = RayExecutor()
    for name in _OF_ROLES:
        if getattr(executor, name) != getattr(plain, name):
            raise ConfigError(
                f"RayExecutor.{name} of a whole group is {getattr(executor, name)!r}, where it "
                "does nothing; set it on the executors of the roles."
            )
    if executor.grace_s != max(one.grace_s for one in executor.resource_group):
        raise ConfigError(
            f"RayExecutor.grace_s of a whole group is {executor.grace_s!r}, where it does nothing; "
            "set it on the executors of the roles."
        )


def _check_own(name: str, executor: RayExecutor) -> None:
    executor.check(name)


def _check_probe(name: str, executor: RayExecutor, count: int) -> None:
    if executor.service and count == 1:
        raise ConfigError(
            f"RayExecutor.service of {name!r} is True, but the task is alone: a service runs until "
            "the other roles of its group are done."
        )
    if executor.ready is None:
        return
    if not executor.service:
        raise ConfigError(
            f"RayExecutor.ready of the role {name!r} is {executor.ready!r}, but the role is no "
            "service, and nobody waits for it; set service=True or leave ready out."
        )
    port = executor.ready.spec().port
    if isinstance(port, str) and port not in executor.ports:
        raise ConfigError(
            f"RayExecutor.ready of the role {name!r} asks the port {port!r}, which is none of its "
            f"ports ({', '.join(executor.ports) or 'it has none'}); add it to RayExecutor.ports."
        )


def _check_together(roles: list[RoleSpec]) -> None:
    names: set[str] = set()
    owners: dict[str, str] = {}
    for role in roles:
        if role.name in names:
            raise ConfigError(
                f"Two roles of the group have the name {role.name!r}; give each executor a "
                "RayExecutor.role of its own."
            )
        names.add(role.name)
        for variable, owner in _variables_of(role):
            other = owners.setdefault(variable, owner)
            if other != owner:
                raise ConfigError(
                    f"The {other} and the {owner} would share the variable {variable}; rename one "
                    "of them, by RayExecutor.role or in RayExecutor.ports."
                )
    if all(role.service for role in roles):
        raise ConfigError(
            f"The group has no primary role: {', '.join(sorted(names))} are services, and services "
            "run until the primaries are done. Leave RayExecutor.service out of one."
        )


def _variables_of(role: RoleSpec) -> Iterator[tuple[str, str]]:
    """The variables that tell of a role, each with what it is about, in words."""
    prefix = f"NEMO_RUN_{key(role.name)}"
    for kind in ("HOST", "HOSTS"):
        yield f"{prefix}_{kind}", f"role {role.name!r}"
    for port in role.ports:
        for kind in ("PORT", "PORTS"):
            yield f"{prefix}_{kind}_{key(port)}", f"port {port!r} of the role {role.name!r}"


def _is_common(strategies: set[str], count: int) -> bool:
    """Whether the roles' strategy is the group's: spreading is about one role's replicas."""
    return len(strategies) == 1 and (count == 1 or not strategies & set(_SPREADS))


def _spread(roles: list[RoleSpec], executors: list[RayExecutor]) -> list[RoleSpec]:
    strategies = {own.strategy for own in executors}
    if _is_common(strategies, len(roles)):
        return roles
    found = []
    for role, own in zip(roles, executors, strict=True):
        if own.strategy == "STRICT_PACK" and len(strategies) > 1:
            raise ConfigError(
                f"RayExecutor.strategy of the role {role.name!r} is 'STRICT_PACK'; one node for "
                "all replicas is for all roles of a group or for none. Give it to all of them, or "
                "bind the role to a node by label_selector."
            )
        wants = own.strategy in _SPREADS and role.replicas > 1
        found.append(replace(role, spread=own.strategy) if wants else role)
    return found


# ---------------------------------------------------------------------- words


def _argv(role: Role, executor: RayExecutor) -> list[str]:
    """The exact words of the command.

    NeMo-Run's torchrun component quotes its words for a shell; there is none here, so each is
    unquoted again. A word that is not one quoted word stays as it is.
    """
    words = role.args
    if isinstance(executor.get_launcher(), (Torchrun, FaultTolerance)):
        words = [_unquote(word) for word in words]
    return [_macro(word, executor) for word in (role.entrypoint, *words)]


def _launched(role: Role, executor: RayExecutor) -> Role:
    """The role under its own launcher: NeMo-Run asks only the group's executor for one."""
    launcher: Launcher = executor.get_launcher()
    if not isinstance(launcher, (Torchrun, FaultTolerance)):
        return role
    options: dict[str, Any] = {
        "script": role.entrypoint,
        "no_python": True,
        "name": role.name,
        "j": f"{executor.nnodes()}x{executor.nproc_per_node()}",
        "rdzv_backend": launcher.rdzv_backend,
        "rdzv_port": launcher.rdzv_port,
        # Equal jobs make equal archives, so no number by chance.
        "rdzv_id": launcher.rdzv_id or zlib.crc32(role.name.encode()) % 10000 + 1,
        "env": dict(role.env),
        "debug": executor.packager.debug,
    }
    component = torchrun.torchrun
    if isinstance(launcher, FaultTolerance):
        component = ft_launcher.ft_launcher
        options |= {name: getattr(launcher, name) for name in _FAULT_TOLERANCE}
    return component(*role.args, **options).roles[0]


def _free_rendezvous(word: str, executor: RayExecutor) -> str:
    """NeMo-Run's default rendezvous port is one for all: two jobs on a node would meet there."""
    launcher = executor.get_launcher()
    if not isinstance(launcher, (Torchrun, FaultTolerance)):
        return word
    head = f"${executor.macro_values().head_node_ip_var}"
    if launcher.rdzv_port == type(launcher)().rdzv_port and word == f"{head}:{launcher.rdzv_port}":
        return f"{head}:$NEMO_RUN_RDZV_PORT"
    return word


def _macro(text: str, executor: RayExecutor) -> str:
    """The text with NeMo-Run's macros replaced, and nothing else: a ``$$`` of the user's stays."""
    values = vars(executor.macro_values())

    def replace_one(match: re.Match[str]) -> str:
        value, name = match.groups()
        if name not in values:
            return match.group()
        return f"${values[name]}" if value else str(values[name])

    return _MACRO.sub(replace_one, text)


def _unquote(word: str) -> str:
    try:
        parts = shlex.split(word)
    except ValueError:
        return word
    return parts[0] if len(parts) == 1 else word


def _config(argv: list[str]) -> str | None:
    """Where NeMo-Run's serialised task is below the root of the run directory."""
    if _RUNNER not in argv or not argv[-1].startswith("/nemo_run/configs/"):
        return None
    return argv[-1].lstrip("/")


def selector_since(spec: JobSpec | GroupSpec, executor: RayExecutor) -> tuple[int, int] | None:
    """The first version of Ray that can do what the label selectors ask for.

    An older one answers a job's with 400, and has no such argument for placement groups (read from
    the wheels); there custom resources do for a group.
    """
    if isinstance(spec, JobSpec):
        return (2, 54) if executor.label_selector else None
    for role in spec.roles:
        own: Mapping[str, float] = {
            name: amount
            for name, amount in role.resources.items()
            if name not in ("CPU", "GPU", "memory")
        }
        if role.spread or (role.label_selector and not own):
            return (2, 47)
    return None
