"""The checks of all fields that a user sets, on executors, pools, clusters and probes; the probes.

A check takes a field's full name and its value, and raises ``ConfigError`` with what is allowed.
"""

# No postponed annotations: NeMo-Run's command line parses values by the types themselves.

import dataclasses
import difflib
import functools
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

from nemo_run.core.execution.launcher import FaultTolerance, Launcher, Torchrun
from nemo_run.core.packaging.base import Packager

from nemo_run_ray.errors import ConfigError
from nemo_run_ray.ids import HANDLE, SCHEDULER

if TYPE_CHECKING:
    from nemo_run_ray.remote.spec import ProbeSpec

Check = Callable[[str, Any], None]
_Class = TypeVar("_Class", bound=type)
#: Last words of the names of credentials, as in ``HF_TOKEN``, ``X-Api-Key``, ``PGPASSWORD``.
_CREDENTIAL = re.compile(
    r"(?:.*_)?(?:TOKEN|\w*API_?KEYS?|KEY|PAT|PASS|PASSCODE|PW|SECRETS?|AUTH|AUTHORIZATION|BEARER"
    r"|COOKIE|CREDENTIALS?|CREDS|JWT|DSN|CONNECTION_STRING|SECRET_KEY_BASE|AUTH_CONFIG"
    r"|(?:ACCESS|AUTH|PRIVATE)_(?:KEYS|TOKENS)|SSHPASS)"
    r"|.*(?:PASSWORD|PASSWD|PASSPHRASE)|.+_PWD"
    r"|(?:.*_)?WEBHOOK_UR[LI]"
)
#: Names of addresses that often have a password in them.
_ADDRESS = re.compile(
    r"(?:.*_)?(?:DATABASE|DB|POSTGRES|POSTGRESQL|PG|MYSQL|MONGO|MONGODB|REDIS|AMQP|RABBITMQ|BROKER)"
    r"_UR[LI]"
)
#: Names of other things that end so: a data set's columns, a tokenizer's tokens, switches.
_NO_CREDENTIAL = re.compile(
    r"(?:.*_)?(?:PUBLIC|PRIMARY|FOREIGN|SORT|PARTITION|CACHE|INPUT|OUTPUT|PROMPT|LABEL|TEXT|IMAGE"
    r"|DATA|ANSWER|TARGET)_KEY"
    r"|(?:.*_)?(?:PAD|EOS|BOS|UNK|MASK|STOP|SEP|CLS|PER|IMAGE|START|END|SPECIAL)_TOKEN"
    r"|(?:.*_)?(?:ENABLE|DISABLE|USE|NO|REQUIRE|SKIP|MAX|MIN|NUM)_\w+|(?:FIRST|SECOND)_PASS"
    r"|OLD_?PWD"
)
#: A user and a password in an address.
_IN_ADDRESS = re.compile(r"://[^/\s:@]*:[^/\s@]+@")
#: Values that are no credentials: a switch, a path, a placeholder.
_NO_VALUE = re.compile(r"|[01]|true|false|yes|no|/.*|<[^<>]*>|empty|none|dummy", re.IGNORECASE)
#: Names that may be those of a column, which a word names.
_COLUMN = re.compile(r".*(?<!API)(?<!ACCESS)(?<!SECRET)(?<!PRIVATE)_KEY")
_WORD = re.compile("[a-z_]+")
#: Above every amount and every number of seconds; larger numbers do not fit a float's arithmetic.
AMOUNT_MAX = 1e18
#: Control characters, which no address, path or header may hold.
CONTROL = re.compile(r"[\x00-\x1f\x7f]")
#: A label's name or value, and what Ray takes as a condition for one: ``a``, ``!a``, ``in(a, b)``.
_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"
_LABEL_KEY = re.compile(rf"(?:[a-zA-Z0-9._-]{{1,253}}/)?{_LABEL}")
LABELS = (
    "values by label, such as {'zone': 'a'}, {'zone': '!a'} or {'zone': 'in(a, b)'}; names and "
    "values have at most 63 letters, digits, '-', '_' and '.'"
)
_LABEL_CONDITION = re.compile(rf"!?{_LABEL}|!?(?:in)?\({_LABEL}(?:, ?{_LABEL})*\)|")
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
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def refuse(field: str, value: Any, allowed: str) -> NoReturn:
    """Raise for a field that has a wrong value."""
    raise ConfigError(f"{field} is {value!r}; allowed is {allowed}.")


