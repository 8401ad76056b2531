"""When a node starts Ray again, with stand-ins for its processes, and Ray's folder on a node."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from nemo_run_ray.remote.dashboard import Unanswered
from nemo_run_ray.remote.slurm import head as head_module
from nemo_run_ray.remote.slurm import node, settings
from nemo_run_ray.remote.slurm.folder import READY, HeadAddress, NodeReport, RunEnd, RunFolder
from nemo_run_ray.remote.slurm.head import Head
from nemo_run_ray.remote.slurm.node import Worker, hold_folder
from tests.conftest import wait_for

_HEAD = HeadAddress("127.0.0.1", 6379, 8265)
_AWAY = Unanswered("Ray is ending")


class _Child:
    def __init__(self, argv: list[str], *_: Any) -> None:
        self.argv = argv
        self.code: int | None = None
        self.ended_at = 0.0

    @property
    def ending(self) -> str:
        return f"exit code {self.code}"


class _Children:
    """Starts nothing, and ends what a test ends."""

    def __init__(self) -> None:
        self.started: list[_Child] = []

    def add(self, child: _Child) -> _Child:
        self.started.append(child)
        return child

    def reap(self) -> None: ...

    def stop(self, *_: Any, **__: Any) -> None: ...


@pytest.fixture
def begin(tmp_path, monkeypatch) -> Callable[..., Any]:
    """The program of a node, which has announced itself to the others."""
    monkeypatch.setattr(node, "_RETRY_S", 0.0)
    monkeypatch.setattr(node, "LOOK_S", 0.0)
    for name in ("_ASK_S", "_ASK_READY_S"):
        monkeypatch.setattr(head_module, name, 0.0)
    monkeypatch.setattr(node, "Supervisor", _Children)
    monkeypatch.setattr(node, "Child", _Child)
    monkeypatch.setattr(head_module, "head_address", lambda *_: "127.0.0.1")

    def begin(kind: Any, rank: int, **variables: str) -> Any:
        slurm = {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "2", "SLURMD_NODENAME": "n"}
        slurm["NEMO_RUN_RAY_HOSTS"] = "n n2"
        variables |= {"NEMO_RUN_RAY_RUN": str(tmp_path), "RAY_TEMP_DIR": str(tmp_path / "tmp/r")}
        read = settings.Settings({**slurm, **variables})
        folder = RunFolder(str(tmp_path), rank)
        for name in ("nodes", "beats"):
            (tmp_path / name).mkdir(exist_ok=True)
        program = kind(read, folder, "tag", {})
        program.publish()
        return program

    return begin


def _fail(program: Any) -> None:
    """Let its `ray start` end, and let it notice that and start the next one."""
    program.ray.code = 1
    for _ in range(2):
        assert program.step() is None


def _joins(program: Any, head: HeadAddress) -> None:
    program.folder.write("nodes/0.json", NodeReport("n1", ray=head))
    for _ in range(3):
        assert program.step() is None


def test_workers_learn_of_a_head_that_is_registered(begin):
    """`ray start` of a worker gives up where the head's raylet is not."""
    head = begin(Head, 0)
    assert head.step() is None
    assert head.report.ray == (), "its GCS listens, and that is all"
    head.alive = {"127.0.0.1"}
    assert head.step() is None
    first = HeadAddress(*head.folder.read("nodes/0.json", NodeReport).ray)
    _fail(head)
    head.alive = {"127.0.0.1"}
    assert head.step() is None
    again = HeadAddress(*head.folder.read("nodes/0.json", NodeReport).ray)
    assert again == first._replace(start=2), "the ports are the same"


def test_a_worker_joins_a_head_that_has_started_again(begin):
    """Its own `ray start` waits for one that is gone."""
    worker = begin(Worker, 1)
    _joins(worker, _HEAD)
    assert len(worker.children.started) == 1
    _joins(worker, _HEAD._replace(port=6380, start=2))
    assert len(worker.children.started) == 2
    assert "--address=127.0.0.1:6380" in worker.ray.argv


