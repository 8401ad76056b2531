"""Jobs that a dead head has left behind: Ray is made to look after them, and nothing is created."""

import json
import time
from collections.abc import Iterator

import pytest
from ray._private.label_utils import validate_label_selector

from nemo_run_ray.clusters import Dashboard
from nemo_run_ray.dashboard import jobs
from nemo_run_ray.dashboard.jobs import JobsApi, orphan
from nemo_run_ray.dashboard.state import AliveNodes
from tests.http_server import Handler, serving

NOW = 1_800_000_000.0


def row(status: str, age_s: float = 0.0, node: str = "") -> dict:
    return {
        "status": status,
        "start_time": int((NOW - age_s) * 1000),
        "driver_node_id": node or None,
    }


def test_a_job_that_ran_on_a_lost_node_is_an_orphan():
    rows = {"runs": row("RUNNING", node="node1"), "gone": row("RUNNING", node="node0")}
    assert orphan(rows, lambda: AliveNodes({"node1"}), NOW) == "gone"


def test_a_job_that_is_older_than_the_head_may_be_an_orphan_until_its_manager_is_woken():
    """Its supervisor may have died while the head was away."""
    rows = {"old": row("RUNNING", age_s=100, node="node1"), "new": row("RUNNING", node="node1")}
    head = AliveNodes({"node1"}, head_since=NOW - 50)
    assert orphan(rows, lambda: head, NOW) == "old"
    assert orphan(rows, lambda: head, NOW, woken_at=NOW - 60) == "old"
    assert orphan(rows, lambda: head, NOW, woken_at=NOW - 40) == ""
    assert orphan({"new": rows["new"]}, lambda: head, NOW) == ""


def test_a_job_that_was_about_to_start_for_long_is_an_orphan():
    assert orphan({"waits": row("PENDING", age_s=100)}, lambda: None, NOW) == "waits"


@pytest.mark.parametrize("alive", [AliveNodes({"node1"}), None])
def test_jobs_that_are_well_are_none(alive):
    rows = {
        "young": row("PENDING", age_s=1),
        "runs": row("RUNNING", node="node1"),
        "ended": row("FAILED", node="node0"),
    }
    assert orphan(rows, lambda: alive, NOW) == ""


def test_when_nodes_are_not_told_nobody_is_an_orphan():
    assert orphan({"gone": row("RUNNING", node="node0")}, lambda: None, NOW) == ""


def test_ray_refuses_the_label_of_the_request():
    """Ray's own check, which its job manager makes before it takes an id."""
    assert validate_label_selector(jobs._REFUSED_LABEL)


class _Handler(Handler):
    posts: list
    answers: list

    def answer(self) -> None:
        if self.command == "POST":
            self.posts.append(json.loads(self.body()))
            self.send(*(self.answers.pop(0) if self.answers else (500, "Invalid label key name")))
        else:
            nodes = [{"node_id": "node1", "state": "ALIVE"}, {"node_id": "node0", "state": "DEAD"}]
            self.send(200, json.dumps({"data": {"result": {"result": nodes}}}))


@pytest.fixture
def api() -> Iterator[JobsApi]:
    posts, answers = [], []
    with serving(_Handler, posts=posts, answers=answers) as url:
        found = JobsApi(Dashboard(url, {}))
        found.posts, found.answers = posts, answers
        yield found
        found._http.close()


ORPHANS = {"gone": {"status": "RUNNING", "start_time": 0, "driver_node_id": "node0"}}


def test_one_request_names_one_of_the_jobs_and_asks_for_the_impossible(api):
    assert api.wake_for(ORPHANS)
    (body,) = api.posts
    assert body["submission_id"] == "gone"
    assert body["entrypoint_label_selector"] == jobs._REFUSED_LABEL


def test_it_is_not_repeated_at_once(api):
    for _ in range(5):
        api.wake_for(ORPHANS)
    assert len(api.posts) == 1


def test_it_is_repeated_soon_when_nobody_was_there(api, monkeypatch):
    api.answers.append((503, "starting"))
    api.wake_for(ORPHANS)
    began = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began + jobs._WAKE_FAILED_S + 1)
    api.wake_for(ORPHANS)
    assert len(api.posts) == 2


def test_nodes_that_are_not_told_are_no_dead_ones(api, monkeypatch):
    monkeypatch.setattr(_Handler, "answer", lambda self: self.send(500, '{"data": null}'))
    assert api.state.alive_nodes() is None
    assert not api.wake_for(ORPHANS)


def test_nobody_is_woken_for_jobs_that_are_well(api):
    runs = {"runs": {"status": "RUNNING", "start_time": 0, "driver_node_id": "node1"}}
    assert not api.wake_for(runs)
    assert api.posts == []
