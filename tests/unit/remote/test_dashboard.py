"""Requests from the cluster against a server that answers what it is told to."""

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from nemo_run_ray.remote import dashboard
from nemo_run_ray.remote.dashboard import DashboardClient, RequestRefused, Unanswered, candidates
from tests.http_server import Handler, serving

pytestmark = pytest.mark.usefixtures("user_home")

VERSION = json.dumps({"version": "4", "ray_version": "2.60.0", "session_name": "session_1"})
BODY = {"submission_id": "e.a", "entrypoint": "true", "metadata": {"é": "ü"}}
TAKEN = "ValueError: Job with submission_id e.a already exists. Please use a different one.\n"
#: How Ray 2.60's dashboard hands on what the head's agent says.
HANDED_ON = "Traceback:\nRuntimeError: Request failed with status code 400: Traceback:\n{}.\n"


@dataclass
class Answer:
    """One answer; bytes that are promised and not sent cut it short."""

    status: int = 200
    text: bytes = b""
    missing: int = 0


@dataclass
class Script:
    """What the server answers, and what it was asked."""

    url: str = ""
    answers: list[Answer] = field(default_factory=list)
    asked: list[tuple[str, str, bytes]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    def says(self, status: int, text: str | bytes = "", missing: int = 0) -> None:
        data = text if isinstance(text, bytes) else text.encode()
        self.answers.append(Answer(status, data, missing))


class _Handler(Handler):
    script: Script

    def answer(self) -> None:
        script = self.script
        script.asked.append((self.command, self.path, self.body()))
        script.headers.append(dict(self.headers))
        answer = script.answers.pop(0)
        self.close_connection = not answer.status or answer.missing > 0
        if not answer.status:
            return
        length = str(len(answer.text) + answer.missing)
        self.send(answer.status, answer.text, Content_Length=length, Connection="close")


@pytest.fixture
def script() -> Iterator[Script]:
    known = Script()
    with serving(_Handler, script=known) as known.url:
        yield known


REQUESTS = [
    pytest.param(lambda api: api.session(), id="session"),
    pytest.param(lambda api: list(api.rows()), id="rows"),
    pytest.param(lambda api: api.post(BODY), id="post"),
    pytest.param(lambda api: api.stop("e.a"), id="stop"),
    pytest.param(lambda api: api.put_package("_ray_pkg_1.zip", b"zip"), id="put"),
]


def test_requests_are_those_of_rays_api(script):
    api = DashboardClient(script.url)
    script.says(200, VERSION)
    assert api.session() == "session_1"
    script.says(200, "[]")
    assert list(api.rows()) == []
    script.says(200, "{}")
    assert api.post(BODY)
    script.says(200, '{"stopped": true}')
    api.stop("e.a@2")
    script.says(200)
    api.put_package("_ray_pkg_1.zip", b"\x00zip")
    *others, post, stop, put = script.asked
    assert others == [("GET", "/api/version", b""), ("GET", "/api/jobs/", b"")]
    assert (post[:2], json.loads(post[2])) == (("POST", "/api/jobs/"), BODY)
    assert stop == ("POST", "/api/jobs/e.a%402/stop", b"")
    assert put == ("PUT", "/api/packages/gcs/_ray_pkg_1.zip", b"\x00zip")
    assert {one["Content-Type"] for one in script.headers} == {"application/json"}


def test_rows_without_a_submission_id_are_left_out(script):
    rows = [
        {"type": "DRIVER", "job_id": "01000000", "submission_id": None},
        {"submission_id": "e.a", "message": 'é [1, {"a": "]"}], \u2028'},
        {"submission_id": ""},
        {"type": "DRIVER"},
        {"submission_id": "e.b"},
    ]
    for text in (json.dumps(rows), json.dumps(rows, indent=1, ensure_ascii=False)):
        script.says(200, text)
        assert list(DashboardClient(script.url).rows()) == [rows[1], rows[4]]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"<html>",
        b"{}",
        b"[1]",
        b'[{"submission_id": "e.a"}, {"submission_i',
        '{"grüße": 1}'.encode("latin-1"),
        b"\xff\xfe[]",
    ],
)
def test_a_table_that_cannot_be_read_is_none(script, text):
    script.says(200, text)
    with pytest.raises(Unanswered, match=r"cannot be read|not Ray's"):
        list(DashboardClient(script.url).rows())


@pytest.mark.parametrize("request_", REQUESTS)
def test_nobody_there(request_):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(Unanswered, match=f"{port} cannot be reached"):
        request_(DashboardClient(f"http://127.0.0.1:{port}"))


