"""A node that has no room for another process: its elements wait, and others may have them."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from nemo_run_ray.remote.array import cleanup, fork_server, host, workers
from nemo_run_ray.remote.array.elements import LOST_CODE, Lease
from nemo_run_ray.remote.array.host import RunningElements
from nemo_run_ray.remote.array.workers import Forking, Launcher, NoRoomOnNode, Order, Slots

FIRST = Order(Lease(0, 1), [])


# ---------------------------------------------------------------------- the host


@pytest.fixture
def place() -> SimpleNamespace:
    task = SimpleNamespace(argv=["true"])
    role = SimpleNamespace(task=task)
    return SimpleNamespace(role=role, words=lambda words, env: (list(words), dict(env), "/"))


@pytest.fixture
def launcher(place) -> Launcher:
    """Of commands, with one slot."""
    made = Launcher.__new__(Launcher)
    made.slots, made.forking = Slots(1, 0.0), None
    made._place, made._targets, made._runs, made._count = place, [], "command", 2
    return made


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
    """Before it says that it can run nothing: what it has then counts as begun."""
    refused = NoRoomOnNode("node n1 has no room for another process: x")

    def start(order: Order) -> None:
        raise refused

    monkeypatch.setattr(launcher, "start", start)
    reports: list[tuple[str, dict[str, object]]] = []
    channel = SimpleNamespace(report=lambda kind, **values: reports.append((kind, values)))
    notes = SimpleNamespace(begins=lambda *lease: None)
    elements = RunningElements(launcher, notes, channel, 1.0)
    elements.add([[0, 1, []]])

    if not something_runs:
        elements._start_waiting()
        assert reports == [], "it is tried again for a while"
        monkeypatch.setattr(host, "_FULL_S", 0.0)
    else:
        elements._running[7] = workers.RunningElement(Lease(5, 1), 0, 7, None)
    elements._start_waiting()

    handed_back = ("handed_back", {"leases": [(0, 1)], "words": str(refused)})
    refusal = ("unprepared", {"words": str(refused)})
    assert reports == ([handed_back] if something_runs else [handed_back, refusal])
    assert elements._cannot_begin is not something_runs


# ---------------------------------------------------------------------- forks


def test_a_fork_is_tried_again_while_an_element_runs_that_may_make_room(monkeypatch):
    here, there = socket.socketpair()
    found, tried = [None, None, here], []
    monkeypatch.setattr(fork_server, "_fork", lambda *_: tried.append(1) or found[len(tried) - 1])
    monkeypatch.setattr(fork_server, "_collect", lambda channel: True)
    monkeypatch.setattr(fork_server, "_ROUND_S", 0.0)
    with here, there:
        assert fork_server._fork_soon(there, None) is here
    assert len(tried) == 3


def test_the_end_of_an_element_is_followed_by_another_try(monkeypatch):
    here, there = socket.socketpair()
    found, children = [None, None, here], [True, False]
    monkeypatch.setattr(fork_server, "_fork", lambda *_: found.pop(0))
    monkeypatch.setattr(fork_server, "_collect", lambda channel: children.pop(0))
    monkeypatch.setattr(fork_server, "_ROUND_S", 0.2)
    monkeypatch.setattr(fork_server, "_ROOM_S", 0.3)
    with here, there:
        assert fork_server._fork_soon(there, None) is here


def test_where_nothing_runs_the_process_ends_that_cannot_fork(monkeypatch):
    monkeypatch.setattr(fork_server, "_fork", lambda *_: None)
    monkeypatch.setattr(fork_server, "_collect", lambda channel: False)
    monkeypatch.setattr(fork_server, "_ROOM_S", 0.0)
    with pytest.raises(SystemExit, match="no room for another process"):
        fork_server._fork_soon(None, None)


def test_a_fork_that_fails_leaves_no_descriptor(monkeypatch):
    def refuse() -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "fork", refuse)
    assert fork_server._fork(None, None) is None
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def forking() -> Iterator[Forking]:
    """One whose process is not there; the test says what it says."""
    made = Forking.__new__(Forking)
    made._channel, made.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made._channel.setblocking(False)
    made._asked, made._unsent, made._is_ready = {}, [], True
    made.begun, made.ended = [], []
    yield made
    made._channel.close()
    made.theirs.close()


def test_what_a_process_has_said_is_heard_though_it_died_with_unread_orders(forking):
    """Linux then has an error before the data."""
    forking._channel.send(b"an order that nobody reads")
    forking.theirs.send(json.dumps({"at": "ended", "pid": 7, "code": 3}).encode())
    forking.theirs.close()
    forking.read()
    assert forking.ended == [(7, 3)]


class TestAskingAgain:
    @pytest.fixture
    def element(self) -> workers.RunningElement:
        return workers.RunningElement(Lease(0, 1), 0, -1, None)

    def test_where_nothing_forks_any_more_the_element_is_for_another_process(
        self, launcher, element
    ):
        launcher.ask_again(element, {-1: element})
        assert element.is_lost
        assert element.code == LOST_CODE

    def test_an_element_that_kills_each_process_before_it_begins_has_failed(
        self, launcher, element, forking
    ):
        launcher.forking, element.asked = forking, 20
        launcher.ask_again(element, {-1: element})
        assert not element.is_lost
        assert element.code == LOST_CODE
        assert element.why() == "each of 20 processes has died before the element began"


def test_what_had_begun_when_its_parent_was_killed_is_known_at_once(launcher, forking, monkeypatch):
    """Else its end would be nobody's, or it would be ended as an orphan."""
    element = workers.RunningElement(Lease(0, 1), 0, -1, None)
    monkeypatch.setattr(Forking, "pid", 100)
    monkeypatch.setattr(forking, "has_died", lambda code: forking.begun.append((element, 7)), False)
    launcher.forking, known = forking, {-1: element}
    assert launcher.has_died(100, 137, known)
    assert known == {7: element}


def test_a_result_of_an_element_that_has_failed_is_none(launcher, place, tmp_path):
    launcher._runs, place.root = "fork", str(tmp_path)
    for code, row in ((143, [0, 1, 143]), (0, [0, 1, 0])):
        (tmp_path / "result-0").write_text("[1, 2]")
        launcher.slots.take()
        element = workers.RunningElement(Lease(0, 1), 0, 7, None)
        element.ended(code)
        found = launcher.row_of(element)
        assert found[:3] == row
        assert found[-1] == (None if code else [1, 2])
        assert not (tmp_path / "result-0").exists()


def test_a_process_without_a_mark_is_an_orphan_at_the_second_look(monkeypatch):
    """At the first one it may be an element of which the host has not heard yet."""
    seen = {7: ("", ""), 8: ("3", "1")}
    killed: list[int] = []
    monkeypatch.setattr(cleanup, "_orphans", lambda groups, active: dict(seen))
    monkeypatch.setattr(cleanup, "kill", lambda pid, number: killed.append(pid))
    found = cleanup.Orphans(1.0)
    found.look([], set())
    assert killed == [8]
    assert found.of(Lease(5, 1)), "it may be this one's"
    del seen[8]
    found.look([], set())
    assert killed == [8, 7]
    seen.clear()
    found.look([], set())
    assert not found.are_there
