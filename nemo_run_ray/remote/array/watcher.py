"""Which descriptors are readable: kept registered while nothing about them changes."""

from __future__ import annotations

import selectors
from typing import Any, Dict, Mapping, Set, Tuple


class Watcher:
    """The descriptors that a loop waits for."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._watched: Dict[int, Tuple[Any, int]] = {}

    def wait(self, reading: Mapping[int, Any], writing: Set[int], timeout_s: float) -> Set[int]:
        """Those that are ready.

        Args:
            reading: to wait for, each with its owner: a number is another one's after a close.
            writing: those of them that are to be written to as well.
            timeout_s: to wait at most.
        """
        wanted = {
            fd: (owner, selectors.EVENT_READ | (selectors.EVENT_WRITE if fd in writing else 0))
            for fd, owner in reading.items()
        }
        for fd, watched in list(self._watched.items()):
            if wanted.get(fd) != watched:
                self._selector.unregister(fd)
                del self._watched[fd]
        for fd, (owner, events) in wanted.items():
            if fd not in self._watched:
                self._selector.register(fd, events)
                self._watched[fd] = owner, events
        return {key.fd for key, _ in self._selector.select(timeout_s)}
