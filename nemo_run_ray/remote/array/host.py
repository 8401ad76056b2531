"""The element host of an array on one node: it starts elements and reports their ends.

It is a process as a replica of a group is one (``hosts/relay.py``), for many commands instead of
one role. Orders and reports are JSON, one a line. Orders: ``prepare``, ``run``, ``cancel``,
``hand_back``, ``end``, ``leave``. Reports: ``prepared``, ``unprepared``, ``obstacles``, ``text``,
``ended``, ``lost``, ``handed_back``, ``idle``, ``failed``.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import time
from collections import deque
from contextlib import suppress
from typing import (
    Any,
    Deque,
    Dict,
    List,
    Mapping,
    NoReturn,
    Optional,
    Sequence,
    Set,
    Tuple,
)

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
from .notes import Notes, forget
from .workers import (
    ATTEMPT,
    INDEX,
    CannotPrepare,
    Launcher,
    NoRoomOnNode,
    Order,
    RunningElement,
    no_room,
)

#: Seconds between two looks for processes that elements have left, and while nothing runs.
_LOOK_S, _IDLE_S = 0.5, 60.0
#: Reads of 64 KiB that empty a pipe: a process that hides may write without end.
_PIPE_READS = 16
#: Exit codes of what is ended by SIGTERM and by SIGKILL.
_TERMINATED, _KILLED = 143, 137


#: The mark of an element's processes: its index and its attempt.
_Mark = Tuple[str, str]
_NO_MARK: _Mark = ("", "")


class Orphans:
    """Processes that this host has adopted from elements; they end when the element is over.

    Args:
        grace_s: seconds from SIGTERM to SIGKILL.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._kill_at: Dict[int, float] = {}
        self._marks: Set[_Mark] = set()
        self._unmarked: Set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._kill_at or self._unmarked)

    def has(self, lease: Lease) -> bool:
        """Whether the last look has found one of this element, or one that may be.

        A fork shows the environment of the fork server as long as it has started no other program.
        """
        return not self._marks.isdisjoint([_mark_of(lease), _NO_MARK])

    def look(self, running: Sequence[Lease], groups: Set[int], now: float) -> None:
        """Find those of elements whose first process has ended, and end them.

        One without a mark must be there at two looks: during an execve no process shows its mark.

        Args:
            running: the elements whose first process has not ended.
            groups: their process groups, and that of the fork server.
            now: the time.
        """
        active = {_mark_of(lease) for lease in running}
        found: Dict[int, _Mark] = {}
        for pid in _children():
            if pid not in groups:  # the first processes are most of them
                with suppress(OSError):  # it has ended, or is another user's
                    mark = _mark_in_environment(pid)
                    if mark not in active and os.getpgid(pid) not in groups:
                        found[pid] = mark
        self._marks = set(found.values())
        unmarked = {pid for pid, mark in found.items() if mark == _NO_MARK}
        new, self._unmarked = unmarked - self._unmarked - set(self._kill_at), unmarked
        before, self._kill_at = self._kill_at, {}
        trees = [[pid, *descendants(pid)] for pid in found if pid not in new]
        for pid in [pid for tree in trees for pid in tree]:
            self._kill_at[pid] = before.get(pid, now + self._grace_s)
            if pid not in before:
                kill(pid, signal.SIGTERM)
            elif now >= before[pid]:
                kill(pid, signal.SIGKILL)


def _children() -> List[int]:
    pid = os.getpid()
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        return [int(word) for word in file.read().split()]


def _mark_in_environment(pid: int) -> _Mark:
    with open(f"/proc/{pid}/environ", "rb") as file:
        variables = dict(row.split(b"=", 1) for row in file.read().split(b"\0") if b"=" in row)
    index, attempt = (variables.get(name.encode(), b"").decode() for name in (INDEX, ATTEMPT))
    return index, attempt


def _mark_of(lease: Lease) -> _Mark:
    """The mark of an element in the environment of its processes."""
    return str(lease.element), str(lease.attempt)


