"""What is written down of a job, so that it is known without its cluster."""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING

from nemo_run_ray.errors import ClusterError
from nemo_run_ray.jobs import ledger
from nemo_run_ray.jobs.explanations import roles
from nemo_run_ray.jobs.ledger import Ledger
from nemo_run_ray.jobs.snapshot import Snapshot
from nemo_run_ray.remote.states import JobState, JobStatus

if TYPE_CHECKING:
    from nemo_run_ray.jobs.job import RemoteJob

log = logging.getLogger(__name__)

_lock = threading.Lock()
#: Jobs whose end this process has written down, and where jobs were when their attempts were.
_ended: set[str] = set()
_seen: dict[str, tuple[JobState, int]] = {}


def note_cancel(job: RemoteJob) -> None:
    """Write down that somebody asks for its end."""
    Ledger.of(job.record.exp_dir).write(ledger.CANCEL, job.id)
    job.record.cancelled = True


def note_end(job: RemoteJob, status: JobStatus) -> None:
    """Write down how it ended, once in a process."""
    with _lock:
        if job.id in _ended:
            return
        _ended.add(job.id)
    try:
        _write_end(job, status)
    except BaseException:
        _ended.discard(job.id)
        raise


def note_attempts(job: RemoteJob, status: JobStatus) -> None:
    """Write down what is seen of its attempts, when the job is not where it was before."""
    if _seen.get(job.id) == (status.state, status.attempt):
        return
    attempts = job.attempts_in(Snapshot())
    if attempts != job.record.attempts:
        job.record.attempts = dict(attempts)
        Ledger.of(job.record.exp_dir).keep_attempts({job.id: attempts})
    _seen[job.id] = status.state, status.attempt


def _write_end(job: RemoteJob, status: JobStatus) -> None:
    record = job.record
    record.terminal = status.to_json()
    if not os.access(record.exp_dir, os.W_OK):
        return
    if job.cluster.runs_here and status.attempt:  # the embedded Ray may be gone soon
        _keep_log(job, status)
        found = roles(job, status)
        if found:
            job.kept.keep_roles(found)
    record.attempts = dict(job.attempts_in(Snapshot()))
    Ledger.of(record.exp_dir).write(
        ledger.TERMINAL,
        job.id,
        status=record.terminal,
        attempts=[one.to_json() for one in record.attempts.values()],
    )


def _keep_log(job: RemoteJob, status: JobStatus) -> None:
    try:
        job.kept.keep_log(job.whole_log(job.api(), status))
    except ClusterError as error:
        log.warning("The log of %s could not be kept: %s", job.id, error)
