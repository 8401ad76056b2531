"""The wire format: what the client tells the half that runs on the cluster.

The specs are named tuples: each job imports this module before its command starts, and dataclasses
took a sixth of the time from Ray's shell to the command. So ``_replace`` makes a changed copy.
"""

from __future__ import annotations

import json
import re
import typing
from typing import Any, Dict, NamedTuple, Optional, Set, Tuple, Union

#: Raised when a field changes its meaning. The client sends the remote half along, so it only
#: differs when a user mixes archives by hand.
VERSION = 2
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

    def to_json(self) -> str:
        return _dump("task", self)


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

    def to_json(self) -> str:
        return _dump("role", self)


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

    def to_json(self) -> str:
        return _dump("group", self)


class ArraySpec(NamedTuple):
    """Many elements of one task, in one job.

    Attributes:
        host: a host of elements as a role: its task is what each element changes, its resources are
            those of one element.
        elements: path of the elements' file in the job's folder.
        targets: what each value of an element changes, as ``array.elements.Target``.
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

    def to_json(self) -> str:
        return _dump("array", self)


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

    def to_json(self) -> str:
        return _dump("dispatch", self)


def from_json(text: str) -> _AnySpec:
    """Inverse of every ``to_json``.

    Raises:
        ValueError: the text is of another version or has unknown fields.
    """
    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError(f"a spec is a JSON object, and this is a {type(values).__name__}")
    version, kind = values.pop("version", None), values.pop("kind", None)
    kinds = {
        "task": JobSpec,
        "role": RoleSpec,
        "group": GroupSpec,
        "array": ArraySpec,
        "dispatch": DispatchSpec,
    }
    if version != VERSION or kind not in kinds:
        raise ValueError(
            f"{kind!r} spec of version {version!r}; this code reads {sorted(kinds)} of version "
            f"{VERSION}"
        )
    found: _AnySpec = _made(kinds[kind], values)
    return found


def _dump(kind: str, spec: Any) -> str:
    values = {"version": VERSION, "kind": kind, **_plain(spec)}
    return json.dumps(values, indent=1, sort_keys=True)


def _plain(value: Any) -> Any:
    """A spec, or what is in one, as JSON has it: with names, where a tuple has places."""
    if _is_spec(type(value)):
        return {name: _plain(entry) for name, entry in value._asdict().items()}
    return [_plain(entry) for entry in value] if isinstance(value, (tuple, list)) else value


def _is_spec(kind: Any) -> bool:
    """Whether it is one of this module's classes; other named tuples are tuples."""
    return hasattr(kind, "_fields") and kind.__module__ == __name__


def _made(kind: Any, value: Any) -> Any:
    """A plain value as what an annotation says: a spec, a tuple, or the value itself.

    Raises:
        ValueError: a spec has no such field, or needs one that is not there.
    """
    if typing.get_origin(kind) is Union:  # Optional
        return None if value is None else _made(typing.get_args(kind)[0], value)
    if typing.get_origin(kind) is tuple:
        return tuple(_made(typing.get_args(kind)[0], entry) for entry in value)
    if not _is_spec(kind):
        return value
    hints = typing.get_type_hints(kind)
    unknown = set(value) - set(hints)
    if unknown:
        raise ValueError(f"{kind.__name__} with unknown fields {sorted(unknown)}")
    try:
        return kind(**{name: _made(hints[name], entry) for name, entry in value.items()})
    except TypeError as error:
        raise ValueError(f"{kind.__name__}: {error}") from error
