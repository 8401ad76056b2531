"""The few requests that the dispatcher makes, with the standard library alone.

It runs beside the dashboard, perhaps for days, on a head that has other things to do: one
connection, a time limit on everything, and never the whole job table as objects at once.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import time
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple
from urllib.parse import quote, urlencode, urlsplit

from ..lost_ends import ANSWER_S, LINES, LOG_FILE, log_query
from ..rows import JobRow, job_row
from ..variables import DASHBOARD, EMBEDDED

#: Seconds that one request may take.
TIMEOUT_S = 30.0
#: Statuses below 500 that say "later": a time-out, and limits of a proxy.
_LATER = {408, 425, 429}
#: How Ray's head hands on, with the status 500, that the agent of a node refuses a job.
_AGENT_REFUSES = re.compile(r"\bRequest failed with status code (4\d\d)\b")
#: What is between the rows of a JSON list, and before the first one.
_BETWEEN = re.compile(r"[\[,\s]*")
_ASK_RAY = "from ray.dashboard.utils import ray_address_to_api_server_url as find;print(find(None))"


class Unanswered(Exception):
    """The dashboard gave no usable answer; the same request may be answered later.

    Attributes:
        after_s: seconds until then, as the answer says.
    """

    def __init__(self, words: str, after_s: float = 0.0) -> None:
        super().__init__(words)
        self.after_s = after_s


class RequestRefused(Exception):
    """Ray refuses the request; asking again changes nothing."""


def is_passing(status: int) -> bool:
    """Whether an answer says that the same request may succeed later."""
    return status >= 500 or status in _LATER


def refuses_job(status: int, text: str) -> bool:
    """Whether an answer to a new job means that it can never be taken."""
    inner = _AGENT_REFUSES.search(text) if status == 500 else None
    if inner:
        return not is_passing(int(inner[1]))
    return 400 <= status < 500 and not is_passing(status)


def retry_after_s(header: Optional[str]) -> float:
    """Seconds until a request may be repeated, by the header Retry-After: a number or a date."""
    text = (header or "").strip()
    if re.fullmatch(r"[0-9]{1,9}", text):
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        return 0.0


class Rest:
    """One dashboard, as seen from the head."""

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S) -> None:
        self.url = url
        self._timeout_s = timeout_s
        self._after_s = 0.0  # of the last answer
        self._connection: Optional[http.client.HTTPConnection] = None

    def session(self) -> str:
        """Ray's name of the cluster's life."""
        return str(_object(self._ask("GET", "/api/version")).get("session_name", ""))

    def rows(self) -> Iterator[JobRow]:
        """The job table, a row at a time.

        Raises:
            Unanswered: it cannot be read.
        """
        text = self._ask("GET", "/api/jobs/").decode(errors="replace")
        decoder, position = json.JSONDecoder(), 0
        try:
            while text[(position := _skip(text, position))] != "]":  # Python 3.9 wants both
                value, position = decoder.raw_decode(text, position)
                row = job_row(value)
                if row is not None:
                    yield row
        except (ValueError, IndexError, RecursionError) as error:
            raise Unanswered(f"{self.url} gave a job table that cannot be read: {error}") from error

    def post(self, body: Dict[str, Any]) -> bool:
        """Ask for a job, and return whether Ray took it now. It may have it already.

        Raises:
            Unanswered: it is not known what became of the request; the table tells.
            RequestRefused: Ray does not take it.
        """
        status, text = self._send("POST", "/api/jobs/", json.dumps(body).encode())
        if status == 200:
            return True
        if b"already exists" in text:
            return False
        # A token may be renewed, and what listens while the head restarts may know no jobs.
        if refuses_job(status, text.decode(errors="replace")) and status not in (401, 403, 404):
            raise RequestRefused(f"Ray refuses it: {_last_line(text)} (HTTP {status})")
        raise self._unanswered(status, "a new job", text)

    def stop(self, submission_id: str) -> None:
        """Ask Ray to stop a job, which is harmless when it has ended."""
        path = f"/api/jobs/{quote(submission_id, safe='')}/stop"
        status, text = self._send("POST", path, b"")
        if status != 200 and status != 404:
            raise self._unanswered(status, "a stop", text)

    def log_end(self, node: str, submission_id: str) -> Optional[str]:
        """The end of a job's log; ``None`` when it cannot be had now."""
        query = {**log_query(node, submission_id, LINES), "timeout": str(ANSWER_S)}
        try:
            status, text = self._send("GET", f"{LOG_FILE}?{urlencode(query)}")
        except Unanswered:
            return None
        return text.decode(errors="replace") if status == 200 and text else None

    def put_package(self, name: str, data: bytes) -> None:
        self._ask("PUT", f"/api/packages/gcs/{quote(name)}", data)

    def _ask(self, method: str, path: str, data: Optional[bytes] = None) -> bytes:
        status, text = self._send(method, path, data)
        if status != 200:
            raise self._unanswered(status, f"{method} {path}", text)
        return text

    def _unanswered(self, status: int, what: str, text: bytes) -> Unanswered:
        return Unanswered(
            f"{self.url} answered {status} to {what}: {_last_line(text)}", self._after_s
        )

    def _send(self, method: str, path: str, data: Optional[bytes] = None) -> Tuple[int, bytes]:
        headers = {"Content-Type": "application/json", **_authorization()}
        try:
            if self._connection is None:
                self._connection = _connection(self.url, self._timeout_s)
            self._connection.request(method, urlsplit(self.url).path + path, data, headers)
            answer = self._connection.getresponse()
            self._after_s = retry_after_s(answer.getheader("Retry-After"))
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            if self._connection is not None:
                self._connection.close()
            self._connection = None
            raise Unanswered(
                f"{self.url} cannot be reached: {error or type(error).__name__}"
            ) from error


