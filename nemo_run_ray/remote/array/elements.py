"""The elements of an array on the head: their journal, who has each of them, and how it ended.

An element is written down as leased before a host may start it, and as ended when its end is known.
A driver that is started again continues from the journal. Each record is a JSON list in a line of
its own; a line that a crash, or a full disk, has torn is cut off.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import time
from collections import deque
from enum import IntEnum
from itertools import groupby
from typing import (
    Any,
    Callable,
    Deque,
    Dict,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Set,
    Tuple,
)

from ..files import open_own
from ..node.output import say
from ..spec import ArraySpec
from ..status import JOURNAL_FILE, RESULTS_FILE, file_of, first_id
from .elements_file import NAME, Elements

#: Kinds of records: a host may start the element; it has ended with an exit code; it was not
#: started, or its host is proven dead; the user does not want it; a host may start elements.
LEASED, ENDED, GIVEN_BACK, CANCELLED, HOST = range(1, 6)
#: Seconds to wait for another driver's end, and between two looks.
_LOCK_S, _LOCK_AGAIN_S = 60.0, 0.1


class Record(NamedTuple):
    """A change of an element.

    Attributes:
        element: its index, from 0.
        kind: ``LEASED``, ``ENDED``, ``GIVEN_BACK`` or ``CANCELLED``.
        host: number of the host that has it.
        attempt: of the element, from 1.
        code: its exit code; of one that was given back, 1 if it may have begun.
    """

    element: int
    kind: int
    host: int = 0
    attempt: int = 0
    code: int = 0


class HostRecord(NamedTuple):
    """An element host, as it is written down before it may start anything.

    Attributes:
        number: of the host, over all drivers of the array.
        kind: ``HOST``.
        node_id: where it is.
        tag: in the environment of all its processes.
        run_dir: name of its run directory.
    """

    number: int
    kind: int
    node_id: str
    tag: str
    run_dir: str


class LinesFile:
    """A file to which whole lines are added by one writer.

    Args:
        path: of the file, which may hold lines of an earlier driver.

    Raises:
        PermissionError: the file is a link, or another user's.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = open_own(path, os.O_RDWR | os.O_CREAT)
        _lock(self._fd, path)
        self._whole_bytes = sum(map(len, whole_lines(path)))
        self._unwritten: List[str] = []

    def add(self, row: Sequence[Any]) -> None:
        """Let a line wait for the next ``commit``."""
        self._unwritten.append(json.dumps(row) + "\n")

    def commit(self) -> None:
        """Write what waits, and return when the disk has it.

        Raises:
            OSError: the disk is full, or broken. What waits is written by the next call.
        """
        if not self._unwritten:
            return
        data = "".join(self._unwritten).encode()
        view = memoryview(data)
        os.ftruncate(self._fd, self._whole_bytes)  # what a full disk has left behind it
        os.lseek(self._fd, self._whole_bytes, os.SEEK_SET)
        while view:
            view = view[os.write(self._fd, view) :]
        os.fdatasync(self._fd)
        self._whole_bytes += len(data)
        self._unwritten.clear()

    def close(self) -> None:
        os.close(self._fd)


def whole_lines(path: str) -> Iterator[bytes]:
    """The lines of a file but for a last one that is torn."""
    with open(open_own(path, os.O_RDONLY), "rb") as file:
        yield from (line for line in file if line.endswith(b"\n"))


def read_records(path: str) -> Iterator[Record | HostRecord]:
    """The records of a journal."""
    for line in whole_lines(path):
        row = json.loads(line)
        yield HostRecord(*row) if row[1] == HOST else Record(*row)


def _lock(fd: int, path: str) -> None:
    """Wait until no other driver has the file, which one that was killed has for a moment."""
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


