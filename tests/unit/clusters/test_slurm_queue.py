"""How often Slurm is asked for this user's jobs, and whose answer counts."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import nemo_run as run
import pytest

from nemo_run_ray.clusters.slurm import slurm_queue
from nemo_run_ray.clusters.slurm.login import Login
from nemo_run_ray.clusters.slurm.slurm_queue import PAUSE_S, SlurmQueue
from tests.slurm_commands import put_commands


class World:
    """A Slurm with one job, this machine's clock, and how often Slurm was asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = 1000.0
        self.has(7)

    def has(self, number: int) -> None:
        (self.folder / "queue").write_text(f"{number}|RUNNING|None|N/A|/jobs/{number}\n")

    def numbers(self, after: float = 0.0) -> list[str] | None:
        """What a look says, as by a program that has just begun if ``forget`` was called."""
        queue = SlurmQueue(Login(run.LocalTunnel(job_dir="/jobs")), lambda: self.now)
        jobs = queue.jobs(after)
        return None if jobs is None else [job.number for job in jobs]

    def forget(self) -> None:
        slurm_queue._asked.clear()

    @property
    def asked(self) -> int:
        return len((self.folder / "asked").read_text().split())


@pytest.fixture
def world(tmp_path, monkeypatch) -> Iterator[World]:
    put_commands(tmp_path, monkeypatch)
    monkeypatch.setattr(slurm_queue, "get_nemorun_home", lambda: str(tmp_path / "home"))
    yield World(tmp_path / "slurm")
    slurm_queue._asked.clear()


def test_all_programs_of_a_machine_ask_once_in_half_a_minute(world):
    for _ in range(3):
        assert world.numbers() == ["7"]
        world.forget()
    assert world.asked == 1
    world.now += PAUSE_S
    world.has(8)
    assert world.numbers() == ["8"]
    assert world.asked == 2


def test_what_was_said_before_a_moment_does_not_count(world):
    assert world.numbers() == ["7"]
    assert world.numbers(after=world.now + 1) is None


def test_a_home_that_two_slurms_share(world, monkeypatch):
    """The answer of one must not end what runs on the other."""
    assert world.numbers() == ["7"]
    world.has(8)
    world.forget()
    with monkeypatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: "other-login")
        assert world.numbers() == ["8"]
    with monkeypatch.context() as patch:
        patch.setenv("SLURM_CONF", "/other/slurm.conf")
        assert world.numbers() == ["8"]
    assert world.numbers() == ["7"]
    assert world.asked == 3


@pytest.mark.parametrize("fails", ["folder", "file"])
def test_a_home_without_room_hides_nothing(world, monkeypatch, fails):
    """The program knows what it needs, and asks no more often than it may."""

    def refuse(*_, **__) -> None:
        raise OSError(28, "No space left on device")

    if fails == "folder":
        monkeypatch.setattr(Path, "mkdir", refuse)
    else:
        monkeypatch.setattr(slurm_queue, "write_file", refuse)
    for _ in range(3):
        assert world.numbers() == ["7"]
    assert world.asked == 1
    world.now += PAUSE_S
    assert world.numbers() == ["7"]
    assert world.asked == 2


def test_a_controller_that_is_away_is_asked_no_more_often(world):
    (world.folder / "away").touch()
    assert world.numbers() is None
    (world.folder / "away").unlink()
    assert world.numbers() is None
    world.now += PAUSE_S
    assert world.numbers() == ["7"]
