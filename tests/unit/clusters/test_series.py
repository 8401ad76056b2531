"""What a client sees of a chain that goes on in the next allocation, on real folders."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import nemo_run as run
import pytest

from nemo_run_ray import SlurmCluster
from nemo_run_ray.clusters import from_record
from nemo_run_ray.clusters.slurm import allocations
from nemo_run_ray.errors import Unanswered
from tests.unit.clusters.test_bring_up import World, world

__all__ = ["world"]

_FIRST = [
    {"submission_id": "a", "status": "SUCCEEDED"},
    {"submission_id": "b", "status": "RUNNING"},
    {"submission_id": "d", "status": "RUNNING"},
    {"submission_id": "other", "status": "RUNNING"},
]


def cluster(world: World, **fields) -> SlurmCluster:
    executor = run.SlurmExecutor(account="a", tunnel=run.LocalTunnel(job_dir=str(world.jobs)))
    return SlurmCluster(executor=executor, **{"renew": True, **fields})


def end(world: World, number: int, why: str, renews: bool, rows: list, code: int = 0) -> Path:
    """The only run of a life is over."""
    (folder,) = (world.life(number) / "run").iterdir()
    row = {"code": code, "why": why, "renews": renews}
    (folder / "end.json").write_text(json.dumps(row))
    (folder / "session").write_text(f"session_{number}")
    (folder / "jobs.json").write_text(json.dumps(rows))
    (folder / "job_logs").mkdir()
    (folder / "job_logs" / "job-driver-b.log").write_text("from the first one\n")
    (folder / "token").unlink()
    return folder


def start(world: World, number: int) -> None:
    found = cluster(world)._own_allocations
    assert found.ask("claim", number=number, user="me")
    found.ask("submit", number=number, script="#!/bin/sh\n")


def look_anew(monkeypatch) -> None:
    monkeypatch.setattr(allocations, "_TRUST_S", 0.0)


def away(found, session: str) -> str:
    """Why an allocation is over whose dispatches continue in the next one."""
    assert found.find() is None
    archive = found.archive(session)
    return archive.reason if archive and archive.continues else ""


def gone(found, session: str) -> str:
    """Why an allocation is over for good."""
    assert found.find() is None
    archive = found.archive(session)
    return "" if archive is None or archive.continues else archive.reason


@pytest.fixture
def renewed(world, monkeypatch) -> World:
    """A cluster whose first allocation is over, with a chain that goes on."""
    look_anew(monkeypatch)
    start(world, 1)
    world.ready(1)
    cluster(world).keep_dispatch("d", ["a", "b", "c"], {"submission_id": "d"}, lambda: {"x": b"y"})
    end(world, 1, "its walltime is over", True, _FIRST)
    return world


def next_one(world: World) -> None:
    """What the script of an allocation does at its end."""
    start(world, 2)
    (world.life(2) / "claimed").unlink()
    (world.life(2) / "renewed").touch()


def test_between_two_allocations_jobs_are_away_and_not_lost(renewed):
    found = from_record(cluster(renewed).record())
    assert "the next one, which is being asked for" in away(found, "session_1")
    next_one(renewed)
    assert "chains continue in Slurm job 102, when Ray is up in it" in away(found, "session_1")
    assert found.find() is None
    renewed.state("102", "RUNNING")
    (renewed.life(2) / "run" / "102.0").mkdir(parents=True)
    assert "when Ray is up in it" in away(found, "session_1"), "Ray starts in it"
    assert found.archive("session_1").rows["a"]["status"] == "SUCCEEDED"
    assert away(found, "another") == ""


def test_a_renewal_that_goes_on_between_two_looks_is_no_loss(renewed, monkeypatch):
    found = cluster(renewed)._own_allocations
    history = found._history("session_1", session="session_1")
    next_one(renewed)
    history = replace(history, newest=found.look())
    assert allocations._reason(history)[1], "the next one came after the runs were read"
    renewed.ready(2)
    assert found.archive("session_1").continues, "a client has not seen yet that Ray is up"
    monkeypatch.setattr(allocations, "_TRUST_S", 60.0)
    assert found.look().head
    end(renewed, 2, "its walltime is over", True, _FIRST)
    assert found.archive("session_2").continues, "nor that it has ended"


def test_an_archive_that_was_read_before_the_end_is_read_again(world):
    start(world, 1)
    world.ready(1)
    (world.life() / "run" / "101.0" / "session").write_text("session_1")
    found = cluster(world)._own_allocations
    assert found.look().head
    assert not found.archive("session_1").continues
    end(world, 1, "its walltime is over", True, _FIRST)
    assert found.look().end
    assert found.archive("session_1").continues


def test_a_host_that_cannot_be_asked_raises(renewed, monkeypatch):
    monkeypatch.setattr(allocations.Allocations, "ask", Mock(side_effect=Unanswered("It is away.")))
    with pytest.raises(Unanswered):
        cluster(renewed).archive("session_1")


def test_a_next_one_that_never_comes_is_a_loss(renewed, monkeypatch):
    found = cluster(renewed)
    assert away(found, "session_1")
    monkeypatch.setattr(allocations, "_ASKING_S", 0.0)
    assert away(found, "session_1") == ""
    assert "its walltime is over, and the next one did not come" in gone(found, "session_1")


@pytest.mark.parametrize("when", ["before", "after", "refused"])
def test_a_next_one_that_does_not_come_is_a_loss_with_its_reason(renewed, when):
    """By `down`, also when the script asks for the next one at that moment, or by Slurm."""
    found, why = cluster(renewed), "it was ended by `nemo-run-ray down`"
    if when == "refused":
        why = "sbatch: error: Batch job submission failed"
        (renewed.slurm / "refuse").write_text(why)
    if when != "before":
        next_one(renewed)
    if when != "refused":
        assert found.stop()
        assert renewed.cancelled() == (["101"] if when == "before" else ["102"])
    assert away(found, "session_1") == ""
    assert f"and the next one did not come: {why}" in gone(found, "session_1")
    assert not found.stop()


def test_the_next_one_has_the_jobs_of_the_chain_and_keeps_them(renewed, monkeypatch):
    monkeypatch.setattr(allocations, "PAUSE_S", 30.0)
    next_one(renewed)
    renewed.ready(2)
    found = cluster(renewed)
    earlier = found.find().earlier
    chain = {"a": "SUCCEEDED", "b": "FAILED", "d": "FAILED"}
    assert {name: row["status"] for name, row in earlier.rows.items()} == chain
    assert "its walltime is over" in str(earlier.rows["b"]["message"])
    assert earlier.log("b").read_text() == "from the first one\n"
    assert earlier.log("a") is None

    later = {"b@2": "SUCCEEDED", "c": "SUCCEEDED", "d@2": "SUCCEEDED"}
    rows = [{"submission_id": name, "status": status} for name, status in later.items()]
    end(renewed, 2, "its last user has left", False, [*earlier.rows.values(), *rows])
    kept = found.archive("session_1").rows
    assert {name: row["status"] for name, row in kept.items() if name != "other"} == chain | later
    assert "its last user has left" in gone(found, "session_1")


def test_a_start_that_follows_another_has_its_jobs(renewed):
    next_one(renewed)
    renewed.ready(2)
    found, rows = cluster(renewed), [{"submission_id": "b@2", "status": "SUCCEEDED"}]
    assert "b@2" not in found.find().earlier.rows
    end(renewed, 2, "the job was cancelled", False, rows, code=143)
    renewed.ready(2, restart=1)
    assert "b@2" in found.find().earlier.rows


def test_a_new_client_waits_for_the_next_one(renewed):
    client = renewed.client("late")
    renewed.events = [lambda: next_one(renewed), lambda: None, lambda: renewed.ready(2)]
    assert client.run().number == 2
    assert (renewed.slurm / "last").read_text() == "102\n"
    assert any("is being renewed" in one for one in renewed.said)


@pytest.mark.parametrize("renew", [True, False])
def test_a_job_that_slurm_is_to_start_again_is_no_loss(world, monkeypatch, renew):
    """Its chains continue in it, although the start that had them has told its end."""
    look_anew(monkeypatch)
    start(world, 1)
    world.ready(1)
    found = cluster(world, renew=renew)
    found.keep_dispatch("d", ["a", "b", "c"], {"submission_id": "d"}, lambda: {"x": b"y"})
    if renew:
        monkeypatch.setattr(allocations, "PAUSE_S", 30.0)
        assert found._own_allocations.look().queued
    end(world, 1, "the job was cancelled", False, _FIRST, code=143)
    told = "in Slurm job 101, when Ray is up in it"
    assert (told in away(found, "session_1")) is renew, "Slurm has said nothing since"
    monkeypatch.setattr(allocations, "PAUSE_S", 0.0)
    for state in ("COMPLETING", "PENDING"):
        world.state("101", state)
        assert (told in away(found, "session_1")) is renew
    (world.life() / "stop").write_text("it was ended\n")
    assert away(found, "session_1") == ""
    (world.life() / "stop").unlink()
    world.forget()
    assert away(found, "session_1") == ""
    assert "the job was cancelled" in gone(found, "session_1")
