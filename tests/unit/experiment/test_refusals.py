"""What a user gets who does it wrong: one paragraph, within seconds, and nothing started.

What needs the real Ray's own words is in ``tests/ray/test_bad_input.py``.
"""

import http.server
import json
import ssl
import threading

import nemo_run as run
import pytest

from nemo_run_ray import ExistingCluster, RayExecutor
from nemo_run_ray.errors import SubmissionError, Unreachable
from tests.certificates import certificate
from tests.conftest import TRUE, refused
from tests.fake_ray import FakeRay


@pytest.fixture
def existing(ray: FakeRay) -> ExistingCluster:
    return ExistingCluster(url=ray.url)


@pytest.fixture(autouse=True)
def nothing_started(ray: FakeRay, unique: str):
    """A refused task leaves no job; tests that do run one name it otherwise."""
    yield
    assert [one for one in ray.started if one.startswith(f"{unique}_")] == []


class Server(http.server.ThreadingHTTPServer):
    """Answers every request alike; the address of something that is no working dashboard."""

    def __init__(self, answers: dict[str, object], context: ssl.SSLContext | None = None) -> None:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = answers.get(self.path, answers.get("*"))
                self.send_response(404 if found is None else 200)
                self.end_headers()
                text = found if isinstance(found, str) else json.dumps(found)
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        scheme = "http"
        if context is not None:
            self.socket = context.wrap_socket(self.socket, server_side=True)
            scheme = "https"
        self.url = f"{scheme}://127.0.0.1:{self.server_address[1]}"
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # the client's refusal of our certificate is what is tested

    def stop(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


@pytest.fixture
def server():
    servers: list[Server] = []

    def serve(answers, context=None) -> str:
        servers.append(Server(answers, context))
        return servers[-1].url

    yield serve
    for one in servers:
        one.stop()


def test_an_address_that_is_no_dashboard(unique, server):
    url = server({"*": "<html>hello</html>"})
    assert "is not a Ray dashboard" in refused(Unreachable, RayExecutor(address=url), unique)


def test_an_expired_certificate_and_a_ca_of_our_own(unique, server, tmp_path):
    expired, ca = certificate(tmp_path / "expired", valid=False)
    url = server({}, expired)
    message = refused(Unreachable, RayExecutor(cluster=trusting(url, ca)), unique)
    assert "expired" in message
    good, ca = certificate(tmp_path / "good", valid=True)
    url = server({"*": "x"}, good)
    assert "self-signed" in refused(Unreachable, RayExecutor(address=url), f"{unique}a")
    message = refused(Unreachable, RayExecutor(cluster=trusting(url, ca)), f"{unique}b")
    assert "is not a Ray dashboard" in message, "the connection itself must be trusted"


def test_a_dependency_that_another_cluster_has(unique, existing, server, ray):
    with run.Experiment(f"x{unique}", skip_status_at_exit=True) as experiment:
        experiment.add(TRUE, executor=RayExecutor(cluster=existing), name="job")
        experiment.run(detach=True)
    producer = f"{experiment._id}.job"
    # Enough of a second Ray: no more of its answers is looked at.
    version = {"ray_version": "2.60.0", "session_name": "another"}
    url = server({"/api/version": version, "/api/jobs/": []})

    executor = RayExecutor(address=url, dependencies=[f"ray_jobs://nemo_run/{producer}"])
    message = refused(SubmissionError, executor, unique)

    assert f"{producer}, which another cluster has" in message
    assert existing.url in message
    assert "Nothing was started" in message


def trusting(url: str, ca: str) -> ExistingCluster:
    return ExistingCluster(url=url, verify=ca)
