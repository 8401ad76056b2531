"""Jobs that a dead head has left behind: Ray is made to look after them, and nothing is created."""

import json
from collections.abc import Iterator

import pytest
from ray._private.label_utils import validate_label_selector

from nemo_run_ray.clusters import Dashboard
from nemo_run_ray.dashboard import jobs
from nemo_run_ray.dashboard.jobs import JobsApi
from tests.http_server import Handler, serving

#: The head was started 50 s after this moment.
NOW_MS = 1_800_000_000_000


def test_ray_refuses_the_label_of_the_request():
    """Ray's own check, which its job manager makes before it takes an id."""
    assert validate_label_selector(jobs._REFUSED_LABEL)


class _Head(Handler):
    posts: list
    nodes: dict

    def answer(self) -> None:
        if self.command == "POST":
            self.posts.append(json.loads(self.body()))
            self.send(500, "Invalid label key name")
        else:
            self.send(200, json.dumps({"data": {"result": self.nodes}}))


@pytest.fixture
def head() -> Iterator[tuple[JobsApi, list, dict]]:
    row = {"node_id": "a", "is_head_node": True, "start_time_ms": NOW_MS + 50_000}
    posts, nodes = [], {"result": [{"is_head_node": False}, row]}
    with serving(_Head, posts=posts, nodes=nodes) as url:
        yield JobsApi(Dashboard(url, {})), posts, nodes


def rows(**posted_at_s: int) -> dict:
    return {
        f"{name}.{number}": {
            "submission_id": f"{name}.{number}",
            "status": name,
            "start_time": NOW_MS + at_s * 1000,
        }
        for number, (name, at_s) in enumerate(posted_at_s.items())
    }


@pytest.mark.parametrize(
    ("jobs", "woken"),
    [
        (rows(PENDING=100, RUNNING=40), ["RUNNING.1"]),
        (rows(PENDING=40), ["PENDING.0"]),
        (rows(RUNNING=100, FAILED=0), []),
        ({}, []),
    ],
)
def test_jobs_that_are_older_than_the_head_are_orphans(head, jobs, woken):
    api, posts, _ = head
    assert [api.wake_for(jobs) for _ in range(3)] == [bool(woken), False, False], "not at once"
    assert [body["submission_id"] for body in posts] == woken
    assert all(body["entrypoint_label_selector"] for body in posts)


def test_ray_is_woken_once(head, monkeypatch):
    monkeypatch.setattr(jobs, "_WAKE_AGAIN_S", 0.0)
    monkeypatch.setattr(jobs.time, "time", lambda: NOW_MS / 1000 + 60)
    api, posts, _ = head
    assert [api.wake_for(rows(RUNNING=40)) for _ in range(3)] == [True, False, False]
    assert len(posts) == 1
