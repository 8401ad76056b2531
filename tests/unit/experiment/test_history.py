"""What is written down of jobs: attempts, ends and logs."""

import threading
import time
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_run_ray.cli import main as cli
from nemo_run_ray.clusters import ClusterArchive
from nemo_run_ray.errors import JobError
from nemo_run_ray.experiment import job as history
from nemo_run_ray.experiment.dispatch import Snapshot
from nemo_run_ray.experiment.store import UNKEPT, Kept, store_of
from nemo_run_ray.remote.end_record import EndRecord
from nemo_run_ray.remote.spec import NONCE_KEY
from nemo_run_ray.remote.status import CLAIM_KEY, JobState, JobStatus, attempt_id
from tests.fake_ray import FAILS, NODE, FakeRay, Trouble
from tests.unit.experiment.conftest import Submitted, invoke

pytestmark = pytest.mark.usefixtures("fresh_tables")


def kept(submitted: Submitted) -> dict[str, str]:
    """What the folder keeps, by the file's name without the experiment's id."""
    return {
        path.name.removeprefix(f"{submitted.id}."): path.read_text()
        for path in (submitted.exp_dir / "ray_logs").glob("*")
    }


def end(submitted: Submitted, *jobs: str, log: str = "words of the task\n") -> None:
    for job in jobs:
        name = f"{submitted.id}.{job}"
        submitted.ray.rows[name].update(status="SUCCEEDED", driver_exit_code=0)
        submitted.ray.logs[name] = log


def log_requests(ray: FakeRay) -> int:
    return len([path for _, path in ray.requests if path.endswith("/logs")])


@pytest.mark.parametrize("verb", ["cancel", "status"])
def test_a_verb_that_waits_keeps_what_ended_before(ray, unique, verb, monkeypatch):
    submitted = Submitted(ray, unique, "job")
    end(submitted, "job")
    monkeypatch.setattr(cli.out, "_force_terminal", True)
    invoke(verb, unique)
    assert list(kept(submitted)) == ["job.log"]


@pytest.mark.parametrize("copy_s", [0.0, 0.1])
def test_a_copy_that_takes_long_goes_on_and_what_comes_later_is_read(ray, unique, copy_s):
    submitted = Submitted(ray, unique, "job")
    end(submitted, "job")
    (job,) = submitted.jobs.values()
    may_go = threading.Event()

    def trouble(method: str, path: str) -> None:
        if path.endswith("/logs"):
            may_go.wait(20)

    ray.trouble = trouble
    snapshot = Snapshot()
    began_at = time.monotonic()
    assert history.record([(job, job.look(snapshot))], snapshot, copy_s=copy_s) == []
    assert job.wait(timeout_s=copy_s).state is JobState.SUCCEEDED
    assert time.monotonic() - began_at < 10
    assert "job.log" not in kept(submitted)
    may_go.set()
    assert submitted.record() == {"job": "SUCCEEDED"}
    assert list(kept(submitted)) == ["job.log"]
    end(submitted, "job", log="words of the task\nlast words\n")
    assert invoke("logs", unique) == "words of the task\nlast words\n"


def test_the_logs_of_all_attempts(ray, unique):
    submitted = Submitted(ray, unique, "job", retries=1)
    name = f"{submitted.id}.job"
    ray.fates[name] = FAILS
    ray.logs.update({name: "first\n", f"{name}@2": "second\n"})
    ray.dispatch(submitted.dispatch.spec, rounds=20)
    assert submitted.record() == {"job": "SUCCEEDED"}
    (text,) = kept(submitted).values()
    assert text.startswith("first\nnemo_run_ray| attempt ")
    assert text.endswith("2\nsecond\n")


def test_it_is_read_when_the_cluster_has_forgotten_the_job(ray, unique):
    submitted = Submitted(ray, unique, "job", keep_logs_max_bytes=10)
    end(submitted, "job", log="long before\nend\n")
    submitted.record()
    assert invoke("logs", unique) == "long before\nend\n", "the cluster has all of it"
    del ray.rows[f"{submitted.id}.job"], ray.logs[f"{submitted.id}.job"]
    assert invoke("logs", unique).endswith("\nend\n")


