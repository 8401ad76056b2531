"""What a job's driver tells of the roles of a group and of the elements of an array."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nemo_run_ray.errors import NemoRunRayError
from nemo_run_ray.remote.attempts import JobExit
from nemo_run_ray.remote.rows import ARRAY, GROUP, ArrayRows, GroupRows, fits
from nemo_run_ray.remote.states import JobStatus, Life, Phase, Reason

if TYPE_CHECKING:
    from nemo_run_ray.experiment.job import RemoteJob

#: What stands before the failures of elements in the detail of an array that has failed.
FIRST_FAILURES = "; its first failures:"


def roles(job: RemoteJob, status: JobStatus) -> GroupRows | None:
    """What is known of a group's roles: ``phase``, ``waits_for_room`` and a list ``roles``.

    ``None`` for a task alone, and for a group whose cluster does not answer.
    """
    if not job.record.has_roles:
        return None
    found: GroupRows | None = _told(job, status, GROUP)
    if found and status.state.is_terminal and found["phase"] != Phase.OVER.value:
        # The driver was killed, and what it wrote last is no longer so.
        found["phase"], found["waits_for_room"] = Phase.OVER.value, ""
        for row in found["roles"]:
            if row["state"] != Life.ENDED.value:
                row["state"] = Life.LOST.value
                row["waits_for"] = ""
    return found


def not_ready(group: GroupRows) -> list[str]:
    """The services of a group that are not ready for long, each with what its probe gets."""
    return [
        f"{row['role']}/{row['replica']} is {row['waits_for']}"
        for row in group["roles"]
        if row.get("waits_for")  # the driver may be of an older version
    ]


def elements(job: RemoteJob, status: JobStatus) -> ArrayRows | None:
    """What is known of an array's elements; ``None`` for other jobs, and where nothing is known."""
    found: ArrayRows | None = _told(job, status, ARRAY) if job.record.is_array else None
    return found


def failure_lines(array: ArrayRows) -> list[str]:
    """A line for each of the first elements that have failed."""
    return [
        f"  element {index}: {words or f'exit code {code}'}"
        for index, code, words in array["failures"]
    ]


def with_failures(job: RemoteJob, status: JobStatus) -> JobStatus:
    """The status; of an array that has failed with its first failures.

    The last lines of its log are of any elements, mostly of those that have succeeded.
    """
    # With another code its driver could not go on, and the log says why.
    if not status.tail or not status.detail.startswith(f"exit code {JobExit.SOME_FAILED}"):
        return status
    array = elements(job, status)
    lines = failure_lines(array) if array else []
    if not lines:
        return status
    return replace(status, detail="\n".join([f"{status.detail}{FIRST_FAILURES}", *lines]), tail="")


def _told(job: RemoteJob, status: JobStatus, shape: dict[str, Any]) -> Any:
    """What the job's driver wrote last, if it has this shape."""
    found: Any = None
    if job.kept.has_rows:
        found = job.kept.rows()
    elif status.node and status.reason not in (Reason.UNREACHABLE, Reason.CLUSTER_GONE):
        with contextlib.suppress(NemoRunRayError):  # a node may be known all the same
            found = job.api().state.rows(status.node, job.ran_as(status))
    return found if fits(found, shape) else None
