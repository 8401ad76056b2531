"""A host of an array on one node: starts elements, or asks the fork server to; reports their ends.

It is a process as a replica of a group is one (``hosts/relay.py``), for many commands instead of
one role. Orders and reports are JSON, one a line. The orders of the driver, and what follows::

    prepare   it makes its run directory, and starts the fork server: prepared or unprepared
    run       it starts the elements when slots are free: text and ended, for each
    cancel    it ends these elements: ended, for each
    end       it ends what runs and starts nothing more: idle, when all processes have ended
    leave     only after idle: it removes its notes and folders, and its process ends: gone

The reports, by whom they are made, and what the driver does::

    prepared    this process            leases elements to it
    unprepared  this process            gives it up: it can start no (more) elements
    obstacles   this process            tells the user why it does not fork
    text        this process            writes the element's output into the job's log
    ended       this process            notes the element's end, or return, in the journal
    idle        this process            lets the elements wait that have not ended; orders leave
    failed      ``hosts/relay.py``      gives it up: an error has ended this process
    gone        the actor's ``Relay``   drops it if it has left, and else gives it up: it was killed
    died        ``hosts/actors.py``     gives it up: the actor is dead; drops one that never came up

A dropped host is done with. What one that was given up has left is ended first, by ``notes.py``.
"""

from __future__ import annotations

import errno
import json
import math
import os
import select
import shutil
import signal
import socket
import subprocess
import time
from collections import deque
from contextlib import suppress
from time import monotonic
from typing import (
    Any,
    Deque,
    Dict,
    Iterator,
    List,
    NoReturn,
    Sequence,
    Set,
    Tuple,
)

from ..end_record import describe_exit
from ..hosts.relay import Channel, become_supervised
from ..hosts.workspace import Workspace
from ..node.output import CHUNK_BYTES, Lines
from ..node.supervise import (
    ENDING,
    ROUND_S,
    adopt_orphans,
    collect,
    descendants,
    explain_start,
    kill,
    signal_all,
    wake_at,
)
from ..spec import Env, Json
from .fork_server import PACKET_MAX
from .notes import Notes, forget

#: The index of an element, and which attempt of it.
Lease = Tuple[int, int]
#: Variables of every element: its index, from 0, which attempt it is, from 1, and their number.
INDEX, ATTEMPT, SIZE = "NEMO_RUN_ARRAY_INDEX", "NEMO_RUN_ATTEMPT", "NEMO_RUN_ARRAY_SIZE"
#: Variable that tells this host whose processes it has adopted.
_MARK = "NEMO_RUN_RAY_ELEMENT"
#: In place of the mark of a process that shows none.
_NO_MARK = b""
_VISIBLE = "CUDA_VISIBLE_DEVICES"
#: Seconds between two looks for processes that elements have left.
_LOOK_S = 0.5
#: Seconds without a start or an end after which waiting elements are returned.
_PATIENCE_S = 10.0
#: Errors of a node that has no room for another process, or for its descriptors.
_NO_ROOM = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
#: Reads that empty a pipe: a process that hides may write without end.
_LAST_READS = 16
#: Exit codes of what is ended by SIGTERM and by SIGKILL.
_TERMINATED, _KILLED = 143, 137
#: Characters of one element's output that are passed on.
OUTPUT_MAX = 16 * 2**20
#: Characters of its last line that explain a failure.
_LAST_MAX = 200
#: The program that the task's interpreter runs.
_PROGRAM = f"{os.path.dirname(__file__)}/fork_server.py"
#: Deaths of the fork server in a row, before an element has begun, that are too many.
_FALSE_STARTS_MAX = 5
#: Elements that the fork server is asked for at a time: its socket has room for as many orders.
_ASKED_MAX = 2


def main(argv: Sequence[str]) -> NoReturn:
    """Become a host; ``argv`` is the package's folder and the socket's number."""
    become_supervised(argv, HostProcess)


