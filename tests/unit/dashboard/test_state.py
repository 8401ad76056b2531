"""What a dashboard tells of nodes, holders and builds, well formed or not."""

import contextlib
import json
import math
import re
from dataclasses import asdict

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.dashboard.utils import to_camel_case

from nemo_run_ray.clusters import Dashboard
from nemo_run_ray.dashboard.http import MALFORMED, Http
from nemo_run_ray.dashboard.jobs import JobsApi
from nemo_run_ray.dashboard.state import (
    Holding,
    StateApi,
    _skew,
    holdings_of,
    inspect,
    nodes_of_summary,
    nodes_of_table,
    with_names,
)
from nemo_run_ray.errors import NemoRunRayError, Unanswered
from nemo_run_ray.remote.fit import Node, amount_of, key_of
from nemo_run_ray.remote.rows import fits
from nemo_run_ray.remote.status import JobState, JobStatus, Reason
from tests import rooms
from tests.http_server import Handler, serving
from tests.rooms import GIB, GROUP, FakeNode, actor, summary, supervisor

NODE = FakeNode("a", {"CPU": 4.0}, labels={"gpu_kind": "h100"})
BAD = [None, 1, "x", [1], [None], {"a": [1]}, [{"a": 1}], 10**30, 10**400, math.nan, math.inf, True]
TABLE = {
    "state": "ALIVE",
    "is_head_node": True,
    "start_time_ms": 1,
    "runtime_env": {"pip": ["x"]},
    "success": None,
    "name": "_ray_internal_job_actor_e.a",
    "required_resources": {"CPU": 1.0},
    **NODE.in_table(),
}


class Front(Handler):
    """Answers every question alike, but for the dashboard's summary of its nodes."""

    answer_of: dict[str, object]

    def answer(self) -> None:
        path = self.path.partition("?")[0]
        self.send(200, json.dumps(self.answer_of.get(path, self.answer_of["*"])))


def ask_everything(answers: dict[str, object]) -> None:
    with serving(Front, answer_of=answers) as url:
        inspect(Dashboard(url))
        api = JobsApi(Dashboard(url))
        pending = {"runtime_env": {"pip": ["x"]}}
        questions = [
            lambda: api.version(0),
            api.table,
            lambda: api.job("e.a"),
            api.state.alive_nodes,
            lambda: repr(api.state.room()),
            lambda: repr(api.state.node_table(5)),
            lambda: api.state.python(5),
            lambda: api.state.rows("n", "e.a"),
            lambda: api.state.explain_build(pending, JobStatus(JobState.PENDING)),
            lambda: list(api.logs.whole("e.a")),
        ]
        for question in questions:
            with contextlib.suppress(NemoRunRayError):
                question()
        api._http.close()


@pytest.mark.parametrize("bad", [None, "x", [1], [None], {"a": [1]}, math.nan], ids=repr)
def test_answers_of_another_form(bad):
    ask_everything({"*": bad})
    ask_everything({"*": {"data": {"result": {"result": bad}, "summary": bad}}})
    ask_everything({"*": {"data": {"result": {"result": [bad]}, "summary": [bad]}}})


@pytest.mark.parametrize("bad", BAD, ids=repr)
def test_a_value_of_another_type_reaches_nobody(bad):
    for name in TABLE:
        row = {**TABLE, name: bad}
        with contextlib.suppress(*MALFORMED):
            assert all(map(has_its_types, nodes_of_table([row])))
        with contextlib.suppress(*MALFORMED):
            assert all(map(has_its_types, holdings_of([row])))
    text = json.dumps(rooms.summary(NODE))
    # Each value of the summary that is no object, one after another.
    for found in re.finditer(r'(?<=: )(?:"[^"]*"|[\d.]+|true|null)', text):
        changed = text[: found.start()] + json.dumps(bad) + text[found.end() :]
        with contextlib.suppress(*MALFORMED):
            assert all(map(has_its_types, nodes_of_summary(json.loads(changed))))


def has_its_types(found: Node | Holding) -> bool:
    texts = {"node_id", "host", "address", "submission_id", "job_id"}
    amounts = {"total", "free", "grouped", "resources"}
    values = asdict(found)
    return (
        all(isinstance(values[name], str) for name in texts & values.keys())
        and all(fits(values[name], (None, {str: float})) for name in amounts & values.keys())
        and fits(values.get("labels", {}), {str: str})
        and fits(list(values.get("memory") or ()), [float])
    )


# ------------------------------------------------------------------ nodes and holders


@given(st.text(max_size=30))
def test_keys_are_written_as_ray_does(name):
    assert key_of(name) == to_camel_case(name)
    assert key_of(key_of(name)) == key_of(name) or "_" not in name


def test_total_and_free_under_the_names_that_were_given():
    one = FakeNode("a", {"CPU": 4.0, "memory": 8.0 * GIB, "my_fpga": 2.0}, {"CPU": 1.5})
    (node,) = nodes_of_summary(summary(one))
    assert node.resources == {"CPU": 4.0, "memory": 8.0 * GIB, "my_fpga": 2.0}
    assert node.free == {"CPU": 2.5, "memory": 8.0 * GIB, "my_fpga": 2.0}
    assert (node.node_id, node.host, node.is_head) == (one.id, "a", False)


