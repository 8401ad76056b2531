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
from typing import Any, Callable, Dict, Iterator, List, NoReturn, Optional, Sequence, Tuple

from ..end_record import EndRecord, proof_of
from ..exit_words import OUTER_ARCHIVES, OWN_RAY
from .output import NO_PROCESS_LEFT, Output, say, write

#: Environment variable by which a tree is found whose top process was killed.
TAG = "NEMO_RUN_RAY_TAG"
#: The same for a process of this package that looks after such a tree, and for its guard.
KEEPER = "NEMO_RUN_RAY_KEEPER"
#: Signals that ask a job to end.
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: Seconds between two looks at a process tree that is being ended.
ROUND_S = 0.05
#: Name of a process that does nothing but end what another one leaves.
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


def keep(tag: str, nonce: str, key: str, work: Callable[[Runner], int]) -> int:
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
    left = sweep(tag)  # nothing, unless the runner was killed or failed
    if answer:
        end = EndRecord(**json.loads(answer))
        return end._replace(began_at=began_at, ended_at=time.time())
    say("")  # what it passed on last may lack its line's end
    text = f"the package's process on this node was killed, and {left} others with it"
    say(text)
    return EndRecord(137, "", text, began_at, time.time(), left_on=None)


def _await(runner: socket.socket, told: int) -> bytes:
    """What the runner says at its end; nothing if it was killed. SIGTERM is passed on to it."""
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
        self._adopts = adopt_orphans()
        #: See ``EndRecord``: its text, cause and ``left_on``.
        self.ending, self.cause = "", "NONE"
        self.left_on: Optional[Tuple[str, ...]] = ()
        self.cancelled = False
        self._wake = wake_at(signal.SIGCHLD)

    def order(self) -> Optional[bytes]:
        """What the keeper has said since: ``T`` to end, nothing when it is dead, else ``None``."""
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
        read_end, write_end = os.pipe()
        try:
            process = subprocess.Popen(
                list(argv),
                env={**env, TAG: self._tag},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                start_new_session=True,
                preexec_fn=before_exec,
            )
        except OSError as error:
            code, self.ending = explain_start(argv, env, cwd, error)
            self.cause = "EXIT_CODE"
            say(self.ending)  # readers of what the command has printed do not see the last line
            return code
        finally:
            os.close(write_end)
        tree = Tree(process.pid, self._adopts)
        output = Output(read_end)
        code, self.cancelled = self._watch(tree, output, grace_s)
        if code and OUTER_ARCHIVES.search(output.tail):
            say(OWN_RAY)
        self.ending, self.cause = describe_exit(code), "EXIT_CODE" if code else "NONE"
        if self.cancelled:
            self.ending, self.cause = f"cancelled; {NO_PROCESS_LEFT}", "CANCELLED"
        return code

    def _watch(self, tree: Tree, output: Output, grace_s: float) -> Tuple[int, bool]:
        """Pass output on until the tree is gone, and end it when told to: one loop, no thread."""
        cancelled = False
        deadline: Optional[float] = None  # when SIGTERM becomes SIGKILL
        while True:
            ending = deadline is not None or tree.exit_code is not None
            ready = self._wait(output, ROUND_S if ending else 60.0)
            output.pump(ready)
            if self._keeper.fileno() in ready:
                order = self._keeper.recv(1)
                if not order:  # the keeper is dead: its killer wants the job to end
                    self._keeper.close()
                    cancelled, deadline = True, 0.0
                elif deadline is None:
                    cancelled, deadline = True, time.monotonic() + grace_s
                    tree.signal(signal.SIGTERM)
            tree.reap()
            if tree.exit_code is not None and deadline is None and tree.alive():
                deadline = time.monotonic() + grace_s  # the command is done, what it left is not
                tree.signal(signal.SIGTERM)
            if deadline is not None and time.monotonic() >= deadline:
                tree.signal(signal.SIGKILL)
            if tree.exit_code is not None and not tree.alive():
                output.drain()
                return tree.exit_code, cancelled

    def _wait(self, output: Output, timeout_s: float) -> List[int]:
        watched = (output.fd, self._keeper.fileno(), self._wake)
        fds = [fd for fd in watched if fd is not None and fd >= 0]
        ready, _, _ = select.select(fds, [], [], timeout_s)
        if self._wake in ready:
            os.read(self._wake, 1024)
        return ready


def _send(channel: socket.socket, data: bytes) -> None:
    with suppress(OSError):  # the other one is dead; both sides act on that when they read
        channel.sendall(data)


class Tree:
    """The command's processes: its first one and all that came from it."""

    def __init__(self, pid: int, adopts: bool) -> None:
        self._pid = pid
        self._adopts = adopts
        self.exit_code: Optional[int] = None

    def reap(self) -> None:
        """Collect the dead, the command's exit code among them."""
        for pid, code in collect():
            if pid == self._pid:
                self.exit_code = code

    def alive(self) -> bool:
        return bool(self._pids())

    def signal(self, number: int) -> None:
        for pid in self._pids():
            kill(pid, number)

    def _pids(self) -> List[int]:
        if self._adopts:  # orphans become its children, so the tree below this process is complete
            return descendants(os.getpid())
        return [pid for pid, _, session in _processes() if session == self._pid]


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
    for pid, parent, _ in _processes():
        children.setdefault(parent, []).append(pid)
    found: List[int] = []
    queue = list(children.get(root, ()))
    while queue:
        pid = queue.pop()
        found.append(pid)
        queue.extend(children.get(pid, ()))
    return found


def sweep(tag: str) -> int:
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
    return [pid for pid, _, _ in _processes() if mark in _environment(pid)]


def is_guard(pid: int) -> bool:
    """Whether a process is a guard, by its name."""
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip() == GUARD
    except OSError:
        return False  # it has ended


def _processes() -> List[Tuple[int, int, int]]:
    """(pid, parent, session) of every process that is not a zombie."""
    rows = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended meanwhile
            if fields[0] not in (b"Z", b"X"):
                rows.append((int(name), int(fields[1]), int(fields[3])))
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
    argv: Sequence[str], env: Dict[str, str], cwd: str, error: Exception
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
    why = _too_big(argv, env) if getattr(error, "errno", 0) == errno.E2BIG else error
    return 126, f"exit code 126: {argv[0]!r} cannot be started on node {host}: {why}"


def _too_big(argv: Sequence[str], env: Dict[str, str]) -> str:
    """What makes the arguments and variables of a command larger than Linux takes."""
    sizes = {f"argument {place}": len(os.fsencode(word)) for place, word in enumerate(argv)}
    for name, value in env.items():
        sizes[f"the variable {name}"] = len(os.fsencode(f"{name}={value}"))
    largest = max(sizes, key=sizes.__getitem__)
    return (
        f"its arguments and variables are too large: {largest} has {sizes[largest]:,} of "
        f"{sum(sizes.values()):,} bytes; Linux usually takes 128 KiB for one and 2 MiB for all. "
        "Put such a value into a file"
    )


def _prctl(option: int, value: Any) -> bool:
    try:
        return bool(ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0)
    except (AttributeError, OSError):
        return False  # not Linux
