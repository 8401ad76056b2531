"""A task of an experiment that runs as an element of an array: ``RayExecutor(as_array=True)``."""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, ClassVar

from nemo_run_ray.errors import JobError, NemoRunRayError
from nemo_run_ray.experiment import notes
from nemo_run_ray.experiment.array_elements import ACTIVE, failures_of, stretches_of
from nemo_run_ray.experiment.attempt_records import Attempts
from nemo_run_ray.experiment.follow_log import lines, of_element
from nemo_run_ray.experiment.job import RemoteJob
from nemo_run_ray.experiment.roles_and_elements import elements
from nemo_run_ray.experiment.shared_log import SharedLog
from nemo_run_ray.experiment.snapshot import Snapshot
from nemo_run_ray.remote.array.progress import Stretch
from nemo_run_ray.remote.node.output import MAY_BE_LEFT, NO_PROCESS_LEFT
from nemo_run_ray.remote.states import JobState, JobStatus, Reason

#: Seconds that what is known of an array's elements serves all of them.
_AGE_S = 1.0
#: States in which a job is not asked about its elements: it has none yet, or cannot be asked.
_WITHOUT_ELEMENTS = (JobState.WAITING, JobState.PENDING, JobState.UNKNOWN)
#: States of an element that was not run to its end.
_UNFINISHED = ("cancelled", "lost")
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
        self._begin = f"{self.index}| "  # of its lines in the array's log

    def look(self, snapshot: Snapshot) -> JobStatus:
        whole = self.array.look(snapshot)
        if not whole.state.is_terminal:  # its end is noted with all attempts
            notes.note_attempts(self.array, whole, snapshot)
        if whole.state in _WITHOUT_ELEMENTS:
            return self._named(whole)
        is_over = whole.state.is_terminal
        found = _LastElements.of(self.array).look(lambda: self._ask(whole), is_over)
        if found is not None:
            return self._named(self._status(found, whole))
        if is_over:
            return self._named(_without_elements(whole))
        return self._named(JobStatus(JobState.PENDING, Reason.TURN, "Its array has begun."))

    def attempts_in(
        self, snapshot: Snapshot, running_at: Mapping[str, float] | None = None
    ) -> Attempts:
        return {}  # Ray's table knows those of the array only

    def log(self, follow: bool = False) -> Iterator[str]:
        passed_on = 0
        if follow:
            shared = SharedLog.of(self.array)
            for line in shared.follow(self.index, lambda: self.status.state.is_terminal):
                passed_on += 1
                yield line.removeprefix(self._begin)
        own = of_element(self.index, lines(self.array.output()))
        for line in islice(own, passed_on, None):
            yield line.removeprefix(self._begin)

    def output(self, follow: bool = False) -> Iterator[str]:
        return self.log(follow)

    def results(self) -> dict[int, Any]:
        found = self.array.results()
        return {self.index: found[self.index]} if self.index in found else {}

    def cancel(self) -> JobStatus:
        status = self.answered()
        if status.state.is_terminal:
            return status
        whole = self.array.answered()
        if whole.state is not JobState.RUNNING:
            raise JobError(
                f"The task {self.name!r} is an element of the array {self.array.id}, which is "
                f"{whole.state.value}: single tasks of it are cancelled when it runs. Cancel the "
                f"array with nemo-run-ray cancel {self.array.id}, or wait. {whole.message}"
            )
        self.array.cancel_elements(str(self.index))
        _LastElements.of(self.array).forget()
        return self.answered()

    def leftovers(self, status: JobStatus) -> str:
        if not status.attempt:
            return "it never had a process"
        whole = self.array.answered()
        if whole.state.is_terminal:  # its driver may have given up what does not end
            return self.array.leftovers(whole)
        told = elements(self.array, whole)
        left = told.get("may_be_left") if told else None
        # ``status`` may be what an earlier driver has written; this is not older than ``told``.
        if left is None or not self._is_still(status, whole):
            return "its array does not tell now whether a process of it is left; ask again"
        for node_id, indices in left.items():
            if self.index in indices:
                return f"{MAY_BE_LEFT} on {node_id[:12]}, which its array does not wait for"
        # An element is cancelled when all of its processes have ended, except on these nodes.
        return f"{NO_PROCESS_LEFT} on its node"

    def _is_still(self, status: JobStatus, whole: JobStatus) -> bool:
        try:
            return self._status(self._ask(whole), whole).state is status.state
        except NemoRunRayError:
            return False

    def note(self, status: JobStatus, snapshot: Snapshot) -> None:
        """Note nothing: what is known of it is kept with its array."""

    def keep_log(self, status: JobStatus, snapshot: Snapshot) -> None:
        """Keep nothing: its log is in that of its array."""

    def _read_record(self) -> None:
        """Its record is made of its array's."""

    def _ask(self, whole: JobStatus) -> _Elements:
        return _Elements(stretches_of(self.array, whole), failures_of(self.array, whole))

    def _status(self, seen: _Elements, whole: JobStatus) -> JobStatus:
        stretch = seen.stretch(self.index)
        if stretch.state in ACTIVE and whole.state.is_terminal:  # seen before the array's end
            return _without_elements(whole)
        if stretch.state in _UNFINISHED and whole.state is JobState.FAILED and not _ran(whole):
            return whole
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


def _ran(whole: JobStatus) -> bool:
    """Whether an array has ended by its elements' ends."""
    return whole.state is JobState.SUCCEEDED or whole.reason is Reason.EXIT_CODE


def _without_elements(whole: JobStatus) -> JobStatus:
    """The status of a task whose array has ended, and does not tell about it."""
    if not _ran(whole):
        return whole
    detail = "Its array has ended, and the states of the array's tasks cannot be read now."
    return replace(whole, state=JobState.UNKNOWN, reason=Reason.UNREACHABLE, detail=detail)


@dataclass(frozen=True)
class _Elements:
    """What was seen of an array's elements.

    Attributes:
        stretches: the states, of elements in a row.
        failures: why elements have failed, as far as that is kept, by index.
    """

    stretches: list[Stretch]
    failures: Mapping[int, str]

    @cached_property
    def _firsts(self) -> list[int]:
        return [stretch.first for stretch in self.stretches]

    def stretch(self, index: int) -> Stretch:
        """What is known of an element."""
        return self.stretches[bisect_right(self._firsts, index) - 1]


class _LastElements:
    """What was last seen of the elements of one array, for all of its tasks in this process."""

    _shared: ClassVar[dict[tuple[Any, ...], _LastElements]] = {}
    _shared_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._elements: _Elements | None = None
        self._ask_at = -math.inf
        self._was_over = False

    @classmethod
    def of(cls, array: RemoteJob) -> _LastElements:
        key = array.record.exp_dir, array.id, *array.record.nonces
        with cls._shared_lock:
            return cls._shared.setdefault(key, cls())

    def look(self, ask: Callable[[], _Elements], is_over: bool) -> _Elements | None:
        """What is known, asked for when that is old; ``None`` when nothing is known.

        Args:
            ask: asks, or raises when the array does not tell: what was seen last stays then.
            is_over: the array has ended: what is seen now stays so.
        """
        with self._lock:
            if time.monotonic() >= self._ask_at or (is_over and not self._was_over):
                self._ask_at, self._was_over = time.monotonic() + _AGE_S, is_over
                with suppress(NemoRunRayError):
                    self._elements = ask()
                    if is_over:
                        self._ask_at = math.inf
            return self._elements

    def forget(self) -> None:
        """Ask at the next look."""
        with self._lock:
            self._ask_at = -math.inf
