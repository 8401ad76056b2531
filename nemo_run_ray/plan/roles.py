"""Turns each torchx role and its executor into what the half on the cluster reads."""

from __future__ import annotations

import copy
import logging
import re
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from nemo_run.core.packaging.base import Packager
from torchx.specs import AppDef, Role

from nemo_run_ray.cloud.folder_packager import FolderPackager, code_dir
from nemo_run_ray.errors import ConfigError
from nemo_run_ray.executor import RayExecutor, check_guard
from nemo_run_ray.fields import (
    brings_python,
    environments,
    is_container,
    refuse_credentials,
    resolve_runtime_env,
)
from nemo_run_ray.plan.commands import (
    argv_of,
    config_of,
    has_torchrun,
    replace_macros,
    with_free_rendezvous,
    with_launcher,
)
from nemo_run_ray.plan.group_checks import check_probe, check_together, check_whole
from nemo_run_ray.remote.node.command import modules_of
from nemo_run_ray.remote.spec import RENDEZVOUS, ArraySpec, GroupSpec, JobSpec, RoleSpec

log = logging.getLogger(__name__)

#: Longest name of a role: it is part of a folder's name on the node.
ROLE_MAX = 48
#: First version of Ray that knows label selectors of a job, and of a placement group's bundles. An
#: older Ray answers a job's with 400, and has no such argument for groups (read from the wheels).
JOB_SELECTORS_SINCE, BUNDLE_SELECTORS_SINCE = (2, 54), (2, 47)
_ROLE = re.compile(r"[A-Za-z0-9_.-]+")
_SPREADS = ("SPREAD", "STRICT_SPREAD")


def needs_group_driver(app: AppDef, executor: RayExecutor) -> bool:
    """Whether a job needs the group's driver: several roles, replicas, processes, or ports.

    A task in a container does too. Ray combines a container with no archives, which every job has;
    the actors of a group get theirs by the object store.
    """
    several = executor.ntasks_per_node > 1 and not has_torchrun(executor)
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
    executor.refuse_credentials()
    refuse_credentials(f"The env of the task {role_name(role, executor)}", role.env)
    argv = argv_of(role, executor)
    _check_guard(argv, executor)
    has_shell = executor.entrypoint_shell is not None or bool(executor.startup_commands)
    return JobSpec(
        argv=tuple(argv),
        # NeMo-Run has put the variables of the code into role.env; a cluster file may have more.
        env={
            name: replace_macros(_variable(name, value), executor)
            for name, value in {**executor.env_vars, **role.env}.items()
        },
        python=_python(executor),
        grace_s=executor.grace_s,
        keep_run_dir=executor.keep_run_dir,
        has_code=_code_packager(executor) is not None,
        secrets=tuple(executor.secrets),
        # The hint of a failure asks the node's Python, which need not be that of the shell.
        config=None if has_shell else config_of(argv),
        login_shell=executor.entrypoint_shell == "login",
        startup=tuple(executor.startup_commands),
    )


def _check_guard(argv: list[str], executor: RayExecutor) -> None:
    """Refuse the launch of a function that the node could not find in the program's file."""
    config = config_of(argv)
    if config is None:
        return
    try:
        path = Path(executor.job_dir, config.removeprefix("nemo_run/"))
        modules = modules_of(path.read_text(encoding="ascii"))
    except (OSError, ValueError, zlib.error):
        return  # a NeMo-Run that writes it otherwise
    if "__main__" in modules:
        check_guard()


def single_replica_environment(executor: RayExecutor) -> dict[str, str]:
    """The variables behind NeMo-Run's macros of a task that is alone."""
    return {
        "NEMO_RUN_HEAD_NODE_IP": "127.0.0.1",
        "NEMO_RUN_NPROC_PER_NODE": str(executor.ntasks_per_node),
        "NEMO_RUN_NUM_NODES": "1",
        "NEMO_RUN_NODE_RANK": "0",
    }


def _variable(name: object, value: object) -> str:
    if not isinstance(name, str):
        raise ConfigError(
            f"The task's env has the name {name!r}; the name of a variable is a text."
        )
    if not isinstance(value, str):  # run.Script takes any
        raise ConfigError(
            f"The task's env has the name {name!r} with a value of type {type(value).__name__}; "
            "the value of a variable is a text."
        )
    return value


def _python(executor: RayExecutor) -> str | None:
    """The interpreter of a task: the one that is asked for, then that of its runtime environment,
    then the cluster's.

    ``None`` is what the node's ``PATH`` gives, where Ray has put the Python of ``pip``, ``uv`` or
    ``conda`` first, and in a container that of the image.
    """
    unseen = environments(executor.runtime_env)
    if executor.python is not None and unseen:
        log.warning(
            "RayExecutor.python is %r: the task runs by it, and sees nothing of what %s of its "
            "runtime_env installs. Leave one of them out.",
            executor.python,
            " and ".join(unseen),
        )
    if executor.python is not None or brings_python(executor.runtime_env):
        return executor.python
    return executor.resolve_cluster().python


