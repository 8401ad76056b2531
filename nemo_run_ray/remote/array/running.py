"""The elements that a host has: those that wait for a slot, run, or are being ended."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Deque, Dict, List, Optional, Sequence, Set

from ..hosts.relay import Channel
from ..node.supervise import ROUND_S, collect
from .element import KILLED, RunningElement
from .forking import CannotPrepare
from .launcher import Launcher
from .notes import Notes
from .orphans import Orphans
from .progress import Lease
from .starting import NoRoomOnNode, Order

#: Seconds between two looks for processes that elements have left.
_LOOK_S = 0.5
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
        self._is_ending = self._cannot_begin = False

    @property
    def are_there(self) -> bool:
        """Whether one runs, or is being ended."""
        return bool(self._running)

    @property
    def patience_s(self) -> Optional[float]:
        """Seconds after which ``go_on`` must be called again; ``None`` when nothing is there."""
        is_near = self._is_ending or self._launcher.has_unsent or self._orphans.are_there
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
            if element.fd is None:
                self._ended(element)
            else:
                self._running[element.pid] = element

    def _is_full(self, words: str) -> None:
        """Let others have what waits; where nothing runs that may end, begin nothing any more."""
        self._channel.report("handed_back", leases=self._take_back(len(self._waiting)), words=words)
        if not self._running:
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
