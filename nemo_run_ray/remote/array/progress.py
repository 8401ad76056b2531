"""Which elements wait, are leased, and have ended: pure, three bytes an element."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import groupby
from typing import Deque, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Set

from .journal import CANCELLED, ENDED, GIVEN_BACK, LEASED, Record

#: An element has failed that has lost so many hosts: it may be what kills them.
LOSSES_MAX = 3
#: Failures that are kept with their reason, for ``status``.
_SHOWN_FAILURES = 20
#: Exit code of an element whose hosts have died too often.
LOST_CODE = 137


class ElementState(IntEnum):
    """Where an element is."""

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
    """Why an element has failed."""

    element: int
    code: int
    words: str


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
        """How many elements are in a state."""
        return self._counts[state]

    @property
    def ended_count(self) -> int:
        """How many elements are over."""
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

    def ended(self, lease: Lease, code: int, words: str) -> bool:
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
            self._fail(lease.element, code, words)
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
        """What is known of every element."""
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

    def _fail(self, index: int, code: int, words: str) -> None:
        self._codes[index] = code & 0xFF
        self._move(index, ElementState.FAILED)
        if len(self.failures) < _SHOWN_FAILURES:
            self.failures.append(Failure(index, code, words))

    def _move(self, index: int, state: ElementState) -> None:
        self._counts[self._states[index]] -= 1
        self._counts[state] += 1
        self._states[index] = state
