"""The checks of all fields that a user sets, on executors, pools, clusters and probes; the probes.

A check takes a field's full name and its value, and raises ``ConfigError`` with what is allowed.
"""

# No postponed annotations: NeMo-Run's command line parses values by the types themselves.

import contextlib
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

import yaml
from nemo_run.core.execution.launcher import FaultTolerance, Launcher, Torchrun
from nemo_run.core.packaging.base import Packager
from pydantic import ByteSize, TypeAdapter, ValidationError

from nemo_run_ray.errors import ConfigError
from nemo_run_ray.ids import HANDLE, SCHEDULER

if TYPE_CHECKING:
    from nemo_run_ray.remote.spec import ProbeSpec

Check = Callable[[str, Any], None]
_Class = TypeVar("_Class", bound=type)
_Value = TypeVar("_Value")
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
#: The smallest part of a resource that Ray gives away.
RESOURCE_MIN = 0.0001
#: The largest amount of a resource: Ray counts the steps in 64 bits, and takes a job that asks for
#: more as one that asks for nothing (839 TiB of memory, measured on Ray 2.60).
RESOURCE_MAX = int(2**63 * RESOURCE_MIN)
#: Resources with a field of their own.
_OWN_FIELDS = ("", "CPU", "GPU", "memory", "object_store_memory")
_LAUNCHERS = ("torchrun", "ft")
_MEMORY = TypeAdapter(ByteSize)
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
            raise ConfigError(f"{cls.__name__}: {error}; it has {', '.join(known)}.") from None
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


def whole(least: int, most: int | None = None, none: bool = False) -> Check:
    """The check of a whole number."""
    allowed = f"a whole number from {least}" + ("" if most is None else f" to {most}")
    return allow(lambda value: is_whole(value, least, most), allowed, none)


def one_of(*values: str) -> Check:
    """The check of one of some texts."""
    return allow(lambda value: value in values, f"one of {', '.join(values)}")


def every(fits: Callable[[Any], Any], allowed: str) -> Check:
    """The check of a list whose items fit."""
    return allow(lambda value: isinstance(value, list) and all(map(fits, value)), allowed)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip()) and "\0" not in value


def _is_resource(value: Any) -> bool:
    """Whether Ray can count the amount."""
    return is_amount(value) and (value == 0 or RESOURCE_MIN <= value <= RESOURCE_MAX)


def _are_resources(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(name, str) and name not in _OWN_FIELDS and _is_resource(amount)
        for name, amount in value.items()
    )


def parse_memory(value: int | str, field: str = "RayExecutor.memory_per_node") -> int:
    """Bytes of ``"64GiB"``, ``"500 MB"`` or a plain number."""
    size_bytes = -1
    # 64G is GiB for Slurm and Docker, and GB for Kubernetes.
    is_clear = isinstance(value, (int, str)) and not re.search(r"[kmgtp]\s*$", str(value), re.I)
    if is_clear and not isinstance(value, bool):
        with contextlib.suppress(ValidationError, OverflowError):
            size_bytes = int(_MEMORY.validate_python(value))
    if not 0 <= size_bytes <= RESOURCE_MAX:
        texts = "a text such as '64GiB' (of 1024) or '64GB' (of 1000)"
        allowed = f"bytes, or {texts}, up to {RESOURCE_MAX} bytes"
        refuse(field, value, allowed)
    return size_bytes


