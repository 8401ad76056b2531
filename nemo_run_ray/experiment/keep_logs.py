"""Keeps the logs of jobs that have ended in the experiment's folder, whoever sees the end first.

A look at a job must not take long for that: one answer spends ``BUDGET_S`` on logs, and what there
was no time for is kept by the next look. A log that the cluster does not have, or that takes longer
than that, is given up, which is written down, so that no look asks for it again. A client that
waits has more time, and tries once for itself. A cluster that does not answer now is asked again by
the next look.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_run_ray.errors import JobError, NemoRunRayError, StreamCut
from nemo_run_ray.experiment.elements import keep_array, needs_keeping
from nemo_run_ray.experiment.snapshot import Snapshot
from nemo_run_ray.experiment.store import UNKEPT, Ledger
from nemo_run_ray.remote.states import JobStatus

if TYPE_CHECKING:
    from nemo_run_ray.experiment.observed_job import ObservedJob

log = logging.getLogger(__name__)

#: Seconds of one answer that keeping logs may take, and of one to a client that waits.
BUDGET_S, WAITING_S = 4.0, 60.0
#: Part of the budget with which a log that is too slow would be too slow next time too.
_WHOLE = 0.9

#: Logs that this process keeps or has tried to keep, by experiment's folder, submission id and
#: nonce, and whether that is over.
_tried: dict[tuple[Path, str, str], threading.Event] = {}
_lock = threading.Lock()
#: How many threads of this process wait for jobs, and look after them meanwhile.
_waiting = 0


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Say that this process waits for jobs, as long as the block lasts."""
    global _waiting
    with _lock:
        _waiting += 1
    try:
        yield
    finally:
        with _lock:
            _waiting -= 1


def keep_log(job: ObservedJob, status: JobStatus, snapshot: Snapshot) -> None:
    """Keep the log of a job that has ended, once; a failure does not fail the look.

    Of an embedded Ray ``notes.py`` does it, before it says that the job has ended.

    Args:
        job: the job.
        status: how it ended.
        snapshot: the look that saw it, whose time is limited.
    """
    record = job.record
    key = record.exp_dir, job.id, record.nonces[-1]
    if job.cluster.runs_here or not status.attempt:
        return
    _keep_array(job, status, snapshot)
    is_given_up = record.keep_logs_max_bytes == 0 or (record.is_log_given_up and not _waiting)
    if is_given_up or job.kept.has_log or not os.access(record.exp_dir, os.W_OK):
        return
    budget_s = WAITING_S if _waiting else BUDGET_S
    deadline = snapshot.deadline(budget_s)
    left_s = deadline - time.monotonic()
    if left_s <= 0 or not _begins(key):
        return
    try:
        left = job.left_logs()
        texts = job.left_text() if left else job.whole_log(job.api(), status, left_s)
        job.kept.keep_log(_until(texts, deadline), record.keep_logs_max_bytes)
    except (NemoRunRayError, OSError, ValueError) as error:
        is_late = time.monotonic() >= deadline
        if is_late and left_s < _WHOLE * budget_s:
            _tried.pop(key).set()  # others took the time; the next look begins with it
        elif is_late or isinstance(error, (JobError, OSError)):
            _give_up(job, error)
        else:
            log.info("The log of %s is kept by a later look: %s", job.id, error)
            snapshot.deadline(0.0)  # the next job of this answer would ask in vain too
            _tried.pop(key).set()
    finally:
        if key in _tried:
            _tried[key].set()


def _keep_array(job: ObservedJob, status: JobStatus, snapshot: Snapshot) -> None:
    if not needs_keeping(job) or not os.access(job.record.exp_dir, os.W_OK):
        return
    if time.monotonic() >= snapshot.deadline(WAITING_S if _waiting else BUDGET_S):
        return
    try:
        keep_array(job, status)
    except (NemoRunRayError, OSError) as error:
        log.info("The elements of %s are kept by a later look: %s", job.id, error)
        snapshot.deadline(0.0)  # the next job of this answer would ask in vain too


def _begins(key: tuple[Path, str, str]) -> bool:
    """Whether it is this thread that keeps the log.

    A client that waits does so for a log that another of its threads keeps, too: when the client
    ends, so does the thread.
    """
    with _lock:
        other = _tried.get(key)
        if other is None:
            _tried[key] = threading.Event()
            return True
    if _waiting:
        other.wait(WAITING_S)
    return False


def _until(texts: Iterator[str], deadline: float) -> Iterator[str]:
    for text in texts:
        if time.monotonic() > deadline:
            raise StreamCut("it did not arrive in the time that there is for it")
        yield text


def _give_up(job: ObservedJob, error: Exception) -> None:
    """Write down that the log is not kept, so that the next look does not try again."""
    log.warning("The log of %s is not kept in the experiment's folder: %s", job.id, error)
    job.record.is_log_given_up = True
    try:
        Ledger.of(job.record.exp_dir).write(UNKEPT, job.id, why=str(error))
    except OSError as unwritten:
        log.debug("That is not written down in %s: %s", job.record.exp_dir, unwritten)
