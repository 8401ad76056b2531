"""Logs of ended jobs in the experiment's folder, on a simulated Ray that others run."""

import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nemo_run as run
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from nemo_run_ray import RayExecutor
from nemo_run_ray.cli import main as cli
from nemo_run_ray.clusters import ClusterArchive
from nemo_run_ray.dashboard import jobs
from nemo_run_ray.errors import JobError, Unanswered
from nemo_run_ray.experiment import keep_logs
from nemo_run_ray.experiment.find import find, find_job
from nemo_run_ray.experiment.snapshot import Snapshot
from nemo_run_ray.experiment.store import Kept
from nemo_run_ray.experiment.tend import Tending
from nemo_run_ray.remote.attempts import attempt_id
from nemo_run_ray.remote.end_record import EndRecord
from nemo_run_ray.remote.states import JobState
from tests.conftest import TRUE
from tests.fake_ray import FAILS, FakeRay, Trouble, fake_ray
from tests.unit.experiment.conftest import Handed


@pytest.fixture(autouse=True)
def tables_of_now(monkeypatch) -> None:
    monkeypatch.setattr(jobs, "TABLE_AGE_S", 0)


def invoke(*words: str) -> str:
    done = CliRunner().invoke(cli.build(), list(words))
    assert done.exit_code == 0, done.output
    return done.stdout


def kept(handed: Handed) -> dict[str, str]:
    """What the folder keeps, by the file's name without the experiment's id."""
    return {
        path.name.removeprefix(f"{handed.id}."): path.read_text()
        for path in (handed.exp_dir / "ray_logs").glob("*")
    }


def end(handed: Handed, *jobs: str, log: str = "words of the task\n") -> None:
    for job in jobs:
        name = f"{handed.id}.{job}"
        handed.ray.rows[name].update(status="SUCCEEDED", driver_exit_code=0)
        handed.ray.logs[name] = log


def log_requests(ray: FakeRay) -> int:
    return len([path for _, path in ray.requests if path.endswith("/logs")])


@pytest.mark.parametrize("verb", [["status", "--json"], ["status", "--once"], ["logs"]])
def test_a_look_keeps_the_log_once(ray, unique, verb):
    handed = Handed(ray, unique, "job")
    invoke("status", "--json", unique)
    assert kept(handed) == {}, "it has not ended"
    end(handed, "job")
    invoke(*verb, unique)
    assert kept(handed) == {"job.log": "words of the task\n"}
    before = log_requests(ray)
    invoke("status", "--json", unique)
    assert log_requests(ray) == before


def test_waiting_keeps_it(ray, unique):
    handed = Handed(ray, unique, "job")
    end(handed, "job")
    handed.jobs["job"].wait(timeout_s=10)
    assert list(kept(handed)) == ["job.log"]


def test_the_logs_of_all_attempts(ray, unique):
    handed = Handed(ray, unique, "job", retries=1)
    name = f"{handed.id}.job"
    ray.fates[name] = FAILS
    ray.logs.update({name: "first\n", f"{name}@2": "second\n"})
    ray.dispatch(handed.dispatch.spec, rounds=20)
    assert handed.states() == {"job": "SUCCEEDED"}
    (text,) = kept(handed).values()
    assert text.startswith("first\nnemo_run_ray| attempt ")
    assert text.endswith("2\nsecond\n")
    ray.logs[name] = "first, as the cluster has it\n"
    assert "".join(handed.jobs["job"].log()).startswith("first, as the cluster has it\n")
    assert list(kept(handed).values()) == [text]


def test_it_is_read_when_the_cluster_is_gone(unique):
    with fake_ray(now=time.time()) as ray:
        handed = Handed(ray, unique, "job", "chained after job")
        ray.logs.update({f"{handed.id}.{job}": f"{job} says\n" for job in ("job", "chained")})
        ray.dispatch(handed.dispatch.spec, rounds=20)
        assert handed.states() == {"job": "SUCCEEDED", "chained": "SUCCEEDED"}
    for job in ("job", "chained"):
        assert invoke("logs", unique, "--job", job) == f"{job} says\n"
        assert "".join(handed.jobs[job].log()) == f"{job} says\n"


