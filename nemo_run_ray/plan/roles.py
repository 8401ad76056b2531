"""Turns each torchx role and its executor into what the half on the cluster reads."""

from __future__ import annotations

import base64
import copy
import os
import re
import shlex
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from nemo_run.core.execution.launcher import FaultTolerance, Torchrun
from nemo_run.core.packaging.base import Packager
from nemo_run.run.torchx_backend.components import ft_launcher, torchrun
from torchx.specs import AppDef, Role

from nemo_run_ray.errors import ConfigError
from nemo_run_ray.executor import RayExecutor, check_guard
from nemo_run_ray.fields import (
    brings_python,
    is_container,
    refuse_credentials,
    resolve_runtime_env,
)
from nemo_run_ray.plan import CODE_DIR
from nemo_run_ray.remote.spec import RENDEZVOUS, GroupSpec, JobSpec, Json, RoleSpec, env_key

#: The entrypoint of an array for NeMo-Run; in its place the cluster runs the array's driver.
ARRAY = "nemo_run_ray.array"
#: Longest name of a role: it is part of a folder's name on the node.
ROLE_MAX = 48
#: First version of Ray that knows the label selector of a job; an older one answers it with 400.
SELECTORS_SINCE = (2, 54)
#: In a configuration as Fiddle writes it: what the script that the user runs has defined.
OF_MAIN = re.compile(r'"module":\s*"__main__"')
_SPREADS = ("SPREAD", "STRICT_SPREAD")


def needs_group_driver(app: AppDef, executor: RayExecutor) -> bool:
    """Whether a job needs the group's driver: several roles, replicas, processes, or ports.

    A task in a container does too. Ray combines a container with no archives, which every job has;
    the actors of a group get theirs by the object store.
    """
    return bool(
        executor.resource_group
        or len(app.roles) != 1
        or executor.nodes > 1
        or (executor.ntasks_per_node > 1 and not has_torchrun(executor))
        or executor.ports
        or is_container(executor.runtime_env)
    )


def task_spec(role: Role, executor: RayExecutor) -> JobSpec:
    """The task of each process of a role."""
    for secret in role.env.keys() & executor.secrets:
        raise ConfigError(
            f"{role_name(role, executor)}: RayExecutor.secrets names {secret}, which the task, "
            "or the executor of its group, sets in clear too; leave it out there."
        )
    executor.refuse_credentials()
    refuse_credentials(f"The env of the task {role_name(role, executor)}", role.env)
    # NeMo-Run's torchrun component quotes its words for a shell; there is none here.
    words = map(_unquote, role.args) if has_torchrun(executor) else role.args
    argv = [replace_macros(word, executor) for word in (role.entrypoint, *words)]
    if _RUNNER in argv and argv[-1].startswith(_CONFIGS):
        path = Path(executor.job_dir, "configs", argv[-1].removeprefix(_CONFIGS))
        config = b""
        with suppress(OSError, ValueError, zlib.error):  # NeMo-Run writes it otherwise
            config = zlib.decompress(base64.urlsafe_b64decode(path.read_bytes()))
        if OF_MAIN.search(config.decode()):
            check_guard()
    has_code = _code_packager(executor) is not None
    cluster = executor.resolve_cluster()
    # A container does not have the caller's folder.
    is_here = cluster.runs_here and not is_container(executor.runtime_env)
    # ``None`` is what the node's PATH gives: Ray puts the Python of pip, uv or conda first there,
    # and in a container it is that of the image.
    own_python = None if brings_python(executor.runtime_env) else cluster.python
    return JobSpec(
        argv=tuple(argv),
        # NeMo-Run has put the variables of the code into role.env; a cluster file may have more.
        env={
            name: replace_macros(variable(name, value), executor)
            for name, value in {**executor.env_vars, **role.env}.items()
        },
        python=executor.python or own_python,
        grace_s=executor.grace_s,
        keep_run_dir=executor.keep_run_dir,
        cwd=os.getcwd() if is_here and not has_code else None,
        has_code=has_code,
        secrets=tuple(executor.secrets),
        login_shell=executor.entrypoint_shell == "login",
        startup=tuple(executor.startup_commands),
    )


def variable(name: object, value: object) -> str:
    """The value of a task's variable, if both are texts."""
    if not isinstance(name, str) or not isinstance(value, str):  # run.Script takes any
        raise ConfigError(
            f"The task's env has the name {name!r} with a value of type {type(value).__name__}; "
            "the name of a variable is a text, and so is its value."
        )
    return value