def test_no_thread_for_the_deadline(script, monkeypatch):
    def start(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Timer, "start", start)
    with pytest.raises(Unanswered, match="can't start new thread"):
        list(DashboardClient(script.url).rows())


@pytest.mark.parametrize("status", [500, 502, 503, 504])
@pytest.mark.parametrize("request_", REQUESTS)
def test_trouble_of_the_server_may_pass(script, request_, status):
    script.says(status, "first\nlast words\n\n")
    with pytest.raises(Unanswered, match=f"answered {status} .*last words"):
        request_(DashboardClient(script.url))


@pytest.mark.parametrize("request_", REQUESTS)
def test_an_answer_that_is_cut_off_is_none(script, request_):
    for status, missing in ((0, 0), (200, 9)):
        script.says(status, "[", missing)
        with pytest.raises(Unanswered, match="cannot be reached"):
            request_(DashboardClient(script.url))


def test_one_deadline_holds_for_headers_and_all():
    """Each byte comes in time, and the answer never ends."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        done = threading.Event()

        def drip() -> None:
            stream, _ = server.accept()
            with stream, contextlib.suppress(OSError):
                stream.sendall(b"HTTP/1.1 200 OK\r\nX: ")
                while not done.wait(0.02):
                    stream.sendall(b"x")

        thread = threading.Thread(target=drip)
        thread.start()
        client = DashboardClient(f"http://127.0.0.1:{server.getsockname()[1]}", timeout_s=0.3)
        with pytest.raises(Unanswered, match="timed out after"):
            client.session()
        done.set()
        thread.join()


def test_an_answer_that_is_too_large_is_none(script, monkeypatch):
    monkeypatch.setattr(dashboard, "ANSWER_MAX_BYTES", 100)
    script.says(200, f"[{' ' * 100}]")
    with pytest.raises(Unanswered, match="cannot be reached"):
        list(DashboardClient(script.url).rows())


def test_living_nodes_are_those_of_rays_state_api(script):
    states = {"a": "ALIVE", "b": "DEAD"}
    nodes = [{"node_id": n, "node_ip": "10.0.0.1", "state": s} for n, s in states.items()]
    script.says(200, json.dumps({"data": {"result": {"result": nodes}}}))
    assert DashboardClient(script.url).alive_nodes() == nodes[:1]
    for answer in ({}, {"data": {"result": {"result": [{"node_id": 1}]}}}):
        script.says(200, json.dumps(answer))
        with pytest.raises(Unanswered, match="not Ray's"):
            DashboardClient(script.url).alive_nodes()


@pytest.mark.parametrize(
    ("status", "text"), [(400, TAKEN), (500, TAKEN), (500, HANDED_ON.format(TAKEN))]
)
def test_a_taken_id_is_no_error(script, status, text):
    script.says(status, text)
    assert DashboardClient(script.url).post(BODY) is False


@pytest.mark.parametrize("status", [400, 405, 409, 413, 422])
def test_what_ray_refuses_is_refused_for_good(script, status):
    script.says(status, "Traceback:\nTypeError: metadata values must be strings\n")
    with pytest.raises(RequestRefused, match=f"metadata values must be strings.*HTTP {status}"):
        DashboardClient(script.url).post(BODY)


@pytest.fixture
def sent(script) -> Callable[[], str | None]:
    """The credentials of one request."""
    api = DashboardClient(script.url)

    def ask() -> str | None:
        script.says(200, VERSION)
        api.session()
        return script.headers[-1].get("Authorization")

    return ask


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_the_token_is_found_where_ray_looks_for_it(sent, monkeypatch, user_home):
    default = _write(user_home / ".ray" / "auth_token", "of-the-home\n")
    assert sent() == "Bearer of-the-home"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(_write(user_home / "mine", " of-the-path \n")))
    assert sent() == "Bearer of-the-path"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of-the-variable")
    assert sent() == "Bearer of-the-variable"
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")
    assert sent() == "Bearer of-the-home"
    default.write_text("renewed")
    assert sent() == "Bearer renewed"


@pytest.fixture
def pythons(monkeypatch, tmp_path) -> Callable[[str, str], None]:
    """Put commands on a PATH that has nothing else."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def make(name: str, script: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o700)

    return make


def test_ray_itself_is_asked_last(pythons, monkeypatch):
    """The port that the client knows may be that of a tunnel."""
    pythons("python3", "echo some warning; echo http://10.1.1.1:8266")
    monkeypatch.setenv("RAY_ADDRESS", "10.1.1.1:6379")
    ports = [f"http://{host}:{port}" for port in (9999, 8265) for host in ("10.1.1.1", "127.0.0.1")]
    given = "http://front:9999"
    assert list(candidates([given])) == [*ports, given, "http://10.1.1.1:8266"]
