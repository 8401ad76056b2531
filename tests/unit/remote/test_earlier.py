"""What job tables of earlier allocations say, on real folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_run_ray.remote.attempts import attempt_of_row
from nemo_run_ray.remote.dispatch.retries import is_settled
from nemo_run_ray.remote.earlier import (
    DISPATCHES,
    EarlierRun,
    goes_on,
    kept_dispatches,
    rows_before,
    rows_of,
)
from nemo_run_ray.remote.states import JobState, Reason


def row(name: str, status: str, **fields: object) -> dict:
    return {"submission_id": name, "status": status, "start_time": 1000, **fields}


@pytest.fixture
def cluster(tmp_path) -> Path:
    """Two allocations, the second one a renewal; and one before that has nothing to do with it."""
    dispatch = tmp_path / DISPATCHES / "d"
    dispatch.mkdir(parents=True)
    (dispatch / "ids").write_text("d\na\nb\n")
    tables = {
        "1/run/7.0": [row("a", "SUCCEEDED"), row("d", "SUCCEEDED")],
        "2/run/8.0": [row("a", "FAILED"), row("other", "RUNNING"), row("d", "RUNNING")],
        "2/run/8.1": [row("a@2", "RUNNING"), row("b", "PENDING"), row("d@2", "RUNNING")],
        "3/run/9.0": [row("a@3", "RUNNING"), row("d@3", "RUNNING")],
        "3/run/10.0": [],
    }
    for run, rows in tables.items():
        folder = tmp_path / "lives" / run
        folder.mkdir(parents=True)
        (folder / "jobs.json").write_text(json.dumps(rows))
    (tmp_path / "lives/2/run/8.1/end.json").write_text('{"code": 0, "why": "its walltime"}')
    (tmp_path / "lives/3/renewed").touch()
    return tmp_path


def test_the_runs_before_are_one_table(cluster):
    found = rows_before(str(cluster / "lives/3"), str(cluster / "lives/3/run/10.0"))
    assert list(found) == ["a", "d", "a@2", "b", "d@2", "a@3", "d@3"]
    assert found["a"]["status"] == "FAILED", "not that of an allocation that was not renewed"


def test_what_went_on_has_ended_with_its_allocation(cluster):
    found = rows_before(str(cluster / "lives/3"), str(cluster / "lives/3/run/9.0"))
    attempt = attempt_of_row(found["a@2"])
    assert attempt.status.state is JobState.FAILED
    assert attempt.status.reason is Reason.ALLOCATION
    assert "its allocation of Slurm has ended: its walltime" in attempt.status.detail
    assert is_settled(attempt, attempt.ended_at + 1, 75), "Slurm has ended all its processes"
    waiting = attempt_of_row(found["b"])
    assert waiting.status.reason is Reason.START_TIMEOUT, "which counts as no attempt"


def test_who_goes_on(cluster):
    assert goes_on(str(cluster / "lives/3"), str(cluster / "lives/3/run/9.0"))
    first = cluster / "lives/1"
    assert not goes_on(str(first), str(first / "run/7.0"))
    assert goes_on(str(cluster / "lives/2"), str(cluster / "lives/2/run/8.1")), "after a requeue"


def test_a_chain_that_is_not_whole_is_none(cluster):
    (cluster / DISPATCHES / "half").mkdir()
    assert kept_dispatches(str(cluster / "lives/3")) == [str(cluster / DISPATCHES / "d")]


def test_files_of_other_programs_are_in_nobodys_way(cluster):
    before = rows_before(str(cluster / "lives/2"), str(cluster / "lives/2/run/8.0"))
    for folder in (DISPATCHES, "lives/2/run", "lives/1/run"):
        (cluster / folder / ".DS_Store").write_bytes(b"\xff")
    assert rows_before(str(cluster / "lives/2"), str(cluster / "lives/2/run/8.0")) == before


@pytest.mark.parametrize("name", ["lives/2/run/8.0/jobs.json", "dispatches/d/ids", "lives/2/run"])
def test_what_is_there_and_cannot_be_read_now_is_not_taken_for_nothing(cluster, name):
    """Else jobs that have succeeded would run again."""
    path = cluster / name
    if path.is_dir():
        path.rename(path.with_name("before"))
        path.touch()
    else:
        path.unlink()
        path.mkdir()
    with pytest.raises(OSError, match=path.name):
        rows_before(str(cluster / "lives/3"), str(cluster / "lives/3/run/10.0"))


def test_a_run_is_known_by_its_name(cluster):
    """A node may see the folder by another path than the one that it was given."""
    found = rows_before(str(cluster / "lives/3"), "/elsewhere/lives/3/run/9.0/")
    assert "a@3" not in found


def test_a_table_that_is_no_table_says_nothing():
    runs = [EarlierRun("", 0.0), EarlierRun("{half", 0.0), EarlierRun('[{"x": 1}]', 0.0)]
    assert rows_of(runs, {"a"}) == {}
