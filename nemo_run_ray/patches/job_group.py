"""``job_group``: an executor says itself whether NeMo-Run may group its tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nemo_run.config import Script
from nemo_run.core.execution.base import Executor
from nemo_run.run.job import JobGroup

from nemo_run_ray.patches import Edit, Patch, around


class JobGroupPatch(Patch):
    """JobGroup takes any executor whose classmethod supports_job_group() returns True, instead of a
    closed list of classes, and makes one job of the group where the class has merge().
    """

    name = "job_group"
    retired_by = (
        "a JobGroup of NeMo-Run itself that merges the executors of other packages (issue 537 "
        "there; its pull request 587 only lets them in)"
    )

    def is_needed(self) -> bool:
        return not _merges(JobGroup)

    def edits(self) -> Sequence[Edit]:
        edit = self.wrapped(JobGroup, "__post_init__", _merging)
        trial = type("Trial", (JobGroup,), {edit.name: edit.value})
        self.must(_merges(trial), "JobGroup.__post_init__")
        return [edit]


PATCH = JobGroupPatch()


class _Foreign(Executor):
    """An executor of another package, to try how NeMo-Run groups such executors."""

    @classmethod
    def supports_job_group(cls) -> bool:
        return True

    @classmethod
    def merge(cls, executors: list[Any], num_tasks: int) -> _Foreign:
        return cls()


def _merges(kind: type[JobGroup]) -> bool:
    """Whether this kind of group makes one job of another package's executors."""
    try:
        group = kind(id="trial", tasks=[Script(inline="true")], executors=[_Foreign()])
    except Exception:  # whatever refuses them
        return False
    return bool(group._merge) and isinstance(group.executors, _Foreign)


def _opts_in(kind: type) -> bool:
    """Whether another package's class says that it runs groups."""
    answer = getattr(kind, "supports_job_group", None)
    # NeMo-Run knows itself how to group what inherits its own answer.
    return bool(answer and not answer.__module__.startswith("nemo_run.") and answer())


@around
def _merging(build: Any, self: Any) -> None:
    given = self.executors
    executors = [given] if isinstance(given, Executor) else given
    kinds = {type(executor) for executor in executors}
    # Others replace the class's list, or append to it, so it is read anew for each group.
    self.SUPPORTED_EXECUTORS = [
        *getattr(type(self), "SUPPORTED_EXECUTORS", ()),
        *filter(_opts_in, kinds),
    ]
    try:
        build(self)
    finally:
        del self.SUPPORTED_EXECUTORS
    (kind,) = kinds
    if not self._merge and _opts_in(kind) and hasattr(kind, "merge"):
        self.executors = kind.merge(executors, num_tasks=len(self.tasks))
        self._merge = True
