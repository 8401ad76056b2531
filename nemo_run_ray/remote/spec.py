"""The wire formats: specs that the client sends, rows of job tables and of drivers' status files.

Whoever answers may send anything as JSON, so rows are checked against shapes.

The specs are named tuples: each job imports this module before its command starts, and dataclasses
took a sixth of the time from Ray's shell to the command. So ``_replace`` makes a changed copy.
"""

from __future__ import annotations

import collections.abc
import contextlib
import json
import re
import typing
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Set, Tuple, TypedDict, Union

#: Raised when a field changes its meaning. The client sends the remote half along, so it only
#: differs when a user mixes archives by hand.
VERSION = 3
#: Environment variable of a group's driver: the code archive of each role, when there are several.
CODE = "NEMO_RUN_RAY_CODE"
#: Port of a role's first replica on which its processes find each other; not the user's.
RENDEZVOUS = "_rendezvous"
#: Stands in a dispatched job's entrypoint for the id of the attempt.
SUBMISSION_ID = "@submission_id@"
#: Default of the fields that hold a dict. All share it, since no spec is ever changed.
_EMPTY: Dict[str, Any] = {}
_AnySpec = Union["JobSpec", "RoleSpec", "GroupSpec", "ArraySpec", "DispatchSpec"]


def env_key(name: str) -> str:
    """A name as part of a variable's name: upper case, ``_`` for all but letters and digits."""
    return re.sub(r"[^A-Z0-9]", "_", name.upper())


class JobSpec(NamedTuple):
    """One task as the node runs it. It names no experiment, so equal tasks make equal archives.

    Attributes:
        argv: the command, word by word; no shell ever reads it as text.
        env: variables for the command, over those that Ray gave the job.
        cwd: absolute folder to run in, or ``None`` for ``code/`` of the run directory.
        python: interpreter asked for; its folder comes first on ``PATH``, as after an activation.
        grace_s: seconds between SIGTERM and SIGKILL.
        keep_run_dir: leave the run directory on the node.
        has_code: Ray's working directory holds the user's code.
        secrets: names of the variables that arrive in an archive of their own.
        login_shell: a login shell starts the command, so that the profile sets ``PATH`` and others.
        startup: shell commands that run before the command in the same shell; each must succeed.
    """

    argv: Tuple[str, ...]
    env: Dict[str, str] = _EMPTY
    cwd: Optional[str] = None
    python: Optional[str] = None
    grace_s: float = 10.0
    keep_run_dir: bool = False
    has_code: bool = False
    secrets: Tuple[str, ...] = ()
    login_shell: bool = False
    startup: Tuple[str, ...] = ()


class ProbeSpec(NamedTuple):
    """A question whose answer says that a service is ready.

    Attributes:
        kind: ``port`` (it accepts connections), ``http`` (a GET has the status) or ``command`` (it
            exits with 0).
        port: its number, or the name of one of the role's ports.
        path: of the GET.
        status: the HTTP status that the answer must have.
        command: run in the role's environment and folder.
        interval_s: seconds from one try to the next.
        timeout_s: seconds from the service's start until the group is given up.
    """

    kind: str
    port: Union[int, str] = 0
    path: str = "/"
    status: int = 200
    command: Tuple[str, ...] = ()
    interval_s: float = 1.0
    timeout_s: float = 600.0


class RoleSpec(NamedTuple):
    """One task of a group.

    Attributes:
        name: of the role.
        task: what each of its processes runs.
        replicas: copies, each with a bundle of its own.
        processes: in each replica.
        ranked: the processes get ``RANK`` and its relatives; a launcher sets them itself.
        service: runs until the primaries are done.
        restarts: how often one replica of a service is started again.
        ports: by name; 0 is a free one of the node.
        ready: ``None`` is ready as soon as it runs.
        resources: what a replica reserves, by Ray's names; never empty.
        label_selector: nodes that may host it.
        runtime_env: Ray's, for the replicas.
        spread: ``SPREAD`` or ``STRICT_SPREAD`` when the replicas want nodes of their own in a group
            of another strategy.
    """

    name: str
    task: JobSpec
    replicas: int = 1
    processes: int = 1
    ranked: bool = False
    service: bool = False
    restarts: int = 0
    ports: Dict[str, int] = _EMPTY
    ready: Optional[ProbeSpec] = None
    resources: Dict[str, float] = _EMPTY
    label_selector: Dict[str, str] = _EMPTY
    runtime_env: Dict[str, Any] = _EMPTY
    spread: str = ""


