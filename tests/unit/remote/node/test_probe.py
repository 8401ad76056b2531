"""Probes of real sockets, a real HTTP server and real commands, asked as a loop asks them."""

import contextlib
import http.server
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from nemo_run_ray.remote.node import probe
from nemo_run_ray.remote.node.probe import Probing
from nemo_run_ray.remote.spec import ProbeSpec

_LOCAL = "127.0.0.1"
#: Another address of the same machine, as a node's is.
_NODE = "127.0.0.2"


def _probing(kind: str, *, address: str = _LOCAL, **fields) -> Probing:
    fields = {"interval_s": 0.02, "timeout_s": 20.0, **fields}
    return Probing(ProbeSpec(kind, **fields), address, {}, dict(os.environ), "/")


def _turn(probing: Probing) -> str | None:
    """One round of a loop, which must never be held up."""
    time.sleep(0.01)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
    began_at = time.monotonic()
    answer = probing.step()
    assert time.monotonic() - began_at < 5
    return answer


def _answer(probing: Probing) -> str:
    deadline = time.monotonic() + 30
    while (answer := _turn(probing)) is None:
        assert time.monotonic() < deadline, "not decided in time"
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
    """Makes servers that take connections and never answer; gives their ports."""

    def make(address: str = _LOCAL) -> int:
        server = bound(address)
        server.listen()
        return server.getsockname()[1]

    return make


@pytest.fixture
def site() -> Iterator[tuple[int, list[int], list[str]]]:
    """A web server: its port, the statuses of its next answers, and the paths it was asked for."""
    statuses, asked = [200], []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(statuses.pop(0) if len(statuses) > 1 else statuses[0])
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer((_LOCAL, 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server.server_address[1], statuses, asked
        server.shutdown()
        thread.join(10)


@pytest.mark.parametrize("address", [_LOCAL, "::1"])
def test_a_port_that_takes_connections_is_ready(listening, address):
    assert _answer(_probing("port", port=listening(address), address=address)) == ""


def test_a_closed_port_is_given_up_with_the_reason(bound):
    port = bound().getsockname()[1]
    answer = _answer(_probing("port", port=port, timeout_s=0.5))
    why = f"port {_LOCAL}:{port} failed: Connection refused"
    assert answer == f"not ready within 0.5 s: {why}"


def test_a_server_on_another_address_alone_is_not_ready_and_the_hint_says_so(listening):
    port = listening(_LOCAL)
    answer = _answer(_probing("port", port=port, timeout_s=0.5, address=_NODE))
    assert f"port {_NODE}:{port} failed" in answer
    assert f"It does listen on {_LOCAL}:{port}" in answer


def test_a_get_is_repeated_until_it_has_the_status(site):
    port, statuses, asked = site
    statuses[:] = [404, 503, 200]
    assert _answer(_probing("http", port=port, path="/health?full=1")) == ""
    assert asked == ["/health?full=1"] * 3


def test_another_status_is_reported_every_30_s_and_given_up(site, monkeypatch):
    port, statuses, asked = site
    statuses[:] = [301]
    probing = _probing("http", port=port, path="/health", timeout_s=60)
    while len(asked) < 2:
        assert _turn(probing) is None
    assert probing.waiting() is None, "30 s have not passed"
    began = time.monotonic()
    why = f"GET http://{_LOCAL}:{port}/health is answered with 301, not 200"
    monkeypatch.setattr(probe, "monotonic", lambda: began + 31)
    assert probing.waiting().endswith(f"s: {why}")
    assert probing.waiting() is None, "once in 30 s"
    monkeypatch.setattr(probe, "monotonic", lambda: began + 61)
    assert probing.step() == f"not ready within 60 s: {why}"


def test_a_server_that_never_answers_is_given_up_in_time_and_named(listening):
    port = listening()
    answer = _answer(_probing("http", port=port, timeout_s=0.3))
    assert answer == f"not ready within 0.3 s: GET http://{_LOCAL}:{port}/ does not answer"


def test_a_command_is_run_again_until_it_exits_with_0(tmp_path):
    count = f"echo >> {tmp_path}/tries; [ $(wc -l < {tmp_path}/tries) -eq 3 ] || exit 9"
    assert _answer(_probing("command", command=("sh", "-c", count))) == ""
    answer = _answer(_probing("command", command=("sh", "-c", "exit 9"), timeout_s=0.5))
    assert answer.endswith("ended with exit code 9")
    answer = _answer(_probing("command", command=("no such program",), timeout_s=0.5))
    assert "'no such program'] cannot be started: " in answer
