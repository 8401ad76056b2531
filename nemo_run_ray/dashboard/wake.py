"""Jobs that a dead head has left behind, and how Ray is made to look after them.

Ray's job manager comes to life with the first request to it. Until then jobs whose supervisors died
with the head, or while it was away, stay RUNNING or PENDING (measured with Ray 2.54 and 2.60 and a
fault-tolerant GCS).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from nemo_run_ray.dashboard.http import SLOW_S, Http
from nemo_run_ray.errors import ClusterError
from nemo_run_ray.remote.rows import JobRows
from nemo_run_ray.remote.states import is_pending, is_running

#: Seconds between two looks for such jobs, and until a request that failed is repeated.
_WAKE_AGAIN_S, _WAKE_FAILED_S = 20.0, 5.0
#: Seconds that a job may be about to start before it may be one of them.
_PENDING_LONG_S = 30.0
#: A label that Ray's job manager refuses after it has looked at all jobs, before it takes the id.
_REFUSED_LABEL = {"no label": "wake"}


@dataclass(frozen=True)
class AliveNodes:
    """The nodes that live.

    Attributes:
        ids: of all of them.
        head_since: seconds since the epoch, when the head's Ray was started; 0 if it is not known.
    """

    ids: set[str]
    head_since: float = 0.0


class JobManager:
    """Ray's job manager of one cluster, which may be asleep.

    Args:
        http: the dashboard.
        alive_nodes: gives the nodes that live, ``None`` when they are not known.
    """

    def __init__(self, http: Http, alive_nodes: Callable[[], AliveNodes | None]) -> None:
        self._http = http
        self._alive_nodes = alive_nodes
        self._asked_at = -math.inf
        self._woken_at = 0.0

    def wake_for(self, rows: JobRows) -> bool:
        """Make Ray look after these jobs if it does not, and return whether it was asked to.

        Args:
            rows: our own jobs by submission id: a request names one of them.
        """
        if time.monotonic() - self._asked_at < _WAKE_AGAIN_S:
            return False
        self._asked_at = time.monotonic()
        now = time.time()
        found = orphan(rows, self._alive_nodes, now, self._woken_at)
        if not found:
            return False
        if self._wake(found):
            self._woken_at = now
        else:
            self._asked_at -= _WAKE_AGAIN_S - _WAKE_FAILED_S
        return True

    def _wake(self, submission_id: str) -> bool:
        """Ask for what Ray must refuse twice over, so that nothing can come of it.

        No label is called so, and the id is taken. Ray 2.54 and 2.60 read the label when the job
        manager has found all jobs again. An older Ray refuses such a request in its dashboard, and
        its job manager sleeps on.
        """
        body = {
            "submission_id": submission_id,
            "entrypoint": "true",
            "entrypoint_label_selector": _REFUSED_LABEL,
        }
        try:
            answer = self._http.request("POST", "/api/jobs/", SLOW_S, json=body)
        except ClusterError:
            return False
        return "Invalid label" in answer.text


def orphan(
    rows: JobRows,
    alive_nodes: Callable[[], AliveNodes | None],
    now: float,
    woken_at: float = 0.0,
) -> str:
    """Id of a job that Ray may not look after. Empty if there is none.

    It has been about to start for long, or runs on a node that is gone, or the head has been
    started after it and nobody has asked this head for anything yet.

    Args:
        rows: by submission id.
        alive_nodes: asked when a job runs.
        now: seconds since the epoch.
        woken_at: the same, when the job manager was last made to look after all jobs.
    """
    for name, row in rows.items():
        age_s = now - (row.get("start_time") or 0) / 1000
        if is_pending(row) and age_s > _PENDING_LONG_S:
            return name
    running = {name: row for name, row in rows.items() if is_running(row)}
    alive = alive_nodes() if running else None
    if alive is None:
        return ""
    for name, row in running.items():
        node, posted_at = row.get("driver_node_id"), (row.get("start_time") or 0) / 1000
        if node and node not in alive.ids:
            return name
        if max(posted_at, woken_at) < alive.head_since:
            return name
    return ""