class ArrayProgress:
    """The state of all elements, which records alone change.

    Args:
        count: of the elements.
        retries: further attempts of an element after a failure.
        permanent_exit_codes: that no further attempt would change.

    Attributes:
        failures: the first ones: their indices, exit codes and reasons.
        has_run: an element has ended by itself.
        held: of every host the elements that it has, with their attempts.
        is_over: no element begins any more, and none runs: those that are not over were cancelled.
    """

    def __init__(
        self, count: int, retries: int = 0, permanent_exit_codes: Sequence[int] = ()
    ) -> None:
        self.count = count
        self._retries, self._permanent_exit_codes = retries, permanent_exit_codes
        self.failures: List[Tuple[int, int, str]] = []
        self.has_run = self.is_over = False
        self.held: Dict[int, Dict[int, int]] = {}
        self._states = bytearray(count)
        self._attempts = bytearray(count)
        self._codes = bytearray(count)
        self._unwanted: Set[int] = set()  # leased ones that were cancelled
        self._losses: Dict[int, int] = {}
        self._next = 0
        self._again: Deque[int] = deque()
        self._counts = [count, 0, 0, 0, 0]

    def state(self, index: int) -> ElementState:
        state = ElementState(self._states[index])
        return ElementState.CANCELLED if self.is_over and state in _UNFINISHED else state

    def number(self, state: ElementState) -> int:
        """The number of elements in a state."""
        if self.is_over and state is ElementState.CANCELLED:
            return self._counts[state] + sum(self._counts[other] for other in _UNFINISHED)
        return 0 if self.is_over and state in _UNFINISHED else self._counts[state]

    @property
    def ended_count(self) -> int:
        """The number of elements that are over."""
        return self.count - sum(map(self.number, _UNFINISHED))

    @property
    def is_settled(self) -> bool:
        """Whether no element begins any more: those that hosts have were cancelled."""
        if self._counts[ElementState.WAITING]:
            return False
        return self._counts[ElementState.LEASED] == len(self._unwanted)

    def next_lease(self, host: int) -> Optional[Record]:
        """A record that leases the next element to a host: those that wait again come first."""
        while self._again or self._next < self.count:
            if self._again:
                index = self._again.popleft()
            else:
                index, self._next = self._next, self._next + 1
            if self._states[index] == ElementState.WAITING:
                return Record(index, LEASED, host, self._attempts[index] + 1)
        return None

    def apply(self, record: Record, reason: str = "") -> bool:
        """Take a record into account; false when the host has not got that attempt.

        Args:
            record: what has happened.
            reason: how the element has ended, in words.
        """
        index, kind, host, attempt, _ = record
        held = self.held.setdefault(host, {})
        if kind == LEASED:
            self._attempts[index] = attempt
            self._move(index, ElementState.LEASED)
            held[index] = attempt
        elif kind == CANCELLED and self._states[index] == ElementState.WAITING:
            self._move(index, ElementState.CANCELLED)
        elif kind == CANCELLED and self._states[index] == ElementState.LEASED:
            self._unwanted.add(index)
        elif held.get(index) == attempt:
            del held[index]
            self._released(record, reason)
        else:
            return False
        return True

    def _released(self, record: Record, reason: str) -> None:
        """A host has an element no longer."""
        index, kind, _, attempt, code = record
        is_wanted, has_ended = index not in self._unwanted, kind == ENDED
        self._unwanted.discard(index)
        if has_ended:
            self._codes[index] = code & 0xFF
            self.has_run = self.has_run or is_wanted
        if has_ended and code == 0:
            self._move(index, ElementState.SUCCEEDED)
        elif not is_wanted:
            self._move(index, ElementState.CANCELLED)
        elif not has_ended and not code:
            self._attempts[index] -= 1
            self._wait_again(index)
        elif has_ended:
            # Attempts whose host has died cost no retry.
            is_last = attempt > self._retries + self._losses.get(index, 0)
            if is_last or code in self._permanent_exit_codes:
                self._fail(index, code, reason)
            else:
                self._wait_again(index)
        else:
            losses = self._losses[index] = self._losses.get(index, 0) + 1
            if losses >= LOSSES_MAX:
                self._fail(index, LOST_CODE, f"its host has died {losses} times")
            else:
                self._wait_again(index)

    def stretches(self) -> Iterator[Stretch]:
        """The state of every element."""
        first = 0
        for (_, attempts, code), same in groupby(zip(self._states, self._attempts, self._codes)):
            last = first + sum(1 for _ in same) - 1
            yield Stretch(first, last, self.state(first).name.lower(), attempts, code)
            first = last + 1

    def _wait_again(self, index: int) -> None:
        self._move(index, ElementState.WAITING)
        self._again.append(index)

    def _fail(self, index: int, code: int, reason: str) -> None:
        self._codes[index] = code & 0xFF
        self._move(index, ElementState.FAILED)
        if len(self.failures) < _SHOWN_FAILURES:
            self.failures.append((index, code, reason))

    def _move(self, index: int, state: ElementState) -> None:
        self._counts[self._states[index]] -= 1
        self._counts[state] += 1
        self._states[index] = state


_UNFINISHED = (ElementState.WAITING, ElementState.LEASED)

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


#: Seconds for which the head's disk is waited for when nothing else is to be done.
_DISK_S = 60.0
#: Failures that get a line in the log.
_REPORTED_FAILURES = 20


