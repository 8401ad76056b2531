"""The program that serves at ``localhost`` what answers on another host: 127.0.0.2 is one here."""

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from nemo_run_ray.integrations.skills import localhost

_ELSEWHERE, _OWN = "127.0.0.2", "127.0.0.9"
_PROGRAM = Path(localhost.__file__).read_text(encoding="utf-8")


class Echo(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture
def start(tmp_path):
    """Start the program, as the startup command of a client does, beside a script of the client."""
    started = []

    def run(script: str, *hosts: str) -> subprocess.Popen:
        path = tmp_path / "it's the script.sh"
        path.write_text(script)
        program = ["-I", "-c", _PROGRAM, str(path), *hosts]
        # The program goes on in a process of its own, which ends with this group.
        words = [sys.executable, *program]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(words, start_new_session=True, text=True, stderr=pipe))
        return started[-1]

    yield run
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture
def serve():
    servers = []

    def run(host: str, port: int) -> None:
        servers.append(ThreadingHTTPServer((host, port), Echo))
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()

    yield run
    for server in servers:
        server.shutdown()
        server.server_close()


def until(condition, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("script", "ports"),
    [
        ("while [ $(curl -X PUT localhost:5000 -o /dev/null) ]; do sleep 3; done", [5000]),
        ("gen ++server.host=127.0.0.1 ++server.port=32424 ++server.model=/m", [32424]),
        ("curl http://127.0.0.1:80/ && curl localhost:8080", [80, 8080]),
        ("curl 10.127.0.0.1:81 mylocalhost:82 localhost:99999 localhost:", []),
        ("python train.py --port 5000 --lr 1e-4", []),
    ],
)
def test_ports_that_a_script_names(script, ports):
    assert localhost.ports_in(script) == ports


def test_a_port_is_refused_until_a_server_answers_and_then_passed_on(start, serve):
    first, second = free_port(), free_port()
    program = start(f"curl localhost:{first} localhost:{second}", _OWN, "127.0.0.3", _ELSEWHERE)
    assert program.wait(30) == 0, "the task starts when the ports are taken"
    serve(_ELSEWHERE, first)
    until(lambda: localhost.answers("127.0.0.1", first))
    assert not localhost.answers("127.0.0.1", second), "the client would take it for the server"
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", second))
    serve(_ELSEWHERE, second)
    until(lambda: localhost.answers("127.0.0.1", second))
    body = b"x" * 3_000_000
    for _ in range(3):
        connection = HTTPConnection("127.0.0.1", second, timeout=30)
        connection.request("POST", "/", body)
        assert connection.getresponse().read() == body
        connection.close()


def test_a_client_that_breaks_off_is_passed_on_too(start):
    port = free_port()
    with socket.create_server((_ELSEWHERE, port)) as server:
        start(f"curl localhost:{port}", _OWN, _ELSEWHERE)
        until(lambda: localhost.answers("127.0.0.1", port))
        client = socket.create_connection(("127.0.0.1", port), 30)
        client.sendall(b"hello")
        server.settimeout(30)
        accepted = [server.accept()[0]]
        accepted[-1].settimeout(30)
        while accepted[-1].recv(5) != b"hello":  # those of the looks above come first
            accepted.append(server.accept()[0])
            accepted[-1].settimeout(30)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        with contextlib.suppress(ConnectionResetError):
            assert accepted[-1].recv(1) == b""
        for one in accepted:
            one.close()


def test_a_server_of_this_node_is_at_localhost_already(start, serve):
    port = free_port()
    assert start(f"curl localhost:{port}", _OWN, _ELSEWHERE, _OWN).wait(30) == 0
    localhost.take(port).close()


def test_a_port_of_another_program_is_no_server_of_this_task(start, serve):
    """The client would talk to another task's server, and not know it."""
    port = free_port()
    serve("127.0.0.1", port)
    program = start(f"curl localhost:{port}", _OWN, _ELSEWHERE)
    _, told = program.communicate(timeout=30)
    assert program.returncode == 1
    assert f"localhost:{port}, and another program of this node has that port" in told
    assert "--get_random_port" in told
