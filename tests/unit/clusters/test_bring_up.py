"""The way to a cluster on Slurm, with commands of Slurm that a test plays, on real folders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import nemo_run as run
import pytest

from nemo_run_ray import Sidecar, SlurmCluster
from nemo_run_ray.clusters.base import interrupted
from nemo_run_ray.clusters.slurm import allocations as allocations_module
from nemo_run_ray.clusters.slurm import login as login_module
from nemo_run_ray.clusters.slurm.allocations import Allocations, SlurmAllocation
from nemo_run_ray.clusters.slurm.bring_up import BringUp
from nemo_run_ray.clusters.slurm.login import Login
from nemo_run_ray.errors import ClusterError, ConfigError, Unanswered
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
        return BringUp(
            name="ray",
            allocations=Allocations(login, str((folder or self.jobs) / "ray")),
            script=lambda life: f"#!/bin/sh\n# {life}\n",
            user=user,
            say=self.said.append,
            clock=lambda: self.now,
            pause=self._pause,
            **given,
        )

    def submitted(self) -> Allocations:
        """The lives of the cluster, of which the first one's job waits."""
        allocations = self.client().allocations
        assert claim(allocations, 1, "me")
        submit(allocations, 1)
        return allocations

    def _pause(self, seconds: float) -> bool:
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
def world(tmp_path, monkeypatch) -> Iterator[World]:
    put_commands(tmp_path, monkeypatch)
    found = World(tmp_path)
    monkeypatch.setattr(allocations_module, "PAUSE_S", 0.0)  # every answer is a new one
    interrupted.clear()
    yield found
    interrupted.clear()


def claim(allocations: Allocations, number: int, user: str) -> bool:
    return allocations.ask("claim", number=number, user=user)


def submit(allocations: Allocations, number: int) -> None:
    allocations.ask("submit", number=number, script="#!/bin/sh\n")


def leave(allocations: Allocations, user: str) -> None:
    allocations.ask("leave", user=user, why=allocations_module.LEFT_EARLY)


def _lost_once(monkeypatch, what: str, is_done: bool) -> None:
    """The answer to one request is lost, after it was done or before."""
    ask = Allocations.ask

    def lose(self: Allocations, do: str, **arguments: object) -> object:
        if do != what:
            return ask(self, do, **arguments)
        monkeypatch.setattr(Allocations, "ask", ask)
        if is_done:
            ask(self, do, **arguments)
        raise Unanswered("The connection broke off.")

    monkeypatch.setattr(Allocations, "ask", lose)


def _nothing() -> None:
    return None


def test_a_claim_whose_answer_was_lost_is_known_again(world, monkeypatch):
    _lost_once(monkeypatch, "claim", is_done=True)
    world.events = [_nothing, world.ready]
    assert world.client().run().number == 1
    assert world.lives() == ["1"]


@pytest.mark.parametrize("ran", [False, True])
def test_a_submission_that_broke_off_is_made_again_or_found(world, monkeypatch, ran):
    _lost_once(monkeypatch, "submit", is_done=ran)
    world.events = [_nothing, world.ready] if not ran else [world.ready]
    assert world.client().run().job == "101"
    assert (world.slurm / "last").read_text() == "101\n"


def test_a_job_that_slurm_has_and_nobody_heard_of_is_found(world):
    (world.slurm / "breaks").touch()  # the shell dies with sbatch
    world.events = [(world.slurm / "breaks").unlink, _nothing, world.ready]
    assert world.client().run().job == "101"


def test_a_claim_is_whole_or_not_there(world):
    """So that the script of an allocation, which claims by a rename, does not replace one."""
    first, second = world.client("first").allocations, world.client("second").allocations
    assert claim(first, 1, "first")
    assert not claim(second, 1, "second")
    assert sorted(os.listdir(world.life())) == ["claimed", "logs", "users"]
    assert os.listdir(world.life() / "users") == ["first"]
    assert world.life().stat().st_mode & 0o777 == 0o700
    assert world.lives() == ["1"], "nothing is left of the second one's"
    made = world.life().parent / "made"
    made.mkdir()
    done = subprocess.run(["mv", "-T", str(made), str(world.life())], capture_output=True)
    assert done.returncode != 0


