"""What a job's driver tells of the roles of a group and of the elements of an array."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from nemo_run_ray.errors import NemoRunRayError
from nemo_run_ray.remote.rows import ArrayRows, GroupRows
from nemo_run_ray.remote.states import JobStatus, Life, Phase, Reason

if TYPE_CHECKING:
    from nemo_run_ray.jobs.observed_job import ObservedJob


def roles(job: ObservedJob, status: JobStatus) -> GroupRows | None:
    """What is known of a group's roles: ``phase``, ``waits_for_room`` and a list ``roles``.

    ``None`` for a task alone, and for a group whose cluster does not answer.
    """
    if not job.record.has_roles:
        return None
    found = cast("GroupRows | None", _told(job, status))
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


def elements(job: ObservedJob, status: JobStatus) -> ArrayRows | None:
    """What is known of an array's elements; ``None`` for other jobs, and where nothing is known."""
    return cast("ArrayRows | None", _told(job, status)) if job.record.is_array else None


def _told(job: ObservedJob, status: JobStatus) -> GroupRows | ArrayRows | None:
    """What the job's driver wrote last."""
    if job.kept.has_rows:
        return job.kept.rows()
    if status.reason in (Reason.UNREACHABLE, Reason.CLUSTER_GONE):
        return None  # a node may be known all the same
    try:
        return job.api().state.rows(status.node, job.ran_as(status)) if status.node else None
    except NemoRunRayError:
        return None
