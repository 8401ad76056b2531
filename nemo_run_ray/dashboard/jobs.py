"""Ray's Jobs REST API as the client uses it: submit, stop, list, logs and packages.

Every request has a time limit. Requests that can be repeated without harm are, with back-off and
jitter; the one that starts a job is not: its sender decides (``experiment/dispatch.py``).
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar
from urllib.parse import quote

from nemo_run_ray.clusters import Dashboard
from nemo_run_ray.dashboard.http import SLOW_S, Cached, Http, repeat
from nemo_run_ray.dashboard.logs import LogStream
from nemo_run_ray.dashboard.state import AliveNodes, StateApi
from nemo_run_ray.errors import (
    ClusterError,
    JobRefused,
    SubmissionError,
    Taken,
    TooOld,
    Unauthorised,
    Unreachable,
)
from nemo_run_ray.fields import version_of
from nemo_run_ray.remote.dashboard import is_passing, last_line, refuses_job
from nemo_run_ray.remote.end_record import LostEnds
from nemo_run_ray.remote.fit import Node
from nemo_run_ray.remote.spec import JobRow, JobRows, job_row, job_rows
from nemo_run_ray.remote.status import is_active, is_pending, is_running

#: Seconds that a person waits for an address to answer before it is called unreachable.
PATIENCE_S = 8.0
#: Seconds that one look at the job table serves all callers in this process. NeMo-Run looks at each
#: job every 2 s, at moments of their own; this makes it at most two requests in that time.
TABLE_AGE_S = 1.5
#: Seconds for the job table, which has 20,000 characters of the log of each job that failed.
_TABLE_S = 30.0
#: Seconds for each answer to one look at a cluster, which a person waits for.
_INSPECT_S = 4.0
#: Seconds that an archive may take on its way, and for how long one is sent again.
_UPLOAD_S, _UPLOAD_AGAIN_S = 600.0, 60.0
#: Seconds between two looks for orphans.
_WAKE_AGAIN_S = 20.0
#: Seconds that a job may be about to start before it may be an orphan.
_PENDING_LONG_S = 30.0
#: A label that Ray's job manager refuses after it has looked at all jobs, before it takes the id.
_REFUSED_LABEL = {"no label": "wake"}
_T = TypeVar("_T")


class JobsApi:
    """One dashboard. Thread-safe; all users of a dashboard share one by ``JobsApi.of``.

    Attributes:
        dashboard: its address.
        logs: the logs of its jobs.
        state: what it tells beside the jobs.
    """

    _shared: ClassVar[dict[tuple[Any, ...], JobsApi]] = {}
    _shared_lock = threading.Lock()

    def __init__(self, dashboard: Dashboard) -> None:
        self.dashboard = dashboard
        self._http = Http(dashboard)
        self._table = Cached(self._rows, TABLE_AGE_S)
        self.state = StateApi(self._http)
        self._ends = LostEnds(self.state.log_end)
        self.logs = LogStream(self._http, self.job, dashboard.earlier.log)
        self._orphans_sought_at = -math.inf
        self._woken_at = 0.0

    @classmethod
    def of(cls, dashboard: Dashboard) -> JobsApi:
        """The process's one object for this dashboard."""
        key = (dashboard.url, tuple(sorted(dashboard.headers.items())), dashboard.verify)
        with cls._shared_lock:
            if key not in cls._shared:
                cls._shared[key] = cls(dashboard)
            return cls._shared[key]

    # ------------------------------------------------------------------ the cluster

    def version(self, patience_s: float = PATIENCE_S) -> dict[str, str]:
        """``ray_version`` and ``session_name`` of the cluster.

        Raises:
            Unreachable: no answer, or not a Ray dashboard's.
            Unauthorised: other credentials are wanted.
        """

        def ask() -> dict[str, str]:
            return self._http.read(self._http.get("/api/version"), _version)

        found = repeat(ask, patience_s, f"the dashboard {self.dashboard.url}")
        # Some dashboards tell any client their version; what a submission needs is the job table.
        self.table(patience_s=patience_s)
        return found

    def require(self, version: str, selector_since: tuple[int, int] | None) -> None:
        """Check that this Ray can do what a job asks for.

        Args:
            version: of the cluster's Ray.
            selector_since: first version that knows the job's label selectors, if it has any.

        Raises:
            TooOld: it cannot; the message names the feature and the first version that has it.
        """
        if selector_since is not None and version_of(version) < selector_since:
            needed = ".".join(map(str, selector_since))
            raise TooOld(
                "Choosing nodes by RayExecutor.label_selector, or by strategy in a group, needs "
                f"Ray {needed} or newer; the cluster at {self.dashboard.url} runs {version}. "
                "Upgrade it, or use resources_per_node with a custom resource of these nodes."
            )

    # ------------------------------------------------------------------ jobs

    def table(self, fresh: bool = False, patience_s: float = 0.0) -> JobRows:
        """All jobs by submission id, a moment old at most, or asked for now if ``fresh``."""
        what = f"the job table of {self.dashboard.url}"
        return repeat(lambda: self._table.get(fresh), patience_s, what)

    def job(self, submission_id: str, patience_s: float = 0.0) -> JobRow | None:
        """One job as it is now, or ``None`` when the cluster has no such job."""

        def ask() -> JobRow | None:
            response = self._http.get(_job_path(submission_id), may_be_absent=True)
            if response.status_code == 404:
                return self.dashboard.earlier.rows.get(submission_id)
            row = self._http.read(response, job_row)
            if row is None:
                raise self._http.not_ray(response)
            return self._ends.restored(row)

        return repeat(ask, patience_s)

    def post(self, body: dict[str, Any]) -> None:
        """Ask for a job, once.

        Raises:
            Taken: the id exists; it may be from this request, if an answer was lost.
            SubmissionError: Ray refuses the request; asking again changes nothing.
            Unanswered: it is not known whether the request arrived.
        """
        self._table.forget()
        try:
            response = self._http.request("POST", "/api/jobs/", SLOW_S, json=body)
        finally:
            self._table.forget()
        if response.status_code == 200:
            if self._http.read(response, lambda row: row["submission_id"]) == body["submission_id"]:
                return
            raise self._http.not_ray(response)
        if "already exists" in response.text:
            raise Taken(f"Ray at {self.dashboard.url} has a job {body['submission_id']} already.")
        self._http.check_front(response)
        if refuses_job(response.status_code, response.text):
            raise JobRefused(
                f"Ray at {self.dashboard.url} refuses the job {body['submission_id']}: "
                f"{last_line(response.content)} (HTTP {response.status_code}). "
                "Nothing was started. Correct what Ray names and run it again."
            )
        raise self._http.unanswered(response, "a new job")

    def stop(self, submission_id: str) -> None:
        """Ask Ray once to stop a job, which is harmless when it has ended."""
        response = self._http.request("POST", f"{_job_path(submission_id)}/stop")
        self._table.forget()
        self._http.check_front(response)
        if response.status_code >= 400:
            raise self._http.unanswered(response, "a stop")

    def wake_for(self, rows: JobRows) -> bool:
        """Make Ray look after orphans, and return whether it was asked to.

        Ray's job manager comes to life with the first request to it. Until then jobs whose
        supervisors died with the head, or while it was away, stay RUNNING or PENDING (measured with
        Ray 2.54 and 2.60 and a fault-tolerant GCS).

        Args:
            rows: our own jobs by submission id: the request names one of them.
        """
        if time.monotonic() - self._orphans_sought_at < _WAKE_AGAIN_S:
            return False
        self._orphans_sought_at, now = time.monotonic(), time.time()
        name = orphan(rows, self.state.alive_nodes, now, self._woken_at)
        if not name:
            return False
        # Ray must refuse this twice over: no label is called so, and the id is taken. It reads the
        # label when the job manager has found all jobs again.
        body = {
            "submission_id": name,
            "entrypoint": "true",
            "entrypoint_label_selector": _REFUSED_LABEL,
        }
        with contextlib.suppress(ClusterError):
            if "Invalid label" in self._http.request("POST", "/api/jobs/", SLOW_S, json=body).text:
                self._woken_at = now
        return True

    # ------------------------------------------------------------------ archives

    def has_package(self, name: str) -> bool:
        """Whether the cluster holds the archive; Ray keeps it for some minutes from now on."""
        path = f"/api/packages/gcs/{quote(name)}"
        what = f"the dashboard {self.dashboard.url}"
        response = repeat(lambda: self._http.get(path, may_be_absent=True), PATIENCE_S, what)
        return response.status_code == 200

    def put_package(self, name: str, data: bytes) -> None:
        """Upload an archive; the same name always has the same contents."""

        def send() -> None:
            path = f"/api/packages/gcs/{quote(name)}"
            response = self._http.request("PUT", path, _UPLOAD_S, content=data)
            self._http.check_front(response)
            if 400 <= response.status_code < 500 and not is_passing(response.status_code):
                raise SubmissionError(
                    f"{self.dashboard.url} refuses an archive of {len(data) / 1024**2:.1f} MiB: "
                    f"{last_line(response.content)} (HTTP {response.status_code}). A proxy before "
                    "the dashboard may have a lower limit than Ray's 100 MiB."
                )
            if response.status_code != 200:
                raise self._http.unanswered(response, "an upload")

        what = f"an upload of {len(data) / 1024**2:.1f} MiB to {self.dashboard.url}"
        repeat(send, _UPLOAD_AGAIN_S, what)

    def _rows(self) -> JobRows:
        rows = self._http.read(self._http.get("/api/jobs/", limit_s=_TABLE_S), job_rows)
        # Few logs are asked for in one look: those of the jobs that ended last.
        rows.sort(key=lambda row: row.get("end_time") or 0, reverse=True)
        found = {str(row["submission_id"]): self._ends.restored(row) for row in rows}
        return {**self.dashboard.earlier.rows, **found}


