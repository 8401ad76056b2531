"""The checks of RayExecutor's fields: a table for single fields, then what belongs together.

A check takes the field's name and value, and raises ``ConfigError`` with what is allowed.
"""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nemo_run.core.execution.launcher import FaultTolerance, Launcher, Torchrun
from nemo_run.core.packaging.base import Packager

from nemo_run_ray import runtime_env as runtime_envs
from nemo_run_ray.checks import (
    CONTROL,
    LABELS,
    are_labels,
    is_amount,
    is_whole,
    refuse,
)
from nemo_run_ray.clusters import Cluster, ExistingCluster
from nemo_run_ray.errors import ConfigError
from nemo_run_ray.ids import HANDLE, SCHEDULER
from nemo_run_ray.probes import Probe

if TYPE_CHECKING:
    from nemo_run_ray.executor import RayExecutor

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
#: The smallest part of a resource that Ray gives away.
RESOURCE_MIN = 0.0001
#: The largest amount of a resource: Ray counts the steps in 64 bits, and takes a job that asks for
#: more as one that asks for nothing (839 TiB of memory, measured on Ray 2.60).
RESOURCE_MAX = int(2**63 * RESOURCE_MIN)
#: Resources with a field of their own.
_OWN_FIELDS = ("CPU", "GPU", "memory", "object_store_memory")
_LAUNCHERS = ("torchrun", "ft")
_UNITS = {"B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGTP", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
_MEMORY = re.compile(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)\s*")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: What no variable's name has that a shell can read.
_NEVER_IN_A_NAME = re.compile(r"[\s=\0]")
_Check = Callable[[str, Any], None]


def check_fields(executor: "RayExecutor") -> None:
    """Check every field of an executor.

    Raises:
        ConfigError: the first field that is wrong.
    """
    # Texts are sequences too, and "false" is true: types come before anything is iterated.
    for name, check in _TYPES.items():
        check(name, getattr(executor, name))
    for name, check in _VALUES.items():
        check(name, getattr(executor, name))
    if executor.cluster is not None and executor.address is not None:
        raise ConfigError(
            f"RayExecutor has both cluster={executor.cluster!r} and address={executor.address!r}; "
            "address is short for ExistingCluster, so give one of them."
        )
    runtime_envs.check(executor.runtime_env, executor.allow_unknown_runtime_env)
    _check_secrets(executor)
    _check_launcher(executor)


def parse_memory(value: int | str) -> int:
    """Bytes of ``"64GiB"``, ``"500 MB"`` or a plain number.

    Raises:
        ConfigError: no number, a negative one, one that Ray cannot count, or an unknown unit.
    """
    allowed = f"bytes, or a number with one of the units {', '.join(_UNITS)}"
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        refuse("memory_per_node", value, allowed)
    match = None if isinstance(value, int) else _MEMORY.fullmatch(value)
    if isinstance(value, int):
        size_bytes = value
    elif match is None or (match.group(2) or "B") not in _UNITS:
        prefix = match.group(2)[0].upper() if match and match.group(2) else ""
        if match and f"{prefix}iB" in _UNITS:  # 64G is GiB for Slurm and Docker, GB for Kubernetes
            number = match.group(1)
            allowed += f"; write {number}{prefix}B (of 1000) or {number}{prefix}iB (of 1024)"
        refuse("memory_per_node", value, allowed)
    else:
        size_bytes = int(float(match.group(1)) * _UNITS[match.group(2) or "B"])
    if not 0 <= size_bytes <= RESOURCE_MAX:
        refuse("memory_per_node", value, f"{allowed}; at most {RESOURCE_MAX} bytes")
    return size_bytes


# ---------------------------------------------------------------------- checks of one field


def _a(kind: type, allowed: str) -> _Check:
    def check(name: str, value: Any) -> None:
        if not isinstance(value, kind):
            refuse(name, value, allowed)

    return check


def _whole(least: int, most: int | None = None) -> _Check:
    allowed = f"a whole number from {least}" + ("" if most is None else f" to {most}")

    def check(name: str, value: Any) -> None:
        if not is_whole(value, least, most):
            refuse(name, value, allowed)

    return check


def _or_none(check: _Check) -> _Check:
    def check_or_none(name: str, value: Any) -> None:
        if value is not None:
            check(name, value)

    return check_or_none


def _limit(name: str, value: Any) -> None:
    if not is_whole(value, 1):
        refuse(name, value, "a whole number from 1, or None")


def _seconds(name: str, value: Any) -> None:
    if not is_amount(value):
        refuse(name, value, "a number from 0")


def _resource(name: str, value: Any) -> None:
    if is_amount(value) and 0 < value < RESOURCE_MIN:
        refuse(name, value, f"0 or a number from {RESOURCE_MIN}, the step in which Ray counts")
    if not is_amount(value) or value > RESOURCE_MAX:
        refuse(name, value, f"a number from 0 to {RESOURCE_MAX}")


def _gpus(name: str, value: Any) -> None:
    _resource(name, value)
    if value > 1 and value != int(value):
        refuse(name, value, "a fraction below 1 or a whole number")


def _custom_resources(name: str, value: dict[Any, Any]) -> None:
    for key, amount in value.items():
        _resource(f"{name}[{key!r}]", amount)
        if not isinstance(key, str) or not key or key in _OWN_FIELDS:
            allowed = f"custom resources; {', '.join(_OWN_FIELDS)} have fields of their own"
            refuse(name, value, allowed)


def _memory(name: str, value: Any) -> None:
    parse_memory(value)


def _ports(name: str, value: dict[Any, Any]) -> None:
    for key, port in value.items():
        if not isinstance(key, str) or not key or key.startswith("_"):
            refuse(name, key, "names that do not begin with '_'")
        _whole(0, 65535)(f"{name}[{key!r}]", port)
    fixed = [port for port in value.values() if port]
    if len(set(fixed)) < len(fixed):
        refuse(name, value, "different numbers, or 0 for a free one")


def _exit_codes(name: str, value: list[Any]) -> None:
    if not all(is_whole(code, 1, 255) for code in value):
        refuse(name, value, "numbers from 1 to 255")


def _handles(name: str, value: list[Any]) -> None:
    begin = f"{SCHEDULER}://"
    for handle in value:
        if (
            not isinstance(handle, str)
            or not handle
            or ("://" in handle and not handle.startswith(begin))
        ):
            refuse(name, value, f"experiments' titles or ids, and handles {HANDLE}<job's id>")


def _shell(name: str, value: Any) -> None:
    if value != "login":
        refuse(name, value, "'login', or None for no shell")


def _commands(name: str, value: list[Any]) -> None:
    for command in value:
        if not isinstance(command, str) or not command.strip() or "\0" in command:
            refuse(name, value, "a list of shell commands")


def _probe(name: str, value: Any) -> None:
    if not isinstance(value, Probe) or type(value) is Probe:
        refuse(name, value, "a PortProbe, an HttpProbe, a CommandProbe or None")


def _interpreter(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value or CONTROL.search(value):
        refuse(name, value, "a path, a program's name, or None")


def _cluster(name: str, value: Any) -> None:
    if not isinstance(value, Cluster) and not (isinstance(value, str) and value.strip()):
        allowed = "one of nemo_run_ray.clusters, such as LocalCluster(), or a cluster file's name"
        refuse(name, value, allowed)
    if isinstance(value, str) and "://" in value:
        raise ConfigError(
            f"RayExecutor.cluster is {value!r}; allowed is a cluster or a cluster file's name. "
            f"Give address={value!r}."
        )


def _file_name(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value.strip():
        refuse(name, value, "a name in the cluster file, or None")


def _address(name: str, value: Any) -> None:
    ExistingCluster(url=value)


def _strategy(name: str, value: str) -> None:
    if value not in STRATEGIES:
        refuse(name, value, f"one of {', '.join(STRATEGIES)}")


def _labels(name: str, value: dict[Any, Any]) -> None:
    if not are_labels(value):
        refuse(name, value, LABELS)


def _variables(name: str, value: dict[Any, Any]) -> None:
    for key, text in value.items():
        if not isinstance(key, str) or not key or _NEVER_IN_A_NAME.search(key):
            refuse(name, key, "names of environment variables, without blanks and '='")
        if not isinstance(text, str) or "\0" in text:
            refuse(f"{name}[{key!r}]", text, "a text without NUL")


def _secret_names(name: str, value: Any) -> None:
    # A secret given by its value must not be shown, not even as refused.
    if not isinstance(value, list):
        raise ConfigError(
            f"RayExecutor.{name} is no list (what it is, is not shown here, in case it is a "
            "value); allowed is a list of names of environment variables, such as ['HF_TOKEN']."
        )
    if not all(isinstance(variable, str) and _NAME.fullmatch(variable) for variable in value):
        raise ConfigError(
            f"RayExecutor.{name} holds something that is no name of an environment variable (not "
            "shown here, in case it is a value); allowed are names, such as ['HF_TOKEN'], whose "
            "values are taken from the environment."
        )


_A_DICT, _A_LIST, _A_BOOL = _a(dict, "a dict"), _a(list, "a list"), _a(bool, "True or False")
_A_TEXT = _a(str, "a text")
_TYPES: dict[str, _Check] = {
    "resources_per_node": _A_DICT,
    "label_selector": _A_DICT,
    "runtime_env": _A_DICT,
    "ports": _A_DICT,
    "env_vars": _A_DICT,
    "secrets": _secret_names,
    "dependencies": _A_LIST,
    "startup_commands": _A_LIST,
    "resource_group": _A_LIST,
    "permanent_exit_codes": _A_LIST,
    "given_fields": _A_LIST,
    "service": _A_BOOL,
    "as_array": _A_BOOL,
    "keep_run_dir": _A_BOOL,
    "wait_for_nodes": _A_BOOL,
    "allow_unknown_runtime_env": _A_BOOL,
    "role": _A_TEXT,
    "strategy": _A_TEXT,
    "packager": _a(Packager, "a packager, such as nemo_run.GitArchivePackager()"),
}
_VALUES: dict[str, _Check] = {
    "ready": _or_none(_probe),
    "python": _or_none(_interpreter),
    "dependencies": _handles,
    "entrypoint_shell": _or_none(_shell),
    "startup_commands": _commands,
    "permanent_exit_codes": _exit_codes,
    "cluster": _or_none(_cluster),
    "pool": _or_none(_file_name),
    "image": _or_none(_file_name),
    "preflight": _or_none(_A_BOOL),
    "address": _or_none(_address),
    "nodes": _whole(1),
    "ntasks_per_node": _whole(1),
    "retries": _whole(0),
    "keep_logs_max_bytes": _or_none(_whole(0)),
    "max_in_flight": _or_none(_limit),
    "cpus_per_node": _or_none(_resource),
    "gpus_per_node": _gpus,
    "pending_timeout_s": _or_none(_seconds),
    "time_s": _or_none(_seconds),
    "grace_s": _seconds,
    "resources_per_node": _custom_resources,
    "memory_per_node": _or_none(_memory),
    "ports": _ports,
    "env_vars": _variables,
    "label_selector": _labels,
    "strategy": _strategy,
}


# ---------------------------------------------------------------------- what belongs together


def _check_secrets(executor: "RayExecutor") -> None:
    in_clear = {
        "env_vars": executor.env_vars,
        "runtime_env['env_vars']": executor.runtime_env.get("env_vars") or {},
    }
    for field, variables in in_clear.items():
        for name in executor.secrets:
            if name in variables:
                raise ConfigError(
                    f"RayExecutor.{field} names {name}, and RayExecutor.secrets does too; allowed "
                    "is one of them: a secret's value is taken from your environment."
                )


def _check_launcher(executor: "RayExecutor") -> None:
    launcher = executor.launcher
    if executor.resource_group and launcher is not None and type(launcher) is not Launcher:
        refuse("launcher", launcher, "None for a group; set it on the executor of a role")
    if isinstance(launcher, str):
        if launcher not in _LAUNCHERS:
            refuse("launcher", launcher, f"None or one of {', '.join(_LAUNCHERS)}")
    elif launcher is not None:
        if type(launcher) not in (Launcher, Torchrun, FaultTolerance):
            refuse("launcher", launcher, "None, Torchrun or FaultTolerance")
        if launcher.nsys_profile:
            refuse("launcher.nsys_profile", True, "False: profiling on Ray is not built yet")