def _memory(field: str, value: Any) -> None:
    if value is not None:
        parse_memory(value, field)


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
        if not isinstance(name, str) or not re.fullmatch(r"[^\s=\0]+", name):
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
    """Base of the probes; use one of them. Its fields are those of ``ProbeSpec``.

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
        from nemo_run_ray.remote.spec import ProbeSpec  # not every program has a probe

        values = dataclasses.asdict(self)
        command = tuple(values.pop("command", ()))
        return ProbeSpec(kind=self.kind, command=command, **values)


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

_FLAG = allow(lambda value: isinstance(value, bool), "True or False")
_SECONDS = "a number of seconds from 0"
_NAME = allow(_is_text, "a name in the cluster file", none=True)
_AMOUNT = f"0, or a number from {RESOURCE_MIN} to {RESOURCE_MAX}"
_OF_EXECUTORS: dict[str, Check] = {
    **dict.fromkeys(("pool", "image"), _NAME),
    **dict.fromkeys(("nodes", "ntasks_per_node"), whole(1)),
    **dict.fromkeys(
        ("service", "wait_for_nodes", "keep_run_dir", "allow_unknown_runtime_env"), _FLAG
    ),
    **dict.fromkeys(("pending_timeout_s", "time_s"), allow(is_amount, _SECONDS, none=True)),
    "preflight": allow(lambda value: isinstance(value, bool), "True, False", none=True),
    "packager": allow(
        lambda value: isinstance(value, Packager),
        "a packager, such as nemo_run.GitArchivePackager()",
    ),
    "retries": whole(0),
    "cpus_per_node": allow(_is_resource, _AMOUNT, none=True),
    "gpus_per_node": allow(
        lambda value: _is_resource(value) and (value < 1 or value == int(value)),
        f"{_AMOUNT}, above 1 a whole one",
    ),
    "memory_per_node": _memory,
    "resources_per_node": allow(
        _are_resources,
        f"a dict of amounts ({_AMOUNT}) of custom resources;{', '.join(_OWN_FIELDS)[1:]} have "
        "fields of their own",
    ),
    "label_selector": allow(are_labels, f"a dict of {LABELS}"),
    "strategy": one_of("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"),
    "runtime_env": allow(lambda value: isinstance(value, dict), "a dict"),
    "secrets": _secret_names,
    "env_vars": _variables,
    "role": allow(lambda value: isinstance(value, str), "a text"),
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
    "max_in_flight": whole(1, none=True),
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
    "python": allow(
        lambda value: isinstance(value, str) and value and not CONTROL.search(value),
        "a path, a program's name",
        none=True,
    ),
    "entrypoint_shell": allow(lambda value: value == "login", "'login'", none=True),
    "startup_commands": every(_is_text, "a list of shell commands"),
    "keep_logs_max_bytes": whole(0, none=True),
}


def check_executor(executor: Any) -> None:
    """Check the fields of a RayExecutor, except for the cluster."""
    for name, check in _OF_EXECUTORS.items():
        check(f"RayExecutor.{name}", getattr(executor, name))
    check_runtime_env(executor.runtime_env, executor.allow_unknown_runtime_env)
    for field, variables in variables_of(executor).items():
        for name in executor.secrets:
            if name in variables:
                raise ConfigError(
                    f"{field} names {name}, and RayExecutor.secrets does too; allowed is one of "
                    "them: a secret's value is taken from your environment."
                )
    launcher = executor.launcher
    kinds = (Launcher, Torchrun, FaultTolerance)
    if launcher is not None and launcher not in _LAUNCHERS and type(launcher) not in kinds:
        allowed = f"None, {', '.join(map(repr, _LAUNCHERS))}, Torchrun or FaultTolerance"
        refuse("RayExecutor.launcher", launcher, allowed)
    if executor.resource_group and launcher is not None and type(launcher) is not Launcher:
        allowed = "None for a group; set it on the executor of a role"
        refuse("RayExecutor.launcher", launcher, allowed)
    if getattr(launcher, "nsys_profile", False):
        allowed = "False: profiling on Ray is not built yet"
        refuse("RayExecutor.launcher.nsys_profile", True, allowed)


def variables_of(executor: Any) -> dict[str, Mapping[str, str]]:
    """The variables of a RayExecutor, by the field that gives them."""
    of_ray = executor.runtime_env.get("env_vars") or {}
    return {
        "RayExecutor.env_vars": executor.env_vars,
        "RayExecutor.runtime_env['env_vars']": of_ray,
    }


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
#: A line of requirements that names another file of them.
_OTHER_FILE = re.compile(r"\s*(?:-r|--requirement)(?:\s+|=|(?<=-r))(?P<path>[^\s#]+)")
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
    """Check the names of the fields, the values that are read here, and that Ray combines them."""
    values = {name: value for name, value in runtime_env.items() if value is not None}
    for name, value in values.items():
        if name in _PACKAGED:
            refuse(_field(name), value, "absent: the executor's packager says which code is sent")
        # Ray's own client adds some with an underscore.
        if name not in _OF_RUNTIME_ENV and name[:1] != "_" and not allow_unknown:
            meant = nearest(name, _OF_RUNTIME_ENV)
            documented = ", ".join(_OF_RUNTIME_ENV)
            hint = f"did you mean {meant!r}?" if meant else f"Ray's fields are {documented}."
            raise ConfigError(
                f"RayExecutor.runtime_env has the field {name!r}, which Ray would pass over "
                f"silently; {hint} For a field of a newer Ray, or of a plug-in of your cluster, "
                "set RayExecutor(allow_unknown_runtime_env=True)."
            )
    try:
        json.dumps(values)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "RayExecutor.runtime_env holds something that JSON cannot carry to the cluster: "
            f"{error}. Use texts, numbers, True, False, None, lists and dicts."
        ) from error
    _variables(_field("env_vars"), values.get("env_vars", {}), _VARIABLE_BYTES_MAX)
    for name in ("pip", "uv"):
        value = values.get(name, [])
        packages = value.get("packages") if isinstance(value, dict) else value
        texts = [packages] if isinstance(packages, str) else packages
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
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
    """The runtime environment without names of files of this machine: they are read here."""
    resolved = {name: value for name, value in runtime_env.items() if value is not None}
    for name in ("pip", "uv"):
        value = resolved.get(name)
        if isinstance(value, dict):
            resolved[name] = {**value, "packages": _requirements(name, value["packages"])}
        elif value is not None:
            resolved[name] = _requirements(name, value)
    conda = resolved.get("conda")
    if isinstance(conda, str) and conda.endswith((".yaml", ".yml")):
        expected = "a YAML file of a conda environment"
        resolved["conda"] = _read("conda", conda, expected, lambda text: dict(yaml.safe_load(text)))
    return resolved


def brings_python(runtime_env: Mapping[str, Any]) -> bool:
    """Whether the command's ``python`` is one that Ray prepares: an environment's or an image's."""
    return is_container(runtime_env) or any(map(runtime_env.get, _ENVIRONMENTS))


