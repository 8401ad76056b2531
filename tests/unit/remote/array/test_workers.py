"""The slots of a host, its elements' ends, and what they leave."""

from __future__ import annotations

import json
import os
import signal
import socket
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from nemo_run_ray.remote.array import host as host_module
from nemo_run_ray.remote.array.host import ForkServer, HostProcess, RunningElement, slots_of

VISIBLE = "CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("devices", "count", "gpus", "found"),
    [
        ("4,5,6,7", 4, 1.0, ["4", "5", "6", "7"]),
        ("4,5,6,7", 2, 2.0, ["4,5", "6,7"]),
        ("GPU-a", 4, 0.25, ["GPU-a"] * 4),
        ("0,1", 1, 0.0, [None]),
        ("", 1, 1.0, [None]),
    ],
)
def test_each_slot_has_gpus_of_its_own_or_a_share_of_one(monkeypatch, devices, count, gpus, found):
    monkeypatch.setenv(VISIBLE, devices)
    assert [slot.get(VISIBLE) for slot in slots_of(count, gpus)] == found


class Reports:
    """Keeps what a host reports."""

    is_full = False

    def __init__(self) -> None:
        self.rows: list[tuple[str, object]] = []

    def report(self, kind: str, **values: object) -> None:
        self.rows.append((kind, values))


@pytest.fixture
def host(tmp_path, monkeypatch) -> HostProcess:
    """A host with one slot that runs commands."""
    made = HostProcess(Reports(), "")
    made._notes, made._grace_s, made._slots = SimpleNamespace(add=lambda row: None), 1.0, [{}]
    made._order = {"args_at": 1, "runs": "command", "count": 2}
    made._place = SimpleNamespace(
        role=SimpleNamespace(task=SimpleNamespace(argv=["true"])),
        command=lambda argv, env: (list(argv), dict(env), "/"),
        root=str(tmp_path),
    )
    monkeypatch.setattr(host_module, "collect", list)
    monkeypatch.setattr(host_module, "_children", list)  # those of pytest are not an element's
    return made


def waiting(host: HostProcess, *elements: int) -> None:
    host._obey({"do": "run", "elements": [[element, 1, {"values": {}}] for element in elements]})


def running(host: HostProcess, element: int) -> RunningElement:
    host._running.append(RunningElement((element, 1), {}, {}))
    return host._running[-1]


def test_a_program_that_is_not_there_is_the_elements_failure(host):
    host._place.role.task.argv = ["/no/such/program"]
    waiting(host, 0)
    host.step(set())
    host.step(set())
    ((kind, values),) = host._channel.rows
    assert (kind, values["row"][:3]) == ("ended", [0, 1, 127])


def test_a_result_of_an_element_that_has_failed_is_none(host, tmp_path):
    for code, result in ((143, []), (0, [[1, 2]])):
        (tmp_path / "result-0").write_text("[1, 2]")
        running(host, 0).ended(code)
        host.step(set())
        _, values = host._channel.rows.pop()
        assert (values["row"][:3], values["row"][5:]) == ([0, 1, code], result)
        assert not (tmp_path / "result-0").exists()


def test_what_a_fork_server_has_said_counts_though_it_was_killed():
    """Also with orders that it has not read. What has not begun then never will."""
    server = ForkServer.__new__(ForkServer)
    server._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server._channel.setblocking(False)
    server._asked, server._forks, server._false_starts = {}, {}, 3
    runs, unread = (RunningElement((index, 1), {}, {}) for index in range(2))
    for element in (runs, unread):
        server.ask(element, {})
    theirs.send(json.dumps({"at": "begun", "key": 0, "pid": 7}).encode())
    theirs.close()

    assert server.died() == [unread]

    assert runs.pid == 7
    for element in (runs, unread):
        os.close(element.fd)


def test_a_fork_server_that_cannot_be_started_again_is_a_reason(monkeypatch):
    server = ForkServer.__new__(ForkServer)
    server._false_starts, server._is_ready = 0, True
    monkeypatch.setattr(server, "_start", Mock(side_effect=BlockingIOError(11, "no room")))
    assert server.restart(137) == "its process cannot be started again: [Errno 11] no room"


def test_a_process_that_shows_no_mark_at_one_look_is_left_alone(host, monkeypatch):
    """As during an execve."""
    marked, none = host_module.mark_of((0, 1)), b""
    marks = iter([none, marked, none, none])
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(host_module, "_children", lambda: [os.getpid()])
    monkeypatch.setattr(host_module, "_mark_in_environment", lambda pid: next(marks))
    monkeypatch.setattr(host_module, "descendants", lambda pid: [])
    monkeypatch.setattr(host_module, "kill", lambda *words: sent.append(words))
    running(host, 0)
    for number in range(3):
        host.end_orphans(float(number))
        assert sent == []
        assert bool(host._orphans) is (number != 1), "what may be one is looked at again soon"
    host.end_orphans(3.0)
    assert sent == [(os.getpid(), signal.SIGTERM)]
