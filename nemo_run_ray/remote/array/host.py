"""The element host of an array on one node: it starts elements and reports their ends.

It is a process as a replica of a group is one (``hosts/relay.py``), for many commands instead of
one role. Orders and reports are JSON, one a line. Orders: ``prepare``, ``run``, ``cancel``,
``hand_back``, ``end``, ``leave``. Reports: ``prepared``, ``unprepared``, ``obstacles``, ``text``,
``ended``, ``lost``, ``handed_back``, ``idle``, ``failed``.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import time
from collections import deque
from contextlib import suppress
from typing import Any, Deque, Dict, FrozenSet, List, Mapping, NoReturn, Optional, Sequence, Set

from ..hosts.relay import Channel, become_supervised
from ..hosts.workspace import Workspace
from ..node.supervise import (
    ENDING,
    ROUND_S,
    adopt_orphans,
    collect,
    descendants,
    kill,
    signal_all,
    wake_at,
)
from .elements import Lease
from .elements_file import Target, applied
from .notes import Notes, forget
from .workers import NO_ROOM, PROGRAM, ForkServer, Order, RunningElement, slots_of

#: Variables of every element: its index, from 0, which attempt it is, from 1, and their number.
INDEX, ATTEMPT, SIZE = "NEMO_RUN_ARRAY_INDEX", "NEMO_RUN_ATTEMPT", "NEMO_RUN_ARRAY_SIZE"
#: Seconds between two looks for processes that elements have left, and while nothing runs.
_LOOK_S, _IDLE_S = 0.5, 60.0
#: Seconds for a node without room to have some, while nothing runs that may end.
_FULL_S = 10.0
#: Reads of 64 KiB that empty a pipe: a process that hides may write without end.
_PIPE_READS = 16
#: Exit codes of what is ended by SIGTERM and by SIGKILL.
_TERMINATED, _KILLED = 143, 137


def main(argv: Sequence[str]) -> NoReturn:
    """Become a host; ``argv`` is the package's folder and the socket's number."""
    become_supervised(argv, HostProcess)


class HostProcess:
    """One host, in one loop without threads."""

    def __init__(self, end: socket.socket, folder: str) -> None:
        self._channel, self._folder = Channel(end), folder
        self._place: Optional[Workspace] = None
        self._fork_server: Optional[ForkServer] = None
        self._slots: List[Dict[str, str]] = []  # the variables of each that is free
        self._waiting: Deque[Order] = deque()
        self._running: List[RunningElement] = []
        self._orphans = Orphans()
        self._look_at = self._watch_until = 0.0
        self._full_since: Optional[float] = None
        self._may_begin, self._is_ending, self._is_leaving = True, False, False

    def serve(self) -> None:
        """Serve until the actor is gone, or the driver lets this host leave."""
        adopt_orphans()
        wake = wake_at(signal.SIGCHLD, *ENDING)
        while not self._is_leaving:
            ready = self._wait(wake)
            if wake in ready:
                os.read(wake, 4096)
            if self._channel.fileno() in ready:
                orders = self._channel.orders()
                if orders is None:
                    return
                for order in orders:
                    self._obey(order)
            self.step(ready)
            self._channel.send()
        forget(self._order["run_dir"])

    def abandon(self) -> None:
        """Kill what runs, now, and remove the folders; what ends by itself until then is noted."""
        self.note_ends()
        while descendants():
            signal_all(signal.SIGKILL)
            # To find all processes has taken a moment, and elements of one length end together.
            self.note_ends()
            time.sleep(ROUND_S)
        self.note_ends()
        if self._place is not None:
            self._place.remove()
        shutil.rmtree(self._folder, ignore_errors=True)

    def fail(self, words: str) -> None:
        """Report that this process cannot continue."""
        self._channel.report("failed", reason=words)
        self._channel.send_all()

    @property
    def _can_start(self) -> bool:
        is_ready = self._fork_server is None or self._fork_server.is_ready
        return self._may_begin and bool(self._waiting and self._slots) and is_ready

    def _wait(self, wake: int) -> Set[int]:
        """The descriptors that are ready, or have ended."""
        poll = select.poll()
        poll.register(
            self._channel.fileno(), select.POLLIN | select.POLLOUT * self._channel.has_unsent
        )
        fds = [wake] if self._fork_server is None else [wake, self._fork_server.fileno()]
        if not self._channel.is_full:
            fds += [element.fd for element in self._running if element.fd is not None]
        for fd in fds:
            poll.register(fd, select.POLLIN)
        idle_s = _LOOK_S if self._running or time.monotonic() < self._watch_until else _IDLE_S
        is_busy = self._is_ending or self._orphans or self._can_start
        if is_busy or any(element.is_ending for element in self._running):
            idle_s = ROUND_S
        return {fd for fd, _ in poll.poll(idle_s * 1000)}

    # ------------------------------------------------------------------ orders

    def _obey(self, order: Mapping[str, Any]) -> None:
        kind = order["do"]
        if kind == "prepare":
            self._prepare(order)
        elif kind == "run":
            for element, attempt, values in order["elements"]:
                self._waiting.append(Order(Lease(element, attempt), values))
        elif kind == "cancel":
            self.cancel(order["elements"])
        elif kind == "hand_back":
            self._hand_back(order["count"])
        elif kind == "end":
            self._waiting.clear()  # the driver knows what has not been reported
            self._may_begin, self._is_ending = False, True
            for element in self._running:
                element.end_by(time.monotonic() + self._grace_s)
        elif kind == "leave":
            self._is_leaving = True

    def _prepare(self, order: Mapping[str, Any]) -> None:
        self._order, self._place = order, Workspace(order)
        self._grace_s = self._place.role.task.grace_s
        try:
            self._place.prepare(self._folder)
            self._place.begin({})
            self._notes = Notes(order["run_dir"])
            if order["runs"] == "fork":
                self._fork_server = ForkServer(self._place, self._elements)
        except (OSError, ValueError) as error:
            self._cannot_begin(str(error))
            return
        self._slots = slots_of(order["slots"], order["gpus"])
        self._channel.report("prepared")

    def cancel(self, leases: Sequence[Sequence[int]]) -> None:
        """End some, whether they wait or run; those that are not here any more are left alone."""
        wanted = {Lease(*lease) for lease in leases}
        for lease in [order.lease for order in self._waiting if order.lease in wanted]:
            self._cancelled(lease)
        self._waiting = deque(order for order in self._waiting if order.lease not in wanted)
        for element in self._running:
            if element.lease in wanted:
                element.end_by(time.monotonic() + self._grace_s)

    def _hand_back(self, count: int, **values: Any) -> None:
        """Let other hosts have some elements that have not begun here, the last ones first."""
        count = min(count, len(self._waiting))
        leases = [self._waiting.pop().lease for _ in range(count)]
        self._channel.report("handed_back", leases=leases, **values)

    # ------------------------------------------------------------------ starts

    @property
    def _elements(self) -> str:
        assert self._place is not None
        return os.path.join(self._place.root, "nemo_run", self._order["elements"])

    def _result_of(self, lease: Lease) -> str:
        """The file in which an element leaves its result."""
        assert self._place is not None
        return os.path.join(self._place.root, f"result-{lease.element}")

    def _start(self, order: Order) -> bool:
        """Start an element; false when there is no room for it now."""
        self._notes.add(order.lease)
        element = RunningElement(order, self._slots.pop())
        self._running.append(element)
        try:
            has_started = self._begin(element)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            self._is_full(element, str(error.strerror))
            return False
        if not has_started:
            self._unstarted(element)
        return has_started

    def _begin(self, element: RunningElement) -> bool:
        """Start an element; false when the fork server does not take it now.

        Raises:
            OSError: the node has no room for another process.
        """
        place, lease, is_command = self._place, element.lease, self._order["runs"] == "command"
        assert place is not None
        numbers = {INDEX: lease.element, ATTEMPT: lease.attempt, SIZE: self._order["count"]}
        task = applied(
            [Target(*target) for target in self._order["targets"]],
            element.order.values,
            place.role.task.argv if is_command else [],
            {**element.slot, **{name: str(number) for name, number in numbers.items()}},
        )
        message = {"fields": task.fields, "template": task.template}
        message["result"] = self._result_of(lease)
        if task.argv:
            element.start(*place.command(task.argv, task.env))
        elif self._fork_server is None:
            argv = ["python", PROGRAM, "once", self._elements, json.dumps(message)]
            element.start(*place.command(argv, task.env))
        else:
            message["env"] = place.variables(task.env)
            return self._fork_server.ask(element, message)
        return True

    def _unstarted(self, element: RunningElement) -> None:
        """Let an element wait again that no process has begun."""
        self._running.remove(element)
        self._slots.append(element.slot)
        element.close()
        if element.is_ending:
            self._cancelled(element.lease)
        else:
            self._waiting.appendleft(element.order)

    def _is_full(self, element: RunningElement, reason: str) -> None:
        """Let others have what waits, or where nothing runs that may end, try again for a while."""
        self._unstarted(element)
        now = time.monotonic()
        self._full_since = self._full_since or now
        if not self._running and now < self._full_since + _FULL_S:
            time.sleep(ROUND_S)  # a fork server refuses at once
            return
        reason = f"node {socket.gethostname()} has no room for another process: {reason}"
        self._hand_back(len(self._waiting), reason=reason)
        if not self._running:
            self._cannot_begin(reason)

    def _cannot_begin(self, reason: str) -> None:
        self._may_begin = False
        self._channel.report("unprepared", reason=reason)

    # ------------------------------------------------------------------ ends

    def step(self, ready: Set[int]) -> None:
        """Do all that can be done now.

        Args:
            ready: the descriptors that are readable.
        """
        for element in self._running:
            if element.fd in ready:
                self._report_text(element, element.read())
        self._hear()
        self._reap()
        self._end_what_is_over(time.monotonic())
        # Last: what has ended has made room, and nothing else would wake the loop.
        while self._can_start and self._start(self._waiting.popleft()):
            pass
        if self._is_ending and not self._running:
            self._stop_forking()
            if not descendants():
                self._is_ending = False
                self._channel.report("idle")

    def note_ends(self) -> None:
        """Note what has ended by itself: an end by SIGKILL is this process' doing."""
        self._may_begin = False
        self._hear()
        self._reap()
        for element in [element for element in self._running if element.code is not None]:
            self._running.remove(element)
            if element.code != _KILLED:
                self._ended(element)

    def _report_text(self, element: RunningElement, text: str) -> None:
        if text:
            self._channel.report("text", element=element.lease.element, text=text)

    def _hear(self) -> None:
        server = self._fork_server
        if server is None:
            return
        for element, reason in server.hear():
            self._is_full(element, reason)
        if server.obstacles:
            self._channel.report("obstacles", obstacles=server.obstacles)
            self._stop_forking()

    def _stop_forking(self) -> None:
        """Let each further element have an interpreter of its own."""
        if self._fork_server is not None:
            self._fork_server.stop()
            self._fork_server = None

    def _cancelled(self, lease: Lease) -> None:
        self._report_end([*lease, _TERMINATED, 0.0, "cancelled before it began"])

    def _reap(self) -> None:
        running = {element.pid: element for element in self._running}
        server = self._fork_server
        for pid, code in collect():
            if pid in running:
                running[pid].ended(code)
            elif server is not None and pid == server.pid:
                for element in server.died():
                    self._unstarted(element)
                self._fork_server = None
                if self._may_begin:
                    reason = server.restart(code)
                    if reason:
                        self._cannot_begin(reason)
                    else:
                        self._fork_server = server

    def _end_what_is_over(self, now: float) -> None:
        over = [element for element in self._running if element.code is not None]
        if over or now >= self._look_at:
            self._look_at = now + _LOOK_S
            active = [element for element in self._running if element.code is None]
            groups = {element.pid for element in active if element.pid is not None}
            if self._fork_server is not None:
                groups.add(self._fork_server.pid)
            self._orphans.look([element.lease for element in active], groups, now, self._grace_s)
        for element in over:
            if self._orphans.has(element.lease):
                continue  # it has ended when what it has left has
            for _ in range(_PIPE_READS):
                if element.fd is None or not _is_readable(element.fd):
                    break
                self._report_text(element, element.read())
            self._running.remove(element)
            self._watch_until = now + 2 * _LOOK_S  # for what has left its group
            self._ended(element)
        for element in self._running:
            element.kill_late(now)

    def _ended(self, element: RunningElement) -> None:
        self._full_since = None
        self._report_text(element, element.close())
        self._slots.append(element.slot)
        row = [*element.lease, element.code, round(element.seconds, 4), element.why()]
        with suppress(OSError, ValueError), open(self._result_of(element.lease)) as file:
            os.remove(file.name)
            row += [json.load(file)] if element.code == 0 else []
        if element.is_lost:
            self._channel.report("lost", lease=element.lease)
        else:
            self._report_end(row)

    def _report_end(self, row: Sequence[Any]) -> None:
        self._notes.add(row)
        self._channel.report("ended", row=row)


