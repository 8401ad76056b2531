"""One command on a node: environment, process tree, output, signals, exit code.

Two processes of ours look after the command:

    Ray's shell ── keeper        relays SIGTERM, returns the exit code
                     ╎
                   runner        own session, no relative of Ray's shell; adopts orphans
                     └── command, in a session of its own, with whatever it starts

Ray stops a job by signalling every descendant of its shell, and then again through whoever forwards
signals; a command must get SIGTERM once. That is why the runner is not a descendant. The two watch
each other through a socket: when the keeper dies (Ray kills it, or its supervisor dies) the runner
kills the whole tree, and when the runner dies the keeper kills all that carries the job's tag.
"""

from __future__ import annotations

import codecs
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import time
from contextlib import suppress
from typing import Callable, Dict, List, NoReturn, Optional, Sequence, Tuple

#: Environment variable by which the keeper finds what a dead runner left behind.
TAG = "NEMO_RUN_RAY_TAG"
#: Signals that ask a job to end.
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
#: How our lines in a job's log begin.
PREFIX = "nemo_run_ray| "
#: Seconds between two looks at a process tree that is being ended.
_ROUND_S = 0.05
#: Bytes of output read at once.
_CHUNK_BYTES = 65536


def say(text: str) -> None:
    """Write one line of ours into the job's log."""
    with suppress(OSError):  # a full disk
        os.write(1, f"{PREFIX}{text}\n".encode())


def end_mark(nonce: str) -> str:
    """How the last line of a job's log begins: a reader that has it has all.

    The nonce keeps a command that prints such a line by chance from ending its own log.
    """
    return f"{PREFIX}end {nonce[:8]}: "


def describe_exit(code: int) -> str:
    """``exit code 3`` or ``killed by SIGSEGV (exit code 139)``."""
    if code > 128:
        try:
            return f"killed by {signal.Signals(code - 128).name} (exit code {code})"
        except ValueError:
            pass  # a program may exit with any number
    return f"exit code {code}"


def keep(tag: str, nonce: str, work: Callable[[Runner], int]) -> int:
    """Run ``work`` in a runner process and return its exit code. See the module's text.

    Args:
        tag: unique text that is in the environment of every process of the command.
        nonce: the submission's, for the log's last line.
        work: called in the runner; it prepares, calls ``Runner.run`` and cleans up.
    """
    ours, theirs = socket.socketpair()
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)  # until the handlers below are there
    child = os.fork()
    if child == 0:
        ours.close()
        if os.fork():
            os._exit(0)
        _be_runner(theirs, tag, work)
    theirs.close()
    os.waitpid(child, 0)
    for number in _ENDING:
        signal.signal(number, lambda *_: _send(ours, b"T"))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
    answer = b""
    while True:
        data = ours.recv(4096)
        if not data:
            break
        answer += data
    left = sweep(tag)  # nothing, unless the runner was killed or failed
    if answer:
        outcome = json.loads(answer)
        code, words = int(outcome["code"]), str(outcome["words"])
    else:
        say("")  # what it passed on last may lack its line's end
        code, words = 137, f"our process on this node was killed, and {left} others with it"
    say(f"{end_mark(nonce)}{words}".removeprefix(PREFIX))
    return code


def _be_runner(keeper: socket.socket, tag: str, work: Callable[[Runner], int]) -> NoReturn:
    code, words = 125, ""
    try:
        os.setsid()
        for number in _ENDING:  # the keeper tells us; Ray may still have taken us for a relative
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
        runner = Runner(keeper, tag)
        code = work(runner)
        words = runner.ending
    except Exception as error:  # the last frame of this process: the log is where it can tell
        words = f"the command cannot be run: {type(error).__name__}: {error}".replace("\n", " ")
    finally:
        _send(keeper, json.dumps({"code": code, "words": words}).encode())
        os._exit(0)


class Runner:
    """Starts the command and sees to it that nothing of it outlives ``run``."""

    def __init__(self, keeper: socket.socket, tag: str) -> None:
        self._keeper = keeper
        self._tag = tag
        self._adopts = _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        #: How the command ended, in words.
        self.ending = ""
        self.cancelled = False
        self._wake, wake = os.pipe()  # readable after the death of a child
        os.set_blocking(wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def run(self, argv: Sequence[str], env: Dict[str, str], cwd: str, grace_s: float) -> int:
        """Run one command to its end and return its exit code, 128 + n after signal n.

        The command has ended when its first process has, and all others have been ended with it:
        SIGTERM, ``grace_s`` seconds, SIGKILL.
        """
        if select.select([self._keeper], [], [], 0)[0]:
            # Ray holds a stop that comes before the start back until the start.
            self.cancelled, self.ending = True, "cancelled before it started"
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
                preexec_fn=_before_exec,
            )
        except OSError as error:
            code, self.ending = _explain_start(argv, env, cwd, error)
            return code
        finally:
            os.close(write_end)
        tree = _Tree(process.pid, self._adopts)
        code, self.cancelled = self._watch(tree, _Output(read_end), grace_s)
        self.ending = describe_exit(code)
        if self.cancelled:
            self.ending = "cancelled; no process of it is left"
        return code

    def _watch(self, tree: _Tree, output: _Output, grace_s: float) -> Tuple[int, bool]:
        """Pass output on until the tree is gone; end the tree when told to. One loop, no thread."""
        cancelled = False
        deadline: Optional[float] = None  # when SIGTERM becomes SIGKILL
        while True:
            ending = deadline is not None or tree.exit_code is not None
            ready = self._wait(output, _ROUND_S if ending else 60.0)
            output.pump(ready)
            if self._keeper.fileno() in ready:
                order = self._keeper.recv(1)
                if not order:  # the keeper is dead: whoever killed it wants the job gone
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

    def _wait(self, output: _Output, timeout_s: float) -> List[int]:
        watched = (output.fd, self._keeper.fileno(), self._wake)
        fds = [fd for fd in watched if fd is not None and fd >= 0]
        ready, _, _ = select.select(fds, [], [], timeout_s)
        if self._wake in ready:
            os.read(self._wake, 1024)
        return ready


