"""The processes of a command: found, signalled and ended, whatever their parents are now."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import socket
import time
from contextlib import suppress
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

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
