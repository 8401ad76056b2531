"""Starts the elements of a host in its slots: commands, forked processes, new interpreters."""

from __future__ import annotations

import errno
import json
import math
import os
import select
import signal
import socket
import subprocess
import time
from contextlib import suppress
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ..hosts.workspace import Workspace
from ..node.output import CHUNK_BYTES, Lines
from ..node.supervise import describe_exit, explain_start, kill
from .elements import LOST_CODE, Lease
from .elements_file import Applied, Target, applied
from .fork_server import PACKET_MAX

_VISIBLE = "CUDA_VISIBLE_DEVICES"


class Slots:
    """Slots that are free.

    Args:
        count: of all slots.
        gpus: of one element; a part is a share of a GPU that slots have together.
    """

    def __init__(self, count: int, gpus: float) -> None:
        self._free: List[int] = list(range(count - 1, -1, -1))
        self._gpus = gpus
        given = os.environ.get(_VISIBLE, "")
        self._devices = given.split(",") if given else []

    @property
    def is_free(self) -> bool:
        return bool(self._free)

    def take(self) -> Tuple[int, Dict[str, str]]:
        """A free slot, and the variables of what runs in it."""
        slot = self._free.pop()
        return slot, self._variables(slot)

    def give_back(self, slot: int) -> None:
        """Let another element have the slot."""
        self._free.append(slot)

    def _variables(self, slot: int) -> Dict[str, str]:
        if not self._gpus or not self._devices:
            return {}
        if self._gpus < 1:
            own = [self._devices[int(slot * self._gpus + 1e-6) % len(self._devices)]]
        else:
            each = int(self._gpus)
            own = self._devices[slot * each : (slot + 1) * each]
        return {_VISIBLE: ",".join(own)}


#: Variables of every element: its index, from 0, and which attempt it is, from 1.
INDEX, ATTEMPT = "NEMO_RUN_ARRAY_INDEX", "NEMO_RUN_ATTEMPT"
#: Exit code of what was killed.
KILLED = 137
#: Characters of one element's output that are passed on.
OUTPUT_MAX = 16 * 2**20
#: Seconds beyond the grace period until it is said that something does not end.
_STUCK_S = 30.0
#: Characters of its last line that explain a failure.
_LAST_MAX = 200


