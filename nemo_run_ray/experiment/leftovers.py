"""What is left of a job that was cancelled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nemo_run_ray.experiment.logs import OF_RAY
from nemo_run_ray.remote.node.output import (
    MAY_BE_LEFT,
    NO_PROCESS_LEFT,
    PROOF,
    RUNNER_KILLED,
    end_mark,
)
from nemo_run_ray.remote.states import JobStatus

if TYPE_CHECKING:
    from nemo_run_ray.experiment.observed_job import ObservedJob
    from nemo_run_ray.experiment.store import JobRecord

#: How the last words of an array begin whose driver came to its end.
_ENDS_OF_ARRAYS = "cancelled; ", "exit code ", "["


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
    marks = tuple(end_mark(nonce) for nonce in job.record.nonces)
    for end in (line.partition(PROOF)[0] for line in ending if line.startswith(marks)):
        if _is_proof(job.record, end.partition(": ")[2]):
            return f"{NO_PROCESS_LEFT} on its node"
        if MAY_BE_LEFT in end:
            return end[end.index(MAY_BE_LEFT) :].rstrip()
    if ending and all(OF_RAY.match(line) for line in ending):
        return never
    return f"its node {status.node[:12]} did not confirm that all its processes ended"


def _is_proof(record: JobRecord, words: str) -> bool:
    """Whether a job's last words say that all of its processes have ended."""
    if record.has_roles:
        return NO_PROCESS_LEFT in words
    if record.is_array:  # else its driver could not go on
        return words.startswith(_ENDS_OF_ARRAYS) and MAY_BE_LEFT not in words
    return RUNNER_KILLED not in words
