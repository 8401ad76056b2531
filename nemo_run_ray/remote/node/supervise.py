"""One command on one node: environment, process tree, output, signals, exit code.

Two processes of this package look after the command:

    Ray's shell ── watchdog      relays SIGTERM, returns the exit code
                      ╎
                    runner       own session, no relative of Ray's shell; adopts orphans
                      └── command, in a session of its own, with whatever it starts

Ray stops a job by signalling every descendant of its shell, and then again through programs that
forward signals; a command must get SIGTERM once. That is why the runner is not a descendant. The
two watch each other through a socket: when the watchdog dies (Ray kills it, or its parent dies) the
runner kills the whole tree, and when the runner dies the watchdog kills all that carries the job's
tag.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import select
import signal
import socket
import subprocess
import time
from contextlib import suppress
from time import monotonic
from typing import IO, Any, Callable, Iterable, Iterator, NoReturn, Sequence

from ..end_record import NO_PROCESS_LEFT, EndRecord, describe_exit
from ..spec import Env
from .output import CHUNK_BYTES, Output, say

#: Environment variable by which a tree is found whose top process was killed.
TAG = "NEMO_RUN_RAY_TAG"
#: The same for a process of this package that looks after such a tree, and for its watchdog.
SUPERVISOR_TAG = "NEMO_RUN_RAY_SUPERVISOR"
#: Signals that ask a job to end.
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: Seconds between two looks at a process tree that is being ended.
ROUND_S = 0.05
#: Name of the process by which ``hosts/relay.py`` ends what a host leaves.
WATCHDOG = "nrr-watchdog"
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36


def supervise(tag: str, work: Callable[[Runner], int]) -> EndRecord:
    """Run ``work`` in a runner process. See the module's text.

    The tag is unique, and in the environment of every process of the command. When this returns,
    no process with the tag runs. If the runner was killed, one without the tag may still run.
    """
    began_at = time.time()
    to_runner, to_watchdog = socket.socketpair()  # an end for this process, and the runner's
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # until the handlers below are there
    child = os.fork()
    if child == 0:
        to_runner.close()
        if os.fork():
            os._exit(0)
        _be_runner(to_watchdog, tag, work)
    to_watchdog.close()
    os.waitpid(child, 0)
    signals = wake_at(*ENDING)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    answer, is_open = b"", True
    while is_open:
        ready, _, _ = select.select([to_runner.fileno(), signals], [], [])
        if signals in ready:
            os.read(signals, 1024)
            with suppress(OSError):  # the runner is dead, and the next read says so
                to_runner.sendall(b"T")
        if to_runner.fileno() in ready:
            # It may end before it has read the last signal; its answer comes all the same.
            with suppress(ConnectionResetError):
                data = to_runner.recv(4096)
                answer, is_open = answer + data, bool(data)
    killed = kill_tagged(tag)  # none, unless the runner was killed or failed
    if answer:
        end = EndRecord(**json.loads(answer))
    else:
        text = f"the package's process on this node was killed, and {killed} others with it"
        say("")  # the output may end in the middle of a line
        say(text)
        end = EndRecord(137, "", text, left_on=None)
    return end._replace(began_at=began_at, ended_at=time.time())


def _be_runner(to_watchdog: socket.socket, tag: str, work: Callable[[Runner], int]) -> NoReturn:
    runner = Runner(to_watchdog, tag)
    code = 125
    try:
        os.setsid()
        for number in ENDING:  # the watchdog passes them on; Ray may still send them here
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        code = work(runner)
    except Exception as error:  # the last frame of this process: only the log can show it
        text = f"the command cannot be run: {type(error).__name__}: {error}".replace("\n", " ")
        say(text)
        runner.cause, runner.ending = "", text
    finally:
        end = EndRecord(code, runner.cause, runner.ending, left_on=runner.left_on)
        with suppress(OSError):  # the watchdog is dead
            to_watchdog.sendall(json.dumps(end._asdict()).encode())
        os._exit(0)


class Runner:
    """The runner process as ``work`` sees it: runs a command, reads the stop order, keeps the end.

    A task's work calls ``run``, which lets nothing of the command outlive it. The drivers of groups
    and arrays run no command here: they read ``order``, and set ``ending``, ``cause`` and
    ``left_on`` by themselves.
    """

    def __init__(self, to_watchdog: socket.socket, tag: str):
        self._to_watchdog = to_watchdog
        self._tag = tag
        #: For the ``EndRecord``: its text, cause and ``left_on``.
        self.ending, self.cause = "", "NONE"
        self.left_on: tuple[str, ...] | None = ()

    def order(self) -> bytes | None:
        """Read the watchdog's message: ``T`` to end, empty when it is dead, or ``None``."""
        if not select.select([self._to_watchdog], [], [], 0)[0]:
            return None
        return self._to_watchdog.recv(1)

    def run(self, argv: Sequence[str], env: dict[str, str], cwd: str, grace_s: float) -> int:
        """Run one command to its end and return its exit code, 128 + n after signal n.

        The command has ended when its first process has, and all others have been ended with it:
        SIGTERM, ``grace_s`` seconds, SIGKILL.
        """
        if self.order() is not None:
            # Ray delays a stop until the job has started.
            self.cause, self.ending = "CANCELLED", "cancelled before it started"
            return 143
        children = Supervisor()
        command = children.add(Child(argv, {**env, TAG: self._tag}, cwd, Output().take))
        if command.reason:  # readers of what the command has printed do not see the last line
            say(command.reason)
        watched = [self._to_watchdog]
        is_cancelled = False
        while not children.step(grace_s):
            if self._to_watchdog in children.wait(watched):
                # What has ended by itself keeps its end while others are ended.
                is_cancelled |= not children.are_ending
                if not self._to_watchdog.recv(1):  # it is dead: its killer wants the job to end
                    watched, grace_s = [], 0.0
                children.end(grace_s)
        code = command.code or 0
        self.ending, self.cause = command.ending, "EXIT_CODE" if code else "NONE"
        if is_cancelled:
            self.ending, self.cause = f"cancelled; {NO_PROCESS_LEFT}", "CANCELLED"
        return code


