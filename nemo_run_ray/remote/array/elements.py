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
from array import array
from collections import defaultdict
from enum import IntEnum
from itertools import groupby
from typing import (
    Any,
    Dict,
    Iterator,
    List,
    NamedTuple,
    Sequence,
    Set,
    Tuple,
)

from ..files import open_own
from ..node.output import say
from ..spec import ArraySpec, Json
from ..status import JOURNAL_FILE, RESULTS_FILE, file_of, first_id

#: Kinds of records. A host may start the element:
LEASED = 1
#: The element has ended with an exit code.
ENDED = 2
#: The element has no end that counts: its host has not started it, is proven dead, or was told to
#: end all.
GIVEN_BACK = 3
#: The user does not want the element.
CANCELLED = 4
#: A ``HostRecord``: a host may start elements.
HOST = 5
#: Code in the record of an element that was given back and may have begun; else the code is 0.
MAY_HAVE_BEGUN = 1


class Record(NamedTuple):
    """A change of an element.

    The code is the exit code of one that has ended; see ``MAY_HAVE_BEGUN`` for one given back.
    """

    element: int
    kind: int
    host: int = 0
    attempt: int = 0
    code: int = 0


class HostRecord(NamedTuple):
    """An element host, as it is written down before it may start anything.

    The tag is in the environment of all its processes.
    """

    number: int
    kind: int
    node_id: str
    tag: str
    run_dir: str


class LinesFile:
    """A file to which whole lines are added by one writer, which has locked it.

    It may hold lines of an earlier driver.
    """

    def __init__(self, path: str):
        self.path = path
        self.fd = open_own(path, os.O_RDWR | os.O_CREAT)
        fcntl.flock(self.fd, fcntl.LOCK_EX)  # a driver that was killed has it for a moment
        self._whole_bytes = sum(map(len, whole_lines(path)))
        self._unwritten = bytearray()

    def add(self, row: Sequence[Any]) -> None:
        """Let a line wait for the next ``commit``."""
        self._unwritten += json.dumps(row).encode() + b"\n"

    def commit(self) -> None:
        """Write what waits, and return when the disk has it.

        Raises:
            OSError: the disk is full, or broken. What waits is written by the next call.
        """
        data = self._unwritten
        if not data:
            return
        os.ftruncate(self.fd, self._whole_bytes)  # what a full disk has left behind it
        written = 0
        while written < len(data):
            written += os.pwrite(self.fd, data[written:], self._whole_bytes + written)
        os.fdatasync(self.fd)
        self._whole_bytes += len(data)
        data.clear()


def whole_lines(path: str) -> Iterator[bytes]:
    """The lines of a file but for a last one that is torn."""
    with open(open_own(path, os.O_RDONLY), "rb") as file:
        yield from (line for line in file if line.endswith(b"\n"))


def read_records(path: str) -> Iterator[Record | HostRecord]:
    """The records of a journal."""
    for line in whole_lines(path):
        row = json.loads(line)
        yield HostRecord(*row) if row[1] == HOST else Record(*row)


#: Lost hosts after which an element has a host to itself: it may be what kills them.
LOSSES_MAX = 3
#: Failures that are kept with their reason, for ``status``, and that get a line in the log.
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


_UNFINISHED = (ElementState.WAITING, ElementState.LEASED)


