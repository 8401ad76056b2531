"""What a dashboard tells of nodes, holders and builds, well formed or not."""

import contextlib
import json
import math
from dataclasses import asdict

import pytest

from nemo_run_ray.clusters import Dashboard
from nemo_run_ray.dashboard.http import MALFORMED, Http
from nemo_run_ray.dashboard.jobs import JobsApi, inspect
from nemo_run_ray.dashboard.state import StateApi, holdings_of, room_of
from nemo_run_ray.errors import NemoRunRayError
from nemo_run_ray.remote.spec import fits
from nemo_run_ray.remote.status import JobState, JobStatus, Reason
from tests import rooms
from tests.http_server import Handler, serving
from tests.rooms import GIB, GROUP, FakeNode, actor, placement_group, room, supervisor

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
    "bundles": [{"unit_resources": {"CPU": 1.0}, "node_id": "a"}],
    **NODE.row(),
}


class Front(Handler):
    """Answers every question alike, but for some."""

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
            api.state.head_since,
            lambda: repr(api.state.room()),
            api.state.python,
            lambda: api.state.rows("n", "e.a"),
            lambda: api.state.explain_build(pending, JobStatus(JobState.PENDING)),
            lambda: list(api.whole_log("e.a")),
        ]
        for question in questions:
            with contextlib.suppress(NemoRunRayError):
                question()


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
            held = holdings_of([row], [row], [row])
            for one in (*held, *room_of([row], held).nodes):
                assert has_its_types(asdict(one))


def has_its_types(values: dict) -> bool:
    texts = {"node_id", "host", "address", "submission_id", "job_id"}
    return (
        all(isinstance(values[name], str) for name in texts & values.keys())
        and fits(values["resources"], dict[str, float])
        and fits(values.get("free", {}), dict[str, float])
        and fits(values.get("labels", {}), dict[str, str])
    )


def test_each_reservation_counts_once():
    one = FakeNode("a", {"CPU": 8.0, "memory": 8.0 * GIB, "my_fpga": 2.0}, {"CPU": 0.5})
    found = room(
        one,
        FakeNode("b", {}, state="DEAD"),
        actors=[
            supervisor("exp.a", one, CPU=1.5),
            supervisor("exp.b", None, CPU=16.0),
            actor("03000000", one, CPU=0.25),
            actor("03000000", one, GROUP, CPU_group_9bf=0.5),
        ],
        groups=[placement_group("04000000", one, CPU=2.0, my_fpga=1.0)],
    )
    (node,) = found.nodes
    assert node.resources == {"CPU": 8.0, "memory": 8.0 * GIB, "my_fpga": 2.0}
    assert node.free == {"CPU": 3.75, "memory": 8.0 * GIB, "my_fpga": 1.0}
    assert [(one.submission_id, one.job_id, one.resources) for one in found.holdings[one.id]] == [
        ("exp.a", "02000000", {"CPU": 1.5}),
        ("", "03000000", {"CPU": 0.25}),
        ("", "99000000", {"CPU": 0.5}),
        ("", "04000000", {"CPU": 2.0, "my_fpga": 1.0}),
    ]


ANSWERS = {
    "/api/version": {"ray_version": "2.60.0", "session_name": "s"},
    "/api/jobs/": [{"submission_id": "a", "status": "PENDING"}, {"submission_id": None}],
    **{f"/api/v0/{name}": rooms.answer(rows) for name, rows in rooms.tables(NODE).items()},
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
    assert found.nodes[0].free == {"CPU": 4.0}


def test_the_nodes_alone_do_not_tell_what_is_free():
    found, _ = looked(**{"/api/v0/actors": 404})
    assert found.nodes[0].resources == {"CPU": 4.0}
    assert found.nodes[0].free is None


@pytest.mark.parametrize(
    ("refused", "unreachable", "unauthorised"),
    [({"/api/jobs/": 403}, "", "answered 403"), ({"/api/version": 500}, "answered 500", "")],
)
def test_a_cluster_that_cannot_be_asked(refused, unreachable, unauthorised):
    found, _ = looked(**refused)
    assert unreachable in found.unreachable
    assert unauthorised in found.unauthorised
    assert bool(found.unreachable) is not bool(found.unauthorised)
    assert found.nodes is None


def test_a_job_table_that_does_not_come_leaves_the_rest():
    found, _ = looked(**{"/api/jobs/": 500})
    assert (found.unreachable, found.version, found.jobs) == ("", "2.60.0", None)
    assert found.nodes


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
        ([_listed(_OURS, success=False)], _ROW, Reason.NONE),  # the job table says so next
        ([_listed(_OURS, success=True)], _ROW, Reason.NONE),
        ([_listed({**_OURS, "pip": ["fine"]}), {"runtime_env": 1}], _ROW, Reason.NONE),
        ([], _ROW, Reason.NONE),
        ([_listed(_OURS)], {"runtime_env": {"py_modules": []}}, Reason.NONE),
    ],
)
def test_a_pending_job_says_how_far_its_environment_is(monkeypatch, rows, row, reason):
    asked = []

    def answer(*_: object, **__: object) -> list[dict]:
        asked.append(1)
        return rows

    monkeypatch.setattr(StateApi, "_rows", answer)
    state = StateApi(Http(Dashboard("http://127.0.0.1:1")))
    for _ in range(100):
        status = state.explain_build(row, _PENDING)
    assert (status.state, status.reason) == (JobState.PENDING, reason)
    assert len(asked) <= 1