def is_amount(value: Any) -> bool:
    """Whether it is a finite number from 0, and no bool."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and bool(0 <= value <= AMOUNT_MAX)


def is_whole(value: Any, least: int, most: int | None = None) -> bool:
    """Whether it is a whole number between these, and no bool."""
    number = isinstance(value, int) and not isinstance(value, bool)
    return number and least <= value and (most is None or value <= most)


def are_labels(value: Any) -> bool:
    """Whether Ray takes it as a label selector; of another one it says so only to a job."""
    return isinstance(value, Mapping) and all(
        isinstance(key, str)
        and isinstance(text, str)
        and _LABEL_KEY.fullmatch(key)
        and _LABEL_CONDITION.fullmatch(text)
        for key, text in value.items()
    )


def version_of(text: str) -> tuple[int, ...]:
    """The first two numbers of a version, to be compared."""
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


def nearest(name: object, known: Iterable[str]) -> str | None:
    """The known name that is most like another one, in any case; ``None`` if none is like it."""
    by_lower = {word.lower(): word for word in known}
    close = difflib.get_close_matches(str(name).lower(), by_lower, n=1)
    return by_lower[close[0]] if close else None


def strict_init(cls: _Class) -> _Class:
    """A dataclass whose constructor refuses wrong arguments by a ``ConfigError``.

    The signature stays that of the fields: NeMo-Run's command line and fiddle read it.
    """
    construct: Any = cls.__init__  # type: ignore[misc]
    known = [field.name for field in dataclasses.fields(cls) if field.init]

    @functools.wraps(construct)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        for name in kwargs:
            if name not in known:
                meant = nearest(name, known)
                hint = f"did you mean {meant!r}?" if meant else f"it has {', '.join(known)}."
                raise ConfigError(f"{cls.__name__} has no field {name!r}; {hint}")
        try:
            inspect.signature(construct).bind(self, *args, **kwargs)
        except TypeError as error:
            raise ConfigError(
                f"{cls.__name__}: {error}; its fields are {', '.join(known)}."
            ) from None
        construct(self, *args, **kwargs)

    cls.__init__ = __init__  # type: ignore[misc]
    return cls


# ---------------------------------------------------------------------- credentials


def is_credential_name(name: str) -> bool:
    """Whether a variable or a header of this name holds a credential."""
    name = re.sub(r"_?\d+$", "", name.upper().replace("-", "_"))
    is_named_so = _CREDENTIAL.fullmatch(name) or _ADDRESS.fullmatch(name)
    return bool(is_named_so and not _NO_CREDENTIAL.fullmatch(name))


def credentials_in(variables: Mapping[str, Any]) -> list[str]:
    """Names of the variables that hold a credential, by the name or in an address."""
    return [name for name, value in variables.items() if _is_credential(str(name), str(value))]


def refuse_credentials(what: str, variables: Mapping[str, Any]) -> None:
    """Refuse variables that hold a credential; ``what`` gives them, for the message."""
    for name in credentials_in(variables):
        raise ConfigError(
            f"{what} gives {name}, which looks like a credential (its value is not shown here) and "
            "would lie in clear in the experiment's folder, and on the cluster where others can "
            f"read it. Give RayExecutor(secrets=[{name!r}]), which takes the value from your "
            "environment and writes it nowhere."
        )


def _is_credential(name: str, value: str) -> bool:
    if _IN_ADDRESS.search(value):
        return True
    if not is_credential_name(name) or _ADDRESS.fullmatch(name.upper()):
        return False
    is_column = _COLUMN.fullmatch(name.upper()) and _WORD.fullmatch(value)
    return not (is_column or _NO_VALUE.fullmatch(value))


# ---------------------------------------------------------------------- checks of one value


def allow(fits: Callable[[Any], Any], allowed: str, none: bool = False) -> Check:
    """The check that a value fits; with ``none``, ``None`` passes too."""

    def check(field: str, value: Any) -> None:
        if not fits(value) and not (none and value is None):
            refuse(field, value, allowed + (", or None" if none else ""))

    return check


def _or_none(check: Callable[[str, Any], object]) -> Check:
    """The check, which ``None`` passes."""

    def check_or_none(field: str, value: Any) -> None:
        if value is not None:
            check(field, value)

    return check_or_none


def whole(least: int, most: int | None = None, none: bool = False) -> Check:
    """The check of a whole number."""
    allowed = f"a whole number from {least}" + ("" if most is None else f" to {most}")
    return allow(lambda value: is_whole(value, least, most), allowed, none)


def every(fits: Callable[[Any], Any], allowed: str) -> Check:
    """The check of a list whose items fit."""
    return allow(lambda value: isinstance(value, list) and all(map(fits, value)), allowed)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip()) and "\0" not in value


_FLAG = allow(lambda value: isinstance(value, bool), "True or False")
_SECONDS = "a number of seconds from 0"
_A_NAME = allow(_is_text, "a name in the cluster file", none=True)
_A_LIST = allow(lambda value: isinstance(value, list), "a list")


def parse_memory(value: int | str, field: str = "RayExecutor.memory_per_node") -> int:
    """Bytes of ``"64GiB"``, ``"500 MB"`` or a plain number.

    Raises:
        ConfigError: no number, a negative one, one that Ray cannot count, or an unknown unit.
    """
    allowed = f"bytes, or a number with one of the units {', '.join(_UNITS)}"
    size_bytes = -1
    if isinstance(value, int) and not isinstance(value, bool):
        size_bytes = value
    elif isinstance(value, str) and (match := _MEMORY.fullmatch(value)):
        number, unit = match.groups()
        if (unit or "B") in _UNITS:
            size_bytes = int(float(number) * _UNITS[unit or "B"])
        elif f"{unit[0].upper()}iB" in _UNITS:  # 64G is GiB for Slurm and Docker, GB for Kubernetes
            prefix = unit[0].upper()
            allowed += f"; write {number}{prefix}B (of 1000) or {number}{prefix}iB (of 1024)"
    if not 0 <= size_bytes <= RESOURCE_MAX:
        most = f"; at most {RESOURCE_MAX} bytes" if size_bytes > 0 else ""
        refuse(field, value, allowed + most)
    return size_bytes


def _resource(field: str, value: Any) -> None:
    if not is_amount(value) or value > RESOURCE_MAX or 0 < value < RESOURCE_MIN:
        refuse(field, value, f"0, or a number from {RESOURCE_MIN} to {RESOURCE_MAX}")


def _gpus(field: str, value: Any) -> None:
    _resource(field, value)
    if value > 1 and value != int(value):
        refuse(field, value, "a fraction below 1 or a whole number")


def _custom_resources(field: str, value: Any) -> None:
    if not isinstance(value, dict) or not all(
        isinstance(key, str) and key and key not in _OWN_FIELDS for key in value
    ):
        own = ", ".join(_OWN_FIELDS)
        refuse(field, value, f"a dict of custom resources; {own} have fields of their own")
    for key, amount in value.items():
        _resource(f"{field}[{key!r}]", amount)


def _are_ports(value: Any) -> bool:
    fixed = [port for port in value.values() if port] if isinstance(value, dict) else []
    return (
        isinstance(value, dict)
        and all(isinstance(key, str) and key and not key.startswith("_") for key in value)
        and all(is_whole(port, 0, 65535) for port in value.values())
        and len(set(fixed)) == len(fixed)
    )


def _variables(field: str, value: Any, size_max_bytes: float = float("inf")) -> None:
    """Check variables without showing a value, which may be a credential."""
    if not isinstance(value, dict):
        refuse(field, type(value), "a dict of texts by text")
    for name, text in value.items():
        if not isinstance(name, str) or not name or re.search(r"[\s=\0]", name):
            refuse(field, name, "names of environment variables, without blanks and '='")
        if not isinstance(text, str) or "\0" in text:
            refuse(f"{field}[{name!r}]", type(text), "a text without NUL")
        size_bytes = len(f"{name}={text}".encode(errors="surrogatepass")) + 1
        if size_bytes > size_max_bytes:
            refuse(
                f"{field}[{name!r}], in bytes with its name,",
                size_bytes,
                f"at most {size_max_bytes}, else no worker of Ray starts; put it into a file",
            )


def _secret_names(field: str, value: Any) -> None:
    # A secret given by its value must not be shown, not even as refused.
    is_list = isinstance(value, list)
    if not is_list or not all(isinstance(one, str) and _VARIABLE.fullmatch(one) for one in value):
        raise ConfigError(
            f"{field} is no list of names of environment variables (what it is, is not shown here, "
            "in case it is a value); allowed are names, such as ['HF_TOKEN'], whose values are "
            "taken from the environment."
        )


# ---------------------------------------------------------------------- probes


def _is_plain_path(value: Any) -> bool:
    is_plain = isinstance(value, str) and value.isascii() and value.isprintable()
    return is_plain and value.startswith("/") and " " not in value


_POSITIVE_SECONDS = allow(
    lambda value: is_amount(value) and value > 0, "a number of seconds above 0"
)
_OF_PROBES: dict[str, Check] = {
    "interval_s": _POSITIVE_SECONDS,
    "timeout_s": _POSITIVE_SECONDS,
    "port": allow(
        lambda value: is_whole(value, 1, 65535) or _is_text(value),
        "a number from 1 to 65535, or the name of one of the role's ports",
    ),
    "path": allow(_is_plain_path, "a path that begins with /, without spaces"),
    "status": whole(100, 599),
    "command": allow(
        lambda value: (
            isinstance(value, list)
            and value
            and all(isinstance(word, str) and "\0" not in word for word in value)
        ),
        "a list of texts, the program first",
    ),
}


@dataclass
class Probe:
    """Base of the probes; use one of them. Fields that ``ProbeSpec`` has too are its values.

    Raises:
        ConfigError: a value is not allowed.
    """

    #: The way in which the node asks.
    kind: ClassVar[str]
    _: KW_ONLY
    #: Seconds from one try to the next.
    interval_s: float = 1
    #: Seconds from the service's start until the group is given up.
    timeout_s: float = 600

    def __post_init__(self) -> None:
        for name, check in _OF_PROBES.items():
            if hasattr(self, name):
                check(f"{type(self).__name__}.{name}", getattr(self, name))

    def spec(self) -> "ProbeSpec":
        """The probe as the node runs it."""
        if not hasattr(self, "kind"):
            raise NotImplementedError
        from nemo_run_ray.remote.spec import ProbeSpec  # not every program has a probe

        values = {name: getattr(self, name) for name in ProbeSpec._fields if hasattr(self, name)}
        if "command" in values:
            values["command"] = tuple(values["command"])
        return ProbeSpec(**values)


@strict_init
@dataclass
class PortProbe(Probe):
    """The service is ready when the port takes connections on the node's own address."""

    kind = "port"
    #: The port's number, or the name of one of the role's ``ports``.
    port: int | str


