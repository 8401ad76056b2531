"""What is written down of a job, so that it is known without its cluster."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_run_ray.errors import ClusterError
from nemo_run_ray.jobs import ledger
from nemo_run_ray.jobs.explanations import roles
from nemo_run_ray.jobs.ledger import Event, Ledger
from nemo_run_ray.jobs.snapshot import Snapshot
from nemo_run_ray.remote.states import JobState, JobStatus

if TYPE_CHECKING:
    from nemo_run_ray.jobs.observed_job import ObservedJob

log = logging.getLogger(__name__)

_lock = threading.Lock()
#: Jobs whose end this process has written down, and states of those whose attempts it has.
_ended: set[str] = set()
_seen: dict[str, tuple[JobState, int]] = {}
#: Events that are written together, by experiment.
_held_back: ContextVar[dict[Path, list[Event]] | None] = ContextVar("_held_back", default=None)


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Write all ends that are noted inside together: each write waits for the disk."""
    events: dict[Path, list[Event]] = {}
    before = _held_back.set(events)
    try:
        yield
    finally:
        _held_back.reset(before)
        for exp_dir, found in events.items():
            _write(exp_dir, found)


def note_cancel(job: ObservedJob) -> None:
    """Write down that its end is asked for."""
    Ledger.of(job.record.exp_dir).write(ledger.CANCEL, job.id)
    job.record.cancelled = True


def note_end(job: ObservedJob, status: JobStatus, snapshot: Snapshot) -> None:
    """Write down how it ended, once in a process.

    Where nothing can be written (another user's folder, a full disk) it is not kept: who looks at a
    job is not to fail for that.
    """
    with _lock:
        if job.id in _ended:
            return
        _ended.add(job.id)
    job.record.terminal = status.to_json()
    if os.access(job.record.exp_dir, os.W_OK):
        _write_end(job, status, snapshot)


def note_attempts(job: ObservedJob, status: JobStatus, snapshot: Snapshot) -> None:
    """Write down what is seen of its attempts, when the job is not where it was before."""
    if _seen.get(job.id) == (status.state, status.attempt):
        return
    attempts = job.attempts_in(snapshot)
    if attempts != job.record.attempts:
        job.record.attempts = dict(attempts)
        Ledger.of(job.record.exp_dir).keep_attempts({job.id: attempts})
    _seen[job.id] = status.state, status.attempt


def _write_end(job: ObservedJob, status: JobStatus, snapshot: Snapshot) -> None:
    record = job.record
    if job.cluster.runs_here and status.attempt:  # the embedded Ray may be gone soon
        _keep_files(job, status)
    record.attempts = dict(job.attempts_in(snapshot))
    attempts = [attempt.to_json() for attempt in record.attempts.values()]
    event = ledger.TERMINAL, job.id, {"status": record.terminal, "attempts": attempts}
    held_back = _held_back.get()
    if held_back is None:
        _write(record.exp_dir, [event])
    else:
        held_back.setdefault(record.exp_dir, []).append(event)


def _write(exp_dir: Path, events: list[Event]) -> None:
    try:
        Ledger.of(exp_dir).write_all(events)
    except OSError as error:
        log.warning("The ends of jobs are not kept in %s: %s", exp_dir, error)
        with _lock:
            _ended.difference_update(name for _, name, _ in events)


def _keep_files(job: ObservedJob, status: JobStatus) -> None:
    try:
        job.kept.keep_log(job.whole_log(job.api(), status))
        found = roles(job, status)
        if found:
            job.kept.keep_roles(found)
    except (ClusterError, OSError) as error:
        log.warning("The log of %s could not be kept: %s", job.id, error)
