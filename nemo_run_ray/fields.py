"""The checks of fields that a user sets, on executors, pools and clusters; the probes."""

# No postponed annotations: NeMo-Run's command line parses values by the types themselves.

import dataclasses
import difflib
import functools
import inspect
import json
import re
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NoReturn, TypeVar

import yaml
from nemo_run.core.execution.launcher import FaultTolerance, Launcher, Torchrun
from nemo_run.core.packaging.base import Packager
from pydantic import (
    AfterValidator,
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    InstanceOf,
    NonNegativeInt,
    PositiveInt,
    TypeAdapter,
    ValidationError,
)

from nemo_run_ray.errors import ConfigError

if TYPE_CHECKING:
    from nemo_run_ray.remote.spec import ProbeSpec

_Class = TypeVar("_Class", bound=type)
_Value = TypeVar("_Value")
#: Above every amount and every number of seconds; larger numbers do not fit a float's arithmetic.
AMOUNT_MAX = 1e18
#: Control characters, which no address, path or header may hold.
CONTROL = re.compile(r"[\x00-\x1f\x7f]")

#: Fields of an executor that users do not set.
_SET_BY_NEMO_RUN = ("experiment_id", "job_dir", "resource_group", "given_fields")
#: Words that say which field is meant.
_TELLING = {"cpu", "gpu", "memory", "node", "label", "image", "port", "secret", "time"}
#: Fields whose values may be credentials, and are never shown.
_HIDDEN = ("env_vars", "secrets")
#: Pydantic 2.11 to 2.13 accept wrong values while another thread builds the model.
_BUILDING = threading.Lock()


class Allowed(BaseModel):
    """The types of an object's fields; a field with a description is refused with it."""

    # Each model is built at its first check: to build all takes a third of this package's import.
    model_config = ConfigDict(strict=True, allow_inf_nan=False, defer_build=True)

    @classmethod
    def check(cls, owner: str, values: Mapping[str, Any]) -> None:
        """Refuse the first wrong value of the fields of an owner."""
        with _BUILDING:
            cls.model_rebuild()
        try:
            cls.model_validate(values)
        except ValidationError as error:
            problem = error.errors()[0]
            path, value = problem["loc"], problem["input"]
            expected = cls.model_fields[str(path[0])].description
            if expected:
                path, value = path[:1], values[str(path[0])]
            found = f"of type {type(value).__name__}" if path[0] in _HIDDEN else repr(value)
            if path[-1] == "[key]":
                path, found = path[:-2], f"a dict with the name {value!r}"
            words = problem["msg"].removeprefix("Value error, ").replace("Input", "it")
            raise ConfigError(
                f"{'.'.join(map(str, (owner, *path)))} is {found}: {expected or words}."
            ) from None


def refuse(field: str, value: Any, allowed: str) -> NoReturn:
    """Raise for a field that has a wrong value."""
    raise ConfigError(f"{field} is {value!r}; allowed is {allowed}.")


def is_amount(value: Any) -> bool:
    """Whether it is a finite number from 0, and no bool."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and bool(0 <= value <= AMOUNT_MAX)


def is_whole(value: Any, least: int) -> bool:
    """Whether it is a whole number from this one, and no bool."""
    return type(value) is int and value >= least


def _that(fits: Callable[[Any], Any], allowed: str) -> AfterValidator:
    """For what pydantic takes too much as (numpy's and decimal numbers), or too little."""

    def check(value: Any) -> Any:
        if not fits(value):
            raise ValueError(f"it should be {allowed}")
        return value

    return AfterValidator(check)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip()) and "\0" not in value


Text = Annotated[Any, _that(_is_text, "a text that is not empty")]
Seconds = Annotated[Any, _that(is_amount, "seconds from 0, as an int or a float")]
PositiveSeconds = Annotated[
    Any, _that(lambda value: is_amount(value) and value, "seconds above 0, as an int or a float")
]
_Name = Annotated[Any, _that(_is_text, "a name in the cluster file")]
_Port = Annotated[int, Field(ge=0, le=65535)]
_Word = Annotated[str, _that(lambda value: "\0" not in value, "a text without NUL")]
_VariableName = Annotated[
    str, _that(re.compile(r"[^\s=\0]+").fullmatch, "a name without blanks and '='")
]
_Variables = dict[_VariableName, _Word]