@strict_init
@dataclass
class HttpProbe(Probe):
    """The service is ready when ``GET http://<node>:<port><path>`` is answered with the status."""

    kind = "http"
    #: The port's number, or the name of one of the role's ``ports``.
    port: int | str
    path: str = "/"
    status: int = 200


@strict_init
@dataclass
class CommandProbe(Probe):
    """Exit code 0 of the command means ready; it runs on the node, in the role's environment."""

    kind = "command"
    #: The command, word by word; no shell sees it.
    command: list[str]


# ---------------------------------------------------------------------- RayExecutor

_OF_EXECUTORS: dict[str, Check] = {
    "pool": _A_NAME,
    "image": _A_NAME,
    "preflight": allow(lambda value: isinstance(value, bool), "True, False", none=True),
    "packager": allow(
        lambda value: isinstance(value, Packager),
        "a packager, such as nemo_run.GitArchivePackager()",
    ),
    "nodes": whole(1),
    "ntasks_per_node": whole(1),
    "retries": whole(0),
    "cpus_per_node": _or_none(_resource),
    "gpus_per_node": _gpus,
    "memory_per_node": _or_none(lambda field, value: parse_memory(value, field)),
    "resources_per_node": _custom_resources,
    "label_selector": allow(are_labels, f"a dict of {LABELS}"),
    "strategy": allow(lambda value: value in STRATEGIES, f"one of {', '.join(STRATEGIES)}"),
    "runtime_env": allow(lambda value: isinstance(value, dict), "a dict"),
    "allow_unknown_runtime_env": _FLAG,
    "secrets": _secret_names,
    "env_vars": _variables,
    "role": allow(lambda value: isinstance(value, str), "a text"),
    "service": _FLAG,
    "ready": allow(
        lambda value: isinstance(value, Probe) and type(value) is not Probe,
        "a PortProbe, an HttpProbe, a CommandProbe",
        none=True,
    ),
    "ports": allow(
        _are_ports,
        "a dict of numbers up to 65535, or 0 for a free one, which differ; by names that do not "
        "begin with '_'",
    ),
    "wait_for_nodes": _FLAG,
    "resource_group": _A_LIST,
    "max_in_flight": whole(1, none=True),
    "pending_timeout_s": allow(is_amount, _SECONDS, none=True),
    "time_s": allow(is_amount, _SECONDS, none=True),
    "permanent_exit_codes": every(
        lambda code: is_whole(code, 1, 255), "a list of numbers from 1 to 255"
    ),
    "grace_s": allow(is_amount, _SECONDS),
    "dependencies": every(
        lambda name: (
            isinstance(name, str)
            and name
            and ("://" not in name or name.startswith(f"{SCHEDULER}://"))
        ),
        f"a list of experiments' titles or ids, and handles {HANDLE}<job's id>",
    ),
    "keep_run_dir": _FLAG,
    "python": allow(
        lambda value: isinstance(value, str) and value and not CONTROL.search(value),
        "a path, a program's name",
        none=True,
    ),
    "entrypoint_shell": allow(lambda value: value == "login", "'login'", none=True),
    "startup_commands": every(_is_text, "a list of shell commands"),
    "keep_logs_max_bytes": whole(0, none=True),
    "given_fields": _A_LIST,
}