class GroupSpec(NamedTuple):
    """Roles that are placed together, all or none.

    Attributes:
        roles: in the order of the tasks.
        strategy: of the placement group.
        wait_for_nodes: wait for nodes to join when those that are there can never host the group.
        placing_timeout_s: give up when not placed by then; ``None`` waits for ever.
        python: interpreter of the driver; it has ray.
    """

    roles: Tuple[RoleSpec, ...]
    strategy: str = "PACK"
    wait_for_nodes: bool = False
    placing_timeout_s: Optional[float] = None
    python: Optional[str] = None

    @property
    def secrets(self) -> Tuple[str, ...]:
        """The names of all roles' secrets."""
        return tuple(sorted({name for role in self.roles for name in role.task.secrets}))

    @property
    def grace_s(self) -> float:
        """Seconds that ending the group may take: those of its slowest role."""
        return max(role.task.grace_s for role in self.roles)


class ArraySpec(NamedTuple):
    """Many elements of one task, in one job.

    Attributes:
        host: a host of elements as a role: its task is what each element changes, its resources are
            those of one element.
        elements: path of the elements' file in the job's folder.
        targets: what each value of an element changes, its kind and its name or place.
        runs: ``command`` starts a process for each element; ``fork`` forks it, where the imports
            allow it, from one that has imported the configuration's modules; ``process`` starts a
            new one that imports them.
        max_in_flight: so many elements at a time at most; ``None`` is what the nodes have room for.
        retries: further attempts of an element after a failure.
        permanent_exit_codes: the failures that no further attempt would change.
        max_failures: end the array when more elements have failed; ``None`` runs all.
        python: interpreter of the driver; it has ray.
    """

    host: RoleSpec
    elements: str
    targets: Tuple[Tuple[Any, ...], ...] = ()
    runs: str = "command"
    max_in_flight: Optional[int] = None
    retries: int = 0
    permanent_exit_codes: Tuple[int, ...] = ()
    max_failures: Optional[int] = None
    python: Optional[str] = None

    @property
    def secrets(self) -> Tuple[str, ...]:
        """The names of the elements' secrets."""
        return self.host.task.secrets

    @property
    def grace_s(self) -> float:
        """Seconds that ending an element may take."""
        return self.host.task.grace_s


class OutsideSpec(NamedTuple):
    """A job of another experiment on the same cluster that must have succeeded.

    Attributes:
        id: its submission id, without the number of an attempt.
        nonces: of its submissions, which tell it from a stranger with the same id.
        dispatcher: id of its own dispatcher, without the number of an attempt; empty when it was
            submitted directly.
    """

    id: str
    nonces: Tuple[str, ...]
    dispatcher: str = ""


class DispatchedJobSpec(NamedTuple):
    """One job of a dispatch.

    Attributes:
        name: in its experiment.
        id: submission id of its first attempt.
        nonce: of all of its attempts.
        body: of the request for an attempt; its entrypoint has ``SUBMISSION_ID`` for the id.
        after: names of the jobs of the dispatch that must have succeeded.
        outside: jobs of other experiments that must have succeeded.
        retries: further attempts after a failure.
        permanent_exit_codes: the failures that no further attempt would change.
        pending_timeout_s: seconds that an attempt may wait for room; ``None`` is no limit.
        time_s: seconds that an attempt needs; ``None`` is not known.
        secrets: names of the variables that every attempt gets in an archive of its own.
    """

    name: str
    id: str
    nonce: str
    body: Dict[str, Any]
    after: Tuple[str, ...] = ()
    outside: Tuple[OutsideSpec, ...] = ()
    retries: int = 0
    permanent_exit_codes: Tuple[int, ...] = ()
    pending_timeout_s: Optional[float] = None
    time_s: Optional[float] = None
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
    """The jobs of one experiment on one cluster, for the dispatcher.

    Attributes:
        id: the dispatcher's submission id, without the number of an attempt.
        nonce: of the dispatcher's attempts and of what cancels the dispatch.
        jobs: the jobs, each after those that it depends on.
        session: Ray's name of the cluster's life that the dispatch belongs to.
        dashboards: addresses to try for the dashboard, as seen from the head.
        max_in_flight: so many jobs at once at most; ``None`` lets the dispatcher choose.
    """

    id: str
    nonce: str
    jobs: Tuple[DispatchedJobSpec, ...]
    session: str = ""
    dashboards: Tuple[str, ...] = ()
    max_in_flight: Optional[int] = None

    @property
    def cancel_id(self) -> str:
        """The id whose claim cancels all of it."""
        return cancel_id(self.id)

    @property
    def ids(self) -> Set[str]:
        """First ids of its jobs, its dispatcher's, and those of jobs that it waits for."""
        outside = [upstream for job in self.jobs for upstream in job.outside]
        names = {name for upstream in outside for name in (upstream.id, upstream.dispatcher)}
        return {self.id, self.cancel_id, *(job.id for job in self.jobs), *names}


