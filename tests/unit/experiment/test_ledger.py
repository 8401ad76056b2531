import errno
import itertools
import json
import math
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import nemo_run.config
import pytest

from nemo_run_ray.errors import JobError, SubmissionError
from nemo_run_ray.experiment import store
from nemo_run_ray.experiment.store import (
    INTENT,
    SUBMITTED,
    TERMINAL,
    UNSETTLED,
    Ledger,
    experiments,
    find_experiment,
    find_record,
    remember,
)
from nemo_run_ray.ids import LEDGER, job_id
from nemo_run_ray.remote.spec import read
from nemo_run_ray.remote.status import JobState, JobStatus
from tests.unit.experiment.conftest import Submitted

_INTENT = {"job": "j", "cluster": {"kind": "local"}, "session": "s", "nonce": "n"}
_STATUS = {
    "state": "FAILED",
    "reason": "exit code",
    "detail": "é\n'",
    "node": "",
    "attempt": 1,
    "tail": "",
}


@pytest.fixture
def home(tmp_path):
    before = nemo_run.config.get_nemorun_home()
    nemo_run.config.set_nemorun_home(str(tmp_path / "home é"))
    yield tmp_path / "home é"
    nemo_run.config.set_nemorun_home(before)


@pytest.fixture
def book(tmp_path):
    return Ledger(tmp_path)


def test_events_become_records(book, tmp_path):
    book.note(INTENT, "exp.a", **_INTENT)
    book.note(INTENT, "exp.b", **{**_INTENT, "job": "two\nlines é"})
    book.note(SUBMITTED, "exp.a")
    book.note(TERMINAL, "exp.a", status=_STATUS)
    book.note(UNSETTLED, "exp.b", why="no")
    one, two = Ledger(tmp_path).jobs().values()
    assert (one.submission_id, one.last, one.terminal) == (
        "exp.a",
        SUBMITTED,
        read(JobStatus, _STATUS),
    )
    assert (two.submission_id, two.last, two.terminal) == ("exp.b", UNSETTLED, None)
    assert (two.job, two.cluster, two.nonces) == ("two\nlines é", {"kind": "local"}, ["n"])
    assert one.exp_dir == tmp_path


def test_a_second_intent_starts_the_record_anew(book):
    book.note(INTENT, "exp.a", **_INTENT)
    book.note(UNSETTLED, "exp.a", why="no")
    book.note(INTENT, "exp.a", **{**_INTENT, "nonce": "n2"})
    assert (book.jobs()["exp.a"].last, book.jobs()["exp.a"].nonces) == (INTENT, ["n", "n2"])


def test_an_experiment_whose_folder_was_deleted_begins_anew(book):
    book.note(INTENT, "exp.a", **_INTENT)
    book.note(SUBMITTED, "exp.a")
    assert book.jobs()
    book.path.unlink()
    assert book.jobs() == {}
    book.note(INTENT, "exp.a", **{**_INTENT, "nonce": "n2"})
    assert (book.jobs()["exp.a"].last, book.jobs()["exp.a"].nonces) == (INTENT, ["n2"])


def test_a_torn_line_is_ignored_and_takes_no_other_with_it(book):
    book.note(INTENT, "exp.a", **_INTENT)
    book.note(INTENT, "exp.b", **_INTENT)
    whole = book.path.read_bytes()
    for cut in range(whole.index(b"\n") + 2, len(whole) - 1):
        book.path.write_bytes(whole[:cut])
        assert list(book.jobs()) == ["exp.a"]
    book.note(INTENT, "exp.c", **_INTENT)
    assert list(book.jobs()) == ["exp.a", "exp.c"]


def _seen(**fields: object) -> bytes:
    attempt = {"submission_id": "exp.a", "state": "FAILED", **fields}
    return json.dumps({"id": "exp.a", "event": "seen", "attempts": [attempt]}).encode()


_NO_RECORDS = (
    b"\0\0\xff\xfe",
    b"[1]",
    b"null",
    b"{}",
    b'{"id": "exp.c", "event": "intent"}',
    b'{"id": ["exp.a"], "event": "submitted"}',
    b'{"id": "exp.a", "event": "terminal"}',
    b'{"id": "exp.a", "event": "terminal", "status": {"state": "ODD"}}',
    b'{"id": "exp.a", "event": "seen", "attempts": [1]}',
    b'{"id": "exp.a", "event": "seen", "attempts": [{"submission_id": "exp.a", "state": "ODD"}]}',
    json.dumps({"id": "exp.c", "event": INTENT, **_INTENT, "cluster": "local"}).encode(),
    json.dumps({"id": "exp.c", "event": INTENT, **_INTENT, "at": "noon"}).encode(),
    b"[" * 100_000,
    _seen(ended_at=math.nan),
    _seen(detail=[1]),
)


