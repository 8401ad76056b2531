"""Ends what dead hosts have left on this node, a step at a time, so that nothing waits for it."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

from ..node.rundir import RunDir
from ..node.supervise import KEEPER, TAG, is_guard, kill, marked
from .notes import folder_of, read_begun, read_ended

#: Seconds for a host's guard to end what the host has left, also what has lost its mark.
_GUARD_S = 60.0
#: Seconds until it is said that a process does not end, and between two times.
_TELL_S = 30.0
#: Looks in a row that must find nothing: a process can be made while another look is on.
_CLEAN_LOOKS = 2


class Noted(NamedTuple):
    """What a dead host has noted.

    Attributes:
        ended: a row for each element that has ended.
        begun: those that had begun, with their attempts, and have not ended; ``None`` when nothing
            says which ones.
    """

    ended: List[List[Any]]
    begun: Optional[List[List[int]]]


class Sweeping:
    """What one host has left.

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

    def is_to_be_told(self, now: float) -> bool:
        """Whether it should be said now that a process does not end."""
        is_due = now >= self._tell_at
        self._tell_at = now + _TELL_S if is_due else self._tell_at
        return is_due

    def read_notes(self) -> Noted:
        """What the host has noted; its run directory is removed."""
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
            elif left and sweeping.is_to_be_told(now):
                yield number, None, ", ".join(_in_words(pid) for pid in sorted(set(left)))


def _in_words(pid: int) -> str:
    """A process as an administrator looks for it."""
    fields = {}
    with suppress(OSError), open(f"/proc/{pid}/status", encoding="utf-8") as file:
        fields = dict(line.split(":", 1) for line in file if ":" in line)
    name, state = (fields.get(key, "?").strip() for key in ("Name", "State"))
    return f"process {pid} ({os.path.basename(name)}, {state})"