class RunningElements:
    """All elements of one host.

    Args:
        launcher: starts them.
        notes: of their starts and ends.
        channel: to the driver.
        grace_s: seconds from SIGTERM to SIGKILL.
    """

    def __init__(self, launcher: Launcher, notes: Notes, channel: Channel, grace_s: float) -> None:
        self._launcher = launcher
        self._notes = notes
        self._channel = channel
        self._grace_s = grace_s
        self._waiting: Deque[Order] = deque()
        self._running: List[RunningElement] = []
        self._orphans = Orphans(grace_s)
        self._look_at = self._watch_until = 0.0
        self._may_begin = True

    def __bool__(self) -> bool:
        """Whether one runs, or is being ended."""
        return bool(self._running)

    @property
    def idle_s(self) -> float:
        """Seconds after which ``step`` must be called again."""
        may_start = self._may_begin and bool(self._waiting) and self._launcher.can_start
        if may_start or self._orphans or any(element.is_ending for element in self._running):
            return ROUND_S
        return _LOOK_S if self._running or time.monotonic() < self._watch_until else _IDLE_S

    def descriptors(self) -> List[int]:
        """The descriptors to wait for."""
        running = self._running if not self._channel.is_full else []
        fds = [element.fd for element in running if element.fd is not None]
        server = self._launcher.fork_server
        return fds if server is None else [*fds, server.fileno()]

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
        now = time.monotonic()
        self._end_what_is_over(now)
        # Last: what has ended has made room, and nothing else would wake the host's loop.
        while self._may_begin and self._waiting and self._launcher.can_start:
            if not self._start(self._waiting.popleft()):
                break

    def add(self, rows: Sequence[Sequence[Any]]) -> None:
        """Run elements: index, attempt and values of each."""
        for element, attempt, values in rows:
            self._waiting.append(Order(Lease(element, attempt), values))

    def cancel(self, leases: Sequence[Sequence[int]]) -> None:
        """End some, whether they wait or run; those that are not here any more are left alone."""
        wanted = {Lease(*lease) for lease in leases}
        for lease in [order.lease for order in self._waiting if order.lease in wanted]:
            self._cancelled(lease)
        self._waiting = deque(order for order in self._waiting if order.lease not in wanted)
        for element in self._running:
            if element.lease in wanted:
                element.end_by(time.monotonic() + self._grace_s)

    def hand_back(self, count: int, **values: Any) -> None:
        """Let other hosts have some elements that have not begun here, the last ones first."""
        count = min(count, len(self._waiting))
        leases = [self._waiting.pop().lease for _ in range(count)]
        self._channel.report("handed_back", leases=leases, **values)

    def end(self) -> None:
        """End all, and start none any more."""
        self._waiting.clear()  # the driver knows what has not been reported
        self._may_begin = False
        for element in self._running:
            element.end_by(time.monotonic() + self._grace_s)

    def stop_forking(self) -> None:
        """End the fork server, which may still have the exit codes of elements that run."""
        self._launcher.stop_forking()

    def note_ends(self) -> None:
        """Note what has ended by itself: an end by SIGKILL is this process' doing."""
        self._may_begin = False
        self._hear()
        self._reap()
        for element in [element for element in self._running if element.code is not None]:
            self._running.remove(element)
            if element.code != _KILLED:
                self._ended(element)

    def _start(self, order: Order) -> bool:
        """Start an element; false when there is no room for it now."""
        self._notes.add(order.lease)
        try:
            element = self._launcher.start(order)
        except NoRoomOnNode as error:
            self._waiting.appendleft(order)
            self._is_full(str(error))
            return False
        if element is None:
            self._waiting.appendleft(order)
            return False
        if element.code is not None:
            self._ended(element)
        else:
            self._running.append(element)
        return True

    def _is_full(self, reason: str) -> None:
        """Let others have what waits; where nothing runs that may end, none can begin."""
        self.hand_back(len(self._waiting), reason=reason)
        if not self._running:
            self._cannot_begin(reason)

    def _cannot_begin(self, reason: str) -> None:
        self._may_begin = False
        self._channel.report("unprepared", reason=reason)

    def _report_text(self, element: RunningElement, text: str) -> None:
        if text:
            self._channel.report("text", element=element.lease.element, text=text)

    def _hear(self) -> None:
        server = self._launcher.fork_server
        if server is None:
            return
        for element, reason in server.hear():
            self._unstarted(element)
            self._is_full(no_room(reason))
        if server.obstacles:
            self._channel.report("obstacles", obstacles=server.obstacles)
            self._launcher.stop_forking()

    def _unstarted(self, element: RunningElement) -> None:
        """Let an element wait again that no process has begun."""
        self._running.remove(element)
        self._launcher.slots.give_back(element.slot)
        element.close()
        if element.is_ending:
            self._cancelled(element.lease)
        else:
            self._waiting.appendleft(element.order)

    def _cancelled(self, lease: Lease) -> None:
        row = [*lease, _TERMINATED, 0.0, "cancelled before it began"]
        self._notes.add(row)
        self._channel.report("ended", row=row)

    def _reap(self) -> None:
        running = {element.pid: element for element in self._running}
        server = self._launcher.fork_server
        for pid, code in collect():
            if pid in running:
                running[pid].ended(code)
            elif server is not None and pid == server.pid:
                for element in server.died():
                    self._unstarted(element)
                self._launcher.fork_server = None
                if self._may_begin:
                    try:
                        server.restart(code)
                        self._launcher.fork_server = server
                    except CannotPrepare as error:
                        self._cannot_begin(str(error))

    def _end_what_is_over(self, now: float) -> None:
        over = [element for element in self._running if element.code is not None]
        if over or now >= self._look_at:
            self._look_at = now + _LOOK_S
            active = [element for element in self._running if element.code is None]
            groups = {element.pid for element in active if element.pid is not None}
            server = self._launcher.fork_server
            groups |= set() if server is None else {server.pid}
            self._orphans.look([element.lease for element in active], groups, now)
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
        self._report_text(element, element.close())
        row = self._launcher.row_of(element)
        if element.is_lost:
            self._channel.report("lost", lease=element.lease)
            return
        self._notes.add(row)
        self._channel.report("ended", row=row)


