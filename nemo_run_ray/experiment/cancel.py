"""Ends jobs: those of experiments, and all of a cluster that is about to be stopped.

The logs of an embedded Ray, and how its jobs ended, are lost with it, and an allocation of Slurm
keeps them in a folder that others may remove: both are written down first.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nemo_run_ray.clusters import Cluster
from nemo_run_ray.dashboard.jobs import PATIENCE_S, JobsApi
from nemo_run_ray.errors import ClusterError, JobError, NemoRunRayError, Unanswered
from nemo_run_ray.experiment.dispatch import (
    Dispatch,
    Snapshot,
    StopRequests,
    cancel_dispatch,
    poll_until,
)
from nemo_run_ray.experiment.find import experiments_of
from nemo_run_ray.experiment.job import RemoteJob, record
from nemo_run_ray.experiment.store import store_of
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

    Raises:
        ClusterError: a job did not end in time, or a cluster stopped answering; all others were
            cancelled too.
    """
    _cancel_whole_dispatches(jobs)
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
    if status.state.is_terminal:
        record([(job, status)], snapshot)
        if status.state is not JobState.CANCELLED:
            return f"{job.name} is {status.state.value}: there is nothing to cancel"
    else:
        status = job.cancel()
    proof = ""
    if status.state is JobState.CANCELLED:
        with contextlib.suppress(JobError):  # its cluster has been stopped since, with all of it
            proof = f"; {job.proof_of_end(status)}"
    return f"{job.name} is {status.state.value.lower()}{proof}"


def _cancel_whole_dispatches(jobs: Sequence[RemoteJob]) -> None:
    """Cancel dispatches whose jobs are all given, with one claim each for what has not started."""
    by_dispatch: dict[Dispatch, list[RemoteJob]] = {}
    for job in jobs:
        if not job.is_direct:
            by_dispatch.setdefault(job.dispatch, []).append(job)
    for dispatch, given in by_dispatch.items():
        if len(dispatch.spec.jobs) != len(given) or len(given) == 1:
            continue
        snapshot = Snapshot()
        if not all(job.status_in(snapshot).state.is_terminal for job in given):
            cancel_dispatch(dispatch, given[0].api())
            snapshot = Snapshot(is_fresh=True)
            record([(job, job.status_in(snapshot)) for job in given], snapshot)


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


def note_ends(api: JobsApi, cluster: Cluster, is_forced: bool) -> Iterator[str]:
    """Write down how the jobs of this NeMo-Run home ended, and keep their logs.

    Args:
        api: the cluster's dashboard.
        cluster: that is about to be stopped.
        is_forced: its jobs were stopped; those that have not ended are noted as cancelled.

    Yields:
        A sentence for each thing that could not be kept.
    """
    problems: dict[str, None] = {}
    remaining = []
    rows, snapshot = api.table(fresh=True), Snapshot()
    for exp_dir in sorted(experiments_of(rows.keys())):
        seen: list[tuple[RemoteJob, JobStatus]] = []
        for row in store_of(exp_dir).ledger.jobs().values():
            if _is_on(row.cluster, cluster) and not row.is_dispatcher:
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


def _is_on(record: Mapping[str, Any], cluster: Cluster) -> bool:
    """Whether a job's record names this cluster, however it has written its folder."""
    return _place(record) == _place(cluster.record())


def _place(record: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a record that tells a cluster from others of its kind.

    Whether one on Slurm renews itself does not, and neither does the key by which its host is
    reached.
    """
    if "state_dir" in record:
        return {"kind": record["kind"], "folder": Path(record["state_dir"]).resolve()}
    if "tunnel" in record:
        tunnel = record["tunnel"]
        place = {name: tunnel.get(name) for name in ("host", "user", "port")}
        folder = os.path.normpath(tunnel["job_dir"])
        return {"kind": record["kind"], "name": record["name"], "folder": folder, **place}
    return dict(record)
