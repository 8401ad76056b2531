"""A job that was handed over, as it is seen: found again by its id alone, and never changed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from nemo_run_ray.clusters import from_record
from nemo_run_ray.dashboard.jobs_api import JobsApi
from nemo_run_ray.errors import JobError, NemoRunRayError
from nemo_run_ray.jobs import ledger, notes
from nemo_run_ray.jobs.attempt_records import AttemptRecord, Attempts, merged, of_rows
from nemo_run_ray.jobs.kept_files import Kept
from nemo_run_ray.jobs.ledger import JobRecord, Ledger
from nemo_run_ray.jobs.snapshot import Snapshot
from nemo_run_ray.planning.job_plan import nonce_of
from nemo_run_ray.remote.rows import JobRow, JobRows
from nemo_run_ray.remote.states import JobState, JobStatus, Reason, status_of_row

_HELD_BACK = (
    "cancelled while it waited for room; Ray shows it as pending until there is room or 900 s have "
    "passed, and ends it without running its command"
)


class ObservedJob:
    """What is known of one job: from its cluster, and from what was written down before.

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
        """What is known of it now. It never raises because a cluster is away."""
        return self.status_in(Snapshot())

    @property
    def attempts(self) -> list[AttemptRecord]:
        """Its attempts as they are now, the first one first, or as they were seen last."""
        return list(self.attempts_in(Snapshot()).values())

    # ------------------------------------------------------------------ one look

    def status_in(self, snapshot: Snapshot) -> JobStatus:
        """What a snapshot says of it. It never raises because a cluster is away."""
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
        self._read_record()
        if self.record.terminal:
            return JobStatus.from_json(self.record.terminal)
        api = self._api()
        if api is None:
            return self._lost(self.cluster.why_gone())
        return self._seen(api, snapshot)

    def attempts_in(
        self, snapshot: Snapshot, running_at: Mapping[str, float] | None = None
    ) -> Attempts:
        """Its attempts by submission id, or as they were seen last when the cluster does not tell.

        Args:
            snapshot: what clusters say.
            running_at: when attempts were seen running by their dispatcher, by submission id.
        """
        try:
            rows = self.rows_in(snapshot)
        except NemoRunRayError:  # the cluster is away: its status says so
            rows = {}
        found = of_rows(rows, self.id, self.record.nonces, time.time())
        return merged(self.record.attempts, found, running_at)

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

    def ran_as(self, status: JobStatus) -> str:
        """Submission id of the attempt that the status tells of."""
        return self.id

    def whole_log(self, api: JobsApi, status: JobStatus) -> Iterator[str]:
        """Its log as it is now."""
        return api.logs.whole(self.id)

    def note(self, status: JobStatus, snapshot: Snapshot) -> None:
        """Write down how it ended."""
        notes.note_end(self, status, snapshot)

    def _read_record(self) -> None:
        """Take note of what other processes have written down since."""
        if not self.record.terminal:
            self.record = Ledger.of(self.record.exp_dir).job(self.id) or self.record

    # ------------------------------------------------------------------ what rows say

    def _seen(self, api: JobsApi, snapshot: Snapshot) -> JobStatus:
        row = snapshot.rows(api).get(self.id) or snapshot.rows_now(api).get(self.id)
        return self._absent(api, snapshot) if row is None else self._present(row, snapshot)

    def _present(self, row: JobRow, snapshot: Snapshot) -> JobStatus:
        if nonce_of(row) not in self.record.nonces:
            detail = f"The id {self.id} is another run's; this job never started."
            return JobStatus(JobState.WAITING, Reason.TAKEN, detail)
        status = status_of_row(row)
        if status.state.is_terminal:
            self.note(status, snapshot)
        elif status.state is JobState.PENDING and self.record.cancelled:
            return JobStatus(JobState.CANCELLED, Reason.CANCELLED, _HELD_BACK)
        return self._explain_pending(row, status)

    def _explain_pending(self, row: JobRow, status: JobStatus) -> JobStatus:
        """The status of a job that waits for its runtime environment, with how far that is."""
        api = self._api()
        return status if api is None else api.state.env_builds.explain(row, status)

    def _absent(self, api: JobsApi, snapshot: Snapshot) -> JobStatus:
        was_there = self.record.last == ledger.SUBMITTED
        why = snapshot.why_lost(api, self.record.session, was_there, lambda rows: self.id in rows)
        if why:
            return self._lost(why)
        if was_there:
            return self._present(snapshot.rows_again(api)[self.id], snapshot)
        return JobStatus(
            JobState.WAITING,
            Reason.NOT_SUBMITTED,
            "The client died, or was refused, before the job reached the cluster.",
        )

    def _lost(self, why: str) -> JobStatus:
        arrived = self.record.last == ledger.SUBMITTED
        what = "Its end is not known" if arrived else "It is not known whether it ran"
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
            return False  # the cluster does not tell

    def rows_in(self, snapshot: Snapshot) -> JobRows:
        """The job table of its cluster; empty when the cluster is gone for good.

        Raises:
            ClusterError: the cluster cannot be asked.
        """
        api = self._api()
        return {} if api is None else snapshot.rows(api)

    def _api(self) -> JobsApi | None:
        dashboard = self.cluster.find()
        return None if dashboard is None else JobsApi.of(dashboard)
