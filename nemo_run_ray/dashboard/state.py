"""What Ray's dashboard and state API tell beside the jobs. It explains; nothing is decided by it.

Seen on Ray 2.60:

- ``/nodes?view=summary`` has every node with host, address, labels, totals, memory and disk, and in
  ``nodeLogicalResources`` what is in use, as text. That text is there under both of Ray's
  autoscalers; ``/api/cluster_status`` has numbers, but under the older one only. It is up to 5 s
  old. Without ``nocache=1`` the dashboard gives the answer that it made for the last request, be
  that minutes ago, and makes a new one for the next.
- Ray writes the keys of that answer, names of labels and resources among them, in its own style:
  ``gpu_kind`` is ``gpuKind`` there. ``/api/v0/nodes?detail=true`` has them as they are, and labels
  and totals only.
- ``/api/v0/actors?detail=true`` has what every actor reserves and where. A job reserves by an
  actor of Ray's, which has the job's id in its name.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import httpx

from nemo_run_ray.clusters import Dashboard
from nemo_run_ray.dashboard.http import MALFORMED, READ_S, Cached, Http
from nemo_run_ray.errors import ClusterError, NemoRunRayError, Unauthorised
from nemo_run_ray.fields import brings_python
from nemo_run_ray.remote.array.elements import file_of
from nemo_run_ray.remote.dashboard import ANSWER_S, LINES, LOG_FILE, log_query
from nemo_run_ray.remote.fit import Node, key_of
from nemo_run_ray.remote.rows import JobRow, fits, job_rows, status_file_name
from nemo_run_ray.remote.status import JobState, JobStatus, Reason, cause_of, is_active

#: Seconds until an answer must have come of which the next look may do without, of the two that
#: explain why a job waits for room, and of the five of an inspection, which are asked at once.
_EXPLAIN_S, _ROOM_S, _INSPECT_S = 5.0, 3.0, 4.0
#: Ray's own limit of rows.
_ROWS_MAX = "10000"
#: Cache lifetimes of what a cluster has, of its runtime environments, and of both when it does not
#: say, or builds none: the state API asks every node.
_ROOM_AGE_S, _BUILDS_AGE_S, _NOTHING_AGE_S = 5.0, 3.0, 15.0
_LIVING = {"filter_keys": "state", "filter_predicates": "=", "filter_values": "ALIVE"}
_T = TypeVar("_T")

#: Name of the actor that Ray starts for a job, before the job's submission id.
_SUPERVISOR = "_ray_internal_job_actor_"
#: A line of what is in use: ``1.0/2.0 CPU (0.5 used of 1.0 reserved in placement groups)``.
_IN_USE = re.compile(
    r"(?P<used>[\d.e+-]+\w*?)/(?P<total>[\d.e+-]+\w*?) (?P<name>.+?)"
    r"(?: \((?P<grouped>\S+) used of (?P<reserved>\S+) reserved in placement groups\))?"
)
_AMOUNT = re.compile(r"(-?[\d.]+(?:e[+-]?\d+)?)([KMGTP]i)?B?")
_UNITS = {None: 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
#: A resource of a bundle of a placement group, or of any of its bundles.
_OF_GROUP = re.compile(r"(?P<name>.+)_group_(?:\d+_)?[0-9a-f]{16,}")
#: Resources that nobody asks for: one for each node, and what Ray needs for itself.
_HIDDEN = re.compile(r"node:|object_?[sS]tore_?[mM]emory$|bundle$")
_HEAD = ("node:__internal_head__", "node:InternalHead")


@dataclass(frozen=True)
class Holding:
    """What one actor reserves on one node.

    Attributes:
        node_id: of the node.
        submission_id: of the job that it was started for; empty of a program's own actors.
        job_id: Ray's number of the program that made it.
        resources: by name; those of a placement group's bundle under their plain names.
        is_grouped: they are of a placement group.
    """

    node_id: str
    submission_id: str
    job_id: str
    resources: Mapping[str, float]
    is_grouped: bool


def nodes_of_summary(answer: Mapping[str, Any]) -> list[Node]:
    """The living nodes of ``/nodes?view=summary``.

    Raises:
        KeyError, TypeError, ValueError: the answer has another form.
    """
    data = answer["data"]
    in_use = _texts(data.get("nodeLogicalResources"))
    return [
        _node(row, in_use.get(row["raylet"]["nodeId"]))
        for row in data["summary"]
        if row["raylet"].get("state") == "ALIVE"
    ]


def nodes_of_table(rows: Iterable[Mapping[str, Any]]) -> list[Node]:
    """The living nodes of ``/api/v0/nodes``, of which it is not told what is free."""
    return [
        Node(
            node_id=str(row["node_id"]),
            host=_text(row.get("node_name")),
            address=_text(row.get("node_ip")),
            labels=_texts(row.get("labels")),
            resources=_shown(_amounts(row.get("resources_total"))),
            is_head=bool(row.get("is_head_node")),
        )
        for row in rows
        if row["state"] == "ALIVE"
    ]


def with_names(nodes: Iterable[Node], table: Iterable[Node]) -> list[Node]:
    """The nodes of the summary with labels and totals under the names that the table has."""
    named = {node.node_id: node for node in table}
    return [
        replace(node, labels=named[node.node_id].labels, resources=named[node.node_id].resources)
        if node.node_id in named
        else node
        for node in nodes
    ]


def holdings_of(rows: Iterable[Mapping[str, Any]]) -> list[Holding]:
    """What the living actors of ``/api/v0/actors?detail=true`` reserve."""
    return [
        Holding(
            node_id=str(row["node_id"]),
            submission_id=name.removeprefix(_SUPERVISOR) if name.startswith(_SUPERVISOR) else "",
            job_id=_text(row.get("job_id")),
            resources=_ungrouped(_amounts(row.get("required_resources"))),
            is_grouped=bool(row.get("placement_group_id")),
        )
        for row in rows
        if row.get("state") == "ALIVE" and row.get("node_id")
        for name in [_text(row.get("name"))]
    ]


# ---------------------------------------------------------------------- one row


def _node(row: Mapping[str, Any], in_use: str | None) -> Node:
    raylet = row["raylet"]
    told = total = _amounts(raylet.get("resourcesTotal"))
    free: dict[str, float] | None = None
    grouped: dict[str, float] = {}
    if in_use is not None:
        names, held, grouped = _held(in_use)
        # The text rounds amounts of memory; its names are as they were given.
        total = {name: told.get(key_of(name), amount) for name, amount in names.items()}
        free = {name: max(0.0, total[name] - held[name]) for name in total}
    memory: Any = row.get("mem")
    return Node(
        node_id=str(raylet["nodeId"]),
        host=_text(row.get("hostname")) or _text(raylet.get("nodeManagerHostname")),
        address=_text(row.get("ip")) or _text(raylet.get("nodeManagerAddress")),
        labels=_texts(raylet.get("labels")),
        resources=_shown(total),
        free=None if free is None else _shown(free),
        grouped=grouped,
        is_head=bool(raylet.get("isHeadNode")) or any(name in told for name in _HEAD),
        memory=(float(memory[0]), float(memory[1])) if fits(memory, [float]) else None,
        disk=_disk(row.get("disk") or {}, _text(raylet.get("tempDir")) or "/tmp"),
    )


def _held(in_use: str) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Total, what is held, and what placement groups reserve, by resource.

    Ray's first number counts of placement groups what is used in them, not what they reserve.
    """
    total, held, grouped = {}, {}, {}
    for line in in_use.splitlines():
        found = _IN_USE.fullmatch(line.strip())
        if found is None:
            continue
        name = found["name"]
        total[name], held[name] = _amount(found["total"]), _amount(found["used"])
        if found["reserved"]:
            grouped[name] = _amount(found["reserved"])
            held[name] += grouped[name] - _amount(found["grouped"])
    return total, held, grouped