@pytest.mark.parametrize("line", _NO_RECORDS)
def test_a_line_that_is_no_record_is_ignored_and_named(book, line, caplog):
    book.note(INTENT, "exp.a", **_INTENT)
    with open(book.path, "ab") as file:
        file.write(line + b"\n")
    book.note(INTENT, "exp.b", **_INTENT)
    first, second = book.jobs().values()
    assert (first.submission_id, second.submission_id) == ("exp.a", "exp.b")
    assert (first.terminal, first.attempts, first.last) == (None, {}, INTENT)
    assert f"A line of {book.path} is no record" in caplog.text


_WRITER = """
import sys
from pathlib import Path
from nemo_run_ray.experiment.store import Ledger
book = Ledger(Path(sys.argv[1]))
for number in range(10):
    book.note("note", f"{sys.argv[2]}.{number}", text="x" * 5000)
"""


def test_writers_do_not_mix_their_lines(tmp_path):
    words = [sys.executable, "-c", _WRITER, str(tmp_path)]
    processes = [subprocess.Popen([*words, f"p{number}"]) for number in range(2)]

    def write(name: str) -> None:
        for number in range(10):
            Ledger(tmp_path).note("note", f"{name}.{number}", text="y" * 5000)

    threads = [threading.Thread(target=write, args=(f"t{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [process.wait(300) for process in processes] == [0, 0]
    events = [json.loads(line) for line in Ledger(tmp_path).path.read_bytes().splitlines()]
    names = [f"{kind}{one}" for kind, count in (("p", 2), ("t", 4)) for one in range(count)]
    written = [event["id"] for event in events]
    assert sorted(written) == sorted(f"{name}.{number}" for name in names for number in range(10))
    for name in names:
        assert [one for one in written if one.startswith(f"{name}.")] == [
            f"{name}.{number}" for number in range(10)
        ]


def _submit(exp_dir: Path, job: str = "job") -> str:
    submission_id = job_id(exp_dir.name, job)
    exp_dir.mkdir(parents=True, exist_ok=True)
    Ledger(exp_dir).note(INTENT, submission_id, **{**_INTENT, "job": job})
    return submission_id


@pytest.mark.parametrize(
    "title", ["plain", "a.b", "a b", "é'\"", "a\nb", ".hidden", "[x]*", "x" * 200]
)
def test_a_job_is_found_by_its_id(home, title):
    exp_dir = home / "experiments" / title / f"{title}_1700000000"
    submission_id = _submit(exp_dir, f"{title}.job é")
    found = find_record(submission_id)
    assert (found.submission_id, found.exp_dir) == (submission_id, exp_dir)


@pytest.mark.parametrize("name", ["exp_1", "exp é_1", "a.b_1", "x" * 200])
def test_an_experiment_outside_of_the_home_is_found(home, tmp_path, monkeypatch, name):
    exp_dir = tmp_path / "else where\n" / "title" / name
    submission_id = _submit(exp_dir)
    with pytest.raises(JobError, match="No experiment"):
        find_record(submission_id)
    remember(exp_dir)
    monkeypatch.chdir("/")
    assert find_record(submission_id).exp_dir == exp_dir
    assert find_experiment(name) == find_experiment("title") == exp_dir
    assert experiments() == [exp_dir]


@pytest.fixture
def full_after(monkeypatch):
    """Let the disk be full after so many writes of a ledger, and keep what is warned of."""
    warnings: list[str] = []

    def fill(writes: int) -> list[str]:
        written = itertools.count()

        def fsync(number: int) -> None:
            if next(written) >= writes:
                raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(store, "os", SimpleNamespace(**{**vars(os), "fsync": fsync}))
        return warnings

    monkeypatch.setattr(store.log, "warning", lambda text, *words: warnings.append(text % words))
    return fill


def test_a_disk_that_is_full_before_the_request_leaves_nothing_submitted(ray, unique, full_after):
    full_after(0)
    words = rf"/{LEDGER} cannot be written: No space left on device. Nothing was submitted."
    with pytest.raises(SubmissionError, match=words):
        Submitted(ray, unique, "job")
    assert ray.started == []


def test_a_disk_that_is_full_after_the_request_leaves_the_job_alone(ray, unique, full_after):
    warnings = full_after(1)
    submitted = Submitted(ray, unique, "job")
    assert ray.started == [f"{submitted.id}.job"]
    assert submitted.states() == {"job": "PENDING"}
    (warning,) = warnings
    assert f"{LEDGER} cannot be written: [Errno 28] No space left on device. The job" in warning
    assert f"{submitted.id}.job is not affected" in warning


def test_a_begin_that_was_noted_after_the_end_is_none():
    running = store.AttemptRecord("a", JobState.RUNNING, running_at=9.0)
    ended = store.AttemptRecord("a", JobState.SUCCEEDED, ended_at=8.0)
    assert store.merged({"a": running}, {"a": ended})["a"].running_at is None
