"""Probes against real sockets and a real HTTP server, asked as the replica's loop asks them."""

import contextlib
import http.server
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from nemo_run_ray.remote.node import probe
from nemo_run_ray.remote.node.probe import Probing
from nemo_run_ray.remote.spec import ProbeSpec

_LOCAL = "127.0.0.1"
#: Another address of the same machine, as a node's is.
_NODE = "127.0.0.2"


def _no_spawn(words: Sequence[str]) -> int:
    raise AssertionError(f"{words} is no command of this probe's")


def _probing(
    spec: ProbeSpec,
    address: str = _LOCAL,
    ports: dict[str, int] | None = None,
    spawn: Callable[[Sequence[str]], int] = _no_spawn,
) -> Probing:
    return Probing(spec, address, ports or {}, spawn)


def _port(port: int | str, **values: float) -> ProbeSpec:
    return ProbeSpec("port", port, **{"interval_s": 0.02, "timeout_s": 10.0, **values})


def _http(port: int | str, **values) -> ProbeSpec:
    return ProbeSpec("http", port, **{"interval_s": 0.02, "timeout_s": 10.0, **values})


def _turn(probing: Probing) -> str | None:
    """One round of the loop: wait for the socket, then go on; it must never be held up."""
    if probing.socket is not None:
        waits = [[], [probing.socket]] if not probing.is_asked else [[probing.socket], []]
        select.select(*waits, [], 0.02)
    else:
        time.sleep(0.005)
    began_at = time.monotonic()
    answer = probing.step()
    assert time.monotonic() - began_at < 5
    return answer


def _answer(probing: Probing, within_s: float = 15) -> str:
    deadline = time.monotonic() + within_s
    while (answer := _turn(probing)) is None:
        assert time.monotonic() < deadline, "not decided in time"
    assert probing.socket is None
    return answer


@pytest.fixture
def bound() -> Iterator[Callable[..., socket.socket]]:
    """Makes sockets with a port of the system's choice that take no connections yet."""
    with contextlib.ExitStack() as stack:

        def make(address: str = _LOCAL) -> socket.socket:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            made = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            made.bind((address, 0))
            return made

        yield make


@pytest.fixture
def listening(bound) -> Callable[..., int]:
    """Makes servers that take connections and say nothing; gives their ports."""

    def make(address: str = _LOCAL) -> int:
        server = bound(address)
        server.listen()
        return server.getsockname()[1]

    return make


@pytest.fixture
def answering(bound) -> Iterator[Callable[..., int]]:
    """Makes servers that answer every connection with the same pieces and close it."""
    threads = []
    done = threading.Event()

    def serve(server: socket.socket, pieces: Sequence[bytes], address: list[bytes]) -> None:
        server.settimeout(0.05)
        while not done.is_set():
            with contextlib.suppress(OSError):
                connection, _ = server.accept()
                with connection:
                    connection.settimeout(5)
                    address.append(connection.recv(4096))
                    for piece in pieces:
                        connection.sendall(piece)
                        done.wait(0.05)

    def make(*pieces: bytes, address: str = _LOCAL, asked: list[bytes] | None = None) -> int:
        server = bound(address)
        server.listen()
        words = (server, pieces, [] if asked is None else asked)
        threads.append(threading.Thread(target=serve, args=words))
        threads[-1].start()
        return server.getsockname()[1]

    yield make
    done.set()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


class Site:
    """A real web server whose answers can be changed."""

    def __init__(self, address: str) -> None:
        self.statuses = [200]
        self.asked: list[tuple[str, str]] = []
        site = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                site.asked.append((self.path, self.headers["Host"]))
                status = site.statuses.pop(0) if len(site.statuses) > 1 else site.statuses[0]
                self.send_response(status)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"ok")

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer((address, 0), Handler)
        self.port = self.server.server_address[1]


@pytest.fixture
def site() -> Iterator[Callable[..., Site]]:
    made = []

    def make(address: str = _LOCAL) -> Site:
        one = Site(address)
        thread = threading.Thread(target=one.server.serve_forever, args=(0.02,))
        thread.start()
        made.append((one, thread))
        return one

    yield make
    for one, thread in made:
        one.server.shutdown()
        one.server.server_close()
        thread.join(10)


# ---------------------------------------------------------------------- ports


def test_a_port_that_takes_connections_is_ready(listening):
    assert _answer(_probing(_port(listening()))) == ""


