"""A host of elements on its node: starts them in its slots, passes their output on, says their end.

It is a process as a replica of a group is one (``group/stay.py``), for many commands instead of one
role. Orders and reports are JSON, one a line. Orders: ``prepare``, ``sweep``, ``run``, ``end``,
``forget``. Reports: ``prepared``, ``unprepared``, ``threads``, ``swept``, ``unswept``, ``text``,
``ended``, ``lost``, ``idle``, ``failed``.

What has ended is noted in a file before it is reported. When this process dies, the next host on
the node ends what it has left, and reads the file: then it is known what ran, and nothing runs.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from collections import deque
from typing import Any, Deque, Dict, Mapping, NoReturn, Optional, Sequence, Set

from ..group.channel import Channel
from ..group.stay import stay
from ..group.workspace import Workspace
from ..node.tree import ENDING, ROUND_S, Tree, adopt_orphans, collect, wake_at
from .element import RunningElement
from .forking import CannotPrepare
from .launcher import Launcher
from .notes import Notes, forget
from .orphans import Orphans
from .progress import Lease
from .starting import Order
from .sweeping import Sweepings
from .watcher import Watcher

#: Seconds of one turn of the loop when there is nothing to look after.
_IDLE_S = 60.0
#: Seconds between two looks for processes that elements have left.
_LOOK_S = 0.5
#: Reads that empty a pipe, of up to 1 MiB.
_PIPE_READS = 16


def main(argv: Sequence[str]) -> NoReturn:
    """Become a host; ``argv`` is the package's folder and the socket's number."""
    stay(argv, HostProcess)


class HostProcess:
    """All elements of one host, in one loop without threads."""

    def __init__(self, end: socket.socket, folder: str) -> None:
        self._channel = Channel(end)
        self._folder = folder
        self._wake = wake_at(signal.SIGCHLD, *ENDING)
        self._tree = Tree(0, adopt_orphans())
        self._watcher = Watcher()
        self._workspace: Optional[Workspace] = None
        self._launcher: Optional[Launcher] = None
        self._notes: Optional[Notes] = None
        self._grace_s = 0.0
        self._waiting: Deque[Order] = deque()
        self._running: Dict[int, RunningElement] = {}  # by process id
        self._orphans = Orphans()
        self._sweepings = Sweepings()
        self._look_at = self._watch_until = 0.0
        self._kill_at: Optional[float] = None  # of what runs, after the order to end

    def serve(self) -> None:
        """Serve until the actor is gone."""
        while True:
            ready = self._wait()
            if self._channel.fileno() in ready and not self._obey():
                return
            for element in list(self._running.values()):
                if element.fd in ready:
                    self._pass_on(element)
            if self._launcher is not None:
                self._go_on(self._launcher)
            self._sweep_on()
            self._channel.send()

    def abandon(self) -> None:
        """Kill what runs, now, and remove the folders; what has ended by itself is noted before."""
        if self._launcher is not None:
            self._note_ends(self._launcher)
        while self._tree.alive():
            self._tree.signal(signal.SIGKILL)
            for _ in collect():
                pass
            time.sleep(ROUND_S)
        if self._workspace is not None:
            self._workspace.remove()
        shutil.rmtree(self._folder, ignore_errors=True)

    def fail(self, words: str) -> None:
        """Report that this process cannot go on."""
        self._channel.report("failed", words=words)
        self._channel.send_all()

    def _wait(self) -> Set[int]:
        reading: Dict[int, Any] = {self._wake: self, self._channel.fileno(): self}
        forking = self._launcher.forking if self._launcher is not None else None
        if forking is not None:
            reading[forking.fileno()] = forking.pid
        if not self._channel.is_full:
            # With the process: an element that is asked for again may get the same number anew.
            reading.update(
                {one.fd: (one, one.asked) for one in self._running.values() if one.fd is not None}
            )
        writing = {self._channel.fileno()} if self._channel.has_unsent else set()
        ready = self._watcher.wait(reading, writing, self._patience_s())
        if self._wake in ready:
            os.read(self._wake, 4096)
        return ready

    def _patience_s(self) -> float:
        ends = any(element.code is not None for element in self._running.values())
        if self._launcher is not None and self._launcher.has_unsent:
            return ROUND_S
        if ends or self._orphans.are_there or self._kill_at is not None or self._sweepings:
            return ROUND_S
        is_watched = self._running or time.monotonic() < self._watch_until
        return _LOOK_S if is_watched else _IDLE_S

    def _go_on(self, launcher: Launcher) -> None:
        launcher.heard(self._running)
        if launcher.forking is not None and launcher.forking.threads:
            self._channel.report("threads", names=launcher.forking.threads)
            launcher.forking.threads = []
        self._reap(launcher)
        self._look_after(launcher)
        # Last: what has ended has made room, and nothing else would wake this loop.
        while self._waiting and launcher.slots.is_free and self._kill_at is None:
            element = launcher.start(self._waiting.popleft())
            if element.fd is None:
                self._ended(launcher, element)
            else:
                self._running[element.pid] = element

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
        self._grace_s = self._orphans.grace_s = self._workspace.role.task.grace_s
        try:
            self._workspace.prepare(self._folder)
            self._workspace.begin({})
            self._notes = Notes(order["run_dir"])
            self._launcher = Launcher(self._workspace, order)
        except (OSError, ValueError) as error:
            self._channel.report("unprepared", words=str(error))
            return
        self._channel.report("prepared")

    def _do_sweep(self, order: Mapping[str, Any]) -> None:
        for number, tag, run_dir in order["hosts"]:
            self._sweepings.add(number, tag, run_dir, time.monotonic())

    def _do_run(self, order: Mapping[str, Any]) -> None:
        for element, attempt, values in order["elements"]:
            self._waiting.append(Order(Lease(element, attempt), values))

    def _do_end(self, order: Mapping[str, Any]) -> None:
        self._waiting.clear()  # the driver knows what has not been reported
        self._kill_at = time.monotonic() + self._grace_s
        if self._launcher is not None:
            self._launcher.heard(self._running)
            self._launcher.stop_forking()
        for element in [one for one in self._running.values() if one.pid < 0]:
            del self._running[element.pid]
            element.close()  # should it begin now, it is ended as an orphan
        for element in self._running.values():
            element.signal(signal.SIGTERM)

    def _do_forget(self, order: Mapping[str, Any]) -> None:
        for run_dir in order["run_dirs"]:
            forget(run_dir)

    # ------------------------------------------------------------------ ends

    def _pass_on(self, element: RunningElement) -> None:
        self._report_text(element, element.read())
        if element.fd is None and element.pid < 0 and self._launcher is not None:
            self._launcher.ask_again(element, self._running)

    def _report_text(self, element: RunningElement, text: str) -> None:
        if text:
            self._channel.report("text", element=element.lease.element, text=text)

    def _reap(self, launcher: Launcher) -> None:
        for pid, code in collect():
            self._orphans.forget(pid)
            try:
                if not launcher.has_died(pid, code, self._running) and pid in self._running:
                    self._running[pid].ended(code)
            except CannotPrepare as error:
                launcher.forking = None
                self._channel.report("unprepared", words=str(error))

    def _look_after(self, launcher: Launcher) -> None:
        now = time.monotonic()
        over = [one for one in self._running.values() if one.code is not None]
        if over or now >= self._look_at:
            self._look_at = now + _LOOK_S
            own = launcher.forking.pid if launcher.forking is not None else 0
            running = [one.lease for one in self._running.values() if one.code is None]
            self._orphans.look(running, {*self._running, own})
        for element in over:
            self._finish(launcher, element, now)
        if self._kill_at is not None and now >= self._kill_at:
            for element in self._running.values():
                element.signal(signal.SIGKILL)
                if element.code is None and not os.path.exists(f"/proc/{element.pid}"):
                    element.ended(137)  # the process that forked it had its exit code
        self._orphans.kill_late(now)
        if self._kill_at is not None and not self._running and not self._tree.alive():
            self._kill_at = None
            self._channel.report("idle")

    def _finish(self, launcher: Launcher, element: RunningElement, now: float) -> None:
        """Report an element whose process has ended, once what it has left has ended too."""
        if not element.is_alone(now, self._grace_s) or self._orphans.of(element.lease):
            return
        for _ in range(_PIPE_READS):  # a process that hides may write without end
            if not element.is_readable():
                break
            self._pass_on(element)
        self._report_text(element, element.close())
        del self._running[element.pid]
        self._watch_until = now + 2 * _LOOK_S  # for what has left its group
        self._ended(launcher, element)

    def _note_ends(self, launcher: Launcher) -> None:
        launcher.heard(self._running)
        self._reap(launcher)
        for element in [one for one in self._running.values() if one.code is not None]:
            self._ended(launcher, element)

    def _sweep_on(self) -> None:
        for number, ended, words in self._sweepings.turn(time.monotonic()):
            if ended is None:
                self._channel.report("unswept", host=number, words=words)
            else:
                self._channel.report("swept", host=number, ended=ended)

    def _ended(self, launcher: Launcher, element: RunningElement) -> None:
        row = launcher.row_of(element)
        if element.is_lost:
            self._channel.report("lost", lease=element.lease)
            return
        if self._notes is not None:
            self._notes.add(row)
        self._channel.report("ended", row=row)
