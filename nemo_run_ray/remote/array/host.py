"""A host of elements on its node: starts them in its slots, passes their output on, says their end.

It is a process as a replica of a group is one (``group/stay.py``), for many commands instead of one
role. Orders and reports are JSON, one a line. Orders: ``prepare``, ``sweep``, ``run``, ``end``.
Reports: ``prepared``, ``unprepared``, ``swept``, ``text``, ``ended``, ``idle``, ``failed``.

What has ended is noted in a file before it is reported. When this process dies, the next host on
the node ends what it has left, and reads the file: then it is known what ran, and nothing runs.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import socket
import time
from collections import deque
from contextlib import suppress
from typing import Any, Deque, Dict, List, Mapping, NoReturn, Optional, Sequence, Set, Tuple

from ..group.channel import Channel
from ..group.stay import stay
from ..group.workspace import Workspace
from ..node import command
from ..node.rundir import RunDir, run_dirs
from ..node.tree import ROUND_S, Tree, adopt_orphans, collect, kill, sweep, wake_at
from .element import ATTEMPT, INDEX, RunningElement
from .forking import PROGRAM, CannotPrepare, Forking, result_of
from .progress import Lease
from .slots import Slots
from .starting import Order, message_of, start_command, start_words

#: Seconds of one turn of the loop when there is nothing to look after.
_IDLE_S = 60.0
#: Seconds between two looks for processes that elements have left.
_LOOK_S = 0.5


def main(argv: Sequence[str]) -> NoReturn:
    """Become a host; ``argv`` is the package's folder and the socket's number."""
    stay(argv, HostProcess)


def notes_path(run_dir: str) -> str:
    """The file in which a host notes what has ended, beside its run directory."""
    return os.path.join(run_dirs(command.tmpdir()), f"{run_dir}.ended")


class HostProcess:
    """All elements of one host, in one loop without threads."""

    def __init__(self, end: socket.socket, folder: str) -> None:
        self._channel = Channel(end)
        self._folder = folder
        self._wake = wake_at(signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        self._tree = Tree(0, adopt_orphans())
        self._workspace: Optional[Workspace] = None
        self._waiting: Deque[Order] = deque()
        self._running: Dict[int, RunningElement] = {}  # by process id
        self._leaving: Dict[int, float] = {}  # when SIGKILL comes, by the group of what was left
        self._forking: Optional[Forking] = None
        self._notes: Optional[Any] = None
        self._look_at = 0.0
        self._kill_at: Optional[float] = None
        self._is_ending = False
        self._runs, self._elements, self._count = "command", "", 0
        self._targets: List[Any] = []
        self._selector = selectors.DefaultSelector()
        self._watched: Dict[int, Tuple[int, Any]] = {}

    def serve(self) -> None:
        """Serve until the actor is gone."""
        while True:
            ready = self._wait()
            if self._channel.fileno() in ready and not self._obey():
                return
            for element in list(self._running.values()):
                if element.fd in ready:
                    self._pass_on(element)
            if self._forking is not None and self._forking.fileno() in ready:
                self._hear(self._forking)
            self._reap()
            self._look_after()
            self._fill()  # last: what has ended has made room, and nothing else would wake us
            self._channel.send()

    def abandon(self) -> None:
        """Kill what runs, now, and remove the folders."""
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
        sending = selectors.EVENT_WRITE if self._channel.has_unsent else 0
        reading: List[Tuple[int, Any]] = [(self._wake, self)]
        if self._forking is not None:
            reading.append((self._forking.fileno(), self._forking))
        if not self._channel.is_full:
            for element in self._running.values():
                if element.fd is not None:
                    reading.append((element.fd, element))
        wanted = {fd: (selectors.EVENT_READ, owner) for fd, owner in reading}
        wanted[self._channel.fileno()] = selectors.EVENT_READ | sending, self
        for fd, watched in list(self._watched.items()):
            if wanted.get(fd) != watched:  # also one whose number another one has now
                self._selector.unregister(fd)
                del self._watched[fd]
        for fd, (events, owner) in wanted.items():
            if fd not in self._watched:
                self._selector.register(fd, events)
                self._watched[fd] = events, owner
        ready = {key.fd for key, _ in self._selector.select(self._patience_s())}
        if self._wake in ready:
            os.read(self._wake, 4096)
        return ready

    def _patience_s(self) -> float:
        if self._leaving or self._kill_at is not None:
            return ROUND_S
        if any(element.code is not None for element in self._running.values()):
            return ROUND_S
        return _LOOK_S if self._running else _IDLE_S

    # ------------------------------------------------------------------ orders

    def _obey(self) -> bool:
        """Carry out what has arrived; ``False`` when the actor is gone."""
        orders = self._channel.orders()
        if orders is None:
            return False
        for order in orders:
            {"prepare": self._prepare, "sweep": self._sweep, "run": self._run, "end": self._end}[
                order["do"]
            ](order)
        return True

    def _prepare(self, order: Mapping[str, Any]) -> None:
        self._workspace = Workspace(order)
        try:
            self._workspace.prepare(self._folder)
            self._workspace.begin({})
            self._notes = open(notes_path(order["run_dir"]), "a", buffering=1)  # noqa: SIM115
            self._slots = Slots(order["slots"], order["gpus"])
            self._targets, self._runs = order["targets"], order["runs"]
            self._count = order["count"]
            self._elements = os.path.join(self._workspace.root, "nemo_run", order["elements"])
            if self._runs == "fork":
                self._forking = Forking(self._workspace, self._elements)
        except (OSError, ValueError) as error:
            self._channel.report("unprepared", words=str(error))
            return
        self._channel.report("prepared", ports={})

    def _sweep(self, order: Mapping[str, Any]) -> None:
        """End what earlier hosts have left on this node, and tell what had ended there."""
        for number, tag, run_dir in order["hosts"]:
            sweep(tag)
            ended: List[Any] = []
            with suppress(FileNotFoundError):
                with open(notes_path(run_dir), encoding="utf-8") as file:
                    ended = [json.loads(line) for line in file if line.endswith("\n")]
                os.remove(notes_path(run_dir))
            RunDir(run_dir, base=run_dirs(command.tmpdir())).remove()
            self._channel.report("swept", host=number, ended=ended)

    def _run(self, order: Mapping[str, Any]) -> None:
        for index, attempt, values in order["elements"]:
            self._waiting.append(Order(Lease(index, attempt), values))

    def _end(self, order: Mapping[str, Any]) -> None:
        self._is_ending = True
        self._waiting.clear()  # the driver knows what has not been reported
        if self._forking is not None:
            kill(self._forking.pid, signal.SIGTERM)
            self._forking.close()
            self._forking = None
        for element in [one for one in self._running.values() if one.pid < 0]:
            self._slots.give_back(element.slot)
            del self._running[element.pid]
            element.close()  # should it begin now, it is ended as an orphan
        self._kill_at = time.monotonic() + self._grace_s
        for element in self._running.values():
            element.signal(signal.SIGTERM)

    @property
    def _grace_s(self) -> float:
        return self._place.role.task.grace_s

    @property
    def _place(self) -> Workspace:
        if self._workspace is None:
            raise ValueError("an element is started before its host is prepared")
        return self._workspace

    # ------------------------------------------------------------------ start

    def _fill(self) -> None:
        """Start elements in the free slots."""
        while self._waiting and not self._is_ending and self._slots.is_free:
            order = self._waiting.popleft()
            slot, env = self._slots.take()
            env.update(
                {
                    INDEX: str(order.lease.element),
                    "NEMO_RUN_ARRAY_SIZE": str(self._count),
                    ATTEMPT: str(order.lease.attempt),
                }
            )
            element = self._start(order, slot, env)
            if element.code is not None and element.fd is None:
                self._ended(element)
            else:
                self._running[element.pid] = element

    def _start(self, order: Order, slot: int, env: Dict[str, str]) -> RunningElement:
        if self._runs == "command":
            return start_command(self._place, order, self._targets, slot, env)
        message = message_of(order, self._targets, env, self._result_path(order.lease.element))
        if self._forking is None:
            argv = ["python", PROGRAM, "once", self._elements, json.dumps(message)]
            return start_words(self._place, order.lease, argv, slot, env)
        element = RunningElement(order.lease, slot, 0, None)
        self._forking.ask(element, message)
        return element

    def _result_path(self, element: int) -> str:
        return os.path.join(self._place.root, f"result-{element}")

    def _hear(self, forking: Forking) -> None:
        """Read what the process says that forks elements."""
        forking.read()
        for element, pid in forking.begun:
            if self._running.pop(element.pid, None) is not None:
                element.pid = pid
                self._running[pid] = element
                if self._is_ending:
                    element.signal(signal.SIGTERM)
        for pid, code in forking.ended:
            if pid in self._running:
                self._running[pid].ended(code)
        if forking.threads:
            self._channel.report("threads", names=forking.threads)
        forking.begun, forking.ended, forking.threads = [], [], []

    # ------------------------------------------------------------------ end

    def _pass_on(self, element: RunningElement) -> None:
        text = element.read()
        if text:
            self._channel.report("text", element=element.lease.element, text=text)
        if element.fd is None and element.pid < 0 and self._forking is not None:
            # No process has it any more, and none has said that it is the element's.
            self._hear(self._forking)
            if element.pid < 0:
                del self._running[element.pid]
                if self._forking.ask_again(element):
                    self._running[element.pid] = element

    def _reap(self) -> None:
        for pid, code in collect():
            if pid in self._running:
                self._running[pid].ended(code)
            elif self._forking is not None and pid == self._forking.pid:
                self._fork_anew(self._forking, code)

    def _fork_anew(self, forking: Forking, code: int) -> None:
        """The process that forked the elements has died; they have this one as their parent now."""
        self._hear(forking)
        for element in self._running.values():
            is_here = element.pid < 0 or os.path.exists(f"/proc/{element.pid}")
            if element.code is None and not is_here:
                element.ended(1)
                element.words = "its end was not seen: the process that forked it was killed too"
        try:
            forking.has_died(code)
        except CannotPrepare as error:
            self._channel.report("unprepared", words=str(error))
            self._forking = None

    def _look_after(self) -> None:
        now = time.monotonic()
        for element in [one for one in self._running.values() if one.code is not None]:
            self._finish(element, now)
        if self._kill_at is not None and now >= self._kill_at:
            for element in self._running.values():
                element.signal(signal.SIGKILL)
        if now >= self._look_at:
            self._look_at = now + _LOOK_S
            self._end_orphans(now)
        for group, kill_at in list(self._leaving.items()):
            if now >= kill_at:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(group, signal.SIGKILL)
                del self._leaving[group]
        if self._is_ending and not self._running and not self._tree.alive():
            self._is_ending, self._kill_at = False, None
            self._channel.report("idle")

    def _finish(self, element: RunningElement, now: float) -> None:
        """Report an element whose process has ended, once what it has left has ended too."""
        if element.has_company():
            if element.kill_at is None:
                element.kill_at = now + self._grace_s
                element.signal(signal.SIGTERM)
            elif now >= element.kill_at:
                element.signal(signal.SIGKILL)
            return
        while element.fd is not None and element.is_readable():
            self._pass_on(element)
        rest = element.close()
        if rest:
            self._channel.report("text", element=element.lease.element, text=rest)
        del self._running[element.pid]
        self._ended(element)

    def _ended(self, element: RunningElement) -> None:
        self._slots.give_back(element.slot)
        row = [*element.lease, element.code, round(element.seconds, 4), element.why()]
        if self._runs != "command":
            row.append(result_of(self._result_path(element.lease.element)))
        if self._notes is not None:
            with suppress(OSError):  # a full disk: it is reported all the same
                self._notes.write(json.dumps(row) + "\n")
        self._channel.report("ended", row=row)

    def _end_orphans(self, now: float) -> None:
        """End processes of elements that are over: those that have left their element's session."""
        own = set(self._running) | ({self._forking.pid} if self._forking is not None else set())
        active = {str(one.lease.element) for one in self._running.values()}
        for pid in _children():
            if pid not in own and pid not in self._leaving and _element_of(pid) not in active:
                kill(pid, signal.SIGTERM)
                with suppress(ProcessLookupError):
                    self._leaving[os.getpgid(pid)] = now + self._grace_s


def _children() -> List[int]:
    """The children of this process, orphans that it has adopted among them."""
    pid = os.getpid()
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        return [int(word) for word in file.read().split()]


def _element_of(pid: int) -> str:
    """The index of the element that a process came from; empty when it does not say."""
    mark = f"{INDEX}=".encode()
    with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        for variable in file.read().split(b"\0"):
            if variable.startswith(mark):
                return variable[len(mark) :].decode()
    return ""