def own_dashboard() -> str:
    """The dashboard's address where whoever started this Ray has set it; empty elsewhere.

    An embedded Ray that a job has started inherits the variable of the cluster around it.
    """
    return "" if os.environ.get(EMBEDDED) else os.environ.get(DASHBOARD, "")


def candidates(given: Sequence[str]) -> Iterator[str]:
    """Addresses at which the dashboard may be, the likeliest first.

    Args:
        given: as the client knows it: its port is the dashboard's unless a tunnel or a proxy is
            between them, and then Ray itself is asked.
    """
    known = own_dashboard()
    if known:
        # The token of this cluster is shown to no other that may listen at a port.
        yield known
        return
    head = os.environ.get("RAY_ADDRESS", "").rpartition(":")[0]
    ports = [urlsplit(url).port for url in given if urlsplit(url).port]
    for port in dict.fromkeys([*ports, 8265]):
        for host in filter(None, (head, "127.0.0.1")):
            yield f"http://{host}:{port}"
    yield from given
    yield from _ask_ray()


def _ask_ray() -> Iterator[str]:
    """The address as Ray knows it, by an interpreter that has ray; this takes a second or two."""
    for python in ("python3", "python"):
        try:
            done = subprocess.run(
                [python, "-c", _ASK_RAY], stdout=subprocess.PIPE, text=True, timeout=60
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        found = done.stdout.strip().splitlines()
        if done.returncode == 0 and found:
            yield found[-1]
            return


def _authorization() -> Dict[str, str]:
    """Ray's token, from where Ray itself takes it. It is read anew, since it may be renewed."""
    token = os.environ.get("RAY_AUTH_TOKEN", "").strip()
    path = os.environ.get("RAY_AUTH_TOKEN_PATH") or str(Path.home() / ".ray" / "auth_token")
    if not token:
        try:
            token = Path(path).read_text(encoding="utf-8").strip()
        except OSError:
            return {}  # a cluster without tokens
    return {"Authorization": f"Bearer {token}"} if token else {}


def _connection(url: str, timeout_s: float) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    if parts.scheme == "https":
        return http.client.HTTPSConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)


def _object(text: bytes) -> Dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unanswered("the answer is not Ray's") from error
    if not isinstance(found, dict):
        raise Unanswered("the answer is not Ray's")
    return found


def _skip(text: str, position: int) -> int:
    between = _BETWEEN.match(text, position)
    return between.end() if between else position


def _last_line(text: bytes) -> str:
    lines: List[str] = [line.strip() for line in text.decode("utf-8", "replace").splitlines()]
    return next((line for line in reversed(lines) if line.strip(".")), "no text")[:300]
