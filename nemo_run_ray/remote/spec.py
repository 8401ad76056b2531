"""The wire formats: specs that the client sends, rows of job tables and of drivers' status files.

Whoever answers may send anything as JSON, so rows are checked against shapes.

The specs are named tuples: each job imports this module before its command starts, and dataclasses
took a sixth of the time from Ray's shell to the command. So ``_replace`` makes a changed copy.
Annotations are not postponed, since ``NamedTuple`` would compile each one by itself.
"""

import collections.abc
import json
import re
import typing
from contextlib import suppress
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Set, Tuple, TypedDict, Union

#: Environment variable of a group's driver: the code archive of each role, when there are several.
CODE = "NEMO_RUN_RAY_CODE"
#: Port of a role's first replica on which its processes find each other; not the user's.
RENDEZVOUS = "_rendezvous"
#: Stands in a dispatched job's entrypoint for the id of the attempt.
SUBMISSION_ID = "@submission_id@"
#: A JSON object, or other values by their names.
Json = Dict[str, Any]
#: Environment variables.
Env = Mapping[str, str]
#: Default of the fields that hold a dict. All share it, since no spec is ever changed.
_EMPTY: Json = {}
_AnySpec = Union["JobSpec", "RoleSpec", "GroupSpec", "ArraySpec", "DispatchSpec"]


def env_key(name: str) -> str:
    """A name as part of a variable's name: upper case, ``_`` for all but letters and digits."""
    return re.sub(r"[^A-Z0-9]", "_", name.upper())


class JobSpec(NamedTuple):
    """One task as the node runs it. It names no experiment, so equal tasks make equal archives."""

    argv: Tuple[str, ...]
    #: Over the variables that Ray gave the job.
    env: Dict[str, str] = _EMPTY
    #: ``None`` is ``code/`` of the run directory.
    cwd: Optional[str] = None
    #: Its folder comes first on ``PATH``, as after an activation.
    python: Optional[str] = None
    grace_s: float = 10.0
    keep_run_dir: bool = False
    #: Ray's working directory holds the user's code.
    has_code: bool = False
    #: Names of the variables that arrive in an archive of their own.
    secrets: Tuple[str, ...] = ()
    login_shell: bool = False
    #: Shell commands that run before the command in the same shell.
    startup: Tuple[str, ...] = ()


class ProbeSpec(NamedTuple):
    """A question whose answer says that a service is ready.

    Its kind is ``port`` (it accepts connections), ``http`` (a GET of the path has the status) or
    ``command`` (it exits with 0 in the role's environment and folder).
    """

    kind: str
    #: Its number, or the name of one of the role's ports.
    port: Union[int, str] = 0
    path: str = "/"
    status: int = 200
    command: Tuple[str, ...] = ()
    interval_s: float = 1.0
    timeout_s: float = 600.0


class RoleSpec(NamedTuple):
    """One task of a group."""

    name: str
    task: JobSpec
    #: Each has a bundle of its own.
    replicas: int = 1
    #: In each replica.
    processes: int = 1
    #: The processes get ``RANK`` and its relatives; a launcher sets them itself.
    ranked: bool = False
    service: bool = False
    #: Further starts of one replica of a service.
    restarts: int = 0
    #: By name; 0 is a free one of the node.
    ports: Dict[str, int] = _EMPTY
    #: ``None`` is ready as soon as it runs.
    ready: Optional[ProbeSpec] = None
    #: Of one replica, by Ray's names; never empty.
    resources: Dict[str, float] = _EMPTY
    label_selector: Dict[str, str] = _EMPTY
    runtime_env: Json = _EMPTY
    #: ``SPREAD`` or ``STRICT_SPREAD`` when the replicas want nodes of their own in a group of
    #: another strategy.
    spread: str = ""


class GroupSpec(NamedTuple):
    """Roles that are placed together, all or none."""

    roles: Tuple[RoleSpec, ...]
    #: Of the placement group.
    strategy: str = "PACK"
    #: Wait for nodes to join when those that live can never host the group.
    wait_for_nodes: bool = False
    placing_timeout_s: Optional[float] = None
    #: Of the driver; it has ray.
    python: Optional[str] = None

    @property
    def secrets(self) -> Tuple[str, ...]:
        return tuple(sorted({name for role in self.roles for name in role.task.secrets}))

    @property
    def grace_s(self) -> float:
        return max(role.task.grace_s for role in self.roles)


class ArraySpec(NamedTuple):
    """Many elements of one task, in one job."""

    #: The host of elements: each element changes its task, its resources are those of one element.
    host: RoleSpec
    #: Path of the elements' file in the job's folder.
    elements: str
    #: Place of the first argument among the words of the command.
    args_at: int = 0
    #: ``command`` starts a process for each element; ``fork`` forks it, where the imports allow it,
    #: from one that has imported the configuration's modules; ``process`` starts a new one that
    #: imports them.
    runs: str = "command"
    max_in_flight: Optional[int] = None
    retries: int = 0
    permanent_exit_codes: Tuple[int, ...] = ()
    #: More failed elements end the array.
    max_failures: Optional[int] = None
    #: Of the driver; it has ray.
    python: Optional[str] = None

    @property
    def secrets(self) -> Tuple[str, ...]:
        return self.host.task.secrets

    @property
    def grace_s(self) -> float:
        return self.host.task.grace_s


