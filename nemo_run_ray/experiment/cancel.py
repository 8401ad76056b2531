"""Cancelling several jobs of one experiment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from nemo_run_ray.errors import JobError
from nemo_run_ray.experiment.dispatched_job import DispatchedJob
from nemo_run_ray.experiment.job import RemoteJob
from nemo_run_ray.experiment.snapshot import Snapshot
from nemo_run_ray.remote.states import JobState, JobStatus

#: Jobs that are cancelled at the same time: each that waits for room takes some seconds.
_AT_A_TIME = 8


def cancel_all(jobs: Sequence[RemoteJob]) -> Iterator[str]:
    """Cancel jobs, some at the same time, and wait for their ends.

    Yields:
        What became of each, in words and in their order.

    Raises:
        ClusterError: a job did not end in time, or a cluster stopped answering; all others were
            cancelled too.
    """
    _cancel_dispatches(jobs)
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        ends = [pool.submit(_cancel, job) for job in jobs]
        try:
            for end in ends:
                yield end.result()
        except KeyboardInterrupt:  # those that were told to end are waited for, others go on
            pool.shutdown(cancel_futures=True)
            raise


def _cancel(job: RemoteJob) -> str:
    status = job.status
    if status.state.is_terminal and status.state is not JobState.CANCELLED:
        return f"{job.name} is {status.state.value}: there is nothing to cancel"
    if not status.state.is_terminal:
        status = job.cancel()
    return f"{job.name} is {status.state.value.lower()}{_proof(job, status)}"


def _cancel_dispatches(jobs: Sequence[RemoteJob]) -> None:
    """Cancel dispatches whose jobs are all given, with one claim each for what has not started."""
    by_dispatch: dict[str, list[DispatchedJob]] = {}
    for job in jobs:
        if isinstance(job, DispatchedJob):
            by_dispatch.setdefault(job.dispatch.id, []).append(job)
    snapshot = Snapshot()
    for given in by_dispatch.values():
        dispatch = given[0].dispatch
        going_on = [job for job in given if not job.status_in(snapshot).state.is_terminal]
        if going_on and len(dispatch.spec.jobs) == len(given) > 1:
            dispatch.cancel(given[0].api())


def _proof(job: RemoteJob, status: JobStatus) -> str:
    if status.state is not JobState.CANCELLED:
        return ""
    try:
        return f"; {job.leftovers(status)}"
    except JobError:  # its cluster has been stopped since, with all that ran on it
        return ""
