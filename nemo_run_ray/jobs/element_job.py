"""A task of an experiment that runs as an element of an array: ``RayExecutor(as_array=True)``."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, ClassVar

from nemo_run_ray.errors import JobError, NemoRunRayError
from nemo_run_ray.jobs.array_elements import failures_of, stretches_of
from nemo_run_ray.jobs.attempt_records import Attempts
from nemo_run_ray.jobs.follow_log import lines, of_element
from nemo_run_ray.jobs.job import RemoteJob
from nemo_run_ray.jobs.snapshot import Snapshot
from nemo_run_ray.remote.array.progress import Stretch
from nemo_run_ray.remote.node.output import NO_PROCESS_LEFT
from nemo_run_ray.remote.states import JobState, JobStatus, Reason

#: Seconds that what is known of an array's elements serves all of them.
_AGE_S = 1.0
#: States in which a job is not asked about its elements: it has none yet, or cannot be asked.
_WITHOUT_ELEMENTS = (JobState.WAITING, JobState.PENDING, JobState.UNKNOWN)
_ENDINGS = {
    "succeeded": (JobState.SUCCEEDED, Reason.NONE),
    "failed": (JobState.FAILED, Reason.EXIT_CODE),
    "cancelled": (JobState.CANCELLED, Reason.CANCELLED),
    "lost": (JobState.LOST, Reason.OTHER),
}


class ElementJob(RemoteJob):
    """One task of an array of tasks.

    Args:
        array: its array.
        submission_id: by which NeMo-Run knows the task.

    Attributes:
        array: its array, one job of Ray.
        index: of its element, from 0.
    """

    def __init__(self, array: RemoteJob, submission_id: str) -> None:
        ids = [task for task, _ in array.record.tasks]
        self.index = ids.index(submission_id)
        name = array.record.tasks[self.index][1]
        own = replace(
            array.record,
            submission_id=submission_id,
            job=name,
            role=name,
            is_array=False,
            tasks=(),
            terminal={},
            attempts={},
        )
        super().__init__(own)
        self.array = array

    def look(self, snapshot: Snapshot) -> JobStatus:
        whole = self.array.look(snapshot)
        if whole.state in _WITHOUT_ELEMENTS:
            return self._named(whole)
        seen = _Seen.of(self.array)
        try:
            seen.look(lambda: self._ask(whole), whole.state.is_terminal)
        except NemoRunRayError:
            if whole.state.is_terminal:  # it ended before it had elements, or they are not known
                return self._named(whole)
            return self._named(JobStatus(JobState.PENDING, Reason.TURN, "Its array has begun."))
        return self._named(self._status(seen, whole))

    def attempts_in(
        self, snapshot: Snapshot, running_at: Mapping[str, float] | None = None
    ) -> Attempts:
        return {}  # Ray's table knows those of the array only

    def log(self, follow: bool = False) -> Iterator[str]:
        passed_on = 0
        if follow:
            for line in self._until_over(self.array.output(follow=True)):
                passed_on += 1
                yield line
        yield from islice(self._own(self.array.output()), passed_on, None)

    def output(self, follow: bool = False) -> Iterator[str]:
        return self.log(follow)

    def results(self) -> dict[int, Any]:
        return {
            index: value for index, value in self.array.results().items() if index == self.index
        }

    def cancel(self) -> JobStatus:
        status = self.look(Snapshot(is_fresh=True))
        if status.state.is_terminal:
            return status
        whole = self.array.look(Snapshot(is_fresh=True))
        if whole.state is not JobState.RUNNING:
            raise JobError(
                f"The task {self.name!r} is an element of the array {self.array.id}, which is "
                f"{whole.state.value}: single tasks of it are cancelled when it runs. Cancel the "
                f"array with nemo-run-ray cancel {self.array.id}, or wait. {whole.message}"
            )
        self.array.cancel_elements(str(self.index))
        _Seen.of(self.array).forget()
        return self.look(Snapshot(is_fresh=True))

    def leftovers(self, status: JobStatus) -> str:
        # The driver says that an element has ended when all has that it has left.
        return f"{NO_PROCESS_LEFT} on its node" if status.attempt else "it never had a process"

    def note(self, status: JobStatus, snapshot: Snapshot) -> None:
        """Note nothing: what is known of it is kept with its array."""

    def keep_log(self, status: JobStatus, snapshot: Snapshot) -> None:
        """Keep nothing: its log is in that of its array."""

    def _read_record(self) -> None:
        """Its record is made of its array's."""

    def _ask(self, whole: JobStatus) -> tuple[list[Stretch], dict[int, str]]:
        return stretches_of(self.array, whole), failures_of(self.array, whole)

    def _status(self, seen: _Seen, whole: JobStatus) -> JobStatus:
        stretch = seen.stretch(self.index)
        if stretch.state == "waiting":
            detail = f"It waits for its turn in the array {self.array.id}."
            return JobStatus(JobState.PENDING, Reason.TURN, detail)
        if stretch.state == "running":
            return JobStatus(JobState.RUNNING, attempt=stretch.attempts)
        state, reason = _ENDINGS[stretch.state]
        detail = ""
        if state is JobState.FAILED:
            detail = seen.failures.get(self.index) or f"exit code {stretch.code}"
        elif state is JobState.LOST:
            detail = f"It was not over when its array ended. {whole.message}"
        return JobStatus(state, reason, detail, attempt=stretch.attempts)

    def _own(self, text: Iterator[str]) -> Iterator[str]:
        """Its lines of the array's log, without their beginning."""
        begin = f"{self.index}| "
        for line in of_element(self.index, lines(text)):
            yield line.removeprefix(begin)

    def _until_over(self, text: Iterator[str]) -> Iterator[str]:
        """Its lines until it is over, or the log of the array ends."""

        def until_over() -> Iterator[str]:
            ask_at = 0.0
            for piece in text:  # at the latest when the array tells its progress, every 30 s
                yield piece
                if time.monotonic() >= ask_at:
                    if self.status.state.is_terminal:
                        return
                    ask_at = time.monotonic() + _AGE_S

        return self._own(until_over())


@dataclass
class _Seen:
    """What was last seen of the elements of one array, for all of its tasks in this process.

    Attributes:
        stretches: the states, of elements in a row.
        failures: why elements have failed, as far as that is kept, by index.
    """

    stretches: list[Stretch] = field(default_factory=list)
    failures: dict[int, str] = field(default_factory=dict)
    _firsts: list[int] = field(default_factory=list)
    _ask_at: float = -1e9
    _is_last: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    _shared: ClassVar[dict[tuple[Any, ...], _Seen]] = {}
    _shared_lock: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def of(cls, array: RemoteJob) -> _Seen:
        key = array.record.exp_dir, array.id, *array.record.nonces
        with cls._shared_lock:
            return cls._shared.setdefault(key, cls())

    def look(self, ask: Callable[[], tuple[list[Stretch], dict[int, str]]], is_over: bool) -> None:
        """Ask again when what is known is old.

        Args:
            ask: asks, or raises when nothing is known.
            is_over: the array has ended: what is seen now stays so.
        """
        with self._lock:
            if not self._is_last and (is_over or time.monotonic() >= self._ask_at):
                self.stretches, self.failures = ask()
                self._firsts = [stretch.first for stretch in self.stretches]
                self._ask_at, self._is_last = time.monotonic() + _AGE_S, is_over

    def forget(self) -> None:
        """Ask at the next look."""
        with self._lock:
            self._ask_at = -1e9

    def stretch(self, index: int) -> Stretch:
        """What is known of an element."""
        return self.stretches[bisect_right(self._firsts, index) - 1]
