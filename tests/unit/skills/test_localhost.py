"""The program that serves at ``localhost`` what answers on another host: 127.0.0.2 is one here."""

import socket
import subprocess
import sys
import threading
import time
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from nemo_run_ray.skills import localhost, slurm_words

_ELSEWHERE = "127.0.0.2"


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
        program = ["-c", slurm_words._program(), str(path), *hosts]
        started.append(subprocess.Popen([sys.executable, *program]))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()


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
    port = free_port()
    start(f"curl localhost:{port}", "127.0.0.3", _ELSEWHERE)
    time.sleep(1.5)
    assert not localhost.answers("127.0.0.1", port), "the client would take it for the server"
    serve(_ELSEWHERE, port)
    until(lambda: localhost.answers("127.0.0.1", port))
    body = b"x" * 3_000_000
    for _ in range(3):
        connection = HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("POST", "/", body)
        assert connection.getresponse().read() == body
        connection.close()


def test_a_server_of_this_host_is_left_alone(start, serve):
    port = free_port()
    serve("127.0.0.1", port)
    process = start(f"curl localhost:{port}", _ELSEWHERE)
    assert process.wait(30) == 0


def test_a_script_without_servers_needs_none(start):
    assert start("echo hello", _ELSEWHERE).wait(30) == 0
