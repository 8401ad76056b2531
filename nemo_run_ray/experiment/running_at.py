"""When attempts began to run, which only the dispatchers' logs tell: Ray's table does not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

from nemo_run_ray.errors import NemoRunRayError
from nemo_run_ray.experiment.dispatch import Dispatch
from nemo_run_ray.experiment.dispatched_job import DispatchedJob
from nemo_run_ray.experiment.find import jobs_of
from nemo_run_ray.experiment.job import RemoteJob
from nemo_run_ray.experiment.logs import lines
from nemo_run_ray.experiment.snapshot import Snapshot
from nemo_run_ray.experiment.store import Attempts, Ledger
from nemo_run_ray.remote.dispatch import log
from nemo_run_ray.remote.states import JobState

#: Dispatches whose times this process has written down.
_noted: set[tuple[Path, str]] = set()
_lock = threading.Lock()


def running_at(dispatch: Dispatch) -> dict[str, float]:
    """When each attempt was first seen running, in seconds since the epoch, by submission id."""
    found: dict[str, float] = {}
    for line in log.parse(dispatcher_lines(dispatch)):
        if line.state == JobState.RUNNING.value:
            found[line.submission_id] = min(line.at, found.get(line.submission_id, line.at))
    return found


def note_running_at(job: RemoteJob, snapshot: Snapshot, is_stopping: bool = False) -> None:
    """Write these times down when the last job of a dispatch has ended; each process does it once.

    Args:
        job: one of the dispatch's, or another one, of which there is nothing to note.
        snapshot: what clusters say.
        is_stopping: the cluster is about to be stopped: now or never.
    """
    if not isinstance(job, DispatchedJob):
        return
    dispatch = job.dispatch
    try:
        key = dispatch.folder, dispatch.spec.nonce
        if key in _noted:
            return
        if not is_stopping and not dispatch.look(job.api(), snapshot).decision.is_over:
            return
    except NemoRunRayError:
        return  # the next look asks again
    with _lock:
        if key in _noted:
            return
        _noted.add(key)
    told = running_at(dispatch)
    news: dict[str, Attempts] = {}
    for sibling in jobs_of(dispatch.exp_dir) if told else []:
        if sibling.record.dispatcher == dispatch.id:
            attempts = sibling.attempts_in(snapshot, told)
            if attempts != sibling.record.attempts:
                news[sibling.id] = attempts
    Ledger.of(dispatch.exp_dir).keep_attempts(news)


def dispatcher_lines(dispatch: Dispatch) -> Iterator[str]:
    """The logs of a dispatch's dispatchers, line by line, as far as they can be read."""
    for record in Ledger.of(dispatch.exp_dir).jobs().values():
        if record.is_dispatcher and record.dispatcher == dispatch.id:
            try:
                yield from lines(RemoteJob(record).log())
            except NemoRunRayError:
                continue  # it never started, or its cluster is gone
