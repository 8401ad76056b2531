"""A host of elements on its node: starts them in its slots, passes their output on, says their end.

It is a process as a replica of a group is one (``hosts/relay.py``), for many commands instead of
one role. Orders and reports are JSON, one a line. Orders: ``prepare``, ``sweep``, ``run``,
``cancel``, ``hand_back``, ``end``, ``forget``. Reports: ``prepared``, ``unprepared``,
``obstacles``, ``swept``, ``unswept``, ``text``, ``ended``, ``lost``, ``handed_back``, ``idle``,
``failed``.
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import socket
import time
from collections import deque
from typing import Any, Deque, Dict, List, Mapping, NoReturn, Optional, Sequence, Set, Tuple

from ..hosts.relay import Channel, stay
from ..hosts.workspace import Workspace
from ..node.supervise import ENDING, ROUND_S, Tree, collect, wake_at
from .cleanup import Notes, Orphans, Sweepings, forget
from .elements import Lease
from .workers import KILLED, CannotPrepare, Launcher, NoRoomOnNode, Order, RunningElement


class Watcher:
    """The descriptors that a loop waits for."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._watched: Dict[int, Tuple[Any, int]] = {}

    def wait(self, reading: Mapping[int, Any], writing: Set[int], timeout_s: float) -> Set[int]:
        """Wait for the descriptors, and return those that are ready.

        Args:
            reading: to wait for, each with its owner: a number is another one's after a close.
            writing: those of them that are to be written to as well.
            timeout_s: to wait at most.
        """
        wanted = {
            fd: (owner, selectors.EVENT_READ | (selectors.EVENT_WRITE if fd in writing else 0))
            for fd, owner in reading.items()
        }
        for fd, watched in list(self._watched.items()):
            if wanted.get(fd) != watched:
                self._selector.unregister(fd)
                del self._watched[fd]
        for fd, (owner, events) in wanted.items():
            if fd not in self._watched:
                self._selector.register(fd, events)
                self._watched[fd] = owner, events
        return {key.fd for key, _ in self._selector.select(timeout_s)}


#: Seconds between two looks for processes that elements have left.
_LOOK_S = 0.5
#: Seconds for which a node without room for a process is tried when no element runs there.
_FULL_S = 10.0
#: Reads that empty a pipe, of up to 1 MiB.
_PIPE_READS = 16
#: Exit code of what is ended on request by SIGTERM.
_TERMINATED = 143


