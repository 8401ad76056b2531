"""The slots of a host, and a node that has no room for another process."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
from types import SimpleNamespace

import pytest

from nemo_run_ray.remote.array import host as host_module
from nemo_run_ray.remote.array.elements import Lease
from nemo_run_ray.remote.array.host import Orphans, RunningElements
from nemo_run_ray.remote.array.workers import (
    ForkServer,
    Launcher,
    NoRoomOnNode,
    Order,
    RunningElement,
    Slots,
)

FIRST = Order(Lease(0, 1), [])
VISIBLE = "CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("devices", "count", "gpus", "found"),
    [
        ("4,5,6,7", 4, 1.0, ["4", "5", "6", "7"]),
        ("4,5,6,7", 2, 2.0, ["4,5", "6,7"]),
        ("GPU-a", 4, 0.25, ["GPU-a"] * 4),
        ("3", 3, 0.3, ["3"] * 3),
        ("0,1", 1, 0.0, [None]),
        ("", 1, 1.0, [None]),
    ],
)
def test_each_slot_has_gpus_of_its_own_or_a_share_of_one(monkeypatch, devices, count, gpus, found):
    monkeypatch.setenv(VISIBLE, devices)
    slots = Slots(count, gpus)
    taken = [slots.take() for _ in range(count)]
    assert [variables.get(VISIBLE) for _, variables in taken] == found
    assert not slots.is_free
    slots.give_back(taken[-1][0])
    assert slots.take() == taken[-1]


@pytest.fixture
def place(tmp_path) -> SimpleNamespace:
    role = SimpleNamespace(task=SimpleNamespace(argv=["true"]))
    command = lambda argv, env: (list(argv), dict(env), "/")  # noqa: E731
    return SimpleNamespace(role=role, command=command, root=str(tmp_path))


@pytest.fixture
def launcher(place) -> Launcher:
    """Of commands, with one slot."""
    order = {"targets": [], "runs": "command", "count": 2, "elements": "x", "slots": 1, "gpus": 0}
    return Launcher(place, order)


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM, errno.EMFILE])
def test_a_full_node_is_no_failure_of_the_element(launcher, monkeypatch, number):
    """Neither is its slot lost, nor a descriptor. As root one cannot make a node that is full."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(subprocess, "Popen", refuse)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(NoRoomOnNode, match=r"node .* has no room for another process: "):
            launcher.start(FIRST)
    assert launcher.slots.is_free
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_program_that_is_not_there_is_the_elements_failure(launcher, place):
    place.role.task.argv = ["/no/such/program"]
    assert launcher.start(FIRST).code == 127


@pytest.mark.parametrize("something_runs", [False, True])
def test_what_waits_on_a_host_that_is_full_is_for_others(launcher, monkeypatch, something_runs):
    """Where nothing runs that may end, none can begin."""
    refused = NoRoomOnNode("node n1 has no room for another process: x")

    def start(order: Order) -> None:
        raise refused

    monkeypatch.setattr(launcher, "start", start)
    monkeypatch.setattr(host_module, "collect", list)
    reports: list[tuple[str, dict[str, object]]] = []
    channel = SimpleNamespace(report=lambda kind, **values: reports.append((kind, values)))
    elements = RunningElements(launcher, SimpleNamespace(add=lambda row: None), channel, 1.0)
    elements.add([[0, 1, []]])
    if something_runs:
        elements._running.append(RunningElement(Order(Lease(5, 1), []), 0, 7))
    elements.step(set())
    handed_back = ("handed_back", {"leases": [(0, 1)], "reason": str(refused)})
    refusal = ("unprepared", {"reason": str(refused)})
    assert reports == ([handed_back] if something_runs else [handed_back, refusal])
    assert elements._may_begin is something_runs


def test_a_result_of_an_element_that_has_failed_is_none(launcher, tmp_path):
    launcher._runs = "fork"
    for code in (143, 0):
        (tmp_path / "result-0").write_text("[1, 2]")
        launcher.slots.take()
        element = RunningElement(FIRST, 0, 7)
        element.ended(code)
        found = launcher.row_of(element)
        assert found[:3] == [0, 1, code]
        assert found[-1] == (None if code else [1, 2])
        assert not (tmp_path / "result-0").exists()


def test_what_a_fork_server_has_said_counts_though_it_was_killed(tmp_path):
    """Also with orders that it has not read. What has not begun then never will."""
    server = ForkServer.__new__(ForkServer)
    server._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server._channel.setblocking(False)
    server._asked, server._key, server._false_starts = {}, 0, 3
    gone = subprocess.Popen(["true"])
    gone.wait()
    ended, lost, runs, unread = (RunningElement(FIRST, slot) for slot in range(4))
    for element in (ended, lost, runs, unread):
        assert server.ask(element, {})
    pids = {0: 7, 1: gone.pid, 2: os.getpid()}
    for key, pid in pids.items():
        theirs.send(json.dumps({"at": "begun", "key": key, "pid": pid}).encode())
    theirs.send(json.dumps({"at": "ended", "key": 0, "code": 3}).encode())
    theirs.close()

    assert server.died() == [unread]

    assert (ended.code, ended.is_lost) == (3, False)
    assert lost.is_lost, "it ended, and nobody knows how"
    assert (runs.pid, runs.code) == (os.getpid(), None)
    for element in (ended, lost, runs, unread):
        element.close()


def test_what_was_cancelled_before_a_fork_has_begun_is_not_asked_for_again(launcher, monkeypatch):
    reports: list[tuple[str, object]] = []
    channel = SimpleNamespace(report=lambda kind, row: reports.append((kind, row[:3])))
    elements = RunningElements(launcher, SimpleNamespace(add=lambda row: None), channel, 1.0)
    asked = [RunningElement(Order(Lease(number, 1), []), 0) for number in range(2)]
    elements._running += asked
    launcher.fork_server = SimpleNamespace(
        pid=100, is_ready=False, obstacles=[], hear=list, died=lambda: asked, restart=lambda _: None
    )
    monkeypatch.setattr(host_module, "collect", lambda: [(100, 137)])
    elements.cancel([[0, 1]])
    elements.step(set())
    assert reports == [("ended", [0, 1, 143])]
    assert [order.lease for order in elements._waiting] == [Lease(1, 1)]


def test_a_process_that_shows_no_mark_at_one_look_is_left_alone(monkeypatch):
    """As during an execve."""
    marks = iter([("", ""), ("0", "1"), ("", ""), ("", "")])
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(host_module, "_children", lambda: [os.getpid()])
    monkeypatch.setattr(host_module, "_mark_in_environment", lambda pid: next(marks))
    monkeypatch.setattr(host_module, "descendants", lambda pid: [])
    monkeypatch.setattr(host_module, "kill", lambda *words: sent.append(words))
    orphans = Orphans(1.0)
    for number in range(3):
        orphans.look([Lease(0, 1)], set(), float(number))
        assert sent == []
        assert bool(orphans) is (number != 1), "what may be one is looked at again soon"
    orphans.look([Lease(0, 1)], set(), 3.0)
    assert sent == [(os.getpid(), signal.SIGTERM)]
