"""The log of a job: by a WebSocket that stands still, as on a busy head, and out of JSON."""

from __future__ import annotations

import itertools
import json
import threading
import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.http11 import Request
from websockets.sync.server import Server, ServerConnection, serve

from nemo_run_ray.clusters.base import Dashboard
from nemo_run_ray.dashboard import logs
from nemo_run_ray.dashboard.http import Http
from nemo_run_ray.dashboard.logs import LogStream, decode_log
from nemo_run_ray.errors import StreamCut, Unanswered


class Head:
    """Sends a text, or none, and is silent then; ``answers`` are those to the looks at the job.

    It sends on to ``elsewhere`` when that is set, and ``asked`` are the headers of all requests.
    """

    def __init__(self) -> None:
        self.texts = ["begins\n"]
        self.answers: list[str | Exception] = []
        self.elsewhere = ""
        self.asked: list[dict[str, str]] = []
        self._server: Server = serve(self._send, "127.0.0.1", 0, process_request=self._admit)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        port = self._server.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.logs = LogStream(Http(Dashboard(self.url, {"X-Proxy-Token": "secret"})), self._row)

    def close(self) -> None:
        self._server.shutdown()

    def _admit(self, connection: ServerConnection, request: Request) -> object:
        self.asked.append(dict(request.headers))
        if not self.elsewhere:
            return None
        answer = connection.respond(302, "")
        answer.headers["Location"] = self.elsewhere
        return answer

    def _row(self, _: str) -> dict[str, str]:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return {"status": answer}

    def _send(self, connection: ServerConnection) -> None:
        for text in self.texts:
            connection.send(text)
        for _ in connection:
            pass


@pytest.fixture
def head(monkeypatch) -> Iterator[Head]:
    """Its seconds are milliseconds, but for those until the first text."""
    monkeypatch.setattr(logs, "_BEGIN_S", 60.0)
    for name in ("_LOOK_S", "_SILENCE_S", "_SILENCE_MAX_S"):
        monkeypatch.setattr(logs, name, getattr(logs, name) / 1000)
    head = Head()
    yield head
    head.close()


def cut(head: Head) -> str:
    """How a stream that has begun is cut."""
    texts = head.logs.tail("job", lambda: pytest.fail("it has begun"))
    assert next(texts) == "begins\n"
    with pytest.raises((StreamCut, Unanswered)) as raised:
        next(texts)
    return str(raised.value)


def test_a_stream_that_stands_still_is_cut_at_the_first_look_after_its_jobs_end(head):
    head.answers = ["RUNNING", "RUNNING", "SUCCEEDED", "unasked"]
    # After 3, 6 and 12 s.
    assert cut(head) == "the log of job was silent for 0 s"
    assert head.answers == ["unasked"]


def test_a_look_without_an_answer_does_not_cut_a_stream_that_is_silent_for_seconds(head):
    head.answers = ["RUNNING", Unanswered("busy"), Unanswered("busy"), "FAILED"]
    assert "was silent" in cut(head)


def test_a_dead_cluster_is_told_after_a_while(head):
    head.answers = ["RUNNING"] * 3 + [Unanswered("away"), "unasked"]
    assert cut(head) == "away"
    assert head.answers == ["unasked"]


def test_a_silent_job_is_looked_at_every_fifteen_seconds_and_no_longer_than_five_minutes(head):
    head.answers = ["RUNNING"] * 50
    assert "was silent" in cut(head)
    assert len(head.answers) == 50 - (4 + 19)  # 3, 6, 12, 24, and then every 15 until 309


def test_a_stream_that_never_begins_ends_with_its_job(head, monkeypatch):
    monkeypatch.setattr(logs, "_BEGIN_S", 0.001)
    head.texts = []
    looks = iter([True, True, False])
    assert list(head.logs.tail("job", lambda: next(looks))) == []


def test_a_stream_is_not_redirected_and_its_headers_reach_nobody_else(head):
    other = Head()
    try:
        for elsewhere in (other.url, head.url):
            head.elsewhere = f"{elsewhere}/elsewhere".replace("http", "ws")
            with pytest.raises(StreamCut, match=f"redirect to {head.elsewhere}, which is not foll"):
                next(head.logs.tail("job", lambda: True))
        assert other.asked == []
        assert [sent["x-proxy-token"] for sent in head.asked] == ["secret"] * 2
    finally:
        other.close()


def test_bytes_that_are_no_text_do_not_end_a_log(head):
    head.texts = [b"\xff\n"]
    assert next(head.logs.tail("job", lambda: True)) == "\ufffd\n"


# ------------------------------------------------------------------ the text in Ray's JSON

_texts = st.text(max_size=60) | st.text(
    'a"\\/\n\r\t\0\x1fué😀\u2028\ud7ff\ue000\U0010ffff', max_size=40
)
_bodies = st.tuples(_texts, st.booleans(), st.booleans()).map(
    lambda drawn: (
        drawn[0],
        json.dumps(
            {"logs": drawn[0]},
            ensure_ascii=drawn[1],
            separators=(",", ":") if drawn[2] else None,
        ),
    )
)


def _cut(text: str, sizes: list[int]) -> list[str]:
    pieces = []
    for size in itertools.cycle(sizes):
        if not text:
            return pieces
        pieces.append(text[:size])
        text = text[size:]


@given(_bodies, st.lists(st.integers(1, 15), min_size=1, max_size=8))
def test_every_text_however_it_is_cut(body, sizes):
    text, sent = body
    assert "".join(decode_log(iter(_cut(sent, sizes)))) == text


@given(_bodies, st.lists(st.integers(1, 15), min_size=1, max_size=8), st.floats(0, 1))
def test_an_answer_that_ends_early_is_noticed(body, sizes, share):
    text, sent = body
    found: list[str] = []
    pieces = decode_log(iter(_cut(sent[: int((len(sent) - 2) * share)], sizes)))
    with pytest.raises(StreamCut):
        found.extend(pieces)
    assert text.startswith("".join(found))


def test_a_large_log_needs_little_memory():
    line = json.dumps("0123456789 é\t" * 400)[1:-1]
    pieces = itertools.chain(['{"logs": "'], itertools.repeat(line, 2000), ['"}'])
    tracemalloc.start()
    try:
        size = sum(len(piece) for piece in decode_log(pieces))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size == 13 * 400 * 2000
    assert peak < 8 * 1024**2


def test_an_answer_that_never_comes_to_its_log_is_given_up():
    with pytest.raises(StreamCut, match="has no log"):
        list(decode_log(itertools.repeat(" " * 100)))
