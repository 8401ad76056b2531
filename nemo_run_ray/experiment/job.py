"""A job that was handed over: what is known of it, and what can be done with it.

A look asks its cluster and changes nothing, neither there nor in the experiment's folder.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import numbers
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from nemo_run_ray.clusters import from_record
from nemo_run_ray.clusters.base import text_of
from nemo_run_ray.dashboard.http import repeat
from nemo_run_ray.dashboard.jobs import PATIENCE_S, JobsApi
from nemo_run_ray.errors import (
    ClusterError,
    ConfigError,
    JobError,
    NemoRunRayError,
    StillGoesOn,
    Unanswered,
)
from nemo_run_ray.experiment import explain, history
from nemo_run_ray.experiment.cancel import JOB_MARGIN_S, cancel_job, leftovers, poll_until
from nemo_run_ray.experiment.dispatch import OUTCOME_S, Dispatch
from nemo_run_ray.experiment.elements import (
    Element,
    array_file,
    cancel_elements,
    elements,
    elements_of,
    with_failures,
)
from nemo_run_ray.experiment.logs import attempt_mark, follow, output_of
from nemo_run_ray.experiment.snapshot import GONE, Snapshot
from nemo_run_ray.experiment.store import (
    SUBMITTED,
    AttemptRecord,
    Attempts,
    JobRecord,
    Kept,
    store_of,
)
from nemo_run_ray.experiment.tend import tend
from nemo_run_ray.remote.attempts import RESULTS_FILE, attempt_id, first_id
from nemo_run_ray.remote.end_record import end_mark
from nemo_run_ray.remote.node.output import CUT
from nemo_run_ray.remote.rows import ArrayRows, JobRow, JobRows, fits, nonce_of
from nemo_run_ray.remote.status import JobState, JobStatus, Reason, state_of_row, status_of_row

#: Seconds between two looks of a wait, and of a reader that waits for a job's next attempt.
_LOOK_AGAIN_S = 1.0
#: Reasons of jobs that ended without a process.
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


class RemoteJob:
    """One job on a cluster: what ``nemo_run_ray.find`` gives.

    Attributes:
        record: what the experiment's ledger knows of it.
        id: its submission id; of a job that is tried again, that of its first attempt.
        cluster: where it runs.
        kept: what the experiment's folder keeps of it.
        dispatch: the jobs that one dispatcher hands over, if it is one of them; ``None`` for a job
            that the client has submitted itself, and that has one attempt.
    """

    def __init__(self, record: JobRecord) -> None:
        self.record = record
        self.id = record.submission_id
        self.cluster = from_record(record.cluster)
        self.kept = Kept(record.exp_dir, self.id, record.log_copy)
        is_dispatched = record.dispatcher and not record.is_dispatcher
        self.dispatch = Dispatch.of(record.exp_dir, record.dispatcher) if is_dispatched else None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id}>"

    @property
    def name(self) -> str:
        """Its name in the experiment."""
        return self.record.job

    @property
    def after(self) -> tuple[str, ...]:
        """Names of the jobs that it depends on."""
        return () if self.dispatch is None else self.dispatch.after.get(self.name, ())

    # ------------------------------------------------------------------ status

    @property
    def status(self) -> JobStatus:
        """Its status now. It never raises because a cluster is away."""
        return self.status_in(Snapshot())

    @property
    def attempts(self) -> list[AttemptRecord]:
        """Its attempts as they are now, the first one first, or as they were seen last."""
        return list(self.attempts_in(Snapshot()).values())

    def status_in(self, snapshot: Snapshot) -> JobStatus:
        """Its status in a snapshot. It never raises because a cluster is away."""
        try:
            return self.look(snapshot)
        except NemoRunRayError as error:  # a token's file that is gone is no news of the job either
            if self._is_cluster_gone():  # since `look` began
                return self._lost(GONE)
            return self._as_recorded(JobState.UNKNOWN, Reason.UNREACHABLE, str(error))

    def look(self, snapshot: Snapshot) -> JobStatus:
        """Its status as its cluster reports it, or its recorded end.

        Raises:
            ClusterError: the cluster cannot be asked.
            ConfigError: its address or credentials cannot be used.
        """
        self._read_record()
        if self.record.terminal:
            return self._named(JobStatus.from_json(self.record.terminal))
        api = self._api()
        return self._lost(GONE) if api is None else self.decided(api, snapshot)[0]

    def decided(self, api: JobsApi, snapshot: Snapshot) -> tuple[JobStatus, JobRow | None]:
        """The status that the job table proves, and the row of the attempt that it is about."""
        decide = self._direct if self.dispatch is None else self._dispatched
        status, row = decide(api, snapshot)
        if row is not None:
            status = with_failures(self, self._explained(status, row, api, snapshot))
            if self.record.cancelled and self.dispatch is None:
                status = _held_back(status)
        return self._named(status), row

    def attempts_in(self, snapshot: Snapshot) -> Attempts:
        """Its attempts by submission id, or as they were seen last when the cluster is away."""
        try:
            rows = self._rows_by_job(snapshot).get(self.id, {})
        except NemoRunRayError:  # the cluster is away: its status says so
            rows = {}
        now = time.time()
        seen = history.attempts_of_rows(rows, self.id, self.record.nonces, now)
        return history.known(self.record, seen, now)

    def answered(self) -> JobStatus:
        """Its status now; a cluster that does not answer is asked again for a while.

        Raises:
            ClusterError: the cluster cannot be asked.
            ConfigError: its address or credentials cannot be used.
        """
        return poll_until(
            lambda: self.look(Snapshot(is_fresh=True)), JOB_MARGIN_S, f"the job {self.id}"
        )

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
        """Submission id of the attempt that the status is about."""
        return self.id if self.dispatch is None else attempt_id(self.id, max(1, status.attempt))

    def _read_record(self) -> None:
        """Take note of what has been written down since, also by other processes."""
        if not self.record.terminal:
            self.record = store_of(self.record.exp_dir).ledger.job(self.id) or self.record

    def _direct(self, api: JobsApi, snapshot: Snapshot) -> tuple[JobStatus, JobRow | None]:
        row = snapshot.rows(api).get(self.id) or snapshot.rows_now(api).get(self.id)
        if row is None:
            has_arrived = self.record.last == SUBMITTED
            session = self.record.session
            why = snapshot.why_lost(api, session, has_arrived, lambda rows: self.id in rows)
            if why:
                return self._lost(why), None
            if not has_arrived:
                return JobStatus(JobState.WAITING, Reason.NOT_SUBMITTED, _NEVER_THERE), None
            row = snapshot.rows_again(api)[self.id]
        if nonce_of(row) not in self.record.nonces:
            detail = f"The id {self.id} is another run's; this job never started."
            return JobStatus(JobState.WAITING, Reason.TAKEN, detail), None
        status = status_of_row(row)
        if self.record.cancelled and status.reason in _NEVER_RAN:
            status = JobStatus(JobState.CANCELLED, Reason.CANCELLED, _BEFORE_ITS_COMMAND)
        return status, row

    def _dispatched(self, api: JobsApi, snapshot: Snapshot) -> tuple[JobStatus, JobRow | None]:
        assert self.dispatch is not None
        seen = self.dispatch.look(api, snapshot)
        status = seen.decision.statuses[self.name]
        if seen.lost and not status.attempt:
            return self._lost(seen.lost), None
        if status.state is JobState.WAITING and not (seen.is_dispatched or seen.lost):
            why = f"the dispatcher {self.dispatch.id} is not at work"
            status = replace(status, reason=Reason.UNDISPATCHED, detail=why)
        return status, seen.rows.get(self.ran_as(status)) if status.attempt else None

    def _explained(
        self, status: JobStatus, row: JobRow, api: JobsApi, snapshot: Snapshot
    ) -> JobStatus:
        """The status; of an attempt that has not started, with what it waits for."""
        of_row = status_of_row(row)
        if (of_row.state, of_row.reason) != (status.state, status.reason):
            return status
        of_row = api.state.explain_build(row, of_row)
        of_row = explain.explain(
            row, of_row, self.record.reservation, api.state, lambda: snapshot.programs(api)
        )
        return replace(status, reason=of_row.reason, detail=of_row.detail)

    def _lost(self, why: str) -> JobStatus:
        """Its status by what a cluster that is gone has kept."""
        archive = self.cluster.archive(self.record.session)
        status = None if archive is None else self._status_left(archive.rows)
        if status and status.state.is_terminal:
            return self._named(status)
        if archive is not None and archive.continues:
            return self._as_recorded(JobState.UNKNOWN, Reason.UNREACHABLE, f"{archive.reason}.")
        why = (archive and archive.reason) or why
        arrived = self.record.last == SUBMITTED or self.record.attempts or self.left_logs()
        what = "Its end is not known" if arrived else "It is not known whether it ran"
        end = "" if "\n" in why or why.endswith(".") else "."  # a log's lines end by themselves
        return self._as_recorded(JobState.LOST, Reason.CLUSTER_GONE, f"{what}: {why}{end}")

    def _status_left(self, rows: JobRows) -> JobStatus | None:
        """Its status by the job table that its cluster has left; ``None`` if that lacks it."""
        if self.dispatch is not None:
            return self.dispatch.statuses_left(rows).get(self.name) if rows else None
        row = rows.get(self.id)
        return status_of_row(row) if row and nonce_of(row) in self.record.nonces else None

    def _why_gone(self, why: str) -> str:
        archive = self.cluster.archive(self.record.session)
        return (archive and archive.reason) or why

    def _is_cluster_gone(self) -> bool:
        try:
            return self.cluster.find() is None
        except NemoRunRayError:
            return False  # the cluster does not tell

    def _as_recorded(self, state: JobState, reason: Reason, detail: str) -> JobStatus:
        """A status without an answer of its cluster: node and attempt are those seen last."""
        attempts = list(self.record.attempts.values())
        node = attempts[-1].node if attempts else ""
        return self._named(JobStatus(state, reason, detail, node=node, attempt=len(attempts)))

    def _named(self, status: JobStatus) -> JobStatus:
        """The status with the names that its next step is told with."""
        return replace(status, job=self.id, experiment=self.record.exp_dir.name)

    def _rows_by_job(self, snapshot: Snapshot) -> dict[str, dict[str, JobRow]]:
        """The rows of the job table by first ids; each table is grouped once for all jobs."""
        api = self._api()
        session = self.record.session

        def group() -> dict[str, dict[str, JobRow]]:
            archive = self.cluster.archive(session) if api is None else None
            rows = snapshot.rows(api) if api is not None else archive.rows if archive else {}
            groups: dict[str, dict[str, JobRow]] = {}
            for name, row in rows.items():
                groups.setdefault(first_id(name), {})[name] = row
            return groups

        return snapshot.once(api or session, "rows by job", group)

    def _api(self) -> JobsApi | None:
        dashboard = self.cluster.find()
        return None if dashboard is None else JobsApi.of(dashboard)

    # ------------------------------------------------------------------ what can be done

    def wait(self, timeout_s: float | None = None) -> JobStatus:
        """Wait until it has ended, and return how. Meanwhile its experiment is looked after.

        Args:
            timeout_s: seconds to wait at most; without it as long as it takes.

        Raises:
            ConfigError: the time is no number.
            JobError: it will never start: another run has its id, or it never reached the cluster.
            StillGoesOn: it has not ended in that time; it is a ``TimeoutError`` too.
        """
        _check_timeout(timeout_s)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            snapshot = Snapshot()
            status = self.status_in(snapshot)
            history.record([(self, status)], snapshot)
            if status.state.is_terminal:
                return status
            if self._never_starts(status):
                raise JobError(f"The job {self.id} will not start. {status.message}")
            if deadline is not None and time.monotonic() >= deadline:
                raise StillGoesOn(
                    f"The job {self.id} is {status.state.value} after {timeout_s:.0f} s; it goes "
                    "on. Wait again, or cancel it."
                )
            tend(self.record.exp_dir)
            time.sleep(_LOOK_AGAIN_S)

    def cancel(self) -> JobStatus:
        """Stop it, again and again until it is terminal, and return how it ended.

        Raises:
            ClusterError: it did not end in time, or the cluster stopped answering.
            ConfigError: the cluster's address or credentials cannot be used.
        """
        return cancel_job(self)

    def leftovers(self, status: JobStatus) -> str:
        """Proof that no process of it is left after its cancel, in words.

        Raises:
            ClusterError: the cluster cannot be asked.
            JobError: the cluster is gone for good.
        """
        return repeat(lambda: leftovers(self, status), PATIENCE_S)

    def _never_starts(self, status: JobStatus) -> bool:
        age_s = time.time() - self.record.intended_at
        is_given_up = status.reason is Reason.NOT_SUBMITTED and age_s > OUTCOME_S
        return status.reason is Reason.TAKEN or is_given_up

    # ------------------------------------------------------------------ elements

    @property
    def elements(self) -> ArrayRows | None:
        """Counts of an array's elements by state; ``None`` for other jobs."""
        return elements(self, self.status)

    def results(self) -> dict[int, Any]:
        """What the elements of an array have returned, by their indices: of ``run.Partial`` what is
        JSON, up to 64 KiB each.

        Raises:
            ClusterError: the cluster does not answer.
        """
        if not self.record.is_array:
            return {}
        found: dict[int, Any] = {}
        for line in array_file(self, self.status, RESULTS_FILE):
            with contextlib.suppress(ValueError, RecursionError):  # the last one is being written
                row = json.loads(line)
                if fits(row, [int, object]):
                    found[row[0]] = row[1]
        return found

    def select_elements(self, selection: str = "") -> list[Element]:
        """The elements of an array, one by one.

        Args:
            selection: ``waiting``, ``running``, ``succeeded``, ``failed``, ``cancelled``, ``lost``,
                or indices such as ``3,7-9``; empty is all.

        Raises:
            ClusterError: the cluster does not answer.
            ConfigError: the selection cannot be understood.
            JobError: it is no array, has no such element, or nothing is known of its elements.
        """
        return elements_of(self, self.status, selection)

    def cancel_elements(self, selection: str) -> list[Element]:
        """End some elements of an array that goes on, wait until they have ended, and return them.

        Args:
            selection: ``waiting`` (those that begin meanwhile go on), ``running``, or indices.

        Raises:
            ClusterError: the cluster does not answer, or the array's driver does not.
            ConfigError, JobError: as for ``select_elements``; or the selection is of what is over.
        """
        return cancel_elements(self, selection)

    # ------------------------------------------------------------------ log

    def log(self, follow: bool = False) -> Iterator[str]:
        """The text of its attempts' logs: all of it if it is over or ``follow`` is set, else what
        there is now.

        Raises:
            ClusterError: the log cannot be read.
            JobError: there is no log.
        """
        # What the embedded Ray had was kept whole, unless the user has set a limit.
        is_whole = self.cluster.runs_here and self.kept.is_whole
        if self.kept.has_log and (is_whole or not self._is_on_cluster()):
            return self.kept.log()
        return self._begun_or_kept(lambda: self._joined(self._attempt_logs(follow)))

    def output(self, follow: bool = False) -> Iterator[str]:
        """Its log without Ray's lines before the task's first one, and without the last line."""
        marks = tuple(attempt_mark(nonce) for nonce in self.record.nonces)
        return output_of(self.log(follow), self.end_marks, marks)

    def whole_log(self, status: JobStatus, silence_s: float) -> Iterator[str]:
        """The logs of its attempts now; broken off when nothing comes for so many seconds."""
        logs = self.api().logs
        names = [attempt_id(self.id, number) for number in range(1, status.attempt + 1)]
        return self._joined(logs.whole(name, silence_s) for name in names)

    def left_logs(self) -> list[Path]:
        """The logs of its attempts that a cluster which has died has left."""
        archive = self.cluster.archive(self.record.session)
        found: list[Path] = []
        for number in itertools.count(1):  # there may be more than anybody has seen
            path = None if archive is None else archive.log(attempt_id(self.id, number))
            if path is not None:
                found.append(path)
            elif number >= len(self.record.attempts):
                break
        return found

    def left_text(self) -> Iterator[str]:
        """The log that a cluster which has died has left."""
        return self._joined(text_of(path) for path in self.left_logs())

    @property
    def end_marks(self) -> tuple[str, ...]:
        """The possible beginnings of the last line of its log."""
        return tuple(end_mark(nonce) for nonce in self.record.nonces)

    def _attempt_logs(self, is_followed: bool) -> Iterator[Iterator[str]]:
        number = 0
        while True:
            try:
                status = self.look(Snapshot())
            except Unanswered:
                if not is_followed:
                    raise
                time.sleep(_LOOK_AGAIN_S)
                continue
            while number < status.attempt:
                number += 1
                source = _AttemptLog(self, number)
                if is_followed or source.is_over():
                    yield follow(source, self.end_marks, time.sleep)
                else:
                    yield source.whole()
            if status.state.is_terminal or not is_followed or self.dispatch is None:
                break
            time.sleep(_LOOK_AGAIN_S)
        if number == 0:
            raise JobError(f"There is no log: {status.message}")

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

    def _is_on_cluster(self) -> bool:
        """Whether the cluster answers and has the attempt that the kept log ends with."""
        self._read_record()  # another process may have seen the end since
        if not self.record.terminal:
            return True
        ran_as = self.ran_as(JobStatus.from_json(self.record.terminal))
        try:
            row = self.api().job(ran_as)
        except NemoRunRayError:
            return False
        return row is not None and nonce_of(row) in self.record.nonces

    def _begun_or_kept(self, cluster_log: Callable[[], Iterator[str]]) -> Iterator[str]:
        passed = 0
        try:
            for text in cluster_log():
                passed += len(text)
                yield text
        except (ClusterError, JobError) as error:  # the node that had it is gone, or the cluster
            rest = self.kept.log() if self.kept.has_log else self.left_text()
            beginning = next(rest, "")
            if not beginning or (passed and beginning.startswith(CUT)):
                raise
            yield from _from(passed, chain([beginning], rest))
            if passed and not self.record.terminal:
                raise JobError(f"No more of its log is left. {self.status.message}") from error