def test_it_is_read_when_the_cluster_has_forgotten_the_job(ray, unique):
    handed = Handed(ray, unique, "job")
    end(handed, "job", log="before\n")
    handed.states()
    ray.logs[f"{handed.id}.job"] = "as the cluster has it\n"
    assert invoke("logs", unique) == "as the cluster has it\n", "the cluster has all of it"
    del ray.rows[f"{handed.id}.job"]
    assert invoke("logs", unique) == "before\n"
    ray.add(f"{handed.id}.job", {"nemo_run_ray": "theirs"}, status="SUCCEEDED")
    assert invoke("logs", unique) == "before\n", "that is another one's"


def test_a_log_that_another_process_has_kept(ray, unique):
    handed = Handed(ray, unique, "job")
    before = handed.jobs["job"]
    end(handed, "job", log="kept\n")
    handed.states()
    del ray.rows[before.id]
    assert "".join(before.log()) == "kept\n"


def test_none_is_kept_when_none_is_wanted(ray, unique):
    handed = Handed(ray, unique, "job", keep_logs_max_bytes=0)
    end(handed, "job")
    assert handed.states() == {"job": "SUCCEEDED"}
    assert log_requests(ray) == 0
    assert kept(handed) == {}


def test_a_longer_log_keeps_its_end(ray, unique):
    handed = Handed(ray, unique, "job", keep_logs_max_bytes=1000)
    lines = [f"line {number}\n" for number in range(1000)]
    end(handed, "job", log="".join(lines))
    handed.states()
    first, *rest = kept(handed)["job.log"].splitlines(keepends=True)
    assert rest == lines[-len(rest) :]
    assert 950 < len("".join(rest)) <= 1000
    missing = len("".join(lines)) - len("".join(rest))
    assert first == (
        f"nemo_run_ray| the first {missing} bytes of this log are not kept: "
        "RayExecutor.keep_logs_max_bytes is 1000\n"
    )


def test_a_log_was_kept_whole_or_from_a_later_line_on(tmp_path):
    kept = Kept(tmp_path, "x")
    assert not kept.is_whole
    kept.keep_log(["a line\n" * 100])
    assert kept.is_whole
    kept.keep_log(["a line\n" * 100], 50)
    assert not kept.is_whole


def test_what_a_user_sees_of_an_end_has_not_our_last_line(unique):
    with fake_ray(now=time.time()) as ray:
        handed = Handed(ray, unique, "job", keep_logs_max_bytes=300)
        nonce = handed.jobs["job"].record.nonces[-1]
        last = EndRecord(0, "NONE", "exit code 0").line(nonce)
        end(handed, "job", log="x\n" * 100 + last)
        handed.states()
    shown = invoke("logs", unique)
    assert shown.startswith("nemo_run_ray| the first ")
    assert shown.endswith("x\nx\n")


@pytest.mark.parametrize(
    "trouble", [Trouble(500, "no such file"), Trouble(), Trouble(200, '{"logs": "half of')]
)
def test_a_log_that_cannot_be_had_now_is_kept_by_a_later_look(ray, unique, trouble):
    handed = Handed(ray, unique, "job")
    end(handed, "job")
    ray.trouble = lambda method, path: trouble if path.endswith("/logs") else None
    assert handed.states() == {"job": "SUCCEEDED"}
    assert kept(handed) == {}
    ray.trouble = lambda method, path: None
    assert handed.states() == {"job": "SUCCEEDED"}
    assert list(kept(handed)) == ["job.log"]


def test_a_log_that_the_cluster_does_not_have_is_given_up(ray, unique):
    handed = Handed(ray, unique, "job")
    end(handed, "job")
    ray.trouble = lambda method, path: Trouble(404, "no") if path.endswith("/logs") else None
    assert handed.states() == {"job": "SUCCEEDED"}
    assert handed.jobs["job"].record.is_log_given_up
    keep_logs._tried.clear()  # as in another process
    before = log_requests(ray)
    assert handed.states() == {"job": "SUCCEEDED"}
    assert log_requests(ray) == before
    assert kept(handed) == {}


