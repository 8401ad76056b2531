"""Ray's state API as the client uses it. It explains; nothing is decided by it."""

from __future__ import annotations

import json
from functools import cached_property
from typing import Any, cast

from nemo_run_ray.dashboard.env_builds import AGENT_LOG, AGENT_LOG_LINES, EnvBuilds
from nemo_run_ray.dashboard.http import READ_S, Http
from nemo_run_ray.errors import ClusterError
from nemo_run_ray.remote.group.roles_file import file_name
from nemo_run_ray.remote.rows import GroupRows

#: Seconds until an answer must have come of which the next look may do without.
_EXPLAIN_S = 5.0
#: So many rows at most, which is Ray's own limit.
_ROWS_MAX = "10000"


class StateApi:
    """What one cluster tells of its nodes, their files and what they build."""

    def __init__(self, http: Http) -> None:
        self._http = http

    def alive_nodes(self) -> set[str] | None:
        """Ids of the nodes that live; ``None`` when the cluster does not say."""
        try:
            rows = self._rows("nodes", READ_S)
            if rows is None:
                return None
            return {row["node_id"] for row in rows if row["state"] == "ALIVE"}
        except (ClusterError, KeyError, TypeError):
            return None

    def last_lines(self, node: str, submission_id: str, count: int) -> list[str]:
        """The end of a job's log."""
        text = self._log_file(node, f"job-driver-{submission_id}.log", count)
        return text.splitlines()[-count:]

    def roles(self, node: str, submission_id: str) -> GroupRows | None:
        """What a group's driver wrote of its roles; ``None`` when there is nothing of it."""
        text = self._log_file(node, file_name(submission_id), -1)
        try:
            return cast(GroupRows, json.loads(text)) if text else None
        except ValueError:
            return None  # Ray's own words, about a file that is not there

    @cached_property
    def env_builds(self) -> EnvBuilds:
        """The runtime environments that the cluster builds now."""
        return EnvBuilds(
            lambda: self._rows("runtime_envs", _EXPLAIN_S) or [],
            lambda node: self._log_file(node, AGENT_LOG, AGENT_LOG_LINES),
        )

    def _rows(self, what: str, limit_s: float) -> list[dict[str, Any]] | None:
        """The rows of one table; none when the answer is not Ray's."""
        query = {"limit": _ROWS_MAX, "timeout": "3"}
        answer = self._http.request("GET", f"/api/v0/{what}", limit_s, params=query)
        try:
            return list(answer.json()["data"]["result"]["result"])
        except (ValueError, KeyError, TypeError):
            return None

    def _log_file(self, node: str, name: str, lines: int) -> str:
        query = {"node_id": node, "filename": name, "lines": str(lines), "media_type": "file"}
        response = self._http.request("GET", "/api/v0/logs/file", params=query)
        return response.text if response.status_code == 200 else ""
