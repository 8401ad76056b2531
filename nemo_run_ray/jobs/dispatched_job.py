"""A job that a dispatcher hands over: it has attempts, and may wait for other jobs."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from nemo_run_ray.dashboard.jobs_api import JobsApi
from nemo_run_ray.errors import JobError, NemoRunRayError, Unanswered
from nemo_run_ray.jobs import ledger
from nemo_run_ray.jobs.dispatch import Dispatch, Snapshot
from nemo_run_ray.jobs.follow import attempt_mark, lines
from nemo_run_ray.jobs.job import CANCEL_MARGIN_S, PLACING_S, STOP_AGAIN_S, RemoteJob
from nemo_run_ray.jobs.ledger import JobRecord, Ledger
from nemo_run_ray.remote.attempts import attempt_id
from nemo_run_ray.remote.dispatch import log
from nemo_run_ray.remote.states import JobState, JobStatus, status_of_row

_LOOK_AGAIN_S = 1.0
#: Dispatches of which this process has written down when their attempts were seen running.
_kept: set[Path] = set()
_kept_lock = threading.Lock()


class DispatchedJob(RemoteJob):
    """One job of a dispatch, found again by the id of its first attempt."""

    def __init__(self, record: JobRecord) -> None:
        super().__init__(record)
        self.dispatch = Dispatch.of(record.exp_dir, record.dispatcher)

    def look(self) -> JobStatus:
        if self.record.terminal:
            return self._terminal()
        api = self._api()
        if api is None:
            return self._lost(self._cluster.why_gone())
        found = self.dispatch.look(api)
        status = self._explained(found)
        if found.lost and not status.attempt:
            return self._lost(found.lost)
        if status.state.is_terminal:
            self.note(status)
        elif not found.lost:
            self.dispatch.revive(api, self.record.cluster, found)
        if found.decision.is_over:
            _keep_running_at(self.dispatch)
        return status

    def note_end(self) -> None:
        if not self.record.terminal:
            found = self.dispatch.look(self.api(), fresh=True)
            status = self._explained(found)
            if status.state.is_terminal and not found.lost:
                self.note(status)
            _keep_running_at(self.dispatch)

    def cancel(self, grace_s: float) -> JobStatus:
        status = self.look()
        if status.state.is_terminal:
            return status
        api = self.api()
        Ledger.of(self.record.exp_dir).write(ledger.CANCEL, self.submission_id)
        began_at = time.monotonic()
        asked_at, trouble = -math.inf, "it goes on"
        while time.monotonic() < began_at + grace_s + CANCEL_MARGIN_S:
            try:
                found = self.dispatch.look(api, fresh=True)
                status = self._explained(found)
                live = self._live(found, status)
                trusted = live is JobState.PENDING and time.monotonic() - began_at >= PLACING_S
                if status.state.is_terminal and (live is None or trusted):
                    self.note(status)
                    return status
                if live is not None and time.monotonic() - asked_at >= STOP_AGAIN_S:
                    api.stop(self._ran_as(status))
                    asked_at = time.monotonic()
                if status.state in (JobState.WAITING, JobState.PENDING):
                    name = attempt_id(self.submission_id, status.attempt + 1)
                    self.dispatch.claim(api, name, self.record.nonces[-1])
            except Unanswered as error:
                trouble = str(error)
            time.sleep(0.2)
        raise self._not_ended(status, grace_s, trouble)

    def log(self, should_tail: bool) -> Iterator[str]:
        """The logs of all attempts, one after the other."""
        if self._kept_log.exists():
            yield from super().log(should_tail)
            return
        yield from self._joined(self._attempt_logs(should_tail))

    def _attempt_logs(self, should_tail: bool) -> Iterator[Iterator[str]]:
        number = 0
        while True:
            status = self.look()
            while number < status.attempt:
                number += 1
                yield self._attempt(number).cluster_log(should_tail)
            if status.state.is_terminal or not should_tail:
                break
            time.sleep(_LOOK_AGAIN_S)
        if number == 0:
            raise JobError(f"There is no log: {status.message}")

    def _joined(self, logs: Iterable[Iterator[str]]) -> Iterator[str]:
        """The logs of the attempts with a line of ours between them."""
        is_at_start = True  # an attempt that was killed may have left half a line
        for number, texts in enumerate(logs, start=1):
            if number > 1:
                begin = "" if is_at_start else "\n"
                yield f"{begin}{attempt_mark(self.record.nonces[-1])}{number}\n"
            for text in texts:
                is_at_start = text.endswith("\n")
                yield text

    def _explained(self, found: Snapshot) -> JobStatus:
        """What the decision says, with the log's end where Ray's row has one."""
        status = found.decision.statuses[self.record.job]
        row = found.rows.get(self._ran_as(status))
        if row is None or not status.attempt:
            return status
        told = status_of_row(row)
        if told.state is not status.state or told.reason is not status.reason:
            return status
        told = self._explain_pending(row, told)
        return replace(status, reason=told.reason, detail=told.detail)

    def _live(self, found: Snapshot, status: JobStatus) -> JobState | None:
        """The state of its newest attempt in Ray's table, if that goes on."""
        row = found.rows.get(self._ran_as(status)) if status.attempt else None
        state = None if row is None else status_of_row(row).state
        return None if state is None or state.is_terminal else state

    def _ran_as(self, status: JobStatus) -> str:
        return attempt_id(self.submission_id, max(1, status.attempt))

    def _attempt(self, number: int) -> RemoteJob:
        name = attempt_id(self.submission_id, number)
        return _Attempt(replace(self.record, submission_id=name, last=ledger.SUBMITTED))

    def _logs(self, api: JobsApi, status: JobStatus) -> Iterator[str]:
        numbers = range(1, status.attempt + 1)
        return self._joined(
            api.logs.whole(attempt_id(self.submission_id, number)) for number in numbers
        )