def _job_path(submission_id: str) -> str:
    return f"/api/jobs/{quote(submission_id, safe='')}"


def _version(answer: Any) -> dict[str, str]:
    return {name: str(answer[name]) for name in ("ray_version", "session_name")}


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
    alive = alive_nodes() if any(map(is_running, rows.values())) else None
    for name, row in rows.items():
        node, posted_at = row.get("driver_node_id"), (row.get("start_time") or 0) / 1000
        if is_pending(row):
            is_orphan = now - posted_at > _PENDING_LONG_S
        elif is_running(row) and alive is not None:
            is_lost = bool(node) and node not in alive.ids
            is_orphan = is_lost or max(posted_at, woken_at) < alive.head_since
        else:
            is_orphan = False
        if is_orphan:
            return name
    return ""


@dataclass(frozen=True)
class Inspection:
    """One look at a cluster.

    Attributes:
        url: of its dashboard.
        unreachable: why it cannot be asked at all; empty when it can.
        unauthorised: why it refuses the credentials; empty when it takes them.
        version: of its Ray; empty when it is not known.
        jobs: how many it knows, and how many of these are pending or running; ``None`` when it does
            not say.
        nodes: those that live; ``None`` when it does not say.
        python: version on the head, such as ``3.11.7``; empty when it is not known.
    """

    url: str
    unreachable: str = ""
    unauthorised: str = ""
    version: str = ""
    jobs: tuple[int, int] | None = None
    nodes: tuple[Node, ...] | None = None
    python: str = ""


def inspect(dashboard: Dashboard) -> Inspection:
    """Look at a cluster, within 10 s, whatever it answers. Looking changes nothing."""
    http = Http(dashboard)
    state = StateApi(http)

    def ask(path: str, parse: Callable[[Any], _T]) -> _T:
        return http.read(http.get(path, limit_s=_INSPECT_S), parse)

    with contextlib.closing(http), ThreadPoolExecutor(4) as pool:
        version = pool.submit(ask, "/api/version", _version)
        table = pool.submit(ask, "/api/jobs/", job_rows)
        nodes, python = pool.submit(state.room), pool.submit(state.python)
    rows = None
    try:
        ray_version = version.result()["ray_version"]
        with contextlib.suppress(Unreachable):  # a table that comes too late is no absent cluster
            rows = table.result()
    except Unauthorised as error:
        return Inspection(dashboard.url, unauthorised=str(error))
    except ClusterError as error:
        return Inspection(dashboard.url, unreachable=str(error))
    room = nodes.result()
    return Inspection(
        url=dashboard.url,
        version=ray_version,
        jobs=None if rows is None else (len(rows), sum(map(is_active, rows))),
        nodes=None if room is None else room.nodes,
        python=python.result(),
    )