def test_a_client_that_waits_stays_until_another_thread_of_it_has_the_log(ray, unique):
    handed = Handed(ray, unique, "job")
    end(handed, "job")
    (job,) = handed.jobs.values()
    is_asked, goes_on = threading.Event(), threading.Event()

    def slow(method: str, path: str) -> None:
        if path.endswith("/logs"):
            is_asked.set()
            goes_on.wait(10)

    ray.trouble = slow
    with keep_logs.waiting(), ThreadPoolExecutor() as pool:
        first = pool.submit(lambda: job.status)
        assert is_asked.wait(10)
        second = pool.submit(lambda: find_job(job.id).status)
        time.sleep(0.2)
        assert not second.done()
        goes_on.set()
        assert second.result(10).state is first.result(10).state is JobState.SUCCEEDED
        assert list(kept(handed)) == ["job.log"]


def test_the_size_that_a_cluster_file_gives_counts(ray, unique, tmp_path):
    file = tmp_path / "small.yaml"
    file.write_text(f"cluster: {{address: '{ray.url}'}}\ndefaults: {{keep_logs_max_bytes: 0}}\n")
    run.run(TRUE, executor=RayExecutor(cluster=str(file)), name=unique, detach=True)
    (job,) = find(unique)
    assert job.record.keep_logs_max_bytes == 0


def test_one_answer_takes_no_longer_than_its_budget(ray, unique, monkeypatch):
    monkeypatch.setattr(keep_logs, "BUDGET_S", 1.2)
    names = [f"job{number}" for number in range(5)]
    handed = Handed(ray, unique, *names)
    end(handed, *names)

    def slow(method: str, path: str) -> None:
        if path.endswith("/logs"):
            time.sleep(0.4)

    ray.trouble = slow
    began = time.monotonic()
    assert set(handed.states().values()) == {"SUCCEEDED"}
    assert time.monotonic() - began < 3
    assert 0 < len(kept(handed)) < 5
    records = [job.record.terminal["state"] for job in handed.jobs.values()]
    assert records == ["SUCCEEDED"] * 5, "the ends are noted at once"
    for _ in range(4):
        handed.states()
    assert len(kept(handed)) == 5, "the next looks keep the others"


def test_who_waits_has_the_time_for_a_log_that_a_look_gave_up(ray, unique, monkeypatch):
    monkeypatch.setattr(keep_logs, "BUDGET_S", 0.2)
    handed = Handed(ray, unique, "job")
    end(handed, "job")
    ray.trouble = lambda method, path: time.sleep(0.5) if path.endswith("/logs") else None
    handed.states()
    (job,) = handed.jobs.values()
    assert (kept(handed), job.record.is_log_given_up) == ({}, True)
    keep_logs._tried.clear()  # as in another process
    job.wait(timeout_s=10)
    assert list(kept(handed)) == ["job.log"]


def test_a_client_that_looks_after_its_jobs_waits(tmp_path, eventually):
    tending = Tending(tmp_path)
    tending.start()
    eventually(lambda: keep_logs._waiting == 1)
    tending.stop()
    tending.join()
    assert keep_logs._waiting == 0


def test_a_cluster_that_does_not_answer_is_asked_for_one_log_of_an_answer(ray, unique, monkeypatch):
    names = [f"job{number}" for number in range(5)]
    handed = Handed(ray, unique, *names)
    end(handed, *names)
    monkeypatch.setattr(keep_logs, "BUDGET_S", 0)
    handed.states()
    monkeypatch.setattr(keep_logs, "BUDGET_S", 4.0)
    handed.ray.trouble = lambda method, path: Trouble() if path.endswith("/logs") else None
    tried: list[str] = []

    def refuse(_: object, submission_id: str, *__: object) -> None:
        tried.append(submission_id)
        raise Unanswered(f"{handed.ray.url} cannot be reached")

    snapshot = Snapshot()
    monkeypatch.setattr("nemo_run_ray.dashboard.jobs.LogStream.whole", refuse)
    for job in handed.jobs.values():
        job.status_in(snapshot)
    assert len(tried) == 1


def test_a_folder_that_takes_nothing_is_left_alone(ray, unique, monkeypatch):
    handed = Handed(ray, unique, "job")
    end(handed, "job")
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert handed.states() == {"job": "SUCCEEDED"}
    assert kept(handed) == {}
    assert log_requests(ray) == 0