class OutsideSpec(NamedTuple):
    """A job of another experiment on the same cluster that must have succeeded."""

    #: As that of its dispatcher, without the number of an attempt.
    id: str
    #: Of its submissions, which tell it from a stranger with the same id.
    nonces: Tuple[str, ...]
    #: Empty when it was submitted directly.
    dispatcher: str = ""


class DispatchedJobSpec(NamedTuple):
    """One job of a dispatch."""

    name: str
    #: Of its first attempt.
    id: str
    #: Of all of its attempts.
    nonce: str
    #: The request for an attempt; its entrypoint has ``SUBMISSION_ID`` for the id.
    body: Json
    #: Names of the jobs of the dispatch that must have succeeded.
    after: Tuple[str, ...] = ()
    outside: Tuple[OutsideSpec, ...] = ()
    retries: int = 0
    permanent_exit_codes: Tuple[int, ...] = ()
    pending_timeout_s: Optional[float] = None
    #: The time that an attempt needs.
    time_s: Optional[float] = None
    #: Names of the variables that every attempt gets in an archive of its own.
    secrets: Tuple[str, ...] = ()

    @property
    def shape(self) -> str:
        """A text that is equal for jobs that ask Ray for the same room."""
        asked = {key: value for key, value in self.body.items() if key.startswith("entrypoint_")}
        return json.dumps(asked, sort_keys=True)


def cancel_id(dispatcher: str) -> str:
    """Id whose claim cancels all of a dispatcher's jobs."""
    return f"{dispatcher}@cancel"


class DispatchSpec(NamedTuple):
    """The jobs of one experiment on one cluster, for the dispatcher."""

    #: The dispatcher's submission id, without the number of an attempt.
    id: str
    #: Of the dispatcher's attempts and of what cancels the dispatch.
    nonce: str
    #: Each after those that it depends on.
    jobs: Tuple[DispatchedJobSpec, ...]
    #: Ray's name of the cluster's life that the dispatch belongs to.
    session: str = ""
    #: Addresses to try for the dashboard, as seen from the head.
    dashboards: Tuple[str, ...] = ()
    #: ``None`` lets the dispatcher choose.
    max_in_flight: Optional[int] = None

    @property
    def cancel_id(self) -> str:
        return cancel_id(self.id)

    @property
    def ids(self) -> Set[str]:
        """First ids of its jobs, its dispatcher's, and those of jobs that it waits for."""
        outside = [upstream for job in self.jobs for upstream in job.outside]
        names = {name for upstream in outside for name in (upstream.id, upstream.dispatcher)}
        return {self.id, self.cancel_id, *(job.id for job in self.jobs), *names}


_KINDS: Json = {
    kind.__name__: kind for kind in (JobSpec, RoleSpec, GroupSpec, ArraySpec, DispatchSpec)
}


def to_json(spec: _AnySpec) -> str:
    """A spec as text, equal for equal specs."""
    return json.dumps({"kind": type(spec).__name__, **_plain(spec)}, indent=1, sort_keys=True)


def from_json(text: str) -> _AnySpec:
    """Inverse of ``to_json``.

    Raises:
        ValueError: it is of another version of this package.
    """
    values = json.loads(text)
    spec: _AnySpec = read(_KINDS.get(values.pop("kind", "")), values)
    return spec


def _plain(value: Any) -> Any:
    """A spec, or what is in one, as JSON has it: with names, where a tuple has places."""
    if hasattr(value, "_asdict"):
        return {name: _plain(entry) for name, entry in value._asdict().items()}
    return [_plain(entry) for entry in value] if isinstance(value, (tuple, list)) else value


def read(kind: Any, value: Any) -> Any:
    """A value of JSON as an annotation says: checked, with objects of the classes that it names.

    A dict of annotations stands for an object with at least these keys, a list of one for a list of
    such values, and ``float`` for a finite number.

    Raises:
        ValueError: it is another one.
    """
    if kind is Any or (kind is str and type(value) is str):  # most values of a job table
        return value
    origin, kinds = typing.get_origin(kind), typing.get_args(kind)
    if origin is Union or type(None) in kinds:  # ``X | None`` is of another class
        for each in kinds:
            with suppress(ValueError):
                return read(each, value)
    elif origin in (list, tuple) and isinstance(value, list):
        if origin is list or ... in kinds:
            kinds = kinds[:1] * len(value)
        if len(kinds) == len(value):
            return origin(map(read, kinds, value))
    elif isinstance(kind, list) and isinstance(value, list):
        return [read(kind[0], each) for each in value]
    elif isinstance(value, dict) and origin in (dict, collections.abc.Mapping):
        return {name: read(kinds[1], each) for name, each in value.items()}
    elif isinstance(value, dict) and isinstance(kind, dict):
        return {**value, **{name: read(each, value.get(name)) for name, each in kind.items()}}
    elif isinstance(value, dict) and hasattr(kind, "__annotations__"):
        hints = typing.get_type_hints(kind)
        try:
            if hasattr(kind, "__required_keys__"):  # rows, perhaps of a program of another version
                value = {name: value[name] for name in hints}
            return kind(**{name: read(hints.get(name, Any), each) for name, each in value.items()})
        except (KeyError, TypeError) as error:  # a field is missing, or unknown
            raise ValueError(f"{kind.__name__}: {error}") from error
    elif hasattr(kind, "__members__"):  # an enumeration
        return kind(value)
    elif kind in (int, float):
        if type(value) in (int, kind) and abs(value) <= _LARGEST[kind]:
            return value
    elif kind in (str, bool, dict, type(None)) and isinstance(value, kind):
        return value
    raise ValueError(f"expected is {getattr(kind, '__name__', kind)}, and this is {value!r:.80}")


