"""Why a task waits: who holds the room, and that nothing else depends on the answer."""

from dataclasses import replace

import pytest

from nemo_run_ray.experiment.dispatch import Snapshot
from nemo_run_ray.experiment.job import why_waiting
from nemo_run_ray.remote.fit import ResourceRequest
from nemo_run_ray.remote.status import JobState, JobStatus, Reason
from tests.fake_ray import FakeRay, Trouble
from tests.rooms import FakeNode, actor, room, supervisor, tables
from tests.unit.experiment.conftest import Submitted

NODE = FakeNode("a", {"CPU": 8.0}, labels={"kind": "x"})


def test_those_who_hold_most_come_first():
    actors = (
        supervisor("exp.small", NODE, CPU=1.0),
        supervisor("exp.large", NODE, CPU=4.0),
        supervisor("exp.waits", None, CPU=8.0),
        actor("03000000", NODE, CPU=0.5),
        actor("03000000", NODE, CPU=0.5),
    )
    node = replace(NODE, used={"CPU": 1.0})
    rows = {"exp.program": {"job_id": "03000000"}}
    ask = ResourceRequest({"CPU": 2.0})
    reason, message = why_waiting(ask, room(node, actors=actors), rows)
    assert reason is Reason.ROOM
    assert message == (
        "It asks for CPU 2; the node a has CPU 1 of 8 free; there it is held by exp.large (CPU 4), "
        "exp.program (CPU 1), exp.small (CPU 1) and 1 more."
    )


@pytest.fixture(params=[{}, {"pending_timeout_s": 600}])
def waiting(request, ray: FakeRay, unique: str) -> Submitted:
    """A task that was submitted a minute ago: directly, and by a dispatcher."""
    submitted = Submitted(ray, unique, "job", cpus_per_node=2, **request.param)
    if request.param:
        ray.fates[f"{submitted.id}.job"] = {"status": "PENDING"}
        ray.dispatch(submitted.dispatch.spec, rounds=1)
    ray.rows[f"{submitted.id}.job"]["start_time"] -= 60_000
    ray.tables = tables(NODE, actors=[supervisor("exp.a", NODE, CPU=7.0)])
    ray.requests.clear()
    return submitted


def status_of(submitted: Submitted) -> JobStatus:
    return submitted.jobs["job"].status_in(Snapshot(is_fresh=True))


def test_a_task_says_what_it_waits_for(waiting):
    status = status_of(waiting)
    assert (status.state, status.reason) == (JobState.PENDING, Reason.ROOM)
    assert "asks for CPU 2; the node a has CPU 1 of 8 free; there it is held by exp.a" in (
        status.message
    )


def test_what_no_node_can_take_stays_pending_with_a_next_step(waiting, ray):
    ray.tables = tables(FakeNode("a", {"CPU": 1.0}))
    status = status_of(waiting)
    assert (status.state, status.reason) == (JobState.PENDING, Reason.UNSCHEDULABLE)
    assert "the largest node has CPU 1, it asks for 2" in status.message
    assert "Ask for resources and labels" in status.message


def test_one_answer_serves_many_jobs(waiting, ray):
    for _ in range(5):
        status_of(waiting)
    told = [path.partition("?")[0] for _, path in ray.requests if path != "/api/jobs/"]
    assert sorted(told) == [f"/api/v0/{name}" for name in sorted(ray.tables)]


@pytest.mark.parametrize("trouble", [Trouble(), Trouble(404, "no"), Trouble(403), Trouble(500)])
def test_without_a_state_api_the_answer_is_as_before(waiting, ray, trouble):
    ray.trouble = lambda method, path: None if path.startswith("/api/jobs/") else trouble
    status = status_of(waiting)
    assert (status.state, status.reason, status.message) == (JobState.PENDING, Reason.NONE, "")
    told = len(ray.requests)
    assert status_of(waiting).reason is Reason.NONE
    assert len(ray.requests) == told + 1  # the job table; the state API is left alone for a while


def test_without_actors_it_is_not_known_what_is_free(waiting, ray):
    del ray.tables["actors"]
    assert status_of(waiting).reason is Reason.NONE


def test_a_task_that_reserves_nothing_asks_nothing(ray, unique):
    submitted = Submitted(ray, unique, "job")
    ray.rows[f"{submitted.id}.job"]["start_time"] -= 60_000
    ray.requests.clear()
    assert status_of(submitted).reason is Reason.NONE
    assert {path for _, path in ray.requests} == {"/api/jobs/"}
