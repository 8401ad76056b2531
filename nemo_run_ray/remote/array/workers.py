"""Starts the elements of a host in its slots: commands, forked processes, new interpreters."""

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
from .elements_file import Target, applied
from .fork_server import PACKET_MAX

_VISIBLE = "CUDA_VISIBLE_DEVICES"
#: Variables of every element: its index, from 0, which attempt it is, from 1, and their number.
INDEX, ATTEMPT, SIZE = "NEMO_RUN_ARRAY_INDEX", "NEMO_RUN_ATTEMPT", "NEMO_RUN_ARRAY_SIZE"
#: Characters of one element's output that are passed on.
OUTPUT_MAX = 16 * 2**20
#: Characters of its last line that explain a failure.
_LAST_MAX = 200
#: Errors of a node that has no room for another process, or for its descriptors.
_NO_ROOM = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
#: The program that the task's interpreter runs.
PROGRAM = os.path.join(os.path.dirname(__file__), "fork_server.py")
#: Deaths of the fork server in a row, before an element has begun, that are too many.
_FALSE_STARTS_MAX = 5


class Slots:
    """The free slots of a host.

    Args:
        count: of all slots.
        gpus: of one element; a part is a share of a GPU that several slots use.
    """

    def __init__(self, count: int, gpus: float) -> None:
        self._free: List[int] = list(range(count - 1, -1, -1))
        self._gpus = gpus
        visible = os.environ.get(_VISIBLE, "")
        self._devices = visible.split(",") if visible else []

    @property
    def is_free(self) -> bool:
        return bool(self._free)

    def take(self) -> Tuple[int, Dict[str, str]]:
        """A free slot, and the variables of its element."""
        slot = self._free.pop()
        if not self._gpus or not self._devices:
            return slot, {}
        if self._gpus < 1:
            devices = [self._devices[int(slot * self._gpus + 1e-6) % len(self._devices)]]
        else:
            each = int(self._gpus)
            devices = self._devices[slot * each : (slot + 1) * each]
        return slot, {_VISIBLE: ",".join(devices)}

    def give_back(self, slot: int) -> None:
        self._free.append(slot)


class Order(NamedTuple):
    """An attempt that the driver wants to run here, with a value for each target."""

    lease: Lease
    values: List[Any]


class RunningElement:
    """An element in its slot.

    Args:
        order: the driver's.
        slot: its number.
        pid: of its first process; ``None`` until a fork has begun.
        fd: the read end of its output; ``None`` after the output's end.
        code: its exit code, when it could not be started.
        reason: why it could not be started.
    """

    def __init__(
        self,
        order: Order,
        slot: int,
        pid: Optional[int] = None,
        fd: Optional[int] = None,
        code: Optional[int] = None,
        reason: str = "",
    ) -> None:
        self.order, self.slot = order, slot
        self.pid, self.fd = pid, fd
        self.code, self.reason = code, reason
        self.seconds = 0.0
        #: It has ended, and its exit code went to a process that was killed.
        self.is_lost = False
        self._kill_at: Optional[float] = None
        self._began = time.monotonic()
        self._lines = Lines()
        self._passed_on = 0
        self._last = ""

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
        reason = self.reason or describe_exit(self.code or 0)
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


class NoRoomOnNode(Exception):
    """The node has no room for another process now; the message says so with the reason."""


class CannotPrepare(Exception):
    """The configuration cannot be imported on this node; the message says why."""


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

    def restart(self, code: int) -> None:
        """Start another process in the place of one that has died with an exit code.

        Raises:
            CannotPrepare: it fails at its imports, or is killed again and again before an element
                has begun.
        """
        self._false_starts += 1
        if not (code > 128 or self.is_ready) or self._false_starts > _FALSE_STARTS_MAX:
            raise CannotPrepare(self._why(code))
        try:
            self._start()
        except OSError as error:
            raise CannotPrepare(f"its process cannot be started again: {error}") from error

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
            self.pid = _start(self._place.command(argv, {}), output.fileno(), [theirs.fileno()])

    def _why(self, code: int) -> str:
        text = ""
        with suppress(OSError), open(self._log, encoding="utf-8", errors="replace") as file:
            text = file.read()[-4000:].strip()
        return text or f"its process ended with exit code {code}"