def test_what_placement_groups_reserve_is_not_free():
    # 2.25 are held: 1 is reserved by groups, and half of that used; 1.25 by others.
    one = FakeNode(
        "a",
        {"CPU": 4.0, "memory": 8.0 * GIB},
        {"CPU": 2.25, "memory": 2.0 * GIB},
        {"CPU": (1.0, 0.5), "memory": (2.0 * GIB, 0.0)},
    )
    (node,) = nodes_of_summary(summary(one))
    assert node.free == {"CPU": 1.75, "memory": 6.0 * GIB}
    assert node.grouped == {"CPU": 1.0, "memory": 2.0 * GIB}


@given(st.floats(0, 1000, width=32), st.floats(0, 1, width=32), st.floats(0, 2**43).map(round))
def test_any_amount_is_read(total, part, memory):
    one = FakeNode("a", {"GPU": total, "memory": memory}, {"GPU": total * part, "memory": memory})
    (node,) = nodes_of_summary(summary(one))
    assert abs(node.free["GPU"] - total * (1 - part)) < 1e-6 * max(1, total)
    assert node.resources["memory"] == memory
    assert node.free["memory"] <= max(1, memory * 0.01)


def test_dead_nodes_are_left_out():
    found = nodes_of_summary(summary(FakeNode("a", {}), FakeNode("b", {}, state="DEAD")))
    assert [node.host for node in found] == ["a"]


def test_a_node_of_which_nothing_is_told_yet_has_totals_only():
    answer = summary(FakeNode("a", {"CPU": 4.0, "my_fpga": 2.0}))
    answer["data"]["nodeLogicalResources"] = {}
    (node,) = nodes_of_summary(answer)
    assert node.free is None
    assert amount_of(node.resources, "my_fpga") == 2.0


def test_the_heads_disk_is_that_of_rays_files():
    (node,) = nodes_of_summary(summary(FakeNode("a", {}, is_head=True, disk=(7, 3))))
    assert node.disk == ("/tmp/my_ray", 7, 3)


def test_the_table_gives_labels_their_names():
    one = FakeNode("a", {"CPU": 4.0}, labels={"gpu_kind": "h100"})
    nodes = nodes_of_summary(summary(one))
    assert "gpu_kind" not in nodes[0].labels
    (named,) = with_names(nodes, nodes_of_table([one.in_table()]))
    assert named.labels["gpu_kind"] == "h100"
    assert named.free == {"CPU": 4.0}


def test_who_holds_what():
    one = FakeNode("a", {"CPU": 4.0})
    rows = [
        supervisor("exp.a", one, CPU=1.5),
        supervisor("exp.b", None, CPU=16.0),
        actor("03000000", one, CPU=0.25),
        actor("03000000", one, GROUP, CPU=0.5, my_fpga=1.0),
    ]
    first, second, third = holdings_of(rows)
    assert (first.submission_id, first.resources, first.node_id) == ("exp.a", {"CPU": 1.5}, one.id)
    assert (second.submission_id, second.job_id) == ("", "03000000")
    assert third.is_grouped
    assert third.resources == {"CPU": 0.5, "my_fpga": 1.0}


# ------------------------------------------------------------------ one look at a cluster


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
    assert found.nodes[0].resources == {"CPU": 4.0}
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


# ------------------------------------------------------------------ builds


_OURS = {"pip": ["nope"], "py_modules": ["gcs://_ray_pkg_1.zip"]}
_ROW = {"status": "PENDING", "runtime_env": _OURS}
_PENDING = JobStatus(JobState.PENDING)


def _listed(env: dict, **values: object) -> dict:
    """A row as Ray writes it: a list of packages is a dict there."""
    packages = {"packages": env["pip"], "pip_check": False}
    given = {**env, "pip": packages, "env_vars": {"RAY_worker_niceness": "0"}}
    return {"runtime_env": given, "success": None, "node_id": "a" * 56, **values}


@pytest.mark.parametrize(
    ("rows", "row", "reason"),
    [
        ([_listed(_OURS)], _ROW, Reason.BUILDING),
        ([_listed(_OURS, success=False, error="ERROR: No x found")], _ROW, Reason.RUNTIME_ENV),
        ([_listed(_OURS, success=True)], _ROW, Reason.NONE),
        ([_listed({**_OURS, "pip": ["fine"]}), {"runtime_env": 1}], _ROW, Reason.NONE),
        ([], _ROW, Reason.NONE),
        (Unanswered("504"), _ROW, Reason.NONE),
        ([_listed(_OURS)], {"runtime_env": {"py_modules": []}}, Reason.NONE),
    ],
)
def test_a_pending_job_says_how_far_its_environment_is(monkeypatch, rows, row, reason):
    asked = []

    def answer(*_: object, **__: object) -> list[dict]:
        asked.append(1)
        return _raise(rows) if isinstance(rows, Exception) else rows

    monkeypatch.setattr(StateApi, "_rows", answer)
    with contextlib.closing(Http(Dashboard("http://127.0.0.1:1"))) as http:
        state = StateApi(http)
        for _ in range(100):
            status = state.explain_build(row, _PENDING)
        running = JobStatus(JobState.RUNNING)
        assert state.explain_build(row, running) is running
    assert (status.state, status.reason) == (JobState.PENDING, reason)
    assert len(asked) <= 1
    if reason is Reason.RUNTIME_ENV:
        assert status.detail.endswith("on node aaaaaaaaaaaa: No x found")
