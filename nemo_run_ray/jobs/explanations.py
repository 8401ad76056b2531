"""What explains a job beside its status: roles, elements, and what is left of a cancelled job."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from nemo_run_ray.errors import NemoRunRayError
from nemo_run_ray.jobs.follow_log import OF_RAY
from nemo_run_ray.remote.node.output import NO_PROCESS_LEFT, RUNNER_KILLED, end_mark
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
    return found


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


def leftovers(job: ObservedJob, status: JobStatus) -> str:
    """Proof that no process of a cancelled job is left on its node, in words.

    The remote half ends every process of a task before its own last line, unless it was killed. The
    last line of a group says whether it could, on all its nodes.

    Raises:
        ClusterError: the cluster cannot be asked.
        JobError: the cluster is gone for good.
    """
    never = "it never had a process"
    if status.attempt > 1:
        never = f"its attempt {status.attempt} never had a process"
    if not status.node:
        return never
    ending = job.api().state.last_lines(status.node, job.ran_as(status), 3)
    marks = () if job.record.has_roles else tuple(end_mark(nonce) for nonce in job.record.nonces)
    ends = [line for line in ending if line.startswith(marks) and RUNNER_KILLED not in line]
    if ends or any(NO_PROCESS_LEFT in line for line in ending):
        return f"{NO_PROCESS_LEFT} on its node"
    if ending and all(OF_RAY.match(line) for line in ending):
        return never
    return f"its node {status.node[:12]} did not confirm that all its processes ended"