class HostProcess:
    """One host, in one loop without threads."""

    def __init__(self, channel: Channel, folder: str):
        self._channel, self._folder = channel, folder
        self._place: Any = None  # a ``Workspace`` from the first order on
        self._fork_server: ForkServer | None = None
        self._slots: List[Dict[str, str]] = []  # the variables of each that is free
        self._waiting: Deque[Tuple[Lease, Json]] = deque()  # with their lines
        self._running: List[RunningElement] = []
        #: Processes that elements have left: when each is killed; infinity before its SIGTERM.
        self._orphans: Dict[int, float] = {}
        self._orphan_marks: Set[bytes] = set()
        self._look_at = self._grace_s = 0.0
        self._may_begin, self._is_ending, self._is_leaving = True, False, False
        self._moved_at = self._start_at = 0.0  # the last end; when the next start may be tried
        self._no_room = ""  # the reason of the last refusal

    def serve(self) -> None:
        """Serve until the actor is gone, or the driver lets this host leave."""
        adopt_orphans()
        wake = wake_at(signal.SIGCHLD, *ENDING)
        while not self._is_leaving:
            ready = self._wait(wake)
            if wake in ready:
                os.read(wake, 4096)
            if self._channel.fileno() in ready:
                orders = self._channel.orders()
                if orders is None:
                    return
                for order in orders:
                    self._obey(order)
            self.step(ready)
            self._channel.send()
        forget(self._order["run_dir"])

    def abandon(self) -> None:
        """Kill what runs, now, and remove the folders; what ends by itself until then is noted."""
        self.note_ends()
        while descendants():
            signal_all(signal.SIGKILL)
            # To find all processes has taken a moment, and elements of one length end together.
            self.note_ends()
            time.sleep(ROUND_S)
        self.note_ends()
        if self._place:
            self._place.remove()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _wait(self, wake: int) -> Set[int]:
        """The descriptors that are ready, or have ended."""
        poll = select.poll()
        writing = select.POLLOUT if self._channel.unsent else 0
        poll.register(self._channel.fileno(), select.POLLIN | writing)
        fds = [wake, *(element.fd for element in self._running if not self._channel.is_full)]
        if self._fork_server:
            fds.append(self._fork_server.fileno())
        for fd in fds:
            if fd is not None:
                poll.register(fd, select.POLLIN)
        ending = [element for element in self._running if element.is_ending]
        is_busy = self._is_ending or self._orphans or ending
        return {fd for fd, _ in poll.poll(1000 * (ROUND_S if is_busy else _LOOK_S))}

    # ------------------------------------------------------------------ orders

    def _obey(self, order: Json) -> None:
        kind, kill_at = order["do"], monotonic() + self._grace_s
        if kind == "prepare":
            self._prepare(order)
        elif kind == "run":
            for index, attempt, line in order["elements"]:
                self._waiting.append(((index, attempt), line))
        elif kind == "cancel":  # those that are not here any more are left alone
            wanted = set(map(tuple, order["elements"]))
            for lease in [lease for lease, _ in self._waiting if lease in wanted]:
                self._report_end(_cancelled(lease))
            self._waiting = deque(row for row in self._waiting if row[0] not in wanted)
            for element in self._running:
                if element.lease in wanted:
                    element.terminate(kill_at)
        elif kind == "end":
            self._waiting.clear()  # the driver knows what has not been reported
            self._may_begin, self._is_ending = False, True
            for element in self._running:
                element.terminate(kill_at)
        elif kind == "leave":
            self._is_leaving = True

    def _prepare(self, order: Json) -> None:
        self._order, self._place = order, Workspace(order)
        self._grace_s = self._place.role.task.grace_s
        try:
            self._place.prepare(self._folder)
            self._place.begin({})
            self._notes = Notes(order["run_dir"])
            self._elements = os.path.join(self._place.root, "nemo_run", order["elements"])
            if order["runs"] in ("auto", "fork"):
                self._fork_server = ForkServer(self._place, self._elements)
        except (OSError, ValueError) as error:
            self._cannot_begin(str(error))
            return
        self._slots = slots_of(order["slots"], order["gpus"])
        self._moved_at = monotonic()
        self._channel.report("prepared")

    def _cannot_begin(self, words: str) -> None:
        self._may_begin = False
        self._channel.report("unprepared", words=words)

    # ------------------------------------------------------------------ starts

    def _start(self, lease: Lease, line: Json) -> None:
        self._notes.add(lease)
        element = RunningElement(lease, line, self._slots.pop())
        self._running.append(element)
        order, place, (index, attempt) = self._order, self._place, lease
        argv: List[str] = line.get("argv") or []
        env = {**element.slot, INDEX: str(index), ATTEMPT: str(attempt), SIZE: str(order["count"])}
        env.update({_MARK: f"{index}/{attempt}", **line.get("env", {})})
        if order["runs"] == "command" and not argv:
            argv = list(place.role.task.argv)
            for field, value in line["values"].items():
                kind, _, part = field.partition(".")
                if kind == "env":
                    env[part] = value
                elif part:
                    argv[order["args_at"] + int(part)] = value
                else:
                    argv[order["args_at"] :] = value
        message = {**line, "result": self._result_of(element)}
        try:
            if argv:
                element.start(*place.command(argv, env))
            elif self._fork_server:
                self._fork_server.ask(element, {**message, "env": place.variables(env)})
            else:
                once = ["python", _PROGRAM, "once", self._elements, json.dumps(message)]
                element.start(*place.command(once, env))
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            self._refused(element, str(error.strerror))

    def _refused(self, element: RunningElement, reason: str) -> None:
        """Let an element wait for which the node has no room."""
        self._unstarted(element)
        now = monotonic()
        if now >= self._start_at + _PATIENCE_S:  # the first refusal for long
            self._moved_at = now
        self._start_at, self._no_room = now + _LOOK_S, reason

    def _unstarted(self, element: RunningElement) -> None:
        """Let an element wait again that no process has begun."""
        self._running.remove(element)
        self._slots.append(element.slot)
        element.close()
        self._notes.add([*element.lease, None])  # it has not begun
        if element.is_ending:
            self._report_end(_cancelled(element.lease))
        else:
            self._waiting.appendleft((element.lease, element.line))

    def _result_of(self, element: RunningElement) -> str:
        """The file in which an element leaves its result."""
        return f"{self._place.root}/result-{element.lease[0]}"

    # ------------------------------------------------------------------ ends

    def step(self, ready: Set[int]) -> None:
        """Do all that can be done now; some descriptors are readable."""
        for element in self._running:
            if element.fd in ready:
                self._report_text(element, element.read())
        self._reap()
        now = monotonic()
        over = [element for element in self._running if element.code is not None]
        if over or now >= self._look_at:
            self._look_at = now + _LOOK_S
            self.end_orphans(now)
        for element in over:
            # An element has ended when what it has left has. A process without a mark may be of any
            # element: a fork shows the fork server's environment until it starts another program.
            if not self._orphan_marks & {mark_of(element.lease), _NO_MARK}:
                self._running.remove(element)
                self._ended(element)
        for element in self._running:
            element.kill_late(now)
        # Last: what has ended has made room, and nothing else would wake the loop.
        while self._may_begin and self._waiting and self._slots and now >= self._start_at:
            if self._fork_server and not self._fork_server.is_free:
                break
            self._start(*self._waiting.popleft())
        self._return_late(now)
        if self._is_ending and not self._running:
            self._stop_forking()
            if not descendants():
                self._is_ending = False
                self._channel.report("idle")

    def _return_late(self, now: float) -> None:
        """Return what waits when nothing has begun or ended for long: other hosts may have it."""
        is_stuck = self._may_begin and self._waiting and (now < self._start_at or not self._slots)
        moved_at = max([self._moved_at, *(one.began for one in self._running if one.pid)])
        if not is_stuck or now < moved_at + _PATIENCE_S:
            return
        for lease, _ in self._waiting:
            self._report_end([*lease, None])
        self._waiting.clear()
        if not self._running:
            name = socket.gethostname()
            self._cannot_begin(f"node {name} has no room for another process: {self._no_room}")

    def note_ends(self) -> None:
        """Note what has ended by itself: an end by SIGKILL is this process' doing."""
        self._may_begin = False
        self._reap()
        for element in [element for element in self._running if element.code is not None]:
            self._running.remove(element)
            if element.code != _KILLED:
                self._ended(element)

    def _report_text(self, element: RunningElement, text: str) -> None:
        if text:
            self._channel.report("text", element=element.lease[0], text=text)

    def _stop_forking(self) -> None:
        """Let each further element have an interpreter of its own."""
        if self._fork_server:
            self._fork_server.stop()
            self._fork_server = None

    def _reap(self) -> None:
        codes = dict(collect())
        server = self._fork_server
        if server:
            # Read messages after collecting exit codes: a fork whose server was killed is collected
            # here, and has reported that it begins before it could end.
            for element, reason in server.hear():
                self._refused(element, reason)
            if server.obstacles and self._order["runs"] == "auto":
                self._channel.report("obstacles", obstacles=server.obstacles)
                self._stop_forking()
            elif server.pid in codes:
                for element in server.died():
                    self._unstarted(element)
                if self._may_begin and (words := server.restart(codes[server.pid])):
                    self._cannot_begin(words)
                if not self._may_begin:
                    self._fork_server = None
        for element in self._running:
            if element.pid in codes and element.code is None:
                element.ended(codes[element.pid])

    def end_orphans(self, now: float) -> None:
        """Find processes of elements whose first one has ended, and end them at the second look.

        At one look it may be a running element's: during an execve no process shows its mark.
        """
        running = [element for element in self._running if element.code is None]
        active = {mark_of(element.lease) for element in running}
        groups = {element.pid for element in running}
        if self._fork_server:
            groups.add(self._fork_server.pid)
        marks: Dict[int, bytes] = {}  # of what is found at this look
        for pid in _children():
            if pid not in groups:  # the first processes are most of them
                with suppress(OSError):  # it has ended, or is another user's
                    mark = _mark_in_environment(pid)
                    if mark not in active and os.getpgid(pid) not in groups:
                        marks[pid] = mark
        self._orphan_marks = set(marks.values())
        to_end: List[int] = []  # complete before the first signal: a dead process has no children
        for pid in marks:
            if pid in self._orphans:
                to_end += [pid, *descendants(pid)]
        orphans = dict.fromkeys(marks, math.inf)
        for pid in to_end:
            kill_at = self._orphans.get(pid, math.inf)
            if kill_at == math.inf:
                kill_at = now + self._grace_s
                kill(pid, signal.SIGTERM)
            elif now >= kill_at:
                kill(pid, signal.SIGKILL)
            orphans[pid] = kill_at
        self._orphans = orphans

    def _ended(self, element: RunningElement) -> None:
        self._report_text(element, element.close())
        self._slots.append(element.slot)
        self._moved_at = monotonic()
        row = [*element.lease, element.code, round(element.seconds, 4), element.why()]
        with suppress(OSError, ValueError), open(self._result_of(element)) as file:
            os.remove(file.name)
            row += [json.load(file)] if element.code == 0 else []
        self._report_end(row)

    def _report_end(self, row: Sequence[Any]) -> None:
        self._notes.add(row)
        self._channel.report("ended", row=row)


