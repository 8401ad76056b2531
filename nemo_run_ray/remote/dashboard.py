"""Requests to a dashboard from the cluster, and while a Ray starts: the standard library alone.

Every request has one deadline and a size limit.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any, Callable, Iterator, Sequence
from urllib.parse import quote, urlencode, urlsplit

from .spec import JobRow, Json, fits, job_rows

#: Seconds from the beginning of a request to the end of its answer.
TIMEOUT_S = 30.0
#: Size limit of an answer. The largest one is the job table.
ANSWER_MAX_BYTES = 256 * 1024**2
#: Path of a log in Ray's state API. A request for it does not start a job manager.
LOG_FILE = "/api/v0/logs/file"
#: Lines at the end of a log in which an end record is looked for, and seconds that Ray gets to
#: read them.
LINES, ANSWER_S = 50, 3
#: Statuses below 500 that say "later": a time-out, and limits of a proxy.
_LATER = {408, 425, 429}
#: Ray's head answers with this text, and the status 500, when the agent of a node refuses a job.
_AGENT_REFUSES = re.compile(r"\bRequest failed with status code (4\d\d)\b")
_NODES = {"data": {"result": {"result": [{"node_id": str, "node_ip": str, "state": str}]}}}
_ASK_RAY = "from ray.dashboard.utils import ray_address_to_api_server_url as find;print(find(None))"


class Unanswered(Exception):
    """The dashboard gave no usable answer; the same request may be answered later."""


class RequestRefused(Exception):
    """Ray refuses the request; asking again changes nothing."""


def ray_token() -> str:
    """Ray's token of this user, from where Ray itself takes it; empty if there is none.

    Raises:
        OSError: its file cannot be read, or RAY_AUTH_TOKEN_PATH names none.
    """
    token = os.environ.get("RAY_AUTH_TOKEN", "").strip()
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(named or "~/.ray/auth_token").expanduser()
    try:
        return token or path.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        if named:
            raise
        return ""  # a cluster without tokens


class DashboardClient:
    """One dashboard. Redirects are not followed, and nothing is asked through a proxy.

    The token is asked for at each request, since it may be renewed.
    """

    def __init__(
        self, url: str, token: Callable[[], str] = ray_token, timeout_s: float = TIMEOUT_S
    ):
        self.url = url
        self.token = token
        self._timeout_s = timeout_s

    def session(self) -> str:
        """Ray's name of this start of the cluster."""
        return str(self._read("/api/version", Json).get("session_name", ""))

    def alive_nodes(self) -> list[Json]:
        """Ray's rows of the living nodes, with ``node_id`` and ``node_ip``."""
        answer = self._read("/api/v0/nodes?limit=10000", _NODES)
        return [row for row in answer["data"]["result"]["result"] if row["state"] == "ALIVE"]

    def rows(self) -> list[JobRow]:
        """The rows of the job table that are of submitted jobs."""
        return job_rows(self.table())

    def table(self) -> list[Json]:
        """The job table as Ray gives it, also with programs that were not submitted as jobs."""
        table: list[Json] = self._read("/api/jobs/", list[Json])
        return table

    def post(self, body: Json) -> bool:
        """Ask for a job, and return whether Ray took it now. It may have it already.

        Raises:
            Unanswered: it is not known whether the request arrived; the job table tells.
            RequestRefused: Ray does not take it.
        """
        status, text = self._send("POST", "/api/jobs/", json.dumps(body).encode())
        if b"already exists" in text and status != 200:
            return False
        # A token may be renewed, and what listens while the head restarts may know no jobs.
        if refuses_job(status, text.decode(errors="replace")) and status not in (401, 403, 404):
            raise RequestRefused(f"Ray refuses it: {last_line(text)} (HTTP {status})")
        self._check(status, "a new job", text)
        return True

    def stop(self, submission_id: str) -> None:
        """Ask Ray to stop a job, which is harmless when it has ended."""
        status, text = self._send("POST", f"/api/jobs/{quote(submission_id, safe='')}/stop", b"")
        if status != 404:
            self._check(status, "a stop", text)

    def log_end(self, node: str, submission_id: str) -> str | None:
        """The end of a job's log; ``None`` when it is not available now."""
        query = {**log_query(node, submission_id, LINES), "timeout": str(ANSWER_S)}
        try:
            status, text = self._send("GET", f"{LOG_FILE}?{urlencode(query)}")
        except Unanswered:
            return None
        return text.decode(errors="replace") if status == 200 and text else None

    def put_package(self, name: str, data: bytes) -> None:
        status, text = self._send("PUT", f"/api/packages/gcs/{quote(name)}", data)
        self._check(status, "an upload", text)

    def _read(self, path: str, kind: Any) -> Any:
        """The answer to a GET, checked as ``spec.read`` does."""
        status, text = self._send("GET", path)
        self._check(status, f"GET {path}", text)
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise Unanswered(f"the answer of {self.url} cannot be read: {error}") from error
        if not fits(answer, kind):
            raise Unanswered(f"the answer of {self.url} to {path} is not Ray's")
        return answer

    def _check(self, status: int, what: str, text: bytes) -> None:
        if status != 200:
            raise Unanswered(f"{self.url} answered {status} to {what}: {last_line(text)}")

    def _send(self, method: str, path: str, data: bytes | None = None) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json"}
        with suppress(OSError):  # then the cluster says that it wants a token
            token = self.token()
            if token:
                headers["Authorization"] = f"Bearer {token}"
        parts = urlsplit(self.url)
        is_safe = parts.scheme == "https"
        kind = http.client.HTTPSConnection if is_safe else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=self._timeout_s)
        deadline = monotonic() + self._timeout_s
        # The time limit of a socket begins anew with every byte.
        timer = threading.Timer(self._timeout_s, _cut, [connection])
        timer.daemon = True
        try:
            timer.start()
            connection.request(method, parts.path + path, data, headers)
            answer = connection.getresponse()
            content = bytearray()
            # A single read would allocate the size limit at once on Python 3.9.
            while len(content) <= ANSWER_MAX_BYTES and (piece := answer.read(2**20)):
                content += piece
            if len(content) > ANSWER_MAX_BYTES:
                raise ValueError(f"the answer has more than {ANSWER_MAX_BYTES / 1024**2:.0f} MiB")
            if answer.length or monotonic() >= deadline:
                raise http.client.IncompleteRead(bytes(content), answer.length)
            return answer.status, bytes(content)
        except (OSError, http.client.HTTPException, ValueError, RuntimeError) as error:
            is_late = monotonic() >= deadline
            cause = f"timed out after {self._timeout_s:g} s" if is_late else str(error)
            raise Unanswered(
                f"{self.url} cannot be reached: {cause or type(error).__name__}"
            ) from error
        finally:
            timer.cancel()
            connection.close()


