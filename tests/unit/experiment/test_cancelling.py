"""Cancelling, on a simulated Ray whose answers are lost and whose jobs are slow to end."""

import itertools
import time
from types import SimpleNamespace

import pytest

from nemo_run_ray.dashboard.jobs import JobsApi
from nemo_run_ray.errors import ClusterError, Unanswered
from nemo_run_ray.experiment import dispatch
from nemo_run_ray.experiment import job as job_module
from nemo_run_ray.experiment.job import cancel_all
from nemo_run_ray.remote.status import JobExit, JobState
from tests.fake_ray import FINDS_NO_ROOM, GOES_ON, NODE, Trouble
from tests.unit.experiment.conftest import Submitted


@pytest.fixture(autouse=True)
def time_passes(monkeypatch, ray):
    """Every pause of this package is time in which the simulated jobs go on."""
    clock = itertools.count()
    monkeypatch.setattr(dispatch, "time", SimpleNamespace(time=time.time, sleep=ray.pass_time))
    monkeypatch.setattr(dispatch, "monotonic", lambda: next(clock) * 0.25)


@pytest.fixture
def one(ray, unique) -> Submitted:
    submitted = Submitted(ray, unique, "job", grace_s=1)
    ray.fates[f"{submitted.id}.job"] = GOES_ON
    ray.rows[f"{submitted.id}.job"].update(status="RUNNING", driver_node_id=NODE)
    return submitted


def test_a_stop_that_gets_lost_is_asked_for_again(ray, one):
    lost = iter([Trouble(), Trouble(502, "bad gateway")])
    ray.trouble = lambda method, path: next(lost, None) if path.endswith("/stop") else None
    assert one.jobs["job"].cancel().state is JobState.CANCELLED
    assert len(ray.stops) == 3


@pytest.mark.parametrize("trouble", [Trouble(503, "restarting"), Trouble()], ids=["503", "dropped"])
@pytest.mark.parametrize("task", ["job", "job after first"])
def test_a_look_that_gets_no_answer_is_taken_again(ray, unique, task, trouble):
    submitted = (
        Submitted(ray, unique, "first", task) if " " in task else Submitted(ray, unique, task)
    )
    if " " in task:
        ray.dispatch(submitted.dispatch.spec, rounds=3)
    ray.fates[f"{submitted.id}.job"] = GOES_ON
    lost = iter([trouble])
    ray.trouble = lambda method, path: next(lost, None)
    assert submitted.jobs["job"].cancel().state is JobState.CANCELLED


def test_a_job_that_never_ends_is_an_error_that_names_it(ray, one):
    ray._stop = lambda name: (200, "{}")
    with pytest.raises(ClusterError, match="Within 41 s of being cancelled") as caught:
        one.jobs["job"].cancel()
    assert f"{one.id}.job" in str(caught.value)
    assert "Cancel it again" in str(caught.value)


def test_a_job_that_waits_for_room_is_stopped_until_ray_holds_it_back(ray, one):
    name = f"{one.id}.job"
    ray.rows[name].update(status="PENDING", driver_node_id=None)
    ray.fates[name] = FINDS_NO_ROOM
    status = one.jobs["job"].cancel()
    assert status.state is JobState.CANCELLED
    assert len(ray.stops) >= 3
    assert one.states() == {"job": "CANCELLED"}, "as other processes see it"


def test_an_id_of_a_stranger_is_left_alone(ray, unique):
    submitted = Submitted(ray, unique, "job")
    ray.rows[f"{submitted.id}.job"]["metadata"] = {"nemo_run_ray": "theirs"}
    ray.requests.clear()
    assert submitted.jobs["job"].cancel().state is JobState.FAILED
    assert ray.writes == []


def test_one_that_does_not_end_keeps_no_other_from_it(ray, unique):
    submitted = Submitted(ray, unique, *(f"job{number}" for number in range(12)))
    for job in submitted.jobs.values():
        ray.fates[job.id] = GOES_ON
    stubborn, stop = f"{submitted.id}.job0", ray._stop
    ray._stop = lambda name: (200, "{}") if name == stubborn else stop(name)
    with pytest.raises(ClusterError, match=stubborn):
        list(cancel_all(list(submitted.jobs.values())))
    states = submitted.states()
    assert states.pop("job0") != "CANCELLED"
    assert set(states.values()) == {"CANCELLED"}


def test_a_whole_chain_is_cancelled_by_one_claim(ray, unique):
    submitted = Submitted(ray, unique, "first", "second after first", "third after second")
    ray.fates[f"{submitted.id}.first"] = GOES_ON
    ray.dispatch(submitted.dispatch.spec, rounds=2)
    told = list(cancel_all(list(submitted.jobs.values())))
    assert submitted.states() == dict.fromkeys(("first", "second", "third"), "CANCELLED")
    assert [one.split(" ")[0] for one in told] == ["first", "second", "third"]
    assert list(ray.claims) == [submitted.dispatch.spec.cancel_id]
    assert ray.stops == [f"{submitted.id}.first"]


@pytest.mark.parametrize("lost", [1, 99])
def test_a_claim_of_a_chain_that_gets_lost_keeps_no_job_from_its_end(
    ray, unique, monkeypatch, lost
):
    monkeypatch.setattr(job_module, "PATIENCE_S", 1.0)
    submitted = Submitted(ray, unique, "first", "second after first")
    claim = itertools.count()
    post = JobsApi.post

    def lose(self: JobsApi, body: dict[str, object]) -> None:
        if body["submission_id"] == submitted.dispatch.spec.cancel_id and next(claim) < lost:
            raise Unanswered("The connection broke off.")
        post(self, body)

    monkeypatch.setattr(JobsApi, "post", lose)
    list(cancel_all(list(submitted.jobs.values())))
    assert submitted.states() == dict.fromkeys(("first", "second"), "CANCELLED")
    assert (submitted.dispatch.spec.cancel_id in ray.claims) == (lost == 1)


@pytest.mark.parametrize(("state", "counts"), [("RUNNING", True), ("PENDING", False)])
def test_a_job_with_a_claim_on_its_next_attempt_counts_while_it_runs(ray, one, state, counts):
    name = f"{one.id}.job"
    ray.rows[name].update(status=state)
    one.claim("job")
    assert (name in job_module.active(one.jobs["job"].api().table(fresh=True))) == counts


def test_one_job_of_a_chain_that_waits_is_claimed(ray, unique):
    names = ("first", "second after first", "third after second", "other")
    submitted = Submitted(ray, unique, *names, retries=3)
    ray.fates[f"{submitted.id}.first"] = GOES_ON
    ray.dispatch(submitted.dispatch.spec, rounds=2)
    assert submitted.jobs["second"].cancel().state is JobState.CANCELLED
    assert list(ray.claims) == [f"{submitted.id}.second"]
    assert submitted.states()["first"] == "RUNNING"
    del ray.fates[f"{submitted.id}.first"]
    assert ray.dispatch(submitted.dispatch.spec, rounds=30) == JobExit.SOME_FAILED
    expected = {"first": "SUCCEEDED", "second": "CANCELLED", "third": "CANCELLED"}
    assert submitted.states() == {**expected, "other": "SUCCEEDED"}
    assert submitted.jobs["third"].status.detail == "upstream second was cancelled"
