"""Ray's state API: nodes, who holds what, builds, logs. It explains; nothing is decided by it.

A job reserves by an actor of Ray's that has the job's id in its name. Actors and tasks in a
placement group use what the group reserves, so only the group's bundles count.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from nemo_run_ray.dashboard.http import MALFORMED, READ_S, Cached, Http
from nemo_run_ray.errors import ClusterError
from nemo_run_ray.fields import brings_python
from nemo_run_ray.remote.dashboard import ANSWER_S, LINES, LOG_FILE, log_query
from nemo_run_ray.remote.fit import Amounts, Node
from nemo_run_ray.remote.spec import JobRow, Json, fits, status_file_name
from nemo_run_ray.remote.status import JobStatus, Reason, file_of

#: Seconds until an answer must have come that a status can do without, and of those that explain
#: why a job waits for room.
_EXPLAIN_S, _ROOM_S = 5.0, 3.0
#: Cache lifetime of a cluster's room and of its runtime environments: Ray asks every node.
_AGE_S = 5.0
#: The tables that tell the room, and the state of the rows that count.
_ROOM_TABLES = {
    "nodes": "ALIVE",
    "actors": "ALIVE",
    "placement_groups": "CREATED",
    "tasks": "RUNNING",
}
#: Name of the actor that Ray starts for a job, before the job's submission id.
_SUPERVISOR = "_ray_internal_job_actor_"
#: The forms of the rows that are read; others are left out.
_NODE = {
    **dict.fromkeys(("state", "node_id", "node_name", "node_ip"), str),
    "labels": dict[str, str],
    "resources_total": dict[str, float],
}
_BUILD = {"runtime_env": dict, "node_id": str}
_NAMES = {"node_id": str, "node_name": str}
_HEAD = {"is_head_node": bool, "start_time_ms": int}
_HOLDER = {
    **dict.fromkeys(("node_id", "name", "job_id"), str),
    "required_resources": dict[str, float],
}
_GROUP = {
    "creator_job_id": str,
    "bundles": [{"node_id": str, "unit_resources": dict[str, float]}],
}
_TABLE = {"data": {"result": {"result": list[Json]}}}
_Rows = Iterable[Json]


@dataclass(frozen=True)
class Holding:
    """Resources that an actor, a task or a bundle of a placement group holds on one node."""

    node_id: str
    #: Id of the job that Ray started the actor for; empty of a program's own actor.
    submission_id: str
    #: Ray's number of the program that made it.
    job_id: str
    resources: Amounts


@dataclass(frozen=True)
class ClusterRoom:
    """The nodes that live, and who holds their resources, by the id of the node."""

    nodes: tuple[Node, ...]
    holdings: Mapping[str, Sequence[Holding]]


def room_of(nodes: _Rows, holdings: Iterable[Holding] | None) -> ClusterRoom:
    """The room of a cluster by its nodes; ``None`` for holdings that it does not tell."""
    by_node = defaultdict(list)
    for holding in holdings or ():
        by_node[holding.node_id].append(holding)
    living = []
    for row in nodes:
        if fits(row, _NODE) and row["state"] == "ALIVE":
            total = free = _amounts(row["resources_total"])
            for holding in by_node[row["node_id"]]:
                held = holding.resources
                free = {name: max(0.0, free[name] - held.get(name, 0.0)) for name in free}
            living.append(
                Node(
                    node_id=row["node_id"],
                    host=row["node_name"],
                    address=row["node_ip"],
                    labels=row["labels"],
                    resources=total,
                    free=None if holdings is None else free,
                )
            )
    return ClusterRoom(tuple(living), by_node)


def holdings_of(actors: _Rows, groups: _Rows, tasks: _Rows) -> list[Holding]:
    """The resources that are held, by rows of Ray's tables in the states of ``_ROOM_TABLES``."""
    held = []
    for row in (*actors, *tasks):
        if fits(row, _HOLDER) and not row.get("placement_group_id"):
            name = row["name"]
            job = name.removeprefix(_SUPERVISOR) if name.startswith(_SUPERVISOR) else ""
            resources = _amounts(row["required_resources"])
            held.append(Holding(row["node_id"], job, row["job_id"], resources))
    for group in groups:
        for bundle in group["bundles"] if fits(group, _GROUP) else ():
            resources = _amounts(bundle["unit_resources"])
            held.append(Holding(bundle["node_id"], "", group["creator_job_id"], resources))
    return held


def _amounts(given: Amounts) -> dict[str, float]:
    """Without resources that nobody asks for: one for each node, and what Ray needs for itself."""
    hidden = "node:|object_store_memory$"
    return {name: amount for name, amount in given.items() if not re.match(hidden, name)}


