"""Jobs that a head's death has orphaned: the client makes Ray look after them."""

import json
import time
from collections.abc import Iterator

import pytest

from nemo_run_ray.clusters import Dashboard
from nemo_run_ray.dashboard import jobs_api
from nemo_run_ray.dashboard.jobs_api import JobsApi
from tests.http_server import Handler, serving


class Head:
    """A dashboard whose job manager sleeps until somebody posts, as Ray's does after a restart."""

    def __init__(self) -> None:
        self.rows: dict[str, dict] = {}
        self.alive = ["node1"]
        self.posts: list[str] = []

    def row(self, name: str, status: str, age_s: float = 0.0, node: str = "") -> None:
        self.rows[name] = {
            "submission_id": name,
            "status": status,
            "start_time": int((time.time() - age_s) * 1000),
            "driver_node_id": node or None,
        }

    def posted(self, name: str) -> tuple[int, str]:
        self.posts.append(name)
        for row in self.rows.values():
            if row["status"] == "RUNNING" and row["driver_node_id"] not in self.alive:
                row["status"] = "FAILED"
        return 400, f"Job with submission_id {name} already exists."


class _Handler(Handler):
    head: Head

    def answer(self) -> None:
        if self.command == "POST":
            self.send(*self.head.posted(json.loads(self.body())["submission_id"]))
        elif self.path == "/api/jobs/":
            self.send(200, json.dumps(list(self.head.rows.values())))
        else:
            nodes = [{"node_id": node, "state": "ALIVE"} for node in self.head.alive]
            nodes.append({"node_id": "node0", "state": "DEAD"})
            self.send(200, json.dumps({"data": {"result": {"result": nodes}}}))


@pytest.fixture
def head(monkeypatch) -> Iterator[Head]:
    found = Head()
    monkeypatch.setattr(jobs_api, "_WAKE_S", 0.0)
    with serving(_Handler, head=found) as url:
        found.api = JobsApi(Dashboard(url, {}))
        yield found
        found.api._http.close()


def test_a_job_that_ran_on_a_lost_head_ends_at_the_first_look(head):
    head.row("gone", "RUNNING", node="node0")
    head.row("runs", "RUNNING", node="node1")

    states = {name: row["status"] for name, row in head.api.table().items()}

    assert states == {"gone": "FAILED", "runs": "RUNNING"}
    assert head.posts == ["gone"]


def test_a_job_that_was_about_to_start_for_long_is_looked_after(head):
    head.row("waits", "PENDING", age_s=100)
    head.api.table()
    assert head.posts == ["waits"]


def test_nobody_is_woken_for_jobs_that_are_well(head):
    head.row("young", "PENDING", age_s=1)
    head.row("runs", "RUNNING", node="node1")
    head.row("ended", "FAILED", node="node0")
    head.api.table()
    assert head.posts == []


def test_the_look_is_not_repeated_at_once(head):
    head.row("waits", "PENDING", age_s=100)
    for _ in range(5):
        head.api.table(fresh=True)
    assert head.posts == ["waits"]
