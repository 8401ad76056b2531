"""What is done for the jobs of a cluster before it is stopped: an embedded Ray, or one on Slurm.

Their logs, and how they ended, are lost with an embedded Ray, and an allocation keeps them in a
folder that others may remove: both are written down first.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nemo_run_ray.clusters import Cluster
from nemo_run_ray.dashboard.jobs import JobsApi
from nemo_run_ray.errors import ClusterError, NemoRunRayError, Unanswered
from nemo_run_ray.experiment import history
from nemo_run_ray.experiment.cancel import StopRequests, poll_until
from nemo_run_ray.experiment.find import experiments_of
from nemo_run_ray.experiment.job import RemoteJob
from nemo_run_ray.experiment.snapshot import Snapshot
from nemo_run_ray.experiment.store import store_of
from nemo_run_ray.ids import DISPATCHER
from nemo_run_ray.remote.rows import JobRows
from nemo_run_ray.remote.status import JobState, JobStatus, Reason, is_active, is_running

#: Seconds until the cluster is stopped under what has not ended; longer than most grace periods.
_END_LIMIT_S = 60.0
#: How often a cluster that gives no answer is asked again for the last states of its jobs.
_AGAIN_MAX = 3


def active(rows: JobRows) -> list[str]:
    """Submission ids of the jobs that run or may start."""
    return [name for name, row in rows.items() if is_active(row)]


def end_all(api: JobsApi) -> list[str]:
    """Stop all jobs of a cluster that is about to be stopped, and wait until none runs.

    Dispatchers go first, so that they start nothing more. What waits for room is not waited for.

    Returns:
        Submission ids of those that still run after ``_END_LIMIT_S``.
    """
    stops = StopRequests(api)
    running: list[str] | None = None

    def step() -> bool | None:
        nonlocal running
        rows = api.table(fresh=True)
        names = sorted(active(rows), key=lambda name: not name.endswith(f".{DISPATCHER}"))
        running = [name for name in names if is_running(rows[name])]
        for name in names:
            with contextlib.suppress(Unanswered):  # it is asked again
                stops.ask(name)
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
        What could not be kept, in words.
    """
    snapshot = Snapshot(is_fresh=True)
    remaining = []
    for exp_dir in sorted(experiments_of(api.table(fresh=True).keys())):
        for record in store_of(exp_dir).ledger.jobs().values():
            if record.is_dispatcher or not _is_on(record.cluster, cluster):
                continue
            try:
                job = RemoteJob(record)
                status = job.look(snapshot)
            except (NemoRunRayError, OSError) as error:
                yield _not_kept(record.submission_id, error)
                continue
            history.record([(job, status)], snapshot, is_final=True)
            if is_forced and not status.state.is_terminal:
                remaining.append(job)
    latest, again = Snapshot(is_fresh=True), _AGAIN_MAX  # the other looks have taken their time
    for job in remaining:
        try:
            status = job.look(latest)
            if not status.state.is_terminal and status.reason is not Reason.TAKEN:
                status = _stopped(job, latest)
            history.record([(job, status)], latest, is_final=True)
        except (NemoRunRayError, OSError) as error:
            yield _not_kept(job.id, error)
            if isinstance(error, Unanswered) and again:  # which the snapshot keeps, too
                latest, again = Snapshot(is_fresh=True), again - 1


def _stopped(job: RemoteJob, snapshot: Snapshot) -> JobStatus:
    attempts = list(job.attempts_in(snapshot).values())
    node = attempts[-1].node if attempts else ""
    detail = "cancelled when its cluster was stopped"
    return JobStatus(JobState.CANCELLED, Reason.CANCELLED, detail, node, attempt=len(attempts))


def _not_kept(submission_id: str, error: Exception) -> str:
    return f"The end of {submission_id} could not be kept: {error}"


def _is_on(record: Mapping[str, Any], cluster: Cluster) -> bool:
    """Whether a job's record names this cluster, however it has written its folder."""
    return _place(record) == _place(cluster.record())


def _place(record: Mapping[str, Any]) -> dict[str, Any]:
    """What tells a cluster from others of its kind.

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