def _is_readable(fd: int) -> bool:
    poll = select.poll()  # select knows descriptors below 1024 only
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def main(argv: Sequence[str]) -> NoReturn:
    """Become a host; ``argv`` is the package's folder and the socket's number."""
    become_supervised(argv, HostProcess)


class HostProcess:
    """One host, in one loop without threads."""

    def __init__(self, end: socket.socket, folder: str) -> None:
        self._channel = Channel(end)
        self._folder = folder
        self._wake = wake_at(signal.SIGCHLD, *ENDING)
        adopt_orphans()
        self._workspace: Optional[Workspace] = None
        self._elements: Optional[RunningElements] = None
        self._run_dir = ""
        self._is_ending = self._is_leaving = False

    def serve(self) -> None:
        """Serve until the actor is gone, or the driver lets this host leave."""
        while not self._is_leaving:
            ready = self._wait()
            if self._channel.fileno() in ready:
                orders = self._channel.orders()
                if orders is None:
                    return
                for order in orders:
                    self._obey(order)
            if self._elements is not None:
                self._elements.step(ready)
            if self._is_ending and not self._elements:
                self._step_ending()
            self._channel.send()
        forget(self._run_dir)

    def abandon(self) -> None:
        """Kill what runs, now, and remove the folders; what ends by itself until then is noted."""
        self._collect()
        while descendants():
            signal_all(signal.SIGKILL)
            # To find all processes has taken a moment, and elements of one length end together.
            self._collect()
            time.sleep(ROUND_S)
        self._collect()
        if self._workspace is not None:
            self._workspace.remove()
        shutil.rmtree(self._folder, ignore_errors=True)

    def fail(self, words: str) -> None:
        """Report that this process cannot continue."""
        self._channel.report("failed", reason=words)
        self._channel.send_all()

    def _step_ending(self) -> None:
        if self._elements is not None:
            self._elements.stop_forking()
        if not descendants():
            self._is_ending = False
            self._channel.report("idle")

    def _collect(self) -> None:
        if self._elements is not None:
            self._elements.note_ends()
        for _ in collect():
            pass

    def _wait(self) -> Set[int]:
        """The descriptors that are ready, or have ended."""
        poll = select.poll()
        has_unsent = select.POLLOUT if self._channel.has_unsent else 0
        poll.register(self._channel.fileno(), select.POLLIN | has_unsent)
        poll.register(self._wake, select.POLLIN)
        idle_s = _IDLE_S
        if self._elements is not None:
            idle_s = self._elements.idle_s
            for fd in self._elements.descriptors():
                poll.register(fd, select.POLLIN)
        if self._is_ending:
            idle_s = ROUND_S
        ready = {fd for fd, _ in poll.poll(idle_s * 1000)}
        if self._wake in ready:
            os.read(self._wake, 4096)
        return ready

    def _obey(self, order: Mapping[str, Any]) -> None:
        kind, elements = order["do"], self._elements
        if kind == "prepare":
            self._prepare(order)
        elif kind == "end":
            self._is_ending = True
            if elements is not None:
                elements.end()
        elif kind == "leave":
            self._is_leaving = True
        elif elements is None:
            return
        elif kind == "run":
            elements.add(order["elements"])
        elif kind == "cancel":
            elements.cancel(order["elements"])
        elif kind == "hand_back":
            elements.hand_back(order["count"])

    def _prepare(self, order: Mapping[str, Any]) -> None:
        self._workspace, self._run_dir = Workspace(order), order["run_dir"]
        try:
            self._workspace.prepare(self._folder)
            self._workspace.begin({})
            notes, launcher = Notes(order["run_dir"]), Launcher(self._workspace, order)
        except (OSError, ValueError) as error:
            self._channel.report("unprepared", reason=str(error))
            return
        grace_s = self._workspace.role.task.grace_s
        self._elements = RunningElements(launcher, notes, self._channel, grace_s)
        self._channel.report("prepared")
