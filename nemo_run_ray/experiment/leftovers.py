"""What is left of a job that was cancelled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nemo_run_ray.experiment.logs import OF_RAY
from nemo_run_ray.remote.end_record import record_in
from nemo_run_ray.remote.node.output import MAY_BE_LEFT, NO_PROCESS_LEFT
from nemo_run_ray.remote.states import JobStatus

if TYPE_CHECKING:
    from nemo_run_ray.experiment.observed_job import ObservedJob


def leftovers(job: ObservedJob, status: JobStatus) -> str:
    """Proof that no process of a cancelled job is left, or where some may be, in words.

    The remote half ends every process of a job before its own last line, unless it was killed. That
    of a group or of an array says whether it could, on all their nodes.

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
    record = record_in(ending, job.record.nonces)
    if record is not None and record.left_on == ():
        return f"{NO_PROCESS_LEFT} on its node"
    if record is not None and record.left_on:
        return f"{MAY_BE_LEFT} {', and '.join(record.left_on)}"
    if ending and all(OF_RAY.match(line) for line in ending):
        return never
    return f"its node {status.node[:12]} did not confirm that all its processes ended"