def test_who_stops_it_tells_its_head(world):
    """Slurm's controller may be away."""
    allocations = world.client().allocations
    assert claim(allocations, 1, "me")
    allocations.cancel(SlurmAllocation(1), "it was ended by `nemo-run-ray down`")
    for name in ("over", "stop"):
        assert (world.life() / name).read_text() == "it was ended by `nemo-run-ray down`\n"


def test_a_job_that_waits_while_the_controller_is_away_is_ended_by_a_second_stop(world):
    """It has no head that could read the order; should it start, it ends."""
    allocations = world.submitted()
    (world.slurm / "away").touch()
    with pytest.raises(ClusterError, match=r"no answer\. A job that waits in its queue"):
        allocations.cancel(allocations.look(), "it was ended")
    assert os.listdir(world.life()).count("stop") == 1
    assert not allocations.look().why_over, "a second stop finds it"
    (world.slurm / "away").unlink()
    allocations.cancel(allocations.look(), "it was ended")
    assert world.cancelled() == ["101"]
    assert allocations.look().why_over == "it was ended"


def test_a_job_that_runs_while_the_controller_is_away_is_ended_by_its_head(world):
    allocations = world.submitted()
    world.ready()
    (world.slurm / "away").touch()
    for _ in range(2):
        allocations.cancel(allocations.look(), "it was ended")
    assert allocations.look().stopped == "it was ended"
    assert not allocations.look().why_over, (
        "so that another stop finds a job that Slurm starts again"
    )


def test_a_stop_that_slurm_does_not_do_is_told_and_can_be_done_again(world):
    allocations = world.submitted()
    scancel = world.slurm.parent / "bin" / "scancel"
    text = scancel.read_text()
    scancel.write_text("#!/bin/sh\necho Socket timed out on send/recv operation >&2; exit 1\n")
    with pytest.raises(ClusterError, match="Socket timed out"):
        allocations.cancel(allocations.look(), "it was ended")
    scancel.write_text(text)
    assert not allocations.look().why_over
    allocations.cancel(allocations.look(), "it was ended")
    assert world.cancelled() == ["101"]


@pytest.mark.parametrize("name", ["over", "stop"])
def test_who_submits_a_life_that_was_ended_meanwhile_cancels_its_job(world, name):
    allocations = world.client().allocations
    assert claim(allocations, 1, "me")
    (world.life() / name).write_text("it was ended\n")
    submit(allocations, 1)
    assert world.cancelled() == ["101"]


@pytest.mark.parametrize("folder", ["/home/me/another", "/home/me/ray/lives/11", "", "/x y"])
def test_a_job_of_another_folder_is_left_alone(world, folder):
    """Its number is that of a job that has ended long since, or on another Slurm."""
    allocations = world.submitted()
    (world.slurm / "queue").write_text(f"101|RUNNING|None|N/A|{folder}\n")
    allocations.cancel(allocations.look(), "it was ended")
    assert world.cancelled() == []
    assert (world.life() / "over").exists()


def test_hosts_may_have_different_paths_for_one_folder(world):
    """A node has submitted its job; a job of another number is not it, whatever its folder."""
    allocations = world.submitted()
    rows = (f"{number}|PENDING|None|N/A|/mnt/of/a/node/ray/lives/1\n" for number in (100, 101))
    (world.slurm / "queue").write_text("".join(rows))
    allocations.cancel(allocations.look(), "it was ended")
    assert world.cancelled() == ["101"]