def check_executor(executor: Any) -> None:
    """Check the fields of a RayExecutor, except for the cluster.

    Raises:
        ConfigError: the first field that is wrong.
    """
    for name, check in _OF_EXECUTORS.items():
        check(f"RayExecutor.{name}", getattr(executor, name))
    check_runtime_env(executor.runtime_env, executor.allow_unknown_runtime_env)
    of_ray = executor.runtime_env.get("env_vars") or {}
    for field, variables in (
        ("env_vars", executor.env_vars),
        ("runtime_env['env_vars']", of_ray),
    ):
        for name in executor.secrets:
            if name in variables:
                raise ConfigError(
                    f"RayExecutor.{field} names {name}, and RayExecutor.secrets does too; allowed "
                    "is one of them: a secret's value is taken from your environment."
                )
    launcher = executor.launcher
    if executor.resource_group and launcher is not None and type(launcher) is not Launcher:
        allowed = "None for a group; set it on the executor of a role"
        refuse("RayExecutor.launcher", launcher, allowed)
    kinds = (Launcher, Torchrun, FaultTolerance)
    if launcher is not None and launcher not in _LAUNCHERS and type(launcher) not in kinds:
        allowed = f"None, {', '.join(map(repr, _LAUNCHERS))}, Torchrun or FaultTolerance"
        refuse("RayExecutor.launcher", launcher, allowed)
    if getattr(launcher, "nsys_profile", False):
        allowed = "False: profiling on Ray is not built yet"
        refuse("RayExecutor.launcher.nsys_profile", True, allowed)