def test_no_number_of_tries_ends_a_start(begin):
    """Ray gives up after 15 to 30 s, which a busy machine needs for more than one thing."""
    worker = begin(Worker, 1)
    _joins(worker, _HEAD)
    for _ in range(9):
        _fail(worker)
    assert len(worker.children.started) == 10
    assert "try 9 of `ray start` has ended: exit code 1" in worker.report.retried
    worker.ray.code = 127
    with pytest.raises(settings.CannotContinue, match="there is no program 'ray'"):
        worker.step()


def _copy(source: Path, target: Path, pause_s: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sh", "-c", node._COPY, "copy", str(source), str(target), pause_s])


def test_the_last_copy_of_rays_logs_is_whole(tmp_path):
    """One that was killed has left a torn file, which is newer than the log."""
    source, target = tmp_path / "it's Ray's", tmp_path / "copies of $HOME"
    log, copy = (one / "session_2026/logs/old/gcs.out" for one in (source, target))
    log.parent.mkdir(parents=True)
    log.write_text("one\n")
    copy.parent.mkdir(parents=True)
    copy.write_text("o")
    assert _copy(source, target, "").wait(20) == 0
    assert copy.read_text() == "one\n"
    log.write_text("one\ntwo\n")
    with _copy(source, target, "0.1") as copies:
        wait_for(lambda: copy.read_text() == "one\ntwo\n")
        copies.terminate()


def test_nodes_that_have_not_begun_are_named_when_slurm_kills_the_others(begin, tmp_path):
    (tmp_path / "job").touch()
    worker = begin(Worker, 1)
    worker.run(Mock(order=lambda: b""))
    assert "this program has not begun on n; slurmd's log there" in worker.report.failed
    worker.folder.write(READY, _HEAD)
    assert worker._why_no_watchdog() == "the watchdog of this node's processes was killed"


def test_a_folder_of_another_user_is_not_used(begin, monkeypatch, tmp_path):
    worker = begin(Worker, 1)
    (tmp_path / "job").touch()
    monkeypatch.setattr(node.os, "getuid", lambda: 12345)
    with pytest.raises(settings.CannotContinue, match="is another user's"):
        worker._begin()


#: A program that holds its folder until it is killed.
_HOLDER = """
import sys, time
from nemo_run_ray.remote.slurm.node import hold_folder
held = hold_folder(sys.argv[1])
print("held", flush=True)
time.sleep(600)
"""


def test_the_folder_of_a_run_that_was_killed_is_removed_and_no_other(tmp_path):
    theirs, own = (tmp_path / f"nrr-{os.getuid()}-{job}" for job in ("7.0", "9.0"))
    words = [sys.executable, "-c", _HOLDER, str(theirs)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        held = [hold_folder(str(own)) for _ in range(2)]  # of two nodes that share it
        assert theirs.exists(), "its program lives"
        holder.kill()
        holder.wait()
        os.close(hold_folder(str(tmp_path / "other")))
    assert not theirs.exists()
    assert own.exists()
    list(map(os.close, held))


def test_the_logs_of_ended_jobs_are_there_before_the_end_of_the_run_is_published(begin, tmp_path):
    logs, kept = tmp_path / "tmp/r/session_2/logs", tmp_path / "job_logs"
    for folder in (logs, kept):
        folder.mkdir(parents=True)
    for name in "ab":  # the last lines of b are still to come
        (logs / f"job-driver-{name}.log").write_text("a line\n")
    head = begin(Head, 0, NEMO_RUN_RAY_LIFE=str(tmp_path / "allocation"))
    rows = [
        {"submission_id": "a", "driver_exit_code": 0},
        {"submission_id": "b", "driver_exit_code": None},
    ]
    head.was_ready, head._allocation.dashboard = True, Mock(table=Mock(side_effect=[rows, _AWAY]))
    head._allocation.keep_table()
    publish, seen = head.folder.publish_end, []

    def published(end: RunEnd) -> RunEnd:
        seen.extend(os.listdir(kept))
        return publish(end)

    head.folder.publish_end = published
    head.leave(RunEnd(143, "Slurm's time limit has ended the job"))

    assert seen == ["job-driver-a.log"]
    assert sorted(os.listdir(kept)) == ["job-driver-a.log", "job-driver-b.log"]
