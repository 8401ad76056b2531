"""A job that a dispatcher hands over: it has attempts, and may wait for other jobs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

from nemo_run_ray.clusters.base import text_of
from nemo_run_ray.dashboard.jobs import JobsApi
from nemo_run_ray.errors import JobError
from nemo_run_ray.experiment import notes
from nemo_run_ray.experiment.cancel_loop import Stops
from nemo_run_ray.experiment.dispatch import Dispatch, DispatchStatus
from nemo_run_ray.experiment.job import RemoteJob
from nemo_run_ray.experiment.logs import attempt_mark
from nemo_run_ray.experiment.roles_and_elements import with_failures
from nemo_run_ray.experiment.snapshot import Snapshot
from nemo_run_ray.experiment.store import SUBMITTED, JobRecord
from nemo_run_ray.remote.attempts import attempt_id
from nemo_run_ray.remote.rows import JobRows
from nemo_run_ray.remote.states import JobState, JobStatus, Reason, status_of_row

#: Seconds between two looks for a job's next attempt, while its log is followed.
_NEXT_ATTEMPT_S = 1.0


class DispatchedJob(RemoteJob):
    """One job of a dispatch, found again by the id of its first attempt."""

    def __init__(self, record: JobRecord) -> None:
        super().__init__(record)
        self.dispatch = Dispatch.of(record.exp_dir, record.dispatcher)

    @property
    def after(self) -> tuple[str, ...]:
        """Names of the jobs that it depends on."""
        return self.dispatch.after.get(self.name, ())

    def cancel(self) -> JobStatus:
        status = self.answered()
        if status.state.is_terminal:
            return status
        api = self.api()
        notes.note_cancel(self)
        stops = Stops(api)

        def turn() -> JobStatus | None:
            snapshot = Snapshot(is_fresh=True)
            found = self.dispatch.look(api, snapshot)
            status = self._explained(found, api, snapshot)
            live = self._live(found, status)
            trusted = live is JobState.PENDING and stops.are_trusted
            if status.state.is_terminal and (live is None or trusted):
                self.note(status, snapshot)
                return status
            if live is not None:
                stops.ask(self.ran_as(status))
            if status.state in (JobState.WAITING, JobState.PENDING):
                name = attempt_id(self.id, status.attempt + 1)
                self.dispatch.claim(api, name, self.record.nonces[-1])
            return None

        return self._insist(turn)

    def log(self, follow: bool = False) -> Iterator[str]:
        """The logs of all attempts, one after the other."""
        return self._or_kept(lambda: self._joined(self._attempt_logs(follow)))

    def ran_as(self, status: JobStatus) -> str:
        return attempt_id(self.id, max(1, status.attempt))

    def whole_log(self, api: JobsApi, status: JobStatus, silence_s: float) -> Iterator[str]:
        names = [attempt_id(self.id, number) for number in range(1, status.attempt + 1)]
        return self._joined(api.logs.whole(name, silence_s) for name in names)

    def left_text(self) -> Iterator[str]:
        return self._joined(text_of(path) for path in self.left_logs())

    def _seen(self, api: JobsApi, snapshot: Snapshot) -> JobStatus:
        found = self.dispatch.look(api, snapshot)
        status = with_failures(self, self._explained(found, api, snapshot))
        if found.lost and not status.attempt:
            return self._lost(found.lost, snapshot)
        if status.state.is_terminal:
            self.note(status, snapshot)
        return status

    def _status_left(self, rows: JobRows) -> JobStatus | None:
        return self.dispatch.statuses_left(rows).get(self.name) if rows else None

    def _explained(self, found: DispatchStatus, api: JobsApi, snapshot: Snapshot) -> JobStatus:
        """What the decision says, with what a pending attempt waits for."""
        status = found.decision.statuses[self.name]
        if status.state is JobState.WAITING and not (found.is_dispatched or found.lost):
            why = f"the dispatcher {self.dispatch.id} is not at work"
            return replace(status, reason=Reason.UNDISPATCHED, detail=why)
        row = found.rows.get(self.ran_as(status))
        if row is None or not status.attempt:
            return status
        told = status_of_row(row)
        if told.state is not status.state or told.reason is not status.reason:
            return status
        told = self._explain_pending(row, told, api, snapshot)
        return replace(status, reason=told.reason, detail=told.detail)

    def _live(self, found: DispatchStatus, status: JobStatus) -> JobState | None:
        """The state of its newest attempt in Ray's table, if that goes on."""
        row = found.rows.get(self.ran_as(status)) if status.attempt else None
        state = None if row is None else status_of_row(row).state
        return None if state is None or state.is_terminal else state

    def _attempt_logs(self, is_followed: bool) -> Iterator[Iterator[str]]:
        number = 0
        while True:
            status = self.look(Snapshot())
            while number < status.attempt:
                number += 1
                yield self._attempt(number).cluster_log(is_followed)
            if status.state.is_terminal or not is_followed:
                break
            time.sleep(_NEXT_ATTEMPT_S)
        if number == 0:
            raise JobError(f"There is no log: {status.message}")

    def _attempt(self, number: int) -> RemoteJob:
        name = attempt_id(self.id, number)
        return _Attempt(self, replace(self.record, submission_id=name, last=SUBMITTED))

    def _joined(self, logs: Iterable[Iterator[str]]) -> Iterator[str]:
        """The logs of the attempts with a separating line between them."""
        is_at_start = True  # an attempt that was killed may have left half a line
        for number, texts in enumerate(logs, start=1):
            if number > 1:
                begin = "" if is_at_start else "\n"
                yield f"{begin}{attempt_mark(self.record.nonces[-1])}{number}\n"
            for text in texts:
                is_at_start = text.endswith("\n")
                yield text


class _Attempt(RemoteJob):
    """One attempt, for its log; the job's record tells of its end."""

    def __init__(self, job: DispatchedJob, record: JobRecord) -> None:
        super().__init__(record)
        self._job = job

    def look(self, snapshot: Snapshot) -> JobStatus:
        status = super().look(snapshot)
        if status.state is not JobState.PENDING:
            return status
        whole = self._job.look(snapshot)
        return whole if whole.state.is_terminal else status  # Ray holds it back from its start

    def _read_record(self) -> None:
        """Do nothing: the ledger's record under its id is that of the job."""

    def note(self, status: JobStatus, snapshot: Snapshot) -> None:
        """Do nothing: the job itself notes its end, under the same id as its first attempt."""

    def keep_log(self, status: JobStatus, snapshot: Snapshot) -> None:
        """Do nothing: the job itself keeps the logs of all attempts."""