class RunningElements:
    """All elements of one host.

    Args:
        launcher: starts them.
        notes: of their ends.
        channel: to the driver.
        grace_s: seconds from SIGTERM to SIGKILL.
    """

    def __init__(self, launcher: Launcher, notes: Notes, channel: Channel, grace_s: float) -> None:
        self._launcher = launcher
        self._notes = notes
        self._channel = channel
        self._grace_s = grace_s
        self._waiting: Deque[Order] = deque()
        self._running: Dict[int, RunningElement] = {}  # by process id
        self._orphans = Orphans(grace_s)
        self._look_at = self._watch_until = 0.0
        self._full_since = 0.0
        self._is_ending = self._cannot_begin = False

    @property
    def are_there(self) -> bool:
        """Whether one runs, or is being ended."""
        return bool(self._running)

    @property
    def patience_s(self) -> Optional[float]:
        """Seconds after which ``go_on`` must be called again; ``None`` when nothing is there."""
        is_near = (
            self._is_ending
            or self._full_since
            or self._launcher.has_unsent
            or self._orphans.are_there
        )
        if is_near or any(element.is_ending for element in self._running.values()):
            return ROUND_S
        return _LOOK_S if self._running or time.monotonic() < self._watch_until else None

    def reading(self) -> Dict[int, Any]:
        """The descriptors of their output, each with its owner."""
        found: Dict[int, Any] = {}
        # With the process: an element that is asked for again may get the same number anew.
        for element in self._running.values() if not self._channel.is_full else ():
            if element.fd is not None:
                found[element.fd] = element, element.asked
        if self._launcher.forking is not None:
            found[self._launcher.forking.fileno()] = self._launcher.forking.pid
        return found

    def go_on(self, ready: Set[int]) -> None:
        """Do all that can be done now.

        Args:
            ready: the descriptors that are readable.
        """
        for element in list(self._running.values()):
            if element.fd in ready:
                self._pass_on(element)
        self._launcher.heard(self._running)
        obstacles = self._launcher.obstacles()
        if obstacles:
            self._channel.report("obstacles", words=obstacles)
        self._reap()
        self._look_after(time.monotonic())
        # Last: what has ended has made room, and nothing else would wake the host's loop.
        if not (self._is_ending or self._cannot_begin):
            self._start_waiting()

    def add(self, rows: Sequence[Sequence[Any]]) -> None:
        """Run elements: index, attempt and values of each."""
        for element, attempt, values in rows:
            self._waiting.append(Order(Lease(element, attempt), values))

    def cancel(self, leases: Sequence[Sequence[int]]) -> None:
        """End some, whether they wait or run; those that are not here any more are left alone."""
        wanted = {Lease(*lease) for lease in leases}
        for lease in [order.lease for order in self._waiting if order.lease in wanted]:
            row = [*lease, _TERMINATED, 0.0, "cancelled before it began"]
            self._notes.ended(row)
            self._channel.report("ended", row=row)
        self._waiting = deque(order for order in self._waiting if order.lease not in wanted)
        for element in self._running.values():
            if element.lease in wanted:
                element.end_by(time.monotonic() + self._grace_s)

    def hand_back(self, count: int) -> None:
        """Let others have so many elements that have not begun here, the last ones first."""
        self._channel.report("handed_back", leases=self._take_back(count))

    def _take_back(self, count: int) -> List[Lease]:
        """Let so many of those that wait never begin here, the last ones first."""
        count = min(count, len(self._waiting))
        return [self._waiting.pop().lease for _ in range(count)]

    def end(self) -> None:
        """End all; ``are_there`` says when that is done."""
        self._waiting.clear()  # the driver knows what has not been reported
        self._is_ending = True
        self._launcher.heard(self._running)
        self._launcher.stop_forking()
        for element in [known for known in self._running.values() if known.pid < 0]:
            del self._running[element.pid]
            element.close()  # should it begin now, it is ended as an orphan
        for element in self._running.values():
            element.end_by(time.monotonic() + self._grace_s)

    def has_ended(self) -> None:
        """Note that nothing is left, after ``end``."""
        self._is_ending = False

    def note_ends(self, are_killed: bool) -> None:
        """Note what ended by itself; with ``are_killed`` an end by SIGKILL is the host's doing."""
        self._launcher.heard(self._running)
        self._reap(are_killed)
        for element in [known for known in self._running.values() if known.code is not None]:
            del self._running[element.pid]
            if not (are_killed and element.code == KILLED):
                self._ended(element)

    def _start_waiting(self) -> None:
        while self._waiting and self._launcher.can_start:
            order = self._waiting.popleft()
            self._notes.begins(*order.lease)
            try:
                element = self._launcher.start(order)
            except NoRoomOnNode as error:
                self._waiting.appendleft(order)
                self._is_full(str(error))
                return
            self._full_since = 0.0
            if element.fd is None:
                self._ended(element)
            else:
                self._running[element.pid] = element

    def _is_full(self, words: str) -> None:
        """Let others have what waits, or where nothing runs that may end, try again for a while."""
        now = time.monotonic()
        self._full_since = self._full_since or now
        is_over = now >= self._full_since + _FULL_S
        if self._running or is_over:
            leases = self._take_back(len(self._waiting))
            self._channel.report("handed_back", leases=leases, words=words)
        if not self._running and is_over:
            self._cannot_begin = True
            self._channel.report("unprepared", words=words)

    def _pass_on(self, element: RunningElement) -> None:
        self._report_text(element, element.read())
        if element.fd is None and element.pid < 0:
            self._launcher.ask_again(element, self._running)

    def _report_text(self, element: RunningElement, text: str) -> None:
        if text:
            self._channel.report("text", element=element.lease.element, text=text)

    def _reap(self, are_killed: bool = False) -> None:
        for pid, code in collect():
            self._orphans.forget(pid)
            try:
                if are_killed or not self._launcher.has_died(pid, code, self._running):
                    known = self._running.get(pid)
                    if known is not None and known.code is None:  # else it has told its end before
                        known.ended(code)
            except CannotPrepare as error:
                self._launcher.forking, self._cannot_begin = None, True
                self._channel.report("unprepared", words=str(error))

    def _look_after(self, now: float) -> None:
        over = [known for known in self._running.values() if known.code is not None]
        if over or now >= self._look_at:
            self._look_at = now + _LOOK_S
            forking = self._launcher.forking
            groups = {*self._running, *([] if forking is None else [forking.pid])}
            active = [known.lease for known in self._running.values() if known.code is None]
            self._orphans.look(active, groups)
        for element in over:
            self._finish(element, now)
        for element in self._running.values():
            element.kill_late(now)
            if element.pid < 0 and element.is_late(now) and self._launcher.withdraw(element):
                element.ended(_TERMINATED)
        self._orphans.kill_late(now)

    def _finish(self, element: RunningElement, now: float) -> None:
        """Report an element whose process has ended, once what it has left has ended too."""
        if not element.is_alone(now, self._grace_s) or self._orphans.of(element.lease):
            if element.is_stuck(now, self._grace_s):
                words = f"what it has left, such as processes of the group {element.pid}"
                self._channel.report("stuck", element=element.lease.element, words=words)
            return
        for _ in range(_PIPE_READS):  # a process that hides may write without end
            if not element.is_readable():
                break
            self._pass_on(element)
        self._report_text(element, element.close())
        del self._running[element.pid]
        self._watch_until = now + 2 * _LOOK_S  # for what has left its group
        self._ended(element)

    def _ended(self, element: RunningElement) -> None:
        row = self._launcher.row_of(element)
        if element.is_lost:
            self._channel.report("lost", lease=element.lease)
            return
        self._notes.ended(row)
        self._channel.report("ended", row=row)