class ArrayProgress:
    """The state of all elements, which records alone change.

    Attributes:
        failures: the first ones: their indices, exit codes and reasons.
        has_run: an element has ended by itself.
        held: of every host the elements that it has, with their attempts.
        unwanted: the leased elements that were cancelled.
    """

    def __init__(self, count: int, retries: int = 0, permanent_exit_codes: Sequence[int] = ()):
        self.count = count
        self._retries, self._permanent_exit_codes = retries, permanent_exit_codes
        self.failures: List[Tuple[int, int, str]] = []
        self.has_run = False
        self.held: Dict[int, Dict[int, int]] = defaultdict(dict)
        self.attempts, self._states, self._codes = (bytearray(count) for _ in range(3))
        self.unwanted: Set[int] = set()
        self._suspects: Set[int] = set()  # that may kill their hosts
        self._losses: Dict[int, int] = defaultdict(int)

    def state(self, index: int) -> ElementState:
        return ElementState(self._states[index])

    def number(self, state: ElementState) -> int:
        """The number of elements in a state."""
        return self._states.count(state)

    @property
    def ended_count(self) -> int:
        """The number of elements that are over."""
        return self.count - sum(map(self.number, _UNFINISHED))

    def next_lease(self, host: int) -> Record | None:
        """A record that leases the first element that waits and that the host may have."""
        held = self.held[host].keys()
        if held & self._suspects:
            return None
        index = self._states.find(ElementState.WAITING)
        while held and index in self._suspects:
            index = self._states.find(ElementState.WAITING, index + 1)
        return None if index < 0 else Record(index, LEASED, host, self.attempts[index] + 1)

    def apply(self, record: Record, reason: str = "") -> bool:
        """Take a record into account.

        Returns:
            False when the host does not have that attempt, or the element to cancel is over.
        """
        index, kind, host, attempt, _ = record
        held, state = self.held[host], self.state(index)
        if kind == LEASED:
            self.attempts[index] = held[index] = attempt
            self._states[index] = ElementState.LEASED
            return True
        if kind == CANCELLED:
            if state is ElementState.WAITING:
                self._states[index] = ElementState.CANCELLED
            elif state is ElementState.LEASED:
                self.unwanted.add(index)
            return state in _UNFINISHED
        if held.get(index) != attempt:
            return False
        del held[index]
        self._states[index] = self._after_attempt(record, reason)
        return True

    def _after_attempt(self, record: Record, reason: str) -> ElementState:
        """The next state of an element that has ended, or was given back."""
        index, kind, _, attempt, code = record
        is_wanted = index not in self.unwanted
        self.unwanted.discard(index)
        if kind == ENDED:
            self._codes[index] = code & 0xFF
            self.has_run |= is_wanted
            if code == 0:
                return ElementState.SUCCEEDED
        if not is_wanted:
            return ElementState.CANCELLED
        if kind == ENDED:
            tries = self._retries + self._losses[index]  # a host's death costs no retry
            if attempt <= tries and code not in self._permanent_exit_codes:
                return ElementState.WAITING
        elif code == MAY_HAVE_BEGUN:
            self._losses[index] += 1
            if self._losses[index] == LOSSES_MAX:
                self._suspects.add(index)
            if self._losses[index] <= LOSSES_MAX:
                return ElementState.WAITING
            reason = f"its host has died {LOSSES_MAX + 1} times"
            code = self._codes[index] = LOST_CODE
        else:
            self.attempts[index] -= 1
            return ElementState.WAITING
        if len(self.failures) < _SHOWN_FAILURES:
            self.failures.append((index, code, reason))
        return ElementState.FAILED

    def cancel_rest(self) -> None:
        """Count all elements that are not over as cancelled: none will begin or end."""
        for index, state in enumerate(self._states):
            if state in _UNFINISHED:
                self._states[index] = ElementState.CANCELLED

    def stretches(self) -> Iterator[Tuple[int, int, str, int, int]]:
        """First and last of elements in a row, their state, attempts, and last exit code."""
        first = 0
        rows = zip(self._states, self.attempts, self._codes)
        for (state, attempts, code), same in groupby(rows):
            last = first + sum(1 for _ in same) - 1
            yield first, last, ElementState(state).name.lower(), attempts, code
            first = last + 1


#: Seconds from an element's end until its host has another one, when that is not there already.
_ROUND_TRIP_S = 0.3
#: Elements that take longer wait where any host can take them.
_LONG_S = 3.0
#: Most elements that wait for one slot.
_PER_SLOT_MAX = 64
#: Weight of the newest element in the mean.
_WEIGHT = 0.1