_KINDS: Dict[str, Any] = {
    kind.__name__: kind for kind in (JobSpec, RoleSpec, GroupSpec, ArraySpec, DispatchSpec)
}


def to_json(spec: _AnySpec) -> str:
    """A spec as text, equal for equal specs."""
    values = {"version": VERSION, "kind": type(spec).__name__, **_plain(spec)}
    return json.dumps(values, indent=1, sort_keys=True)


def from_json(text: str) -> _AnySpec:
    """Inverse of ``to_json``.

    Raises:
        ValueError: the text is of another version or has unknown fields.
    """
    values = read({"version": object, "kind": object}, json.loads(text))
    version, kind = values.pop("version"), values.pop("kind")
    if version != VERSION or kind not in _KINDS:
        raise ValueError(
            f"{kind!r} spec of version {version!r}; this code reads {sorted(_KINDS)} of version "
            f"{VERSION}"
        )
    spec: _AnySpec = read(_KINDS[kind], values)
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
    origin, kinds = typing.get_origin(kind), typing.get_args(kind)
    if kind in (Any, object):
        return value
    if origin is Union or type(None) in kinds:  # ``X | None`` is of another class
        for each in kinds:
            with contextlib.suppress(ValueError):
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
        return _made(kind, value)
    elif hasattr(kind, "__members__"):  # an enumeration
        return kind(value)
    elif kind in (int, float):
        is_number = type(value) is int or (kind is float and type(value) is float)
        if is_number and abs(value) < (2**63 if kind is int else _NUMBER_MAX):  # no NaN
            return value
    elif kind in (str, bool, dict, type(None)) and isinstance(value, kind):
        return value
    raise ValueError(f"expected is {getattr(kind, '__name__', kind)}, and this is {value!r:.80}")


def _made(kind: Any, values: Dict[str, Any]) -> Any:
    hints = typing.get_type_hints(kind)
    if hasattr(kind, "__required_keys__"):  # rows, perhaps of a program of another version
        values = {name: values[name] for name in hints if name in values}
        missing = set(kind.__required_keys__) - set(values)
        if missing:
            raise ValueError(f"{kind.__name__} without {sorted(missing)}")
    unknown = set(values) - set(hints)
    if unknown:
        raise ValueError(f"{kind.__name__} with unknown fields {sorted(unknown)}")
    try:
        return kind(**{name: read(hints[name], each) for name, each in values.items()})
    except TypeError as error:
        raise ValueError(f"{kind.__name__}: {error}") from error


def fits(value: Any, kind: Any) -> bool:
    """Whether a value of JSON can be read so."""
    with contextlib.suppress(ValueError):
        read(kind, value)
        return True
    return False


# ---------------------------------------------------------------- rows


