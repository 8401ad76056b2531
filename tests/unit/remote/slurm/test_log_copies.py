"""Copies of Ray's logs, made by real processes in real folders."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_run_ray.remote.slurm.processes import Commands, LogCopies
from tests.conftest import wait_for


class World:
    """Ray's folder with one log, a copier that begins every 10 s, and a clock."""

    def __init__(self, folder: Path, tag: str, pause_s: float | None = 10.0) -> None:
        self.ray = folder / "it's Ray's"
        self.log = self.ray / "session_2026-11-24/logs/old/gcs.out"
        self.log.parent.mkdir(parents=True)
        self.log.write_text("one\n")
        self.target = folder / "copies of $HOME"
        self.copy = self.target / "session_2026-11-24/logs/old/gcs.out"
        self.now = 100.0
        self.commands = Commands(tag)
        paths = str(self.ray), str(self.target)
        self.copies = LogCopies(*paths, pause_s, self.commands, lambda: self.now)

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


def test_what_has_not_changed_is_not_copied_again(world):
    world.step()
    wait_for(world.has_ended)
    world.copy.write_text("ONE\n")
    world.step()
    wait_for(world.has_ended)
    assert world.copy.read_text() == "ONE\n"


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


def test_where_no_process_is_to_be_had_the_run_goes_on(world, monkeypatch):
    def refuse(*_) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with monkeypatch.context() as patch:
        patch.setattr(world.commands, "start", refuse)
        world.step()
    assert world.last is None
    world.step()
    wait_for(world.has_ended)
    assert world.copy.read_text() == "one\n"


def test_a_folder_that_is_gone_ends_nothing(world):
    shutil.rmtree(world.ray)
    world.step()
    wait_for(world.has_ended)
    assert not world.target.exists()


def test_nobody_asked_for_copies(tmp_path, unique):
    world = World(tmp_path, unique, pause_s=None)
    world.step(1000)
    world.copies.finish(5)
    assert world.last is None
