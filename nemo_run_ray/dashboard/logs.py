"""The log of a job: by Ray's Jobs API as it grows, by Ray's state API as it is now.

The agent of a node that is asked for a log by the Jobs API starts a job manager, which writes over
the exit codes of jobs that fail at this moment (``remote/end_record.py``). The state API starts
none, but a stream of it continues in the agent for ever when its reader is gone (Ray 2.60).
"""

from __future__ import annotations

import codecs
import io
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
from websockets.exceptions import ConnectionClosedOK, InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection, connect

from nemo_run_ray.clusters.base import text_of
from nemo_run_ray.dashboard.http import READ_S, SLOW_S, Http, tls
from nemo_run_ray.errors import JobError, StreamCut, Unanswered, Unauthorised, Unreachable
from nemo_run_ray.remote.dashboard import LOG_FILE, log_query
from nemo_run_ray.remote.spec import JobRow
from nemo_run_ray.remote.status import JobState, is_active, state_of_row

#: Ray's own WebSocket inside the cluster takes 4 MiB; longer lines never arrive that way.
_MESSAGE_MAX_BYTES = 8 * 1024**2
#: Seconds that a log stream gets for its close. Ray reads nothing on that socket and never answers.
_CLOSE_S = 0.1
#: Seconds of a log stream's silence until the job is looked at, from the first time on which an
#: unanswered look counts, and until the stream is given up. On a busy head a stream may stand
#: still, and NeMo-Run waits for a log only until 10 s after the job's end (0.12).
_LOOK_S, _UNANSWERED_S, _SILENCE_MAX_S = 5.0, 15.0, 300.0
#: Seconds from one look to the next at a job whose stream has not begun: it may never start.
_BEGIN_S = 1.0
#: Seconds that the state API may take for all of a log.
_READING_MAX_S = "86400"
#: Answers of a front that passes the Jobs API on and not the state API.
_CLOSED = {401, 403, 404, 405, 501}


class _Refused(Exception):
    """The answer to the wish for a WebSocket is another one."""

    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP {status}; redirects are not followed")
        self.status = status