def version_of(text: str) -> tuple[int, ...]:
    """The first two numbers of a version, to be compared."""
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


def nearest(name: object, known: Iterable[str]) -> str | None:
    """The known name that is most like another one, in any case; ``None`` if none is like it."""
    by_lower = {word.lower(): word for word in known}
    close = difflib.get_close_matches(str(name).lower(), by_lower, n=1)
    return by_lower[close[0]] if close else None


def meant(name: object, known: Collection[str]) -> str:
    """The end of a message about a name that is not known.

    A name with a telling word of a single known name is taken for that: ``num_gpu``,
    ``gpus_per_node``.
    """
    words = {word.rstrip("s") for word in str(name).lower().split("_")} & _TELLING
    alike = [one for one in known if words & {word.rstrip("s") for word in one.split("_")}]
    like = nearest(name, known) or (alike[0] if len(alike) == 1 else None)
    if like:
        return f"did you mean {like!r}?"
    return f"known are {', '.join(known)}." if known else "there is none yet."


def strict_init(cls: _Class) -> _Class:
    """A dataclass whose constructor refuses wrong arguments by a ``ConfigError``.

    The signature stays that of the fields: NeMo-Run's command line and fiddle read it.
    """
    construct: Any = cls.__init__  # type: ignore[misc]
    signature = inspect.signature(construct)

    @functools.wraps(construct)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        try:
            signature.bind(self, *args, **kwargs)
        except TypeError as error:
            unknown = next((name for name in kwargs if name not in signature.parameters), "")
            known = [name for name in [*signature.parameters][1:] if name not in _SET_BY_NEMO_RUN]
            problem = f"there is no field {unknown!r}" if unknown else error
            raise ConfigError(f"{cls.__name__}: {problem}; {meant(unknown, known)}") from None
        construct(self, *args, **kwargs)

    cls.__init__ = __init__  # type: ignore[misc]
    return cls


# ---------------------------------------------------------------------- credentials

#: Names of credentials by their last words, but for columns of a data set, tokens of a tokenizer,
#: switches and the shell's folders.
_CREDENTIAL = re.compile(
    r"(?!(?:(?:.*_)?(?:"
    r"(?:PUBLIC|PRIMARY|FOREIGN|SORT|PARTITION|CACHE|INPUT|OUTPUT|PROMPT|LABEL|TEXT|IMAGE|DATA"
    r"|ANSWER|TARGET|REWARD)_KEY"
    r"|(?:PAD|EOS|BOS|UNK|MASK|STOP|SEP|CLS|PER|IMAGE|START|END|SPECIAL|THINK)_TOKEN"
    r"|(?:ENABLE|DISABLE|USE|NO|REQUIRE|SKIP|MAX|MIN|NUM)_\w+|(?:FIRST|SECOND)_PASS)|OLD_?PWD)$)"
    r"(?:(?:.*_)?(?:TOKEN|\w*API_?KEYS?|KEY|PAT|PASS|PASSCODE|PW|SECRETS?|AUTH|AUTHORIZATION|BEARER"
    r"|COOKIE|CREDENTIALS?|CREDS|JWT|DSN|CONNECTION_STRING|SECRET_KEY_BASE|AUTH_CONFIG|SSHPASS"
    r"|(?:ACCESS|AUTH|PRIVATE)_(?:KEYS|TOKENS)|(?:WEBHOOK|DATABASE|DB|POSTGRES|POSTGRESQL|PG|MYSQL"
    r"|MONGO|MONGODB|REDIS|AMQP|RABBITMQ|BROKER)_UR[LI])|.*(?:PASSWORD|PASSWD|PASSPHRASE)|.+_PWD)"
)
#: A user and a password in an address, or a password in its query.
_IN_ADDRESS = re.compile(r"://(?:[^/\s:@]*:[^/\s@]+@|\S*[?&]password=.)", re.IGNORECASE)
#: Values that are no credentials: a switch, a path, a placeholder, a database's plain address.
_NO_VALUE = re.compile(
    r"|[01]|true|false|yes|no|/.*|<[^<>]*>|empty|none|dummy|(?!http)[\w+]+://[^@?]*",
    re.IGNORECASE,
)
#: Names that say less than the value: of a data set's column, and of an address.
_UNCLEAR = re.compile(
    r"(?i:.*(?<!API)(?<!ACCESS)(?<!SECRET)(?<!PRIVATE)_KEY)=[a-z_]+"
    r"|(?i:.*(?<!WEBHOOK)_UR[LI]_?\d*)=.*"
)


