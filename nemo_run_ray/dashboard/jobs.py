"""Ray's Jobs REST API as the client uses it: submit, stop, list, logs and packages.

Every request has a time limit. Requests that can be repeated without harm are, with back-off and
jitter; the one that starts a job is not: its sender decides (``experiment/dispatch.py``).

A log comes by the Jobs API as it grows, and by the state API as it is now. The agent of a node that
is asked for a log by the Jobs API starts a job manager, which writes over the exit codes of jobs
that fail at this moment (``remote/end_record.py``). The state API starts none, but a stream of it
continues in the agent for ever when its reader is gone (Ray 2.60).
"""

from __future__ import annotations

import codecs
import io
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar
from urllib.parse import quote

import httpx
from websockets.exceptions import ConnectionClosedOK, InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection, connect

from nemo_run_ray.clusters import Dashboard
from nemo_run_ray.dashboard.http import READ_S, SLOW_S, Cached, Http, repeat
from nemo_run_ray.dashboard.state import StateApi
from nemo_run_ray.errors import (
    ClusterError,
    JobError,
    JobRefused,
    StreamCut,
    SubmissionError,
    Taken,
    Unauthorised,
    Unreachable,
)
from nemo_run_ray.remote.dashboard import LOG_FILE, is_passing, last_line, log_query, refuses_job
from nemo_run_ray.remote.end_record import LostEnds
from nemo_run_ray.remote.fit import Node
from nemo_run_ray.remote.spec import JobRow, JobRows, Json, job_row, job_rows
from nemo_run_ray.remote.status import JobState, is_active, posted_at, state_of_row

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
#: A label that Ray's job manager refuses after it has looked at all jobs, before it takes the id.
_REFUSED_LABEL = {"no label": "wake"}
#: Seconds of a log stream's silence until the job is looked at, the same before its first text,
#: which may never come, and until the stream is given up. On a busy head a stream may stand still,
#: and NeMo-Run waits for a log only until 10 s after the job's end (0.12).
_LOOK_S, _BEGIN_S, _SILENCE_MAX_S = 5.0, 1.0, 300.0
#: Answers of a front that passes the Jobs API on and not the state API.
_CLOSED = {401, 403, 404, 405, 501}
_T = TypeVar("_T")


class _Refused(Exception):
    """The status of another answer than a WebSocket."""


