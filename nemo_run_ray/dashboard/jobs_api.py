"""Ray's Jobs REST API as the client uses it: submit, stop, list, logs and packages.

Every request has a time limit. Requests that can be repeated without harm are, with back-off and
jitter; the one that starts a job is not: who sends it decides (``jobs/submit_once.py``).
"""

from __future__ import annotations

import json
import logging
import math
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, ClassVar, TypeVar
from urllib.parse import quote

import httpx
import websockets.sync.client
from tenacity import Retrying, retry_if_exception_type, stop_before_delay, wait_random_exponential
from websockets.exceptions import ConnectionClosedOK, InvalidStatus, WebSocketException

from nemo_run_ray.clusters import Dashboard
from nemo_run_ray.dashboard.env_builds import AGENT_LOG, AGENT_LOG_LINES, EnvBuilds
from nemo_run_ray.dashboard.job_table import JobTable
from nemo_run_ray.dashboard.log_text import decode_log
from nemo_run_ray.errors import (
    ClusterError,
    ConfigError,
    JobError,
    StreamCut,
    SubmissionError,
    Taken,
    TooOld,
    Unanswered,
    Unauthorised,
    Unreachable,
)
from nemo_run_ray.remote.attempts import claim_body
from nemo_run_ray.remote.group.roles_file import file_name

#: Seconds that a person waits for an address to answer before it is called unreachable.
PATIENCE_S = 8.0
_CONNECT_S, _READ_S, _POST_S, _UPLOAD_S = 4.0, 10.0, 60.0, 600.0
#: The same for what only explains.
_EXPLAIN_S = 5.0
#: Ray's own WebSocket inside the cluster takes 4 MiB; longer lines never arrive that way.
_MESSAGE_MAX_BYTES = 8 * 1024**2
#: Seconds that a log stream gets for its close. Ray reads nothing on that socket and never answers.
_GOODBYE_S = 0.1
#: Seconds of a log stream's silence until the job is looked at, and until the stream is given up.
_SILENCE_S, _SILENCE_MAX_S = 15.0, 300.0
#: Seconds between two looks for jobs that a head's death has orphaned, until one that failed is
#: repeated, and until Ray has looked after them.
_WAKE_AGAIN_S, _WAKE_FAILED_S, _WAKE_S = 20.0, 5.0, 2.0
#: Seconds that a job may be about to start before it may be one of them.
_PENDING_LONG_S = 30.0
_T = TypeVar("_T")

# NeMo-Run shows every logger's INFO, and httpx tells of each request: a line every two seconds.
logging.getLogger("httpx").setLevel(logging.WARNING)


log = logging.getLogger(__name__)