def _cancelled(lease: Lease) -> List[Any]:
    return [*lease, _TERMINATED, 0.0, "cancelled before it began"]


def slots_of(count: int, gpus: float) -> List[Dict[str, str]]:
    """The variables of each slot: the GPUs that it has, or the one of which it has a part."""
    devices = os.environ.get(_VISIBLE, "").split(",")
    if not gpus or devices == [""]:
        return [{} for _ in range(count)]
    each = int(gpus)
    shares = (devices[slot * each : (slot + 1) * each] or devices for slot in range(count))
    return [{_VISIBLE: ",".join(share)} for share in shares]


class RunningElement:
    """An element in a slot, with its line of the file and the slot's variables.

    Attributes:
        pid: of its first process; ``None`` until that has begun.
        fd: the read end of its output; ``None`` after the output's end.
    """

    def __init__(self, lease: Lease, line: Json, slot: Dict[str, str]):
        self.lease, self.line, self.slot = lease, line, slot
        self.pid: int | None = None
        self.fd: int | None = None
        self.code: int | None = None
        self.seconds = 0.0
        self._reason = ""  # why it could not be started
        self._kill_at = math.inf
        self.began = monotonic()
        self._lines = Lines()
        self._passed_on = 0
        self._last = ""

    def pipe(self) -> int:
        """Make the pipe of its output; the end to write to."""
        self.fd, write_end = os.pipe()
        os.set_blocking(self.fd, False)
        return write_end

    def start(self, words: Sequence[str], env: Env, cwd: str) -> None:
        """Start its command; one that cannot be started has ended.

        Raises:
            OSError: the node has no room for another process.
        """
        write_end = self.pipe()
        try:
            self.pid = _start(words, env, cwd, write_end)
        except (OSError, ValueError) as error:
            if getattr(error, "errno", None) in _NO_ROOM:
                raise
            self.ended(*explain_start(words, env, cwd, error))
        finally:
            os.close(write_end)

    def read(self) -> str:
        """The lines that are complete now, and at the output's end also the last one.

        Raises:
            BlockingIOError: there is nothing to read.
        """
        if self.fd is None:
            return ""
        data = os.read(self.fd, CHUNK_BYTES)
        if not data:
            os.close(self.fd)
            self.fd = None
        return self._passed(data)

    def _passed(self, data: bytes) -> str:
        """The part of its output that is passed on with this; no data is the output's end."""
        text = self._lines.take(data)
        self._last = text.rstrip().rpartition("\n")[2].strip() or self._last
        is_over = self._passed_on > OUTPUT_MAX
        self._passed_on += len(text)
        if self._passed_on <= OUTPUT_MAX:
            return text
        return "" if is_over else "nemo_run_ray: no more of its output is passed on\n"

    def close(self) -> str:
        """Read what is there; the last lines."""
        text = ""
        with suppress(BlockingIOError):
            for _ in range(_LAST_READS):
                text += self.read()
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
        return text + self._passed(b"")

    def ended(self, code: int, reason: str = "") -> None:
        """Note the exit code, and why it could not be started."""
        self.code, self._reason = code, reason
        self.seconds = monotonic() - self.began

    @property
    def is_ending(self) -> bool:
        """Whether it is being ended, or has ended and is not reported yet."""
        return self._kill_at < math.inf or self.code is not None

    def terminate(self, kill_at: float) -> None:
        """Send SIGTERM, now or when its process is known; it is killed at ``kill_at``."""
        if self._kill_at == math.inf:
            self._kill_at = kill_at
            self._signal(signal.SIGTERM)

    def has_begun(self, pid: int) -> None:
        """Note the process of a fork."""
        self.pid = pid
        if self._kill_at < math.inf:
            self._signal(signal.SIGTERM)

    def kill_late(self, now: float) -> None:
        """Kill it when its time is over."""
        if self.code is None and now >= self._kill_at:
            self._signal(signal.SIGKILL)

    def why(self) -> str:
        """Its end in words, with the last line of its output when it has failed."""
        reason = self._reason or describe_exit(self.code or 0)
        return f"{reason}: {self._last[:_LAST_MAX]}" if self.code and self._last else reason

    def _signal(self, number: int) -> None:
        if self.pid is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)