def group_spec(app: AppDef, executor: RayExecutor) -> GroupSpec:
    """The roles of a group, or of a task with several replicas.

    Raises:
        ConfigError: the roles do not go together; the message names role and field.
    """
    check_whole(executor)
    executors = _executors(app, executor)
    roles = []
    for role, own in zip(app.roles, executors, strict=True):
        if own is not executor:
            own.check(role_name(role, own))
            # What plug-ins set on the group's executor is in role.env already.
            role = with_launcher(replace(role, env={**own.env_vars, **role.env}), own)
        roles.append(_role_spec(role, own, len(executors)))
    check_together(roles)
    strategies = {own.strategy for own in executors}
    # A Python that is asked for in a container, or by some roles only, may not be on the head.
    pythons = {None if is_container(own.runtime_env) else own.python for own in executors}
    limits = [own.pending_timeout_s for own in executors if own.pending_timeout_s is not None]
    return GroupSpec(
        roles=tuple(_spread(roles, executors)),
        strategy=strategies.pop() if _is_common(strategies, len(roles)) else "PACK",
        wait_for_nodes=any(own.wait_for_nodes for own in executors),
        placing_timeout_s=min(limits) if limits else None,
        python=(pythons.pop() if len(pythons) == 1 else None) or executor.resolve_cluster().python,
    )


def packagers(app: AppDef, executor: RayExecutor) -> dict[str, Packager]:
    """The packager of every role that ships code, by the role's name.

    Raises:
        ConfigError: there is nothing where a FolderPackager expects it.
    """
    found = {}
    for role, own in zip(app.roles, _executors(app, executor), strict=True):
        packager = _code_packager(own)
        if isinstance(packager, FolderPackager):
            packager.check()
        if packager is not None:
            found[role_name(role, own)] = packager
    return found


def _code_packager(executor: RayExecutor) -> Packager | None:
    """What packs the code that is sent; ``None`` when none is.

    Where the packager sends none, it is what NEMO_RUN_CODE_DIR names, for a cluster that does not
    see the caller's files.
    """
    if executor.packager_ships:
        return executor.packager
    return None if executor.resolve_cluster().runs_here else code_dir()


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
    return [
        member if member.packager_ships else _with_packager(member, executor) for member in found
    ]


def _with_packager(member: RayExecutor, group: RayExecutor) -> RayExecutor:
    own = copy.copy(member)  # the user's own stays as it is
    own.packager = group.packager
    return own


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
    launched = has_torchrun(executor)
    processes = 1 if launched else executor.ntasks_per_node
    several = executor.nodes * executor.ntasks_per_node > 1
    task = task_spec(role, executor)
    ports = dict(executor.ports)
    if several:
        ports[RENDEZVOUS] = 0
        argv = tuple(with_free_rendezvous(word, executor) for word in task.argv)
        task = task._replace(argv=argv)
    check_probe(name, executor, count)
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
        runtime_env=resolve_runtime_env(executor.runtime_env),
    )


def array_role(role: Role, executor: RayExecutor) -> RoleSpec:
    """A host of an array's elements: what one of them runs and reserves, a CPU if nothing is
    said."""
    resources = {"CPU": 1.0} if executor.cpus_per_node is None else {}
    resources.update(_resources(executor))
    return RoleSpec(
        name=role_name(role, executor),
        task=task_spec(role, executor)._replace(config=None),
        resources=resources,
        label_selector=dict(executor.label_selector),
        runtime_env=resolve_runtime_env(executor.runtime_env),
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
        found.append(role._replace(spread=own.strategy) if wants else role)
    return found


def selector_since(
    spec: JobSpec | GroupSpec | ArraySpec, executor: RayExecutor
) -> tuple[int, int] | None:
    """The first version of Ray that can do what the label selectors ask for.

    For a group on an older Ray custom resources do.
    """
    if isinstance(spec, JobSpec):
        return JOB_SELECTORS_SINCE if executor.label_selector else None
    if isinstance(spec, ArraySpec):
        return None  # its driver reads the labels of the nodes itself
    for role in spec.roles:
        own: Mapping[str, float] = {
            name: amount
            for name, amount in role.resources.items()
            if name not in ("CPU", "GPU", "memory")
        }
        if role.spread or (role.label_selector and not own):
            return BUNDLE_SELECTORS_SINCE
    return None