def _amount(text: str) -> float:
    found = _AMOUNT.fullmatch(text)
    amount = float(found[1]) * _UNITS[found[2]] if found else math.inf
    if not math.isfinite(amount):
        raise ValueError(f"{text!r} is no amount of a resource")
    return amount


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _texts(value: Any) -> dict[str, str]:
    return value if fits(value, {str: str}) else {}


def _amounts(value: Any) -> dict[str, float]:
    return dict(value) if fits(value, {str: float}) else {}


def _ungrouped(resources: Mapping[str, float]) -> dict[str, float]:
    """Amounts under their plain names: a bundle's are there twice, with and without its number."""
    found: dict[str, float] = {}
    for name, amount in resources.items():
        of_group = _OF_GROUP.fullmatch(name)
        plain = of_group["name"] if of_group else name
        found[plain] = max(found.get(plain, 0.0), amount)
    return _shown(found)


def _shown(resources: Mapping[str, float]) -> dict[str, float]:
    return {name: amount for name, amount in resources.items() if not _HIDDEN.match(name)}


def _disk(disks: Mapping[str, Any], folder: str) -> tuple[str, float, float] | None:
    for path in (folder, "/tmp", "/"):
        found: Any = disks.get(key_of(path))
        if fits(found, {"free": float, "used": float}):
            return path, float(found["free"]), float(found["used"])
    return None


