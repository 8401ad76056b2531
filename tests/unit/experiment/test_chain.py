"""Chains from the client's side, with a real dispatcher on a simulated Ray."""

import pytest
from typer.testing import CliRunner

from nemo_run_ray.cli import main as cli
from nemo_run_ray.experiment.dispatch import Snapshot
from nemo_run_ray.remote.status import CLAIM_KEY, JobExit, JobStatus
from tests.fake_ray import GOES_ON, FakeRay
from tests.unit.experiment.conftest import Handed


def statuses(handed: Handed) -> dict[str, JobStatus]:
    snapshot = Snapshot(is_fresh=True)
    return {name: job.status_in(snapshot) for name, job in handed.jobs.items()}


def started_jobs(handed: Handed) -> list[str]:
    """What was started of it, without the dispatcher, in the order of the starts."""
    names = [one.removeprefix(f"{handed.id}.") for one in handed.ray.started]
    return [one for one in names if not one.startswith("dispatcher")]


def cancel(handed: Handed, *words: str) -> str:
    done = CliRunner().invoke(cli.build(), ["cancel", handed.id, *words])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture
def first_runs(ray: FakeRay, unique: str) -> Handed:
    handed = Handed(ray, unique, "first", "second after first", "third after second", retries=3)
    ray.fates[f"{handed.id}.first"] = GOES_ON
    ray.dispatch(handed.dispatch.spec, rounds=2)
    assert handed.states()["first"] == "RUNNING"
    return handed


def test_cancelling_a_job_before_its_start_takes_its_id(ray, first_runs):
    shown = cancel(first_runs, "--job", "second")
    assert "second is cancelled; it never had a process" in shown
    assert ray.rows[f"{first_runs.id}.second"]["metadata"][CLAIM_KEY] == "cancelled"
    assert statuses(first_runs)["third"].detail == "upstream second was cancelled"
    del ray.fates[f"{first_runs.id}.first"]
    assert ray.dispatch(first_runs.dispatch.spec, rounds=30) == JobExit.SOME_FAILED
    assert started_jobs(first_runs) == ["first"]
    assert first_runs.states() == {
        "first": "SUCCEEDED",
        "second": "CANCELLED",
        "third": "CANCELLED",
    }
    assert "cancelled before its start" in statuses(first_runs)["second"].message
