"""A host of elements on its node: starts them in its slots, passes their output on, says their end.

It is a process as a replica of a group is one (``hosts/relay.py``), for many commands instead of
one role. Orders and reports are JSON, one a line. Orders: ``prepare``, ``sweep``, ``run``,
``cancel``, ``hand_back``, ``end``, ``forget``. Reports: ``prepared``, ``unprepared``,
``obstacles``, ``swept``, ``unswept``, ``text``, ``ended``, ``lost``, ``handed_back``, ``idle``,
``failed``.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from typing import Any, Dict, Mapping, NoReturn, Optional, Sequence, Set

from ..hosts.relay import Channel, stay
from ..hosts.workspace import Workspace
from ..node.supervise import ENDING, ROUND_S, Tree, adopt_orphans, collect, wake_at
from .launcher import Launcher
from .notes import Notes, forget
from .running import RunningElements
from .sweeping import Sweepings
from .watcher import Watcher

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
        self._tree = Tree(0, adopt_orphans())
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