@pytest.mark.parametrize(
    "trouble", [Trouble(500, "no such file"), Trouble(), Trouble(200, '{"logs": "half of')]
)
def test_a_log_that_cannot_be_had_now_is_kept_by_a_later_look(ray, unique, trouble):
    submitted = Submitted(ray, unique, "job")
    end(submitted, "job")
    ray.trouble = lambda method, path: trouble if path.endswith("/logs") else None
    assert submitted.record() == {"job": "SUCCEEDED"}
    assert kept(submitted) == {}
    ray.trouble = lambda method, path: None
    assert submitted.record() == {"job": "SUCCEEDED"}
    assert list(kept(submitted)) == ["job.log"]


def test_a_log_that_the_cluster_does_not_have_is_given_up(ray, unique):
    submitted = Submitted(ray, unique, "job")
    end(submitted, "job")
    ray.trouble = lambda method, path: Trouble(404, "no") if path.endswith("/logs") else None
    assert submitted.record() == {"job": "SUCCEEDED"}
    before = log_requests(ray)
    store_of(submitted.exp_dir).copied.clear()  # of this process; another has none
    assert submitted.record() == {"job": "SUCCEEDED"}
    assert log_requests(ray) == before
    assert store_of(submitted.exp_dir).ledger.path.read_text().count(UNKEPT) == 1
    assert kept(submitted) == {}


@given(st.lists(st.text(st.sampled_from("ab\né漢"), max_size=30), max_size=20), st.integers(1, 100))
def test_the_kept_bytes_are_the_last_ones(tmp_path_factory, texts, most):
    folder = tmp_path_factory.mktemp("kept")
    one = Kept(folder, "job")
    one.keep_log(texts, most)
    whole, found = "".join(texts).encode(), one.log.read_bytes()
    if len(whole) <= most:
        assert found == whole
        return
    first, _, rest = found.partition(b"\n")
    assert whole.endswith(rest)
    assert len(rest) <= most
    assert f"the first {len(whole) - len(rest)} bytes of".encode() in first
    assert [path.name for path in Path(folder, "ray_logs").iterdir()] == ["job.log"]


def test_a_second_file_is_written_where_its_folder_belongs_on_this_machine(tmp_path, caplog):
    (tmp_path / "output").mkdir()
    for place in ("output/logs", "not here/logs"):
        Kept(tmp_path, "e.gen", f"{tmp_path}/{place}/main_gen").keep_log(["words\n"])
    (second,) = (tmp_path / "output" / "logs").iterdir()
    assert (second.name, second.read_text()) == ("main_gen_e.gen_srun.log", "words\n")
    assert not (tmp_path / "not here").exists()
    (tmp_path / "output" / "file").touch()
    Kept(tmp_path, "e.gen", f"{tmp_path}/output/file/main_gen").keep_log(["words\n"])
    assert "The log is not written to" in caplog.text


def test_a_log_that_is_followed_ends_with_its_job(ray, unique, monkeypatch):
    (job,) = Submitted(ray, unique, "job").jobs.values()
    succeeds = partial(ray.rows[job.id].update, status="SUCCEEDED")
    monkeypatch.setattr(history, "follow", lambda *_: iter([succeeds() or "words\n"]))
    monkeypatch.setattr(history, "_LOOK_AGAIN_S", -1)  # a pause fails
    assert "".join(job.log(follow=True)) == "words\n"


def test_the_logs_of_all_attempts_are_kept_or_none(ray, unique, tmp_path, monkeypatch):
    (job,) = Submitted(ray, unique, "job").jobs.values()
    with monkeypatch.context() as gone:
        gone.setattr(job, "_api", lambda: None)
        with pytest.raises(JobError):
            job.keep(JobStatus(JobState.FAILED, attempt=2))
    assert not job.kept.log.exists()
    monkeypatch.setattr(job, "left_logs", lambda: [tmp_path / "of an earlier allocation"])
    monkeypatch.setattr(job, "_read", lambda number, at_once: iter([f"of {number}\n"]))
    job.keep(JobStatus(JobState.FAILED, attempt=2))
    assert job.kept.log.read_text().splitlines()[::2] == ["of 1", "of 2"]