class _Connection(ClientConnection):
    """One that is never redirected: ``connect`` would take headers along to another origin."""

    def handshake(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().handshake(*args, **kwargs)
        except InvalidStatus as error:
            raise _Refused(error.response.status_code) from error


class JobsApi:
    """One dashboard. Thread-safe; all users of a dashboard share one by ``JobsApi.of``."""

    _shared: ClassVar[dict[tuple[Any, ...], JobsApi]] = {}
    _shared_lock = threading.Lock()

    def __init__(self, dashboard: Dashboard):
        self.dashboard = dashboard
        self._http = Http(dashboard)
        self._table = Cached(self._rows, TABLE_AGE_S)
        self.state = StateApi(self._http)
        self._ends = LostEnds(self.state.log_end)
        self._orphans_sought_at = self._woken_at = 0.0

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
        """``ray_version`` and ``session_name`` of the cluster."""
        answer = repeat(lambda: self._http.get("/api/version"), patience_s)
        names = ("ray_version", "session_name")
        found = self._http.read(answer, lambda row: {name: str(row[name]) for name in names})
        # Some dashboards tell any client their version; what a submission needs is the job table.
        self.table(patience_s=patience_s)
        return found

    # ------------------------------------------------------------------ jobs

    def table(self, fresh: bool = False, patience_s: float = 0.0) -> JobRows:
        """All jobs by submission id, a moment old at most, or asked for now if ``fresh``."""
        return repeat(lambda: self._table.get(fresh), patience_s)

    def job(self, submission_id: str) -> JobRow | None:
        """One job as it is now, or ``None`` when the cluster has no such job."""
        response = self._http.get(_job_path(submission_id), may_be_absent=True)
        if response.status_code == 404:
            return self.dashboard.earlier.rows.get(submission_id)
        row = self._http.read(response, job_row)
        if not row:
            raise self._http.not_ray(response)
        return self._ends.restored(row)

    def post(self, body: Json) -> None:
        """Ask for a job, once.

        Raises:
            Taken: the id exists; it may be from this request, if an answer was lost.
            SubmissionError: Ray refuses the request; asking again changes nothing.
            Unanswered: it is not known whether the request arrived.
        """
        try:
            response = self._http.request("POST", "/api/jobs/", SLOW_S, json=body)
        finally:
            self._table.forget()
        if response.status_code == 200:
            self._http.read(response, lambda row: row["submission_id"])
            return
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
        Ray 2.54 and 2.60 and a fault-tolerant GCS): jobs that are older than the head, if nobody
        has asked this head for anything yet.

        Args:
            rows: our own jobs by submission id: the request names one of them.
        """
        now, active = time.time(), [row for row in rows.values() if is_active(row)]
        if not active or now - self._orphans_sought_at < _WAKE_AGAIN_S:
            return False
        self._orphans_sought_at = now
        oldest = min(active, key=posted_at)
        if max(posted_at(oldest), self._woken_at) >= self.state.head_since():
            return False
        # Ray must refuse this twice over: no label is called so, and the id is taken. It reads the
        # label when the job manager has found all jobs again.
        body = {
            "submission_id": oldest["submission_id"],
            "entrypoint": "true",
            "entrypoint_label_selector": _REFUSED_LABEL,
        }
        with suppress(ClusterError):
            if "Invalid label" in self._http.request("POST", "/api/jobs/", SLOW_S, json=body).text:
                self._woken_at = now
        return True

    # ------------------------------------------------------------------ logs

    def tail_log(self, submission_id: str, is_live: Callable[[], bool]) -> Iterator[str]:
        """The log from its first character on, as it grows, by WebSocket.

        The end of the stream means nothing about the job. ``is_live`` is asked when the stream is
        silent: that of a job that has ended may be dead, which a missing close does not tell.
        """
        url = f"{self.dashboard.url}{_job_path(submission_id)}/logs/tail"
        try:
            with connect(
                "ws" + url.removeprefix("http"),
                additional_headers=self.dashboard.headers,
                compression=None,
                proxy=self._http.proxy,
                ssl=self._http.tls if url.startswith("https") else None,
                open_timeout=READ_S,
                close_timeout=0.1,  # Ray reads nothing on that socket, and never answers
                ping_interval=None,  # Ray only sends on this socket: it answers no ping
                max_size=8 * 1024**2,  # Ray's own inside the cluster takes half of it
                create_connection=_Connection,
            ) as stream:
                silent_s, patience_s = 0.0, _BEGIN_S
                while True:
                    try:
                        message = stream.recv(patience_s, decode=True)
                    except TimeoutError:
                        silent_s += patience_s
                        if silent_s >= _SILENCE_MAX_S or not is_live():
                            return
                        continue
                    except ConnectionClosedOK:
                        return
                    silent_s, patience_s = 0.0, _LOOK_S
                    yield message
        except _Refused as error:
            (status,) = error.args
            if status == 404:
                raise self._no_such_job(submission_id) from error
            kind = Unauthorised if status in (401, 403) else StreamCut
            raise kind(f"{url}: HTTP {status}; redirects are not followed") from error
        except ConnectionRefusedError as error:
            raise self._http.unreachable(httpx.ConnectError(str(error))) from error
        except (WebSocketException, OSError) as error:
            raise StreamCut(f"{url}: {error}") from error

    def whole_log(self, submission_id: str) -> Iterator[str]:
        """The log as it is now, piece by piece, whatever its size.

        Ray gives none of a job that never started; its message is what there is.
        """
        row = self.job(submission_id)
        if not row:
            raise self._no_such_job(submission_id)
        is_empty = True
        try:
            for text in filter(None, self._pieces(row, submission_id)):
                is_empty = False
                yield text
        except httpx.ConnectError as error:
            raise self._http.unreachable(error) from error
        except httpx.HTTPError as error:
            raise StreamCut(f"the log of {submission_id}: {error}") from error
        row = (self.job(submission_id) if is_empty else None) or {}
        has_failed = state_of_row(row) is JobState.FAILED and row.get("driver_exit_code") is None
        if has_failed and row.get("message"):
            yield f"{str(row['message']).strip()}\n"

    def _pieces(self, row: JobRow, submission_id: str) -> Iterator[str]:
        """The log, or by the Jobs API where a front keeps the state API closed."""
        if node := row.get("driver_node_id"):
            query = {**log_query(node, submission_id, -1), "timeout": "86400"}
            with self._http.answer(
                "GET", LOG_FILE, SLOW_S, is_stream=True, params=query
            ) as response:
                if response.status_code == 200:
                    # The text as the Jobs API reads it: every end of a line is ``\n``.
                    utf8 = codecs.getincrementaldecoder("utf-8")("backslashreplace")
                    decoder = io.IncrementalNewlineDecoder(utf8, translate=True)
                    yield from map(decoder.decode, response.iter_bytes())
                    yield decoder.decode(b"", final=True)
                    return
                if response.status_code not in _CLOSED:
                    raise StreamCut(f"{self.dashboard.url}{LOG_FILE}: HTTP {response.status_code}")
        path = f"{_job_path(submission_id)}/logs"
        response = self._http.get(path, may_be_absent=True, limit_s=SLOW_S)
        if response.status_code == 404:
            raise self._no_such_job(submission_id)
        yield self._http.read(response, lambda answer: str(answer["logs"]))

    def _no_such_job(self, submission_id: str) -> JobError:
        return JobError(f"Ray at {self.dashboard.url} has no job {submission_id}.")

    # ------------------------------------------------------------------ archives

    def has_package(self, name: str) -> bool:
        """Whether the cluster holds the archive; Ray keeps it for some minutes from now on."""
        path = f"/api/packages/gcs/{quote(name)}"
        return repeat(lambda: self._http.get(path, may_be_absent=True), PATIENCE_S).is_success

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


@dataclass(frozen=True)
class Inspection:
    """One look at a cluster. What it does not say is ``None``, or empty."""

    url: str
    #: Reasons for which it cannot be asked at all, or refuses the credentials.
    unreachable: str = ""
    unauthorised: str = ""
    #: The versions of its Ray, and of the Python on its head.
    version: str = ""
    python: str = ""
    #: Number of its jobs, and of those that are pending or running.
    jobs: tuple[int, int] | None = None
    nodes: tuple[Node, ...] | None = None


def inspect(dashboard: Dashboard) -> Inspection:
    """Look at a cluster, within 10 s, whatever it answers. Looking changes nothing."""
    http = Http(dashboard)
    state = StateApi(http)

    def ask(path: str, parse: Callable[[Any], _T]) -> _T:
        return http.read(http.get(path, limit_s=_INSPECT_S), parse)

    with ThreadPoolExecutor(4) as pool:
        version = pool.submit(ask, "/api/version", lambda row: str(row["ray_version"]))
        table = pool.submit(ask, "/api/jobs/", job_rows)
        nodes, python = pool.submit(state.room), pool.submit(state.python)
    rows = None
    try:
        ray_version = version.result()
        with suppress(Unreachable):  # a table that comes too late is no absent cluster
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
        nodes=room.nodes if room else None,
        python=python.result(),
    )