# ---------------------------------------------------------------------- what one cluster tells


@dataclass(frozen=True)
class AliveNodes:
    """The nodes that live.

    Attributes:
        ids: of all of them.
        head_since: seconds since the epoch, when the head's Ray was started; 0 if it is not known.
    """

    ids: set[str]
    head_since: float = 0.0


@dataclass(frozen=True)
class ClusterRoom:
    """What a cluster has, and who holds it.

    Attributes:
        nodes: those that live.
        holdings: what is held on each node, by its id; ``None`` when the cluster does not say.
        told: why who asks for something waits, in a reason and the words before and after since
            when; filled as it is asked for, since many tasks ask for the same.
    """

    nodes: tuple[Node, ...]
    holdings: Mapping[str, Sequence[Holding]] | None = None
    told: dict[Hashable, tuple[Reason, str, str] | None] = field(default_factory=dict)

    @classmethod
    def of(cls, nodes: Iterable[Node], holdings: Iterable[Holding] | None) -> ClusterRoom:
        """The room of these nodes, with what is held on any of them."""
        if holdings is None:
            return cls(tuple(nodes))
        by_node: dict[str, list[Holding]] = {}
        for holding in holdings:
            by_node.setdefault(holding.node_id, []).append(holding)
        return cls(tuple(nodes), by_node)