def test_a_closed_port_is_given_up_with_the_reason(bound):
    port = bound().getsockname()[1]
    began_at = time.monotonic()
    answer = _answer(_probing(_port(port, timeout_s=0.25)))
    assert 0.25 <= time.monotonic() - began_at < 8
    assert answer == (
        f"not ready within 0.25 s: port {_LOCAL}:{port} does not take connections: "
        "Connection refused"
    )


def test_a_server_on_another_address_alone_is_not_ready_and_the_hint_says_so(listening):
    port = listening(_LOCAL)
    answer = _answer(_probing(_port(port, timeout_s=0.2), address=_NODE))
    assert f"port {_NODE}:{port} does not take connections" in answer
    assert f"It does listen on {_LOCAL}:{port}" in answer
    assert "listen on 0.0.0.0" in answer


def test_a_nodes_address_may_be_of_ip_version_6(listening):
    assert _answer(_probing(_port(listening("::1")), address="::1")) == ""


# ---------------------------------------------------------------------- http


def test_a_get_with_the_status_is_ready(site):
    one = site()
    assert _answer(_probing(_http(one.port, path="/health?full=1"))) == ""
    assert one.asked == [("/health?full=1", f"{_LOCAL}:{one.port}")]


@pytest.mark.parametrize("status", [204, 301, 404, 503])
def test_another_status_is_given_up_with_both(site, status):
    one = site()
    one.statuses = [status]
    answer = _answer(_probing(_http(one.port, path="/health", timeout_s=0.2)))
    assert answer == (
        f"not ready within 0.2 s: GET http://{_LOCAL}:{one.port}/health is answered with {status}, "
        "not 200"
    )


def test_what_is_answered_is_told_every_so_often_while_it_is_not_ready(site, monkeypatch):
    one = site()
    one.statuses = [301]
    probing = _probing(_http(one.port, path="/health"))
    while not one.asked or probing.socket is not None:
        assert _turn(probing) is None
    assert probing.waiting() is None, "30 s have not passed"
    now = time.monotonic()
    monkeypatch.setattr(probe.time, "monotonic", lambda: now + 31)
    assert probing.waiting() == (
        f"not ready for 31 s: GET http://{_LOCAL}:{one.port}/health is answered with 301, not 200"
    )
    assert probing.waiting() is None, "once in 30 s"


@pytest.mark.parametrize("line", ["SSH-2.0-OpenSSH_9.6", "220 200 mail.example.org ESMTP"])
def test_an_answer_that_is_not_http_is_shown(answering, line):
    port = answering(f"{line}\r\n".encode())
    answer = _answer(_probing(_http(port, timeout_s=0.2)))
    assert f"is answered with {line!r}, which is not HTTP" in answer


def test_a_server_that_never_answers_is_given_up_in_time_and_named(listening):
    port = listening()
    began_at = time.monotonic()
    answer = _answer(_probing(_http(port, timeout_s=0.3)))
    assert 0.3 <= time.monotonic() - began_at < 8
    assert answer.startswith("not ready within 0.3 s: ")
    assert f"{_LOCAL}:{port} does not answer" in answer


# ---------------------------------------------------------------------- commands


class Commands:
    """Gives process ids as a spawn does."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, ...]] = []

    def __call__(self, words: Sequence[str]) -> int:
        self.begun.append(tuple(words))
        return 1000 + len(self.begun)


def _command(**values: float) -> ProbeSpec:
    words = ("check", "--all", "a b")
    limits = {"interval_s": 0.05, "timeout_s": 10.0, **values}
    return ProbeSpec("command", command=words, **limits)


def test_a_command_that_exits_with_0_is_ready():
    commands = Commands()
    probing = _probing(_command(), spawn=commands)
    assert probing.step() is None
    assert commands.begun == [("check", "--all", "a b")]
    assert probing.pid == 1001
    assert probing.step() is None  # it runs
    assert len(commands.begun) == 1
    probing.reaped(0)
    assert probing.pid is None
    assert probing.step() == ""


def test_a_command_that_fails_is_run_again_after_the_interval():
    commands = Commands()
    probing = _probing(_command(interval_s=0.2), spawn=commands)
    assert probing.step() is None
    probing.reaped(1)
    ended_at = time.monotonic()
    while len(commands.begun) == 1:
        assert probing.step() is None
        assert time.monotonic() < ended_at + 5
    assert time.monotonic() >= ended_at + 0.2
    probing.reaped(0)
    assert probing.step() == ""