def is_credential_name(name: str) -> bool:
    """Whether a variable or a header of this name holds a credential."""
    name = re.sub(r"_?\d+$", "", name.upper().replace("-", "_"))
    return bool(_CREDENTIAL.fullmatch(name))


def credentials_in(variables: Mapping[str, Any]) -> list[str]:
    """Names of the variables that hold a credential, by the name or in an address."""
    return [
        name
        for name, value in variables.items()
        if _IN_ADDRESS.search(str(value))
        or (
            is_credential_name(str(name))
            and not _NO_VALUE.fullmatch(str(value))
            and not _UNCLEAR.fullmatch(f"{name}={value}")
        )
    ]


def refuse_credentials(what: str, variables: Mapping[str, Any]) -> None:
    """Refuse variables that hold a credential; ``what`` gives them, for the message."""
    for name in credentials_in(variables):
        raise ConfigError(
            f"{what} gives {name}, which looks like a credential (its value is not shown here) and "
            "would lie in clear in the experiment's folder, and on the cluster where others can "
            f"read it. Give RayExecutor(secrets=[{name!r}]), which takes the value from your "
            "environment and writes it nowhere."
        )


# ---------------------------------------------------------------------- probes


class _ProbeFields(Allowed):
    """Each kind of probe has some of these."""

    interval_s: PositiveSeconds
    timeout_s: PositiveSeconds
    port: Annotated[_Port, Field(ge=1)] | Text = Field(
        80, description="allowed is a number from 1 to 65535, or the name of a port of the role"
    )
    path: Annotated[str, Field(pattern=r"^/[!-~]*$")] = Field(
        "/", description="allowed is a path that begins with /, without spaces"
    )
    status: Annotated[int, Field(ge=100, le=599)] = 200
    command: Annotated[list[_Word], Field(min_length=1)] = Field(
        ["true"], description="allowed is a list of texts, the program first"
    )


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
        _ProbeFields.check(type(self).__name__, vars(self))

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

#: The smallest part of a resource that Ray gives away, and the largest amount: it counts the parts
#: in 64 bits, and takes a job that asks for more as one that asks for nothing (measured on 2.60).
_RESOURCE_MIN, RESOURCE_MAX = 0.0001, int(2**63 / 10_000)
_Amount = Annotated[
    Any,
    _that(
        lambda value: is_amount(value) and (not value or _RESOURCE_MIN <= value <= RESOURCE_MAX),
        f"0, or an int or a float from {_RESOURCE_MIN} to {RESOURCE_MAX}",
    ),
]
#: Resources with a field of their own.
_OWN_FIELDS = ("CPU", "GPU", "memory", "object_store_memory")
#: A label's name or value, and what Ray takes as a condition for one: ``a``, ``!a``, ``in(a, b)``;
#: of another one it says so only to a job.
_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"
_Label = Annotated[str, Field(pattern=rf"^(?:[a-zA-Z0-9._-]{{1,253}}/)?{_LABEL}$")]
_LabelCondition = Annotated[
    str, Field(pattern=rf"^(?:!?{_LABEL}|!?(?:in)?\({_LABEL}(?:, ?{_LABEL})*\)|)$")
]
_MEMORY = TypeAdapter(ByteSize)


def parse_memory(value: int | str) -> int:
    """Bytes of ``"64GiB"``, ``"500 MB"`` or a plain number."""
    return int(_MEMORY.validate_python(value))


def _is_memory(value: Any) -> bool:
    # 64G is GiB for Slurm and Docker, and GB for Kubernetes.
    form = r"(?i)\s*\d{0,18}\.?\d{1,18}\s*(?:[kmgtp]i?b|b)?\s*"
    is_clear = is_whole(value, 0) or (isinstance(value, str) and re.fullmatch(form, value))
    return bool(is_clear) and parse_memory(value) <= RESOURCE_MAX


