"""The way to a cluster on Slurm, with commands of Slurm that a test plays, on real folders."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import nemo_run as run
import pytest

from nemo_run_ray.clusters.slurm import allocations as allocations_module
from nemo_run_ray.clusters.slurm import cluster as cluster_module
from nemo_run_ray.clusters.slurm import on_login
from nemo_run_ray.clusters.slurm.allocations import Allocations, RunEnd, SlurmAllocation
from nemo_run_ray.clusters.slurm.cluster import BringUp
from nemo_run_ray.clusters.slurm.login import Login
from nemo_run_ray.errors import ClusterError, Unanswered
from tests.slurm_commands import put_commands


class World:
    """A Slurm, a folder of a cluster, and a clock that only a wait moves."""

    def __init__(self, folder: Path) -> None:
        self.slurm, self.jobs = folder / "slurm", folder / "jobs"
        self.jobs.mkdir()
        self.now = 1000.0
        self.said: list[str] = []
        #: What happens at the waits, one after another; more waits than these are a failure.
        self.events: list[Callable[[], object]] = []

    def client(self, user: str = "me", folder: Path | None = None, **fields) -> BringUp:
        login = Login(run.LocalTunnel(job_dir=str(folder or self.jobs)))
        given = {"keep": False, "queue_timeout_s": None, **fields}
        cluster = SimpleNamespace(
            name="ray", _script=lambda life: f"#!/bin/sh\n# {life}\n", **given
        )
        allocations = Allocations(login, str((folder or self.jobs) / "ray"))
        return BringUp(cluster, allocations, user)

    def submitted(self) -> Allocations:
        """The lives of the cluster, of which the first one's job waits."""
        allocations = self.client().allocations
        assert claim(allocations, 1, "me")
        submit(allocations, 1)
        return allocations

    def pause(self, seconds: float) -> bool:
        self.now += seconds
        assert self.events, self.said
        return bool(self.events.pop(0)())

    def life(self, number: int = 1) -> Path:
        return self.jobs / "ray" / "lives" / str(number)

    def ready(self, number: int = 1, restart: int = 0) -> None:
        """The job of a life runs, and Ray is up in it."""
        job = (self.life(number) / "job").read_text().strip()
        self.state(job, "RUNNING")
        folder = self.life(number) / "run" / f"{job}.{restart}"
        folder.mkdir(parents=True)
        (folder / "token").write_text("secret")
        row = {"address": "10.0.0.1", "port": 6379, "dashboard_port": 8265}
        (folder / "ready.json").write_text(json.dumps(row))

    def end(self, number: int, why: str) -> None:
        (folder,) = (self.life(number) / "run").iterdir()
        (folder / "end.json").write_text(json.dumps({"code": 70, "why": why}))

    def state(self, job: str, state: str) -> None:
        lines = (self.slurm / "queue").read_text().splitlines()
        rows = [line.split("|") for line in lines]
        for row in rows:
            if row[0] == job:
                row[1] = state
        (self.slurm / "queue").write_text("".join("|".join(row) + "\n" for row in rows))

    def forget(self, job: str = "101") -> None:
        """Slurm has no such job any more."""
        subprocess.run(["scancel", job], check=True)

    def cancelled(self) -> list[str]:
        path = self.slurm / "cancelled"
        return path.read_text().split() if path.exists() else []

    def lives(self) -> list[str]:
        return sorted(path.name for path in self.life().parent.iterdir())


@pytest.fixture
def world(tmp_path, monkeypatch) -> World:
    put_commands(tmp_path, monkeypatch)
    found = World(tmp_path)
    monkeypatch.setattr(allocations_module, "PAUSE_S", 0.0)  # every answer is a new one
    monkeypatch.setattr(cluster_module, "CONSOLE", SimpleNamespace(log=found.said.append))
    monkeypatch.setattr(cluster_module, "monotonic", lambda: found.now)
    waits = SimpleNamespace(wait=found.pause, is_set=lambda: False, clear=lambda: None)
    monkeypatch.setattr(cluster_module, "interrupted", waits)
    return found


def claim(allocations: Allocations, number: int, user: str) -> bool:
    return allocations.ask("claim", number=number, user=user)


def submit(allocations: Allocations, number: int) -> None:
    allocations.ask("submit", number=number, script="#!/bin/sh\n")