class _Attempt(RemoteJob):
    """One attempt, for its log; the job's record tells of its end."""

    def note(self, status: JobStatus) -> None:
        """Nothing: the job itself notes its end, under the same id as its first attempt."""


def dispatcher_lines(dispatch: Dispatch) -> Iterator[str]:
    """The logs of a dispatch's dispatchers, line by line, as far as they can be read."""
    for record in Ledger.of(dispatch.exp_dir).jobs().values():
        if record.is_dispatcher and record.dispatcher == dispatch.id:
            try:
                yield from lines(RemoteJob(record).log(should_tail=False))
            except NemoRunRayError:
                continue  # it never started, or its cluster is gone


def running_at(dispatch: Dispatch) -> dict[str, float]:
    """When each attempt was first seen running, as the dispatch's dispatchers tell."""
    found: dict[str, float] = {}
    for line in log.parse(dispatcher_lines(dispatch)):
        if line.state == JobState.RUNNING.value:
            found[line.submission_id] = min(line.at, found.get(line.submission_id, line.at))
    return found


def _keep_running_at(dispatch: Dispatch) -> None:
    """Write down, once in a process, what only the dispatchers' logs tell of a dispatch's jobs."""
    with _kept_lock:
        if dispatch.folder in _kept:
            return
        told, news = running_at(dispatch), {}
        if told:  # else the logs could not be read, and the next look tries again
            _kept.add(dispatch.folder)
    for job in jobs_of(dispatch.exp_dir):
        if job.record.dispatcher == dispatch.id:
            attempts = job.attempts(told)
            if attempts != job.record.attempts:
                news[job.submission_id] = attempts
    Ledger.of(dispatch.exp_dir).keep_attempts(news)


def find_job(submission_id: str) -> RemoteJob:
    """The job of a handle, submitted from this NeMo-Run home.

    Raises:
        JobError: nobody submitted it from here.
    """
    return job_of(ledger.find(submission_id))


def job_of(record: JobRecord) -> RemoteJob:
    """The job that a record tells of."""
    return (
        DispatchedJob(record)
        if record.dispatcher and not record.is_dispatcher
        else RemoteJob(record)
    )


def jobs_of(exp_dir: Path) -> list[RemoteJob]:
    """The jobs that an experiment's ledger knows, in the order of their submission."""
    records = Ledger.of(exp_dir).jobs().values()
    return [job_of(record) for record in records if not record.is_dispatcher]


def dispatches_of(exp_dir: Path) -> list[Dispatch]:
    """The dispatches of an experiment, saved ones only."""
    ids = dict.fromkeys(
        one.dispatcher for one in Ledger.of(exp_dir).jobs().values() if one.dispatcher
    )
    return [
        dispatch for dispatch in (Dispatch.of(exp_dir, one) for one in ids) if dispatch.is_saved
    ]


__all__ = ["DispatchedJob", "dispatches_of", "find_job", "job_of", "jobs_of"]
