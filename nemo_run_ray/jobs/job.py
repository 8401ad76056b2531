"""A job that was handed over, found again by its id alone: state, cancelling, log."""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nemo_run_ray.clusters import from_record
from nemo_run_ray.dashboard.jobs_api import JobsApi
from nemo_run_ray.errors import ClusterError, JobError, NemoRunRayError, Unanswered
from nemo_run_ray.jobs import ledger
from nemo_run_ray.jobs.attempt_records import Attempts, merged, of_rows
from nemo_run_ray.jobs.follow import attempt_mark, follow, output_of
from nemo_run_ray.jobs.ledger import JobRecord, Ledger
from nemo_run_ray.planning.job_plan import nonce_of
from nemo_run_ray.remote.attempts import attempt_id
from nemo_run_ray.remote.node.output import end_mark
from nemo_run_ray.remote.states import JobState, JobStatus, Life, Phase, Reason, status_of_row

log = logging.getLogger(__name__)

#: Seconds beyond the grace period until a cancelled job must be terminal.
CANCEL_MARGIN_S = 40.0
#: Seconds in which a job that is about to start does; one that waits for room stays PENDING longer.
PLACING_S = 6.0
#: Seconds between two requests to stop it.
STOP_AGAIN_S = 3.0
_LOOK_AGAIN_S = 2.0
#: Jobs whose end this process has written down.
_noted: set[str] = set()
_noted_lock = threading.Lock()