def group_spec(app: AppDef, executor: RayExecutor) -> GroupSpec:
    """The roles of a group, or of a task with several replicas.

    Raises:
        ConfigError: the roles do not go together; the message names role and field.
    """
    if executor.resource_group:
        why = "where it does nothing, for a whole group; set it on the executors of the roles."
        refuse_fields(executor, _OF_ROLES, why)
    executors = _executors(app, executor)
    # Spreading is about one role's replicas; another strategy is for the whole group.
    strategies = {own.strategy for own in executors}
    is_of_group = len(strategies) == 1 and (len(executors) == 1 or not strategies & set(_SPREADS))
    roles: dict[str, RoleSpec] = {}
    for role, own in zip(app.roles, executors, strict=True):
        if own is not executor:
            own.check(role_name(role, own))
            # What plug-ins set on the group's executor is in role.env already.
            role = with_launcher(replace(role, env={**own.env_vars, **role.env}), own)
        name = role_name(role, own)
        if not re.fullmatch(rf"[A-Za-z0-9_.-]{{1,{ROLE_MAX}}}", name):
            raise ConfigError(
                f"The role {name!r} cannot have this name; allowed are up to {ROLE_MAX} letters, "
                "digits, '_', '.' and '-'. Set RayExecutor.role."
            )
        ready = None if own.ready is None else own.ready.spec()
        if ready and not own.service:
            raise ConfigError(
                f"RayExecutor.ready of the role {name!r} is {own.ready!r}, but the role is no "
                "service, so nothing waits for it; set service=True or leave ready out."
            )
        if ready and isinstance(ready.port, str) and ready.port not in own.ports:
            raise ConfigError(
                f"RayExecutor.ready of the role {name!r} asks the port {ready.port!r}, which is "
                f"none of its ports ({', '.join(own.ports) or 'it has none'}); add it to "
                "RayExecutor.ports."
            )
        if len(set(map(env_key, own.ports))) < len(own.ports):
            raise ConfigError(
                f"RayExecutor.ports of the role {name!r} has names that would share a variable: "
                f"{', '.join(own.ports)}; rename one."
            )
        spread = "" if is_of_group else own.strategy
        if spread == "STRICT_PACK":
            raise ConfigError(
                f"RayExecutor.strategy of the role {name!r} is 'STRICT_PACK'; one node for "
                "all replicas is for all roles of a group or for none. Give it to all of them, or "
                "bind the role to a node by label_selector."
            )
        key = env_key(name)
        if key in roles:
            raise ConfigError(
                f"The roles {roles[key].name!r} and {name!r} of the group would share the "
                f"variable NEMO_RUN_{key}_HOST; give each a RayExecutor.role of its own."
            )
        launcher = own.get_launcher()
        launched = has_torchrun(own)
        several = own.nodes * own.ntasks_per_node > 1
        spec = one_process(role, own)
        if several and launched and launcher.rdzv_port == type(launcher).rdzv_port:
            # NeMo-Run's default is the same for all: two jobs on a node would meet there. Instead
            # comes a port that is free on the node.
            head = "$NEMO_RUN_HEAD_NODE_IP:"
            new = {f"{head}{launcher.rdzv_port}": f"{head}$NEMO_RUN_RDZV_PORT"}
            argv = tuple(new.get(word, word) for word in spec.task.argv)
            spec = spec._replace(task=spec.task._replace(argv=argv))
        roles[key] = spec._replace(
            replicas=own.nodes,
            processes=1 if launched else own.ntasks_per_node,
            ranked=several and not launched,
            service=own.service,
            restarts=own.retries,
            ports={**own.ports, **({RENDEZVOUS: 0} if several else {})},
            ready=ready,
            spread=spread if spread in _SPREADS and own.nodes > 1 else "",
        )
    if all(role.service for role in roles.values()):
        raise ConfigError(
            "The group has no primary role: "
            f"{', '.join(sorted(role.name for role in roles.values()))} are services, and services "
            "run until the primaries are done. Leave RayExecutor.service out of one."
        )
    # A Python that is asked for in a container, or by some roles only, may not be on the head.
    pythons = {None if is_container(own.runtime_env) else own.python for own in executors}
    return GroupSpec(
        roles=tuple(roles.values()),
        strategy=strategies.pop() if is_of_group else "PACK",
        wait_for_nodes=any(own.wait_for_nodes for own in executors),
        placing_timeout_s=min(
            (own.pending_timeout_s for own in executors if own.pending_timeout_s is not None),
            default=None,
        ),
        python=(pythons.pop() if len(pythons) == 1 else None) or executor.resolve_cluster().python,
    )


def packagers(app: AppDef, executor: RayExecutor) -> dict[str, Packager]:
    """The packager of every role that ships code, by the role's name."""
    return {
        role_name(role, own): packager
        for role, own in zip(app.roles, _executors(app, executor), strict=True)
        if (packager := _code_packager(own))
    }


def _code_packager(executor: RayExecutor) -> Packager | None:
    """The packager of the code that is sent; ``None`` when none is.

    Where the executor's sends none, it is that of NEMO_RUN_CODE_DIR, for a cluster that does not
    see the caller's files.
    """
    if executor.packager_ships:
        return executor.packager
    if executor.resolve_cluster().runs_here or not os.environ.get(CODE_DIR):
        return None
    from nemo_run_ray.plan.folder_packager import CodeDir  # most programs need none

    return CodeDir(os.environ[CODE_DIR])