class ForkServer:
    """The process of ``fork_server.py`` as its host knows it. A killed one is started again.

    Attributes:
        obstacles: what its imports have begun that a fork does not have.
    """

    def __init__(self, place: Workspace, elements: str):
        self._place, self._elements = place, elements
        self._log = f"{place.root}/fork_server.log"
        self._asked: Dict[int, RunningElement] = {}  # by their indices, until they have begun
        self._false_starts = 0
        self._forks: Dict[int, RunningElement] = {}  # that have begun and not ended
        self.obstacles: List[str] = []
        self._start()

    def _start(self) -> None:
        self._is_ready = False
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setblocking(False)
        argv = ["python", _PROGRAM, "serve", self._elements, str(theirs.fileno())]
        with theirs, open(self._log, "ab") as output:
            command = self._place.command(argv, {})
            self.pid = _start(*command, output.fileno(), [theirs.fileno()])

    def fileno(self) -> int:
        return self._channel.fileno()

    @property
    def is_free(self) -> bool:
        """Whether it has imported everything, and can be asked for an element."""
        return self._is_ready and len(self._asked) < _ASKED_MAX

    def ask(self, element: RunningElement, message: Json) -> None:
        """Ask for a process for an element."""
        key, write_end = element.lease[0], element.pipe()
        self._asked[key] = element
        data = json.dumps({"key": key, **message}).encode()
        with suppress(BrokenPipeError, ConnectionResetError):  # it has died, as is heard soon
            socket.send_fds(self._channel, [data], [write_end])
        os.close(write_end)

    def hear(self) -> Iterator[Tuple[RunningElement, str]]:
        """Note what the server and its forks say; an element without room, and the reason."""
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
            if message["at"] == "ready":
                self._is_ready, self.obstacles = True, message["obstacles"]
            elif message["at"] == "full":
                yield self._asked.pop(message["key"]), message["reason"]
            elif message["at"] == "begun":
                self._false_starts = 0
                element = self._forks[message["key"]] = self._asked.pop(message["key"])
                element.has_begun(message["pid"])
            else:  # a fork that was killed early has only an end
                forks = self._forks if message["key"] in self._forks else self._asked
                forks.pop(message["key"]).ended(message["code"])

    def died(self) -> List[RunningElement]:
        """The elements that a dead process was asked for and has not begun, the last one first.

        None of them begins any more; those that have begun continue.
        """
        self._channel.shutdown(socket.SHUT_RD)  # no fork begins that cannot say so
        unstarted = [element for element, _ in self.hear()]
        unstarted += self._asked.values()
        self._asked.clear()
        self._forks.clear()  # this process collects them
        self._channel.close()
        return unstarted[::-1]

    def restart(self, code: int) -> str:
        """Start another process in the place of one that has died with an exit code.

        If it fails at its imports, or is killed again and again before an element has begun, the
        answer is why.
        """
        self._false_starts += 1
        if not (code > 128 or self._is_ready) or self._false_starts > _FALSE_STARTS_MAX:
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


def _start(words: Sequence[str], env: Env, cwd: str, output: int, fds: Sequence[int] = ()) -> int:
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


def _children() -> List[int]:
    pid = os.getpid()
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        return [int(word) for word in file.read().split()]


def _mark_in_environment(pid: int) -> bytes:
    with open(f"/proc/{pid}/environ", "rb") as file:
        rows = file.read().split(b"\0")
    return next((row for row in rows if row.startswith(f"{_MARK}=".encode())), _NO_MARK)


def mark_of(lease: Lease) -> bytes:
    """The mark of an element in the environment of its processes."""
    return f"{_MARK}={lease[0]}/{lease[1]}".encode()
