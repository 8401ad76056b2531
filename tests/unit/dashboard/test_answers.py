"""Whatever a dashboard answers is an error of this package, or nothing: never a traceback."""

import contextlib
import json
import math
import re
from dataclasses import asdict

import pytest

from nemo_run_ray.clusters import Dashboard
from nemo_run_ray.dashboard.http import MALFORMED
from nemo_run_ray.dashboard.inspection import inspect
from nemo_run_ray.dashboard.jobs_api import JobsApi
from nemo_run_ray.dashboard.nodes import (
    ClusterNode,
    Holding,
    holdings_of,
    nodes_of_summary,
    nodes_of_table,
)
from nemo_run_ray.errors import NemoRunRayError
from nemo_run_ray.remote.rows import fits
from nemo_run_ray.remote.states import JobState, JobStatus
from tests import rooms
from tests.http_server import Handler, serving
from tests.rooms import FakeNode

BAD = [None, 1, "x", [1], [None], {"a": [1]}, [{"a": 1}], 10**30, 10**400, math.nan, math.inf, True]
NODE = FakeNode("a", {"CPU": 4.0}, labels={"gpu_kind": "h100"})
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
            lambda: api.state.env_builds.explain(pending, JobStatus(JobState.PENDING)),
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


def has_its_types(found: ClusterNode | Holding) -> bool:
    texts = {"node_id", "host", "address", "submission_id", "job_id"}
    amounts = {"total", "free", "grouped", "resources"}
    values = asdict(found)
    return (
        all(isinstance(values[name], str) for name in texts & values.keys())
        and all(fits(values[name], (None, {str: float})) for name in amounts & values.keys())
        and fits(values.get("labels", {}), {str: str})
        and fits(list(values.get("memory") or ()), [float])
    )