class StateApi:
    """The state API of one cluster."""

    def __init__(self, http: Http):
        self._http = http
        self._room = Cached(self._ask_room, _AGE_S)
        self._builds = Cached(self._ask_builds, _AGE_S)

    def head_since(self) -> float:
        """When the head's Ray was started, in seconds since the epoch; 0 if it is not known."""
        rows = self._rows("nodes", READ_S, "ALIVE") or ()
        times = [row["start_time_ms"] for row in rows if fits(row, _HEAD) and row["is_head_node"]]
        return max(times, default=0) / 1000

    def hosts(self) -> dict[str, str]:
        """The names of all nodes by their ids, also of those that died."""
        rows = self._rows("nodes", _EXPLAIN_S) or ()
        return {row["node_id"]: row["node_name"] for row in rows if fits(row, _NAMES)}

    def last_lines(self, node: str, submission_id: str, count: int) -> list[str]:
        """The end of a job's log."""
        return self._log(log_query(node, submission_id, count)).splitlines()[-count:]

    def log_end(self, node: str, submission_id: str) -> str | None:
        """The end of a job's log; ``None`` when it cannot be had now."""
        query = {**log_query(node, submission_id, LINES), "timeout": str(ANSWER_S)}
        with suppress(ClusterError):
            return self._log(query, 2.0 * ANSWER_S) or None
        return None

    def rows(self, node: str, submission_id: str) -> Any:
        """The report of the driver of a group or of an array; ``None`` when there is none."""
        text = self._log(_file_query(node, status_file_name(submission_id)))
        with suppress(ValueError, RecursionError):  # Ray's own words, without a file
            return json.loads(text)
        return None

    def array_file(self, node: str, submission_id: str, kind: str) -> list[str]:
        """The lines of a file that the driver of an array writes, or Ray's words without one."""
        return self._log(_file_query(node, file_of(submission_id, kind))).splitlines()

    def explain_build(self, row: JobRow, status: JobStatus) -> JobStatus:
        """The status of a pending job with how far Ray is with its runtime environment."""
        runtime_env = row.get("runtime_env") or {}
        for build in self._builds.get() if brings_python(runtime_env) else ():
            if _key(build["runtime_env"]) == _key(runtime_env):
                detail = f"Ray builds its runtime environment on node {build['node_id'][:12]}"
                return replace(status, reason=Reason.BUILDING, detail=detail)
        return status

    def _ask_builds(self) -> list[Json]:
        """Ray's rows of runtime environments that are being built; last first."""
        rows = reversed(self._rows("runtime_envs", _EXPLAIN_S) or [])
        return [row for row in rows if fits(row, _BUILD) and row.get("success") is None]

    def room(self) -> ClusterRoom | None:
        """The nodes and who holds them, a moment old; ``None`` when the cluster does not say."""
        return self._room.get()

    def _ask_room(self) -> ClusterRoom | None:
        # By no pool: the main thread of a program may have ended.
        nodes, *held = (self._rows(name, _ROOM_S, of) for name, of in _ROOM_TABLES.items())
        if not nodes:
            return None
        holdings = None if None in held else holdings_of(*(rows or [] for rows in held))
        return room_of(nodes, holdings)

    def python(self) -> str:
        """The version of the head's Python; empty when the cluster does not say."""
        with suppress(ClusterError, *MALFORMED):
            answer = self._http.request("GET", "/api/v0/cluster_metadata", _EXPLAIN_S)
            return str(answer.json()["data"]["pythonVersion"])
        return ""

    def _rows(self, table: str, limit_s: float, state: str = "") -> list[Json] | None:
        """The rows of a table, of one state if that is given; ``None`` without an answer of Ray."""
        query = {"limit": "10000", "timeout": "3", "detail": "true"}
        if state:
            query |= {"filter_keys": "state", "filter_predicates": "=", "filter_values": state}
        with suppress(ClusterError, ValueError, RecursionError):
            answer = self._http.request("GET", f"/api/v0/{table}", limit_s, params=query)
            content = answer.json()
            if answer.status_code == 200 and fits(content, _TABLE):
                rows: list[Json] = content["data"]["result"]["result"]
                return rows
        return None

    def _log(self, query: dict[str, str], limit_s: float = READ_S) -> str:
        response = self._http.request("GET", LOG_FILE, limit_s, params=query)
        return response.text if response.status_code == 200 else ""


def _file_query(node: str, name: str) -> dict[str, str]:
    return {"node_id": node, "filename": name, "lines": "-1", "media_type": "file"}


def _key(runtime_env: Json) -> list[Any]:
    """The fields that make an environment differ from others, also of the same experiment.

    Ray writes a list of packages as a dict, with fields that the user did not give.
    """
    names = ("py_modules", "pip", "uv", "conda", "image_uri", "container")
    values = map(runtime_env.get, names)
    return [value.get("packages", value) if isinstance(value, dict) else value for value in values]
