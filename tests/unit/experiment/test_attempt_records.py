"""What is kept of attempts, and what is known when the cluster tells nothing."""

import dataclasses
import errno
import time
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from nemo_run_ray.dashboard import jobs as dashboard_jobs
from nemo_run_ray.experiment import notes
from nemo_run_ray.experiment.store import (
    INTENT,
    SUBMITTED,
    TERMINAL,
    AttemptRecord,
    Ledger,
    has_news,
    known,
    merged,
    of_rows,
)
from nemo_run_ray.remote.attempts import CLAIM_KEY
from nemo_run_ray.remote.rows import NONCE_KEY
from nemo_run_ray.remote.states import JobState, JobStatus, Reason
from tests.unit.experiment.conftest import Handed

_MOMENTS = st.none() | st.floats(0, 2e9)


def _row(status: str, nonce: str = "n", posted: int = 1000, ended: int = 0, **metadata) -> dict:
    row = {"status": status, "metadata": {NONCE_KEY: nonce, **metadata}, "start_time": posted}
    return {**row, "end_time": ended or None, "driver_node_id": "node"}


def test_the_attempts_of_a_job_in_the_table():
    rows = {
        "e.a": {**_row("FAILED", ended=5000), "driver_exit_code": 3},
        "e.a@2": _row("RUNNING", posted=7000),
        "e.a@3": _row("SUCCEEDED", **{CLAIM_KEY: "cancelled"}),
        "e.a@4": _row("RUNNING", nonce="a stranger's"),
        "e.b": _row("RUNNING"),
    }
    found = of_rows(rows, "e.a", ["n"], now=9.0)
    assert list(found) == ["e.a", "e.a@2"]
    assert (found["e.a"].posted_at, found["e.a"].ended_at) == (1.0, 5.0)
    assert (found["e.a"].state, found["e.a"].exit_code) == ("FAILED", 3)
    assert (found["e.a@2"].running_at, found["e.a@2"].ended_at) == (9.0, None)


def test_what_was_posted_long_ago_may_have_begun_at_any_moment():
    (found,) = of_rows({"e.a": _row("RUNNING")}, "e.a", ["n"], now=60.0).values()
    assert (found.state, found.running_at) == ("RUNNING", None)


def test_no_attempt_goes_on_of_a_job_that_is_over():
    """Ray has the row of one that was given up as pending, until it would start it."""
    given_up = JobStatus(JobState.FAILED, Reason.NOT_PLACED, "not placed in time")
    record = SimpleNamespace(attempts={}, terminal=given_up.to_json())
    pending = of_rows({"e.a": _row("PENDING")}, "e.a", ["n"], now=20.0)
    (seen,) = known(record, pending, 20.0).values()
    assert (seen.state, seen.detail) == ("FAILED", "not placed in time")
    assert seen.ended_at == 20.0
    record.attempts = {"e.a": seen}
    (later,) = known(record, pending, 99.0).values()
    assert later.ended_at == 20.0
    record.terminal = None
    assert known(record, pending, 99.0)["e.a"].state == "PENDING"


def test_how_long_it_was_seen_running_is_written_down_as_it_grows():
    """A look each second for three days writes some dozens of times, and not 260,000."""
    kept, written = {}, 0
    for second in range(3 * 86_400):
        found = {"e.a": AttemptRecord("e.a", "RUNNING", posted_at=0.0, seen_at=float(second))}
        if has_news(kept, found):
            kept, written = found, written + 1
    assert 20 < written < 60
    assert kept["e.a"].seen_at > 3 * 86_400 * 0.75
    ended = {"e.a": dataclasses.replace(kept["e.a"], state="SUCCEEDED", seen_at=None)}
    assert has_news(kept, ended)
    assert not has_news(ended, ended)


