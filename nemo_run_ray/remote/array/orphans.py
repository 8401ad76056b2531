"""Processes that elements have left behind: children that the host has adopted."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import Dict, Sequence, Set, Tuple

from ..node.supervise import kill
from .element import ATTEMPT, INDEX
from .progress import Lease

#: What tells an element's processes: its index and its attempt.
_Mark = Tuple[str, str]
_NO_MARK: _Mark = ("", "")


class Orphans:
    """Those that have left their element's group, and are ended when it is over.

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
    """What the environment of an element's processes says of it."""
    return str(lease.element), str(lease.attempt)