@pytest.mark.parametrize(
    ("read", "kept_log", "most", "words", "told"),
    [
        ("one\ntw", "one\ntwo\nthree\n", 99, "No more of its log is left", "one\ntwo\nthree\n"),
        # Of a log whose end alone is kept nothing is told twice.
        ("one\n", "".join(f"line {n}\n" for n in range(20)), 20, "no log any more", "one\n"),
    ],
)
def test_a_reader_whose_cluster_dies_gets_the_rest_that_it_left(
    ray, unique, read, kept_log, most, words, told
):
    (job,) = Submitted(ray, unique, "job").jobs.values()

    def dies():
        yield read
        job.kept.keep_log(kept_log.splitlines(keepends=True), most)
        raise JobError("There is no log any more.")

    job._attempt_logs = lambda _: iter([dies()])
    found = []
    with pytest.raises(JobError, match=words):
        found.extend(job.log())
    assert "".join(found) == told


def test_a_reader_of_several_attempts_gets_the_rest_of_the_last_one(ray, unique, tmp_path):
    """What its cluster left has the same text, with the same lines between the attempts."""
    (job,) = Submitted(ray, unique, "job", retries=1).jobs.values()
    for number, text in enumerate(["first\n", "second\nhal"], start=1):
        (tmp_path / attempt_id(job.id, number)).write_text(text)

    def log_of(name: str) -> Path | None:
        return tmp_path / name if (tmp_path / name).exists() else None

    job.cluster.archive = lambda session: ClusterArchive(log=log_of)
    whole = "".join(job.saved_log())
    assert whole.startswith("first\n")
    assert whole.count("nemo_run_ray| attempt ") == 1
    for passed in range(1, len(whole), 7):

        def dies(passed=passed):
            yield whole[:passed]
            raise JobError("There is no log any more.")

        job._attempt_logs = lambda _, dies=dies: iter([dies()])
        found = []
        with pytest.raises(JobError, match="No more of its log is left"):
            found.extend(job.log())
        assert "".join(found) == whole


def _row(status: str, nonce: str = "n", posted: int = 1000, ended: int = 0, **metadata) -> dict:
    row = {"status": status, "metadata": {NONCE_KEY: nonce, **metadata}, "start_time": posted}
    return {**row, "end_time": ended or None, "driver_node_id": "node"}


def test_the_attempts_of_a_job_in_the_table(ray, unique):
    """Claims, and attempts of others, are none of them."""
    submitted = Submitted(ray, unique, "a", retries=3)
    (job,) = submitted.jobs.values()
    nonce = job.record.nonces[0]
    ray.rows.update(
        {
            job.id: {**_row("FAILED", nonce, ended=5000), "driver_exit_code": 3},
            f"{job.id}@2": _row("RUNNING", nonce, posted=7000),
            f"{job.id}@3": _row("SUCCEEDED", nonce, **{CLAIM_KEY: "cancelled"}),
            f"{job.id}@4": _row("RUNNING", "a stranger's"),
        }
    )
    for name, row in ray.rows.items():
        row["submission_id"] = name
    first, second = job.attempts_in(Snapshot(is_fresh=True)).values()
    assert (first.posted_at, first.ended_at) == (1.0, 5.0)
    assert (f"{first.state}", first.exit_code) == ("FAILED", 3)
    assert (second.submission_id, second.state) == (f"{job.id}@2", "RUNNING")


def test_who_has_just_seen_it_wait_sees_when_it_begins(ray, unique):
    submitted = Submitted(ray, unique, "watched", "late")
    for name, row in ray.rows.items():
        row.update(status="PENDING" if "late" not in name else "RUNNING", start_time=1000)
    submitted.record()
    for row in ray.rows.values():
        row["status"] = "RUNNING"
    before = time.time()
    submitted.record()
    attempts = {name: job.record.attempts[job.id] for name, job in submitted.jobs.items()}
    assert before <= attempts["watched"].running_at <= time.time()
    assert attempts["late"].running_at is None, "it ran when it was first seen"


def test_a_start_that_nobody_saw_is_read_from_the_end_record(ray, unique):
    submitted = Submitted(ray, unique, "job", keep_logs_max_bytes=0)
    end(submitted, "job")
    nonce = submitted.jobs["job"].record.nonces[-1]
    name = f"{submitted.id}.job"
    ray.logs[name] = "words\n" + EndRecord(0, "NONE", "exit code 0", began_at=5.25).line(nonce)
    ray.rows[name].update(driver_node_id=NODE, start_time=1000)
    submitted.record()
    assert submitted.jobs["job"].record.attempts[name].running_at == 5.25