# ---------------------------------------------------------------------- Ray's runtime_env

# Ray checks it in its own Python client, which is not used here: its server passes over a field
# that it does not know, and looks on the head for a file that the caller has. Read from Ray 2.54 to
# 2.60, ``ray/runtime_env/runtime_env.py`` and ``ray/_private/runtime_env/validation.py``.

#: Fields that NeMo-Run's packagers stand for.
_PACKAGED = ("working_dir", "py_modules", "excludes")
#: Fields that give the command a Python of their own; Ray takes one of them at a time.
_ENVIRONMENTS = ("pip", "uv", "conda")
#: Fields by which Ray starts a worker in a container, and what it lets them be combined with.
_CONTAINERS, _BESIDE_CONTAINER = ("image_uri", "container"), ("config", "env_vars")
#: Fields that Ray's client adds by itself, which a saved runtime environment may have.
_OF_RAY_ITSELF = (
    "_ray_release",
    "_ray_commit",
    "_inject_current_ray",
    "_nsight",
    "_rocprof_sys",
)
#: A line of requirements that names another file, and how deep such files may lie.
_OTHER_FILE = re.compile(
    r"\s*(?P<option>-r|-c|--requirement|--constraint)(?:\s+|=|(?<=-[rc]))(?P<path>[^\s#]+)"
)
_INCLUDES_MAX = 10
#: One string of a new process (MAX_ARG_STRLEN, execve(2)): Ray tries for ever to start its worker.
_VARIABLE_BYTES_MAX = 128 * 1024
#: Every field that Ray's documentation lists.
_OF_RUNTIME_ENV = (
    *_ENVIRONMENTS,
    *_CONTAINERS,
    *_BESIDE_CONTAINER,
    "py_executable",
    "worker_process_setup_hook",
    "nsight",
    "rocprof_sys",
    "java_jars",
)