class StateApi:
    """What one cluster tells of its nodes, their files and what they build."""

    def __init__(self, http: Http) -> None:
        self._http = http
        self._room = Cached(self._ask_room, _ROOM_AGE_S, _NOTHING_AGE_S)
        self._builds = Cached(self._ask_builds, _BUILDS_AGE_S, _NOTHING_AGE_S)

    def alive_nodes(self) -> AliveNodes | None:
        """The nodes that live; ``None`` when the cluster does not say."""
        try:
            rows = self._rows("nodes", READ_S, detail="true")
            if rows is None:
                return None
            alive = [row for row in rows if row.get("state") == "ALIVE"]
            heads = [row.get("start_time_ms") for row in alive if row.get("is_head_node")]
            started: int = max((time or 0 for time in heads if fits(time, int)), default=0)
            return AliveNodes({str(row["node_id"]) for row in alive}, started / 1000)
        except (ClusterError, KeyError):
            return None

    def last_lines(self, node: str, submission_id: str, count: int) -> list[str]:
        """The end of a job's log."""
        query = log_query(node, submission_id, count)
        return self._told_log(query).splitlines()[-count:]

    def log_end(self, node: str, submission_id: str) -> str | None:
        """The end of a job's log; ``None`` when it cannot be had now."""
        query = {**log_query(node, submission_id, LINES), "timeout": str(ANSWER_S)}
        try:
            return self._told_log(query, 2.0 * ANSWER_S) or None
        except ClusterError:
            return None

    def rows(self, node: str, submission_id: str) -> Any:
        """What the driver of a group or of an array wrote, or anything else that is JSON; ``None``
        when there is nothing of it."""
        text = self._log_file(node, status_file_name(submission_id), -1)
        # Without one these are Ray's own words, about a file that is not there.
        return _understood(lambda: json.loads(text)) if text else None

    def array_file(self, node: str, submission_id: str, kind: str) -> list[str]:
        """The lines of a file that the driver of an array writes; Ray's words when it is not there.

        Args:
            node: id of the driver's node.
            submission_id: of any attempt.
            kind: as for ``file_of``.
        """
        return self._log_file(node, file_of(submission_id, kind), -1).splitlines()

    def explain_build(self, row: JobRow, status: JobStatus) -> JobStatus:
        """The status of a pending job with how far Ray is with its runtime environment.

        Args:
            row: the job in Ray's table.
            status: what the row says.
        """
        runtime_env = row.get("runtime_env") or {}
        if status.state is not JobState.PENDING or not brings_python(runtime_env):
            return status
        try:
            builds = self._builds.get()
        except NemoRunRayError:
            return status
        own = [build for build in builds if _key(build["runtime_env"]) == _key(runtime_env)]
        if not own:
            return status
        node, error = f"on node {own[-1]['node_id'][:12]}", own[-1].get("error")
        if own[-1].get("success") is False:  # the job table has it some seconds later
            detail = f"Ray failed to build its runtime environment {node}: {cause_of(str(error))}"
            return JobStatus(JobState.PENDING, Reason.RUNTIME_ENV, detail)
        detail = f"Ray builds its runtime environment {node}"
        return JobStatus(JobState.PENDING, Reason.BUILDING, detail)

    def _ask_builds(self) -> list[dict[str, Any]]:
        """Ray's rows of runtime environments that are being built, or could not be."""
        shape = {"runtime_env": dict, "node_id": str}
        rows = self._rows("runtime_envs", _EXPLAIN_S, detail="true") or []
        return [row for row in rows if fits(row, shape) and not row.get("success")]

    def room(self) -> ClusterRoom | None:
        """What the cluster has and who holds it, a moment old; ``None`` when it does not say.

        It costs two requests, and one when the first is not answered.

        Raises:
            ClusterError: no answer came.
        """
        return self._room.get()

    def nodes(self, limit_s: float) -> list[Node] | None:
        """The living nodes and what is free there; ``None`` when the cluster does not say.

        Raises:
            ClusterError: no answer came.
        """
        query = {"view": "summary", "nocache": "1"}
        answer = self._http.request("GET", "/nodes", limit_s, params=query)
        return _understood(lambda: nodes_of_summary(answer.json()))

    def holdings(self, limit_s: float) -> list[Holding] | None:
        """What is held on which node; ``None`` when the cluster does not say.

        Raises:
            ClusterError: no answer came.
        """
        rows = self._rows("actors", limit_s, detail="true", **_LIVING)
        return None if rows is None else _understood(lambda: holdings_of(rows))

    def node_table(self, limit_s: float) -> list[Node] | None:
        """The living nodes with the names of their labels; ``None`` when the cluster does not say.

        Raises:
            ClusterError: no answer came.
        """
        rows = self._rows("nodes", limit_s, detail="true")
        return None if rows is None else _understood(lambda: nodes_of_table(rows))

    def python(self, limit_s: float) -> str | None:
        """The version of the head's Python; ``None`` when the cluster does not say.

        Raises:
            ClusterError: no answer came.
        """
        answer = self._http.request("GET", "/api/v0/cluster_metadata", limit_s)
        return _understood(lambda: str(answer.json()["data"]["pythonVersion"]))

    def _ask_room(self) -> ClusterRoom | None:
        nodes = self.nodes(_ROOM_S)
        if not nodes:
            return None
        try:
            holdings = self.holdings(_ROOM_S)
        except ClusterError:  # what the nodes have told is worth saying by itself
            holdings = None
        return ClusterRoom.of(nodes, holdings)

    def _rows(self, what: str, limit_s: float, **more: str) -> list[dict[str, Any]] | None:
        """The rows of one table; none when the answer is not Ray's."""
        query = {"limit": _ROWS_MAX, "timeout": "3", **more}
        answer = self._http.request("GET", f"/api/v0/{what}", limit_s, params=query)
        rows = _understood(lambda: answer.json()["data"]["result"]["result"])
        return rows if fits(rows, [dict]) else None

    def _log_file(self, node: str, name: str, lines: int) -> str:
        query = {"node_id": node, "filename": name, "lines": str(lines), "media_type": "file"}
        return self._told_log(query)

    def _told_log(self, query: dict[str, str], limit_s: float = READ_S) -> str:
        response = self._http.request("GET", LOG_FILE, limit_s, params=query)
        return response.text if response.status_code == 200 else ""


def _understood(read: Callable[[], _T]) -> _T | None:
    """What is read of an answer; ``None`` when it has not the form of Ray's."""
    try:
        return read()
    except MALFORMED:
        return None