def impatient(monkeypatch) -> None:
    """Let Slurm have little time for an answer."""
    name = "nemo_run_ray.clusters.slurm.on_login"
    program = allocations_module._MODULES[name].replace("ANSWER_S = 15.0", "ANSWER_S = 0.2")
    monkeypatch.setitem(allocations_module._MODULES, name, program)


def _nothing() -> None:
    return None


@pytest.mark.parametrize(
    ("request_", "is_done", "looks"),
    [("claim", True, 1), ("submit", True, 0), ("submit", False, 1)],
)
def test_a_request_whose_answer_was_lost_is_found_or_made_again(
    world, monkeypatch, request_, is_done, looks
):
    ask = Allocations.ask

    def lose(self: Allocations, do: str, **arguments: object) -> object:
        if do != request_:
            return ask(self, do, **arguments)
        monkeypatch.setattr(Allocations, "ask", ask)
        if is_done:
            ask(self, do, **arguments)
        raise Unanswered("The connection broke off.")

    monkeypatch.setattr(Allocations, "ask", lose)
    world.events = [*[_nothing] * looks, world.ready]
    assert world.client().run().job == "101"
    assert world.lives() == ["1"]
    assert (world.slurm / "last").read_text() == "101\n"


def test_a_claim_is_whole_or_does_not_exist(world):
    """So that the script of an allocation, which claims by a rename, does not replace one."""
    first, second = world.client("first").allocations, world.client("second").allocations
    assert claim(first, 1, "first")
    assert not claim(second, 1, "second")
    assert sorted(os.listdir(world.life())) == ["claimed", "logs", "users"]
    assert os.listdir(world.life() / "users") == ["first"]
    assert world.life().stat().st_mode & 0o777 == 0o700
    assert world.lives() == ["1"], "the second one removes its own"


@pytest.mark.parametrize(
    ("command", "script", "words"),
    [
        ("squeue", "exec sleep 60", "Slurm gives no answer"),
        ("scancel", "exec sleep 60", "Slurm gives no answer"),
        ("scancel", "echo Socket timed out on send/recv >&2; exit 1", "Socket timed out"),
    ],
)
def test_a_stop_that_slurm_does_not_do_can_be_repeated(world, command, script, words, monkeypatch):
    impatient(monkeypatch)
    allocations = world.submitted()
    (world.slurm.parent / "bin" / command).write_text(f"#!/bin/sh\n{script}\n")
    with pytest.raises(ClusterError, match=words):
        allocations.stop("it was ended")
    assert allocations.look().stop == "it was ended"
    with pytest.raises(ClusterError, match=words):
        allocations.stop("it was ended")


@pytest.mark.parametrize("command", ["squeue", "scancel"])
def test_the_head_ends_an_allocation_when_slurm_gives_no_answer(world, command, monkeypatch):
    impatient(monkeypatch)
    world.events = [world.ready]
    client = world.client()
    client.run()
    (world.slurm.parent / "bin" / command).write_text("#!/bin/sh\nexec sleep 60\n")
    assert client.allocations.stop("it was ended")
    assert (world.life() / "stop").read_text() == "it was ended"


