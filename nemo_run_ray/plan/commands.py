"""The words of a role's command: its launcher, NeMo-Run's macros, its rendezvous."""

from __future__ import annotations

import re
import shlex
import zlib
from typing import Any

from nemo_run.core.execution.launcher import FaultTolerance, Launcher, Torchrun
from nemo_run.run.torchx_backend.components import ft_launcher, torchrun
from torchx.specs import Role

from nemo_run_ray.executor import RayExecutor

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


def has_torchrun(executor: RayExecutor) -> bool:
    """Whether torchrun, or NeMo-Run's fault-tolerant form of it, starts the task's processes."""
    return isinstance(executor.get_launcher(), (Torchrun, FaultTolerance))


def argv_of(role: Role, executor: RayExecutor) -> list[str]:
    """The exact words of the command.

    NeMo-Run's torchrun component quotes its words for a shell; there is none here, so each is
    unquoted again. A word that is not one quoted word stays as it is.
    """
    words = role.args
    if has_torchrun(executor):
        words = [_unquote(word) for word in words]
    return [replace_macros(word, executor) for word in (role.entrypoint, *words)]


def with_launcher(role: Role, executor: RayExecutor) -> Role:
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


def with_free_rendezvous(word: str, executor: RayExecutor) -> str:
    """The word with a port that is free on the node instead of NeMo-Run's default for a rendezvous.

    The default is the same for all: two jobs on a node would meet there.
    """
    launcher = executor.get_launcher()
    if not isinstance(launcher, (Torchrun, FaultTolerance)):
        return word
    head = f"${executor.macro_values().head_node_ip_var}"
    if launcher.rdzv_port == type(launcher)().rdzv_port and word == f"{head}:{launcher.rdzv_port}":
        return f"{head}:$NEMO_RUN_RDZV_PORT"
    return word


def replace_macros(text: str, executor: RayExecutor) -> str:
    """The text with NeMo-Run's macros replaced, and nothing else: a ``$$`` of the user's stays."""
    values = vars(executor.macro_values())

    def replace_one(match: re.Match[str]) -> str:
        value, name = match.groups()
        if name not in values:
            return match.group()
        return f"${values[name]}" if value else str(values[name])

    return _MACRO.sub(replace_one, text)


def config_of(argv: list[str]) -> str | None:
    """Where NeMo-Run's serialised task is below the root of the run directory."""
    if _RUNNER not in argv or not argv[-1].startswith("/nemo_run/configs/"):
        return None
    return argv[-1].lstrip("/")


def _unquote(word: str) -> str:
    try:
        parts = shlex.split(word)
    except ValueError:
        return word
    return parts[0] if len(parts) == 1 else word
