"""One command on a node: environment, process tree, output, signals, exit code.

Two processes of this package look after the command:

    Ray's shell ── keeper        relays SIGTERM, returns the exit code
                     ╎
                   runner        own session, no relative of Ray's shell; adopts orphans
                     └── command, in a session of its own, with whatever it starts

Ray stops a job by signalling every descendant of its shell, and then again through programs that
forward signals; a command must get SIGTERM once. That is why the runner is not a descendant. The
two watch each other through a socket: when the keeper dies (Ray kills it, or its supervisor dies)
the runner kills the whole tree, and when the runner dies the keeper kills all that carries the
job's tag.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import select
import signal
import socket
import subprocess
import time
from contextlib import suppress
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    NoReturn,
    Optional,
    Sequence,
    Tuple,
)

from ..end_record import EndRecord, proof_of
from .output import CHUNK_BYTES, NO_PROCESS_LEFT, Output, say, write

#: Environment variable by which a tree is found whose top process was killed.
TAG = "NEMO_RUN_RAY_TAG"
#: The same for a process of this package that looks after such a tree, and for its guard.
KEEPER = "NEMO_RUN_RAY_KEEPER"
#: Signals that ask a job to end.
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: Seconds between two looks at a process tree that is being ended.
ROUND_S = 0.05
#: Name of a process whose only task is to end what another one leaves.
GUARD = "nrr-guard"
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36


def describe_exit(code: int) -> str:
    """The words ``exit code 3`` or ``killed by SIGSEGV (exit code 139)``."""
    if code > 128:
        try:
            return f"killed by {signal.Signals(code - 128).name} (exit code {code})"
        except ValueError:
            pass  # a program may exit with any number
    return f"exit code {code}"


def run_supervised(tag: str, nonce: str, key: str, work: Callable[[Runner], int]) -> int:
    """Run ``work`` in a runner process and return its exit code. See the module's text.

    Args:
        tag: unique text that is in the environment of every process of the command.
        nonce: the submission's, for the log's last line.
        key: proves that line; empty if there is none.
        work: called in the runner; it prepares, calls ``Runner.run`` and cleans up.
    """
    end = guard(tag, work)
    write(end._replace(proof=proof_of(key, end.code) if key else "").line(nonce))
    return end.code


def guard(tag: str, work: Callable[[Runner], int]) -> EndRecord:
    """Run ``work`` in a runner process; nothing that carries the tag remains afterwards.

    If the runner was killed, it is not known what remains: a process may hide from the tag.
    """
    began_at = time.time()
    own_end, runner_end = socket.socketpair()
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # until the handlers below are there
    child = os.fork()
    if child == 0:
        own_end.close()
        if os.fork():
            os._exit(0)
        _be_runner(runner_end, tag, work)
    runner_end.close()
    os.waitpid(child, 0)
    told = wake_at(*ENDING)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    answer = _await(own_end, told)
    left = kill_tagged(tag)  # nothing, unless the runner was killed or failed
    if answer:
        end = EndRecord(**json.loads(answer))
        return end._replace(began_at=began_at, ended_at=time.time())
    say("")  # what it passed on last may lack its line's end
    text = f"the package's process on this node was killed, and {left} others with it"
    say(text)
    return EndRecord(137, "", text, began_at, time.time(), left_on=None)


def _await(runner: socket.socket, told: int) -> bytes:
    """Pass SIGTERM on to the runner, and return its last message; empty if it was killed."""
    answer = b""
    while True:
        ready, _, _ = select.select([runner.fileno(), told], [], [])
        if told in ready:
            os.read(told, 1024)
            _send(runner, b"T")
        if runner.fileno() in ready:
            try:
                data = runner.recv(4096)
            except (
                ConnectionResetError
            ):  # it ended before it read the last signal: its answer comes
                continue
            if not data:
                return answer
            answer += data


def _be_runner(keeper: socket.socket, tag: str, work: Callable[[Runner], int]) -> NoReturn:
    end = EndRecord(125, "", "")
    runner: Optional[Runner] = None
    try:
        os.setsid()
        for number in ENDING:  # the keeper tells it; Ray may still take it for a descendant
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        runner = Runner(keeper, tag)
        code = work(runner)
        end = EndRecord(code, runner.cause, runner.ending, left_on=runner.left_on)
    except Exception as error:  # the last frame of this process: the log is where it can tell
        text = f"the command cannot be run: {type(error).__name__}: {error}".replace("\n", " ")
        say(text)
        end = EndRecord(125, "", text, left_on=runner.left_on if runner else ())
    finally:
        _send(keeper, json.dumps(end._asdict()).encode())
        os._exit(0)


class Runner:
    """Starts the command and lets nothing of it outlive ``run``."""

    def __init__(self, keeper: socket.socket, tag: str) -> None:
        self._keeper = keeper
        self._tag = tag
        #: See ``EndRecord``: its text, cause and ``left_on``.
        self.ending, self.cause = "", "NONE"
        self.left_on: Optional[Tuple[str, ...]] = ()
        self.cancelled = False

    def order(self) -> Optional[bytes]:
        """Read the keeper's message: ``T`` to end, empty when it is dead, ``None`` without one."""
        return self._keeper.recv(1) if select.select([self._keeper], [], [], 0)[0] else None

    def run(self, argv: Sequence[str], env: Dict[str, str], cwd: str, grace_s: float) -> int:
        """Run one command to its end and return its exit code, 128 + n after signal n.

        The command has ended when its first process has, and all others have been ended with it:
        SIGTERM, ``grace_s`` seconds, SIGKILL.
        """
        if self.order() is not None:
            # Ray holds a stop that comes before the start back until the start.
            self.cancelled, self.cause = True, "CANCELLED"
            self.ending = "cancelled before it started"
            return 143
        children = Supervisor()
        command = children.start(argv, {**env, TAG: self._tag}, cwd, Output().take)
        if command.words:  # readers of what the command has printed do not see the last line
            say(command.words)
        while not children.step(grace_s):
            watched = [self._keeper] if self._keeper.fileno() >= 0 else []
            if self._keeper in children.wait(watched):
                order = self._keeper.recv(1)
                if not order:  # the keeper is dead: its killer wants the job to end
                    self._keeper.close()
                    self.cancelled = True
                    children.end(0.0)
                elif not children.are_ending:
                    self.cancelled = True
                    children.end(grace_s)
        code = command.code or 0
        self.ending, self.cause = command.ending, "EXIT_CODE" if code else "NONE"
        if self.cancelled:
            self.ending, self.cause = f"cancelled; {NO_PROCESS_LEFT}", "CANCELLED"
        return code


