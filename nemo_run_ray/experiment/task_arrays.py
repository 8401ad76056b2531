"""The arrays of one experiment whose elements are its tasks, and how each is handed over once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from nemo_run_ray.errors import NemoRunRayError
from nemo_run_ray.executor import RayExecutor
from nemo_run_ray.experiment.ledger import Ledger
from nemo_run_ray.plan.job_plan import JobPlan
from nemo_run_ray.plan.task_elements import ELEMENTS_FILE, TaskArray, after_arrays, arrays_of
from nemo_run_ray.remote.files import write_file

log = logging.getLogger(__name__)

#: So many tasks are named in a warning.
_NAMED_MAX = 3


class TaskArrays:
    """What has become of the tasks with ``RayExecutor.as_array``.

    Args:
        exp_dir: folder of the experiment, where each array gets a folder as other jobs have one.
    """

    def __init__(self, exp_dir: Path) -> None:
        self._exp_dir = exp_dir
        self._arrays: dict[str, TaskArray] | None = None
        self._array_of: dict[str, str] = {}
        self._ids: dict[str, str] = {}
        self._lock = threading.RLock()  # an array may be a part of a dispatch
        self._outcomes: dict[str, NemoRunRayError | None] = {}

    def form(
        self, plans: dict[str, JobPlan], executors: dict[str, RayExecutor], places: dict[str, int]
    ) -> None:
        """Put arrays into the place of their tasks; once, when all plans are known.

        Args:
            plans: of all jobs, by name; those of the tasks are taken out.
            executors: of all jobs; an array gets that of its first task.
            places: which job of the experiment each is; an array gets that of its first task.

        Raises:
            ConfigError: what is a task's own is too large to be sent.
        """
        if self._arrays is not None:
            return
        experiment_id = next(iter(executors.values())).experiment_id or "experiment"
        # Of other clusters, and those that an earlier process has handed over.
        others_of_it = Ledger.of(self._exp_dir).jobs().values()
        taken = {record.job for record in others_of_it if not record.tasks}
        arrays = arrays_of(list(plans.values()), experiment_id, taken)
        for array in arrays:
            name, first = array.plan.job, array.tasks[0].job
            path = self._folder(name) / ELEMENTS_FILE
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, array.text)
            executors[name], places[name] = executors[first], places.get(first, 0)
        _warn_of_single(arrays)
        self._arrays = {array.plan.job: array for array in arrays}
        self._array_of = {task.job: array.plan.job for array in arrays for task in array.tasks}
        self._ids = {task.job: task.submission_id for array in arrays for task in array.tasks}
        others = [planned for planned in plans.values() if planned.job not in self._array_of]
        formed = after_arrays([*others, *(array.plan for array in arrays)], self._array_of)
        plans.clear()
        plans.update({planned.job: planned for planned in formed})

    def folders(self, job: str, executors: Mapping[str, RayExecutor]) -> list[Path]:
        """NeMo-Run's folder of a job; of one of these arrays its own, and those of its tasks."""
        tasks = self.tasks(job)
        own = [self._folder(job)] if tasks else []
        return [*own, *(Path(executors[name].job_dir) for name in _names(tasks) or [job])]

    def tasks(self, job: str) -> tuple[JobPlan, ...]:
        """The tasks of a job that is one of these arrays; none of any other."""
        found = (self._arrays or {}).get(job)
        return found.tasks if found is not None else ()

    def of(self, task: str) -> str | None:
        """The array that a task is an element of, if it is of one."""
        return self._array_of.get(task)

    def submission_id(self, task: str) -> str:
        """The id by which NeMo-Run knows a task of an array."""
        return self._ids[task]

    def hand_over_once(self, name: str, hand_over: Callable[[], object]) -> None:
        """Hand an array or a dispatch over with the first of its jobs; they share the outcome.

        Raises:
            NemoRunRayError: what handing it over raised.
        """
        with self._lock:
            if name not in self._outcomes:
                try:
                    hand_over()
                    self._outcomes[name] = None
                except NemoRunRayError as error:
                    self._outcomes[name] = error
        found = self._outcomes[name]
        if found is not None:
            raise found

    def _folder(self, array: str) -> Path:
        return self._exp_dir / array


def _warn_of_single(arrays: Sequence[TaskArray]) -> None:
    """Say which tasks share their job with no other one: they would cost less without that."""
    single = [array.tasks[0].job for array in arrays if len(array.tasks) == 1]
    if single:
        more = f" and {len(single) - _NAMED_MAX} more" if len(single) > _NAMED_MAX else ""
        log.warning(
            "RayExecutor.as_array of %s%s has no use: no other task has the same executor and the "
            "same jobs before and after it. Without it each is a job of its own, which starts no "
            "host of elements.",
            ", ".join(single[:_NAMED_MAX]),
            more,
        )


def _names(tasks: Iterable[JobPlan]) -> list[str]:
    return [task.job for task in tasks]