class JobRow(TypedDict, total=False):
    """A job as ``GET /api/jobs/`` gives it: those of its keys that are read here.

    Keys:
        submission_id: ``None`` of a job that was not submitted by the Jobs API.
        job_id: Ray's number of the program that it runs; ``None`` of one that is not Ray's.
        status: a word of Ray's, see ``status.FROM_RAY``.
        message: why, in Ray's words, with the end of the log.
        error_type: of a failure, see ``status.FROM_RAY_ERROR``.
        start_time, end_time: milliseconds since the epoch; when it was posted, and when it ended.
        driver_node_id: hexadecimal id of the node of its driver.
        driver_exit_code: of its command.
    """

    submission_id: Optional[str]
    job_id: Optional[str]
    status: str
    entrypoint: str
    message: Optional[str]
    error_type: Optional[str]
    start_time: Optional[int]
    end_time: Optional[int]
    metadata: Optional[Mapping[str, str]]
    runtime_env: Optional[Dict[str, Any]]
    driver_node_id: Optional[str]
    driver_exit_code: Optional[int]


#: Keys in a job's metadata: the nonce of its submission, and the lock of its end record, see
#: ``end_record.py``.
NONCE_KEY, LOCK_KEY = "nemo_run_ray", "nemo_run_ray_lock"
#: A job table: rows by submission id.
JobRows = Mapping[str, JobRow]
#: The largest number of milliseconds since the epoch that is taken for a time: the year 2100.
_TIME_MAX_MS = 4_102_444_800_000
#: Larger numbers of JSON are no floats.
_NUMBER_MAX = 1e300


def job_row(value: Any) -> Optional[JobRow]:
    """A row of a job table with only the values of the right types.

    ``None`` for a program that was not submitted as a job.

    Raises:
        ValueError: it is no row at all.
    """
    row: Any = {
        name: each
        for name, each in read(Dict[str, Any], value).items()
        if name in _JOB and each is not None and fits(each, _JOB[name])
    }
    for name in ("start_time", "end_time"):
        if not 0 <= row.get(name, 0) <= _TIME_MAX_MS:
            del row[name]
    return row if row.get("submission_id") else None


def job_rows(values: Any) -> List[JobRow]:
    """The rows of a job table that are of submitted jobs.

    Raises:
        ValueError: it is no job table.
    """
    return [row for row in map(job_row, read(List[Any], values)) if row is not None]


def rows_in(jobs_json: str) -> JobRows:
    """The rows of a kept job table, by submission id; empty for a text that is none."""
    with contextlib.suppress(ValueError):
        return {str(row["submission_id"]): row for row in job_rows(json.loads(jobs_json))}
    return {}


def nonce_of(row: JobRow) -> str:
    """The nonce of the submission that made a row of Ray's job table; empty if it has none."""
    return str((row.get("metadata") or {}).get(NONCE_KEY, ""))


def lock_of_row(row: JobRow) -> str:
    """The lock of a job's end record; empty if nothing can prove its end."""
    return str((row.get("metadata") or {}).get(LOCK_KEY, ""))


def status_file_name(submission_id: str) -> str:
    """Name of the file with the rows of a group or an array, in Ray's folder of logs."""
    return f"nemo_run_ray-{submission_id}.json"


class ReplicaRow(TypedDict):
    """One replica of a group, as its driver last saw it.

    Keys:
        state: a ``ReplicaState``'s value.
        node, host, address: of its node; empty before it has one.
        exit_code: ``None`` before its end.
        waits_for: what the probe of a service got last, while it is not ready.
    """

    role: str
    replica: int
    service: bool
    state: str
    node: str
    host: str
    address: str
    exit_code: Optional[int]
    waits_for: str


class ArrayRows(TypedDict):
    """An array, as its driver last saw it.

    Keys:
        elements: how many there are.
        elements_per_s: how many ended in a second, of late.
        left_s: seconds until the last one has ended, at that rate; ``None`` when none has ended.
        failures: index, exit code and reason of the first elements that failed.
    """

    elements: int
    succeeded: int
    failed: int
    cancelled: int
    running: int
    waiting: int
    elements_per_s: float
    left_s: Optional[float]
    failures: List[Tuple[int, Optional[int], str]]


class GroupRows(TypedDict):
    """A group, as its driver last saw it.

    Keys:
        phase: a ``Phase``'s value.
        waits_for_room: what does not fit, in words; empty when it has its nodes.
        roles: one row for every replica.
    """

    phase: str
    waits_for_room: str
    roles: List[ReplicaRow]


#: The types of a row's values, of which a wrong one is left out.
_JOB = typing.get_type_hints(JobRow)
