"""When a node starts Ray again, with a stand-in for its processes, and Ray's folder on a node."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nemo_run_ray.remote.slurm import head as head_module
from nemo_run_ray.remote.slurm import node, settings
from nemo_run_ray.remote.slurm.folder import HEAD, HeadAddress, NodeReport, RunEnd, RunFolder
from nemo_run_ray.remote.slurm.head import Head
from nemo_run_ray.remote.slurm.node import Worker, make_private, remove_stale, temp_dir_of
from nemo_run_ray.remote.slurm.processes import Command

_HEAD = HeadAddress("127.0.0.1", 6379, 8265)


class _Commands:
    """Starts nothing, and ends what a test ends."""

    def __init__(self) -> None:
        self.started: list[list[str]] = []
        self.last: Command | None = None

    def start(self, name: str, argv: list[str], log: str, *_: Any) -> Command:
        self.started.append(argv)
        self.last = Command(name, 0, log)
        return self.last

    def stop(self, *_: Any, **__: Any) -> None: ...

    def reap(self) -> None: ...


@pytest.fixture
def commands(monkeypatch) -> _Commands:
    monkeypatch.setattr(node, "_RETRY_S", 0.0)
    monkeypatch.setattr(node, "LOOK_S", 0.0)
    monkeypatch.setattr(head_module, "head_addresses", lambda *_: ["127.0.0.1"])
    monkeypatch.setattr(head_module, "listening", lambda *_: True)
    return _Commands()


@pytest.fixture
def begin(tmp_path, commands) -> Iterator[Callable[..., Any]]:
    """The program of a node, which has announced itself to the others."""
    found: list[Any] = []

    def begin(kind: Any, rank: int, **variables: str) -> Any:
        slurm = {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "2", "SLURMD_NODENAME": "n"}
        variables["NEMO_RUN_RAY_RUN"] = str(tmp_path)
        read = settings.read({**slurm, **variables}, str(tmp_path / "tmp"))
        folder = RunFolder(str(tmp_path), rank)
        folder.prepare()
        found.append(kind(read, folder, commands, {}))
        found[-1].announce()
        return found[-1]

    yield begin
    for one in found:
        one.ports.close()


def _fail(one: Any, commands: _Commands) -> None:
    """Let its `ray start` end, and let it notice that and start the next one."""
    commands.last.exit_code = 1
    for _ in range(2):
        assert one.step() is None


def test_workers_are_told_of_a_head_that_is_registered(begin, commands):
    """`ray start` of a worker gives up where the head's raylet is not."""
    head = begin(Head, 0)
    assert head.step() is None
    assert head.folder.read(HEAD, HeadAddress) is None, "its GCS listens, and that is all"
    head.alive = frozenset({"127.0.0.1"})
    assert head.step() is None
    told = head.folder.read(HEAD, HeadAddress)
    _fail(head, commands)
    head.alive = frozenset({"127.0.0.1"})
    assert head.step() is None
    assert head.folder.read(HEAD, HeadAddress) == told._replace(start=2), "the ports are the same"


def test_a_worker_joins_a_head_that_has_started_again(begin, commands):
    """Its own `ray start` waits for one that is gone."""
    one = begin(Worker, 1)
    one.folder.publish(HEAD, _HEAD)
    for _ in range(3):
        assert one.step() is None
    assert len(commands.started) == 1
    one.folder.publish(HEAD, _HEAD._replace(port=6380, start=2))
    for _ in range(3):
        assert one.step() is None
    assert len(commands.started) == 2
    assert "--address=127.0.0.1:6380" in commands.started[-1]


def test_no_number_of_tries_ends_a_start(begin, commands):
    """Ray gives up after 15 to 30 s, which a busy machine needs for more than one thing."""
    one = begin(Worker, 1)
    one.folder.publish(HEAD, _HEAD)
    assert one.step() is None
    for _ in range(9):
        _fail(one, commands)
    assert len(commands.started) == 10
    assert "try 9 of `ray start` has ended: exit code 1" in one.report.retried
    commands.last.exit_code = 127
    assert "there is no program 'ray'" in one.step().why


def test_a_head_that_has_begun_gives_the_start_up_itself(begin):
    """It can say what it has waited for; a worker cannot."""
    one = begin(Worker, 1, RAY_HEAD_START_TIMEOUT="0")
    assert one.step().why == "no head was there within 0 s"
    RunFolder(one.folder.path, 0).publish_report(NodeReport("n1"))
    assert one.step() is None


def test_the_units_of_the_nodes_that_live_are_told_now(begin, tmp_path):
    """Before the cluster is ready, and when it has lost a node."""
    head = begin(Head, 0)
    told = []
    for alive in ({"127.0.0.1"}, {"127.0.0.1", "10.0.0.1"}, {"127.0.0.1"}):
        RunFolder(str(tmp_path), 1).publish_report(NodeReport("n2", address="10.0.0.1"))
        head.step()
        head.alive = frozenset(alive)
        head.step()
        told.append((tmp_path / "ray_worker_units").read_text())
    assert told == ["1\n", "2\n", "1\n"]


def test_the_last_copy_keeps_to_the_time_of_a_nodes_end(begin, monkeypatch):
    """Slurm kills a node 30 s after it has asked it to end, and to end its processes takes some."""
    monkeypatch.setattr(node, "_LEAVE_S", 0.0)
    one, began = begin(Worker, 1, RAY_LOG_SYNC_FREQUENCY="9"), time.monotonic()
    one.leave(RunEnd(0, "the driver: exit code 0"))
    assert one.commands.last.name == "log copies"
    assert 1.0 <= time.monotonic() - began < 5.0


#: A program that holds its folder until it is killed.
_HOLDER = """
import sys, time
from nemo_run_ray.remote.slurm import node
node._TEMP_ROOT = sys.argv[1]
held = node.make_private(node._private_of(sys.argv[2]))
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(node, "_TEMP_ROOT", str(tmp_path))
    return tmp_path


def folder(root, job: str):
    return root / f"nrr-{os.getuid()}-{job}"


def test_the_folder_of_a_run_that_was_killed_is_removed_and_no_other(root):
    words = [sys.executable, "-c", _HOLDER, str(root), "7.0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        remove_stale("9.0")
        assert folder(root, "7.0").exists(), "its program lives"
        holder.kill()
        holder.wait()
        remove_stale("9.0")
    assert not folder(root, "7.0").exists()


def test_earlier_starts_of_the_same_job_are_removed(root):
    held = []
    for job in ("9.0", "9.1", "9.2", "19.0"):
        held.append(make_private(str(folder(root, job))))
    remove_stale("9.1")
    assert sorted(path.name.partition("-")[2].partition("-")[2] for path in root.iterdir()) == [
        "19.0",
        "9.1",
        "9.2",
    ]


def test_a_folder_that_two_nodes_share_stays_until_both_have_ended(root):
    first, second = (make_private(os.path.dirname(temp_dir_of("3.0"))) for _ in range(2))
    os.close(second)
    remove_stale("4.0")
    assert folder(root, "3.0").exists()
    os.close(first)
    remove_stale("4.0")
    assert not folder(root, "3.0").exists()
