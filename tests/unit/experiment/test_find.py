"""Finding jobs by whatever a user has at hand."""

import os
import shutil

import nemo_run as run
import pytest

import nemo_run_ray
from nemo_run_ray import RayExecutor, nemo
from nemo_run_ray.errors import JobError
from nemo_run_ray.experiment.store import find_experiment
from nemo_run_ray.nemo.scheduler import RayJobsScheduler
from tests.unit.experiment.conftest import Submitted


def test_an_id_a_title_a_handle_and_a_jobs_id(ray, unique):
    submitted = Submitted(ray, unique, "one", "two")
    for name in (submitted.id, unique):
        assert {one.name for one in nemo_run_ray.find(name)} == {"one", "two"}
    job = f"{submitted.id}.two"
    for name in (job, nemo.handle(job)):
        (found,) = nemo_run_ray.find(name)
        assert (found.id, found.name) == (job, "two")


def test_the_newest_experiment_of_a_title(ray, unique):
    first, second = Submitted(ray, unique, "one"), Submitted(ray, unique, "two")
    assert first.id != second.id
    assert find_experiment(unique) == second.exp_dir


@pytest.mark.parametrize("name", ["no-such-thing", "", "no/such", "*", "[a]", "ray_jobs://x/y"])
def test_a_name_of_nothing(name):
    with pytest.raises(JobError, match="There is no experiment") as caught:
        nemo_run_ray.find(name)
    assert "NEMORUN_HOME" in str(caught.value)


def test_an_experiment_that_has_submitted_nothing(ray, unique):
    submitted = Submitted(ray, unique, "one")
    os.remove(submitted.exp_dir / "ray_jobs.jsonl")
    with pytest.raises(JobError, match="has submitted nothing to Ray") as caught:
        nemo_run_ray.find(submitted.id)
    assert f"nemo-run-ray resume {submitted.id}" in str(caught.value)


def test_a_folder_that_was_copied_to_another_home_is_found_there(
    ray, unique, tmp_path, monkeypatch
):
    submitted = Submitted(ray, unique, "one")
    copy = tmp_path / "experiments" / unique / submitted.id
    shutil.copytree(submitted.exp_dir, copy)
    monkeypatch.setattr("nemo_run_ray.experiment.store.get_nemorun_home", lambda: str(tmp_path))
    assert find_experiment(unique) == copy


def test_the_jobs_of_an_experiment_with_another_base_dir(ray, unique, tmp_path):
    """NeMo-Run waits with a scheduler that does not know the experiment."""
    with run.Experiment(unique, base_dir=str(tmp_path)) as experiment:
        executor = RayExecutor(address=ray.url)
        experiment.add(run.Script(inline="true"), executor=executor, name="one")
        experiment.run(detach=True)
    (job,) = nemo_run_ray.find(experiment._id)
    assert tmp_path in job.record.exp_dir.parents
    assert RayJobsScheduler("nemo_run").describe(job.id)


def test_a_misspelt_title_or_id_is_told_of_the_nearest_one(home):
    (home / "experiments" / "nearby-thing" / "nearby-thing_1790000000").mkdir(parents=True)
    for name in ("nearby-thin", "nearby-thin_1790000001"):
        with pytest.raises(JobError, match="Did you mean 'nearby-thing'"):
            nemo_run_ray.find(name)


@pytest.mark.parametrize("words", [("b", "c", "a"), ("b", "late after b", "a", "z after late")])
def test_jobs_come_in_the_order_in_which_they_were_added(ray, unique, words):
    """However they are submitted: at once by several threads, or by a dispatcher."""
    submitted = Submitted(ray, unique, *words)
    names = [word.partition(" ")[0] for word in words]
    assert [job.name for job in nemo_run_ray.find(submitted.id)] == names
