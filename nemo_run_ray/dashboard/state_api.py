"""Ray's state API as the client uses it. It explains; nothing is decided by it."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from nemo_run_ray.dashboard.http import MALFORMED, READ_S, Http
from nemo_run_ray.dashboard.nodes import (
    ClusterNode,
    Holding,
    holdings_of,
    nodes_of_summary,
    nodes_of_table,
)
from nemo_run_ray.dashboard.recent import Recent
from nemo_run_ray.dashboard.wake import AliveNodes
from nemo_run_ray.dashboard.why_building import AGENT_LOG, AGENT_LOG_LINES, EnvBuilds
from nemo_run_ray.errors import ClusterError
from nemo_run_ray.remote.array.status_file import file_of
from nemo_run_ray.remote.dashboard import ANSWER_S, LINES, LOG_FILE, log_query
from nemo_run_ray.remote.group.roles_file import file_name
from nemo_run_ray.remote.rows import fits
from nemo_run_ray.remote.states import Reason

#: Seconds until an answer must have come of which the next look may do without.
_EXPLAIN_S = 5.0
#: So many rows at most, which is Ray's own limit.
_ROWS_MAX = "10000"
#: Seconds until each of two answers must have come that explain why a job waits for room.
_ROOM_S = 3.0
#: Seconds that these answers serve all callers; what Ray says of its nodes is as old.
_ROOM_AGE_S = 5.0
#: Seconds in which a cluster that does not say what it has is not asked again.
_NO_ROOM_AGE_S = 30.0
_LIVING = {"filter_keys": "state", "filter_predicates": "=", "filter_values": "ALIVE"}
_T = TypeVar("_T")


@dataclass(frozen=True)
class ClusterRoom:
    """What a cluster has, and who holds it.

    Attributes:
        nodes: those that live.
        holdings: what is held on each node, by its id; ``None`` when the cluster does not say.
        told: why who asks for something waits, in a reason and the words before and after since
            when; filled as it is asked for, since many tasks ask for the same.
    """

    nodes: tuple[ClusterNode, ...]
    holdings: Mapping[str, Sequence[Holding]] | None = None
    told: dict[Hashable, tuple[Reason, str, str] | None] = field(default_factory=dict)

    @classmethod
    def of(cls, nodes: Iterable[ClusterNode], holdings: Iterable[Holding] | None) -> ClusterRoom:
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
        text = self._log_file(node, file_name(submission_id), -1)
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

    @cached_property
    def env_builds(self) -> EnvBuilds:
        """The runtime environments that the cluster builds now."""
        return EnvBuilds(
            lambda: self._rows("runtime_envs", _EXPLAIN_S) or [],
            lambda node: self._log_file(node, AGENT_LOG, AGENT_LOG_LINES),
            self._head_first,
            self._http.dashboard.env_tries,
        )

    def _head_first(self) -> list[str]:
        """Ids of the living nodes, the head's first; none when the cluster does not say."""
        rows = self._rows("nodes", _EXPLAIN_S, **_LIVING) or []
        rows.sort(key=lambda row: not row.get("is_head_node"))
        return [str(row.get("node_id")) for row in rows]

    def room(self) -> ClusterRoom | None:
        """What the cluster has and who holds it, a moment old; ``None`` when it does not say.

        It costs two requests, and one when the first is not answered.

        Raises:
            ClusterError: no answer came.
        """
        return self._room.get()

    def nodes(self, limit_s: float) -> list[ClusterNode] | None:
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

    def node_table(self, limit_s: float) -> list[ClusterNode] | None:
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

    @cached_property
    def _room(self) -> Recent[ClusterRoom | None]:
        def ask(_: str) -> ClusterRoom | None:
            nodes = self.nodes(_ROOM_S)
            if not nodes:
                return None
            try:
                holdings = self.holdings(_ROOM_S)
            except ClusterError:  # what the nodes have told is worth saying by itself
                holdings = None
            return ClusterRoom.of(nodes, holdings)

        return Recent(ask, _ROOM_AGE_S, _NO_ROOM_AGE_S)

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
