"""Following a log by a WebSocket that stands still, as on a busy head."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from websockets.sync.server import Server, ServerConnection, serve

from nemo_run_ray.clusters.base import Dashboard
from nemo_run_ray.dashboard import log_stream
from nemo_run_ray.dashboard.http import Http
from nemo_run_ray.dashboard.log_stream import LogStream
from nemo_run_ray.errors import StreamCut


class Head:
    """Sends ``texts``, and is silent then until its client has left; says how its job is."""

    def __init__(self) -> None:
        self.texts = ["begins\n"]
        self.status = "RUNNING"
        self.looks = 0
        self.over_after = 3
        self._server: Server = serve(self._send, "127.0.0.1", 0)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        port = self._server.socket.getsockname()[1]
        self.logs = LogStream(Http(Dashboard(f"http://127.0.0.1:{port}")), self._row)

    def goes_on(self) -> bool:
        self.looks += 1
        return self.looks < self.over_after

    def close(self) -> None:
        self._server.shutdown()

    def _row(self, _: str) -> dict[str, str]:
        return {"status": self.status}

    def _send(self, connection: ServerConnection) -> None:
        for text in self.texts:
            connection.send(text)
        for _ in connection:
            pass


@pytest.fixture
def head(monkeypatch) -> Iterator[Head]:
    monkeypatch.setattr(log_stream, "_BEGIN_S", 0.05)
    monkeypatch.setattr(log_stream, "_LOOK_S", 0.05)
    head = Head()
    yield head
    head.close()


def test_a_stream_that_stands_still_is_cut_when_its_job_is_over(head):
    """At the second look that says so: the last words have as long to come."""
    texts = head.logs.tail("job", head.goes_on)
    assert next(texts) == "begins\n"
    with pytest.raises(StreamCut, match="was silent"):
        next(texts)
    assert head.looks == head.over_after + 1


def test_the_stream_of_an_attempt_that_is_over_is_cut_while_others_go_on(head, monkeypatch):
    monkeypatch.setattr(log_stream, "_SILENCE_S", 0.3)
    head.over_after, head.status = 1000, "FAILED"
    with pytest.raises(StreamCut, match="was silent"):
        list(head.logs.tail("job", head.goes_on))
    assert 5 <= head.looks <= 7


def test_a_stream_that_never_begins_ends_with_its_job(head):
    head.texts = []
    assert list(head.logs.tail("job", head.goes_on)) == []
    assert head.looks == head.over_after


def test_silence_of_a_job_that_goes_on_is_waited_for(head, monkeypatch):
    monkeypatch.setattr(log_stream, "_SILENCE_S", 0.1)
    monkeypatch.setattr(log_stream, "_SILENCE_MAX_S", 1.0)
    head.over_after = 1000
    with pytest.raises(StreamCut, match="silent for 1 s"):
        list(head.logs.tail("job", head.goes_on))
    assert 19 <= head.looks <= 21
