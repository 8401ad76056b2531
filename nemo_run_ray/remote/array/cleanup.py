"""The notes of an element host, and the end of processes that hosts and elements leave."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

from ..node import command
from ..node.rundir import RunDir, run_dirs
from ..node.supervise import KEEPER, TAG, is_guard, kill, marked
from ..trust import open_own
from .elements import Lease
from .workers import ATTEMPT, INDEX


class Notes:
    """The notes of one host, in two files beside its run directory.

    Args:
        run_dir: name of the run directory, which must be there.
    """

    def __init__(self, run_dir: str) -> None:
        folder = run_dirs(command.tmpdir())
        self._path_of_begun = _begun(folder, run_dir)
        self._begun_fd, self._ended_fd = _open(self._path_of_begun), _open(_ended(folder, run_dir))
        self._is_torn = False  # the last line of the ends may have no end

    def begins(self, element: int, attempt: int) -> None:
        """Note that an element is about to begin.

        Where that cannot be noted, the file goes: a full disk lets one be removed. Then all that
        the host has counts as begun.
        """
        data = f"[{element}, {attempt}]\n".encode()
        with suppress(OSError):
            if os.write(self._begun_fd, data) == len(data):
                return
        with suppress(FileNotFoundError):
            os.remove(self._path_of_begun)

    def ended(self, row: List[Any]) -> None:
        """Note how an element has ended, before it is reported."""
        data = ("\n" if self._is_torn else "").encode() + json.dumps(row).encode() + b"\n"
        self._is_torn = True
        with suppress(OSError):  # a full disk: it is reported all the same
            self._is_torn = os.write(self._ended_fd, data) != len(data)


def read_ended(run_dir: str) -> List[List[Any]]:
    """The ends that a host has noted that writes no more."""
    try:
        return _rows(_ended(folder_of(run_dir), run_dir))
    except FileNotFoundError:
        return []


def read_begun(run_dir: str) -> Optional[List[List[int]]]:
    """The elements that a host has begun that writes no more, with their attempts.

    Returns:
        ``None`` when nothing says which ones it has begun.
    """
    try:
        return _rows(_begun(folder_of(run_dir), run_dir))
    except FileNotFoundError:
        return None


def forget(run_dir: str) -> None:
    """Remove the notes of a host: the driver has written down what they say."""
    folder = folder_of(run_dir)
    for path in (_begun(folder, run_dir), _ended(folder, run_dir)):
        with suppress(FileNotFoundError):
            os.remove(path)
    with suppress(OSError):  # other jobs are in it
        os.rmdir(folder)


def folder_of(run_dir: str) -> str:
    """The folder in which a host of this node has its run directory and its notes.

    That need not be the one of this process: Python passes over a full folder of temporary files.
    """
    given = [os.environ[name] for name in ("TMPDIR", "TEMP", "TMP") if name in os.environ]
    others = ("/tmp", "/var/tmp", "/usr/tmp")
    places = [run_dirs(place) for place in (command.tmpdir(), *given, *others)]
    found = [place for place in places if os.path.exists(_ended(place, run_dir))]
    return found[0] if found else places[0]


def _rows(path: str) -> List[List[Any]]:
    rows: List[List[Any]] = []
    with open(path, encoding="utf-8") as file:
        for line in file:
            with suppress(ValueError):  # a full disk, or the host's death, has torn it
                rows.append(json.loads(line))
    return rows


def _open(path: str) -> int:
    return open_own(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def _begun(folder: str, run_dir: str) -> str:
    return os.path.join(folder, f"{run_dir}.begun")


def _ended(folder: str, run_dir: str) -> str:
    return os.path.join(folder, f"{run_dir}.ended")


#: The mark of an element's processes: its index and its attempt.
_Mark = Tuple[str, str]
_NO_MARK: _Mark = ("", "")


class Orphans:
    """Processes that have left their element's group; they are ended when the element is over.

    Args:
        grace_s: seconds from SIGTERM to SIGKILL.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._kill_at: Dict[int, float] = {}
        self._suspects: Set[int] = set()  # of the last look
        self._marks: Set[_Mark] = set()

    @property
    def are_there(self) -> bool:
        return bool(self._kill_at or self._suspects)

    def of(self, lease: Lease) -> bool:
        """Whether the last look has found one of this element, or one that may be.

        A process that was forked shows the environment of the one that forks elements, as long as
        it has started no other program.
        """
        return not self._marks.isdisjoint([_mark_of(lease), _NO_MARK])

    def look(self, running: Sequence[Lease], groups: Set[int]) -> None:
        """Find those of elements whose first process has ended, and let them end.

        One without a mark must be there at two looks: where the process that forks elements was
        killed, it may be one of which that had not told yet, and is known at the next look.

        Args:
            running: the elements whose first process has not ended.
            groups: process groups of elements, and of what is not an element's.
        """
        found = _orphans(groups, {_mark_of(lease) for lease in running})
        unmarked = {pid for pid, mark in found.items() if mark == _NO_MARK}
        suspects, self._suspects = self._suspects, unmarked - set(self._kill_at)
        for pid in set(found) - set(self._kill_at) - (unmarked - suspects):
            kill(pid, signal.SIGTERM)
            self._kill_at[pid] = time.monotonic() + self._grace_s
        for pid in set(self._kill_at) - set(found):
            del self._kill_at[pid]
        self._marks = set(found.values())

    def forget(self, pid: int) -> None:
        """This one has ended, and its number may soon be another's."""
        self._kill_at.pop(pid, None)
        self._suspects.discard(pid)

    def kill_late(self, now: float) -> None:
        """Kill those that have not ended in time."""
        for pid, kill_at in self._kill_at.items():
            if now >= kill_at:
                kill(pid, signal.SIGKILL)


