"""Finding jobs by whatever a user has at hand."""

import os
import shutil

import pytest

import nemo_run_ray
from nemo_run_ray.errors import JobError
from nemo_run_ray.jobs.find import find_experiment
from nemo_run_ray.nemo import registry
from tests.unit.jobs.conftest import Handed


def test_an_id_a_title_a_handle_and_a_jobs_id(ray, unique):
    handed = Handed(ray, unique, "one", "two")
    for name in (handed.id, unique):
        assert {one.name for one in nemo_run_ray.find(name)} == {"one", "two"}
    job = f"{handed.id}.two"
    for name in (job, registry.handle(job)):
        (found,) = nemo_run_ray.find(name)
        assert (found.id, found.name) == (job, "two")


def test_the_newest_experiment_of_a_title(ray, unique):
    first, second = Handed(ray, unique, "one"), Handed(ray, unique, "two")
    assert first.id != second.id
    assert find_experiment(unique) == second.exp_dir


@pytest.mark.parametrize("name", ["no-such-thing", "", "no/such", "*", "[a]", "ray_jobs://x/y"])
def test_a_name_of_nothing(name):
    with pytest.raises(JobError, match="There is no experiment") as caught:
        nemo_run_ray.find(name)
    assert "NEMORUN_HOME" in str(caught.value)


def test_an_experiment_that_has_handed_nothing_over(ray, unique):
    handed = Handed(ray, unique, "one")
    os.remove(handed.exp_dir / "ray_jobs.jsonl")
    with pytest.raises(JobError, match="has handed nothing over to Ray yet"):
        nemo_run_ray.find(handed.id)


def test_a_file_beside_experiments_is_none(ray, unique):
    handed = Handed(ray, unique, "one")
    (handed.exp_dir.parent / "notes.txt").write_text("mine")
    assert find_experiment(unique) == handed.exp_dir


def test_a_folder_that_was_copied_to_another_home_is_found_there(
    ray, unique, tmp_path, monkeypatch
):
    handed = Handed(ray, unique, "one")
    copy = tmp_path / "experiments" / unique / handed.id
    shutil.copytree(handed.exp_dir, copy)
    monkeypatch.setattr("nemo_run_ray.jobs.find.get_nemorun_home", lambda: str(tmp_path))
    assert find_experiment(unique) == copy
