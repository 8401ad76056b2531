"""What is said of a job when its cluster, its row or its answer is not what it was."""

from dataclasses import replace

import pytest

from nemo_run_ray.clusters import ClusterArchive
from nemo_run_ray.errors import ConfigError
from nemo_run_ray.experiment import dispatch as snapshots
from nemo_run_ray.experiment.dispatch import Snapshot
from nemo_run_ray.experiment.store import store_of
from nemo_run_ray.remote.end_record import EndRecord, lock_of, proof_of
from nemo_run_ray.remote.status import JobState, JobStatus, Reason
from tests.fake_ray import EXIT_CODE_IS_LOST, GOES_ON, NODE, SUCCEEDS, Trouble
from tests.unit.experiment.conftest import Submitted


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(snapshots, "_RECOVERS_S", 0.0)


@pytest.fixture
def one(ray, unique) -> Submitted:
    return Submitted(ray, unique, "job")


@pytest.mark.parametrize(
    ("why", "end"), [("it is gone", "."), ("it is gone.", ""), ("it is gone:\n  last line", "")]
)
def test_a_sentence_gets_a_full_stop_and_the_line_of_a_log_none(one, monkeypatch, why, end):
    job = one.jobs["job"]
    monkeypatch.setattr(job, "_archive", lambda: ClusterArchive(reason=why))
    assert job._lost(Snapshot(), "").detail == f"Its end is not known: {why}{end}"


def status_of(submitted: Submitted, name: str = "job") -> JobStatus:
    """As a process that knows nothing sees it now."""
    return submitted.jobs[name].status_in(Snapshot(is_fresh=True))


def test_a_cluster_that_was_started_anew_has_lost_it(ray, one, monkeypatch):
    archive = ClusterArchive(continues=True)  # with chains of others
    monkeypatch.setattr(one.jobs["job"], "_archive", lambda: archive)
    ray.rows.clear()
    ray.session = "session_of_another_life"
    status = status_of(one)
    assert (status.state, status.reason) == (JobState.LOST, Reason.CLUSTER_GONE)
    assert "session_of_another_life" in status.detail


def test_a_head_that_recovers_may_answer_before_it_knows_its_jobs(ray, one):
    rows = dict(ray.rows)
    looks = iter([{}])
    ray.before_table = lambda: ray.rows.update(next(looks, rows))
    ray.rows.clear()
    assert status_of(one).state is JobState.PENDING


def test_a_row_that_stays_away_is_lost(ray, one):
    ray.rows.clear()
    status = status_of(one)
    assert status.state is JobState.LOST
    assert "no record of it any more" in status.detail


@pytest.mark.parametrize("trouble", [Trouble(), Trouble(503, "starting"), Trouble(403)])
def test_a_cluster_that_does_not_answer_leaves_it_unknown(ray, one, trouble):
    ray.trouble = lambda method, path: trouble
    status = status_of(one)
    assert (status.state, status.reason) == (JobState.UNKNOWN, Reason.UNREACHABLE)
    assert ray.url in status.detail


@pytest.mark.parametrize("fields", [{}, {"retries": 1}])
def test_a_cluster_that_does_not_answer_leaves_node_and_attempt(ray, unique, fields):
    submitted = Submitted(ray, unique, "job", **fields)
    if fields:
        ray.fates[f"{submitted.id}.job"] = GOES_ON
        ray.dispatch(submitted.dispatch.spec, rounds=2)
    ray.rows[f"{submitted.id}.job"].update(status="RUNNING", driver_node_id=NODE)
    submitted.record()
    ray.trouble = lambda method, path: Trouble()
    status = status_of(submitted)
    assert (status.state, status.node, status.attempt) == (JobState.UNKNOWN, NODE, 1)
    ray.requests.clear()
    job = submitted.jobs["job"]
    job.record = replace(job.record, has_roles=True)
    assert job.roles(status) is None
    assert ray.requests == []


def test_an_id_that_a_stranger_has_was_never_ours(ray, one):
    ray.rows[f"{one.id}.job"]["metadata"] = {"nemo_run_ray": "theirs"}
    assert status_of(one).reason is Reason.TAKEN


def test_an_end_is_known_without_its_cluster(ray, one):
    ray.rows[f"{one.id}.job"].update(SUCCEEDS, end_time=int(ray.now * 1000), driver_node_id=NODE)
    assert one.record() == {"job": "SUCCEEDED"}
    ray.rows.clear()
    ray.session = "another"
    ray.requests.clear()
    assert status_of(one).state is JobState.SUCCEEDED
    assert ray.requests == []


def test_a_wait_that_is_too_short_says_so_and_the_job_goes_on(ray, one):
    (job,) = one.jobs.values()
    with pytest.raises(TimeoutError, match="is PENDING after 0 s; it continues"):
        job.wait(timeout_s=0.0)
    assert ray.stops == []


@pytest.mark.parametrize("timeout_s", [-1, float("nan"), "5"])
def test_a_wait_takes_seconds(one, timeout_s):
    (job,) = one.jobs.values()
    with pytest.raises(ConfigError, match="timeout_s of a wait is"):
        job.wait(timeout_s=timeout_s)


def test_a_full_disk_ends_no_wait(ray, one, monkeypatch, caplog):
    ray.rows[f"{one.id}.job"].update(SUCCEEDS)

    def full(path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("nemo_run_ray.experiment.store.FileLock", full)
        assert one.record() == {"job": "SUCCEEDED"}
    assert "No space left" in caplog.text
    one.record()
    (record,) = store_of(one.exp_dir).ledger.jobs().values()
    assert record.terminal.state.value == "SUCCEEDED"


def test_a_job_object_sees_what_other_processes_have_written_down(ray, one):
    (job,) = one.jobs.values()
    assert job.status.state is JobState.PENDING
    one.claim("job")
    assert job.status_in(Snapshot(is_fresh=True)).state is JobState.CANCELLED


def test_an_end_that_ray_has_lost_is_told_as_the_log_proves_it(ray, one):
    name = f"{one.id}.job"
    ray.rows[name].update(EXIT_CODE_IS_LOST, driver_node_id=NODE, end_time=1)
    metadata = ray.rows[name]["metadata"]
    metadata["nemo_run_ray_lock"] = lock_of(proof_of("key", 0))
    record = EndRecord(4, "EXIT_CODE", "exit code 4", proof=proof_of("key", 4))
    line = record.line(metadata["nemo_run_ray"])
    ray.logs[name] = f"Running entrypoint for job {name}: true\nwords\n{line}"
    (job,) = one.jobs.values()
    assert (job.status.reason, job.status.detail) == (Reason.EXIT_CODE, "exit code 4")
    assert job.status.tail == "words"