class Child:
    """One process that a ``Supervisor`` looks after, started here, and its output.

    ``output`` is given the output as it comes, and empty bytes at the end; or it is a file.
    """

    def __init__(
        self,
        argv: Sequence[str],
        env: Env,
        cwd: str | None,
        output: Callable[[bytes], None] | IO[bytes],
    ):
        self._output: Any = output
        self.pid: int | None = None  # if it could be started
        self.code: int | None = None  # once it has ended: 128 + n after signal n
        self.reason = ""  # why it could not be started
        self.ended_at = monotonic()
        self.pipe: Any = None  # to read its output from, until the output's end
        try:
            process = subprocess.Popen(
                argv,
                bufsize=0,
                env=env,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if callable(output) else output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=prepare_child,
            )
        except (OSError, ValueError) as error:
            self.code, self.reason = explain_start(argv, env, cwd, error)
            return
        self.pid, self.pipe = process.pid, process.stdout
        process.returncode = 0  # the supervisor collects it; the object must not

    def read(self) -> None:
        """Pass on what there is to read; the empty bytes are the output's end."""
        data = self.pipe.read(CHUNK_BYTES)
        if not data:
            self.pipe.close()
            self.pipe = None
        self._output(data)

    @property
    def ending(self) -> str:
        """Its end for people."""
        return self.reason or describe_exit(self.code or 0)


class Supervisor:
    """Children of this process, and whatever comes from them: started, watched and ended.

    A user calls ``wait`` and ``step`` in turn until ``step`` is true: all children have ended, and
    with them all that they started. SIGTERM goes to every process, and SIGKILL after a grace
    period; one child's failure ends the others. Where children have nothing to do with each other,
    a user calls ``reap``, and ``stop`` at the end.
    """

    def __init__(self) -> None:
        adopt_orphans()
        self.children: list[Child] = []
        self._wake = wake_at(signal.SIGCHLD)
        self._kill_at = math.inf

    def add(self, child: Child) -> Child:
        """Look after a child that was started just now."""
        self.children.append(child)
        return child

    def clear(self) -> None:
        """Forget the children, which have ended, before others are started."""
        self.children = []
        self._kill_at = math.inf

    @property
    def are_ending(self) -> bool:
        return self._kill_at < math.inf

    def end(self, grace_s: float) -> None:
        """Send SIGTERM to every process once, and SIGKILL after ``grace_s`` seconds."""
        if not self.are_ending:
            signal_all(signal.SIGTERM)
        self._kill_at = min(self._kill_at, monotonic() + grace_s)

    def wait(
        self,
        reading: Iterable[Any],
        writing: Iterable[Any] = (),
        idle_s: float = 60.0,
        takes_output: bool = True,
    ) -> list[Any]:
        """Wait for something to do, and pass the children's output on.

        While nobody can take more output, the children wait to write. What is ready of ``reading``
        and ``writing`` is returned.
        """
        talking = [child for child in self.children if takes_output and child.pipe]
        sources = [*reading, self._wake, *(child.pipe for child in talking)]
        is_busy = self.are_ending or any(child.code is not None for child in self.children)
        timeout_s = ROUND_S if is_busy else idle_s
        ready, writable, _ = select.select(sources, list(writing), [], timeout_s)
        if self._wake in ready:
            os.read(self._wake, 1024)
        for child in talking:
            if child.pipe in ready:
                child.read()
        return ready + writable

    def step(self, grace_s: float) -> bool:
        """Collect the dead and end what is to end; true when every process has ended."""
        self.reap()
        codes = [child.code for child in self.children]
        if not self.are_ending and (None not in codes or any(codes)) and descendants():
            self.end(grace_s)  # the children are done and what they left is not, or one failed
        if monotonic() >= self._kill_at:
            signal_all(signal.SIGKILL)
        # ``descendants`` reads all of /proc, so it comes last.
        if None in codes or descendants():
            return False
        self.reap()
        for child in self.children:  # no process holds the other end of a pipe any more
            while child.pipe:
                child.read()
        return True

    def stop(self, grace_s: float, keep: Sequence[Child] = ()) -> None:
        """End every process but some children and what they have started, and wait for it."""
        kill_at = monotonic() + grace_s
        asked: set[int] = set()  # a second SIGTERM makes some programs abort
        while True:
            self.reap()
            kept = {pid for one in keep if one.pid for pid in (one.pid, *descendants(one.pid))}
            pids = set(descendants()) - kept
            if not pids:
                return
            is_late = monotonic() >= kill_at
            for pid in pids if is_late else pids - asked:
                kill(pid, signal.SIGKILL if is_late else signal.SIGTERM)
            asked |= pids
            time.sleep(ROUND_S)

    def reap(self) -> None:
        """Collect the dead, adopted orphans too."""
        codes = dict(collect())
        for child in self.children:
            if child.pid in codes:
                child.code, child.ended_at = codes[child.pid], monotonic()


