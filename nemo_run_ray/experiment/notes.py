"""What is written down of a job, so that it is known without its cluster."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_run_ray.dashboard.http import SLOW_S
from nemo_run_ray.errors import NemoRunRayError
from nemo_run_ray.experiment.elements import keep_array, needs_keeping
from nemo_run_ray.experiment.roles_and_elements import elements, roles
from nemo_run_ray.experiment.snapshot import Snapshot
from nemo_run_ray.experiment.store import CANCEL, TERMINAL, Event, Ledger, has_news
from nemo_run_ray.remote.states import JobState, JobStatus

if TYPE_CHECKING:
    from nemo_run_ray.experiment.observed_job import ObservedJob

log = logging.getLogger(__name__)

#: What tells a job from another one of its id that an experiment made anew has.
_Key = tuple[Path, str, str]
_lock = threading.Lock()
_writing: dict[_Key, threading.Lock] = {}
#: Jobs whose end this process has written down, and where jobs were when their attempts were.
_ended: set[_Key] = set()
_seen: dict[_Key, tuple[JobState, int]] = {}
#: When this process asks again whether there is news of a job that is where it was, and how often.
_again_at: dict[_Key, float] = {}
_AGAIN_S = 10.0
#: When this process looked at a job last, and which of its attempts ran then.
_looked: dict[_Key, tuple[float, frozenset[str]]] = {}
#: Seconds between two looks that see when an attempt begins, and not only that it has begun.
_MOMENT_S = 10.0


@dataclass
class _Together:
    """Ends that are written together.

    Attributes:
        events: by experiment.
        ended: the jobs, how each ended, and the look that saw it.
    """

    events: dict[Path, list[Event]] = field(default_factory=dict)
    ended: list[tuple[ObservedJob, JobStatus, Snapshot]] = field(default_factory=list)


_together: ContextVar[_Together | None] = ContextVar("_together", default=None)


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Write all ends that are noted inside together: each write waits for the disk."""
    found = _Together()
    before = _together.set(found)
    try:
        yield
    finally:
        _together.reset(before)
        for exp_dir, events in found.events.items():
            _write(exp_dir, events)
    for job, status, snapshot in found.ended:  # the ends are on the disk, whatever happens now
        job.keep_log(status, snapshot)


def note_cancel(job: ObservedJob) -> None:
    """Write down that its end is asked for; a folder that takes no note keeps nothing alive."""
    job.record.cancelled = True
    try:
        Ledger.of(job.record.exp_dir).write(CANCEL, job.id)
    except OSError as error:
        log.warning("That %s is cancelled is not kept in its folder: %s", job.id, error)


def note_end(job: ObservedJob, status: JobStatus, snapshot: Snapshot) -> None:
    """Write down how it ended, once in a process.

    Where nothing can be written (another user's folder, a full disk) it is not kept: who looks at a
    job is not to fail for that.
    """
    key = _key(job)
    with _lock:
        writing = _writing.setdefault(key, threading.Lock())
    with writing:  # for another thread that saw the end too, and may end the process after that
        job.record.terminal = status.to_json()
        if key not in _ended and os.access(job.record.exp_dir, os.W_OK):
            _write_end(job, status, snapshot)


def note_attempts(job: ObservedJob, status: JobStatus, snapshot: Snapshot) -> None:
    """Write down what is seen of its attempts, when the job is not where it was before."""
    key = _key(job)
    is_due = time.monotonic() >= _again_at.get(key, 0.0)
    if _seen.get(key) == (status.state, status.attempt) and not is_due:
        if key in _looked:  # the same attempts run as before
            _looked[key] = time.monotonic(), _looked[key][1]
        return
    attempts = job.attempts_in(snapshot)
    if has_news(job.record.attempts, attempts):
        job.record.attempts = dict(attempts)
        Ledger.of(job.record.exp_dir).keep_attempts({job.id: attempts})
    _seen[key] = status.state, status.attempt
    _again_at[key] = time.monotonic() + _AGAIN_S


def have_begun(job: ObservedJob, running: frozenset[str]) -> frozenset[str]:
    """The attempts that have begun to run since this process looked a moment ago."""
    key, now = _key(job), time.monotonic()
    looked_at, before = _looked.get(key, (-_MOMENT_S, running))
    _looked[key] = now, running
    return running - before if now - looked_at <= _MOMENT_S else frozenset()


def _key(job: ObservedJob) -> _Key:
    return job.record.exp_dir, job.id, job.record.nonces[-1]


def _write_end(job: ObservedJob, status: JobStatus, snapshot: Snapshot) -> None:
    record = job.record
    if job.cluster.runs_here and status.attempt:  # the embedded Ray may be gone soon
        _keep_files(job, status)
    record.attempts = dict(job.attempts_in(snapshot))
    attempts = [attempt.to_json() for attempt in record.attempts.values()]
    event = TERMINAL, job.id, {"status": record.terminal, "attempts": attempts}
    together = _together.get()
    if together is not None:
        together.events.setdefault(record.exp_dir, []).append(event)
        together.ended.append((job, status, snapshot))
    elif not _write(record.exp_dir, [event]):
        return
    _ended.add(_key(job))
    if together is None:
        job.keep_log(status, snapshot)


def _write(exp_dir: Path, events: list[Event]) -> bool:
    try:
        Ledger.of(exp_dir).write_all(events)
    except OSError as error:
        log.warning("The ends of jobs are not kept in %s: %s", exp_dir, error)
        names = {name for _, name, _ in events}
        for key in [key for key in _ended if key[0] == exp_dir and key[1] in names]:
            _ended.discard(key)
        return False
    return True


def _keep_files(job: ObservedJob, status: JobStatus) -> None:
    try:
        most_bytes = job.record.keep_logs_max_bytes
        if most_bytes != 0:
            job.kept.keep_log(job.whole_log(job.api(), status, SLOW_S), most_bytes)
        found = roles(job, status) or elements(job, status)
        if found:
            job.kept.keep_rows(found)
        if needs_keeping(job):
            keep_array(job, status)
    except (NemoRunRayError, OSError) as error:
        log.warning("The log of %s could not be kept: %s", job.id, error)
