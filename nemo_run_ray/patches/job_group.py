"""``job_group``: an executor says itself whether NeMo-Run may group its tasks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from nemo_run.core.execution.base import Executor
from nemo_run.run.job import JobGroup

from nemo_run_ray.patches.base import Edit, Patch

_REFUSAL = "Unsupported executor type."


class JobGroupPatch(Patch):
    name = "job_group"
    why = (
        "JobGroup takes any executor whose classmethod supports_job_group() returns True, instead "
        "of a closed list of classes."
    )
    retired_by = "Executor.supports_job_group() in NeMo-Run itself (issue 537 there)"

    def is_needed(self) -> bool:
        return bool(self._done) or not hasattr(Executor, "supports_job_group")

    def edits(self) -> Sequence[Edit]:
        listed: Any = vars(JobGroup).get("SUPPORTED_EXECUTORS")
        self.must(isinstance(listed, list), "JobGroup.SUPPORTED_EXECUTORS")
        build = vars(JobGroup).get("__post_init__")
        self.must(callable(build), "JobGroup.__post_init__")
        return [
            Edit(Executor, "supports_job_group", _supports(listed)),
            Edit(JobGroup, "SUPPORTED_EXECUTORS", _AskingList(listed)),
            Edit(JobGroup, "__post_init__", _merging(build, listed)),
        ]


class _AskingList(list):  # type: ignore[type-arg]
    """NeMo-Run's list, which asks a class whether the list holds it."""

    def __contains__(self, kind: object) -> bool:
        supports = getattr(kind, "supports_job_group", None)
        return bool(callable(supports) and supports()) or super().__contains__(kind)


def _supports(listed: list[type]) -> classmethod[Any, Any, bool]:
    def supports_job_group(cls: type) -> bool:
        """Whether a ``JobGroup`` may use executors of this class; subclasses override it."""
        return cls in listed

    return classmethod(supports_job_group)


def _merging(build: Any, listed: list[type]) -> Any:
    @functools.wraps(build)
    def __post_init__(self: JobGroup) -> None:  # noqa: N807
        given = self.executors
        try:
            build(self)
        except AssertionError as error:
            if str(error) != _REFUSAL:
                raise
            refused = type(given if isinstance(given, Executor) else given[0]).__name__
            raise AssertionError(
                f"{_REFUSAL}\n{refused} does not say that it can run groups: a classmethod "
                "supports_job_group() that returns True lets it in, and a classmethod "
                "merge(executors, num_tasks) makes one job of the group."
            ) from None
        executors = [given] if isinstance(given, Executor) else given
        kind = type(executors[0])
        # NeMo-Run itself merges those that it lists, or means not to.
        if kind not in listed and kind.supports_job_group() and hasattr(kind, "merge"):
            self.executors = kind.merge(executors, num_tasks=len(self.tasks))
            self._merge = True

    return __post_init__