def test_who_has_just_seen_it_wait_sees_when_it_begins(ray, unique, monkeypatch):
    monkeypatch.setattr(dashboard_jobs, "TABLE_AGE_S", 0)
    handed = Handed(ray, unique, "watched", "late", "slow")
    for name, row in ray.rows.items():
        row.update(status="PENDING" if "late" not in name else "RUNNING", start_time=1000)
    jobs = handed.jobs
    assert [jobs[name].attempts[0].running_at for name in jobs] == [None] * 3
    for row in ray.rows.values():
        row["status"] = "RUNNING"
    monkeypatch.setattr(notes, "_MOMENT_S", 10.0)
    before = time.time()
    assert before <= jobs["watched"].attempts[0].running_at <= time.time()
    assert jobs["late"].attempts[0].running_at is None, "it ran when it was first seen"
    monkeypatch.setattr(notes, "_MOMENT_S", 0.0)
    assert jobs["slow"].attempts[0].running_at is None, "the last look was too long ago"


def _attempt(state: str = "RUNNING", running_at: float | None = None) -> AttemptRecord:
    return AttemptRecord("e.a", state, posted_at=1.0, running_at=running_at)


def test_what_was_seen_stays_when_the_cluster_tells_nothing():
    kept = {"e.a": _attempt(running_at=2.0)}
    assert merged(kept, {}) == kept
    ended = dataclasses.replace(_attempt("SUCCEEDED"), ended_at=9.0)
    (found,) = merged(kept, {"e.a": ended}).values()
    assert (found.state, found.running_at, found.ended_at) == ("SUCCEEDED", 2.0, 9.0)


@given(_MOMENTS, _MOMENTS, _MOMENTS)
def test_the_first_moment_at_which_it_was_seen_running_counts(kept, now, told):
    others = {"e.a": told} if told is not None else {}
    before, after = {"e.a": _attempt("PENDING", kept)}, {"e.a": _attempt("RUNNING", now)}
    (found,) = merged(before, after, others).values()
    known = [one for one in (kept, now, told) if one is not None]
    assert found.running_at == (min(known) if known else None)


def test_the_ledger_keeps_them(tmp_path):
    book = Ledger(tmp_path)
    given = {"job": "a", "role": "a", "cluster": {}, "session": "s"}
    book.write(INTENT, "e.a", **given, nonce="n")
    attempt = dataclasses.replace(_attempt("FAILED", 2.0), ended_at=3.0, exit_code=1, node="x")
    book.keep_attempts({"e.a": {"e.a": attempt}})
    book.write(SUBMITTED, "e.a")
    book.write(INTENT, "e.a", **given, nonce="m")
    (record,) = book.jobs().values()
    assert record.attempts == {"e.a": attempt}
    assert record.terminal == {}
    later = {**attempt.to_json(), "later": 1}
    status = JobStatus(JobState.FAILED).to_json()
    book.write(TERMINAL, "e.a", status=status, attempts=[later])
    (record,) = book.jobs().values()
    assert record.attempts == {"e.a": attempt}
    assert record.terminal == status


def test_nothing_is_written_for_nothing(tmp_path):
    Ledger(tmp_path).keep_attempts({})
    assert list(tmp_path.iterdir()) == []


def test_who_knows_less_takes_nothing_away(tmp_path):
    """Several processes look; one that came late has not seen when it began to run."""
    book = Ledger(tmp_path)
    book.write(INTENT, "e.a", job="a", role="a", cluster={}, session="s", nonce="n")
    book.keep_attempts({"e.a": {"e.a": _attempt("RUNNING", 2.0)}})
    late = dataclasses.replace(_attempt("SUCCEEDED"), ended_at=9.0)
    status = JobStatus(JobState.SUCCEEDED).to_json()
    book.write(TERMINAL, "e.a", status=status, attempts=[late.to_json()])
    (record,) = book.jobs().values()
    assert record.attempts["e.a"].running_at == 2.0
    assert record.attempts["e.a"].ended_at == 9.0


def test_a_full_disk_does_not_end_a_look(tmp_path, monkeypatch, caplog):
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    Ledger(tmp_path).keep_attempts({"e.a": {"e.a": _attempt()}})
    assert "No space left on device" in caplog.text