class _AttemptLog:
    """The log of one attempt as ``follow`` reads it."""

    def __init__(self, job: RemoteJob, number: int) -> None:
        self._job = job
        self._number = number
        self._id = attempt_id(job.id, number)
        self._has_ended = False

    def tail(self) -> Iterator[str]:
        if self._job.look(Snapshot()).state is JobState.CANCELLED:
            return self.whole()  # the stream of one that never starts would never begin
        return self._job.api().logs.tail(self._id, lambda: not self.is_over())

    def whole(self) -> Iterator[str]:
        return self._job.api().logs.whole(self._id)

    def is_over(self) -> bool:
        # An attempt that has ended stays so, also when the cluster does not answer any more.
        self._has_ended = self._has_ended or self._is_over_now()
        return self._has_ended

    def _is_over_now(self) -> bool:
        snapshot = Snapshot()
        status = self._job.look(snapshot)
        if status.state is JobState.LOST:
            raise JobError(f"There is no log any more. {status.message}")
        if status.state is JobState.WAITING and self._job.dispatch is None:
            raise JobError(f"There is no log yet. {status.message}")
        if status.state.is_terminal or status.attempt > self._number:
            return True
        row = snapshot.rows(self._job.api()).get(self._id)
        return row is not None and state_of_row(row).is_terminal


def _held_back(status: JobStatus) -> JobStatus:
    """The status of a job that was cancelled, where Ray only keeps it from running its command."""
    if status.state is not JobState.PENDING:
        return status
    detail = _HELD_BACK_BUILD if status.reason in _BUILDS else _HELD_BACK
    return JobStatus(JobState.CANCELLED, Reason.CANCELLED, detail)


def _from(offset: int, texts: Iterable[str]) -> Iterator[str]:
    """The text after so many characters."""
    for text in texts:
        if len(text) > offset:
            yield text[offset:]
        offset = max(0, offset - len(text))


def _check_timeout(timeout_s: object) -> None:
    is_number = isinstance(timeout_s, numbers.Real) and not isinstance(timeout_s, bool)
    if timeout_s is not None and not (is_number and float(timeout_s) >= 0):  # type: ignore[arg-type]
        raise ConfigError(
            f"The timeout_s of a wait is {timeout_s!r}; allowed is a number of seconds from 0, or "
            "None to wait as long as it takes."
        )
