"""The items of a map, taken from what the caller has given.

An iterable may wait: for a network, or for the results of its own map. So it is read in a thread of
its own, as ``multiprocessing``'s ``imap`` does it, and keeps neither a result nor another item
waiting. A list is at hand, and needs no thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextvars import copy_context
from itertools import islice
from typing import Any


class ItemSource:
    """What a map takes its items from.

    Args:
        items: of the map.
        wake: is called, in any thread, when there is an item after there was none, or no further.
    """

    def __init__(self, items: Iterable[Any], wake: Callable[[], None]) -> None:
        self._items = iter(items)
        self._wake = wake
        self._read: deque[Any] = deque()
        #: As many as may lie in ``_read``.
        self._room = 0
        self._has_ended = self._is_closed = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._is_at_hand = isinstance(items, (list, tuple, range))
        if not self._is_at_hand:
            run, name = copy_context().run, "nemo-run-ray-items"
            threading.Thread(target=run, args=(self._run,), name=name, daemon=True).start()

    @property
    def is_over(self) -> bool:
        """Whether all items have been taken."""
        with self._changed:
            return self._has_ended and not self._read and self._error is None

    def take(self, most: int) -> list[Any]:
        """The items that are there, so many at most; as many are read ahead.

        Raises:
            BaseException: what the iterable has raised, when the items before it have been taken.
        """
        if self._is_at_hand:
            found = list(islice(self._items, most))
            self._has_ended = len(found) < most
            return found
        with self._changed:
            found = [self._read.popleft() for _ in range(min(most, len(self._read)))]
            self._room = most - len(found)
            self._changed.notify()
            if self._error is not None and not found:
                raise self._error
            return found

    def close(self) -> None:
        """Take no further item; one that the iterable is at is lost."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _run(self) -> None:
        try:
            while self._may_read():
                self._note(next(self._items))
        except StopIteration:
            pass
        except BaseException as error:  # the caller's thread raises it
            self._error = error
        with self._changed:
            self._has_ended = True
        self._wake()

    def _may_read(self) -> bool:
        """Wait for room; whether there still is someone who wants items."""
        with self._changed:
            while len(self._read) >= self._room and not self._is_closed:
                self._changed.wait()
            return not self._is_closed

    def _note(self, value: Any) -> None:
        with self._changed:
            self._read.append(value)
            is_first = len(self._read) == 1
        if is_first:
            self._wake()
