"""A job that was handed over, as it is seen: found again by its id alone, and never changed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from nemo_run_ray.clusters import Cluster, from_record
from nemo_run_ray.clusters.base import text_of
from nemo_run_ray.dashboard.jobs import JobsApi
from nemo_run_ray.errors import JobError, NemoRunRayError
from nemo_run_ray.experiment import explain, keep_logs, notes
from nemo_run_ray.experiment.roles_and_elements import with_failures
from nemo_run_ray.experiment.snapshot import GONE, Snapshot
from nemo_run_ray.experiment.store import (
    SUBMITTED,
    AttemptRecord,
    Attempts,
    JobRecord,
    Kept,
    Ledger,
    known,
    of_rows,
)
from nemo_run_ray.remote.attempts import attempt_id
from nemo_run_ray.remote.rows import JobRow, JobRows, nonce_of
from nemo_run_ray.remote.states import JobState, JobStatus, Reason, status_of_row

#: How a job ends that never had a process.
_NEVER_RAN = (Reason.RUNTIME_ENV, Reason.START_TIMEOUT, Reason.UNSCHEDULABLE, Reason.NOT_PLACED)
_BUILDS = (Reason.BUILDING, Reason.REBUILDING, Reason.RUNTIME_ENV)
_BEFORE_ITS_COMMAND = "cancelled before its command ran"
_HELD_BACK_BUILD = (
    "cancelled while its runtime environment was being built; Ray shows it as pending until that "
    "is over, and ends it without running its command"
)
_HELD_BACK = (
    "cancelled while it waited for room; Ray shows it as pending until there is room or 900 s have "
    "passed, and ends it without running its command"
)
_NEVER_THERE = "The client died, or was refused, before the job reached the cluster."


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
        self.kept = Kept(record.exp_dir, self.id, record.log_copy)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id}>"

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

    def status_in(self, snapshot: Snapshot) -> JobStatus:
        """What a snapshot says of it. It never raises because a cluster is away."""
        try:
            return self.look(snapshot)
        except NemoRunRayError as error:  # a token's file that is gone is no news of the job either
            if _is_gone(self.cluster):  # since `look` began
                return self._lost(GONE, snapshot)
            return self._as_recorded(JobState.UNKNOWN, Reason.UNREACHABLE, str(error))

    def look(self, snapshot: Snapshot) -> JobStatus:
        """What its cluster says of it. An end is written down; nothing else is changed.

        Raises:
            ClusterError: the cluster cannot be asked.
            ConfigError: its address or credentials cannot be used.
        """
        self._read_record()
        if self.record.terminal:
            status = JobStatus.from_json(self.record.terminal)
            self.keep_log(status, snapshot)  # for which the look that saw the end had no time
            return self._named(status)
        api = self._api()
        if api is None:
            return self._lost(GONE, snapshot)
        return self._named(self._seen(api, snapshot))

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
        return _attempts(self, rows, running_at)

    def api(self) -> JobsApi:
        """The dashboard of its cluster.

        Raises:
            JobError: the cluster is gone for good.
        """
        api = self._api()
        if api is None:
            raise JobError(f"The job {self.id} cannot be asked any more: {self._why_gone(GONE)}")
        return api

    def ran_as(self, status: JobStatus) -> str:
        """Submission id of the attempt that the status tells of."""
        return self.id

    def whole_log(self, api: JobsApi, status: JobStatus, silence_s: float) -> Iterator[str]:
        """Its log as it is now; it has broken off when nothing comes for so many seconds."""
        return api.logs.whole(self.id, silence_s)

    def left_logs(self) -> list[Path]:
        """What a cluster that has died has left of its attempts' logs."""
        return left_logs(self.cluster, self.record)

    def left_text(self) -> Iterator[str]:
        """The log that a cluster which has died has left."""
        return (text for path in self.left_logs() for text in text_of(path))

    def note(self, status: JobStatus, snapshot: Snapshot) -> None:
        """Write down how it ended."""
        notes.note_end(self, status, snapshot)

    def keep_log(self, status: JobStatus, snapshot: Snapshot) -> None:
        """Keep its log in the experiment's folder, if that was not done."""
        keep_logs.keep_log(self, status, snapshot)

    def _read_record(self) -> None:
        """Take note of what other processes have written down since."""
        if not self.record.terminal:
            self.record = Ledger.of(self.record.exp_dir).job(self.id) or self.record

    def _seen(self, api: JobsApi, snapshot: Snapshot) -> JobStatus:
        row = snapshot.rows(api).get(self.id) or snapshot.rows_now(api).get(self.id)
        return self._absent(api, snapshot) if row is None else self._present(row, snapshot)

    def _present(self, row: JobRow, snapshot: Snapshot) -> JobStatus:
        if nonce_of(row) not in self.record.nonces:
            detail = f"The id {self.id} is another run's; this job never started."
            return JobStatus(JobState.WAITING, Reason.TAKEN, detail)
        status = status_of_row(row)
        if self.record.cancelled and status.reason in _NEVER_RAN:
            status = JobStatus(JobState.CANCELLED, Reason.CANCELLED, _BEFORE_ITS_COMMAND)
        status = with_failures(self, status)
        if status.state.is_terminal:
            self.note(status, snapshot)
        api = self._api()
        if api is not None:
            status = self._explain_pending(row, status, api, snapshot)
        return _held_back(status) if self.record.cancelled else status

    def _explain_pending(
        self, row: JobRow, status: JobStatus, api: JobsApi, snapshot: Snapshot
    ) -> JobStatus:
        """The status of a job that has not started, with what it waits for."""
        told = api.state.explain_build(row, status)
        asked = self.record.reservation
        return explain.explain(row, told, asked, api.state, lambda: snapshot.programs(api))

    def _absent(self, api: JobsApi, snapshot: Snapshot) -> JobStatus:
        was_there = self.record.last == SUBMITTED
        why = snapshot.why_lost(api, self.record.session, was_there, lambda rows: self.id in rows)
        if why:
            return self._lost(why, snapshot)
        if was_there:
            return self._present(snapshot.rows_again(api)[self.id], snapshot)
        return JobStatus(JobState.WAITING, Reason.NOT_SUBMITTED, _NEVER_THERE)

    def _lost(self, why: str, snapshot: Snapshot) -> JobStatus:
        archive = self.cluster.archive(self.record.session)
        left = None if archive is None else self._status_left(archive.rows)
        if left and left.state.is_terminal:
            self.note(left, snapshot)
            return left
        if archive is not None and archive.continues:
            return self._as_recorded(JobState.UNKNOWN, Reason.UNREACHABLE, f"{archive.reason}.")
        why = (archive and archive.reason) or why
        arrived = self.record.last == SUBMITTED or self.record.attempts or self.left_logs()
        what = "Its end is not known" if arrived else "It is not known whether it ran"
        end = "" if "\n" in why or why.endswith(".") else "."  # a log's lines end by themselves
        return self._as_recorded(JobState.LOST, Reason.CLUSTER_GONE, f"{what}: {why}{end}")

    def _status_left(self, rows: JobRows) -> JobStatus | None:
        """Its status by the job table that its cluster has left; ``None`` if that lacks it."""
        row = rows.get(self.id)
        return status_of_row(row) if row and nonce_of(row) in self.record.nonces else None

    def _why_gone(self, why: str) -> str:
        """Why its cluster is gone, in the words of who knows best."""
        archive = self.cluster.archive(self.record.session)
        return (archive and archive.reason) or why

    def _as_recorded(self, state: JobState, reason: Reason, detail: str) -> JobStatus:
        """A status without an answer of its cluster: node and attempt are those seen last."""
        attempts = list(self.record.attempts.values())
        node = attempts[-1].node if attempts else ""
        return self._named(JobStatus(state, reason, detail, node=node, attempt=len(attempts)))

    def _named(self, status: JobStatus) -> JobStatus:
        """The status with the names that its next step is told with."""
        return replace(status, job=self.id, experiment=self.record.exp_dir.name)

    def rows_in(self, snapshot: Snapshot) -> JobRows:
        """The job table of its cluster; empty when the cluster is gone for good.

        Raises:
            ClusterError: the cluster cannot be asked.
        """
        api = self._api()
        if api is not None:
            return snapshot.rows(api)
        archive = self.cluster.archive(self.record.session)
        return {} if archive is None else archive.rows

    def _api(self) -> JobsApi | None:
        dashboard = self.cluster.find()
        return None if dashboard is None else JobsApi.of(dashboard)


