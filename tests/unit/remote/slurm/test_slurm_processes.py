"""Sidecars, their probes and copies of Ray's logs, as real processes in real folders."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nemo_run_ray.remote.slurm.processes import Command, Commands, LogCopies, Sidecars
from nemo_run_ray.remote.slurm.settings import SidecarSpec
from nemo_run_ray.remote.spec import ProbeSpec
from tests.conftest import wait_for
from tests.unit.remote.slurm.test_slurm_decide import _SETTINGS


class World:
    """Ray's folder with one log, a copier that begins every 10 s, and a clock."""

    def __init__(self, folder: Path, tag: str) -> None:
        self.ray = folder / "it's Ray's"
        self.log = self.ray / "session_2026-11-24/logs/old/gcs.out"
        self.log.parent.mkdir(parents=True)
        self.log.write_text("one\n")
        self.target = folder / "copies of $HOME"
        self.copy = self.target / "session_2026-11-24/logs/old/gcs.out"
        self.now = 100.0
        self.commands = Commands(tag)
        paths = str(self.ray), str(self.target)
        self.copies = LogCopies(*paths, 10.0, self.commands, lambda: self.now)

    @property
    def last(self):
        return self.copies._last

    def step(self, seconds: float = 10.0) -> None:
        self.now += seconds
        self.copies.step()

    def has_ended(self) -> bool:
        """Collect what has ended, as the head's loop does."""
        self.commands.reap()
        return self.last.exit_code is not None


@pytest.fixture
def world(tmp_path, unique) -> Iterator[World]:
    found = World(tmp_path, unique)
    yield found
    if found.last is not None:
        wait_for(found.has_ended)


def test_logs_are_copied_now_and_then(world):
    world.step(9)
    assert world.last is None
    world.step(1)
    wait_for(world.has_ended)
    assert world.copy.read_text() == "one\n"
    world.log.write_text("one\ntwo\n")
    world.step()
    wait_for(world.has_ended)
    assert world.copy.read_text() == "one\ntwo\n"


def test_a_slow_folder_does_not_hold_the_head(world, monkeypatch, tmp_path):
    """Nor does a second copy begin beside the first one."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/cp").write_text(f'#!/bin/sh\ncat "{tmp_path}/go"; exec /bin/cp "$@"\n')
    (tmp_path / "bin/cp").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    os.mkfifo(tmp_path / "go")
    world.step()
    first = world.last
    world.step()
    assert world.last is first
    assert not world.has_ended()
    (tmp_path / "go").write_text("now")
    wait_for(world.has_ended)
    assert world.copy.exists()


def test_the_last_copy_is_waited_for(world):
    world.copies.finish(5)
    assert world.copy.read_text() == "one\n"


def test_a_copy_that_broke_off_is_made_again(world, monkeypatch, tmp_path):
    """Its torn file is newer than the log."""
    (tmp_path / "bin").mkdir()
    folder, copy = shlex.quote(str(world.copy.parent)), shlex.quote(str(world.copy))
    torn = f"#!/bin/sh\nmkdir -p {folder}; printf o > {copy}; exit 1\n"
    (tmp_path / "bin/cp").write_text(torn)
    (tmp_path / "bin/cp").chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
        world.step()
        wait_for(world.has_ended)
    assert world.copy.read_text() == "o"
    world.step()
    wait_for(world.has_ended)
    assert world.copy.read_text() == "one\n"
    assert sorted(path.name for path in world.target.iterdir()) == ["session_2026-11-24"]


@pytest.fixture
def others() -> list[Command]:
    """What this process had started before, a fork server perhaps, and which goes on.

    On a node the process is the node's own, and everything below it is the node's.
    """
    return [Command(one.name(), one.pid, "") for one in psutil.Process().children()]


@pytest.fixture
def commands(others) -> Iterator[Commands]:
    found = Commands("sidecars")
    yield found
    found.stop(1.0, keep=others)


def sidecars(commands: Commands, folder: Path, command: str, *probe: str) -> Sidecars:
    spec = SidecarSpec(
        name="s", command=command, probe=ProbeSpec("command", command=probe, interval_s=0.05)
    )
    settings = _SETTINGS._replace(logs=str(folder), sidecars=(spec,))
    found = Sidecars(settings, commands)
    found.start(os.environ)
    return found


def ask(found: Sidecars, commands: Commands) -> str | None:
    commands.reap()
    return found.step()


def test_a_probe_that_was_ended_with_ray_is_asked_again(commands, others, tmp_path):
    """When `ray start` is tried again all but the sidecars is ended, a probe among it."""
    probe = ("sh", "-c", f"[ -e {tmp_path}/there ] || {{ : > {tmp_path}/begun; sleep 600; }}")
    found = sidecars(commands, tmp_path, "sleep 600", *probe)
    wait_for(lambda: ask(found, commands) or (tmp_path / "begun").exists())
    (tmp_path / "there").touch()
    commands.stop(1.0, keep=[*found.running, *others])
    wait_for(lambda: ask(found, commands) or found.ready == ("s",))
    assert found.ready == ("s",)


def test_a_sidecar_that_dies_is_told(commands, tmp_path):
    found = sidecars(commands, tmp_path, "echo no image; exit 3", "false")
    why = wait_for(lambda: ask(found, commands))
    assert "the sidecar s has ended before it was ready: exit code 3" in why
    assert "| no image" in why