class Leases:
    """The elements of one array, with its journal in Ray's folder of logs.

    The first line of their file that is a JSON object is the header of the array. Every other one
    is an element: its ``values`` by field; or, of tasks that differ, its ``name``, ``argv`` and
    ``env``, or its ``name`` and ``template``, a configuration in Fiddle's JSON.

    Attributes:
        seconds: how long an element takes: the mean, newer ones weighing more.
        hosts: all that the array has ever had, by their numbers.
        is_ending: all that runs was told to end, and failures since then do not count.
    """

    def __init__(self, spec: ArraySpec, path: str, submission_id: str, folder: str):
        self._file = open(path, "rb")  # noqa: SIM115 lives as long as the driver
        self._places, place = array("Q"), 0  # of the lines, which may be many
        for line in self._file:
            if line.startswith(b"{"):
                self._places.append(place)
            place += len(line)
        del self._places[0]  # the header's
        self._job_id = first_id(submission_id)
        self._journal, self._results = (
            LinesFile(f"{folder}/{file_of(submission_id, kind)}")
            for kind in (JOURNAL_FILE, RESULTS_FILE)
        )
        self.seconds: float | None = None
        self.progress = ArrayProgress(len(self._places), spec.retries, spec.permanent_exit_codes)
        self.hosts: List[HostRecord] = []
        self.is_ending = False
        for record in read_records(self._journal.path):
            if isinstance(record, HostRecord):
                self.hosts.append(record)
            else:
                self.progress.apply(record)
        self._reported = 0

    def most_held(self, slots: int) -> int:
        """The number of elements that a host may have: those that run, and those that keep it busy
        until the driver has heard of their end."""
        if self.seconds is None or self.seconds > _LONG_S:
            return slots
        ahead = slots * _ROUND_TRIP_S / max(self.seconds, 1e-4)
        return slots + min(int(ahead) + 1, slots * _PER_SLOT_MAX)

    def add_host(self, node_id: str) -> HostRecord:
        """A new host, which may be started after the next ``commit``."""
        number, nonce = len(self.hosts), secrets.token_hex(8)
        tag, run_dir = f"{self._job_id}/{nonce}.{number}", f"{self._job_id}~host-{number}-{nonce}"
        record = HostRecord(number, HOST, node_id, tag, run_dir)
        self.hosts.append(record)
        self._journal.add(record)
        return record

    def take(self, host: int) -> List[Any] | None:
        """Lease the next element to a host, which may hear of it after the next ``commit``.

        Returns:
            Its index, its attempt and its line; ``None`` when none waits.
        """
        record = self.progress.next_lease(host)
        if not record:
            return None
        self._note(record)
        return [record.element, record.attempt, self._element(record.element)]

    def give_back(self, host: int, begun: Sequence[Sequence[int]] | None = None) -> None:
        """Let the elements of a host wait again; it runs none of them any more.

        All may have begun, or those attempts that are given.
        """
        for element, attempt in list(self.progress.held[host].items()):
            may_have_begun = begun is None or [element, attempt] in begun
            code = MAY_HAVE_BEGUN if may_have_begun else 0
            self._note(Record(element, GIVEN_BACK, host, attempt, code))

    def cancel(self, ranges: Sequence[Tuple[int, int]], only_waiting: bool) -> Set[Tuple[int, int]]:
        """Cancel elements that are not over, in ranges from a first to a last index.

        Returns:
            The attempts that hosts have, and that are to be ended.
        """
        wanted = set()
        for first, last in ranges:
            for index in range(max(0, first), min(last + 1, self.progress.count)):
                state = self.progress.state(index)
                if state is ElementState.LEASED and not only_waiting:
                    wanted.add((index, self.progress.attempts[index]))
                elif state is not ElementState.WAITING:
                    continue
                self._note(Record(index, CANCELLED))
        return wanted

    def ended(self, host: int, row: Sequence[Any]) -> bool:
        """Note how an element has ended; false when the host did not have it.

        The row has its index, attempt, exit code, seconds, how it ended in words, and its result.
        Of an element that has not begun, the exit code is ``None`` and the row ends there.
        """
        element, attempt, code = row[:3]
        if code is None:
            return self._note(Record(element, GIVEN_BACK, host, attempt))
        if self.is_ending and code:  # the array's next attempt may run it
            return self._note(Record(element, GIVEN_BACK, host, attempt, MAY_HAVE_BEGUN))
        seconds, reason = row[3:5]
        name = self._element(element).get("name") if code else ""
        if name:
            reason = f"{name}: {reason}"
        if not self._note(Record(element, ENDED, host, attempt, code), reason):
            return False
        if len(row) > 5:
            self._results.add([element, row[5]])
        state = self.progress.state(element)
        if state is not ElementState.CANCELLED:
            mean = seconds if self.seconds is None else self.seconds
            self.seconds = mean + _WEIGHT * (seconds - mean)
            if code and self._reported < _SHOWN_FAILURES:
                self._reported += 1
                again = "; it is tried again" if state is ElementState.WAITING else ""
                say(f"element {element} has failed: {reason}{again}")
        return True

    def commit(self) -> None:
        """As ``LinesFile.commit``."""
        # Results first: once the journal has an end, its result is never asked for again.
        self._results.commit()
        self._journal.commit()

    def _element(self, index: int) -> Json:
        self._file.seek(self._places[index])
        element: Json = json.loads(self._file.readline())
        return element

    def _note(self, record: Record, reason: str = "") -> bool:
        is_new = self.progress.apply(record, reason)
        if is_new:
            self._journal.add(record)
        return is_new