def _cut(connection: http.client.HTTPConnection) -> None:
    with suppress(OSError, AttributeError):  # it has ended by now
        connection.sock.shutdown(socket.SHUT_RDWR)


def candidates(given: Sequence[str]) -> Iterator[str]:
    """Addresses at which the dashboard of this job's cluster may be, the likeliest first.

    The port that the client knows is the dashboard's unless a tunnel or a proxy is between them;
    then Ray itself is asked.
    """
    head = os.environ.get("RAY_ADDRESS", "127.0.0.1:").rpartition(":")[0]
    ports = [*filter(None, (urlsplit(url).port for url in given)), 8265]
    yield from dict.fromkeys(
        f"http://{host}:{port}" for port in ports for host in (head, "127.0.0.1")
    )
    yield from given
    with suppress(OSError, subprocess.SubprocessError):  # this takes a second or two
        words = ["python3", "-c", _ASK_RAY]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
        yield done.stdout.strip().rpartition("\n")[2]


def log_query(node: str, submission_id: str, lines: int) -> dict[str, str]:
    """Parameters that ask ``LOG_FILE`` for the end of a job's log, or for all of it by -1 lines."""
    return {
        "node_id": node,
        "filename": f"job-driver-{submission_id}.log",
        "lines": str(lines),
        "media_type": "file",
    }


def is_passing(status: int) -> bool:
    """Whether an answer says that the same request may succeed later."""
    return status >= 500 or status in _LATER


def refuses_job(status: int, text: str) -> bool:
    """Whether an answer to a new job means that it can never be taken."""
    inner = _AGENT_REFUSES.search(text) if status == 500 else None
    code = int(inner[1]) if inner else status
    return 400 <= code < 500 and not is_passing(code)


def last_line(text: bytes) -> str:
    """The last line of an answer that says something: of a traceback, the error."""
    lines = [line.strip(" .") for line in text.decode("utf-8", "replace").splitlines()]
    return next(filter(None, reversed(lines)), "no text")[:300]
