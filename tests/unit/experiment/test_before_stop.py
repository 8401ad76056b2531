"""Which jobs are on the cluster that is stopped, and what is written down of them."""

from __future__ import annotations

from nemo_run_ray.experiment import dispatch as snapshots
from nemo_run_ray.experiment.dispatch import Dispatch
from nemo_run_ray.experiment.job import note_ends
from nemo_run_ray.experiment.store import TERMINAL, store_of
from nemo_run_ray.remote.status import JobState, JobStatus
from tests.unit.experiment.conftest import Submitted


def _stop_by_force(submitted: Submitted) -> dict[str, str]:
    """Note the ends of an experiment's jobs; what is written down then, by the job's name."""
    (api, *_) = (job.api() for job in submitted.jobs.values())
    assert list(note_ends(api, is_forced=True)) == []
    found = store_of(submitted.exp_dir).ledger.jobs().values()
    jobs = [record for record in found if not record.is_dispatcher]
    return {record.job: record.terminal.state.value if record.terminal else "" for record in jobs}


def test_an_end_that_another_program_notes_meanwhile_stays(ray, unique):
    submitted = Submitted(ray, unique, "job")
    status = JobStatus(JobState.SUCCEEDED)
    ledger = store_of(submitted.exp_dir).ledger
    ray.before_table = lambda: ledger.note(TERMINAL, f"{submitted.id}.job", status=status)
    assert _stop_by_force(submitted) == {"job": "SUCCEEDED"}


def test_an_experiment_that_cannot_be_read_keeps_no_other_from_being_noted(ray, unique):
    broken, whole = (
        Submitted(ray, f"a{unique}", "job", retries=1),
        Submitted(ray, f"b{unique}", "job"),
    )
    (broken.dispatch.folder / "dispatch.json").write_text("{")
    del Dispatch.of(broken.exp_dir, broken.dispatch.id).spec  # as in another process
    (job,) = whole.jobs.values()
    (problem,) = note_ends(job.api(), is_forced=True)
    assert broken.id in problem
    assert whole.jobs["job"].record.terminal.state is JobState.CANCELLED


def test_many_jobs_are_one_question(ray, unique):
    submitted = Submitted(ray, unique, *(f"job{number}" for number in range(20)))
    before = len(ray.requests)
    assert set(_stop_by_force(submitted).values()) == {"CANCELLED"}
    assert ray.requests[before:].count(("GET", "/api/jobs/")) <= 3


def test_what_was_lost_before_was_not_stopped(ray, unique, monkeypatch):
    monkeypatch.setattr(snapshots, "_RECOVERS_S", 0.0)
    submitted = Submitted(ray, unique, "lost", "here")
    del ray.rows[f"{submitted.id}.lost"]
    assert _stop_by_force(submitted) == {"lost": "", "here": "CANCELLED"}