def _executors(app: AppDef, executor: RayExecutor) -> list[RayExecutor]:
    """An executor for each role; one without code gets the group's packager, set by plug-ins."""
    found: list[RayExecutor] = executor.resource_group or [executor]
    if len(found) != len(app.roles):
        raise ConfigError(
            f"The job {app.name!r} has {len(app.roles)} roles and {len(found)} executor(s); give a "
            "list of tasks to `experiment.add`, and one executor or one for each."
        )
    if not executor.resource_group or not executor.packager_ships:
        return found
    members = []
    for member in found:
        if not member.packager_ships:
            member = copy.copy(member)  # the user's own stays as it is
            member.packager = executor.packager
        members.append(member)
    return members


def role_name(role: Role, executor: RayExecutor) -> str:
    """The name that the user gave, or else NeMo-Run's."""
    return executor.role or str(role.name)


def one_process(role: Role, executor: RayExecutor) -> RoleSpec:
    """A role of one process: what it runs and reserves."""
    return RoleSpec(
        name=role_name(role, executor),
        task=task_spec(role, executor),
        # Ray refuses an empty bundle; a byte of memory is what every node can spare.
        resources=amounts_of(executor) or {"memory": 1},
        label_selector=dict(executor.label_selector),
        runtime_env=resolve_runtime_env(executor.runtime_env),
    )


def amounts_of(executor: RayExecutor) -> dict[str, float]:
    """The amounts that one replica reserves, by Ray's names."""
    asked = {
        "CPU": executor.cpus_per_node,
        "GPU": executor.gpus_per_node,
        "memory": executor.memory_bytes,
        **executor.resources_per_node,
    }
    return {name: amount for name, amount in asked.items() if amount}


#: NeMo-Run's program for a function, and the folder of its configuration.
_RUNNER, _CONFIGS = "nemo_run.core.runners.fdl_runner", "/nemo_run/configs/"
#: Fields of NeMo-Run's FaultTolerance that its component takes as they are.
_FAULT_TOLERANCE = (
    *("workload_check_interval", "initial_rank_heartbeat_timeout", "rank_heartbeat_timeout"),
    *("rank_termination_signal", "log_level", "max_restarts"),
)


def has_torchrun(executor: RayExecutor) -> bool:
    """Whether torchrun, or NeMo-Run's fault-tolerant form of it, starts the task's processes."""
    return isinstance(executor.get_launcher(), (Torchrun, FaultTolerance))


def with_launcher(role: Role, executor: RayExecutor) -> Role:
    """The role under its own launcher: NeMo-Run asks only the group's executor for one."""
    if not has_torchrun(executor):
        return role
    launcher: Any = executor.get_launcher()
    options: Json = {
        "script": role.entrypoint,
        "no_python": True,
        "name": role.name,
        "j": f"{executor.nnodes()}x{executor.nproc_per_node()}",
        "rdzv_backend": launcher.rdzv_backend,
        "rdzv_port": launcher.rdzv_port,
        # Equal jobs make equal archives, so the number is not random.
        "rdzv_id": launcher.rdzv_id or zlib.crc32(role.name.encode()) % 10000 + 1,
        "env": dict(role.env),
        "debug": executor.packager.debug,
    }
    component = torchrun.torchrun
    if isinstance(launcher, FaultTolerance):
        component = ft_launcher.ft_launcher
        options |= {name: getattr(launcher, name) for name in _FAULT_TOLERANCE}
    return component(*role.args, **options).roles[0]


def replace_macros(text: str, executor: RayExecutor) -> str:
    """The text with NeMo-Run's macros replaced, and nothing else: a ``$$`` of the user's stays.

    ``$$${name}`` is the value of the variable of that macro, ``${name}`` its name.
    """
    for name, value in vars(executor.macro_values()).items():
        text = text.replace(f"$$${{{name}}}", f"${value}").replace(f"${{{name}}}", value)
    return text


def _unquote(word: str) -> str:
    """A quoted word as it is; what is not one word stays."""
    try:
        parts = shlex.split(word)
    except ValueError:
        return word
    return parts[0] if len(parts) == 1 else word


#: Fields that say something about one role only.
_OF_ROLES = (
    *("nodes", "ntasks_per_node", "cpus_per_node", "gpus_per_node", "memory_per_node"),
    *("resources_per_node", "label_selector", "strategy", "runtime_env"),
    *("allow_unknown_runtime_env", "secrets", "role", "service", "ready", "ports"),
    *("pending_timeout_s", "wait_for_nodes", "keep_run_dir", "entrypoint_shell"),
    *("startup_commands", "python"),
)


def refuse_fields(executor: RayExecutor, names: Sequence[str], why: str) -> None:
    """Refuse fields that would do nothing: each has its default."""
    plain = RayExecutor()
    for name in names:
        value = getattr(executor, name)
        if value != getattr(plain, name):
            raise ConfigError(f"RayExecutor.{name} is {value!r}, {why}")