class _Connection(ClientConnection):
    """One that is never redirected: ``connect`` would take headers along to another origin."""

    def handshake(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().handshake(*args, **kwargs)
        except InvalidStatus as error:
            raise _Refused(error.response.status_code) from error


class LogStream:
    """The logs of one cluster's jobs.

    Args:
        http: the dashboard.
        row: gives a job's row now, ``None`` when there is none.
        left: gives the log of a job from before this Ray, ``None`` of every other.
    """

    def __init__(
        self,
        http: Http,
        row: Callable[[str], JobRow | None],
        left: Callable[[str], Path | None] = lambda _: None,
    ) -> None:
        self._http = http
        self._row = row
        self._left = left

    def tail(self, submission_id: str, may_begin: Callable[[], bool]) -> Iterator[str]:
        """The log from its first character on, as it grows, by WebSocket.

        The end of the stream means nothing about the job.

        Args:
            submission_id: of the job.
            may_begin: asked until the first text comes; a stream that will never begin ends.

        Raises:
            StreamCut: it was cut off, or could not be opened.
            Unreachable: nothing listens there.
            JobError: the cluster has no such job.
            Unauthorised: other credentials are wanted.
        """
        path = self._left(submission_id)
        if path is not None:
            yield from text_of(path)
            return
        url = self._http.url(f"{_path(submission_id)}/tail")
        try:
            with self._open(url) as stream:
                yield from self._messages(stream, submission_id, may_begin)
        except _Refused as error:
            if error.status == 404:
                raise self._no_such_job(submission_id) from error
            if error.status in (401, 403):
                raise Unauthorised(f"{url}: {error}") from error
            raise StreamCut(f"{url}: {error}") from error
        except ConnectionRefusedError as error:
            raise self._http.unreachable(httpx.ConnectError(str(error))) from error
        except (WebSocketException, OSError, TimeoutError) as error:
            raise StreamCut(f"{url}: {error}") from error

    def whole(self, submission_id: str, silence_s: float = SLOW_S) -> Iterator[str]:
        """The log as it is now, piece by piece, whatever its size.

        Ray gives none of a job that never started; its message is what there is.

        Args:
            submission_id: of the job.
            silence_s: seconds without a further piece after which it has broken off.

        Raises:
            StreamCut: it broke off.
            Unreachable: nothing listens there.
            JobError: the cluster has no such job, or its log is too large for the Jobs API.
        """
        left = self._left(submission_id)
        if left is not None:
            yield from text_of(left)
            return
        row = self._row(submission_id)
        if row is None:
            raise self._no_such_job(submission_id)
        is_empty = True
        try:
            for text in filter(None, self._now(row, submission_id, silence_s)):
                is_empty = False
                yield text
        except httpx.ConnectError as error:
            raise self._http.unreachable(error) from error
        except httpx.HTTPError as error:
            raise StreamCut(f"the log of {submission_id}: {error}") from error
        row = (self._row(submission_id) if is_empty else None) or {}
        has_failed = state_of_row(row) is JobState.FAILED and row.get("driver_exit_code") is None
        if has_failed and row.get("message"):
            yield f"{str(row['message']).strip()}\n"

    def _now(self, row: JobRow, submission_id: str, silence_s: float) -> Iterator[str]:
        """The log, or by the Jobs API where a front keeps the state API closed."""
        node = row.get("driver_node_id")
        if node:
            query = {**log_query(node, submission_id, -1), "timeout": _READING_MAX_S}
            with self._http.stream(LOG_FILE, silence_s, query) as response:
                if response.status_code == 200:
                    yield from decode_text(response.iter_bytes())
                    return
                if response.status_code not in _CLOSED:
                    raise StreamCut(f"{self._http.url(LOG_FILE)}: HTTP {response.status_code}")
        try:
            response = self._http.get(_path(submission_id), may_be_absent=True, limit_s=silence_s)
        except Unreachable as error:
            if not isinstance(error.__cause__, httpx.DecodingError):
                raise
            raise JobError(
                f"The log of {submission_id} cannot be read, since {error.__cause__} and "
                f"{self._http.url(LOG_FILE)} is closed. Let the proxy pass that address on."
            ) from error
        if response.status_code == 404:
            raise self._no_such_job(submission_id)
        yield self._http.read(response, lambda answer: str(answer["logs"]))

    def _open(self, url: str) -> ClientConnection:
        dashboard = self._http.dashboard
        opened: ClientConnection = connect(
            "ws" + url.removeprefix("http"),
            additional_headers=dashboard.headers,
            compression=None,
            proxy=self._http.proxy,
            ssl=tls(dashboard.verify) if url.startswith("https") else None,
            open_timeout=READ_S,
            close_timeout=_CLOSE_S,
            ping_interval=None,  # Ray only sends on this socket: it answers no ping
            max_size=_MESSAGE_MAX_BYTES,
            create_connection=_Connection,
        )
        return opened

    def _messages(
        self, stream: ClientConnection, submission_id: str, may_begin: Callable[[], bool]
    ) -> Iterator[str]:
        silent_s, has_begun = 0.0, False
        while True:
            patience_s = _LOOK_S if has_begun else _BEGIN_S
            try:
                message = stream.recv(timeout=patience_s)
            except TimeoutError:
                silent_s += patience_s
                if has_begun or silent_s >= _SILENCE_MAX_S:
                    self._check_silence(submission_id, silent_s)
                elif not may_begin():
                    return
                continue
            except ConnectionClosedOK:
                return
            silent_s, has_begun = 0.0, True
            yield message if isinstance(message, str) else message.decode(errors="replace")

    def _check_silence(self, submission_id: str, silent_s: float) -> None:
        """Raise if the stream may be dead, which a missing close does not tell."""
        try:
            row = self._row(submission_id)
        except Unanswered:
            if silent_s < _UNANSWERED_S:  # the stream may be sound all the same
                return
            raise
        if row is None or not is_active(row) or silent_s >= _SILENCE_MAX_S:
            raise StreamCut(f"the log of {submission_id} was silent for {silent_s:.0f} s")

    def _no_such_job(self, submission_id: str) -> JobError:
        return JobError(f"Ray at {self._http.dashboard.url} has no job {submission_id}.")


def _path(submission_id: str) -> str:
    return f"/api/jobs/{quote(submission_id, safe='')}/logs"


def decode_text(pieces: Iterable[bytes]) -> Iterator[str]:
    """The text as Ray's Jobs API reads it: every end of a line is ``\\n``. No byte is lost."""
    utf8 = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    decoder = io.IncrementalNewlineDecoder(utf8, translate=True)
    for piece in pieces:
        yield decoder.decode(piece)
    yield decoder.decode(b"", final=True)
