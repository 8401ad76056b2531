"""Jobs that a dead head has left behind: Ray is made to look after them, and nothing is created."""

import json
from collections.abc import Iterator

import pytest
from ray._private.label_utils import validate_label_selector

from nemo_run_ray.clusters import Dashboard
from nemo_run_ray.dashboard import jobs
from nemo_run_ray.dashboard.jobs import JobsApi, orphan
from nemo_run_ray.dashboard.state import AliveNodes
from tests.http_server import Handler, serving

NOW = 1_800_000_000.0
#: A head that was started 50 s ago.
HEAD = AliveNodes({"node1"}, head_since=NOW - 50)


def row(status: str, age_s: float = 0.0, node: str = "") -> dict:
    return {
        "status": status,
        "start_time": int((NOW - age_s) * 1000),
        "driver_node_id": node or None,
    }


@pytest.mark.parametrize(
    ("jobs", "alive", "woken_s_ago", "found"),
    [
        ([("RUNNING", 0, "node1"), ("RUNNING", 0, "node0")], AliveNodes({"node1"}), 1e9, 1),
        # Older than the head: its supervisor may have died while the head was away.
        ([("RUNNING", 0, "node1"), ("RUNNING", 100, "node1")], HEAD, 1e9, 1),
        ([("RUNNING", 100, "node1")], HEAD, 60, 0),
        ([("RUNNING", 100, "node1")], HEAD, 40, None),
        ([("PENDING", 100, "")], None, 1e9, 0),
        ([("PENDING", 1, ""), ("RUNNING", 0, "node1"), ("FAILED", 0, "node0")], HEAD, 1e9, None),
        ([("RUNNING", 0, "node0")], None, 1e9, None),
    ],
)
def test_an_orphan(jobs, alive, woken_s_ago, found):
    rows = {f"job{number}": row(*job) for number, job in enumerate(jobs)}
    name = "" if found is None else f"job{found}"
    assert orphan(rows, lambda: alive, NOW, NOW - woken_s_ago) == name


def test_ray_refuses_the_label_of_the_request():
    """Ray's own check, which its job manager makes before it takes an id."""
    assert validate_label_selector(jobs._REFUSED_LABEL)


class _Handler(Handler):
    posts: list

    def answer(self) -> None:
        if self.command == "POST":
            self.posts.append(json.loads(self.body()))
            self.send(500, "Invalid label key name")
        else:
            nodes = [{"node_id": "node1", "state": "ALIVE"}]
            self.send(200, json.dumps({"data": {"result": {"result": nodes}}}))


@pytest.fixture
def api() -> Iterator[JobsApi]:
    posts = []
    with serving(_Handler, posts=posts) as url:
        found = JobsApi(Dashboard(url, {}))
        found.posts = posts
        yield found


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


def test_nodes_that_are_not_told_are_no_dead_ones(api, monkeypatch):
    monkeypatch.setattr(_Handler, "answer", lambda self: self.send(500, '{"data": null}'))
    assert api.state.alive_nodes() is None
    assert not api.wake_for(ORPHANS)


def test_nobody_is_woken_for_jobs_that_are_well(api):
    runs = {"runs": {"status": "RUNNING", "start_time": 0, "driver_node_id": "node1"}}
    assert not api.wake_for(runs)
    assert api.posts == []