def check_runtime_env(runtime_env: Mapping[str, Any], allow_unknown: bool = False) -> None:
    """Check the names of the fields, the values that are read here, and that Ray combines them.

    Args:
        runtime_env: as the user gave it.
        allow_unknown: let fields pass that are not in Ray's documentation: those of a newer Ray and
            of runtime environment plug-ins.

    Raises:
        ConfigError: the first field that is wrong.
    """
    values = {name: value for name, value in runtime_env.items() if value is not None}
    for name, value in values.items():
        field = _field(name)
        if name in _PACKAGED:
            refuse(field, value, "absent: the executor's packager says which code is sent")
        if name not in (*_OF_RUNTIME_ENV, *_OF_RAY_ITSELF) and not allow_unknown:
            meant = nearest(name, _OF_RUNTIME_ENV)
            documented = ", ".join(_OF_RUNTIME_ENV)
            hint = f"did you mean {meant!r}?" if meant else f"Ray's fields are {documented}."
            raise ConfigError(
                f"RayExecutor.runtime_env has the field {name!r}, which Ray would pass over "
                f"silently; {hint} For a field of a newer Ray, or of a plug-in of your cluster, "
                "set RayExecutor(allow_unknown_runtime_env=True)."
            )
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{field} holds something that JSON cannot carry to the "
                f"cluster: {error}. Use texts, numbers, True, False, None, lists and dicts."
            ) from error
    _variables(_field("env_vars"), values.get("env_vars", {}), _VARIABLE_BYTES_MAX)
    for name in ("pip", "uv"):
        value = values.get(name, [])
        packages = value.get("packages") if isinstance(value, dict) else value
        is_list = isinstance(packages, list) and all(isinstance(one, str) for one in packages)
        if not is_list and not (isinstance(packages, str) and packages):
            allowed = "a list of requirements, the path of a file of them"
            refuse(_field(name), value, f"{allowed}, or a dict with one of these as 'packages'")
    several = [name for name in values if name in _ENVIRONMENTS]
    if len(several) > 1:
        raise ConfigError(
            f"RayExecutor.runtime_env has {' and '.join(several)}; Ray builds one environment "
            "for a task. Keep one of them: conda can list pip packages of its own."
        )
    for container in (name for name in values if name in _CONTAINERS):
        others = [name for name in values if name not in (container, *_BESIDE_CONTAINER)]
        if others:
            raise ConfigError(
                f"RayExecutor.runtime_env has {container} beside {', '.join(others)}; Ray combines "
                f"{container} with {' and '.join(_BESIDE_CONTAINER)} only. Put the rest into the "
                "image."
            )


