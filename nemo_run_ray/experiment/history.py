"""Writes down what was seen of jobs, so that it is known without their cluster.

A look changes nothing. Who waits for jobs, cancels them or stops their cluster calls ``record``.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_run_ray.errors import JobError, NemoRunRayError, StreamCut
from nemo_run_ray.experiment.dispatch import Dispatch
from nemo_run_ray.experiment.elements import elements, keep_array, needs_keeping, roles
from nemo_run_ray.experiment.snapshot import Snapshot
from nemo_run_ray.experiment.store import (
    SEEN,
    TERMINAL,
    UNKEPT,
    AttemptRecord,
    Attempts,
    Event,
    ExperimentStore,
    JobRecord,
    merged,
    store_of,
)
from nemo_run_ray.remote.attempts import attempt_id, attempt_of_row, attempts_of
from nemo_run_ray.remote.dispatch import log as dispatch_log
from nemo_run_ray.remote.rows import JobRows
from nemo_run_ray.remote.status import JobState, JobStatus

if TYPE_CHECKING:
    from nemo_run_ray.experiment.job import RemoteJob

log = logging.getLogger(__name__)

#: Seconds that the log of one job may take to be copied.
COPY_S = 60.0
#: Seconds until a log that could not be copied is tried again.
_COPY_AGAIN_S = 5.0
#: If a job was seen waiting so many seconds ago and runs now, it has begun now.
_MOMENT_S = 10.0
#: An attempt that nothing delays begins to run within so many seconds of its posting.
_FRESH_S = 3.0
#: A running attempt is written down again when its known run time has grown by 25 % and 5 s, so
#: that a job that runs for days adds some dozens of lines.
_LONGER, _LONGER_S = 1.25, 5.0


def record(
    seen: Iterable[tuple[RemoteJob, JobStatus]], snapshot: Snapshot, is_final: bool = False
) -> None:
    """Write down attempts, begin times and ends, and copy the logs of jobs that have ended.

    Where a folder cannot be written to (another user's, a full disk) nothing is kept, and no wait
    fails for that.

    Args:
        seen: jobs, and what the snapshot says of them.
        snapshot: what clusters say.
        is_final: the cluster is about to be stopped, and with it all that runs on it.
    """
    by_folder: dict[Path, list[tuple[RemoteJob, JobStatus]]] = {}
    for job, status in seen:
        by_folder.setdefault(job.record.exp_dir, []).append((job, status))
    for exp_dir, jobs in by_folder.items():
        if os.access(exp_dir, os.W_OK):
            store = store_of(exp_dir)
            _write(store, jobs, snapshot, is_final)
            _write_begin_times(store, [job for job, _ in jobs], is_final)
            for job, status in jobs:
                if _has_ended(status) and status.attempt:
                    store.shared(_Copies, "", _Copies).copy(store, job, status)


def _has_ended(status: JobStatus) -> bool:
    return status.state.is_terminal and status.state is not JobState.LOST


def _write(
    store: ExperimentStore,
    jobs: Sequence[tuple[RemoteJob, JobStatus]],
    snapshot: Snapshot,
    is_final: bool,
) -> None:
    """Append what is new of these jobs to the ledger, with one write."""
    moments = store.shared(_Moments, "", _Moments)
    events: list[Event] = []
    with moments.lock:  # another thread that has seen the same end waits until it is written
        for job, status in jobs:
            current = store.ledger.job(job.id)
            if current is None or current.terminal:
                continue
            seen = moments.begun(job.id, job.attempts_in(snapshot))
            # One that Ray only holds back may start after all, and is stopped then.
            is_held_back = job.dispatch is None and any(
                not JobState(attempt.state).is_terminal for attempt in seen.values()
            )
            has_ended = _has_ended(status) and (is_final or not is_held_back)
            ended = status.to_json() if has_ended else {}
            attempts = known(replace(current, terminal=ended), seen, time.time())
            rows = [attempt.to_json() for attempt in attempts.values()]
            if ended:
                events.append((TERMINAL, job.id, {"status": ended, "attempts": rows}))
            elif has_news(current.attempts, attempts):
                events.append((SEEN, job.id, {"attempts": rows}))
        _append(store, events)


def _append(store: ExperimentStore, events: Sequence[Event]) -> None:
    if not events:
        return
    try:
        store.ledger.write_all(events)
    except OSError as error:
        log.warning("What was seen of the jobs is not kept in %s: %s", store.exp_dir, error)


class _Moments:
    """When this process saw jobs last, and which of their attempts ran then."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._looked: dict[str, tuple[float, frozenset[str]]] = {}

    def begun(self, job: str, attempts: Attempts) -> Attempts:
        """The attempts; those that were posted, or did not run, a moment ago have begun now.

        One that was first seen later than that may have begun at any moment before.
        """
        now = time.time()
        running = {
            name for name, attempt in attempts.items() if attempt.state == JobState.RUNNING.value
        }
        looked_at, before = self._looked.get(job, (0.0, frozenset(running)))
        self._looked[job] = now, frozenset(running)
        begun = {name for name in running if now - attempts[name].posted_at <= _FRESH_S}
        if now - looked_at <= _MOMENT_S:
            begun |= running - before
        return {
            name: replace(attempt, running_at=attempt.running_at or now)
            if name in begun
            else attempt
            for name, attempt in attempts.items()
        }


def begin_times(dispatch: Dispatch) -> dict[str, float]:
    """When attempts were first seen running by their dispatcher, by submission id.

    Ray's table does not have these times.
    """
    found: dict[str, float] = {}
    for line in dispatch_log.parse(_dispatcher_lines(dispatch)):
        if line.state == JobState.RUNNING.value:
            found[line.submission_id] = min(line.at, found.get(line.submission_id, line.at))
    return found


def _dispatcher_lines(dispatch: Dispatch) -> Iterator[str]:
    from nemo_run_ray.experiment.job import RemoteJob

    for row in store_of(dispatch.exp_dir).ledger.jobs().values():
        if row.is_dispatcher and row.dispatcher == dispatch.id:
            try:
                yield from "".join(RemoteJob(replace(row, dispatcher="")).log()).splitlines(True)
            except NemoRunRayError:
                continue  # it never started, or its cluster is gone


def _write_begin_times(store: ExperimentStore, jobs: Sequence[RemoteJob], is_final: bool) -> None:
    """Write the begin times of a dispatch down, once, when its last job has ended."""
    for dispatch in dict.fromkeys(job.dispatch for job in jobs if job.dispatch is not None):
        if dispatch.has_begin_times:
            continue
        records = [row for row in store.ledger.jobs().values() if row.dispatcher == dispatch.id]
        if not (is_final or all(row.terminal for row in records if not row.is_dispatcher)):
            continue
        dispatch.has_begin_times = True
        times = begin_times(dispatch)
        events: list[Event] = []
        for row in records:
            attempts = merged(row.attempts, {}, times)
            if attempts != row.attempts:
                rows = [attempt.to_json() for attempt in attempts.values()]
                events.append((SEEN, row.submission_id, {"attempts": rows}))
        _append(store, events)


# ---------------------------------------------------------------------- logs


class _Copies:
    """The copies of jobs' logs, and of what drivers have written, that this process makes."""

    def __init__(self) -> None:
        self._locks: dict[str, threading.Lock] = {}
        self._again_at: dict[str, float] = {}

    def copy(self, store: ExperimentStore, job: RemoteJob, status: JobStatus) -> None:
        """Copy what is not kept yet; another thread that copies it is waited for.

        A log that the cluster does not have, or that takes too long, is given up, which is written
        down. A cluster that does not answer is asked again by the next call.
        """
        with store.lock:
            lock = self._locks.setdefault(job.id, threading.Lock())
        with lock:
            if time.monotonic() < self._again_at.get(job.id, 0.0):
                return
            try:
                _copy_log(store, job, status)
                _copy_driver_files(job, status)
            except (NemoRunRayError, OSError, ValueError) as error:
                log.info("The log of %s is not copied yet: %s", job.id, error)
                self._again_at[job.id] = time.monotonic() + _COPY_AGAIN_S


def _copy_log(store: ExperimentStore, job: RemoteJob, status: JobStatus) -> None:
    current = store.ledger.job(job.id)
    if current is None or current.is_log_given_up or job.kept.has_log:
        return
    if current.keep_logs_max_bytes == 0:
        return
    deadline = time.monotonic() + COPY_S
    try:
        texts = job.left_text() if job.left_logs() else job.whole_log(status, COPY_S)
        job.kept.keep_log(_until(texts, deadline), current.keep_logs_max_bytes)
    except (NemoRunRayError, OSError) as error:
        if not isinstance(error, (JobError, OSError)) and time.monotonic() < deadline:
            raise
        log.warning("The log of %s is not kept in the experiment's folder: %s", job.id, error)
        _append(store, [(UNKEPT, job.id, {"why": str(error)})])


def _copy_driver_files(job: RemoteJob, status: JobStatus) -> None:
    """Copy what the driver of a group or of an array has written."""
    if not job.kept.has_rows:
        rows = roles(job, status) or elements(job, status)
        if rows:
            job.kept.keep_rows(rows)
    if needs_keeping(job):
        keep_array(job, status)


def _until(texts: Iterator[str], deadline: float) -> Iterator[str]:
    for text in texts:
        if time.monotonic() > deadline:
            raise StreamCut("it did not arrive in time")
        yield text


# ---------------------------------------------------------------------- attempts


def attempts_of_rows(
    rows: JobRows, job: str, nonces: Sequence[str], now: float
) -> dict[str, AttemptRecord]:
    """The attempts of a job in a job table, without claims.

    Args:
        rows: the table; rows of other jobs are ignored.
        job: submission id of the first attempt.
        nonces: of the job's submissions.
        now: seconds since the epoch.
    """
    table = {name: attempt_of_row(row) for name, row in rows.items()}
    return {
        attempt_id(job, number): AttemptRecord.of(attempt_id(job, number), row, now)
        for number, row in attempts_of([job], table)[job].items()
        if not row.claim and row.nonce in nonces
    }


def known(record: JobRecord, found: Attempts, now: float) -> Attempts:
    """The attempts of a job, seen and recorded; none is live once the job has ended.

    Of a job that was given up while it waited Ray's table may have an attempt as pending still: a
    stop of such a row is held back until Ray would start it.

    Args:
        record: of the job, with the attempts as they were written down.
        found: as they are now; empty when the cluster does not tell.
        now: seconds since the epoch, for an end that nobody has written down.
    """
    attempts = merged(record.attempts, found)
    if not record.terminal:
        return attempts
    status = JobStatus.from_json(record.terminal)
    for name, one in attempts.items():
        if not JobState(one.state).is_terminal:
            before = record.attempts[name].ended_at if name in record.attempts else None
            attempts[name] = replace(
                one,
                state=status.state.value,
                reason=status.reason.value,
                detail=status.detail,
                ended_at=now if before is None else before,
                seen_at=None,
            )
    return attempts


def has_news(kept: Attempts, found: Attempts) -> bool:
    """Whether what is known of a job's attempts is to be written down.

    Args:
        kept: as it was written down.
        found: as it is now.
    """
    if {name: replace(one, seen_at=None) for name, one in kept.items()} != {
        name: replace(one, seen_at=None) for name, one in found.items()
    }:
        return True
    return any(_is_longer(kept[name], one) for name, one in found.items())


def _is_longer(before: AttemptRecord, now: AttemptRecord) -> bool:
    if now.seen_at is None or before.seen_at is None:
        return now.seen_at != before.seen_at
    length_s, known_s = now.seen_at - now.posted_at, before.seen_at - now.posted_at
    return length_s > max(_LONGER * known_s, known_s + _LONGER_S)