def collect() -> Iterator[tuple[int, int]]:
    """(pid, exit code) of every child that is dead and not collected, 128 + n after signal n."""
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            yield pid, code if code >= 0 else 128 - code


def descendants(root: int = 0) -> list[int]:
    """All living processes below ``root``, or below this process, without it."""
    children: dict[int, list[int]] = {}
    for pid, parent in _processes():
        children.setdefault(parent, []).append(pid)
    below = list(children.get(root or os.getpid(), ()))
    for pid in below:  # it grows
        below += children.get(pid, ())
    return below


def kill_tagged(tag: str) -> int:
    """Kill every process with the tag, in at most 500 rounds; the number of those killed."""
    mark = f"{TAG}={tag}".encode()
    killed = set()
    for _ in range(500):
        pids = marked(mark)
        if not pids:
            break
        killed.update(pids)
        for pid in pids:
            kill(pid, signal.SIGKILL)
        time.sleep(ROUND_S)
    return len(killed)


def marked(mark: bytes) -> list[int]:
    """The living processes that have ``NAME=value`` in their environment."""
    pids = []
    for pid, _ in _processes():
        with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            if mark in file.read().split(b"\0"):
                pids.append(pid)
    return pids


def is_watchdog(pid: int) -> bool:
    """Whether a process is the watchdog of a host, by its name."""
    with suppress(OSError), open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
        return file.read().strip() == WATCHDOG
    return False


def _processes() -> Iterator[tuple[int, int]]:
    """(pid, parent) of every process that is not a zombie."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            with open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
            if state not in (b"Z", b"X"):
                yield int(name), int(parent)


def kill(pid: int, number: int) -> None:
    """Send a signal to a process, which may have ended or may run as another user by now."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def signal_all(number: int) -> None:
    """Send a signal to every process below this one."""
    for pid in descendants():
        kill(pid, number)


def adopt_orphans() -> None:
    """Become the parent of all orphans below this process."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def name_process(name: str) -> None:
    """Give this process a name of up to 15 characters, as ``ps`` shows it."""
    _prctl(_PR_SET_NAME, ctypes.create_string_buffer(name.encode()))


def wake_at(*numbers: signal.Signals) -> int:
    """A descriptor that is readable after one of the signals, also if that came before the wait.

    A handler alone is not enough: Python runs it between two of its instructions, so a signal just
    before a wait begins is noticed when the wait is over.
    """
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, lambda *_: None)
    return woken


def prepare_child() -> None:
    """Let a process that was just forked be ended by signals, and by the death of its parent."""
    for number in ENDING:
        signal.signal(number, signal.SIG_DFL)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def explain_start(
    argv: Sequence[str], env: Env, cwd: str | None, error: Exception
) -> tuple[int, str]:
    """The exit code of a command that could not be started, and why, in words."""
    host, program = socket.gethostname(), argv[0]
    if not isinstance(error, FileNotFoundError):
        return 126, f"exit code 126: {program!r} cannot be started on node {host}: {error}"
    if not os.path.isdir(cwd or "."):
        why = f"the folder {cwd} does not exist on node {host}"
    elif "/" in program and os.path.exists(os.path.join(cwd or "", program)):
        why = f"{program!r} begins with the name of an interpreter that node {host} lacks"
    else:
        why = (
            f"there is no program {program!r} on node {host} (PATH={env.get('PATH', '')}); "
            "install it in the node's image or give it by `runtime_env`"
        )
    return 127, f"exit code 127: {why}"


def _prctl(option: int, value: Any) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