def _is_readable(fd: int) -> bool:
    poll = select.poll()  # select knows descriptors below 1024 only
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


class Orphans:
    """Processes that this host has adopted from elements; they end when the element is over."""

    def __init__(self) -> None:
        self._kill_at: Dict[int, float] = {}
        self._marks: Set[FrozenSet[bytes]] = set()
        self._unmarked: Set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._kill_at or self._unmarked)

    def has(self, lease: Lease) -> bool:
        """Whether the last look has found one of this element, or one that may be.

        A fork shows the environment of the fork server as long as it has started no other program.
        """
        return not self._marks.isdisjoint([_mark_of(lease), frozenset()])

    def look(self, running: Sequence[Lease], groups: Set[int], now: float, grace_s: float) -> None:
        """Find those of elements whose first process has ended, and end them.

        One without a mark must be there at two looks: during an execve no process shows its mark.

        Args:
            running: the elements whose first process has not ended.
            groups: their process groups, and that of the fork server.
            now: the time.
            grace_s: seconds from SIGTERM to SIGKILL.
        """
        active = {_mark_of(lease) for lease in running}
        found: Dict[int, FrozenSet[bytes]] = {}
        for pid in _children():
            if pid not in groups:  # the first processes are most of them
                with suppress(OSError):  # it has ended, or is another user's
                    mark = _mark_in_environment(pid)
                    if mark not in active and os.getpgid(pid) not in groups:
                        found[pid] = mark
        self._marks = set(found.values())
        unmarked = {pid for pid, mark in found.items() if not mark}
        new, self._unmarked = unmarked - self._unmarked - set(self._kill_at), unmarked
        before, self._kill_at = self._kill_at, {}
        trees = [[pid, *descendants(pid)] for pid in found if pid not in new]
        for pid in [pid for tree in trees for pid in tree]:
            self._kill_at[pid] = before.get(pid, now + grace_s)
            if pid not in before:
                kill(pid, signal.SIGTERM)
            elif now >= before[pid]:
                kill(pid, signal.SIGKILL)


def _children() -> List[int]:
    pid = os.getpid()
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        return [int(word) for word in file.read().split()]


def _mark_in_environment(pid: int) -> FrozenSet[bytes]:
    with open(f"/proc/{pid}/environ", "rb") as file:
        rows = file.read().split(b"\0")
    return frozenset(
        row for row in rows if row.startswith((f"{INDEX}=".encode(), f"{ATTEMPT}=".encode()))
    )


def _mark_of(lease: Lease) -> FrozenSet[bytes]:
    """The mark of an element in the environment of its processes: its index and its attempt."""
    return frozenset([f"{INDEX}={lease.element}".encode(), f"{ATTEMPT}={lease.attempt}".encode()])