class _ExecutorFields(Allowed):
    pool: _Name | None
    image: _Name | None
    preflight: bool | None
    nodes: PositiveInt
    ntasks_per_node: PositiveInt
    cpus_per_node: _Amount | None
    gpus_per_node: Annotated[
        _Amount,
        _that(lambda value: value <= 1 or not value % 1, "a number up to 1, or a whole one"),
    ]
    memory_per_node: Annotated[Any, _that(_is_memory, "")] | None = Field(
        description="allowed are bytes, or a text such as '64GiB' (of 1024) or '64GB' (of 1000), "
        f"up to {RESOURCE_MAX} bytes"
    )
    resources_per_node: dict[
        Annotated[
            Text,
            _that(
                lambda name: name not in _OWN_FIELDS,
                f"none of {', '.join(_OWN_FIELDS)}, which have fields of their own",
            ),
        ],
        _Amount,
    ]
    label_selector: dict[_Label, _LabelCondition] = Field(
        description="allowed is a dict of values by label, such as {'zone': 'a'}, {'zone': '!a'} "
        "or {'zone': 'in(a, b)'}; names and values have at most 63 letters, digits, '-', '_' and "
        "'.'"
    )
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
    runtime_env: dict[str, Any]
    allow_unknown_runtime_env: bool
    secrets: list[Annotated[str, Field(pattern="^[A-Za-z_][A-Za-z0-9_]*$")]] = Field(
        description="allowed are names of environment variables, such as ['HF_TOKEN'], whose "
        "values are taken from the environment"
    )
    env_vars: _Variables
    role: str
    service: bool
    ready: InstanceOf[PortProbe] | InstanceOf[HttpProbe] | InstanceOf[CommandProbe] | None = Field(
        description="allowed is a PortProbe, an HttpProbe, a CommandProbe, or None"
    )
    ports: dict[Annotated[str, Field(pattern="^[^_]")], _Port] = Field(
        description="allowed is a dict of numbers up to 65535 by name, such as {'http': 8000}, "
        "with 0 for a free port; no name begins with '_'"
    )
    wait_for_nodes: bool
    packager: InstanceOf[Packager] = Field(
        description="allowed is a packager, such as nemo_run.GitArchivePackager()"
    )
    retries: NonNegativeInt
    max_in_flight: PositiveInt | None
    pending_timeout_s: Seconds | None
    time_s: Seconds | None
    permanent_exit_codes: list[Annotated[int, Field(ge=1, le=255)]] = Field(
        description="allowed is a list of numbers from 1 to 255"
    )
    grace_s: Seconds
    dependencies: list[Text] = Field(
        description="allowed is a list of experiments' titles or ids, and of jobs' handles"
    )
    keep_run_dir: bool
    python: (
        Annotated[Text, _that(lambda value: not CONTROL.search(value), "one line of text")] | None
    ) = Field(description="allowed is a path, a program's name, or None")
    entrypoint_shell: Literal["login"] | None
    startup_commands: list[Text] = Field(
        description="allowed is a list of shell commands without NUL"
    )
    keep_logs_max_bytes: NonNegativeInt | None


def check_executor(executor: Any) -> None:
    """Check the fields of a RayExecutor, except for the cluster."""
    _ExecutorFields.check("RayExecutor", vars(executor))
    fixed = [port for port in executor.ports.values() if port]
    if len(set(fixed)) < len(fixed):
        refuse("RayExecutor.ports", executor.ports, "a number once, or 0 for a free one")
    check_runtime_env(executor.runtime_env, executor.allow_unknown_runtime_env)
    for field, variables in variables_of(executor).items():
        for name in variables.keys() & executor.secrets:
            raise ConfigError(
                f"{field} names {name}, and RayExecutor.secrets does too; allowed is one of them: "
                "a secret's value is taken from your environment."
            )
    launcher = executor.launcher
    kinds = (Launcher, Torchrun, FaultTolerance, type(None))
    if launcher not in ("torchrun", "ft") and type(launcher) not in kinds:
        refuse(
            "RayExecutor.launcher",
            launcher,
            "None, 'torchrun', 'ft', Torchrun or FaultTolerance",
        )
    if executor.resource_group and launcher and type(launcher) is not Launcher:
        allowed = "None for a group; set it on the executor of a role"
        refuse("RayExecutor.launcher", launcher, allowed)
    if getattr(launcher, "nsys_profile", False):
        allowed = "False: profiling on Ray is not built yet"
        refuse("RayExecutor.launcher.nsys_profile", True, allowed)