@pytest.mark.parametrize("command", ["squeue", "scancel"])
def test_a_slow_controller_is_no_answer(world, command, monkeypatch):
    program = allocations_module._PROGRAM.replace("ANSWER_S = 15.0", "ANSWER_S = 0.2")
    monkeypatch.setattr(allocations_module, "_PROGRAM", program)
    allocations = world.submitted()
    path = world.slurm.parent / "bin" / command
    path.write_text("#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(ClusterError, match="Slurm gives no answer"):
        allocations.cancel(allocations.look(), "it was ended")
    assert allocations.look().stopped == "it was ended"
    assert not allocations.look().why_over


def test_nobody_uses_a_life_that_was_told_to_end(world):
    """Its job may wait in the queue for long, or its head may not have ended it yet."""
    first = world.client("first")
    world.events = [world.ready, _nothing, lambda: world.ready(2)]
    assert first.run().number == 1
    (world.life() / "stop").write_text("it was ended\n")
    assert world.client("second").run().number == 2
    assert world.cancelled() == ["101"], "which Slurm may not have heard yet"


def test_a_job_that_slurm_is_to_start_again_is_waited_for_and_can_be_stopped(world):
    """Its last start has written its end, by the signal that Slurm has sent."""
    world.events = [world.ready]
    allocations = world.client().allocations
    world.client("first").run()
    world.end(1, "the job was cancelled")
    world.state("101", "PENDING")
    world.events = [_nothing, lambda: world.ready(1, restart=1)]
    assert world.client("second").run().number == 1
    world.state("101", "PENDING")
    (world.life() / "run" / "101.1" / "end.json").write_text('{"code": 143, "why": "cancelled"}')
    assert allocations.cancel(allocations.look(), "it was ended")
    assert world.cancelled() == ["101"]
    assert allocations.look().over == "it was ended"


def test_what_has_ended_is_left_as_it_is(world):
    world.events = [world.ready]
    client = world.client()
    client.run()
    world.end(1, "its walltime is over")
    world.forget()
    assert not client.allocations.cancel(client.allocations.look(), "it was ended")
    life = client.allocations.look()
    assert (life.over, life.stopped, life.why_over) == ("", "", "its walltime is over")


def test_a_requeued_life_goes_on_without_users(world):
    """Chains that were handed over to it are no users."""
    client = world.client()
    world.events = [world.ready]
    client.run()
    (world.life() / "run" / "101.1").mkdir()
    leave(client.allocations, "me")
    assert world.cancelled() == []
    assert os.listdir(world.life()).count("released") == 1
    assert not client.allocations.look().stopped


def test_the_last_user_leaves_while_the_controller_is_away(world):
    """The head has to hear of it, or Ray would come up for nobody."""
    allocations = world.submitted()
    (world.slurm / "away").touch()
    leave(allocations, "me")
    assert "before it was ready" in allocations.look().stopped
    assert not allocations.look().over, "a stop finds the job, once Slurm answers"
    (world.slurm / "away").unlink()
    assert allocations.cancel(allocations.look(), "it was ended")
    assert world.cancelled() == ["101"]


def test_two_names_of_a_folder_are_one(world, tmp_path):
    """Slurm tells the path that it was given."""
    (tmp_path / "link").symlink_to(world.jobs)
    world.events = [_nothing, world.ready]
    first = world.client(folder=tmp_path / "link").run()
    assert world.client("other").run().job == first.job
    assert (world.slurm / "queue").read_text().strip().endswith(str(world.life().resolve()))


def test_the_host_must_answer_the_first_time(world, monkeypatch):
    def never(self: Allocations) -> SlurmAllocation | None:
        raise Unanswered("me@host cannot be reached now: no route.")

    monkeypatch.setattr(Allocations, "look", never)
    with pytest.raises(ClusterError, match=r"me@host .*no route"):
        world.client().run()


def test_it_is_kept_only_once_it_is_ready(world):
    client = world.client(keep=True)

    def interrupt() -> bool:
        assert not (world.life() / "keep").exists()
        return True

    world.events = [_nothing, interrupt]
    with pytest.raises(ClusterError, match="Interrupted"):
        client.run()
    leave(client.allocations, "me")
    assert world.cancelled() == ["101"]
    assert "before it was ready" in (world.life() / "over").read_text()
    world.events = [_nothing, lambda: world.ready(2)]
    assert world.client("second", keep=True).run().number == 2
    assert (world.life(2) / "keep").exists()


def test_every_client_that_waited_is_told_of_a_failure(world):
    """And none of them submits the same again."""
    world.events = [_nothing]
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


def test_a_job_that_slurm_starts_again_is_waited_for(world):
    """Its last start was ready; its nodes are gone."""
    world.events = [_nothing, world.ready]
    world.client().run()
    world.state("101", "PENDING")
    # What Slurm says at the first look is as old as that.
    world.events = [_nothing, _nothing, lambda: world.ready(restart=1)]
    life = world.client("second").run()
    assert life.run.endswith("101.1")
    assert world.events == []


@pytest.mark.parametrize("words", ["Unable to contact slurm controller", "Socket timed out"])
def test_a_controller_that_is_away_is_asked_again(world, words):
    (world.slurm / "refuse").write_text(f"sbatch: error: {words}\n")
    world.events = [(world.slurm / "refuse").unlink, _nothing, lambda: world.ready(2)]
    assert world.client().run().number == 2


def test_what_slurm_refuses(world):
    (world.slurm / "refuse").write_text("sbatch: error: invalid partition specified: nix\n")
    world.events = [_nothing]
    with pytest.raises(ClusterError, match=r"does not take the job .*invalid partition"):
        world.client().run()


def test_a_job_that_vanished(world):
    world.events = [_nothing, world.forget, _nothing, _nothing]
    with pytest.raises(ClusterError, match="has no job 101 any more"):
        world.client().run()


def test_the_wait_in_the_queue_has_an_end(world):
    world.events = [_nothing] * 20
    with pytest.raises(ClusterError, match="has not started within queue_timeout_s=10"):
        world.client(queue_timeout_s=10).run()


@pytest.mark.parametrize("folder", ["/shared/my jobs", "/shared/%j", "/shared/$HOME", "/s/é"])
def test_folders_that_scripts_do_not_take(folder):
    executor = run.SlurmExecutor(account="a", tunnel=run.LocalTunnel(job_dir=folder))
    with pytest.raises(ConfigError, match="since the scripts of Slurm"):
        SlurmCluster(executor=executor)


def test_a_login_prints_what_it_likes(tmp_path, monkeypatch):
    """The start file of a shell; and no command reads the script."""
    monkeypatch.setenv("ENV", str(tmp_path / "profile"))
    login = Login(run.LocalTunnel(job_dir=str(tmp_path)))
    assert login.run("cat; echo 'it''s'; echo \"$(printf 'a\\tb')\"") == "its\na\tb\n"
    login.put(b"text with 'quotes'\nand lines\n", str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "text with 'quotes'\nand lines\n"
    (tmp_path / "bytes").write_bytes(bytes(range(256)) * 1000)
    login.get(str(tmp_path / "bytes"), tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == bytes(range(256)) * 1000
    with pytest.raises(ClusterError, match="No such file"):
        login.get(str(tmp_path / "none"), tmp_path / "other")
    with pytest.raises(ClusterError, match="nowhere"):
        login.put(b"text", str(tmp_path / "nowhere" / "file"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bytes", "copy", "file"]


def test_a_command_that_hangs_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(login_module, "_COMMAND_S", 0.5)
    login = Login(run.LocalTunnel(job_dir=str(tmp_path)))
    with pytest.raises(Unanswered, match=r"gave no answer within 0\.5 s"):
        login.run(f"echo $$ > {tmp_path}/pid; exec sleep 600")
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


_AT_EXIT = """
import atexit, sys, nemo_run as run
from nemo_run_ray.clusters.slurm.login import Login
login = Login(run.LocalTunnel(job_dir="/"))
atexit.register(lambda: login.run(f"echo left > {sys.argv[1]}"))
"""


def test_a_program_leaves_while_python_ends(tmp_path):
    """When no thread can be started any more."""
    done = subprocess.run(
        [sys.executable, "-c", _AT_EXIT, str(tmp_path / "out")], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "out").read_text() == "left\n"


def test_two_sidecars_of_one_name():
    executor = run.SlurmExecutor(account="a", tunnel=run.LocalTunnel(job_dir="/shared"))
    twice = [Sidecar("cache", "one"), Sidecar("cache", "two")]
    with pytest.raises(ConfigError, match=r"sidecars with the names \['cache', 'cache'\]"):
        SlurmCluster(executor=executor, sidecars=twice)


def test_slurm_is_asked_by_all_clients_together_and_after_a_change_anew(world, monkeypatch):
    """What it said before the job was there, or before the run has told its end, proves nothing."""
    monkeypatch.setattr(allocations_module, "PAUSE_S", 30.0)
    allocations, other = world.submitted(), world.client("other").allocations

    def asked() -> int:
        return len((world.slurm / "asked").read_text().split())

    assert [one.look().queued.waits for one in (allocations, other, allocations)] == [True] * 3
    assert asked() == 1
    world.ready()
    assert [one.look().queued.state for one in (allocations, other)] == ["RUNNING"] * 2
    assert asked() == 2
    world.end(1, "it is over")
    (world.slurm / "away").touch()
    assert [one.look().has_queue for one in (allocations, other)] == [False, False]
    assert asked() == 3, "an answer that did not come is not asked for at once"
    (world.jobs / "ray" / "queue.json").write_text("[")
    assert not allocations.look().has_queue
    assert asked() == 4
