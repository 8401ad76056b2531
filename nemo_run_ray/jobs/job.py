"""A job that was handed over, found again by its id alone: status, log, wait and cancelling."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from nemo_run_ray.clusters import from_record
from nemo_run_ray.dashboard.jobs_api import JobsApi
from nemo_run_ray.errors import JobError, NemoRunRayError
from nemo_run_ray.jobs import ledger, notes
from nemo_run_ray.jobs.attempt_records import AttemptRecord, Attempts, merged, of_rows
from nemo_run_ray.jobs.cancelling import JOB_MARGIN_S, Stops, insist
from nemo_run_ray.jobs.follow import attempt_mark, follow, output_of
from nemo_run_ray.jobs.kept import Kept
from nemo_run_ray.jobs.ledger import JobRecord
from nemo_run_ray.jobs.snapshot import Rows, Snapshot
from nemo_run_ray.jobs.tend import tend
from nemo_run_ray.planning.job_plan import nonce_of
from nemo_run_ray.remote.node.output import end_mark
from nemo_run_ray.remote.states import JobState, JobStatus, Reason, status_of_row

#: Seconds between two looks of a wait.
_WAIT_AGAIN_S = 1.0
_HELD_BACK = (
    "cancelled while it waited for room; Ray shows it as pending until there is room or 900 s have "
    "passed, and ends it without running its command"
)


class RemoteJob:
    """One job on a cluster: what ``nemo_run_ray.find`` gives.

    Attributes:
        record: what the experiment's ledger knows of it.
        id: its submission id; of a job that is tried again, that of its first attempt.
        cluster: where it runs.
        kept: what the experiment's folder keeps of it.
    """

    def __init__(self, record: JobRecord) -> None:
        self.record = record
        self.id = record.submission_id
        self.cluster = from_record(record.cluster)
        self.kept = Kept(record.exp_dir, self.id)

    @property
    def name(self) -> str:
        """Its name in the experiment."""
        return self.record.job

    @property
    def status(self) -> JobStatus:
        """What is known of it now. Never raises because a cluster is away."""
        return self.status_in(Snapshot())

    @property
    def attempts(self) -> list[AttemptRecord]:
        """Its attempts as they are now, the first one first, or as they were seen last."""
        return list(self.attempts_in(Snapshot()).values())

    def log(self, follow: bool = False) -> Iterator[str]:
        """Its log's text: to its end if it is over or ``follow``, else what there is now.

        Raises:
            ClusterError: the log cannot be read.
            JobError: there is no log.
        """
        return self.kept.log() if self.kept.has_log else self.cluster_log(follow)

    def output(self, follow: bool = False) -> Iterator[str]:
        """The same without Ray's lines before the task's first one, and without our last one."""
        marks = tuple(attempt_mark(nonce) for nonce in self.record.nonces)
        return output_of(self.log(follow), self._end_marks, marks)

    def wait(self, timeout_s: float | None = None) -> JobStatus:
        """Wait until it has ended; how it did. Meanwhile its experiment is looked after.

        Args:
            timeout_s: seconds to wait at most; without it as long as it takes.

        Raises:
            TimeoutError: it has not ended in that time. It goes on.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            status = self.status
            if status.state.is_terminal:
                return status
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(
                    f"The job {self.id} is {status.state.value} after {timeout_s:.0f} s; it goes "
                    "on. Wait again, or cancel it."
                )
            tend(self.record.exp_dir)
            time.sleep(_WAIT_AGAIN_S)

    def cancel(self) -> JobStatus:
        """Stop it, again and again until it is terminal; how it ended.

        Raises:
            ClusterError: it did not end in time, or the cluster stopped answering.
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
            row = snapshot.rows(api).get(self.id)
            status = self._absent(api, snapshot) if row is None else self._present(row)
            settled = row is None or row["status"] != "PENDING" or stops.are_trusted
            return status if status.state.is_terminal and settled else None

        return self._insist(turn)

    # ------------------------------------------------------------------ one look

    def status_in(self, snapshot: Snapshot) -> JobStatus:
        """What a snapshot says of it. Never raises because a cluster is away."""
        try:
            return self.look(snapshot)
        except NemoRunRayError as error:  # a token's file that is gone is no news of the job either
            if self._has_lost_its_cluster():  # since `look` began
                return self._lost(self.cluster.why_gone())
            return JobStatus(JobState.UNKNOWN, Reason.UNREACHABLE, str(error))

    def look(self, snapshot: Snapshot) -> JobStatus:
        """What its cluster says of it. An end is written down, and nothing else is changed.

        Raises:
            ClusterError: the cluster cannot be asked.
            ConfigError: its address or credentials cannot be used.
        """
        if self.record.terminal:
            return JobStatus.from_json(self.record.terminal)
        api = self._api()
        if api is None:
            return self._lost(self.cluster.why_gone())
        return self._seen(api, snapshot)

    def attempts_in(
        self, snapshot: Snapshot, running_at: Mapping[str, float] | None = None
    ) -> Attempts:
        """Its attempts by submission id, or as they were seen last when nobody can tell.

        Args:
            snapshot: what clusters say.
            running_at: when attempts were seen running by somebody else, by submission id.
        """
        try:
            rows = self.rows_in(snapshot)
        except NemoRunRayError:  # the cluster is away: its status says so
            rows = {}
        found = of_rows(rows, self.id, self.record.nonces, time.time())
        return merged(self.record.attempts, found, running_at)

    def cluster_log(self, is_followed: bool) -> Iterator[str]:
        """Its log from its cluster alone."""
        source = _Log(self)
        if is_followed or source.is_over():
            return follow(source, self._end_marks, time.sleep)
        return source.whole()

    def api(self) -> JobsApi:
        """The dashboard of its cluster.

        Raises:
            JobError: the cluster is gone for good.
        """
        api = self._api()
        if api is None:
            raise JobError(
                f"The job {self.id} cannot be asked, and its log went with its cluster: "
                f"{self.cluster.why_gone()}"
            )
        return api

    # ------------------------------------------------------------------ what rows say

    def _seen(self, api: JobsApi, snapshot: Snapshot) -> JobStatus:
        row = snapshot.rows(api).get(self.id) or snapshot.rows_now(api).get(self.id)
        return self._absent(api, snapshot) if row is None else self._present(row)

    def _present(self, row: dict[str, Any]) -> JobStatus:
        if nonce_of(row) not in self.record.nonces:
            detail = f"The id {self.id} is another run's; ours never started."
            return JobStatus(JobState.WAITING, Reason.TAKEN, detail)
        status = status_of_row(row)
        if status.state.is_terminal:
            self.note(status)
        elif status.state is JobState.PENDING and self.record.cancelled:
            return JobStatus(JobState.CANCELLED, Reason.CANCELLED, _HELD_BACK)
        return self._explain_pending(row, status)

    def _explain_pending(self, row: Mapping[str, Any], status: JobStatus) -> JobStatus:
        """The status of a job that waits for its runtime environment, with how far that is."""
        api = self._api()
        return status if api is None else api.state.env_builds.explain(row, status)

    def _absent(self, api: JobsApi, snapshot: Snapshot) -> JobStatus:
        was_there = self.record.last == ledger.SUBMITTED
        why = snapshot.why_lost(api, self.record.session, was_there, lambda rows: self.id in rows)
        if why:
            return self._lost(why)
        if was_there:
            return self._present(snapshot.rows_again(api)[self.id])
        return JobStatus(
            JobState.WAITING,
            Reason.NOT_SUBMITTED,
            "The client died, or was refused, before the job reached the cluster.",
        )

    def _lost(self, why: str) -> JobStatus:
        arrived = self.record.last == ledger.SUBMITTED
        what = "Its end is not known" if arrived else "Nobody can tell whether it ran"
        end = "" if "\n" in why or why.endswith(".") else "."  # a log's lines end by themselves
        attempts = list(self.record.attempts.values())
        return JobStatus(
            JobState.LOST,
            Reason.CLUSTER_GONE,
            f"{what}: {why}{end}",
            node=attempts[-1].node if attempts else "",
            attempt=len(attempts),
        )

    def _has_lost_its_cluster(self) -> bool:
        try:
            return self.cluster.find() is None
        except NemoRunRayError:
            return False  # nobody can tell

    def rows_in(self, snapshot: Snapshot) -> Rows:
        """The job table of its cluster; empty when the cluster is gone for good.

        Raises:
            ClusterError: the cluster cannot be asked.
        """
        api = self._api()
        return {} if api is None else snapshot.rows(api)

    def _api(self) -> JobsApi | None:
        dashboard = self.cluster.find()
        return None if dashboard is None else JobsApi.of(dashboard)

    def _insist(self, turn: Callable[[], JobStatus | None]) -> JobStatus:
        page = self.api().dashboard.job_page(self.id)
        return insist(turn, self.record.grace_s + JOB_MARGIN_S, f"The job {self.id} ({page})")

    def ran_as(self, status: JobStatus) -> str:
        """Submission id of what the status tells of."""
        return self.id

    def whole_log(self, api: JobsApi, status: JobStatus) -> Iterator[str]:
        """Its log as it is now."""
        return api.logs.whole(self.id)

    def note(self, status: JobStatus) -> None:
        """Write down how it ended."""
        notes.note_end(self, status)

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