def fits(value: Any, kind: Any) -> bool:
    """Whether a value of JSON can be read so."""
    try:  # quicker than ``suppress``
        read(kind, value)
        return True
    except ValueError:
        return False


# ---------------------------------------------------------------- rows


class JobRow(TypedDict, total=False):
    """The keys of a job in ``GET /api/jobs/`` that are read here; ``job_row`` leaves nulls out."""

    #: Absent from a job that was not submitted by the Jobs API.
    submission_id: str
    #: Ray's id of the driver that the job runs; absent if its command does not use Ray.
    job_id: str
    #: See ``status.FROM_RAY``.
    status: str
    entrypoint: str
    #: With the end of the log.
    message: str
    #: See ``status.FROM_RAY_ERROR``.
    error_type: str
    #: Milliseconds since the epoch; when it was posted.
    start_time: int
    end_time: int
    metadata: Mapping[str, str]
    runtime_env: Dict[str, Any]
    driver_node_id: str
    driver_exit_code: int


#: Keys in a job's metadata: the nonce of its submission, and the lock of its end record, see
#: ``end_record.py``.
NONCE_KEY, LOCK_KEY = "nemo_run_ray", "nemo_run_ray_lock"
#: A job table: rows by submission id.
JobRows = Mapping[str, JobRow]
#: The largest numbers that are believed: of whole ones the milliseconds from the epoch to 2100.
_LARGEST: Dict[Any, float] = {int: 4_102_444_800_000, float: 1e300}


def job_row(value: Any) -> Optional[JobRow]:
    """A row of a job table with only the values of the right types.

    ``None`` for a program that was not submitted as a job.

    Raises:
        ValueError: it is no row at all.
    """
    row: Any = {
        name: each
        for name, each in read(dict, value).items()
        if name in _JOB and each is not None and fits(each, _JOB[name])
    }
    return row if row.get("submission_id") else None


def job_rows(values: Any) -> List[JobRow]:
    """The rows of a job table that are of submitted jobs.

    Raises:
        ValueError: it is no job table.
    """
    return [row for row in map(job_row, read(List[Any], values)) if row is not None]


def rows_in(jobs_json: str) -> JobRows:
    """The rows of a kept job table, by submission id; empty for a text that is none."""
    with suppress(ValueError):
        return {str(row["submission_id"]): row for row in job_rows(json.loads(jobs_json))}
    return {}


def nonce_of(row: JobRow) -> str:
    """The nonce of the submission that made a row of Ray's job table; empty if it has none."""
    return (row.get("metadata") or {}).get(NONCE_KEY, "")


def status_file_name(submission_id: str) -> str:
    """Name of the file with the rows of a group or an array, in Ray's folder of logs."""
    return f"nemo_run_ray-{submission_id}.json"


class ReplicaRow(TypedDict):
    """One replica of a group, as its driver last saw it."""

    role: str
    replica: int
    service: bool
    #: A ``ReplicaState``'s value.
    state: str
    #: Empty before it has a node.
    node: str
    host: str
    address: str
    exit_code: Optional[int]
    #: The last answer to the probe of a service that is not ready.
    waits_for: str


class ArrayRows(TypedDict):
    """An array, as its driver last saw it."""

    #: The number of all.
    elements: int
    succeeded: int
    failed: int
    cancelled: int
    running: int
    waiting: int
    #: The rate at which elements have ended lately.
    elements_per_s: float
    #: Seconds until the last one has ended, at that rate; ``None`` when none has ended.
    left_s: Optional[float]
    #: Index, exit code and reason of the first elements that failed.
    failures: List[Tuple[int, Optional[int], str]]


class GroupRows(TypedDict):
    """A group, as its driver last saw it."""

    #: A ``Phase``'s value.
    phase: str
    #: Empty when it has its nodes.
    waits_for_room: str
    roles: List[ReplicaRow]


#: The types of a row's values, of which a wrong one is left out.
_JOB = typing.get_type_hints(JobRow)
