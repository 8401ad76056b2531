"""Jobs that wait for experiments by their titles or ids, on a simulated Ray."""

from contextlib import nullcontext
from dataclasses import replace

import pytest

from nemo_run_ray import RayExecutor
from nemo_run_ray.clusters import ClusterArchive
from nemo_run_ray.dashboard.jobs import JobsApi
from nemo_run_ray.errors import ConfigError, SubmissionError
from nemo_run_ray.experiment.submit import outside_spec
from nemo_run_ray.remote.status import JobExit
from tests.conftest import refused
from tests.fake_ray import FakeRay
from tests.unit.experiment.conftest import Submitted


def outside(submitted: Submitted) -> dict[str, list[str]]:
    """What each job waits for in other experiments."""
    return {job.name: [one.id for one in job.outside] for job in submitted.dispatch.spec.jobs}


@pytest.fixture
def prep(ray: FakeRay, unique: str) -> Submitted:
    return Submitted(ray, f"{unique}-prep", "a", "b")


@pytest.mark.parametrize("by", ["title", "id"])
def test_all_jobs_of_the_experiment_must_have_succeeded(ray, unique, prep, by):
    name = f"{unique}-prep" if by == "title" else prep.id
    submitted = Submitted(ray, unique, "job", "next after job", dependencies=[name])
    ids = [f"{prep.id}.a", f"{prep.id}.b"]
    assert {name: sorted(found) for name, found in outside(submitted).items()} == {
        "job": ids,
        "next": ids,  # NeMo-Run has put the handle of the job into the field
    }
    assert {job.name: job.after for job in submitted.dispatch.spec.jobs}["next"] == ("job",)
    ray.dispatch(submitted.dispatch.spec, rounds=1)
    assert f"{submitted.id}.job" not in ray.started
    ray.pass_time(1.0)
    assert ray.dispatch(submitted.dispatch.spec, rounds=30) == JobExit.SUCCEEDED


def test_an_experiment_whose_jobs_cannot_be_read_here_is_refused(ray, unique, prep):
    (prep.exp_dir / "_TASKS").write_text('[["not serialised", null]]')
    executor = RayExecutor(address=ray.url, dependencies=[f"{unique}-prep"])
    message = refused(ConfigError, executor, unique)
    assert "cannot be read here" in message
    assert "by their handles" in message


def test_the_newest_of_a_title_and_never_the_experiment_itself(ray, unique):
    Submitted(ray, unique, "job")
    second = Submitted(ray, unique, "job")
    third = Submitted(ray, unique, "job", dependencies=[unique])
    assert outside(third) == {"job": [f"{second.id}.job"]}


def test_an_unknown_name_is_refused_with_the_nearest_titles(ray, unique, prep):
    ray.requests.clear()
    executor = RayExecutor(address=ray.url, dependencies=[f"{unique}-perp"])
    message = refused(ConfigError, executor, f"{unique}x")
    assert f"RayExecutor.dependencies names '{unique}-perp'" in message
    assert f"'{unique}-prep'" in message.partition("Did you mean")[2]
    assert "Nothing was sent" in message
    executor = RayExecutor(address=ray.url, dependencies=["nothing like it at all"])
    assert "Did you mean" not in refused(ConfigError, executor, f"{unique}y")
    assert ray.requests == []


def test_an_experiment_that_is_not_submitted_yet(ray, unique, prep):
    ledger = prep.exp_dir / "ray_jobs.jsonl"
    lines = [line for line in ledger.read_text().splitlines() if f"{prep.id}.b" not in line]
    ledger.write_text("".join(f"{line}\n" for line in lines))
    executor = RayExecutor(address=ray.url, dependencies=[prep.id])
    message = refused(ConfigError, executor, f"{unique}x")
    assert "has not submitted to Ray: b" in message
    ledger.unlink()
    assert "a, b" in refused(ConfigError, executor, f"{unique}y")


@pytest.mark.parametrize("continues", [True, False])
def test_a_chain_may_have_continued_in_the_next_allocation(ray, unique, continues):
    before = Submitted(ray, unique, "first", "second after first")
    archive = ClusterArchive(rows=dict(ray.rows)) if continues else ClusterArchive()
    api = JobsApi(replace(before.jobs["second"].api().dashboard, earlier=archive))
    error = nullcontext() if continues else pytest.raises(SubmissionError, match="another cluster")
    with error:
        spec = outside_spec(f"ray_jobs://nemo_run/{before.id}.second", api, "the next session")
        assert spec.dispatcher == before.dispatch.id
