"""The elements that run in the slots of a host, and the process that forks them."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import time
from contextlib import suppress
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ..hosts.workspace import Workspace
from ..node.output import CHUNK_BYTES, Lines
from ..node.supervise import describe_exit, explain_start, kill
from .elements import LOST_CODE, Lease
from .fork_server import PACKET_MAX

_VISIBLE = "CUDA_VISIBLE_DEVICES"
#: Characters of one element's output that are passed on.
OUTPUT_MAX = 16 * 2**20
#: Characters of its last line that explain a failure.
_LAST_MAX = 200
#: Errors of a node that has no room for another process, or for its descriptors.
NO_ROOM = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
#: The program that the task's interpreter runs.
PROGRAM = os.path.join(os.path.dirname(__file__), "fork_server.py")
#: Deaths of the fork server in a row, before an element has begun, that are too many.
_FALSE_STARTS_MAX = 5


def slots_of(count: int, gpus: float) -> List[Dict[str, str]]:
    """The variables of each slot: the GPUs that it has, or the one of which it has a part."""
    devices = os.environ.get(_VISIBLE, "").split(",")
    if not gpus or devices == [""]:
        return [{} for _ in range(count)]
    each = int(gpus)
    shares = (
        devices[slot * each : (slot + 1) * each]
        if each
        else [devices[int(slot * gpus + 1e-6) % len(devices)]]
        for slot in range(count)
    )
    return [{_VISIBLE: ",".join(share)} for share in shares]


class Order(NamedTuple):
    """An attempt that the driver wants to run here, with a value for each target."""

    lease: Lease
    values: List[Any]


class RunningElement:
    """An element in its slot.

    Args:
        order: the driver's.
        slot: the variables of its slot.

    Attributes:
        pid: of its first process; ``None`` until that has begun.
        fd: the read end of its output; ``None`` after the output's end.
        code: its exit code.
        is_lost: it has ended, and its exit code went to a process that was killed.
    """

    def __init__(self, order: Order, slot: Dict[str, str]) -> None:
        self.order, self.slot = order, slot
        self.pid: Optional[int] = None
        self.fd: Optional[int] = None
        self.code: Optional[int] = None
        self.seconds = 0.0
        self.is_lost = False
        self._reason = ""  # why it could not be started
        self._kill_at: Optional[float] = None
        self._began = time.monotonic()
        self._lines = Lines()
        self._passed_on = 0
        self._last = ""

    def start(self, words: Sequence[str], env: Mapping[str, str], cwd: str) -> None:
        """Start its command; one that cannot be started has ended.

        Raises:
            OSError: the node has no room for another process.
        """
        self.fd, write_end = os.pipe()
        try:
            self.pid = _start(words, env, cwd, write_end)
        except (OSError, ValueError) as error:
            if getattr(error, "errno", None) in NO_ROOM:
                raise
            self.code, self._reason = explain_start(words, env, cwd, error)
        finally:
            os.close(write_end)

    @property
    def lease(self) -> Lease:
        return self.order.lease

    def read(self) -> str:
        """The lines that are complete now; ``fd`` is readable."""
        data = b"" if self.fd is None else os.read(self.fd, CHUNK_BYTES)
        return self._limited(self._lines.take(data)) if data else self.close()

    def close(self) -> str:
        """Read no more; the last line, if it has no end."""
        if self.fd is None:
            return ""
        os.close(self.fd)
        self.fd = None
        return self._limited(self._lines.take(b""))

    def ended(self, code: int, is_lost: bool = False) -> None:
        """Note the exit code."""
        self.code, self.is_lost = code, is_lost
        self.seconds = time.monotonic() - self._began

    @property
    def is_ending(self) -> bool:
        """Whether it is being ended, or has ended and is not reported yet."""
        return self._kill_at is not None or self.code is not None

    def end_by(self, kill_at: float) -> None:
        """Send SIGTERM, now or when its process is known; it is killed at ``kill_at``."""
        if self._kill_at is None:
            self._kill_at = kill_at
            self._signal(signal.SIGTERM)

    def has_begun(self, pid: int) -> None:
        """Note the process of a fork."""
        self.pid = pid
        if self._kill_at is not None:
            self._signal(signal.SIGTERM)

    def kill_late(self, now: float) -> None:
        """Kill it when its time is over."""
        if self.code is None and self._kill_at is not None and now >= self._kill_at:
            self._signal(signal.SIGKILL)

    def why(self) -> str:
        """Its end in words, with the last line of its output when it has failed."""
        reason = self._reason or describe_exit(self.code or 0)
        return f"{reason}: {self._last[:_LAST_MAX]}" if self.code and self._last else reason

    def _signal(self, number: int) -> None:
        if self.pid is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def _limited(self, text: str) -> str:
        line = text.rstrip().rpartition("\n")[2].strip()
        self._last = line or self._last
        left = OUTPUT_MAX - self._passed_on
        self._passed_on += len(text)
        if len(text) <= left:
            return text
        if left < 0:
            return ""
        return f"{text[:left]}\nnemo_run_ray: no more of its output is passed on\n"


class ForkServer:
    """The process of ``fork_server.py`` as its host knows it. A killed one is started again.

    Args:
        place: of the host.
        elements: path of the elements' file on this node.

    Attributes:
        pid: of the process.
        is_ready: it has imported everything.
        obstacles: what its imports have begun that a fork does not have, until the host takes it.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, place: Workspace, elements: str) -> None:
        self._place, self._elements = place, elements
        self._channel: socket.socket
        self._log = os.path.join(place.root, "fork_server.log")
        self._asked: Dict[int, RunningElement] = {}  # until their end is known
        self._key = self._false_starts = 0
        self.obstacles: List[str] = []
        self._start()

    def fileno(self) -> int:
        return self._channel.fileno()

    def ask(self, element: RunningElement, message: Dict[str, Any]) -> bool:
        """Ask for a process for an element; false when the server is busy, or has died."""
        read_end, write_end = os.pipe()
        try:
            data = json.dumps({"key": self._key, **message}).encode()
            socket.send_fds(self._channel, [data], [write_end])
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):
            os.close(read_end)
            return False
        finally:
            os.close(write_end)
        element.fd = read_end
        self._asked[self._key] = element
        self._key += 1
        return True

    def hear(self) -> Iterator[Tuple[RunningElement, str]]:
        """Read what the server and its forks say, and note it of their elements.

        Yields:
            An element for which there was no room, and the reason.
        """
        while True:
            try:
                data = self._channel.recv(PACKET_MAX)
            except ConnectionResetError:
                continue  # it has died with unread orders; what it had said comes after that
            except BlockingIOError:
                return
            if not data:
                return
            message = json.loads(data)
            kind, key = message["at"], message.get("key")
            if kind == "ready":
                self.is_ready, self.obstacles = True, message["obstacles"]
            elif kind == "begun":
                self._false_starts = 0
                self._asked[key].has_begun(message["pid"])
            elif kind == "ended":
                element = self._asked.pop(key)
                element.ended(message["code"], is_lost=element.pid is None)
            else:
                yield self._asked.pop(key), message["reason"]

    def died(self) -> List[RunningElement]:
        """Take leave of a process that was collected; its forks that have begun continue.

        The host is their parent now.

        Returns:
            The elements that have not begun, and never will, the last one first.
        """
        self._channel.shutdown(socket.SHUT_RD)  # no fork begins that cannot say so
        unstarted = [element for element, _ in self.hear()]
        for element in self._asked.values():
            if element.pid is None:
                unstarted.append(element)
            elif element.code is None and not os.path.exists(f"/proc/{element.pid}"):
                element.ended(LOST_CODE, is_lost=True)
        self._asked.clear()
        self._channel.close()
        return unstarted[::-1]

    def restart(self, code: int) -> str:
        """Start another process in the place of one that has died with an exit code.

        Returns:
            Why not: it fails at its imports, is killed again and again before an element has begun,
            or cannot be started now.
        """
        self._false_starts += 1
        if not (code > 128 or self.is_ready) or self._false_starts > _FALSE_STARTS_MAX:
            with open(self._log, encoding="utf-8", errors="replace") as file:
                return file.read()[-4000:].strip() or f"its process ended with exit code {code}"
        try:
            self._start()
        except OSError as error:
            return f"its process cannot be started again: {error}"
        return ""

    def stop(self) -> None:
        """End the process; those that it has forked continue."""
        kill(self.pid, signal.SIGTERM)
        self._channel.close()

    def _start(self) -> None:
        self.is_ready = False
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setblocking(False)
        argv = ["python", PROGRAM, "serve", self._elements, str(theirs.fileno())]
        with theirs, open(self._log, "ab") as output:
            command = self._place.command(argv, {})
            self.pid = _start(*command, output.fileno(), [theirs.fileno()])


def _start(
    words: Sequence[str], env: Mapping[str, str], cwd: str, output: int, fds: Sequence[int] = ()
) -> int:
    """Start a command in a session of its own; its process id."""
    # Without a function between fork and exec, Python uses vfork, which is quicker.
    process = subprocess.Popen(
        words,
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=fds,
        start_new_session=True,
    )
    process.returncode = 0  # the host's loop collects it; the object must not
    return process.pid
