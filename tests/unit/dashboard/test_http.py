"""Answers of a dashboard that would be waited for, or would grow, for ever."""

from __future__ import annotations

import gzip
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from unittest.mock import Mock

import httpx
import pytest

from nemo_run_ray.clusters import Dashboard, interrupted
from nemo_run_ray.dashboard import http
from nemo_run_ray.dashboard.http import Http
from nemo_run_ray.dashboard.jobs import JobsApi
from nemo_run_ray.errors import ClusterError, ConfigError, StreamCut, Unanswered, Unreachable
from tests.conftest import wait_for
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


FRONT = "http://ray.example.org:8265"
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
        with pytest.raises(Unanswered, match="timed out"):
            Http(Dashboard(url)).request("GET", "/api/jobs/", 1.0)
        assert time.monotonic() - began < 5


def test_requests_are_not_logged(caplog):
    """NeMo-Run shows the INFO of every logger."""
    caplog.set_level(logging.INFO)
    pieces = staticmethod(lambda: iter([OK + b"Content-Length: 0\r\n\r\n"]))
    with serving(Hostile, pieces=pieces) as url:
        Http(Dashboard(url)).get("/api/jobs/")
    assert caplog.records == []


def test_a_stream_begins_before_the_deadline():
    with (
        serving(Hostile, pieces=staticmethod(drip(OK, b"X-A: 1\r\n"))) as url,
        pytest.raises(http.httpx.ReadTimeout),
        Http(Dashboard(url)).answer("GET", "/log", 0.5, is_stream=True),
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


def test_a_program_that_ends_can_still_ask_again(monkeypatch):
    """Python 3.12 starts no thread then."""
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError))
    assert http.repeat(lambda: "answer", 600, "an answer") == "answer"


def test_nothing_is_unpacked():
    """0.1 MB would become 100 MB."""
    bomb = gzip.compress(b" " * 100 * 1024**2)
    head = OK + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(bomb)
    with (
        serving(Hostile, pieces=staticmethod(lambda: iter([head, bomb]))) as url,
        pytest.raises(Unreachable, match=r"encoded \(gzip\), which was not asked for"),
    ):
        Http(Dashboard(url)).get("/api/jobs/")


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
    asked: list[str] = []

    def pieces() -> Iterator[bytes]:
        asked.append("now")
        yield from drip(OK, b"X-A: 1\r\n")()

    def run() -> None:
        try:
            wait(Http(Dashboard(url)))
        except ClusterError as error:
            failures.append(str(error))

    with serving(Hostile, pieces=staticmethod(pieces)) as url:
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        wait_for(lambda: asked, within_s=30)
        assert thread.is_alive()
        interrupted.set()
        try:
            thread.join(2)
            assert not thread.is_alive()
        finally:
            interrupted.clear()
    assert failures[0].startswith("Interrupted while waiting for ")


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_connection_that_comes_after_its_request_was_given_up_is_closed(monkeypatch, is_stream):
    sockets, connect, may_go_on = [], socket.create_connection, threading.Event()

    def slow(*args: object, **options: object) -> socket.socket:
        sockets.append(connect(*args, **options))
        may_go_on.wait(60)
        return sockets[0]

    monkeypatch.setattr(socket, "create_connection", slow)
    with serving(Hostile, pieces=lambda: [OK + b"Content-Length: 2\r\n\r\n{}"]) as url:
        answer = Http(Dashboard(url)).answer("GET", "/given-up", 0.1, is_stream)
        with pytest.raises(httpx.ReadTimeout), answer:
            pass
        (thread,) = (each for each in threading.enumerate() if each.name == "GET /given-up")
        may_go_on.set()
        thread.join(60)
    assert sockets[0].fileno() == -1


@pytest.fixture
def proxies(monkeypatch) -> Callable[..., None]:
    """Set these variables, and no other of a proxy."""

    def set_only(**variables: str) -> None:
        for name in [one for one in os.environ if one.lower().endswith("_proxy")]:
            monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_only


@pytest.mark.parametrize(
    ("variables", "proxy"),
    [
        ({}, None),
        ({"http_proxy": "http://user:word@proxy:3128/"}, "http://user:word@proxy:3128/"),
        ({"HTTP_PROXY": "proxy:3128"}, "http://proxy:3128"),
        ({"http_proxy": "http://[fd00::1]:3128"}, "http://[fd00::1]:3128"),
        ({"ALL_PROXY": "https://proxy"}, "https://proxy"),
        ({"http_proxy": "http://proxy", "all_proxy": "socks://proxy"}, "http://proxy"),
        ({"all_proxy": "socks://proxy", "no_proxy": "localhost,.example.org"}, None),
        ({"http_proxy": "ftp://proxy", "NO_PROXY": "ray.example.org:8265"}, None),
        ({"http_proxy": "ftp://proxy", "NO_PROXY": "*"}, None),
    ],
)
def test_the_proxy_of_an_address_is_chosen_once(proxies, variables, proxy):
    proxies(**variables)
    assert Http(Dashboard(FRONT)).proxy == proxy
    assert Http(Dashboard("http://127.0.0.1:8265")).proxy is None


@pytest.mark.parametrize("name", ["http_proxy", "ALL_PROXY"])
@pytest.mark.parametrize(
    "proxy",
    [
        "socks://:s3cret@proxy:1080",
        "ftp://proxy",
        "http://proxy:port",
        "http://proxy:99999",
        "http://s3cret@proxy",
        "http://[fd00::1",
    ],
)
def test_a_proxy_that_cannot_be_used_is_named_by_its_variable(proxies, name, proxy):
    proxies(**{name: proxy})
    with pytest.raises(ConfigError, match=f"(?i)variable {name} ") as caught:
        Http(Dashboard(FRONT))
    assert "s3cret" not in str(caught.value)


def test_requests_and_a_logs_websocket_take_the_same_proxy(proxies):
    asked: list[str] = []

    class Proxy(Handler):
        def answer(self) -> None:
            asked.append(f"{self.command} {self.path}")
            self.send(407, "")

        do_CONNECT = do_GET = answer  # noqa: N815

    with serving(Proxy) as url:
        proxies(http_proxy=url, https_proxy="socks://proxy", socks_proxy="proxy:1080")
        api = JobsApi(Dashboard(FRONT))
        api._http.request("GET", "/api/jobs/")
        with pytest.raises(StreamCut):
            next(api.tail_log("job", lambda: True))
    assert asked == [f"GET {FRONT}/api/jobs/", "CONNECT ray.example.org:8265"]