class _Tree:
    """The command's processes: its first one and all that came from it."""

    def __init__(self, pid: int, adopts: bool) -> None:
        self._pid = pid
        self._adopts = adopts
        self.exit_code: Optional[int] = None

    def reap(self) -> None:
        """Collect the dead, the command's exit code among them."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._pid:
                code = os.waitstatus_to_exitcode(status)
                self.exit_code = code if code >= 0 else 128 - code

    def alive(self) -> bool:
        return bool(self._pids())

    def signal(self, number: int) -> None:
        for pid in self._pids():
            kill(pid, number)

    def _pids(self) -> List[int]:
        if self._adopts:  # orphans become our children, so the tree below us is complete
            return descendants(os.getpid())
        return [pid for pid, _, session in _processes() if session == self._pid]


class _Output:
    """The command's output on its way into the job's log.

    Ray reads the log as strict UTF-8 and takes ``\\r``, ``\\n`` and ``\\r\\n`` alike for a line's
    end; one wrong byte would end every reader's stream. So wrong bytes are written as ``\\xNN`` and
    ``\\r\\n`` as ``\\n``: then all readers count the same characters, which is how a reader that
    was cut off finds its place.
    """

    def __init__(self, fd: int) -> None:
        self.fd: Optional[int] = fd
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._after_return = False  # what was read ends with \r: an \n that follows belongs to it
        self._wrote_return = False
        self._in_line = False

    def pump(self, ready: Sequence[int]) -> None:
        if self.fd is not None and self.fd in ready:
            data = os.read(self.fd, _CHUNK_BYTES)
            self._write(self._decoder.decode(data, final=not data))
            if not data:
                os.close(self.fd)
                self.fd = None

    def drain(self) -> None:
        """Pass on what is left in the pipe; nobody holds its other end any more.

        A last line without its end gets one, so that ours begins a new line.
        """
        while self.fd is not None:
            self.pump([self.fd])
        if self._in_line:
            self._write("\n")

    def _write(self, text: str) -> None:
        if not text:
            return
        cut_in_two = self._after_return and text[0] == "\n"
        self._after_return = text[-1] == "\r"
        text = text[1:] if cut_in_two else text
        text = text.replace("\r\n", "\n")
        if self._wrote_return:  # a line's end that is none of a pair must not become one
            rest = text.lstrip("\n")
            text = "\r" * (len(text) - len(rest)) + rest
        if text:
            self._wrote_return = text[-1] == "\r"
            self._in_line = text[-1] not in "\r\n"
        data = memoryview(text.encode())
        while data:
            try:
                data = data[os.write(1, data) :]
            except OSError:  # a full disk: the output is lost, the job of days goes on
                return


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
    """SIGKILL every process that carries the tag until there is none; how many there were."""
    mark = f"{TAG}={tag}".encode()
    killed = set()
    for _ in range(500):
        found = marked(mark)
        if not found:
            break
        killed.update(found)
        for pid in found:
            kill(pid, signal.SIGKILL)
        time.sleep(_ROUND_S)
    return len(killed)


def marked(mark: bytes) -> List[int]:
    """The living processes that have ``NAME=value`` in their environment."""
    return [pid for pid, _, _ in _processes() if mark in _environment(pid)]


def _processes() -> List[Tuple[int, int, int]]:
    """(pid, parent, session) of every process that is not a zombie."""
    rows = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended while we looked
            if fields[0] not in (b"Z", b"X"):
                rows.append((int(name), int(fields[1]), int(fields[3])))
    return rows


def _environment(pid: int) -> List[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []  # ended, or not ours


def kill(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended."""
    with suppress(ProcessLookupError):  # it was faster
        os.kill(pid, number)


def _send(channel: socket.socket, data: bytes) -> None:
    with suppress(OSError):  # the other one is dead; both sides act on that when they read
        channel.sendall(data)


def _prctl(option: int, value: int) -> bool:
    try:
        return bool(ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0)
    except (AttributeError, OSError):
        return False  # not Linux


def _before_exec() -> None:
    for number in _ENDING:
        signal.signal(number, signal.SIG_DFL)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _explain_start(
    argv: Sequence[str], env: Dict[str, str], cwd: str, error: OSError
) -> Tuple[int, str]:
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
    return 126, f"exit code 126: {argv[0]!r} cannot be started on node {host}: {error}"
