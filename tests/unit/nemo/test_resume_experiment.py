"""Going on with experiments whose client died, on a simulated Ray."""

import nemo_run as run
import pytest

from nemo_run_ray import RayExecutor, nemo
from nemo_run_ray.errors import JobError, NemoRunRayError
from nemo_run_ray.experiment.dispatch import dispatches_of
from nemo_run_ray.experiment.job import find, jobs_of
from nemo_run_ray.experiment.store import find_experiment
from nemo_run_ray.nemo.scheduler import resume_experiment
from tests.fake_ray import SUCCEEDS, FakeRay, Trouble

JOBS = ("first", "second")


def unsubmitted(ray: FakeRay, title: str, *names: str, local: bool = False, in_order: bool = False):
    """An experiment whose requests never arrive."""
    ray.trouble = lambda method, path: Trouble(200, "a page") if path == "/api/version" else None
    with run.Experiment(title, skip_status_at_exit=True, threadpool_workers=1) as experiment:
        for number, name in enumerate(names):
            after = [names[number - 1]] if in_order and number else None
            executor = RayExecutor(address=ray.url)
            experiment.add(
                run.Script(inline="true"), executor=executor, name=name, dependencies=after
            )
        if local:
            experiment.add(run.Script(inline="true"), executor=run.LocalExecutor(), name="here")
        with pytest.raises(NemoRunRayError):
            experiment.run(detach=True)
    ray.trouble = lambda method, path: None
    return nemo.load_experiment(title)


def test_jobs_that_never_arrived_are_submitted_once(ray, unique):
    experiment = unsubmitted(ray, unique, "first", "second")
    with pytest.raises(JobError, match=f"submitted nothing.*resume {experiment._id}"):
        find(experiment._id)
    assert list(resume_experiment(experiment)) == ["first: submitted", "second: submitted"]
    assert len(ray.started) == 2
    again = list(resume_experiment(nemo.load_experiment(unique)))
    assert again == ["first: PENDING, left as it is", "second: PENDING, left as it is"]
    assert len(ray.started) == 2


def test_a_chain_whose_dispatcher_died_is_left_to_a_new_one(ray, unique):
    experiment = unsubmitted(ray, unique, "first", "second", in_order=True)
    list(resume_experiment(experiment))
    (dispatcher,) = ray.started
    ray.rows[dispatcher]["status"] = "STOPPED"
    told = list(resume_experiment(nemo.load_experiment(unique)))
    assert told[0] == f"{dispatcher}: started again as {dispatcher}@2"
    assert told[1:] == [f"{one}: waits on the cluster, left to its dispatcher" for one in JOBS]
    again = list(resume_experiment(nemo.load_experiment(unique)))
    assert again[0] == f"{dispatcher}: its dispatcher is at work"


def test_a_chain_that_is_over_is_so_without_its_cluster(ray, unique):
    experiment = unsubmitted(ray, unique, "first", "second", in_order=True)
    list(resume_experiment(experiment))
    (dispatcher,) = ray.started
    folder = find_experiment(unique)
    (dispatch,) = dispatches_of(folder)
    assert ray.dispatch(dispatch.spec, rounds=30) is not None
    assert {job.wait(timeout_s=20).state.value for job in jobs_of(folder)} == {"SUCCEEDED"}
    ray.rows.clear()
    ray.session = "session_of_another_life"
    told = list(resume_experiment(nemo.load_experiment(unique)))
    assert told[0] == f"{dispatcher}: all is decided"
    assert told[1:] == [f"{one}: SUCCEEDED, left as it is" for one in JOBS]


def test_what_nemo_run_keeps_in_order_waits_for_its_turn(ray, unique):
    experiment = unsubmitted(ray, unique, *JOBS, local=True, in_order=True)
    told = dict(one.split(": ", 1) for one in resume_experiment(experiment))
    assert told["first"] == "submitted"
    assert told["second"] == (
        "not submitted, it depends on first (WAITING); resume again after that"
    )
    assert told["here"].endswith(" on LocalExecutor, left as it is")
    (first,) = jobs_of(find_experiment(unique))
    ray.rows[first.id].update(SUCCEEDS)
    told = dict(one.split(": ", 1) for one in resume_experiment(nemo.load_experiment(unique)))
    assert (told["first"], told["second"]) == ("SUCCEEDED, left as it is", "submitted")
