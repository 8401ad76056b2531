"""The log of an array, read once for all of its tasks that are followed in this process."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any, ClassVar

from nemo_run_ray.errors import NemoRunRayError
from nemo_run_ray.experiment.follow_log import lines, of_element
from nemo_run_ray.experiment.job import RemoteJob

#: Seconds between two questions whether a task is over.
_ASK_S = 1.0
#: What a follower gets: a line or a piece of one, an error, and ``None`` at the log's end.
_Pieces = SimpleQueue[str | NemoRunRayError | None]


class SharedLog:
    """One array's log. NeMo-Run follows each task by a thread of its own, and may have thousands.

    Args:
        array: whose log it is.
    """

    _shared: ClassVar[dict[tuple[Any, ...], SharedLog]] = {}
    _shared_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, array: RemoteJob) -> None:
        self._array = array
        self._lock = threading.Lock()
        self._is_read = False
        #: Pieces of each element's lines that the reader has come by.
        self._passed_on: Counter[int] = Counter()
        self._followers: dict[int, list[_Pieces]] = {}

    @classmethod
    def of(cls, array: RemoteJob) -> SharedLog:
        """The one that this process has."""
        key = array.record.exp_dir, array.id, *array.record.nonces
        with cls._shared_lock:
            return cls._shared.setdefault(key, cls(array))

    def follow(self, index: int, is_over: Callable[[], bool]) -> Iterator[str]:
        """The lines of an element, until it is over or the array's log ends.

        Args:
            index: of the element.
            is_over: whether it has ended. Its last lines may come after that.

        Raises:
            ClusterError: the log cannot be read.
        """
        pieces, missed = self._join(index)
        try:
            yield from islice(of_element(index, lines(self._array.output())), missed)
            ask_at = time.monotonic() + _ASK_S
            while True:
                try:
                    found = pieces.get(timeout=_ASK_S)
                except Empty:
                    found = ""
                if isinstance(found, NemoRunRayError):
                    raise found
                if found is None:
                    return
                if found:
                    yield found
                if time.monotonic() >= ask_at:
                    if is_over():
                        return
                    ask_at = time.monotonic() + _ASK_S
        finally:
            self._leave(index, pieces)

    def _join(self, index: int) -> tuple[_Pieces, int]:
        """What the element's next lines come by, and how many pieces have passed before."""
        pieces: _Pieces = SimpleQueue()
        with self._lock:
            self._followers.setdefault(index, []).append(pieces)
            if not self._is_read:
                self._is_read = True
                self._passed_on.clear()
                threading.Thread(target=self._read, name="nrr-shared-log", daemon=True).start()
            return pieces, self._passed_on[index]

    def _leave(self, index: int, pieces: _Pieces) -> None:
        with self._lock:
            self._followers[index].remove(pieces)
            if not self._followers[index]:
                del self._followers[index]

    def _read(self) -> None:
        end: NemoRunRayError | None = None
        index, is_whole, is_wanted = -1, True, True
        try:
            for piece in lines(self._array.output(follow=True)):
                if is_whole:  # else it goes on with a line that was too long
                    index = _element_of(piece)
                is_whole = piece.endswith("\n")
                is_wanted = self._pass_on(index, piece)
                if not is_wanted:
                    return
        except NemoRunRayError as error:
            end = error
        finally:
            if is_wanted:
                self._be_over(end)

    def _pass_on(self, index: int, piece: str) -> bool:
        """Give it to those who follow its element; false when nobody follows any.

        The next one that follows begins to read anew then.
        """
        with self._lock:
            self._is_read = bool(self._followers)
            self._passed_on[index] += 1
            for pieces in self._followers.get(index, ()):
                pieces.put(piece)
            return self._is_read

    def _be_over(self, end: NemoRunRayError | None) -> None:
        with self._lock:
            self._is_read = False
            for followers in self._followers.values():
                for pieces in followers:
                    pieces.put(end)


def _element_of(line: str) -> int:
    """The index that a line begins with; -1 for one of the driver's."""
    index, bar, _ = line.partition("| ")
    return int(index) if bar and index.isdecimal() else -1