class RunningElement:
    """An element in its slot.

    Args:
        lease: which attempt of which element.
        slot: where.
        pid: of its first process; a negative number until that is known.
        fd: where its output is read; ``None`` when it could not be started.
        code: its exit code, when it could not be started.
        words: why it could not be started.
    """

    def __init__(
        self,
        lease: Lease,
        slot: int,
        pid: int,
        fd: Optional[int],
        code: Optional[int] = None,
        words: str = "",
    ) -> None:
        self.lease, self.slot = lease, slot
        self.pid, self.fd = pid, fd
        self.code, self.words = code, words
        self._end_by: Optional[float] = None  # when it is killed that was told to end
        self._kill_at: Optional[float] = None  # of what its first process has left
        self.seconds = 0.0
        #: It has ended, and its exit code went to a process that was killed.
        self.is_lost = False
        #: Number of processes that were asked for.
        self.asked = 0
        self._began = time.monotonic()
        self._tell_at = math.inf
        self._lines = Lines()
        self._passed_on = 0
        self._last = ""

    def read(self) -> str:
        """The lines that are complete now; called when there is something to read."""
        if self.fd is None:
            return ""
        data = os.read(self.fd, CHUNK_BYTES)
        if not data:
            os.close(self.fd)
            self.fd = None
        return self._limited(self._lines.take(data))

    def is_readable(self) -> bool:
        """Whether there is output that was not read yet, or its end."""
        if self.fd is None:
            return False
        poll = select.poll()  # select knows descriptors below 1024 only
        poll.register(self.fd, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> str:
        """Read no more; the last line, if it has no end. A process that hides may write on."""
        if self.fd is None:
            return ""
        os.close(self.fd)
        self.fd = None
        return self._limited(self._lines.take(b""))

    def ended(self, code: int) -> None:
        """Note the exit code; the loop has collected the process."""
        now = time.monotonic()
        self.code, self.seconds, self._tell_at = code, now - self._began, now + _STUCK_S

    @property
    def is_ending(self) -> bool:
        """Whether it is being ended, or has ended and is not reported yet."""
        return self._end_by is not None or self.code is not None

    def end_by(self, until: float) -> None:
        """End it: SIGTERM now, or when its process is known.

        Args:
            until: when it is to be killed.
        """
        if self._end_by is None:
            self._end_by = until
            self.signal(signal.SIGTERM)

    def has_begun(self, pid: int) -> None:
        """Note its process, which was not known until now."""
        self.pid = pid
        if self._end_by is not None:
            self.signal(signal.SIGTERM)

    def kill_late(self, now: float) -> None:
        """Kill it when its time is over."""
        if self.is_late(now):
            self.signal(signal.SIGKILL)
            if self.pid > 0 and not os.path.exists(f"/proc/{self.pid}"):
                self.ended(KILLED)  # the process that forked it had its exit code

    def is_late(self, now: float) -> bool:
        """Whether it runs longer than it may."""
        return self.code is None and self._end_by is not None and now >= self._end_by

    def is_alone(self, now: float, grace_s: float) -> bool:
        """Whether its first process, which has ended, has left none; those that it has are ended.

        Args:
            now: the time.
            grace_s: seconds from SIGTERM to SIGKILL.
        """
        if self.pid < 0:  # it never began
            return True
        try:
            os.killpg(self.pid, 0)
        except (ProcessLookupError, PermissionError):
            return True
        if self._kill_at is None:
            self._kill_at = now + grace_s
            self.signal(signal.SIGTERM)
        elif now >= self._kill_at:
            self.signal(signal.SIGKILL)
        return False

    def is_stuck(self, now: float, grace_s: float) -> bool:
        """Whether it is to be said, once, that something does not end that it has left."""
        is_due = now >= self._tell_at + grace_s
        if is_due:
            self._tell_at = math.inf
        return is_due

    def signal(self, number: int) -> None:
        """Send a signal to its processes."""
        if self.pid > 0:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def why(self) -> str:
        """The way it ended, in words, with the last line of its output when it has failed."""
        words = self.words or describe_exit(self.code or 0)
        return f"{words}: {self._last[:_LAST_MAX]}" if self.code and self._last else words

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


#: Of a node that has no room for another process, or for what it needs to be started.
_NO_ROOM = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


class NoRoomOnNode(Exception):
    """The node has no room for another process now; the message says so with the reason."""


class Order(NamedTuple):
    """An element that the driver wants to run here.

    Attributes:
        lease: which attempt of which element.
        values: one for each target.
    """

    lease: Lease
    values: List[Any]


def message_of(place: Workspace, element: int, own: Applied) -> Dict[str, Any]:
    """The order for ``fork_server.py`` to run an element."""
    return {
        "fields": own.fields,
        "env": place.variables(own.env),
        "template": own.template,
        "result": result_path(place, element),
    }


def result_path(place: Workspace, element: int) -> str:
    """The file in which an element leaves its result for the host."""
    return os.path.join(place.root, f"result-{element}")


def start_words(
    place: Workspace, lease: Lease, argv: Sequence[str], slot: int, variables: Dict[str, str]
) -> RunningElement:
    """Start a command for an element, in the place of the task's."""
    words, env, cwd = place.words(argv, variables)
    read_end, write_end = os.pipe()  # ours: what comes after the start of a process must not fail
    try:
        # Without a function between fork and exec, Python uses vfork, which is quicker.
        process = subprocess.Popen(
            words,
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=write_end,
            stderr=write_end,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        os.close(read_end)
        code, why = explain_failure(words, env, cwd, error)
        return RunningElement(lease, slot, 0, None, code, why)
    finally:
        os.close(write_end)
    process.returncode = 0  # the loop collects it; the object must not
    return RunningElement(lease, slot, process.pid, read_end)


def explain_failure(
    words: Sequence[str], env: Dict[str, str], cwd: str, error: Exception
) -> Tuple[int, str]:
    """The exit code of an element whose command could not be started, and why, in words.

    Raises:
        NoRoomOnNode: it is the node's failure, and not the element's.
    """
    if isinstance(error, OSError):
        blame_node(error)
    return explain_start(words, env, cwd, error)


def blame_node(error: OSError) -> None:
    """Raise ``NoRoomOnNode`` when an error says that the node has no room."""
    if error.errno in _NO_ROOM:
        words = f"node {socket.gethostname()} has no room for another process: {error.strerror}"
        raise NoRoomOnNode(words) from error


#: The program that the task's interpreter runs.
PROGRAM = os.path.join(os.path.dirname(__file__), "fork_server.py")
#: So often in a row it may be killed before an element has begun.
_FALSE_STARTS_MAX = 5


class _Asked(NamedTuple):
    """An element that was asked for and has not begun."""

    element: RunningElement
    message: Dict[str, Any]


class CannotPrepare(Exception):
    """The configuration cannot be imported on this node; the message says why."""


class Forking:
    """One process of ``fork_server.py`` at a time. It is started again when it was killed.

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
        self._log = os.path.join(place.root, "fork_server.log")
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
    """Start ``fork_server.py`` in a session of its own, with its end of a channel; the process id.

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


#: How many processes may die that were to become an element.
_ASKED_MAX = 20
#: Variable of every element: how many there are.
SIZE = "NEMO_RUN_ARRAY_SIZE"


class Launcher:
    """Starts the elements of a host.

    Args:
        place: the host's.
        order: the driver's, to prepare.

    Attributes:
        slots: of the host.
        forking: the process that forks elements, if one does.

    Raises:
        OSError: the interpreter cannot be started.
    """

    def __init__(self, place: Workspace, order: Mapping[str, Any]) -> None:
        self._place = place
        self._targets: List[Any] = order["targets"]
        self._runs: str = order["runs"]
        self._count: int = order["count"]
        self._elements = os.path.join(place.root, "nemo_run", order["elements"])
        self.slots = Slots(order["slots"], order["gpus"])
        self.forking: Optional[Forking] = None
        if self._runs == "fork":
            self.forking = Forking(place, self._elements)

    def start(self, order: Order) -> RunningElement:
        """Start an element in a free slot; it has ended already when it cannot be started.

        Raises:
            NoRoomOnNode: it can be started later, or on another node.
        """
        slot, of_slot = self.slots.take()
        try:
            return self._start(order, slot, of_slot)
        except OSError as error:
            self.slots.give_back(slot)
            blame_node(error)
            raise
        except NoRoomOnNode:
            self.slots.give_back(slot)
            raise

    def _start(self, order: Order, slot: int, of_slot: Mapping[str, str]) -> RunningElement:
        env = dict(of_slot)
        env[INDEX], env[SIZE] = str(order.lease.element), str(self._count)
        env[ATTEMPT] = str(order.lease.attempt)
        argv = self._place.role.task.argv if self._runs == "command" else []
        own = applied([Target(*target) for target in self._targets], order.values, argv, env)
        if own.words:
            return start_words(self._place, order.lease, own.words, slot, own.env)
        message = message_of(self._place, order.lease.element, own)
        if self.forking is None:
            env = message.pop("env")
            argv = ["python", PROGRAM, "once", self._elements, json.dumps(message)]
            return start_words(self._place, order.lease, argv, slot, env)
        element = RunningElement(order.lease, slot, 0, None)
        self.forking.ask(element, message)
        return element

    @property
    def can_start(self) -> bool:
        """Whether an element can be started now."""
        return self.slots.is_free and (self.forking is None or self.forking.is_ready)

    def obstacles(self) -> List[str]:
        """Obstacles to a fork that the imports have made; nothing is forked then."""
        if self.forking is None:
            return []
        found, self.forking.obstacles = self.forking.obstacles, []
        if found:
            self.stop_forking()
        return found

    @property
    def has_unsent(self) -> bool:
        """Whether the process that forks is there and has not read all that it was asked for."""
        return self.forking is not None and self.forking.has_unsent

    def withdraw(self, element: RunningElement) -> bool:
        """Ask no more for an element; false when it may have been begun."""
        return self.forking is not None and self.forking.withdraw(element)

    def stop_forking(self) -> None:
        """End the process that forks elements; those that have begun go on."""
        if self.forking is not None:
            kill(self.forking.pid, signal.SIGTERM)
            self.forking.close()
            self.forking = None

    def row_of(self, element: RunningElement) -> List[Any]:
        """The row of an element that has ended, for notes and reports; its slot is free again."""
        self.slots.give_back(element.slot)
        row = [*element.lease, element.code, round(element.seconds, 4), element.why()]
        if self._runs != "command":
            result = result_of(result_path(self._place, element.lease.element))
            row.append(result if element.code == 0 else None)
        return row

    def heard(self, running: Dict[int, RunningElement]) -> None:
        """Read what the process says that forks elements, and note it of those that run.

        Args:
            running: by process id, which is negative until it is known.
        """
        forking = self.forking
        if forking is None:
            return
        forking.read()
        for element, pid in forking.begun:
            if running.pop(element.pid, None) is not None:
                element.has_begun(pid)
                running[pid] = element
        for pid, code in forking.ended:
            if pid in running:
                running[pid].ended(code)
        forking.begun, forking.ended = [], []

    def has_died(self, pid: int, code: int, running: Dict[int, RunningElement]) -> bool:
        """Whether a process that was collected has no exit code of an element to tell.

        When it is the one that forks, another one is started. Its elements have this process as
        their parent now.

        Raises:
            CannotPrepare: it ends again and again before an element has begun.
        """
        if self.forking is None or pid != self.forking.pid:
            return False
        self.heard(running)
        for element in running.values():
            is_here = element.pid < 0 or os.path.exists(f"/proc/{element.pid}")
            if element.code is None and not is_here:
                element.ended(LOST_CODE)
                element.is_lost = True
        try:
            self.forking.has_died(code)
        finally:
            self.heard(running)  # of what it forked last: it must not be taken for an orphan
        return True

    def ask_again(self, element: RunningElement, running: Dict[int, RunningElement]) -> None:
        """An element's output has ended before a process said that it is the element's."""
        self.heard(running)
        if element.pid >= 0:
            return
        if self.forking is None:  # given up meanwhile: another process is to run it
            element.ended(LOST_CODE)
            element.is_lost = True
        elif element.asked >= _ASKED_MAX:
            element.words = f"each of {element.asked} processes has died before the element began"
            element.ended(LOST_CODE)
        else:
            del running[element.pid]
            self.forking.ask_again(element)
            running[element.pid] = element
