"""Checks of what goes together in a group, each with a message that names role and field."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_run_ray.errors import ConfigError
from nemo_run_ray.executor import RayExecutor
from nemo_run_ray.remote.spec import RoleSpec, env_key

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
    "entrypoint_shell",
    "startup_commands",
    "python",
)


def check_whole(executor: RayExecutor) -> None:
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
    if executor.grace_s != max(member.grace_s for member in executor.resource_group):
        raise ConfigError(
            f"RayExecutor.grace_s of a whole group is {executor.grace_s!r}, where it does nothing; "
            "set it on the executors of the roles."
        )


def check_probe(name: str, executor: RayExecutor, count: int) -> None:
    """Refuse a service that is alone in its group, and a probe that is never or cannot be asked.

    Args:
        name: of the role.
        executor: the role's.
        count: how many roles the group has.
    """
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
            "service, so nothing waits for it; set service=True or leave ready out."
        )
    port = executor.ready.spec().port
    if isinstance(port, str) and port not in executor.ports:
        raise ConfigError(
            f"RayExecutor.ready of the role {name!r} asks the port {port!r}, which is none of its "
            f"ports ({', '.join(executor.ports) or 'it has none'}); add it to RayExecutor.ports."
        )


def check_together(roles: list[RoleSpec]) -> None:
    """Refuse roles that share a name or a variable, and a group of nothing but services."""
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
    prefix = f"NEMO_RUN_{env_key(role.name)}"
    for kind in ("HOST", "HOSTS"):
        yield f"{prefix}_{kind}", f"role {role.name!r}"
    for port in role.ports:
        for kind in ("PORT", "PORTS"):
            yield f"{prefix}_{kind}_{env_key(port)}", f"port {port!r} of the role {role.name!r}"