def test_slurm_is_asked_with_a_full_disk(tmp_path, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(on_login, "_squeue", list)
    monkeypatch.setattr(on_login, "write_file", full)
    assert on_login.ClusterFolder(str(tmp_path))._queue(30.0, 0.0) == []


def test_the_last_answer_of_slurm_counts_on_its_host_while_there_is_no_other(tmp_path, monkeypatch):
    folder, kept = on_login.ClusterFolder(str(tmp_path)), tmp_path / "queue.json"
    answers = iter([["a job"], None, None, []])
    monkeypatch.setattr(on_login, "_squeue", lambda: next(answers))
    assert folder._queue(0.0, 0.0) == folder._queue(0.0, 0.0) == ["a job"]
    kept.write_text(kept.read_text().replace(os.uname().nodename, "of another Slurm"))
    assert folder._queue(30.0, 0.0) is None
    kept.write_text("{")  # torn by a crash
    assert folder._queue(30.0, 0.0) == []


def test_a_job_that_never_leaves_the_queue_is_not_waited_for():
    end, row = RunEnd(143, "its walltime"), {"state": "COMPLETING"}
    assert SlurmAllocation(1, end=end, ended_s=9, queued=row).may_start_again
    assert not SlurmAllocation(1, end=end, ended_s=400, queued=row).may_start_again
    assert SlurmAllocation(1, end=end, ended_s=400, queued={"state": "PENDING"}).may_start_again


@pytest.mark.parametrize(
    ("row", "cancelled"),
    [
        ("101|/home/me/another", []),
        ("101|/home/me/ray/lives/11", []),
        ("101|", []),
        ("100|/mnt/of/a/node/ray/lives/1", []),
        ("101|/mnt/of/a/node/ray/lives/1", ["101"]),  # a node has submitted it
    ],
)
def test_the_job_of_an_allocation_is_known_by_its_folder(world, row, cancelled):
    """Slurm gives a number again, and hosts may have different paths for one folder."""
    allocations = world.submitted()
    number, _, folder = row.partition("|")
    (world.slurm / "queue").write_text(f"{number}|RUNNING|None|N/A|{folder}\n")
    allocations.stop("it was ended")
    assert world.cancelled() == cancelled
    assert (world.life() / "stop").exists()


@pytest.mark.parametrize("has_end", [True, False])
def test_a_job_that_slurm_starts_again_is_waited_for_and_can_be_stopped(world, has_end):
    """Its last start may have written its end, by the signal that Slurm has sent."""
    world.events = [world.ready]
    allocations = world.client().allocations
    world.client("first").run()
    if has_end:
        world.end(1, "the job was cancelled")
    world.state("101", "PENDING")
    world.events = [_nothing, lambda: world.ready(1, restart=1)]
    assert world.client("second").run().run.endswith("101.1")
    assert not any("is submitted" in text for text in world.said)
    world.state("101", "PENDING")
    (world.life() / "run" / "101.1" / "end.json").write_text('{"code": 143, "why": "cancelled"}')
    assert allocations.stop("it was ended")
    assert world.cancelled() == ["101"]
    assert allocations.look().stop == "it was ended"


def test_every_client_that_waited_hears_of_a_failure_and_does_not_submit_again(world):
    first, second = world.client("first"), world.client("second")

    def fail() -> None:
        world.ready()
        (folder,) = (world.life() / "run").iterdir()
        (folder / "ready.json").unlink()
        world.end(1, "the cluster was not ready within 600 s")

    assert claim(first.allocations, 1, "first")
    submit(first.allocations, 1)
    world.events = [fail]
    with pytest.raises(ClusterError, match=r"did not come up in Slurm job 101.*not ready within"):
        second.run()
    assert world.lives() == ["1"]


def test_failures_of_slurm_say_what_it_said(world):
    (world.slurm / "refuse").write_text("sbatch: error: invalid partition specified: nix\n")
    world.events = [_nothing]
    with pytest.raises(ClusterError, match=r"does not take the job .*invalid partition"):
        world.client().run()
    (world.slurm / "refuse").unlink()
    world.events = [_nothing, world.forget, _nothing, _nothing]
    with pytest.raises(ClusterError, match="has no job 101 any more"):
        world.client().run()
    assert not (world.life() / "stop").exists(), "another Slurm may have it, whose head obeys that"
    world.events = [_nothing] * 20
    with pytest.raises(ClusterError, match="has not started within queue_timeout_s=10"):
        world.client(queue_timeout_s=10).run()


def test_slurm_is_asked_by_all_clients_together_and_after_a_change_anew(world, monkeypatch):
    """What it said before the job was there, or before the run has told its end, proves nothing."""
    monkeypatch.setattr(allocations_module, "PAUSE_S", 30.0)
    allocations, other = world.submitted(), world.client("other").allocations

    def asked() -> int:
        return len((world.slurm / "asked").read_text().split())

    assert [one.look().is_queued for one in (allocations, other, allocations)] == [True] * 3
    assert asked() == 1
    world.ready()
    assert [one.look().queued["state"] for one in (allocations, other)] == ["RUNNING"] * 2
    assert asked() == 2
    world.end(1, "it is over")
    (world.slurm / "away").touch()
    assert [one.look().slurm_answered for one in (allocations, other)] == [False, False]
    assert asked() == 3, "an answer that did not come is not asked for at once"
