"""Sidecars, their probes and copies of Ray's logs, as real processes in real folders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nemo_run_ray.remote.slurm import node, processes
from nemo_run_ray.remote.slurm.processes import Command, Commands, Sidecars
from nemo_run_ray.remote.slurm.settings import SidecarSpec
from nemo_run_ray.remote.spec import ProbeSpec
from tests.conftest import wait_for
from tests.unit.remote.slurm.test_slurm_decide import _SETTINGS


@pytest.fixture
def others() -> list[Command]:
    """What this process had started before, a fork server perhaps, and which goes on.

    On a node the process is the node's own, and everything below it is the node's.
    """
    return [Command(one.name(), one.pid, "") for one in psutil.Process().children()]


@pytest.fixture
def commands(others, monkeypatch) -> Iterator[Commands]:
    found = Commands("sidecars")
    own = psutil.Process().children

    def collect() -> Iterator[tuple[int, int]]:
        """Of this process's children those alone that the commands have started."""
        for child in {one.pid for one in own()} - {one.pid for one in others}:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                yield pid, abs(os.waitstatus_to_exitcode(status))

    monkeypatch.setattr(processes, "collect", collect)
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


def test_logs_are_copied_now_and_then(commands, tmp_path):
    log = tmp_path / "it's Ray's/session_2026-11-24/logs/old/gcs.out"
    log.parent.mkdir(parents=True)
    log.write_text("one\n")
    copy = tmp_path / "copies of $HOME/session_2026-11-24/logs/old/gcs.out"
    argv = ["sh", "-c", node._COPY, "copy", str(log.parents[3]), str(copy.parents[3])]
    commands.start("copies", [*argv, "0.2"], os.devnull, os.environ)
    wait_for(lambda: copy.exists() and copy.read_text() == "one\n")
    log.write_text("one\ntwo\n")
    wait_for(lambda: copy.read_text() == "one\ntwo\n")
    copy.unlink()
    once = commands.start("copies", [*argv, ""], os.devnull, os.environ)
    wait_for(lambda: commands.reap() or once.exit_code == 0)
    assert copy.exists()


def test_a_copy_that_was_killed_is_made_again(commands, others, monkeypatch, tmp_path):
    """Its torn file is newer than the log."""
    log, copy = (tmp_path / one / "session_2026/logs/gcs.out" for one in ("ray", "copies"))
    log.parent.mkdir(parents=True)
    log.write_text("one\n")
    (tmp_path / "bin").mkdir()
    torn = f"#!/bin/sh\nmkdir -p {copy.parent}; printf o > {copy}; exec sleep 600\n"
    (tmp_path / "bin/cp").write_text(torn)
    (tmp_path / "bin/cp").chmod(0o755)
    argv = ["sh", "-c", node._COPY, "copy", str(tmp_path / "ray"), str(tmp_path / "copies")]
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
        commands.start("copies", [*argv, "0.1"], os.devnull, os.environ)
        wait_for(lambda: copy.exists() and copy.read_text() == "o")
        commands.stop(5.0, keep=others)
    once = commands.start("copies", [*argv, ""], os.devnull, os.environ)
    wait_for(lambda: commands.reap() or once.exit_code == 0)
    assert copy.read_text() == "one\n"
    assert [path.name for path in (tmp_path / "copies").iterdir()] == ["session_2026"]


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