def is_container(runtime_env: Mapping[str, Any]) -> bool:
    """Whether the command runs in a container, which Ray combines with no archives of a job."""
    return any(map(runtime_env.get, _CONTAINERS))


def _field(name: str) -> str:
    return f"RayExecutor.runtime_env[{name!r}]"


def _requirements(name: str, packages: str | Sequence[str], folder: Path = Path()) -> list[str]:
    """Requirements, a list or a file's path, with the lines of the files that they include."""
    if isinstance(packages, str):
        path = folder / packages
        expected = f"a requirements file (one package is a list: [{packages!r}])"
        text = _read(name, str(path), expected, str)
        return _requirements(name, text.strip().split("\n"), path.parent)
    requirements = []
    for line in packages:
        other = _OTHER_FILE.match(line)
        requirements += _requirements(name, other["path"], folder) if other else [line]
    return requirements


def _read(name: str, path: str, expected: str, parse: Callable[[str], _Value]) -> _Value:
    try:
        return parse(Path(path).read_text(encoding="utf-8"))
    except (OSError, TypeError, ValueError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ConfigError(
            f"{_field(name)} names the file {path!r} in {Path.cwd()}, which cannot be read as "
            f"{expected}: {reason}. It is read here, when the task is planned, not on the cluster."
        ) from error