class RemoteJob:
    """One submitted job, found again by its id alone."""

    def __init__(self, record: JobRecord) -> None:
        self.record = record
        self.submission_id = record.submission_id
        self._cluster = from_record(record.cluster)
        self._kept_at: tuple[JobState, int] | None = None

    def status(self) -> JobStatus:
        """What is known of it now. Never raises because a cluster is away."""
        try:
            return self.look()
        except NemoRunRayError as error:  # a token's file that is gone is no news of the job either
            if self._has_lost_its_cluster():  # since `look` began
                return self._lost(self._cluster.why_gone())
            return JobStatus(JobState.UNKNOWN, Reason.UNREACHABLE, str(error))

    def look(self) -> JobStatus:
        """What its cluster says of it now.

        Raises:
            ClusterError: the cluster cannot be asked.
            ConfigError: its address or credentials cannot be used.
        """
        if self.record.terminal:
            return self._terminal()
        api = self._api()
        if api is None:
            return self._lost(self._cluster.why_gone())
        row = api.table().get(self.submission_id)
        if row is None:
            row = api.job(self.submission_id)  # younger than the table, or not there
        status = self._absent(api) if row is None else self._present(row)
        if status.state is JobState.RUNNING and self.record.cancelled:
            api.stop(self.submission_id)  # Ray forgot the stop that it was told before the start
        return status

    def api(self) -> JobsApi:
        """The dashboard of its cluster.

        Raises:
            JobError: the cluster is gone for good.
        """
        api = self._api()
        if api is None:
            raise JobError(
                f"The job {self.submission_id} cannot be asked, and its log went with its "
                f"cluster: {self._cluster.why_gone()}"
            )
        return api

    def cancel(self, grace_s: float) -> JobStatus:
        """Stop it, again and again until it is terminal. Somebody else's job is never touched.

        Raises:
            ClusterError: it did not end in time, or the cluster stopped answering.
        """
        status = self.look()
        if status.state.is_terminal or status.state is JobState.WAITING:
            return status
        api = self.api()
        Ledger.of(self.record.exp_dir).write(ledger.CANCEL, self.submission_id)
        self.record.cancelled = True
        began_at = time.monotonic()
        deadline = began_at + grace_s + CANCEL_MARGIN_S
        asked_at = -math.inf
        trouble = "it goes on"
        while time.monotonic() < deadline:
            try:
                if time.monotonic() - asked_at >= STOP_AGAIN_S:
                    api.stop(self.submission_id)
                    asked_at = time.monotonic()
                row = api.job(self.submission_id)
                status = self._absent(api) if row is None else self._present(row)
                settled = row is None or row["status"] != "PENDING"
                if status.state.is_terminal and (settled or asked_at - began_at >= PLACING_S):
                    return status
            except Unanswered as error:
                trouble = str(error)
            time.sleep(0.2)
        raise self._not_ended(status, grace_s, trouble)

    def _not_ended(self, status: JobStatus, grace_s: float, trouble: str) -> ClusterError:
        page = self.api().dashboard.job_page(self._ran_as(status))
        return ClusterError(
            f"The job {self.submission_id} did not end within {grace_s + CANCEL_MARGIN_S:.0f} s of "
            f"being cancelled: {trouble}. Cancel it again, or look at it in Ray's dashboard: {page}"
        )

    def leftovers(self, status: JobStatus) -> str:
        """Proof that no process of a cancelled job is left on its node, in words.

        The remote half ends every process of the job before its own last line.
        """
        if not status.node:
            return "it never had a process"
        ending = self.api().state.last_lines(status.node, self._ran_as(status), 3)
        if any("no process of it is left" in line for line in ending):
            return "no process of it is left on its node"
        return f"its node {status.node[:12]} did not confirm that all its processes ended"

    def roles(self, status: JobStatus) -> dict[str, Any]:
        """What is known of a group's roles: ``phase``, ``waits_for_room`` and a list ``roles``.

        Empty for a task alone, and for a group whose cluster does not answer. It explains; the
        job's state is in its status.
        """
        if self._kept_roles.exists():
            return dict(json.loads(self._kept_roles.read_text(encoding="utf-8")))
        try:
            api = self._api() if status.node else None
            found = api.state.roles(status.node, self._ran_as(status)) if api else {}
        except NemoRunRayError:
            return {}
        if found and status.state.is_terminal and found["phase"] != Phase.OVER.value:
            # The driver was killed, and what it wrote last is no longer so.
            found.update(phase=Phase.OVER.value, waits_for_room="")
            for one in found["roles"]:
                if one["state"] != Life.ENDED.value:
                    one["state"] = Life.LOST.value
        return found

    def log(self, should_tail: bool) -> Iterator[str]:
        """Its log's text: to its end if it is over or ``should_tail``, else what there is now."""
        if self._kept_log.exists():
            return _read(self._kept_log)
        return self.cluster_log(should_tail)

    def output(self, should_tail: bool) -> Iterator[str]:
        """The same without Ray's lines before the task's first one, and without our last one."""
        marks = tuple(attempt_mark(nonce) for nonce in self.record.nonces)
        return output_of(self.log(should_tail), self._end_marks, marks)

    def cluster_log(self, should_tail: bool) -> Iterator[str]:
        """Its log from its cluster alone."""
        source = _Log(self)
        if should_tail or source.is_over():
            return follow(source, self._end_marks, time.sleep)
        return source.whole()

    @property
    def _end_marks(self) -> tuple[str, ...]:
        return tuple(end_mark(nonce) for nonce in self.record.nonces)

    def _terminal(self) -> JobStatus:
        """Its end as it was written down."""
        seen = self.record.terminal
        return JobStatus(
            JobState(seen["state"]),
            Reason(seen["reason"]),
            seen["detail"],
            seen["node"],
            int(seen.get("attempt", 1)),
        )

    def attempt_id(self, number: int) -> str:
        """Submission id of its n-th attempt; a job without a dispatcher has one."""
        return attempt_id(self.submission_id, number)

    def rows(self) -> Mapping[str, dict[str, Any]]:
        """The job table of its cluster, a moment old at most; empty when the cluster is gone.

        Raises:
            ClusterError: the cluster cannot be asked.
        """
        api = self._api()
        return {} if api is None else api.table()

    def attempts(self, running_at: Mapping[str, float] | None = None) -> Attempts:
        """Its attempts as they are now, or as they were seen last when nobody can tell.

        Args:
            running_at: when attempts were seen running by somebody else, by submission id.
        """
        try:
            rows = self.rows()
        except NemoRunRayError:  # the cluster is away: its status says so
            rows = {}
        found = of_rows(rows, self.submission_id, self.record.nonces, time.time())
        return merged(self.record.attempts, found, running_at)

    def keep_attempts(self, status: JobStatus) -> None:
        """Write down what is seen of its attempts, when the job is not where it was before."""
        if (status.state, status.attempt) == self._kept_at:
            return
        attempts = self.attempts()
        if attempts != self.record.attempts:
            self.record.attempts = dict(attempts)
            Ledger.of(self.record.exp_dir).keep_attempts({self.submission_id: attempts})
        self._kept_at = status.state, status.attempt

    def _ran_as(self, status: JobStatus) -> str:
        """Submission id of what the status tells of."""
        return self.submission_id

    def _logs(self, api: JobsApi, status: JobStatus) -> Iterator[str]:
        """Its log as it is now."""
        return api.logs.whole(self.submission_id)

    def _api(self) -> JobsApi | None:
        dashboard = self._cluster.find()
        return None if dashboard is None else JobsApi.of(dashboard)

    def _present(self, row: dict[str, Any]) -> JobStatus:
        if nonce_of(row) not in self.record.nonces:
            detail = f"The id {self.submission_id} is another run's; ours never started."
            return JobStatus(JobState.WAITING, Reason.TAKEN, detail)
        status = status_of_row(row)
        if status.state.is_terminal:
            self.note(status)
        elif status.state is JobState.PENDING and self.record.cancelled:
            return JobStatus(
                JobState.CANCELLED,
                Reason.CANCELLED,
                "cancelled while it waited for room; Ray shows it as pending until there is room "
                "or 900 s have passed, and ends it without running its command",
            )
        return self._explain_pending(row, status)

    def _explain_pending(self, row: Mapping[str, Any], status: JobStatus) -> JobStatus:
        """The status of a job that waits for its runtime environment, with how far that is."""
        api = self._api()
        return status if api is None else api.state.env_builds.explain(row, status)

    def _absent(self, api: JobsApi) -> JobStatus:
        session = api.version(patience_s=0.0)["session_name"]
        if session != self.record.session:
            return self._lost(
                f"the Ray at {api.dashboard.url} is not the one that had it (then "
                f"{self.record.session}, now {session})"
            )
        if self.record.last == ledger.SUBMITTED:
            time.sleep(_LOOK_AGAIN_S)  # a head that recovers may answer before it knows its jobs
            row = api.job(self.submission_id)
            if row is not None:
                return self._present(row)
            return self._lost(f"the Ray at {api.dashboard.url} has no record of it any more")
        return JobStatus(
            JobState.WAITING,
            Reason.NOT_SUBMITTED,
            "The client died, or was refused, before the job reached the cluster.",
        )

    def _has_lost_its_cluster(self) -> bool:
        try:
            return self._cluster.find() is None
        except NemoRunRayError:
            return False  # nobody can tell

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

    def note_end(self) -> None:
        """Write down how it ended, if it has. Nothing is started or stopped for it.

        Raises:
            ClusterError: the cluster cannot be asked.
        """
        row = None if self.record.terminal else self.rows().get(self.submission_id)
        if row is not None and nonce_of(row) in self.record.nonces:
            status = status_of_row(row)
            if status.state.is_terminal:
                self.note(status)

    def note(self, status: JobStatus) -> None:
        """Write down how it ended, once in a process, so that it is known without the cluster."""
        with _noted_lock:
            if self.submission_id in _noted:
                return
            self._write_down(status)
            _noted.add(self.submission_id)

    def _write_down(self, status: JobStatus) -> None:
        self.record.terminal = {
            "state": status.state.value,
            "reason": status.reason.value,
            "detail": status.detail,
            "node": status.node,
            "attempt": status.attempt,
        }
        if os.access(self.record.exp_dir, os.W_OK):
            if self._cluster.runs_here and status.attempt:
                self._keep_log(status)
                self._keep_roles(status)
            self.record.attempts = dict(self.attempts())
            Ledger.of(self.record.exp_dir).write(
                ledger.TERMINAL,
                self.submission_id,
                status=self.record.terminal,
                attempts=[one.to_json() for one in self.record.attempts.values()],
            )

    def _keep_log(self, status: JobStatus) -> None:
        """Copy the log of an ended job: the embedded Ray and its logs may be gone soon."""
        api = self._api()
        if api is None:
            return
        temporary = self._kept_log.with_suffix(f".{os.getpid()}")
        temporary.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                file.writelines(self._logs(api, status))
        except ClusterError as error:
            log.warning("The log of %s could not be kept: %s", self.submission_id, error)
            return
        temporary.replace(self._kept_log)

    def _keep_roles(self, status: JobStatus) -> None:
        roles = self.roles(status)
        if roles:
            temporary = self._kept_roles.with_suffix(f".{os.getpid()}")
            temporary.write_text(json.dumps(roles), encoding="utf-8")
            temporary.replace(self._kept_roles)

    @property
    def _kept_roles(self) -> Path:
        return self.record.exp_dir / "ray_logs" / f"{self.submission_id}.json"

    @property
    def _kept_log(self) -> Path:
        return self.record.exp_dir / "ray_logs" / f"{self.submission_id}.log"


def _read(path: Path) -> Iterator[str]:
    with open(path, encoding="utf-8", newline="") as file:
        while text := file.read(65536):
            yield text


class _Log:
    """A job's log as ``follow`` reads it."""

    def __init__(self, job: RemoteJob) -> None:
        self._job = job

    def tail(self) -> Iterator[str]:
        if self._job.look().state is JobState.CANCELLED:
            return self.whole()  # the stream of one that never starts would never begin
        return self._job.api().logs.tail(self._job.submission_id)

    def whole(self) -> Iterator[str]:
        return self._job.api().logs.whole(self._job.submission_id)

    def is_over(self) -> bool:
        status = self._job.look()
        if status.state is JobState.LOST:
            raise JobError(f"There is no log any more. {status.message}")
        if status.state is JobState.WAITING:
            raise JobError(f"There is no log yet. {status.message}")
        return status.state.is_terminal
