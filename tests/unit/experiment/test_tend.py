"""What a client that waits does for its jobs."""

import time

import pytest

from nemo_run_ray.dashboard.state import StateApi
from nemo_run_ray.errors import JobError
from nemo_run_ray.experiment import dispatch
from nemo_run_ray.experiment.dispatch import resume, tend
from nemo_run_ray.experiment.store import store_of
from tests.unit.experiment.conftest import Submitted


@pytest.fixture
def stopped(ray, unique) -> Submitted:
    """A chain whose dispatcher was stopped before anything was done."""
    submitted = Submitted(ray, unique, "first", "second after first")
    ray.rows[submitted.dispatch.id]["status"] = "STOPPED"
    return submitted


def test_a_dead_dispatcher_is_started_again_and_goes_on(ray, stopped, caplog):
    tend(stopped.exp_dir)
    again = f"{stopped.dispatch.id}@2"
    assert ray.rows[again]["status"] == "PENDING"
    assert f"it is started again as {again}" in caplog.text
    assert ray.dispatch(stopped.dispatch.spec, rounds=20) == 0
    assert stopped.states() == {"first": "SUCCEEDED", "second": "SUCCEEDED"}


def test_one_that_always_ends_at_once_is_given_up(ray, stopped, caplog, monkeypatch):
    monkeypatch.setattr(dispatch, "_REVIVE_AGAIN_S", 0.0)
    monkeypatch.setattr(dispatch, "_REVIVALS_MAX", 2)
    for _ in range(4):
        tend(stopped.exp_dir)
        for name, row in ray.rows.items():
            if name.startswith(stopped.dispatch.id):
                row["status"] = "STOPPED"
    assert len(caplog.messages) == 2


def test_nothing_is_told_when_another_client_was_faster(stopped, caplog, monkeypatch):
    looks = iter([True, False])
    monkeypatch.setattr(dispatch.DispatchStatus, "is_stuck", property(lambda _: next(looks)))
    tend(stopped.exp_dir)
    assert caplog.messages == []


@pytest.mark.parametrize(("ended_s", "is_left"), [(0, True), (300, False)])
def test_one_that_had_no_time_is_left_to_the_next_allocation(ray, stopped, ended_s, is_left):
    """Until this one should have ended; then nobody started it in the next one."""
    end_time = int((time.time() - ended_s) * 1000)
    row = ray.rows[stopped.dispatch.id]
    row.update(status="FAILED", driver_exit_code=9, end_time=end_time)
    tend(stopped.exp_dir)
    assert (f"{stopped.dispatch.id}@2" in ray.rows) != is_left
    assert resume(stopped.dispatch) == "its dispatcher is at work"


def test_a_dispatch_that_is_being_submitted_is_left_to_its_client(ray, unique):
    submitted = Submitted(ray, unique, "first", "second after first")
    del ray.rows[submitted.dispatch.id]
    ledger = store_of(submitted.exp_dir).ledger.path
    lines = ledger.read_text().splitlines()
    ledger.write_text("".join(f"{line}\n" for line in lines if '"submitted"' not in line))
    ray.requests.clear()
    tend(submitted.exp_dir)
    assert ray.writes == []


def test_a_folder_that_cannot_be_written_to_ends_no_wait(ray, stopped, monkeypatch, caplog):
    def full(path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("nemo_run_ray.experiment.store.FileLock", full)
    tend(stopped.exp_dir)
    assert "No space left" in caplog.text


def test_a_folder_that_was_copied_in_part_says_what_to_copy(stopped, caplog):
    start = stopped.dispatch.folder / "dispatcher.json"
    for spoil in (lambda: start.write_text("{"), start.unlink):
        spoil()
        with pytest.raises(JobError, match="Copy the experiment's whole folder"):
            resume(stopped.dispatch)
    tend(stopped.exp_dir)
    assert "it cannot be started: The chain" in caplog.text


def test_a_job_that_starts_although_it_was_cancelled_is_stopped(ray, unique):
    submitted = Submitted(ray, unique, "one", "other")
    for name in ("one", "other"):
        ray.rows[f"{submitted.id}.{name}"].update(status="RUNNING", driver_node_id=ray.alive[0])
    submitted.claim("one")
    tend(submitted.exp_dir)
    assert ray.stops == [f"{submitted.id}.one"]


def test_one_of_ours_that_nobody_looks_after_wakes_ray(ray, unique, monkeypatch):
    submitted = Submitted(ray, unique, "one")
    ray.rows[f"{submitted.id}.one"].update(status="RUNNING", driver_node_id=ray.alive[0])
    monkeypatch.setattr(StateApi, "head_since", lambda _: time.time() + 1)
    accepted = len(ray.bodies)
    tend(submitted.exp_dir)
    assert ray.posts() == 2
    assert len(ray.bodies) == accepted, "nothing came of the second request"