def _key(runtime_env: Mapping[str, Any]) -> dict[str, Any]:
    """What tells an environment from all others, also from those of the same experiment.

    Ray writes a list of packages as a dict, with fields that the user did not give.
    """
    key = {}
    for name in ("py_modules", "pip", "uv", "conda", "image_uri", "container"):
        value = runtime_env.get(name)
        key[name] = value.get("packages", value) if isinstance(value, dict) else value
    return key


# ------------------------------------------------------ one look before anything is sent


@dataclass(frozen=True)
class Inspection:
    """One look at a cluster.

    Attributes:
        url: of its dashboard.
        unreachable: why it cannot be asked at all; empty when it can.
        unauthorised: why it refuses the credentials; empty when it takes them.
        version: of its Ray; empty when it is not told.
        jobs: how many it knows, and how many of these are pending or running; ``None`` when it does
            not say.
        nodes: those that live; ``None`` when it does not say.
        has_label_names: the labels of the nodes have their own names, see ``Node``.
        is_free_told: the nodes say what nobody holds.
        python: version on the head, such as ``3.11.7``; empty when it is not told.
        skew_s: seconds by which its clock is ahead of this machine's; ``None`` when not told.
    """

    url: str
    unreachable: str = ""
    unauthorised: str = ""
    version: str = ""
    jobs: tuple[int, int] | None = None
    nodes: tuple[Node, ...] | None = None
    has_label_names: bool = False
    python: str = ""
    skew_s: float | None = None

    @property
    def is_free_told(self) -> bool:
        return bool(self.nodes) and all(node.free is not None for node in self.nodes or ())


def inspect(dashboard: Dashboard) -> Inspection:
    """Look at a cluster, within 10 s, whatever it answers. Looking changes nothing."""
    http = Http(dashboard)
    state = StateApi(http)
    with ThreadPoolExecutor(5) as pool:
        version = pool.submit(lambda: _version(http))
        jobs = pool.submit(lambda: _jobs(http))
        summary = pool.submit(lambda: state.nodes(_INSPECT_S))
        table = pool.submit(lambda: state.node_table(_INSPECT_S))
        python = pool.submit(lambda: state.python(_INSPECT_S))
    http.close()
    runs, skew_s = _or(version, ("", None))
    failures = [answer.exception() for answer in (version, jobs)]
    for error in failures:
        if error is not None and not isinstance(error, ClusterError):
            raise error
    refusals = [error for error in failures if isinstance(error, Unauthorised)]
    # A job table that comes too late is no cluster that is away.
    is_away = not refusals and None not in failures
    return Inspection(
        url=dashboard.url,
        unreachable=str(failures[0]) if is_away else "",
        unauthorised=str(refusals[0]) if refusals else "",
        version=runs,
        jobs=None if jobs.exception() else jobs.result(),
        nodes=_nodes(_or(summary, None), _or(table, None)),
        has_label_names=bool(_or(table, None)),
        python=_or(python, None) or "",
        skew_s=skew_s,
    )


def _or(answer: Future[_T], otherwise: _T) -> _T:
    """What was answered, or this when nothing was."""
    error = answer.exception()
    if error is None:
        return answer.result()
    if isinstance(error, ClusterError):
        return otherwise
    raise error


def _nodes(summary: list[Node] | None, table: list[Node] | None) -> tuple[Node, ...] | None:
    if summary is None:
        return None if table is None else tuple(table)
    return tuple(with_names(summary, table or ()))


def _version(http: Http) -> tuple[str, float | None]:
    began = time.time()
    response = http.get("/api/version", limit_s=_INSPECT_S)
    version = http.read(response, lambda answer: str(answer["ray_version"]))
    return version, _skew(response, began, time.time())


def _skew(response: httpx.Response, began: float, ended: float) -> float | None:
    """How far a clock is ahead that is read in whole seconds, between two moments here."""
    try:
        there = parsedate_to_datetime(response.headers["date"]).timestamp()
    except (KeyError, ValueError, TypeError, OverflowError):
        return None
    if there + 1 < began:
        return there + 1 - began
    return max(0.0, there - ended)


def _jobs(http: Http) -> tuple[int, int]:
    rows = http.read(http.get("/api/jobs/", limit_s=_INSPECT_S), job_rows)
    return len(rows), sum(is_active(row) for row in rows)