def test_a_group_keeps_what_its_largest_role_asks_for():
    def merged(*sizes: int | None) -> int | None:
        roles = [RayExecutor(role=f"r{n}", keep_logs_max_bytes=s) for n, s in enumerate(sizes)]
        return RayExecutor.merge(roles, len(roles)).keep_logs_max_bytes

    assert [merged(0, 5, 3), merged(0, None), merged(0, 0)] == [5, None, 0]


# ---------------------------------------------------------------------- the file


@given(
    st.lists(st.text(st.sampled_from("ab\né漢"), max_size=30), max_size=20),
    st.integers(1, 100),
)
def test_the_kept_bytes_are_the_last_ones(tmp_path_factory, texts, most):
    folder = tmp_path_factory.mktemp("kept")
    one = Kept(folder, "job")
    one.keep_log(texts, most)
    whole, found = "".join(texts), "".join(one.log())
    if len(whole.encode()) <= most:
        assert found == whole
        return
    first, _, rest = found.partition("\n")
    assert whole.endswith(rest)
    assert len(rest.encode()) <= most
    assert f"the first {len(whole.encode()) - len(rest.encode())} bytes of" in first
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


def test_a_long_log_needs_little_memory(tmp_path):
    piece = "x" * 63 + "\n"
    tracemalloc.start()
    Kept(tmp_path, "job").keep_log((piece * 1024 for _ in range(640)), 8 * 1024**2)  # of 40 MiB
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * 1024**2
    assert (tmp_path / "ray_logs" / "job.log").stat().st_size < 8 * 1024**2 + 200


def test_half_a_log_is_not_kept(tmp_path):
    def breaks():
        yield "a"
        raise OSError("broke off")

    with pytest.raises(OSError, match="broke off"):
        Kept(tmp_path, "job").keep_log(breaks(), 100)
    assert list((tmp_path / "ray_logs").iterdir()) == []


def test_a_reader_whose_cluster_dies_gets_the_rest_that_it_left(ray, unique):
    (job,) = Handed(ray, unique, "job").jobs.values()

    def dies():
        yield "one\ntw"
        job.kept.keep_log(["one\n", "two\nthr", "ee\n"])
        raise JobError("There is no log any more.")

    found = []
    with pytest.raises(JobError, match="No more of its log is left"):
        found.extend(job._begun_or_kept(dies))
    assert "".join(found) == "one\ntwo\nthree\n"


def test_of_a_log_whose_end_alone_is_kept_nothing_is_told_twice(ray, unique):
    (job,) = Handed(ray, unique, "job").jobs.values()

    def dies():
        yield "one\n"
        job.kept.keep_log([f"line {number}\n" for number in range(20)], 20)
        raise JobError("There is no log any more.")

    found = []
    with pytest.raises(JobError, match="no log any more"):
        found.extend(job._begun_or_kept(dies))
    assert found == ["one\n"]


def test_a_reader_of_several_attempts_gets_the_rest_of_the_last_one(ray, unique, tmp_path):
    """What its cluster left has the same text, with the same lines between the attempts."""
    (job,) = Handed(ray, unique, "job", retries=1).jobs.values()
    for number, text in enumerate(["first\n", "second\nhal"], start=1):
        (tmp_path / attempt_id(job.id, number)).write_text(text)

    def log_of(name: str) -> Path | None:
        return tmp_path / name if (tmp_path / name).exists() else None

    job.cluster.archive = lambda session: ClusterArchive(log=log_of)
    whole = "".join(job.left_text())
    assert whole.startswith("first\n")
    assert whole.count("nemo_run_ray| attempt ") == 1
    for passed in range(1, len(whole), 7):

        def dies(passed=passed):
            yield whole[:passed]
            raise JobError("There is no log any more.")

        found = []
        with pytest.raises(JobError, match="No more of its log is left"):
            found.extend(job._begun_or_kept(dies))
        assert "".join(found) == whole


def test_who_has_read_all_of_a_job_that_has_ended_is_told_nothing(ray, unique):
    handed = Handed(ray, unique, "job")
    end(handed, "job")
    (job,) = handed.jobs.values()
    assert job.status.state is JobState.SUCCEEDED

    def dies():
        yield "words of the task\n"
        raise JobError("its node is gone")

    assert list(job._begun_or_kept(dies)) == ["words of the task\n"]
