"""One look at a cluster that tells only a part of what is asked."""

import contextlib
import json

import httpx
import pytest

from nemo_run_ray.clusters import Dashboard
from nemo_run_ray.dashboard.http import Http
from nemo_run_ray.dashboard.inspection import _skew, inspect
from nemo_run_ray.dashboard.state_api import StateApi
from nemo_run_ray.errors import Unanswered
from tests import rooms
from tests.http_server import Handler, serving
from tests.rooms import FakeNode

NODE = FakeNode("a", {"CPU": 4.0}, labels={"gpu_kind": "h100"})
ANSWERS = {
    "/api/version": {"ray_version": "2.60.0"},
    "/api/jobs/": [{"submission_id": "a", "status": "PENDING"}, {"submission_id": None}],
    "/nodes": rooms.summary(NODE),
    "/api/v0/nodes": rooms.table([NODE.in_table()]),
    "/api/v0/cluster_metadata": {"data": {"pythonVersion": "3.12.4"}},
}


class Server(Handler):
    """A dashboard that answers some questions, and others with one status."""

    refused: dict[str, int]
    asked: list[str]

    def answer(self) -> None:
        path = self.path.partition("?")[0]
        self.asked.append(f"{self.command} {path}")
        self.send(self.refused.get(path, 200), json.dumps(ANSWERS.get(path)))


def looked(**refused: int):
    asked: list[str] = []
    paths = {name.replace("__", "/"): status for name, status in refused.items()}
    with serving(Server, refused=paths, asked=asked) as url:
        found = inspect(Dashboard(url))
    return found, asked


def test_everything_is_asked_once_and_nothing_is_changed():
    found, asked = looked()
    assert sorted(asked) == sorted(f"GET {path}" for path in ANSWERS)
    assert (found.version, found.python, found.jobs) == ("2.60.0", "3.12.4", (1, 1))
    assert found.nodes[0].labels["gpu_kind"] == "h100"
    assert found.is_free_told
    assert found.skew_s < 2


def test_the_table_alone_does_not_tell_what_is_free(monkeypatch):
    monkeypatch.setitem(ANSWERS, "/nodes", None)
    found, _ = looked(__nodes=404)
    assert found.nodes[0].total == {"CPU": 4.0}
    assert not found.is_free_told


def test_who_refuses_credentials_was_reached():
    found, _ = looked(__api__version=500, **{"/api/jobs/": 403})
    assert not found.unreachable
    assert "answered 403" in found.unauthorised


def test_a_job_table_that_does_not_answer_is_no_cluster_that_is_away():
    found, _ = looked(**{"/api/jobs/": 500})
    assert (found.unreachable, found.jobs, found.version) == ("", None, "2.60.0")
    assert found.nodes


def test_slow_actors_leave_what_the_nodes_have_told(monkeypatch):
    monkeypatch.setattr(StateApi, "holdings", lambda *_: _raise(Unanswered("too slow")))
    with (
        serving(Server, refused={}, asked=[]) as url,
        contextlib.closing(Http(Dashboard(url))) as http,
    ):
        room = StateApi(http).room()
    assert room is not None
    assert (room.nodes[0].host, room.holdings) == (NODE.name, None)


def _raise(error: Exception) -> None:
    raise error


def test_a_page_that_is_no_rays(monkeypatch):
    for path in ("/api/version", "/api/jobs/"):
        monkeypatch.setitem(ANSWERS, path, "welcome")
    found, _ = looked()
    assert "is not a Ray dashboard" in found.unreachable


@pytest.mark.parametrize(
    ("date", "skew_s"),
    [
        ("Fri, 15 Jan 2027 08:00:00 GMT", 0.0),  # whole seconds: it may be 08:00:00.9 there
        ("Fri, 15 Jan 2027 08:01:00 GMT", 59.0),
        ("Fri, 15 Jan 2027 07:59:00 GMT", -59.5),
        ("yesterday", None),
        ("", None),
    ],
)
def test_a_clock_is_read_in_whole_seconds(date, skew_s):
    began = 1_800_000_000.5
    response = httpx.Response(200, headers={"date": date} if date else {})
    assert _skew(response, began, began + 0.5) == skew_s
