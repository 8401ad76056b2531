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
            Ledger.of(exp_dir).write_all(found)


def note_cancel(job: ObservedJob) -> None:
    """Write down that its end is asked for."""
    Ledger.of(job.record.exp_dir).write(ledger.CANCEL, job.id)
    job.record.cancelled = True


def note_end(job: ObservedJob, status: JobStatus) -> None:
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


def note_attempts(job: ObservedJob, status: JobStatus) -> None:
    """Write down what is seen of its attempts, when the job is not where it was before."""
    if _seen.get(job.id) == (status.state, status.attempt):
        return
    attempts = job.attempts_in(Snapshot())
    if attempts != job.record.attempts:
        job.record.attempts = dict(attempts)
        Ledger.of(job.record.exp_dir).keep_attempts({job.id: attempts})
    _seen[job.id] = status.state, status.attempt


def _write_end(job: ObservedJob, status: JobStatus) -> None:
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
    attempts = [attempt.to_json() for attempt in record.attempts.values()]
    event = ledger.TERMINAL, job.id, {"status": record.terminal, "attempts": attempts}
    held_back = _held_back.get()
    if held_back is None:
        Ledger.of(record.exp_dir).write_all([event])
    else:
        held_back.setdefault(record.exp_dir, []).append(event)


def _keep_log(job: ObservedJob, status: JobStatus) -> None:
    try:
        job.kept.keep_log(job.whole_log(job.api(), status))
    except ClusterError as error:
        log.warning("The log of %s could not be kept: %s", job.id, error)
