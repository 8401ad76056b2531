"""A job that was handed over, and what can be done with it: read its log, wait, cancel."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from nemo_run_ray.errors import JobError
from nemo_run_ray.jobs import notes
from nemo_run_ray.jobs.cancel_loop import JOB_MARGIN_S, Stops, insist
from nemo_run_ray.jobs.follow import attempt_mark, follow, output_of
from nemo_run_ray.jobs.observed_job import ObservedJob
from nemo_run_ray.jobs.snapshot import Snapshot
from nemo_run_ray.jobs.submit_once import OUTCOME_S
from nemo_run_ray.jobs.tend import tend
from nemo_run_ray.remote.node.output import end_mark
from nemo_run_ray.remote.states import JobState, JobStatus, Reason, is_pending

#: Seconds between two looks of a wait.
_WAIT_AGAIN_S = 1.0


class RemoteJob(ObservedJob):
    """One job on a cluster: what ``nemo_run_ray.find`` gives."""

    def log(self, follow: bool = False) -> Iterator[str]:
        """Its log's text: all of it if it is over or ``follow`` is set, else what there is now.

        Raises:
            ClusterError: the log cannot be read.
            JobError: there is no log.
        """
        return self.kept.log() if self.kept.has_log else self.cluster_log(follow)

    def output(self, follow: bool = False) -> Iterator[str]:
        """Its log without Ray's lines before the task's first one, and without the last line."""
        marks = tuple(attempt_mark(nonce) for nonce in self.record.nonces)
        return output_of(self.log(follow), self._end_marks, marks)

    def wait(self, timeout_s: float | None = None) -> JobStatus:
        """Wait until it has ended, and return how. Meanwhile its experiment is looked after.

        Args:
            timeout_s: seconds to wait at most; without it as long as it takes.

        Raises:
            JobError: it will never start: another run has its id, or it never reached the cluster.
            TimeoutError: it has not ended in that time. It goes on.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            status = self.status
            if status.state.is_terminal:
                return status
            if self._never_starts(status):
                raise JobError(f"The job {self.id} will not start. {status.message}")
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(
                    f"The job {self.id} is {status.state.value} after {timeout_s:.0f} s; it goes "
                    "on. Wait again, or cancel it."
                )
            tend(self.record.exp_dir)
            time.sleep(_WAIT_AGAIN_S)

    def cancel(self) -> JobStatus:
        """Stop it, again and again until it is terminal, and return how it ended.

        Raises:
            ClusterError: it did not end in time, or the cluster stopped answering.
            ConfigError: the cluster's address or credentials cannot be used.
        """
        status = self.look(Snapshot(is_fresh=True))
        if status.state.is_terminal or status.state is JobState.WAITING:
            return status
        api = self.api()
        notes.note_cancel(self)
        stops = Stops(api)

        def turn() -> JobStatus | None:
            stops.ask(self.id)
            snapshot = Snapshot(is_fresh=True)
            row = api.job(self.id)
            status = self._absent(api, snapshot) if row is None else self._present(row, snapshot)
            settled = row is None or not is_pending(row) or stops.are_trusted
            return status if status.state.is_terminal and settled else None

        return self._insist(turn)

    def _never_starts(self, status: JobStatus) -> bool:
        age_s = time.time() - self.record.intended_at
        is_given_up = status.reason is Reason.NOT_SUBMITTED and age_s > OUTCOME_S
        return status.reason is Reason.TAKEN or is_given_up

    def cluster_log(self, is_followed: bool) -> Iterator[str]:
        """Its log from its cluster alone."""
        source = _Log(self)
        if is_followed or source.is_over():
            return follow(source, self._end_marks, time.sleep)
        return source.whole()

    def _insist(self, turn: Callable[[], JobStatus | None]) -> JobStatus:
        page = self.api().dashboard.job_page(self.id)
        return insist(turn, self.record.grace_s + JOB_MARGIN_S, f"The job {self.id} ({page})")

    @property
    def _end_marks(self) -> tuple[str, ...]:
        return tuple(end_mark(nonce) for nonce in self.record.nonces)


class _Log:
    """A job's log as ``follow`` reads it."""

    def __init__(self, job: RemoteJob) -> None:
        self._job = job

    def tail(self) -> Iterator[str]:
        if self._job.look(Snapshot()).state is JobState.CANCELLED:
            return self.whole()  # the stream of one that never starts would never begin
        return self._job.api().logs.tail(self._job.id)

    def whole(self) -> Iterator[str]:
        return self._job.api().logs.whole(self._job.id)

    def is_over(self) -> bool:
        status = self._job.look(Snapshot())
        if status.state is JobState.LOST:
            raise JobError(f"There is no log any more. {status.message}")
        if status.state is JobState.WAITING:
            raise JobError(f"There is no log yet. {status.message}")
        return status.state.is_terminal
