"""Which host has which element, and what became of it: in memory, and on the head's disk."""

from __future__ import annotations

import json
import os
import tempfile
import time
import zlib
from typing import Any, Dict, Iterable, List, Mapping, Optional

from ..attempts import first_id
from ..node.output import say
from ..spec import ArraySpec
from ..trust import open_own
from .elements import NAME, Elements
from .journal import CANCELLED, ENDED, GIVEN_BACK, LEASED, Journal, Record
from .progress import ArrayProgress, ElementState, Lease
from .status import HOSTS_FILE, JOURNAL_FILE, RESULTS_FILE, file_of
from .window import ElementPace

#: Seconds between two attempts to write to a disk that is full.
DISK_S = 5.0
#: Exit codes of what was ended by SIGTERM or SIGKILL, as all is when the array ends.
_ENDED_CODES = 143, 137
#: Failures that get a line in the log.
_TOLD_FAILURES = 20


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
        goes_on: there was an earlier driver.
        is_ending: all that runs was told to end: failures are its end, and nothing is leased again.
    """

    def __init__(
        self, spec: ArraySpec, path: str, submission_id: str, folder: Optional[str]
    ) -> None:
        self._elements = Elements(path)
        key = f"{first_id(submission_id)} {_checksum(path)}"
        place = folder or tempfile.gettempdir()
        self._journal = Journal(os.path.join(place, file_of(submission_id, JOURNAL_FILE)), key)
        self._results = os.path.join(place, file_of(submission_id, RESULTS_FILE))
        self.hosts_path = os.path.join(place, file_of(submission_id, HOSTS_FILE))
        self.pace = ElementPace()
        self.progress = ArrayProgress(len(self._elements), spec.retries, spec.permanent_exit_codes)
        self.held: Dict[int, Dict[int, int]] = self.progress.replay(self._journal.records())
        self.goes_on = self._journal.count > 0
        self.is_ending = False
        self._has_names = any(kind == NAME for kind, *_ in spec.targets)
        self._told = 0
        self._unwritten: List[str] = []  # results
        self._results_bytes = _whole_bytes(self._results) if self.goes_on else 0
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
        element, attempt, code, seconds, words = row[:5]
        if self._has_names:
            words = f"{self._elements[element][0]}: {words}"
        if self.is_ending and code in _ENDED_CODES:
            self.give_back(Lease(element, attempt), host, has_run=True)
            return
        if self.is_ending and code:  # it is known how it ended, also for another attempt
            if self.progress.cancelled(Lease(element, attempt)):
                self._journal.add(Record(element, ENDED, attempt, code, host, seconds))
            return
        if not self.progress.ended(Lease(element, attempt), code, words):
            return
        self._journal.add(Record(element, ENDED, attempt, code, host, seconds))
        if len(row) > 5 and row[5] is not None:
            self._unwritten.append(json.dumps([element, row[5]]) + "\n")
        state = self.progress.state(element)
        if state is not ElementState.CANCELLED:
            self.pace.measured(seconds)
        if code and self._told < _TOLD_FAILURES and state is not ElementState.CANCELLED:
            self._told += 1
            again = state is ElementState.WAITING
            say(f"element {element} has failed: {words}{'; it is tried again' if again else ''}")

    def close(self) -> None:
        """Read and write no more."""
        self._elements.close()
        self._journal.close()

    def commit(self) -> bool:
        """Write down what has changed; whether the disk has it."""
        try:
            self._write_results()  # first: no later driver would ask for them again
            self._journal.commit()
        except OSError as error:
            say(f"the head cannot write its journal ({error}); no element is started meanwhile")
            self._write_at = time.monotonic() + DISK_S
            return False
        return True

    def _write_results(self) -> None:
        if not self._unwritten:
            return
        data = "".join(self._unwritten).encode()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with open(open_own(self._results, flags), "ab") as file:
            file.truncate(self._results_bytes)  # what a crash, or a full disk, has left behind it
            file.write(data)
        self._results_bytes += len(data)
        self._unwritten.clear()


def _whole_bytes(path: str) -> int:
    """Bytes of a file up to the end of its last line that has one."""
    if not os.path.lexists(path):
        return 0
    with open(open_own(path, os.O_RDONLY), "rb") as file:
        return sum(len(line) for line in file if line.endswith(b"\n"))


def _checksum(path: str) -> int:
    found = 0
    with open(path, "rb") as file:
        for data in iter(lambda: file.read(2**20), b""):
            found = zlib.crc32(data, found)
    return found