#: Seconds of one turn of the loop when there is nothing to look after.
_IDLE_S = 60.0


def main(argv: Sequence[str]) -> NoReturn:
    """Become a host; ``argv`` is the package's folder and the socket's number."""
    stay(argv, HostProcess)


class HostProcess:
    """One host, in one loop without threads."""

    def __init__(self, end: socket.socket, folder: str) -> None:
        self._channel = Channel(end)
        self._folder = folder
        self._wake = wake_at(signal.SIGCHLD, *ENDING)
        self._tree = Tree()
        self._watcher = Watcher()
        self._workspace: Optional[Workspace] = None
        self._elements: Optional[RunningElements] = None
        self._sweepings = Sweepings()
        self._is_ending = False

    def serve(self) -> None:
        """Serve until the actor is gone."""
        while True:
            ready = self._wait()
            if self._channel.fileno() in ready and not self._obey():
                return
            if self._elements is not None:
                self._elements.go_on(ready)
            self._go_on_ending()
            self._go_on_sweeping()
            self._channel.send()

    def abandon(self) -> None:
        """Kill what runs, now, and remove the folders; what ends by itself until then is noted."""
        self._collect(are_killed=False)
        while self._tree.alive():
            self._tree.signal(signal.SIGKILL)
            # To find all processes has taken a moment, and elements of one length end together.
            self._collect(are_killed=True)
            time.sleep(ROUND_S)
        self._collect(are_killed=True)
        if self._workspace is not None:
            self._workspace.remove()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _collect(self, are_killed: bool) -> None:
        if self._elements is not None:
            self._elements.note_ends(are_killed)
        for _ in collect():
            pass

    def fail(self, words: str) -> None:
        """Report that this process cannot go on."""
        self._channel.report("failed", words=words)
        self._channel.send_all()

    def _wait(self) -> Set[int]:
        reading: Dict[int, Any] = {self._wake: self, self._channel.fileno(): self}
        patience_s = _IDLE_S
        if self._elements is not None:
            reading.update(self._elements.reading())
            patience_s = self._elements.patience_s or _IDLE_S
        if self._is_ending or self._sweepings:
            patience_s = ROUND_S
        writing = {self._channel.fileno()} if self._channel.has_unsent else set()
        ready = self._watcher.wait(reading, writing, patience_s)
        if self._wake in ready:
            os.read(self._wake, 4096)
        return ready

    # ------------------------------------------------------------------ orders

    def _obey(self) -> bool:
        """Carry out what has arrived; ``False`` when the actor is gone."""
        orders = self._channel.orders()
        if orders is None:
            return False
        for order in orders:
            getattr(self, f"_do_{order['do']}")(order)
        return True

    def _do_prepare(self, order: Mapping[str, Any]) -> None:
        self._workspace = Workspace(order)
        try:
            self._workspace.prepare(self._folder)
            self._workspace.begin({})
            notes, launcher = Notes(order["run_dir"]), Launcher(self._workspace, order)
        except (OSError, ValueError) as error:
            self._channel.report("unprepared", words=str(error))
            return
        grace_s = self._workspace.role.task.grace_s
        self._elements = RunningElements(launcher, notes, self._channel, grace_s)
        self._channel.report("prepared")

    def _do_sweep(self, order: Mapping[str, Any]) -> None:
        for number, tag, run_dir in order["hosts"]:
            self._sweepings.add(number, tag, run_dir, time.monotonic())

    def _do_run(self, order: Mapping[str, Any]) -> None:
        if self._elements is not None:
            self._elements.add(order["elements"])

    def _do_cancel(self, order: Mapping[str, Any]) -> None:
        if self._elements is not None:
            self._elements.cancel(order["elements"])

    def _do_hand_back(self, order: Mapping[str, Any]) -> None:
        if self._elements is not None:
            self._elements.hand_back(order["count"])

    def _do_end(self, order: Mapping[str, Any]) -> None:
        self._is_ending = True
        if self._elements is not None:
            self._elements.end()

    def _do_forget(self, order: Mapping[str, Any]) -> None:
        for run_dir in order["run_dirs"]:
            forget(run_dir)

    # ------------------------------------------------------------------ ends

    def _go_on_ending(self) -> None:
        elements = self._elements
        runs = elements is not None and elements.are_there
        if not self._is_ending or runs or self._tree.alive():
            return
        self._is_ending = False
        if elements is not None:
            elements.has_ended()
        self._channel.report("idle")

    def _go_on_sweeping(self) -> None:
        for number, noted, words in self._sweepings.turn(time.monotonic()):
            if noted is None:
                self._channel.report("unswept", host=number, words=words)
            else:
                self._channel.report("swept", host=number, **noted._asdict())