class Child:
    """One process that a ``Supervisor`` has started, and its output.

    Attributes:
        pid: ``None`` when it could not be started.
        code: its exit code, 128 + n after signal n; ``None`` while it runs.
        words: why it could not be started; else empty.
        ended_at: when it was seen to have ended, by the monotonic clock.
        fd: to read its output from; ``None`` after the output's end.
    """

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        take: Callable[[bytes], None],
    ) -> None:
        self._take = take
        self.pid: Optional[int] = None
        self.code: Optional[int] = None
        self.words = ""
        self.ended_at = time.monotonic()
        self.fd: Optional[int] = None
        try:
            process = subprocess.Popen(
                list(argv),
                env=dict(env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=before_exec,
            )
        except (OSError, ValueError) as error:
            self.code, self.words = explain_start(argv, env, cwd, error)
            return
        self.pid = process.pid
        if process.stdout is not None:
            self.fd = os.dup(process.stdout.fileno())
            process.stdout.close()
        process.returncode = 0  # the supervisor collects it; the object must not

    def read(self) -> None:
        """Pass on what there is to read; the empty bytes are the output's end."""
        if self.fd is None:
            return
        data = os.read(self.fd, CHUNK_BYTES)
        if not data:
            os.close(self.fd)
            self.fd = None
        self._take(data)

    @property
    def ending(self) -> str:
        """Its end in words."""
        return self.words or describe_exit(self.code or 0)


class Supervisor:
    """Children of this process, and whatever comes from them: started, watched and ended.

    They have ended when the children have, and with them all that they started: SIGTERM to every
    process, and SIGKILL after a grace period. One child's failure ends the others.

    A user calls ``wait`` and ``step`` in turn until ``step`` is true.
    """

    def __init__(self) -> None:
        self.tree = Tree()
        self.children: List[Child] = []
        #: Exit codes of orphans and probes that the last step has collected, by process id.
        self.others: Dict[int, int] = {}
        self._wake = wake_at(signal.SIGCHLD)
        self._kill_at: Optional[float] = None

    def start(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        take: Callable[[bytes], None],
    ) -> Child:
        """Start a child; one that cannot be started has ended already.

        Args:
            argv: its exact words.
            env: all its variables.
            cwd: its folder.
            take: is given its output as it comes, and empty bytes at the end.
        """
        child = Child(argv, env, cwd, take)
        self.children.append(child)
        return child

    def clear(self) -> None:
        """Forget the children, which have ended, before others are started."""
        self.children = []
        self._kill_at = None

    @property
    def are_ending(self) -> bool:
        return self._kill_at is not None

    def end(self, grace_s: float) -> None:
        """Send SIGTERM to every process once, and SIGKILL after ``grace_s`` seconds."""
        if self._kill_at is None:
            self.tree.signal(signal.SIGTERM)
        self._kill_at = time.monotonic() + grace_s

    def wait(
        self,
        reading: Iterable[Any],
        writing: Iterable[Any] = (),
        idle_s: float = 60.0,
        takes_output: bool = True,
    ) -> List[Any]:
        """Wait for something to do, and pass the children's output on.

        Args:
            reading: what else to wait for.
            writing: the same, for writing.
            idle_s: how long to wait while no child ends.
            takes_output: false while nobody can take more output; the children wait to write then.

        Returns:
            Those of ``reading`` and ``writing`` that are ready.
        """
        talking = [child for child in self.children if takes_output and child.fd is not None]
        busy = self.are_ending or any(child.code is not None for child in self.children)
        ready, writable, _ = select.select(
            [*reading, self._wake, *(child.fd for child in talking)],
            list(writing),
            [],
            ROUND_S if busy else idle_s,
        )
        if self._wake in ready:
            os.read(self._wake, 1024)
        for child in talking:
            if child.fd in ready:
                child.read()
        return ready + writable

    def step(self, grace_s: float) -> bool:
        """Collect the dead and end what is to end; true when every process has ended.

        Args:
            grace_s: seconds between SIGTERM and SIGKILL for what the children leave.
        """
        self.others = {}
        self._reap()
        codes = [child.code for child in self.children]
        if not self.are_ending and (None not in codes or any(codes)) and self.tree.alive():
            self.end(grace_s)  # the children are done and what they left is not, or one failed
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self.tree.signal(signal.SIGKILL)
        if None in codes or self.tree.alive():  # a look at all processes, when it matters alone
            return False
        self._reap()
        for child in self.children:  # no process holds the other end of a pipe any more
            while child.fd is not None:
                child.read()
        return True

    def _reap(self) -> None:
        children = {child.pid: child for child in self.children}
        for pid, code in collect():
            if pid in children:
                children[pid].code, children[pid].ended_at = code, time.monotonic()
            else:
                self.others[pid] = code


def _send(channel: socket.socket, data: bytes) -> None:
    with suppress(OSError):  # the other one is dead; both sides act on that when they read
        channel.sendall(data)


class Tree:
    """All processes below this one; orphans among them become its children."""

    def __init__(self) -> None:
        adopt_orphans()

    def alive(self) -> bool:
        return bool(descendants(os.getpid()))

    def signal(self, number: int) -> None:
        for pid in descendants(os.getpid()):
            kill(pid, number)

    def kill(self) -> None:
        """Kill everything, and collect it."""
        while self.alive():
            self.signal(signal.SIGKILL)
            for _ in collect():
                pass
            time.sleep(ROUND_S)


def collect() -> Iterator[Tuple[int, int]]:
    """(pid, exit code) of every child that is dead and not collected, 128 + n after signal n."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        code = os.waitstatus_to_exitcode(status)
        yield pid, code if code >= 0 else 128 - code


def descendants(root: int) -> List[int]:
    """All living processes below ``root``, without it."""
    children: Dict[int, List[int]] = {}
    for pid, parent in _processes():
        children.setdefault(parent, []).append(pid)
    found: List[int] = []
    queue = list(children.get(root, ()))
    while queue:
        pid = queue.pop()
        found.append(pid)
        queue.extend(children.get(pid, ()))
    return found


def kill_tagged(tag: str) -> int:
    """Kill every process that carries the tag until there is none; the number of those killed."""
    mark = f"{TAG}={tag}".encode()
    killed = set()
    for _ in range(500):
        found = marked(mark)
        if not found:
            break
        killed.update(found)
        for pid in found:
            kill(pid, signal.SIGKILL)
        time.sleep(ROUND_S)
    return len(killed)


def marked(mark: bytes) -> List[int]:
    """The living processes that have ``NAME=value`` in their environment."""
    return [pid for pid, _ in _processes() if mark in _environment(pid)]


def is_guard(pid: int) -> bool:
    """Whether a process is a guard, by its name."""
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip() == GUARD
    except OSError:
        return False  # it has ended


def _processes() -> List[Tuple[int, int]]:
    """(pid, parent) of every process that is not a zombie."""
    rows = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended meanwhile
            if fields[0] not in (b"Z", b"X"):
                rows.append((int(name), int(fields[1])))
    return rows


def _environment(pid: int) -> List[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []  # ended, or another user's


def kill(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended."""
    with suppress(ProcessLookupError):  # it has ended
        os.kill(pid, number)


def adopt_orphans() -> bool:
    """Become the parent of all orphans below this process; true if the system can do that."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


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


def before_exec() -> None:
    """Prepare a command's process before it becomes the command."""
    for number in ENDING:
        signal.signal(number, signal.SIG_DFL)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def explain_start(
    argv: Sequence[str], env: Mapping[str, str], cwd: str, error: Exception
) -> Tuple[int, str]:
    """The exit code of a command that could not be started, and why, in words."""
    host = socket.gethostname()
    if isinstance(error, FileNotFoundError) and not os.path.isdir(cwd):
        return 127, f"exit code 127: the folder {cwd} does not exist on node {host}"
    program = os.path.join(cwd, argv[0])
    if isinstance(error, FileNotFoundError) and "/" in argv[0] and os.path.exists(program):
        with open(program, "rb") as file:
            first = file.readline(200).decode(errors="replace").strip()
        return 127, (
            f"exit code 127: {argv[0]!r} begins with {first!r}, an interpreter that node {host} "
            "lacks"
        )
    if isinstance(error, FileNotFoundError):
        path = env.get("PATH", "")
        return 127, (
            f"exit code 127: there is no program {argv[0]!r} on node {host} (PATH={path}); install "
            "it in the node's image or give it by `runtime_env`"
        )
    text = f"exit code 126: {argv[0]!r} cannot be started on node {host}: {error}"
    if getattr(error, "errno", None) == errno.E2BIG:
        text += (
            ". Linux takes 128 KiB for one argument or variable and about 2 MiB for all; put large "
            "values into a file."
        )
    return 126, text


def _prctl(option: int, value: Any) -> bool:
    try:
        return bool(ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0)
    except (AttributeError, OSError):
        return False  # not Linux