def variables_of(executor: Any) -> dict[str, Mapping[str, str]]:
    """The variables of a RayExecutor, by the field that gives them."""
    return {
        "RayExecutor.env_vars": executor.env_vars,
        "RayExecutor.runtime_env['env_vars']": executor.runtime_env.get("env_vars") or {},
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
#: Every field that Ray's documentation lists.
_OF_RUNTIME_ENV = (
    *_ENVIRONMENTS,
    *_CONTAINERS,
    *_BESIDE_CONTAINER,
    *("py_executable", "worker_process_setup_hook", "nsight", "rocprof_sys", "java_jars"),
)
#: One string of a new process (MAX_ARG_STRLEN, execve(2)): Ray tries for ever to start its worker.
_VARIABLE_BYTES_MAX = 128 * 1024


class _Tool(Allowed):
    packages: list[str] | str


_Packages = Annotated[
    list[str] | str | _Tool,
    Field(
        description="allowed is a list of requirements, the path of a file of them, or a dict with "
        "one of these as 'packages'"
    ),
]


class _RuntimeEnvFields(Allowed):
    pip: _Packages = []
    uv: _Packages = []
    env_vars: _Variables = {}


def check_runtime_env(runtime_env: Mapping[str, Any], allow_unknown: bool = False) -> None:
    """Check the names of the fields, the values that are read here, and that Ray combines them."""
    values = {name: value for name, value in runtime_env.items() if value is not None}
    for name, value in values.items():
        if name in _PACKAGED:
            refuse(_field(name), value, "absent: the executor's packager says which code is sent")
        # Ray's own client adds some with an underscore.
        if name not in _OF_RUNTIME_ENV and name[:1] != "_" and not allow_unknown:
            raise ConfigError(
                f"RayExecutor.runtime_env has the field {name!r}, which Ray would pass over "
                f"silently; {meant(name, _OF_RUNTIME_ENV)} For a field of a newer Ray, or of a "
                "plug-in of your cluster, set RayExecutor(allow_unknown_runtime_env=True)."
            )
    _RuntimeEnvFields.check("RayExecutor.runtime_env", values)
    try:
        json.dumps(values)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "RayExecutor.runtime_env holds something that JSON cannot carry to the cluster: "
            f"{error}. Use texts, numbers, True, False, None, lists and dicts."
        ) from error
    for name, text in values.get("env_vars", {}).items():
        size_bytes = len(f"{name}={text}".encode(errors="surrogatepass")) + 1
        if size_bytes > _VARIABLE_BYTES_MAX:
            raise ConfigError(
                f"{_field('env_vars')}[{name!r}] has {size_bytes} bytes with its name; at most "
                f"{_VARIABLE_BYTES_MAX} are allowed, else no worker of Ray starts. Put it into a "
                "file."
            )
    several = [name for name in values if name in _ENVIRONMENTS]
    if len(several) > 1:
        raise ConfigError(
            f"RayExecutor.runtime_env has {' and '.join(several)}; Ray builds one environment "
            "for a task. Keep one of them: conda can list pip packages of its own."
        )
    for container in values.keys() & _CONTAINERS:
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
    for name in resolved.keys() & {"pip", "uv"}:
        value = resolved[name]
        if isinstance(value, dict):
            resolved[name] = {**value, "packages": _requirements(name, value["packages"])}
        else:
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
        if re.match(r"\s*(-c|--constraint)", line):
            raise ConfigError(
                f"{_field(name)} has the line {line!r}, whose file is not on the node. Write the "
                "constraints into the requirements."
            )
        # A line that names another file of them.
        other = re.match(r"\s*(?:-r|--requirement)(?:\s+|=|(?<=-r))(?P<path>[^\s#]+)", line)
        requirements += _requirements(name, other["path"], folder) if other else [line]
    return requirements


def _read(name: str, path: str, expected: str, parse: Callable[[str], _Value]) -> _Value:
    try:
        return parse(Path(path).read_text(encoding="utf-8"))
    except (OSError, TypeError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{_field(name)} names the file {path!r} in {Path.cwd()}, which cannot be read as "
            f"{expected}: {' '.join(str(error).split())}. It is read here, when the task is "
            "planned, not on the cluster."
        ) from error