class JobsApi:
    """One dashboard. Thread-safe; all users of a dashboard share one by ``JobsApi.of``."""

    _shared: ClassVar[dict[tuple[Any, ...], JobsApi]] = {}
    _shared_lock = threading.Lock()

    def __init__(self, dashboard: Dashboard) -> None:
        self.dashboard = dashboard
        self._http = httpx.Client(
            headers=dashboard.headers,
            verify=_tls(dashboard.verify),
            timeout=httpx.Timeout(_READ_S, connect=_CONNECT_S),
            trust_env=not dashboard.is_loopback,
            follow_redirects=False,  # a redirected POST would become a GET, and be answered
        )
        self._table = JobTable(self._read_table)
        self._woken_at = -math.inf

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
            response = self._get("/api/version")
            try:
                answer = response.json()
                return {name: str(answer[name]) for name in ("ray_version", "session_name")}
            except (ValueError, KeyError, TypeError) as error:
                raise self._not_ray(response) from error

        found = self._repeat(ask, patience_s)
        # Some dashboards tell their version to everybody; what a submission needs is the job table.
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
        found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
        if selector_since is not None and found < selector_since:
            needed = ".".join(str(part) for part in selector_since)
            raise TooOld(
                "Choosing nodes by RayExecutor.label_selector, or by strategy in a group, needs "
                f"Ray {needed} or newer; the cluster at {self.dashboard.url} runs {version}. "
                "Upgrade it, or use resources_per_node with a custom resource of the nodes that "
                "you mean."
            )

    # ------------------------------------------------------------------ jobs

    def table(self, fresh: bool = False, patience_s: float = 0.0) -> dict[str, dict[str, Any]]:
        """All jobs by submission id, a moment old at most, or asked for now if ``fresh``."""
        return self._repeat(lambda: self._table.read(fresh), patience_s)

    def job(self, submission_id: str, patience_s: float = 0.0) -> dict[str, Any] | None:
        """One job as it is now, or ``None`` when the cluster has no such job."""

        def ask() -> dict[str, Any] | None:
            response = self._get(self._job_path(submission_id), may_be_absent=True)
            return None if response.status_code == 404 else self._json(response)

        return self._repeat(ask, patience_s)

    def post(self, body: dict[str, Any]) -> None:
        """Ask for a job, once.

        Raises:
            Taken: the id exists; it may be ours, from a request whose answer was lost.
            SubmissionError: Ray refuses the request; asking again changes nothing.
            Unanswered: it is not known whether the request arrived.
        """
        self._table.forget()
        limit = httpx.Timeout(_POST_S, connect=_CONNECT_S)
        try:
            response = self._http.post(self._url("/api/jobs/"), json=body, timeout=limit)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        finally:
            self._table.forget()
        if response.status_code == 200:
            if _answered_id(response) != body["submission_id"]:
                raise self._not_ray(response)
            return
        if "already exists" in response.text:
            raise Taken(f"Ray at {self.dashboard.url} has a job {body['submission_id']} already.")
        self._check_front(response)
        if 400 <= response.status_code < 500:
            raise SubmissionError(
                f"Ray at {self.dashboard.url} refuses the job {body['submission_id']}: "
                f"{_last_line(response.text)} (HTTP {response.status_code}). Nothing was started."
            )
        raise Unanswered(
            f"{self.dashboard.url} answered {response.status_code} to a new job: "
            f"{_last_line(response.text)}"
        )

    def stop(self, submission_id: str) -> None:
        """Ask Ray to stop a job; harmless when it has ended. One request."""
        try:
            response = self._http.post(self._url(f"{self._job_path(submission_id)}/stop"))
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        self._table.forget()
        self._check_front(response)
        if response.status_code >= 400:
            raise Unanswered(
                f"{self.dashboard.url} answered {response.status_code} to a stop: "
                f"{_last_line(response.text)}"
            )

    # ------------------------------------------------------------------ archives

    def has_package(self, name: str) -> bool:
        """Whether the cluster holds the archive; Ray keeps it for some minutes from now on."""
        path = f"/api/packages/gcs/{quote(name)}"
        response = self._repeat(lambda: self._get(path, may_be_absent=True), PATIENCE_S)
        return response.status_code == 200

    def put_package(self, name: str, data: bytes) -> None:
        """Upload an archive; the same name always has the same contents."""

        def send() -> None:
            limit = httpx.Timeout(_UPLOAD_S, connect=_CONNECT_S)
            url = self._url(f"/api/packages/gcs/{quote(name)}")
            try:
                response = self._http.put(url, content=data, timeout=limit)
            except httpx.HTTPError as error:
                raise self._unreachable(error) from error
            self._check_front(response)
            if 400 <= response.status_code < 500:
                raise SubmissionError(
                    f"{self.dashboard.url} refuses an archive of {len(data) / 1024**2:.1f} MiB: "
                    f"{_last_line(response.text)} (HTTP {response.status_code}). A proxy before "
                    "the dashboard may have a lower limit than Ray's 100 MiB."
                )
            if response.status_code != 200:
                raise Unanswered(
                    f"{self.dashboard.url} answered {response.status_code} to an upload."
                )

        self._repeat(send, 60.0)

    # ------------------------------------------------------------------ logs

    def tail(self, submission_id: str) -> Iterator[str]:
        """The log from its first character on, as it grows, by WebSocket.

        The end of the stream means nothing about the job.

        Raises:
            StreamCut: it was cut off, or could not be opened.
        """
        url = self._url(f"{self._job_path(submission_id)}/logs/tail")
        options: dict[str, Any] = {}
        if url.startswith("https"):
            options["ssl"] = _tls(self.dashboard.verify)
        try:
            with websockets.sync.client.connect(
                "ws" + url.removeprefix("http"),
                additional_headers=self.dashboard.headers,
                compression=None,
                proxy=None if self.dashboard.is_loopback else True,
                open_timeout=_READ_S,
                close_timeout=_GOODBYE_S,
                ping_interval=None,  # Ray only sends on this socket: it answers no ping
                max_size=_MESSAGE_MAX_BYTES,
                **options,
            ) as stream:
                _keep_alive(stream.socket)
                silent_s = 0.0
                while True:
                    try:
                        message = stream.recv(timeout=_SILENCE_S)
                    except TimeoutError:
                        silent_s += _SILENCE_S
                        self._check_silence(submission_id, silent_s)
                        continue
                    except ConnectionClosedOK:
                        return
                    silent_s = 0.0
                    yield message if isinstance(message, str) else message.decode()
        except InvalidStatus as error:
            if error.response.status_code == 404:
                raise self._no_such_job(submission_id) from error
            if error.response.status_code in (401, 403):
                raise Unauthorised(f"{url}: HTTP {error.response.status_code}") from error
            raise StreamCut(f"{url}: HTTP {error.response.status_code}") from error
        except (WebSocketException, OSError, TimeoutError) as error:
            raise StreamCut(f"{url}: {error}") from error

    def _check_silence(self, submission_id: str, silent_s: float) -> None:
        """Whether to wait on: a stream may be dead without anybody's goodbye."""
        row = self.job(submission_id, patience_s=0.0)
        if row is None or row["status"] not in ("PENDING", "RUNNING") or silent_s >= _SILENCE_MAX_S:
            raise StreamCut(f"the log of {submission_id} was silent for {silent_s:.0f} s")

    def whole_log(self, submission_id: str) -> Iterator[str]:
        """The log as it is now, piece by piece, whatever its size.

        Of a job that never started Ray gives none; its message is what there is.

        Raises:
            StreamCut: it broke off.
            JobError: the cluster has no such job.
        """
        url = self._url(f"{self._job_path(submission_id)}/logs")
        limit = httpx.Timeout(_POST_S, connect=_CONNECT_S)
        try:
            with self._http.stream("GET", url, timeout=limit) as response:
                if response.status_code == 404:
                    raise self._no_such_job(submission_id)
                if response.status_code != 200:
                    raise StreamCut(f"{url}: HTTP {response.status_code}")
                is_empty = True
                for text in decode_log(response.iter_text()):
                    is_empty = False
                    yield text
        except httpx.HTTPError as error:
            raise StreamCut(f"{url}: {error}") from error
        row = (self.job(submission_id) if is_empty else None) or {}
        never_started = row.get("status") == "FAILED" and row.get("driver_exit_code") is None
        if never_started and row.get("message"):
            yield f"{row['message'].strip()}\n"

    def last_lines(self, node: str, submission_id: str, count: int) -> list[str]:
        """The end of a job's log by Ray's state API. It explains; nothing is decided by it."""
        text = self._log_file(node, f"job-driver-{submission_id}.log", count)
        return text.splitlines()[-count:]

    def roles(self, node: str, submission_id: str) -> dict[str, Any]:
        """What a group's driver wrote of its roles; empty when there is nothing of it."""
        text = self._log_file(node, file_name(submission_id), -1)
        try:
            return dict(json.loads(text)) if text else {}
        except ValueError:
            return {}  # Ray's own words, about a file that is not there

    @cached_property
    def env_builds(self) -> EnvBuilds:
        """The runtime environments that the cluster builds now."""
        return EnvBuilds(
            self._runtime_envs, lambda node: self._log_file(node, AGENT_LOG, AGENT_LOG_LINES)
        )

    def _runtime_envs(self) -> list[dict[str, Any]]:
        """By Ray's state API; none when it does not say."""
        query = {"limit": "10000", "timeout": "3"}
        try:
            url = self._url("/api/v0/runtime_envs")
            answer = self._http.get(url, params=query, timeout=_EXPLAIN_S)
            return list(answer.json()["data"]["result"]["result"])
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        except (ValueError, KeyError, TypeError):
            return []

    def _log_file(self, node: str, name: str, lines: int) -> str:
        query = {"node_id": node, "filename": name, "lines": str(lines), "media_type": "file"}
        try:
            response = self._http.get(self._url("/api/v0/logs/file"), params=query)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        return response.text if response.status_code == 200 else ""

    # ------------------------------------------------------------------ one request

    def _read_table(self) -> dict[str, dict[str, Any]]:
        rows = self._rows()
        if time.monotonic() - self._woken_at > _WAKE_AGAIN_S:
            self._woken_at = time.monotonic()
            orphan = self._orphan(rows)
            if orphan and self._wake(orphan):
                rows = self._rows()
            elif orphan:
                self._woken_at -= _WAKE_AGAIN_S - _WAKE_FAILED_S
        return rows

    def _orphan(self, rows: dict[str, dict[str, Any]]) -> str:
        """Id of a job that nobody may look after: it has been about to start for long, or runs on
        a node that is gone. Empty if there is none.
        """
        for name, row in rows.items():
            age_s = time.time() - (row.get("start_time") or 0) / 1000
            if row.get("status") == "PENDING" and age_s > _PENDING_LONG_S:
                return name
        running = {
            row["driver_node_id"]: name
            for name, row in rows.items()
            if row.get("status") == "RUNNING" and row.get("driver_node_id")
        }
        if not running:
            return ""
        try:
            response = self._http.get(self._url("/api/v0/nodes"), params={"limit": "10000"})
            nodes = response.json()["data"]["result"]["result"]
            alive = {row["node_id"] for row in nodes if row["state"] == "ALIVE"}
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return ""  # this look was a courtesy
        return next((name for node, name in running.items() if node not in alive), "")

    def _wake(self, submission_id: str) -> bool:
        """Make Ray look after the jobs of a head that died; whether it does now.

        Its job manager comes to life with the first request to it, and until then jobs whose
        supervisors died with the head stay RUNNING (measured with Ray 2.54 and 2.60 and a
        fault-tolerant GCS). A request for an id that is taken changes nothing else.
        """
        try:
            self.post(claim_body(submission_id, "", "woken"))  # if its row is gone by now
        except Taken:
            time.sleep(_WAKE_S)
            return True
        except (SubmissionError, ClusterError) as error:
            log.debug("Ray was not woken: %s", error)
        return False

    def _rows(self) -> dict[str, dict[str, Any]]:
        response = self._get("/api/jobs/")
        rows = self._json(response)
        if not isinstance(rows, list):
            raise self._not_ray(response)
        return {row["submission_id"]: row for row in rows if row.get("submission_id")}

    def _get(self, path: str, may_be_absent: bool = False) -> httpx.Response:
        try:
            response = self._http.get(self._url(path))
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        self._check_front(response)
        if response.status_code >= 500:
            raise Unanswered(
                f"{self.dashboard.url} answered {response.status_code} to GET {path}: "
                f"{_last_line(response.text)}. Look at the dashboard's log, or try again later."
            )
        if response.status_code != 200 and not (may_be_absent and response.status_code == 404):
            raise self._not_ray(response)
        return response

    def _repeat(self, ask: Callable[[], _T], patience_s: float) -> _T:
        if patience_s <= 0:
            return ask()
        attempts = Retrying(
            retry=retry_if_exception_type(Unanswered),
            stop=stop_before_delay(patience_s),
            wait=wait_random_exponential(multiplier=0.2, max=3),
            reraise=True,
        )
        return attempts(ask)

    def _url(self, path: str) -> str:
        return f"{self.dashboard.url}{path}"

    def _job_path(self, submission_id: str) -> str:
        return f"/api/jobs/{quote(submission_id, safe='')}"

    def _json(self, response: httpx.Response) -> Any:
        try:
            return response.json()
        except ValueError as error:
            raise self._not_ray(response) from error

    # ------------------------------------------------------------------ translation of failures

    def _unreachable(self, error: httpx.HTTPError) -> ClusterError:
        if isinstance(error, httpx.LocalProtocolError):
            return Unreachable(
                f"The request to {self.dashboard.url} cannot be formed: a header or the token "
                "holds a character that HTTP does not allow (it is not shown here). Correct it."
            )
        why_dead = self.dashboard.why_dead()
        if why_dead:  # nobody needs to ask again
            return Unreachable(why_dead)
        cause = str(error) or type(error).__name__
        if "CERTIFICATE_VERIFY_FAILED" in cause:
            step = "Renew the certificate, or give its CA: ExistingCluster(url, verify='ca.pem')."
        elif re.search("WRONG_VERSION_NUMBER|record layer failure", cause, re.IGNORECASE):
            step = "No TLS is spoken there: try http:// in the address."
        elif isinstance(error, httpx.ConnectError):
            step = "Is the address right, the cluster up, a tunnel open?"
        else:
            step = "It may be overloaded, or not be a Ray dashboard."
        return Unanswered(
            f"Ray's dashboard at {self.dashboard.url} cannot be reached: {cause}. {step}"
        )

    def _not_ray(self, response: httpx.Response) -> Unreachable:
        kind = response.headers.get("content-type", "no content type")
        return Unreachable(
            f"{self.dashboard.url} is not a Ray dashboard: {response.request.url} answered "
            f"{response.status_code} ({kind}), expected Ray's JSON. Give the address of the "
            "dashboard, usually port 8265 of the head, with the path prefix if a proxy adds one."
        )

    def _check_front(self, response: httpx.Response) -> None:
        """Refuse what is no answer of Ray's jobs: a redirect, or the wish for other credentials."""
        if response.is_redirect:
            raise Unreachable(
                f"{self.dashboard.url} sends requests on to {response.headers.get('location')}; "
                "jobs are not sent through redirects. Give the address that it names."
            )
        if response.status_code not in (401, 403):
            return
        sent = any(name.lower() == "authorization" for name in self.dashboard.headers)
        found = "The token that was sent is not its token" if sent else "No token was sent"
        raise Unauthorised(
            f"Ray's dashboard at {self.dashboard.url} answered {response.status_code}: "
            f"{_last_line(response.text)}. {found}. Set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH, "
            "write ~/.ray/auth_token, or give ExistingCluster(url, token=…)."
        )

    def _no_such_job(self, submission_id: str) -> JobError:
        return JobError(f"Ray at {self.dashboard.url} has no job {submission_id}.")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip(" .")]
    return (lines[-1] if lines else "no text")[:300].rstrip(".")


def _answered_id(response: httpx.Response) -> object:
    try:
        return response.json()["submission_id"]
    except (ValueError, KeyError, TypeError):
        return None


def _keep_alive(stream: socket.socket) -> None:
    """Let the kernel notice within a minute that the other end of a silent stream is gone."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):  # not on every system
            stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _tls(verify: bool | str) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=verify if isinstance(verify, str) else None)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(
            f"ExistingCluster.verify names {verify!r}, which holds no certificates ({error}); "
            "expected a PEM file with the CA to trust."
        ) from error
    if verify is False:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
