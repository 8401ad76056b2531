"""The host's half of ``warm.py stay``: a process for each slot, for one element after another."""

from __future__ import annotations

import json
import os
import signal
import socket
from contextlib import suppress
from functools import partial
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Set

from ..hosts.workspace import Workspace
from ..node.supervise import kill
from .element import RunningElement
from .forking import PROGRAM, start_with
from .progress import Lease
from .starting import explain_failure
from .warm import PACKET_MAX


class Over(NamedTuple):
    """A process has run its element and is there for another one."""

    pid: int
    code: int


class SlotProcesses:
    """The processes of a host's slots. One is started for the first element that a slot gets.

    The first element's output has what the imports print, and it ends as they do when they fail.

    Args:
        place: of the host.
        elements: path of the elements' file on this node.
    """

    def __init__(self, place: Workspace, elements: str) -> None:
        self._place, self._elements = place, elements
        self._of_slot: Dict[int, _SlotProcess] = {}
        self._leaving: Dict[int, float] = {}  # when those are killed that have no more to run
        self._end_by: Optional[float] = None

    @property
    def pids(self) -> Set[int]:
        """Of all that have not been collected."""
        return {process.pid for process in self._of_slot.values()} | set(self._leaving)

    def reading(self) -> Dict[int, int]:
        """The descriptors of what they say, with their process ids."""
        return {process.fileno(): process.pid for process in self._of_slot.values()}

    def start(
        self, lease: Lease, slot: int, variables: Mapping[str, str], message: Mapping[str, Any]
    ) -> RunningElement:
        """Let the process of a slot run an element.

        Args:
            lease: which attempt of which element.
            slot: that it gets; what ran there before has ended.
            variables: of the slot, which are there at the imports.
            message: for ``warm.py``.

        Returns:
            the element; it has ended already when a process cannot be started.

        Raises:
            NoRoomOnNode: it can be started later, or on another node.
        """
        read_end, write_end = os.pipe()
        try:
            process = self._of_slot.get(slot)
            if process is None or not process.ask(message, write_end):
                process = self._begin(slot, variables, write_end)
                process.ask(message, write_end)
        except _CannotStart as error:
            os.close(read_end)
            return RunningElement(lease, slot, 0, None, error.code, error.words)
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        element = RunningElement(lease, slot, process.pid, read_end)
        element.shares_process = True
        return element

    def read(self) -> List[Over]:
        """What has ended since the last look."""
        found = [over for process in self._of_slot.values() for over in process.read()]
        if self._end_by is not None:
            self._let_idle_leave(self._end_by)
        return found

    def has_died(self, pid: int) -> bool:
        """Note that a process was collected; whether its last element had begun.

        What it has said was read before.
        """
        self._leaving.pop(pid, None)
        for slot, process in list(self._of_slot.items()):
            if process.pid == pid:
                process.close()
                del self._of_slot[slot]
                return process.has_begun
        return True

    def end(self, kill_at: float) -> None:
        """Let each process leave once it runs nothing.

        Args:
            kill_at: when those are killed that have not left.
        """
        self._end_by = kill_at
        self._let_idle_leave(kill_at)

    def has_ended(self) -> None:
        """Note that none is left, after ``end``."""
        self._end_by = None

    def kill_late(self, now: float) -> None:
        """Kill those that have not left in time."""
        for pid, kill_at in self._leaving.items():
            if now >= kill_at:
                kill(pid, signal.SIGKILL)

    def _let_idle_leave(self, kill_at: float) -> None:
        for slot, process in list(self._of_slot.items()):
            if process.is_idle:
                process.close()
                del self._of_slot[slot]
                self._leaving[process.pid] = kill_at

    def _begin(self, slot: int, variables: Mapping[str, str], output: int) -> _SlotProcess:
        dead = self._of_slot.pop(slot, None)
        if dead is not None:  # it is collected soon
            dead.close()
        channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel.setblocking(False)
        argv = ["python", PROGRAM, "stay", self._elements, str(theirs.fileno())]
        words, env, cwd = self._place.words(argv, variables)
        with theirs:
            try:
                pid = start_with(theirs, output, words, env, cwd)
            except OSError as error:
                channel.close()
                raise _CannotStart(*explain_failure(words, env, cwd, error)) from error
        self._of_slot[slot] = _SlotProcess(pid, channel)
        return self._of_slot[slot]


class _CannotStart(Exception):
    def __init__(self, code: int, words: str) -> None:
        super().__init__(words)
        self.code, self.words = code, words


class _SlotProcess:
    """One process of a slot.

    Attributes:
        pid: of it and of its group.
        is_idle: it runs nothing.
        has_begun: whether it has the element that it was asked for last.
    """

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid = pid
        self._channel = channel
        self._key = 0
        self.is_idle = self.has_begun = True

    def fileno(self) -> int:
        return self._channel.fileno()

    def close(self) -> None:
        """Let it leave when it runs nothing."""
        self._channel.close()

    def ask(self, message: Mapping[str, Any], output: int) -> bool:
        """Ask for an element; false when the process is dead and has not got it."""
        self._key += 1
        # With the first one the process itself begins: if its imports fail, so has the element.
        self.is_idle, self.has_begun = False, self._key == 1
        data = json.dumps({"key": self._key, **message}).encode()
        try:
            socket.send_fds(self._channel, [data], [output])
        except OSError:
            return False
        return True

    def read(self) -> List[Over]:
        """The end of its element, if it has said it."""
        found = []
        with suppress(BlockingIOError, ConnectionResetError):
            for data in iter(partial(self._channel.recv, PACKET_MAX), b""):
                said = json.loads(data)
                if said["key"] == self._key:
                    self.has_begun = True
                    if said["at"] == "over":
                        self.is_idle = True
                        found.append(Over(self.pid, said["code"]))
        return found