def _orphans(groups: Set[int], active: Set[_Mark]) -> Dict[int, _Mark]:
    """The children of this process that it has adopted from elements, with the elements' marks.

    Args:
        groups: process groups of elements, and of what is not an element's.
        active: marks of the elements whose first process has not ended.
    """
    own = os.getpid()
    with open(f"/proc/{own}/task/{own}/children", encoding="ascii") as file:
        children = [int(word) for word in file.read().split()]
    found = {}
    for pid in children:
        if pid not in groups:  # the first processes are most of them
            with suppress(OSError):  # it has ended, or is another user's
                mark = _mark_in_environment(pid)
                if mark not in active and os.getpgid(pid) not in groups:
                    found[pid] = mark
    return found


def _mark_in_environment(pid: int) -> _Mark:
    with open(f"/proc/{pid}/environ", "rb") as file:
        variables = dict(row.split(b"=", 1) for row in file.read().split(b"\0") if b"=" in row)
    index, attempt = (variables.get(name.encode(), b"").decode() for name in (INDEX, ATTEMPT))
    return index, attempt


def _mark_of(lease: Lease) -> _Mark:
    """The mark of an element in the environment of its processes."""
    return str(lease.element), str(lease.attempt)


#: Seconds for a host's guard to end what the host has left, also what has lost its mark.
_GUARD_S = 60.0
#: Seconds until it is said that a process does not end, and between two times.
_TELL_S = 30.0
#: Looks in a row that must find nothing: a process can be made while another look is on.
_CLEAN_LOOKS = 2


class Noted(NamedTuple):
    """The notes of a dead host.

    Attributes:
        ended: a row for each element that has ended.
        begun: those that had begun, with their attempts, and have not ended; ``None`` when nothing
            says which ones.
    """

    ended: List[List[Any]]
    begun: Optional[List[List[int]]]


class Sweeping:
    """The processes that one host has left.

    Its own process is killed first: one that was only stopped could start another element later, or
    note ends that this causes. Its guard then kills what is below it, and last comes what carries
    the host's tag.

    Args:
        tag: in the environment of all its processes.
        run_dir: name of its run directory.
        now: the time.
    """

    def __init__(self, tag: str, run_dir: str, now: float) -> None:
        self._tag, self._run_dir = tag, run_dir
        self._guard_until, self._tell_at = now + _GUARD_S, now + _TELL_S
        self._clean_looks = 0

    def turn(self, now: float) -> List[int]:
        """Go one step on; the processes that are there, which is none when nothing can come."""
        keepers = marked(f"{KEEPER}={self._tag}".encode())
        guards = [pid for pid in keepers if is_guard(pid)]
        found = [pid for pid in keepers if pid not in guards]
        found = found or marked(f"{TAG}={self._tag}".encode())
        for pid in found:
            kill(pid, signal.SIGKILL)
        for pid in guards:
            kill(pid, signal.SIGCONT if now < self._guard_until else signal.SIGKILL)
        self._clean_looks = 0 if found or keepers else self._clean_looks + 1
        return [*keepers, *found]

    @property
    def is_done(self) -> bool:
        return self._clean_looks >= _CLEAN_LOOKS

    def is_due(self, now: float) -> bool:
        """Whether it should be said now that a process does not end."""
        is_due = now >= self._tell_at
        self._tell_at = now + _TELL_S if is_due else self._tell_at
        return is_due

    def read_notes(self) -> Noted:
        """The notes of the host; its run directory is removed."""
        ended, begun = read_ended(self._run_dir), read_begun(self._run_dir)
        RunDir(self._run_dir, base=folder_of(self._run_dir)).remove()
        if begun is not None:
            over = {tuple(row[:2]) for row in ended}
            begun = [lease for lease in begun if tuple(lease) not in over]
        return Noted(ended, begun)


class Sweepings:
    """All dead hosts that a host was told to end, by their numbers."""

    def __init__(self) -> None:
        self._hosts: Dict[int, Sweeping] = {}

    def __bool__(self) -> bool:
        return bool(self._hosts)

    def add(self, number: int, tag: str, run_dir: str, now: float) -> None:
        self._hosts[number] = Sweeping(tag, run_dir, now)

    def turn(self, now: float) -> Iterator[Tuple[int, Optional[Noted], str]]:
        """Go one step on with each.

        Yields:
            The number of a host of which nothing is left, with what it has noted; or of one of
            which something does not end, with ``None`` and words about it.
        """
        for number, sweeping in list(self._hosts.items()):
            left = sweeping.turn(now)
            if sweeping.is_done:
                del self._hosts[number]
                yield number, sweeping.read_notes(), ""
            elif left and sweeping.is_due(now):
                yield number, None, ", ".join(_in_words(pid) for pid in sorted(set(left)))


def _in_words(pid: int) -> str:
    """A process as an administrator looks for it."""
    fields = {}
    with suppress(OSError), open(f"/proc/{pid}/status", encoding="utf-8") as file:
        fields = dict(line.split(":", 1) for line in file if ":" in line)
    name, state = (fields.get(key, "?").strip() for key in ("Name", "State"))
    return f"process {pid} ({os.path.basename(name)}, {state})"
