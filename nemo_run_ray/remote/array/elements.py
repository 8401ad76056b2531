"""The elements of an array on the head: their journal, who has each of them, and how it ended.

An element is written down as leased before a host may start it, and as ended when its end is known.
A driver that is started again continues from the journal. Its records have one length and a
checksum; what a crash has torn at the end is cut off.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
import tempfile
import time
import zlib
from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import groupby
from typing import (
    Any,
    Deque,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Set,
)

from ..files import open_own
from ..node.output import say
from ..spec import ArraySpec
from ..status import HOSTS_FILE, JOURNAL_FILE, RESULTS_FILE, file_of, first_id
from .elements_file import NAME, Elements

#: A host may start the element.
LEASED = 1
#: It has ended with an exit code.
ENDED = 2
#: It was not started, or its host is proven dead.
GIVEN_BACK = 3
#: It is not to run, or not to go on, as the user wants.
CANCELLED = 4

#: Behind the four bytes that tell which array it is.
_FORMAT = b"nemo_run_ray array 1\n"
_RECORD = struct.Struct("<IBBiIf")
_SUM = struct.Struct("<I")
_SIZE = _RECORD.size + _SUM.size
#: Seconds to wait for another driver's end, and between two looks.
_LOCK_S, _LOCK_AGAIN_S = 60.0, 0.1
#: Records that are read at once.
_BLOCK_RECORDS = 2**14


class Record(NamedTuple):
    """One line of the journal.

    Attributes:
        element: its index, from 0.
        kind: what has happened.
        attempt: of the element, from 1.
        code: its exit code.
        host: number of the host that has it.
        seconds: that it took.
    """

    element: int
    kind: int
    attempt: int = 0
    code: int = 0
    host: int = 0
    seconds: float = 0.0


class Journal:
    """The journal of one array. It has one writer, which locks it.

    Args:
        path: of the file, which may hold what an earlier driver wrote.
        key: tells this array from any other, so that a strange file is not read as its journal.

    Raises:
        TimeoutError: another driver of this array is still there.
        PermissionError: the file is a link, or another user's.

    Attributes:
        count: of the records that the file holds.
    """

    def __init__(self, path: str, key: str) -> None:
        head = zlib.crc32(key.encode()).to_bytes(4, "little") + _FORMAT
        self._fd = open_own(path, os.O_RDWR | os.O_CREAT)
        self._path = path
        _lock(self._fd, path)
        is_ours = os.pread(self._fd, len(head), 0) == head
        self.count = sum(1 for _ in read_records(path)) if is_ours else 0
        kept = len(head) + self.count * _SIZE
        self._good = kept if self.count else 0  # bytes that are whole
        self._waiting: List[bytes] = [] if self.count else [head]

    def records(self) -> Iterator[Record]:
        """The records of an earlier driver."""
        return read_records(self._path) if self.count else iter(())

    def add(self, record: Record) -> None:
        """Let a record wait for the next ``commit``."""
        data = _RECORD.pack(*record)
        self._waiting.append(data + _SUM.pack(zlib.crc32(data)))

    def close(self) -> None:
        """Write no more; what waits is lost."""
        os.close(self._fd)

    def commit(self) -> None:
        """Write what waits, and return when the disk has it.

        Raises:
            OSError: the disk is full, or broken. What waits is written by the next call.
        """
        if not self._waiting:
            return
        data = b"".join(self._waiting)
        view = memoryview(data)
        os.ftruncate(self._fd, self._good)  # what a crash, or a full disk, has left behind it
        os.lseek(self._fd, self._good, os.SEEK_SET)
        while view:
            view = view[os.write(self._fd, view) :]
        os.fdatasync(self._fd)
        self._good += len(data)
        self._waiting.clear()


def _lock(fd: int, path: str) -> None:
    """Wait until no other driver has the journal, which one that was killed has for a moment."""
    until = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() >= until:
                os.close(fd)
                raise TimeoutError(f"another driver of this array writes {path}") from error
        except OSError:  # a file system without locks
            return
        time.sleep(_LOCK_AGAIN_S)


def read_records(path: str) -> Iterator[Record]:
    """The records of a journal up to the first that is torn."""
    with open(open_own(path, os.O_RDONLY), "rb") as file:
        file.seek(4 + len(_FORMAT))
        for block in iter(lambda: file.read(_BLOCK_RECORDS * _SIZE), b""):
            found = list(_records(block))
            yield from found
            if len(found) * _SIZE != len(block):
                return


def _records(data: bytes) -> Iterator[Record]:
    for start in range(0, len(data) - _SIZE + 1, _SIZE):
        record = data[start : start + _RECORD.size]
        (checksum,) = _SUM.unpack_from(data, start + _RECORD.size)
        if zlib.crc32(record) != checksum:
            return
        yield Record(*_RECORD.unpack(record))


class LinesFile:
    """A file of lines: those that a crash, or a full disk, has torn are cut off.

    Args:
        path: of the file.
        is_new: what the file holds is another array's.
    """

    def __init__(self, path: str, is_new: bool = False) -> None:
        self._path = path
        self._good = 0  # bytes that are whole
        if os.path.lexists(path) and not is_new:
            with open(open_own(path, os.O_RDONLY), "rb") as file:
                self._good = sum(len(line) for line in file if line.endswith(b"\n"))

    def read(self) -> List[str]:
        """The lines that are whole."""
        if not self._good:
            return []
        with open(open_own(self._path, os.O_RDONLY), "rb") as file:
            return file.read(self._good).decode().splitlines()

    def append(self, text: str) -> None:
        """Write whole lines, and return when the disk has them."""
        data = text.encode()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with open(open_own(self._path, flags), "ab") as file:
            file.truncate(self._good)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self._good += len(data)


#: Lost hosts after which an element has failed: it may be what kills them.
LOSSES_MAX = 3
#: Failures that are kept with their reason, for ``status``.
_SHOWN_FAILURES = 20
#: Exit code of an element whose hosts have died too often.
LOST_CODE = 137


class ElementState(IntEnum):
    """The state of an element."""

    #: No host has it.
    WAITING = 0
    #: A host has it: it waits there for a slot, or runs.
    LEASED = 1
    SUCCEEDED = 2
    #: It has failed as often as it may.
    FAILED = 3
    CANCELLED = 4


class Lease(NamedTuple):
    """One attempt of an element, that a host may start."""

    element: int
    attempt: int


class Failure(NamedTuple):
    """An element that has failed, and the reason."""

    element: int
    code: int
    reason: str


class Stretch(NamedTuple):
    """Elements in a row about which the same is known.

    Attributes:
        first, last: their indices.
        state: name of their state.
        attempts: of each, so far.
        code: exit code of the last attempt that has ended.
    """

    first: int
    last: int
    state: str
    attempts: int
    code: int


@dataclass
class ArrayProgress:
    """The state of all elements.

    Attributes:
        count: of the elements.
        retries: further attempts of an element after a failure.
        permanent_exit_codes: that no further attempt would change.
        failures: the first ones.
        has_run: an element has ended by itself.
    """

    count: int
    retries: int = 0
    permanent_exit_codes: Sequence[int] = ()
    failures: List[Failure] = field(default_factory=list)
    has_run: bool = False

    def __post_init__(self) -> None:
        self._states = bytearray(self.count)
        self._attempts = bytearray(self.count)
        self._codes = bytearray(self.count)
        self._unwanted: Set[int] = set()  # leased ones that were cancelled
        self._losses: Dict[int, int] = {}
        self._next = 0
        self._again: Deque[int] = deque()
        self._counts = [0] * len(ElementState)
        self._counts[ElementState.WAITING] = self.count

    def replay(self, records: Iterable[Record]) -> Dict[int, Dict[int, int]]:
        """Take over what an earlier driver wrote down.

        Returns:
            Of every host the elements that it had, with their attempts.
        """
        held: Dict[int, Dict[int, int]] = {}
        for record in records:
            if record.kind == LEASED:
                self._attempts[record.element] = record.attempt
                self._move(record.element, ElementState.LEASED)
                held.setdefault(record.host, {})[record.element] = record.attempt
            elif record.kind in (ENDED, GIVEN_BACK):
                held.get(record.host, {}).pop(record.element, None)
                if record.kind == ENDED:
                    self.ended(Lease(record.element, record.attempt), record.code, "")
                else:
                    lease = Lease(record.element, record.attempt)
                    self.given_back(lease, has_run=bool(record.code))
            elif record.kind == CANCELLED:
                self.cancel(record.element)
        return held

    def state(self, index: int) -> ElementState:
        return ElementState(self._states[index])

    def number(self, state: ElementState) -> int:
        """The number of elements in a state."""
        return self._counts[state]

    @property
    def ended_count(self) -> int:
        """The number of elements that are over."""
        waiting, leased = ElementState.WAITING, ElementState.LEASED
        return self.count - self._counts[waiting] - self._counts[leased]

    @property
    def is_over(self) -> bool:
        waiting, leased = ElementState.WAITING, ElementState.LEASED
        return not (self._counts[waiting] or self._counts[leased])

    @property
    def is_settled(self) -> bool:
        """Whether no element begins any more: those that hosts have were cancelled."""
        if self._counts[ElementState.WAITING]:
            return False
        cancelled = sum(self._states[index] == ElementState.LEASED for index in self._unwanted)
        return self._counts[ElementState.LEASED] == cancelled

    def take(self) -> Optional[Lease]:
        """Lease the next element that waits to a host."""
        index = self._next_waiting()
        if index is None:
            return None
        self._attempts[index] += 1
        self._move(index, ElementState.LEASED)
        return Lease(index, self._attempts[index])

    def ended(self, lease: Lease, code: int, reason: str) -> bool:
        """Note the end of an attempt; whether it was known to run until now."""
        if not self._is_current(lease):
            return False
        self._codes[lease.element] = code & 0xFF
        self.has_run = self.has_run or lease.element not in self._unwanted
        if code == 0:
            self._move(lease.element, ElementState.SUCCEEDED)
        elif lease.element in self._unwanted:
            self.cancelled(lease)
        elif code in self.permanent_exit_codes or lease.attempt > self._tries(lease.element):
            self._fail(lease.element, code, reason)
        else:
            self._wait_again(lease.element)
        return True

    def given_back(self, lease: Lease, has_run: bool) -> bool:
        """Note that an attempt was never started, or that its host is proven dead.

        Args:
            lease: the attempt.
            has_run: it may have begun.
        """
        if not self._is_current(lease):
            return False
        if lease.element in self._unwanted:
            self.cancelled(lease)
            return True
        if not has_run:
            self._attempts[lease.element] -= 1
        else:
            losses = self._losses[lease.element] = self._losses.get(lease.element, 0) + 1
            if losses >= LOSSES_MAX:
                self._fail(lease.element, LOST_CODE, f"its host has died {losses} times")
                return True
        self._wait_again(lease.element)
        return True

    def cancel_waiting(self) -> None:
        """Let all elements that wait be cancelled."""
        while True:
            index = self._next_waiting()
            if index is None:
                return
            self._move(index, ElementState.CANCELLED)

    def cancel(self, index: int) -> Optional[Lease]:
        """Let an element be cancelled that is not over.

        Returns:
            The attempt that a host has, which is to be ended; it is not tried again.
        """
        if self._states[index] == ElementState.WAITING:
            self._move(index, ElementState.CANCELLED)
        elif self._states[index] == ElementState.LEASED:
            self._unwanted.add(index)
            return Lease(index, self._attempts[index])
        return None

    def cancelled(self, lease: Lease) -> bool:
        """Note that an attempt was ended on request; whether it was known to run until now."""
        is_current = self._is_current(lease)
        if is_current:
            self._move(lease.element, ElementState.CANCELLED)
        return is_current

    def stretches(self) -> Iterator[Stretch]:
        """The state of every element."""
        first = 0
        for (state, attempts, code), same in groupby(
            zip(self._states, self._attempts, self._codes)
        ):
            count = sum(1 for _ in same)
            name = ElementState(state).name.lower()
            yield Stretch(first, first + count - 1, name, attempts, code)
            first += count

    def _tries(self, index: int) -> int:
        """Attempts that end in a failure, before the last one; those whose host died do not
        count."""
        return self.retries + self._losses.get(index, 0)

    def _is_current(self, lease: Lease) -> bool:
        is_leased = self._states[lease.element] == ElementState.LEASED
        return is_leased and self._attempts[lease.element] == lease.attempt

    def _wait_again(self, index: int) -> None:
        self._move(index, ElementState.WAITING)
        self._again.append(index)

    def _next_waiting(self) -> Optional[int]:
        """The element that is leased next: those that wait again come first."""
        while self._again:
            index = self._again.popleft()
            if self._states[index] == ElementState.WAITING:
                return index
        while self._next < self.count:
            index, self._next = self._next, self._next + 1
            if self._states[index] == ElementState.WAITING:
                return index
        return None

    def _fail(self, index: int, code: int, reason: str) -> None:
        self._codes[index] = code & 0xFF
        self._move(index, ElementState.FAILED)
        if len(self.failures) < _SHOWN_FAILURES:
            self.failures.append(Failure(index, code, reason))

    def _move(self, index: int, state: ElementState) -> None:
        self._counts[self._states[index]] -= 1
        self._counts[state] += 1
        self._states[index] = state


#: Seconds from an element's end until its host has another one, when that is not there already.
_ROUND_TRIP_S = 0.3
#: Elements that take longer wait where any host can take them.
_LONG_S = 3.0
#: Most elements that wait for one slot: no other host gets them when this one becomes slow.
_PER_SLOT_MAX = 64
#: Weight of the newest element in the mean.
_WEIGHT = 0.1


class ElementPace:
    """The duration of an element: the mean of those that have ended, newer ones weighing more."""

    def __init__(self) -> None:
        self.seconds: Optional[float] = None

    def measured(self, seconds: float) -> None:
        """Take one more into account."""
        if self.seconds is None:
            self.seconds = seconds
        else:
            self.seconds += _WEIGHT * (seconds - self.seconds)

    @property
    def patience_s(self) -> float:
        """For how long none may end on a host until those that wait there are for others."""
        return _LONG_S + 2 * (self.seconds or 0.0)

    def held(self, slots: int) -> int:
        """The number of elements that a host may have: those that run, and those that keep it busy
        until the driver has heard of their end."""
        if self.seconds is None or self.seconds > _LONG_S:
            return slots
        ahead = slots * _ROUND_TRIP_S / max(self.seconds, 1e-4)
        return slots + min(int(ahead) + 1, slots * _PER_SLOT_MAX)


#: Seconds between two attempts to write to a disk that is full.
DISK_S = 5.0
#: Exit codes of what was ended by SIGTERM or SIGKILL, as all is when the array ends.
_ENDED_CODES = 143, 137
#: Failures that get a line in the log.
_REPORTED_FAILURES = 20


class Leases:
    """The elements of one array, with its journal.

    Args:
        spec: the array.
        path: of the file of its elements.
        submission_id: of the job.
        folder: of Ray's logs, beside which the journal lies; ``None`` when it is not known.

    Attributes:
        progress: of the elements.
        pace: how long they take.
        held: what each host of an earlier driver had, as far as its end is not written down.
        continues: there was an earlier driver.
        is_ending: all that runs was told to end: failures are its end, and nothing is leased again.
    """

    def __init__(
        self, spec: ArraySpec, path: str, submission_id: str, folder: Optional[str]
    ) -> None:
        self._elements = Elements(path)
        key = f"{first_id(submission_id)} {_checksum(path)}"
        place = folder or tempfile.gettempdir()
        self._journal = Journal(os.path.join(place, file_of(submission_id, JOURNAL_FILE)), key)
        results = os.path.join(place, file_of(submission_id, RESULTS_FILE))
        self._results = LinesFile(results, is_new=self._journal.count == 0)
        self.hosts_path = os.path.join(place, file_of(submission_id, HOSTS_FILE))
        self.pace = ElementPace()
        self.progress = ArrayProgress(len(self._elements), spec.retries, spec.permanent_exit_codes)
        self.held: Dict[int, Dict[int, int]] = self.progress.replay(self._journal.records())
        self.continues = self._journal.count > 0
        self.is_ending = False
        self._has_names = any(kind == NAME for kind, *_ in spec.targets)
        self._reported = 0
        self._unwritten: List[str] = []  # results
        self._write_at = 0.0

    @property
    def can_write(self) -> bool:
        """Whether the disk takes the journal, as far as is known."""
        return time.monotonic() >= self._write_at

    def take(self, host: int) -> Optional[List[Any]]:
        """Lease the next element to a host, which may hear of it after the next ``commit``.

        Args:
            host: its number.

        Returns:
            Its index, its attempt and its values; ``None`` when none waits.
        """
        lease = self.progress.take()
        if lease is None:
            return None
        self._journal.add(Record(lease.element, LEASED, lease.attempt, host=host))
        return [*lease, self._elements[lease.element]]

    def give_back(self, lease: Lease, host: int, has_run: bool) -> None:
        """Let an element wait again that a host has not begun, or whose host is proven dead.

        While all is being ended it is cancelled. For the journal it waits: another attempt of the
        array may go on from there.
        """
        if self.is_ending:
            is_known = self.progress.cancelled(lease)
        else:
            is_known = self.progress.given_back(lease, has_run)
        if is_known:
            code = 1 if has_run else 0
            self._journal.add(Record(lease.element, GIVEN_BACK, lease.attempt, code, host))

    def give_back_all(self, held: Mapping[int, int], host: int, has_run: bool) -> None:
        """Let elements wait again, as ``give_back`` does: by their indices the attempts."""
        for lease in held.items():
            self.give_back(Lease(*lease), host, has_run)

    def leave_all(self, held: Mapping[int, int]) -> None:
        """Cancel what may still run: for the journal a host has it, so that another attempt of the
        array waits until it is proven that nothing of it runs."""
        for lease in held.items():
            self.progress.cancelled(Lease(*lease))

    def cancel(self, indices: Iterable[int], only_waiting: bool) -> List[Lease]:
        """Let elements be cancelled that are not over.

        Args:
            indices: of the elements.
            only_waiting: leave those alone that a host has.

        Returns:
            The attempts that hosts have, and that are to be ended.
        """
        leased = []
        for index in indices:
            state = self.progress.state(index)
            is_leased = state is ElementState.LEASED and not only_waiting
            if state is ElementState.WAITING or is_leased:
                self._journal.add(Record(index, CANCELLED))
                lease = self.progress.cancel(index)
                leased += [lease] if lease is not None else []
        return leased

    def ended(self, host: int, row: List[Any]) -> None:
        """Note how an element has ended.

        Args:
            host: that had it.
            row: its index, attempt, exit code, seconds, how it ended in words, and its result.
        """
        element, attempt, code, seconds, reason = row[:5]
        if code and self._has_names:
            reason = f"{self._elements[element][0]}: {reason}"
        if self.is_ending and code in _ENDED_CODES:
            self.give_back(Lease(element, attempt), host, has_run=True)
            return
        if self.is_ending and code:  # it is known how it ended, also for another attempt
            if self.progress.cancelled(Lease(element, attempt)):
                self._journal.add(Record(element, ENDED, attempt, code, host, seconds))
            return
        if not self.progress.ended(Lease(element, attempt), code, reason):
            return
        self._journal.add(Record(element, ENDED, attempt, code, host, seconds))
        if len(row) > 5 and row[5] is not None:
            self._unwritten.append(json.dumps([element, row[5]]) + "\n")
        state = self.progress.state(element)
        if state is not ElementState.CANCELLED:
            self.pace.measured(seconds)
        if code and self._reported < _REPORTED_FAILURES and state is not ElementState.CANCELLED:
            self._reported += 1
            again = state is ElementState.WAITING
            say(f"element {element} has failed: {reason}{'; it is tried again' if again else ''}")

    def close(self) -> None:
        """Read and write no more."""
        self._elements.close()
        self._journal.close()

    def commit(self) -> bool:
        """Write down what has changed; whether the disk has it."""
        try:
            if self._unwritten:  # first: no later driver would ask for them again
                self._results.append("".join(self._unwritten))
                self._unwritten.clear()
            self._journal.commit()
        except OSError as error:
            say(f"the head cannot write its journal ({error}); no element is started meanwhile")
            self._write_at = time.monotonic() + DISK_S
            return False
        return True


def _checksum(path: str) -> int:
    found = 0
    with open(path, "rb") as file:
        for data in iter(lambda: file.read(2**20), b""):
            found = zlib.crc32(data, found)
    return found