class Leases:
    """The elements of one array, with its journal.

    Args:
        spec: the array.
        path: of the file of its elements.
        submission_id: of the job.
        folder: of Ray's logs, where the journal lies.

    Attributes:
        progress: of the elements.
        pace: how long they take.
        hosts: all that the array has ever had, by their numbers.
        continues: there was an earlier driver.
        is_ending: all that runs was told to end: failures are its doing.
        pause: waits a moment; false when the head's disk is to be waited for no longer.
    """

    def __init__(self, spec: ArraySpec, path: str, submission_id: str, folder: str) -> None:
        self._elements = Elements(path)
        self._job_id = first_id(submission_id)
        self._journal, self._results = (
            LinesFile(os.path.join(folder, file_of(submission_id, kind)))
            for kind in (JOURNAL_FILE, RESULTS_FILE)
        )
        self.pace = ElementPace()
        self.progress = ArrayProgress(len(self._elements), spec.retries, spec.permanent_exit_codes)
        self.hosts: List[HostRecord] = []
        self.continues = self.is_ending = False
        self.pause: Callable[[], bool] = lambda: False
        for record in read_records(self._journal.path):
            self.continues = True
            if isinstance(record, HostRecord):
                self.hosts.append(record)
            else:
                self.progress.apply(record)
        self._has_names = any(kind == NAME for kind, *_ in spec.targets)
        self._reported = 0

    def held(self, host: int) -> Dict[int, int]:
        """The elements that a host has, with their attempts."""
        return self.progress.held.get(host, {})

    def add_host(self, node_id: str) -> HostRecord:
        """A new host, which may be started after the next ``commit``."""
        number, nonce = len(self.hosts), secrets.token_hex(8)
        tag, run_dir = f"{self._job_id}/{nonce}.{number}", f"{self._job_id}~host-{number}-{nonce}"
        self.hosts.append(HostRecord(number, HOST, node_id, tag, run_dir))
        self._journal.add(self.hosts[-1])
        return self.hosts[-1]

    def take(self, host: int) -> Optional[List[Any]]:
        """Lease the next element to a host, which may hear of it after the next ``commit``.

        Returns:
            Its index, its attempt and its values; ``None`` when none waits.
        """
        record = self.progress.next_lease(host)
        if record is None:
            return None
        self._note(record)
        return [record.element, record.attempt, self._elements[record.element]]

    def give_back(self, lease: Sequence[int], host: int, has_run: bool) -> bool:
        """Let an element wait again that a host has not begun, or whose host is proven dead.

        Returns:
            Whether the host had it.
        """
        element, attempt = lease
        return self._note(Record(element, GIVEN_BACK, host, attempt, int(has_run)))

    def give_back_all(self, host: int, has_run: bool) -> None:
        """Let all elements of a host wait again, as ``give_back`` does."""
        for lease in list(self.held(host).items()):
            self.give_back(lease, host, has_run)

    def cancel(self, ranges: Sequence[Tuple[int, int]], only_waiting: bool) -> Set[Tuple[int, int]]:
        """Let elements be cancelled that are not over.

        Args:
            ranges: first and last index of elements in a row.
            only_waiting: leave those alone that a host has.

        Returns:
            The attempts that hosts have, and that are to be ended.
        """
        leased = {
            element: attempt
            for elements in self.progress.held.values()
            for element, attempt in elements.items()
        }
        wanted = set()
        for index in (index for first, last in ranges for index in range(first, last + 1)):
            if index not in leased:
                if self.progress.state(index) is ElementState.WAITING:
                    self._note(Record(index, CANCELLED))
            elif not only_waiting:
                self._note(Record(index, CANCELLED))
                wanted.add((index, leased[index]))
        return wanted

    def ended(self, host: int, row: Sequence[Any]) -> bool:
        """Note how an element has ended.

        Args:
            host: that had it.
            row: its index, attempt, exit code, seconds, how it ended in words, and its result.

        Returns:
            Whether the host had it.
        """
        element, attempt, code, seconds, reason = row[:5]
        if self.is_ending and code:  # another attempt of the array runs it again
            return self.give_back(row[:2], host, has_run=False)
        if code and self._has_names:
            reason = f"{self._elements[element][0]}: {reason}"
        if not self._note(Record(element, ENDED, host, attempt, code), reason):
            return False
        if len(row) > 5:
            self._results.add([element, row[5]])
        state = self.progress.state(element)
        if state is not ElementState.CANCELLED:
            self.pace.measured(seconds)
            if code and self._reported < _REPORTED_FAILURES:
                self._reported += 1
                again = "; it is tried again" if state is ElementState.WAITING else ""
                say(f"element {element} has failed: {reason}{again}")
        return True

    def commit(self) -> bool:
        """Write down what has changed, and return when the disk has it; false if it never has.

        A disk that is full is waited for: meanwhile no element is started, and those that run
        continue.
        """
        until = time.monotonic() + _DISK_S
        while True:
            try:
                self._results.commit()  # first: no later driver would ask for them again
                self._journal.commit()
                return True
            except OSError as error:
                say(f"the head cannot write its journal ({error}); no element is started meanwhile")
            is_last = self.is_ending or self.progress.is_settled
            if not self.pause() or (is_last and time.monotonic() >= until):
                return False

    def close(self) -> None:
        """Read and write no more."""
        for file in (self._elements, self._results, self._journal):
            file.close()

    def _note(self, record: Record, reason: str = "") -> bool:
        is_new = self.progress.apply(record, reason)
        if is_new:
            self._journal.add(record)
        return is_new
