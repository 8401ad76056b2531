"""Ends jobs: those of experiments, and all of a cluster that is about to be stopped.

The logs of an embedded Ray, and how its jobs ended, are lost with it, and an allocation of Slurm
keeps them in a folder that others may remove: both are written down first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from nemo_run_ray.dashboard.jobs import PATIENCE_S, JobsApi
from nemo_run_ray.errors import ClusterError, JobError, NemoRunRayError, Unanswered
from nemo_run_ray.experiment.dispatch import Snapshot, StopRequests, claim, poll_until
from nemo_run_ray.experiment.job import RemoteJob, record
from nemo_run_ray.experiment.store import experiments_of, store_of
from nemo_run_ray.ids import DISPATCHER
from nemo_run_ray.remote.spec import JobRows
from nemo_run_ray.remote.status import JobState, JobStatus, Reason, is_active, is_running

#: Jobs that are cancelled at the same time: each that waits for room takes some seconds.
_AT_A_TIME = 8
#: Seconds until the cluster is stopped under what has not ended; longer than most grace periods.
_END_LIMIT_S = 60.0


def cancel_all(jobs: Sequence[RemoteJob]) -> Iterator[str]:
    """Cancel jobs, some at the same time, and wait for their ends.

    Yields:
        A sentence about the end of each, in their order.
    """
    snapshot = Snapshot()
    for dispatch in {job.dispatch for job in jobs if not job.is_direct}:
        given = [job for job in jobs if job.record.dispatcher == dispatch.id]
        states = [job.status_in(snapshot).state for job in given]
        if len(given) == len(dispatch.spec.jobs) > 1 and not all(one.is_terminal for one in states):
            # One claim for all that have not started.
            claim(given[0].api(), dispatch.spec.cancel_id, dispatch.spec.nonce)
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        ends = [pool.submit(_cancel, job) for job in jobs]
        try:
            for end in ends:
                yield end.result()
        except KeyboardInterrupt:  # those that were stopped are waited for
            pool.shutdown(cancel_futures=True)
            raise


def _cancel(job: RemoteJob) -> str:
    snapshot = Snapshot()
    status = job.status_in(snapshot)
    if status.state.is_terminal and status.state is not JobState.CANCELLED:
        record([(job, status)], snapshot)
        return f"{job.name} is {status.state.value}: there is nothing to cancel"
    if not job.record.terminal:
        status = job.cancel()
    proof = ""
    if status.state is JobState.CANCELLED:
        with contextlib.suppress(JobError):  # its cluster has been stopped since, with all of it
            proof = f"; {job.proof_of_end(status)}"
    return f"{job.name} is {status.state.value.lower()}{proof}"


def active(rows: JobRows) -> list[str]:
    """Submission ids of the jobs that run or may start."""
    return [name for name, row in rows.items() if is_active(row)]


def end_all(api: JobsApi) -> list[str]:
    """Stop all jobs of a cluster that is about to be stopped, and wait until none runs.

    Dispatchers go first, so that they start nothing more. What waits for room is not waited for.

    Returns:
        Submission ids of those that still run after ``_END_LIMIT_S``.
    """
    stops = StopRequests()
    running: list[str] | None = None

    def step() -> bool | None:
        nonlocal running
        rows = api.table(fresh=True)
        names = sorted(active(rows), key=lambda name: not name.endswith(f".{DISPATCHER}"))
        running = [name for name in names if is_running(rows[name])]
        for name in names:
            with contextlib.suppress(Unanswered):  # it is asked again
                stops.ask(api, name)
        return None if running else True

    try:
        poll_until(step, _END_LIMIT_S, "what runs on the cluster")
    except ClusterError:
        if running is None:  # it has never answered
            raise
    return running or []


def note_ends(api: JobsApi, is_forced: bool) -> Iterator[str]:
    """Write down how the jobs of this NeMo-Run home ended, and keep their logs.

    Yields:
        A sentence for each thing that could not be kept.
    """
    problems: dict[str, None] = {}
    remaining = []
    rows, snapshot = api.table(fresh=True), Snapshot()
    for exp_dir in sorted(experiments_of(rows.keys())):
        seen: list[tuple[RemoteJob, JobStatus]] = []
        for row in store_of(exp_dir).ledger.jobs().values():
            if row.is_dispatcher:
                continue
            if not rows.keys().isdisjoint((row.submission_id, row.dispatcher)):
                try:
                    job = RemoteJob(row)
                    seen.append((job, job.look(snapshot)))
                except (NemoRunRayError, OSError) as error:
                    problems[f"{row.submission_id} could not be looked at: {error}"] = None
        problems |= dict.fromkeys(record(seen, snapshot, is_final=True))
        remaining.append([job for job, status in seen if not status.state.is_terminal])
    if is_forced:
        api.table(fresh=True, patience_s=PATIENCE_S)
        snapshot = Snapshot()  # the first looks, and the copies of logs, have taken their time
        for jobs in remaining:
            seen = [(job, _stopped(job, snapshot)) for job in jobs]
            problems |= dict.fromkeys(record(seen, snapshot, is_final=True))
    yield from problems


def _stopped(job: RemoteJob, snapshot: Snapshot) -> JobStatus:
    """The status of a job when its cluster is stopped."""
    status = job.status_in(snapshot)
    if status.state.is_terminal:
        return status
    attempts = list(job.attempts_in(snapshot).values())
    node = attempts[-1].node if attempts else ""
    detail = "cancelled when its cluster was stopped"
    return JobStatus(JobState.CANCELLED, Reason.CANCELLED, detail, node, attempt=len(attempts))