class Launcher:
    """Starts the elements of a host.

    Args:
        place: the host's.
        order: the driver's, to prepare.

    Attributes:
        slots: of the host.
        fork_server: the process that forks elements, if one does.

    Raises:
        OSError: the interpreter cannot be started.
    """

    def __init__(self, place: Workspace, order: Mapping[str, Any]) -> None:
        self._place = place
        self._targets = [Target(*target) for target in order["targets"]]
        self._runs: str = order["runs"]
        self._count: int = order["count"]
        self._elements = os.path.join(place.root, "nemo_run", order["elements"])
        self.slots = Slots(order["slots"], order["gpus"])
        self.fork_server: Optional[ForkServer] = None
        if self._runs == "fork":
            self.fork_server = ForkServer(place, self._elements)

    @property
    def can_start(self) -> bool:
        """Whether an element can be started now."""
        return self.slots.is_free and (self.fork_server is None or self.fork_server.is_ready)

    def start(self, order: Order) -> Optional[RunningElement]:
        """Start an element in a free slot; it has ended already when it cannot be started.

        Returns:
            ``None`` when the fork server does not take it now.

        Raises:
            NoRoomOnNode: it can be started later, or on another node.
        """
        slot, variables = self.slots.take()
        element = None
        try:
            element = self._start(order, slot, variables)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            raise NoRoomOnNode(no_room(str(error.strerror))) from error
        finally:
            if element is None:
                self.slots.give_back(slot)
        return element

    def _start(
        self, order: Order, slot: int, variables: Mapping[str, str]
    ) -> Optional[RunningElement]:
        lease, place = order.lease, self._place
        numbers = {INDEX: lease.element, ATTEMPT: lease.attempt, SIZE: self._count}
        env = {**variables, **{name: str(number) for name, number in numbers.items()}}
        argv = place.role.task.argv if self._runs == "command" else []
        task = applied(self._targets, order.values, argv, env)
        if task.argv:
            return self._start_command(order, slot, task.argv, task.env)
        message = {"fields": task.fields, "template": task.template, "result": self._result(lease)}
        if self.fork_server is None:
            argv = ["python", PROGRAM, "once", self._elements, json.dumps(message)]
            return self._start_command(order, slot, argv, task.env)
        element = RunningElement(order, slot)
        message["env"] = place.variables(task.env)
        return element if self.fork_server.ask(element, message) else None

    def _start_command(
        self, order: Order, slot: int, argv: Sequence[str], env: Dict[str, str]
    ) -> RunningElement:
        command = self._place.command(argv, env)
        read_end, write_end = os.pipe()  # ours: what follows the start of a process must not fail
        try:
            return RunningElement(order, slot, _start(command, write_end), read_end)
        except (OSError, ValueError) as error:
            os.close(read_end)
            if getattr(error, "errno", None) in _NO_ROOM:
                raise
            return RunningElement(order, slot, None, None, *explain_start(*command, error))
        finally:
            os.close(write_end)

    def row_of(self, element: RunningElement) -> List[Any]:
        """The row of an element that has ended, for notes and reports; its slot is free again."""
        self.slots.give_back(element.slot)
        row = [*element.lease, element.code, round(element.seconds, 4), element.why()]
        if self._runs != "command":
            result = _take_json(self._result(element.lease))
            row.append(result if element.code == 0 else None)
        return row

    def stop_forking(self) -> None:
        """Let each further element have an interpreter of its own."""
        if self.fork_server is not None:
            self.fork_server.stop()
            self.fork_server = None

    def _result(self, lease: Lease) -> str:
        """The file in which an element leaves its result."""
        return os.path.join(self._place.root, f"result-{lease.element}")


def no_room(reason: str) -> str:
    """A node without room for a process, in words."""
    return f"node {socket.gethostname()} has no room for another process: {reason}"


def _start(
    command: Tuple[Sequence[str], Mapping[str, str], str], output: int, fds: Sequence[int] = ()
) -> int:
    """Start a command in a session of its own; its process id."""
    words, env, cwd = command
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


def _take_json(path: str) -> Any:
    """The value in a file, which is removed; ``None`` when there is none."""
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except (OSError, ValueError):
        return None
    os.remove(path)
    return value
