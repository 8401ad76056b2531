"""The host's half of ``warm.py``: asks it for a process for each element, and hears of the ends."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from contextlib import suppress
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ..hosts.workspace import Workspace
from .element import RunningElement
from .warm import PACKET_MAX

#: The program that the task's interpreter runs.
PROGRAM = os.path.join(os.path.dirname(__file__), "warm_program.py")
#: So often in a row it may be killed before an element has begun.
_FALSE_STARTS_MAX = 5


class _Asked(NamedTuple):
    """An element that was asked for and has not begun."""

    element: RunningElement
    message: Dict[str, Any]


class CannotPrepare(Exception):
    """The configuration cannot be imported on this node; the message says why."""


class Forking:
    """One process of ``warm.py`` at a time. It is started again when it was killed.

    An element is asked for again only when its output has no writer any more: then no process of
    it is there, and none can come.

    Args:
        place: of the host.
        elements: path of the elements' file on this node.

    Attributes:
        begun: elements whose process is known since the last look, with its id.
        ended: the processes that have ended since, with their exit codes.
        obstacles: what the imports have begun that a fork does not have, in words.
    """

    def __init__(self, place: Workspace, elements: str) -> None:
        self._place, self._elements = place, elements
        self._log = os.path.join(place.root, "warm.log")
        self._asked: Dict[int, _Asked] = {}
        self._unsent: List[Tuple[int, int]] = []  # keys, and where their output is written
        self._keys = self._false_starts = 0
        self.begun: List[Tuple[RunningElement, int]] = []
        self.ended: List[Tuple[int, int]] = []
        self.obstacles: List[str] = []
        self._start()

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def is_ready(self) -> bool:
        """Whether it has imported everything."""
        return self._is_ready

    @property
    def has_unsent(self) -> bool:
        """Whether it is ready, and has not read all that it was asked for."""
        return self._is_ready and bool(self._unsent)

    def fileno(self) -> int:
        return self._channel.fileno()

    def ask(self, element: RunningElement, message: Dict[str, Any]) -> None:
        """Ask for a process for an element; its output comes through ``element.fd``."""
        self._keys += 1
        read_end, write_end = os.pipe()
        element.fd, element.pid = read_end, -self._keys
        element.asked += 1
        self._asked[self._keys] = _Asked(element, message)
        self._unsent.append((self._keys, write_end))
        self._send()

    def read(self) -> None:
        """Read what the process has said."""
        while True:
            try:
                data = self._channel.recv(PACKET_MAX)
            except ConnectionResetError:
                continue  # it has died with unread orders; what it had said comes after that
            except BlockingIOError:
                break
            if not data:
                break
            self._hear(json.loads(data))
        self._send()  # what it had no room for

    def has_died(self, code: int) -> None:
        """Start another one in the place of the one that was collected.

        Raises:
            CannotPrepare: it fails at its imports, or is killed again and again before an element
                has begun.
        """
        # What it has forked and what says so later ends: else it would run, and unknown.
        self._channel.shutdown(socket.SHUT_RD)
        self.read()
        self._false_starts += 1
        is_killed = code > 128 or self._is_ready or self._was_ready
        if not is_killed or self._false_starts > _FALSE_STARTS_MAX:
            raise CannotPrepare(self._why(code))
        dead = self._channel
        try:
            self._start()
        except OSError as error:
            raise CannotPrepare(f"its process cannot be started again: {error}") from error
        dead.close()

    def ask_again(self, element: RunningElement) -> bool:
        """Ask again for an element that has not begun and whose output has ended."""
        asked = self._asked.pop(-element.pid, None)
        if asked is None:
            return False
        self.ask(element, asked.message)
        return True

    def withdraw(self, element: RunningElement) -> bool:
        """Ask no more for an element; false when the process was asked, and may begin it."""
        for place, (key, write_end) in enumerate(self._unsent):
            if key == -element.pid:
                os.close(write_end)
                del self._unsent[place], self._asked[key]
                return True
        return False

    def close(self) -> None:
        """Let the process end."""
        self._channel.close()
        for _, write_end in self._unsent:
            os.close(write_end)
        self._unsent.clear()

    def _start(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setblocking(False)
        argv = ["python", PROGRAM, "serve", self._elements, str(theirs.fileno())]
        with theirs, open(self._log, "ab") as output:
            self._pid = start_with(theirs, output.fileno(), *self._place.words(argv, {}))
        self._is_ready, self._was_ready = False, False

    def _hear(self, message: Dict[str, Any]) -> None:
        kind = message["at"]
        if kind == "ready":
            self._is_ready, self.obstacles = True, message["obstacles"]
            self._send()
        elif kind == "ended":
            self.ended.append((message["pid"], message["code"]))
        elif message["key"] in self._asked:
            self._false_starts = 0
            self.begun.append((self._asked.pop(message["key"]).element, message["pid"]))

    def _send(self) -> None:
        while self._is_ready and self._unsent:
            key, write_end = self._unsent[0]
            if key in self._asked:
                data = json.dumps({"key": key, **self._asked[key].message}).encode()
                try:
                    socket.send_fds(self._channel, [data], [write_end])
                except BlockingIOError:
                    return  # it reads slowly; there is another turn soon
                except OSError:  # it is dead: the end of the output says that this never began
                    self._is_ready = False
                    self._was_ready = True
            os.close(write_end)
            del self._unsent[0]

    def _why(self, code: int) -> str:
        text = ""
        with suppress(OSError), open(self._log, encoding="utf-8", errors="replace") as file:
            text = file.read()[-4000:].strip()
        return text or f"its process ended with exit code {code}"


def start_with(
    channel: socket.socket, output: int, words: Sequence[str], env: Mapping[str, str], cwd: str
) -> int:
    """Start ``warm.py`` in a session of its own, with its end of a channel; the process id.

    Args:
        channel: that the process gets.
        output: descriptor of what it writes to.
        words: its command.
        env: its variables.
        cwd: its folder.

    Raises:
        OSError: it cannot be started.
    """
    process = subprocess.Popen(
        words,
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=[channel.fileno()],
        start_new_session=True,
    )
    process.returncode = 0  # the host's loop collects it; the object must not
    return process.pid


def result_of(path: str) -> Optional[Any]:
    """The result that an element has left, which is removed; ``None`` when there is none."""
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError):
        return None
    os.remove(path)
    return found
