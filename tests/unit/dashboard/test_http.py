"""Answers of a dashboard that would be waited for, or would grow, for ever."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from nemo_run_ray.clusters.base import Dashboard, interrupted
from nemo_run_ray.dashboard import http
from nemo_run_ray.dashboard.http import Http
from nemo_run_ray.errors import ClusterError, Unanswered, Unreachable
from tests.http_server import Handler, serving


class Hostile(Handler):
    """Sends what a test gives, piece by piece, for as long as the client is there."""

    wbufsize = 0
    pieces: Callable[[], Iterator[bytes]]

    def answer(self) -> None:
        self.body()
        self.close_connection = True
        for piece in type(self).pieces():
            try:
                self.wfile.write(piece)
            except OSError:
                return


def drip(begin: bytes, again: bytes) -> Callable[[], Iterator[bytes]]:
    def pieces() -> Iterator[bytes]:
        yield begin
        while True:
            time.sleep(0.05)
            yield again

    return pieces


OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    "pieces",
    [
        drip(b"", b"HTTP/1.1 103 Early Hints\r\nLink: <a>\r\n\r\n"),
        drip(OK, b"X-A: 1\r\n"),
        drip(OK + b"X-A: ", b"1"),
        drip(OK + b"Content-Length: 1000000\r\n\r\n", b"1"),
        drip(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n1\r\n"),
    ],
    ids=["endless 103", "headers", "one header", "body", "chunks"],
)
def test_one_deadline_holds_for_a_whole_request(pieces):
    with serving(Hostile, pieces=staticmethod(pieces)) as url:
        began = time.monotonic()
        with pytest.raises(Unanswered, match="no whole answer came in 1 s"):
            Http(Dashboard(url)).request("GET", "/api/jobs/", 1.0)
        assert time.monotonic() - began < 5


def test_a_stream_begins_before_the_deadline():
    with (
        serving(Hostile, pieces=staticmethod(drip(OK, b"X-A: 1\r\n"))) as url,
        pytest.raises(http.httpx.ReadTimeout),
        Http(Dashboard(url)).stream("/log", 0.5),
    ):
        pass


def test_an_answer_that_does_not_end_is_given_up_at_a_size(monkeypatch):
    monkeypatch.setattr(http, "ANSWER_MAX_BYTES", 1024**2)
    sent = []

    def pieces() -> Iterator[bytes]:
        yield OK + b"Content-Type: application/json\r\n\r\n"
        while True:
            sent.append(b" " * 65536)
            yield sent[-1]

    with serving(Hostile, pieces=staticmethod(pieces)) as url:
        with pytest.raises(Unreachable, match="more than 1 MiB") as caught:
            Http(Dashboard(url)).get("/api/jobs/")
        assert not isinstance(caught.value, Unanswered)


def test_nothing_is_unpacked():
    """0.1 MB would become 100 MB."""
    bomb = gzip.compress(b" " * 100 * 1024**2)
    head = OK + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(bomb)
    with (
        serving(Hostile, pieces=staticmethod(lambda: iter([head, bomb]))) as url,
        pytest.raises(Unreachable, match=r"encoded \(gzip\), which was not asked for"),
    ):
        Http(Dashboard(url)).get("/api/jobs/")


def test_json_that_is_too_deep_is_not_rays():
    text = b"[" * 200_000
    head = OK + b"Content-Length: %d\r\n\r\n" % len(text)
    with serving(Hostile, pieces=staticmethod(lambda: iter([head, text]))) as url:
        front = Http(Dashboard(url))
        with pytest.raises(Unreachable, match="is not a Ray dashboard"):
            front.json(front.get("/api/jobs/"))


@pytest.mark.parametrize(
    "wait",
    [
        lambda front: front.request("GET", "/", 600),
        lambda front: front.request("PUT", "/", 600, content=b"1" * 30_000_000),
        lambda front: http.repeat(lambda: front.get("/", limit_s=0.1), 600),
    ],
    ids=["an answer", "an upload", "many answers"],
)
def test_ctrl_c_ends_every_wait_of_another_thread(wait):
    """Only the main thread sees the signal, and NeMo-Run joins the others."""
    failures: list[str] = []

    def run() -> None:
        try:
            wait(Http(Dashboard(url)))
        except ClusterError as error:
            failures.append(str(error))

    with serving(Hostile, pieces=staticmethod(drip(OK, b"X-A: 1\r\n"))) as url:
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        time.sleep(0.5)
        assert thread.is_alive()
        interrupted.set()
        try:
            thread.join(2)
            assert not thread.is_alive()
        finally:
            interrupted.clear()
    assert failures[0].startswith("Interrupted while waiting for ")
