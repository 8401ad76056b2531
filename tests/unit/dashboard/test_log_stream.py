"""The log of a job by a WebSocket that stands still, as on a busy head."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from websockets.http11 import Request
from websockets.sync.server import Server, ServerConnection, serve

from nemo_run_ray.clusters import Dashboard
from nemo_run_ray.dashboard import jobs
from nemo_run_ray.dashboard.jobs import JobsApi
from nemo_run_ray.errors import JobError, StreamCut, Unauthorised


class Head:
    """Sends a text, or none, and is silent then.

    It sends on to ``elsewhere`` when that is set, and ``asked`` are the headers of all requests.
    """

    def __init__(self) -> None:
        self.texts = ["begins\n"]
        self.status, self.elsewhere = 302, ""
        self.asked: list[dict[str, str]] = []
        self._server: Server = serve(self._send, "127.0.0.1", 0, process_request=self._admit)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        port = self._server.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.api = JobsApi(Dashboard(self.url, {"X-Proxy-Token": "secret"}))

    def close(self) -> None:
        self._server.shutdown()

    def _admit(self, connection: ServerConnection, request: Request) -> object:
        self.asked.append(dict(request.headers))
        if not self.elsewhere:
            return None
        answer = connection.respond(self.status, "")
        answer.headers["Location"] = self.elsewhere
        return answer

    def _send(self, connection: ServerConnection) -> None:
        for text in self.texts:
            connection.send(text)
        for _ in connection:
            pass


@pytest.fixture
def head(monkeypatch) -> Iterator[Head]:
    """Its seconds are milliseconds, but for those until the first text."""
    monkeypatch.setattr(jobs, "_BEGIN_S", 60.0)
    for name in ("_LOOK_S", "_SILENCE_MAX_S"):
        monkeypatch.setattr(jobs, name, getattr(jobs, name) / 1000)
    head = Head()
    yield head
    head.close()


@pytest.mark.parametrize(
    ("looks", "count"), [([True, True, False], 3), ([True] * 99, 59)], ids=["ended", "five minutes"]
)
def test_a_stream_that_stands_still_is_left(head, looks, count):
    asked = []
    texts = head.api.tail_log("job", lambda: asked.append(1) or looks[len(asked) - 1])
    assert list(texts) == ["begins\n"]
    assert len(asked) == count


def test_a_stream_that_never_begins_ends_with_its_job(head, monkeypatch):
    monkeypatch.setattr(jobs, "_BEGIN_S", 0.001)
    head.texts = []
    looks = iter([True, True, False])
    assert list(head.api.tail_log("job", lambda: next(looks))) == []


def test_a_stream_is_not_redirected_and_its_headers_reach_nobody_else(head):
    other = Head()
    try:
        for elsewhere in (other.url, head.url):
            head.elsewhere = f"{elsewhere}/elsewhere".replace("http", "ws")
            with pytest.raises(StreamCut, match="HTTP 302; redirects are not followed"):
                next(head.api.tail_log("job", lambda: True))
        for head.status, kind in ((401, Unauthorised), (403, Unauthorised), (404, JobError)):
            with pytest.raises(kind, match=head.url):
                next(head.api.tail_log("job", lambda: True))
        assert other.asked == []
        assert [sent["x-proxy-token"] for sent in head.asked] == ["secret"] * 5
    finally:
        other.close()