def resolve_runtime_env(runtime_env: Mapping[str, Any]) -> dict[str, Any]:
    """The runtime environment without names of files of this machine: they are read here.

    Raises:
        ConfigError: a file of requirements, or of a conda environment, cannot be read.
    """
    resolved = {name: value for name, value in runtime_env.items() if value is not None}
    for name in ("pip", "uv"):
        value = resolved.get(name)
        if isinstance(value, dict):
            packages = _requirements(f"{_field(name)}['packages']", value["packages"])
            resolved[name] = {**value, "packages": packages}
        elif value is not None:
            resolved[name] = _requirements(_field(name), value)
    conda = resolved.get("conda")
    if isinstance(conda, str) and Path(conda).suffix in (".yaml", ".yml"):
        resolved["conda"] = _conda_file(conda)
    return resolved


def brings_python(runtime_env: Mapping[str, Any]) -> bool:
    """Whether the command's ``python`` is one that Ray prepares: an environment's or an image's."""
    return any(runtime_env.get(name) for name in (*_ENVIRONMENTS, *_CONTAINERS))


def environments(runtime_env: Mapping[str, Any]) -> list[str]:
    """The fields by which Ray makes an environment with packages."""
    return [name for name in _ENVIRONMENTS if runtime_env.get(name)]


def is_container(runtime_env: Mapping[str, Any]) -> bool:
    """Whether the command runs in a container, which Ray combines with no archives of a job."""
    return any(runtime_env.get(name) for name in _CONTAINERS)


def _field(name: str) -> str:
    return f"RayExecutor.runtime_env[{name!r}]"


def _requirements(
    field: str, packages: str | Sequence[str], folder: Path | None = None, depth: int = 0
) -> list[str]:
    """Requirements, a list or a file's path, with the lines of the files that they include."""
    if isinstance(packages, str):
        path = packages
        try:
            lines: Sequence[str] = Path(path).read_text(encoding="utf-8").strip().split("\n")
        except (OSError, UnicodeDecodeError) as error:
            problem = _unreadable(field, path, error, "a requirements file")
            if not path.endswith((".txt", ".in")):
                problem += f" One package is written as a list: [{path!r}]."
            raise ConfigError(problem) from error
        folder = Path(path).parent
    else:
        lines = packages
    requirements = []
    for line in lines:
        other = _OTHER_FILE.match(line)
        if other is None:
            requirements.append(line)
        elif other["option"].lstrip("-").startswith("c") or depth == _INCLUDES_MAX:
            raise ConfigError(
                f"{field} has the line {line.strip()!r}, whose file is not sent to "
                "the node. Put what it says into the requirements themselves."
            )
        else:
            path = str((folder or Path()) / other["path"])
            requirements += _requirements(field, path, depth=depth + 1)
    return requirements


def _conda_file(path: str) -> dict[str, Any]:
    import yaml

    expected = "a YAML file of a conda environment"
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(_unreadable(_field("conda"), path, error, expected)) from error
    if not isinstance(content, dict):
        raise ConfigError(_unreadable(_field("conda"), path, "it holds no mapping", expected))
    return content


def _unreadable(field: str, path: str, why: object, expected: str) -> str:
    reason = getattr(why, "strerror", None) or " ".join(str(why).split())
    return (
        f"{field} names the file {path!r} in {Path.cwd()}, which cannot be read as "
        f"{expected}: {reason}. It is read here, when the task is planned, not on the cluster."
    )
