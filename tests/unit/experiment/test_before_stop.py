"""Which jobs are on the cluster that is stopped, and what is written down of them."""

from __future__ import annotations

import json
from collections.abc import Callable

import nemo_run as run

from nemo_run_ray import ExistingCluster, LocalCluster, SlurmCluster
from nemo_run_ray.clusters import Cluster
from nemo_run_ray.experiment import dispatch as snapshots
from nemo_run_ray.experiment.cancel import _is_on, note_ends
from nemo_run_ray.experiment.dispatch import Dispatch
from nemo_run_ray.experiment.store import TERMINAL, store_of
from nemo_run_ray.remote.status import JobState, JobStatus
from tests.fake_ray import FakeRay
from tests.unit.experiment.conftest import Handed


def _recorded(cluster: Cluster) -> dict:
    return json.loads(json.dumps(cluster.record()))


def _on_slurm(
    job_dir: str = "/shared", host: str = "", key: str = "/me/key", **fields
) -> SlurmCluster:
    tunnel = run.LocalTunnel(job_dir=job_dir)
    if host:
        tunnel = run.SSHTunnel(host=host, user="me", job_dir=job_dir, identity=key)
    return SlurmCluster(executor=run.SlurmExecutor(account="a", tunnel=tunnel), **fields)


def test_an_embedded_ray_by_its_folder(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "state")
    own = LocalCluster(state_dir=str(tmp_path / "state"))
    assert _is_on(_recorded(LocalCluster(state_dir=str(tmp_path / "link"))), own)
    assert not _is_on(_recorded(LocalCluster(state_dir=str(tmp_path / "other"))), own)


def test_one_on_slurm_by_its_name_and_its_way():
    for host in ("", "login"):
        own = _on_slurm(host=host, name="team")
        assert _is_on(_recorded(own), own)
        assert _is_on(_recorded(_on_slurm(host=host, name="team", renew=True)), own)
        assert _is_on(_recorded(_on_slurm("/shared/", host, "/other/key", name="team")), own)
        assert not _is_on(_recorded(_on_slurm(host=host, name="other")), own)
        assert not _is_on(_recorded(_on_slurm("/elsewhere", host, name="team")), own)
    assert not _is_on(_recorded(_on_slurm(host="login")), _on_slurm(host="other"))


def test_those_of_other_kinds_are_not(tmp_path):
    own = [_on_slurm(), LocalCluster(state_dir=str(tmp_path))]
    others = [*own, ExistingCluster(url="http://head:8265")]
    for cluster in own:
        found = [other for other in others if _is_on(_recorded(other), cluster)]
        assert found == [cluster]


def _stop_by_force(handed: Handed) -> dict[str, str]:
    """Note the ends of an experiment's jobs; what is written down then, by the job's name."""
    (cluster, *_) = (job.cluster for job in handed.jobs.values())
    (api, *_) = (job.api() for job in handed.jobs.values())
    assert list(note_ends(api, cluster, is_forced=True)) == []
    found = store_of(handed.exp_dir).ledger.jobs().values()
    jobs = [record for record in found if not record.is_dispatcher]
    return {record.job: record.terminal.state.value if record.terminal else "" for record in jobs}


def _at_second_look(ray: FakeRay, event: Callable[[], object]) -> None:
    """Let something happen before the job table is read for the second time."""
    looks = iter([lambda: None, event])
    ray.before_table = lambda: next(looks, lambda: None)()


def test_an_end_that_another_program_notes_meanwhile_stays(ray, unique):
    handed = Handed(ray, unique, "job")
    status = JobStatus(JobState.SUCCEEDED).to_json()
    ledger = store_of(handed.exp_dir).ledger
    _at_second_look(ray, lambda: ledger.write(TERMINAL, f"{handed.id}.job", status=status))
    assert _stop_by_force(handed) == {"job": "SUCCEEDED"}


def test_a_job_that_ends_while_others_are_looked_at_has_its_own_end(ray, unique):
    handed = Handed(ray, unique, "one", "two")
    _at_second_look(ray, lambda: [row.update(status="SUCCEEDED") for row in ray.rows.values()])
    assert _stop_by_force(handed) == {"one": "SUCCEEDED", "two": "SUCCEEDED"}


def test_an_experiment_that_cannot_be_read_keeps_no_other_from_being_noted(ray, unique):
    broken, whole = Handed(ray, f"a{unique}", "job", retries=1), Handed(ray, f"b{unique}", "job")
    (broken.dispatch.folder / "dispatch.json").write_text("{")
    del Dispatch.of(broken.exp_dir, broken.dispatch.id).spec  # as in another process
    (job,) = whole.jobs.values()
    (problem,) = note_ends(job.api(), job.cluster, is_forced=True)
    assert broken.id in problem
    assert whole.jobs["job"].record.terminal.state is JobState.CANCELLED


def test_many_jobs_are_one_question(ray, unique):
    handed = Handed(ray, unique, *(f"job{number}" for number in range(20)))
    before = len(ray.requests)
    assert set(_stop_by_force(handed).values()) == {"CANCELLED"}
    assert ray.requests[before:].count(("GET", "/api/jobs/")) <= 3


def test_what_was_lost_before_was_not_stopped(ray, unique, monkeypatch):
    monkeypatch.setattr(snapshots, "_RECOVERS_S", 0.0)
    handed = Handed(ray, unique, "lost", "here")
    del ray.rows[f"{handed.id}.lost"]
    assert _stop_by_force(handed) == {"lost": "", "here": "CANCELLED"}