def _is_gone(cluster: Cluster) -> bool:
    try:
        return cluster.find() is None
    except NemoRunRayError:
        return False  # the cluster does not tell


def _held_back(told: JobStatus) -> JobStatus:
    """The status of a job that was cancelled, where Ray only keeps it from running its command."""
    if told.state is not JobState.PENDING:
        return told
    detail = _HELD_BACK_BUILD if told.reason in _BUILDS else _HELD_BACK
    return JobStatus(JobState.CANCELLED, Reason.CANCELLED, detail)


def _attempts(job: ObservedJob, rows: JobRows, running_at: Mapping[str, float] | None) -> Attempts:
    """The attempts that rows tell of, with what is known of them."""
    now = time.time()
    found = of_rows(rows, job.id, job.record.nonces, now)
    running = (name for name, one in found.items() if one.state == JobState.RUNNING.value)
    for name in notes.have_begun(job, frozenset(running)):
        found[name] = replace(found[name], running_at=now)
    return known(job.record, found, now, running_at)


def left_logs(cluster: Cluster, record: JobRecord) -> list[Path]:
    """What a cluster that has died has left of the logs of a job's attempts."""
    archive, found = cluster.archive(record.session), []
    for number in itertools.count(1):  # there may be more than anybody has seen
        name = attempt_id(record.submission_id, number)
        path = None if archive is None else archive.log(name)
        if path is not None:
            found.append(path)
        elif number >= len(record.attempts):
            break
    return found
