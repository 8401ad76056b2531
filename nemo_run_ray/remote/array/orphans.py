"""Processes that elements have left behind: children that the host has adopted."""

from __future__ import annotations

import os
import signal
import time
from typing import Dict, List, Sequence, Set, Tuple

from ..node.tree import kill
from .element import ATTEMPT, INDEX
from .progress import Lease


class Orphans:
    """Those that have left their element's group, and are ended when it is over.

    Attributes:
        grace_s: seconds from SIGTERM to SIGKILL.
    """

    def __init__(self) -> None:
        self.grace_s = 0.0
        self._kill_at: Dict[int, float] = {}

    @property
    def are_there(self) -> bool:
        return bool(self._kill_at)

    def look(self, running: Sequence[Lease], groups: Set[int]) -> None:
        """Find those of elements that are over, and let them end.

        Args:
            running: the elements that are not over.
            groups: process groups of what is not over.
        """
        found = _orphans(groups, {_mark_of(lease) for lease in running})
        for pid in set(found) - set(self._kill_at):
            kill(pid, signal.SIGTERM)
            self._kill_at[pid] = time.monotonic() + self.grace_s
        for pid in set(self._kill_at) - set(found):
            del self._kill_at[pid]

    def kill_late(self, now: float) -> None:
        """Kill those that have not ended in time."""
        for pid, kill_at in self._kill_at.items():
            if now >= kill_at:
                kill(pid, signal.SIGKILL)


def _orphans(groups: Set[int], active: Set[Tuple[str, str]]) -> List[int]:
    """The children of this process that it has adopted from elements that are over.

    Args:
        groups: process groups of what is not over.
        active: marks of the elements that are not over.
    """
    pid = os.getpid()
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        children = [int(word) for word in file.read().split()]
    return [one for one in children if _is_over(one, groups, active)]


def _is_over(pid: int, groups: Set[int], active: Set[Tuple[str, str]]) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = dict(row.split(b"=", 1) for row in file.read().split(b"\0") if b"=" in row)
        is_in_group = os.getpgid(pid) in groups
    except OSError:  # it has ended
        return False
    mark = tuple(variables.get(name.encode(), b"").decode() for name in (INDEX, ATTEMPT))
    return not is_in_group and mark not in active


def _mark_of(lease: Lease) -> Tuple[str, str]:
    """What the environment of an element's processes says of it."""
    return str(lease.element), str(lease.attempt)
