"""A job that was submitted: its status, its log, its elements, and what can be done with it.

A look asks its cluster and changes nothing, neither there nor in the experiment's folder. A client
that waits for jobs, cancels them or stops their cluster calls ``record``, which writes into the
folder what was seen.
"""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import shlex
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

from nemo_run.config import SCRIPTS_DIR, get_nemorun_home

from nemo_run_ray.clusters import ClusterArchive, from_record, text_of
from nemo_run_ray.dashboard.http import repeat
from nemo_run_ray.dashboard.jobs import PATIENCE_S, JobsApi
from nemo_run_ray.dashboard.state import ClusterRoom
from nemo_run_ray.errors import (
    ClusterError,
    ConfigError,
    JobError,
    NemoRunRayError,
    StillRunning,
    Unanswered,
)
from nemo_run_ray.experiment.dispatch import (
    GONE,
    OUTCOME_S,
    Dispatch,
    DispatchStatus,
    Snapshot,
    StopRequests,
    claim,
    poll_until,
    tend,
)
from nemo_run_ray.experiment.logs import OF_RAY, attempt_mark, beyond, follow, output_of
from nemo_run_ray.experiment.store import (
    SEEN,
    TERMINAL,
    UNKEPT,
    AttemptRecord,
    Attempts,
    ExperimentStore,
    JobRecord,
    Kept,
    did_you_mean,
    experiments,
    find_experiment,
    find_record,
    merged,
    records_of,
    store_of,
    titles,
)
from nemo_run_ray.fields import is_amount
from nemo_run_ray.ids import DISPATCHER
from nemo_run_ray.remote.end_record import CUT, MAY_BE_LEFT, NO_PROCESS_LEFT, end_mark, record_in
from nemo_run_ray.remote.fit import (
    ResourceRequest,
    amounts_text,
    best,
    free_text,
    request_of,
    scarce,
    why_not,
)
from nemo_run_ray.remote.spec import (
    NONCE_KEY,
    ArrayRows,
    GroupRows,
    JobRow,
    JobRows,
    Json,
    fits,
    nonce_of,
)
from nemo_run_ray.remote.status import (
    NODE_DEAD_S,
    RESULTS_FILE,
    STATES_FILE,
    JobState,
    JobStatus,
    Phase,
    Reason,
    ReplicaState,
    attempt_id,
    attempt_of_row,
    first_id,
    is_active,
    is_pending,
    is_running,
    posted_at,
    state_of_row,
    status_of_row,
)

log = logging.getLogger(__name__)

#: States of an element, as a user selects them.
STATES = ("waiting", "running", "succeeded", "failed", "cancelled", "lost")
#: States in which an element is not over.
ACTIVE = ("waiting", "running")
#: Kind of the kept file with the rows of a group or an array.
_ROWS = "json"
_Rows = TypeVar("_Rows", ArrayRows, GroupRows)
#: One line of the file of states: first and last index, state, attempts, exit code.
_STRETCH = tuple[int, int, str, int, int]
#: Seconds between two looks of a wait, and of a reader that waits for a job's next attempt.
_LOOK_AGAIN_S = 1.0
#: Seconds beyond the grace period until a cancelled job must be terminal.
_CANCEL_MARGIN_S = 40.0
#: Seconds until the job of a request has begun, beyond those until the driver has taken it.
_BEGUN_S = 60.0
#: Seconds beyond the grace period until elements that were cancelled have ended, also on a node
#: that has died.
_END_MARGIN_S = NODE_DEAD_S + 60.0
#: Seconds that the log of one job may take to be copied.
COPY_S = 60.0
#: Lines at the end of a log that may hold its end record.
_LAST_LINES = 3
#: Number of holders that a message names.
_HOLDERS_MAX = 3


@dataclass(frozen=True)
class Element:
    """One element of an array, as its driver last saw it."""

    index: int
    #: One of ``STATES``. ``running`` ones have a host, where they may wait for a slot; ``lost``
    #: ones were not over when their job ended.
    state: str
    #: Number of times that it was given to a host.
    attempts: int
    #: Of the last attempt that has ended; ``None`` before that.
    exit_code: int | None
    #: Cause of its failure, in words.
    reason: str
    #: Its own, by field, where the experiment's folder has them.
    values: Json


class RemoteJob:
    """One job on a cluster: what ``nemo_run_ray.find`` gives."""

    def __init__(self, record: JobRecord):
        #: Its record in the experiment's ledger.
        self.record = record
        #: Its submission id; of a job that is tried again, that of its first attempt.
        self.id = first_id(record.submission_id)
        self.cluster = from_record(record.cluster)
        #: Its files in the experiment's folder.
        self.kept = Kept(record.exp_dir, self.id, record.log_copy)
        #: The client has submitted it, without a dispatcher; it has one attempt.
        self.is_direct = not record.dispatcher or record.is_dispatcher

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id}>"

    @property
    def name(self) -> str:
        """Its name in the experiment."""
        return self.record.job

    @property
    def after(self) -> tuple[str, ...]:
        """Names of the jobs that it depends on."""
        return self.dispatch.after.get(self.name, ())

    @property
    def misses_log(self) -> bool:
        """Whether its log is still to be copied into the experiment's folder."""
        is_unwanted = self.record.keep_logs_max_bytes == 0 or self.record.is_log_given_up
        return not (is_unwanted or self.kept.log.exists())

    @property
    def dispatch(self) -> Dispatch:
        """The jobs that are submitted together with it."""
        return Dispatch.of_job(self.record)

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
            return self.as_seen(snapshot, JobState.UNKNOWN, Reason.UNREACHABLE, str(error))

    def look(self, snapshot: Snapshot) -> JobStatus:
        """Its status as its cluster reports it, or its recorded end."""
        return self._look(snapshot)[0]

    def attempts_in(self, snapshot: Snapshot) -> Attempts:
        """Its attempts by submission id, or as they were seen last when the cluster is away."""
        if self.record.terminal:
            return self.record.attempts
        seen = {}
        with suppress(NemoRunRayError):  # the cluster is away: its status says so
            api = self._api()
            if api:
                found = self.dispatch.look(api, snapshot)
            else:
                archive = snapshot.once(self.record.session, "archive", self._archive)
                found = self.dispatch.decided(archive.rows)
            for number, row in found.attempts[self.id].items():
                name, status = attempt_id(self.id, number), row.status
                if not row.claim and row.nonce in self.record.nonces:
                    seen[name] = AttemptRecord(
                        submission_id=name,
                        state=status.state,
                        reason=status.reason.value,
                        detail=status.detail,
                        node=status.node,
                        posted_at=row.posted_at,
                        ended_at=row.ended_at or None,
                        exit_code=row.exit_code,
                    )
        return merged(self.record.attempts, seen)

    def hosts_in(self, snapshot: Snapshot) -> Mapping[str, str]:
        """The names of its cluster's nodes by their ids; empty when the cluster does not say."""
        with suppress(NemoRunRayError):  # its status says why the cluster is away
            if api := self._api():
                return snapshot.once(api, "hosts", api.state.hosts)
        return {}

    def api(self) -> JobsApi:
        """The dashboard of its cluster."""
        api = self._api()
        if not api:
            why = self._archive().reason or GONE
            raise JobError(f"The job {self.id} cannot be asked any more: {why}")
        return api

    def ran_as(self, status: JobStatus) -> str:
        """Submission id of the attempt that the status is about."""
        return attempt_id(self.id, max(1, status.attempt))

    def _look(self, snapshot: Snapshot) -> tuple[JobStatus, JobRow | None]:
        """Its status, and the row of the attempt that it is about, if a job table has it."""
        if not self.record.terminal:  # other processes may have written since
            self.record = store_of(self.record.exp_dir).ledger.job(self.id) or self.record
        if self.record.terminal:
            return self._named(self.record.terminal), None
        api = self._api()
        if not api:
            return self._lost(snapshot, GONE), None
        seen = self.dispatch.look(api, snapshot)
        status, row = self._decided(seen)
        if not row and seen.lost:
            return self._lost(snapshot, seen.lost), None
        if status.state is JobState.WAITING and not (
            self.is_direct or seen.is_dispatched or seen.lost
        ):
            why = f"the dispatcher {self.dispatch.id} is not at work"
            status = replace(status, reason=Reason.UNDISPATCHED, detail=why)
        if row and status.state is JobState.PENDING:
            # What it waits for, by Ray's state API; when that is closed or slow, nothing is said.
            status = api.state.explain_build(row, status)
            since_s = posted_at(row)
            ask = request_of(self.record.reservation)
            # Where there is room, a start takes less than three seconds.
            if ask and status.reason is Reason.NONE and not 0 <= time.time() - since_s <= 3.0:
                waits = snapshot.once(
                    api,
                    f"the wait for {ask!r}",
                    lambda: why_waiting(ask, api.state.room(), snapshot.rows(api)),
                )
                if waits:
                    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(since_s))
                    detail = f"{waits[1]} It has been waiting since {since}."
                    status = replace(status, reason=waits[0], detail=detail)
        return self._named(status), row

    def _decided(self, seen: DispatchStatus) -> tuple[JobStatus, JobRow | None]:
        """The status that a job table proves, and the row of the attempt that it is about."""
        status = seen.decision.statuses[self.name]
        row = seen.rows.get(self.ran_as(status)) if status.attempt else None
        if not self.is_direct or status.state is not JobState.WAITING:
            return status, row
        if row:
            # Ray gave its start up; nobody tries a direct job again, so the row's own status
            # counts.
            return status_of_row(row), row
        never = "The client died, or was refused, before the job reached the cluster."
        return JobStatus(JobState.WAITING, Reason.NOT_SUBMITTED, never, attempt=0), None

    def _lost(self, snapshot: Snapshot, why: str) -> JobStatus:
        """Its status by what a cluster that is gone has kept."""
        archive = snapshot.once(self.record.session, "archive", self._archive)
        if archive.rows:
            status, _ = self._decided(self.dispatch.decided(archive.rows))
            if status.state.is_terminal:
                return self._named(status)
        if archive.continues and why == GONE:  # else the Ray that is up does not have it
            detail = f"{archive.reason}."
            return self.as_seen(snapshot, JobState.UNKNOWN, Reason.UNREACHABLE, detail)
        why = archive.reason or why
        end = "" if "\n" in why or why.endswith(".") else "."  # a log's lines end by themselves
        detail = f"Its end is not known: {why}{end}"
        return self.as_seen(snapshot, JobState.LOST, Reason.CLUSTER_GONE, detail)

    def as_seen(
        self, snapshot: Snapshot, state: JobState, reason: Reason, detail: str
    ) -> JobStatus:
        """A status that no job table has: node and attempt are those seen last."""
        attempts = list(self.attempts_in(snapshot).values())
        node = attempts[-1].node if attempts else ""
        return self._named(JobStatus(state, reason, detail, node=node, attempt=len(attempts)))

    def _named(self, status: JobStatus) -> JobStatus:
        """The status with the names that its next step is told with."""
        return replace(status, job=self.id, experiment=self.record.exp_dir.name)

    def _api(self) -> JobsApi | None:
        dashboard = self.cluster.find()
        return JobsApi.of(dashboard) if dashboard else None

    def _archive(self) -> ClusterArchive:
        return self.cluster.archive(self.record.session) or ClusterArchive()

    # ------------------------------------------------------------------ what can be done

    def wait(self, timeout_s: float | None = None) -> JobStatus:
        """Wait until it has ended, and return how. Meanwhile its experiment is looked after.

        Args:
            timeout_s: seconds to wait at most; without it as long as it takes.

        Raises:
            ConfigError: the time is no number, or negative.
            JobError: it will never start, since it never reached the cluster.
            StillRunning: it has not ended in that time; it is a ``TimeoutError`` too.
        """
        if timeout_s is not None and not is_amount(timeout_s):
            raise ConfigError(
                f"The timeout_s of a wait is {timeout_s!r}; allowed is a number of seconds "
                "from 0, or None to wait as long as it takes."
            )
        deadline = monotonic() + (math.inf if timeout_s is None else timeout_s)
        while True:
            snapshot = Snapshot()
            status = self.status_in(snapshot)
            left_s = max(0.0, deadline - monotonic())
            record([(self, status)], snapshot, copy_s=min(left_s, threading.TIMEOUT_MAX))
            if status.state.is_terminal:
                return status
            if self.never_starts(status):
                raise JobError(f"The job {self.id} will not start. {status.message}")
            if monotonic() >= deadline:
                raise StillRunning(
                    f"The job {self.id} is {status.state.value} after {timeout_s:.0f} s; it "
                    "continues. Wait again, or cancel it."
                )
            tend(self.record.exp_dir)
            time.sleep(_LOOK_AGAIN_S)

    def cancel(self) -> JobStatus:
        """Stop it, again and again until it is terminal, and return how it ended.

        Raises:
            ClusterError: it did not end in time, or the cluster stopped answering.
            ConfigError: the cluster's address or credentials cannot be used.
        """
        stops = StopRequests()

        def step() -> tuple[JobStatus, Snapshot] | None:
            snapshot = Snapshot(is_fresh=True)
            status, row = self._look(snapshot)
            row = row or {}
            # The claim below makes the decision CANCELLED; a pending row may stay in the table.
            may_run = is_active(row) and not (is_pending(row) and stops.end_pending)
            if status.state.is_terminal and not may_run:
                return status, snapshot
            api = self.api()
            if is_active(row):
                stops.ask(api, self.ran_as(status))
            if status.state in (JobState.WAITING, JobState.PENDING):
                claim(api, attempt_id(self.id, status.attempt + 1), self.record.nonces[-1])
            return None

        limit_s = self.record.grace_s + _CANCEL_MARGIN_S
        status, snapshot = poll_until(step, limit_s, f"the job {self.id}")
        record([(self, status)], snapshot)
        return status

    def proof_of_end(self, status: JobStatus) -> str:
        """Proof that no process of it remains after its cancel, or where some may, in words.

        The remote half ends every process of a job before its own last line, unless it was killed.
        That of a group or of an array says whether it could, on all their nodes.
        """
        which = f"its attempt {status.attempt}" if status.attempt > 1 else "it"
        never = f"{which} never had a process"
        if not status.node:
            return never
        state, name = self.api().state, self.ran_as(status)
        ending = repeat(lambda: state.last_lines(status.node, name, _LAST_LINES), PATIENCE_S)
        end = record_in(ending, self.record.nonces)
        if end and end.left_on is not None:
            hosts = ", and ".join(end.left_on)
            return f"{MAY_BE_LEFT} {hosts}" if hosts else f"{NO_PROCESS_LEFT} on its node"
        if not end and ending and all(OF_RAY.match(line) for line in ending):
            return never
        return f"its node {status.node[:12]} did not confirm that all its processes ended"

    def never_starts(self, status: JobStatus) -> bool:
        """Whether it never reached the cluster, and no client will bring it there."""
        age_s = time.time() - self.record.intended_at
        return status.reason is Reason.NOT_SUBMITTED and age_s > OUTCOME_S

    # ------------------------------------------------------------------ elements

    @property
    def elements(self) -> ArrayRows | None:
        """Counts of an array's elements by state; ``None`` for other jobs.

        An element that waits at a host for a slot counts as waiting; ``select_elements`` has it
        among those that run.
        """
        return self.array_rows(self.status)

    def array_rows(self, status: JobStatus) -> ArrayRows | None:
        """An array as its driver saw it last; ``None`` for other jobs, and if that is not known."""
        return self._driver_rows(status, ArrayRows) if self.record.is_array else None

    def roles(self, status: JobStatus) -> GroupRows | None:
        """A group as its driver saw it last; ``None`` for other jobs, and if that is not known."""
        found = self._driver_rows(status, GroupRows) if self.record.has_roles else None
        if found and status.state.is_terminal and found["phase"] != Phase.OVER:
            # The driver was killed, and what it wrote last is no longer so.
            found["phase"], found["waits_for_room"] = Phase.OVER.value, ""
            for row in found["roles"]:
                if row["state"] != ReplicaState.ENDED:
                    row["state"], row["waits_for"] = ReplicaState.LOST.value, ""
        return found

    def _driver_rows(self, status: JobStatus, kind: type[_Rows]) -> _Rows | None:
        """The last rows that its driver wrote, if they are of this type."""
        found: Any = json.loads(self.kept.text(_ROWS) or "null")
        is_away = status.reason in (Reason.UNREACHABLE, Reason.CLUSTER_GONE)
        if not found and status.node and not is_away:
            with suppress(NemoRunRayError):  # a node may be known all the same
                found = self.api().state.rows(status.node, self.ran_as(status))
        return found if fits(found, kind) else None

    def array_file(self, status: JobStatus, kind: str) -> list[str]:
        """The lines of a file of an array's driver, from its node or as it was kept."""
        if text := self.kept.text(kind):
            return text.splitlines()
        api = self._api()
        if not (api and status.node):
            return []
        lines = repeat(lambda: api.state.array_file(status.node, self.id, kind), PATIENCE_S)
        # Ray has words of its own for a file that does not exist.
        return lines if lines and lines[0].startswith("[") else []

    def results(self) -> dict[int, Any]:
        """The results of an array's elements by index: of a ``run.Partial`` its return value, if it
        is JSON of 64 KiB at most.

        Raises:
            ClusterError: the cluster does not answer.
        """
        if not self.record.is_array:
            return {}
        lines = self.array_file(self.status, RESULTS_FILE)
        return dict(_json_rows(lines, tuple[int, Any]))

    def select_elements(self, selection: str = "") -> list[Element]:
        """The elements of an array, one by one.

        Args:
            selection: ``waiting``, ``running``, ``succeeded``, ``failed``, ``cancelled``, ``lost``,
                or indices such as ``3,7-9``; empty is all.

        Raises:
            ClusterError: the cluster does not answer.
            ConfigError: the selection cannot be understood.
            JobError: it is no array, or nothing is known of its elements.
        """
        status = self.status
        return self._elements(status, indices_of(selection, self._states(status), self.name))

    def _states(self, status: JobStatus) -> dict[int, tuple[str, int, int]]:
        """State, attempts and exit code of every element."""
        if not self.record.is_array:
            raise JobError(f"The job {self.name!r} is no array and has no elements.")
        rows = list(_json_rows(self.array_file(status, STATES_FILE), _STRETCH))
        is_over = status.state.is_terminal
        if not rows:
            raise JobError(
                f"Nothing is known of the elements of {self.name!r}, which is "
                f"{status.state.value}. {status.message}"
            )
        shown = dict.fromkeys(("leased", *ACTIVE), "lost") if is_over else {"leased": "running"}
        return {
            index: (shown.get(state, state), attempts, code)
            for first, last, state, attempts, code in rows
            for index in range(first, last + 1)
        }

    def _elements(self, status: JobStatus, indices: Sequence[int]) -> list[Element]:
        states, array = self._states(status), self.array_rows(status)
        reasons = {index: why for index, _, why in array["failures"]} if array else {}
        values = values_of(self.record.exp_dir / self.name, set(indices))
        return [
            Element(
                index,
                state,
                attempts,
                code if code or state == "succeeded" else None,
                (reasons.get(index) or f"exit code {code}") if state == "failed" else "",
                values.get(index, {}),
            )
            for index in indices
            for state, attempts, code in [states[index]]
        ]

    def cancel_elements(self, selection: str) -> list[Element]:
        """End some elements of a running array, wait until they have ended, and return them.

        Args:
            selection: ``waiting`` (those that begin meanwhile continue), ``running``, or indices.

        Raises:
            ClusterError: the cluster does not answer, or the array's driver does not.
            ConfigError, JobError: as for ``select_elements``; or the selected elements are over.
        """
        if str(selection) in {"", *STATES} - {*ACTIVE}:
            raise ConfigError(
                f"The elements to cancel are {selection!r}; expected is waiting, running, or "
                "indices such as 3,7-9. To cancel the whole array, cancel the job."
            )

        def look() -> JobStatus:
            return self.look(Snapshot(is_fresh=True))

        states = repeat(lambda: self._states(look()), PATIENCE_S)
        indices = indices_of(selection, states, self.name)
        only_waiting = selection == "waiting"

        def have_ended() -> bool:
            states = self._states(look())
            active = ("waiting",) if only_waiting else ACTIVE
            return not any(states[index][0] in active for index in indices)

        if repeat(have_ended, PATIENCE_S):
            return self._elements(look(), indices)
        # A small job on the head passes a request to the driver, and ends when that is taken.
        from nemo_run_ray.experiment.archives import package_archive, upload  # few do this
        from nemo_run_ray.plan.job import entrypoint
        from nemo_run_ray.remote.array.cancel_request import KIND, TAKEN_S, request_id

        what = f"elements of the array {self.name!r}"
        ranges: list[list[int]] = []
        for index in indices:
            if ranges and (only_waiting or index == ranges[-1][1] + 1):
                ranges[-1][1] = index  # the driver skips elements in between that are not waiting
            else:
                ranges.append([index, index])
        request = json.dumps({"cancel": ranges, "only_waiting": only_waiting})
        if len(request) > 2**16:  # Linux takes 128 KiB as one word of a command
            raise ConfigError(
                f"The elements to cancel of {self.name!r} are {len(ranges):,} ranges, too many for "
                "one request. Cancel them in several steps."
            )
        api, nonce = self.api(), secrets.token_hex(8)
        name = request_id(self.id, nonce)
        upload(api, package_archive())
        body = {
            "submission_id": name,
            "entrypoint": entrypoint(None, [KIND, name, request]),
            "runtime_env": {"py_modules": [package_archive().uri]},
            "metadata": {NONCE_KEY: nonce, "nemo_run_job": f"{KIND} of {self.name}"},
        }
        with suppress(Unanswered):  # the table says whether it has arrived
            api.post(body)

        def is_taken() -> bool:
            state = state_of_row(api.job(name) or {})
            if state in (JobState.FAILED, JobState.CANCELLED):
                raise ClusterError(
                    f"The driver of the array {self.name!r} has not taken the request to cancel "
                    f"elements. Look at the array's log, and at that of the job {name}, and try "
                    "again."
                )
            return state is JobState.SUCCEEDED or look().state.is_terminal

        poll_until(is_taken, TAKEN_S + _BEGUN_S, what)
        poll_until(have_ended, self.record.grace_s + _END_MARGIN_S, what)
        return repeat(lambda: self._elements(look(), indices), PATIENCE_S)

    # ------------------------------------------------------------------ log

    def log(self, follow: bool = False) -> Iterator[str]:
        """The text of its attempts' logs: all of it if it is over or ``follow`` is set, else what
        there is now.

        Raises:
            ClusterError: the log cannot be read.
            JobError: there is no log.
        """
        if self.kept.log.exists():
            # It was copied when the job was over, and the job's last processes may have written a
            # moment later: the kept log is used once the cluster no longer has the last attempt.
            row: JobRow | None = None
            with suppress(NemoRunRayError):
                row = self.api().job(self.ran_as(self.look(Snapshot())))
            if nonce_of(row or {}) not in self.record.nonces:
                yield from self.saved_log()
                return
        passed = 0
        try:
            for text in self._joined(self._attempt_logs(follow)):
                passed += len(text)
                yield text
        except (ClusterError, JobError) as error:  # the node that had it is gone, or the cluster
            rest = self.saved_log()
            beginning = next(rest, "")
            if not beginning or (passed and beginning.startswith(CUT)):
                raise
            yield from beyond(passed, chain([beginning], rest))
            if passed and not self.record.terminal:
                raise JobError(f"No more of its log is left. {self.status.message}") from error

    def output(self, follow: bool = False) -> Iterator[str]:
        """Its log without Ray's lines before the task's first one, and without the last line."""
        attempt_marks = tuple(map(attempt_mark, self.record.nonces))
        return output_of(self.log(follow), self.end_marks, attempt_marks)

    def keep(self, status: JobStatus) -> None:
        """Keep when its attempts began, what the driver of a group or an array wrote, its log."""
        attempts = self.with_begin_times(self.record.attempts)
        if attempts != self.record.attempts:
            ledger = store_of(self.record.exp_dir).ledger
            ledger.note(SEEN, self.id, attempts=list(attempts.values()))
        if not self.kept.text(_ROWS):
            report = self.roles(status) or self.array_rows(status)
            if report:
                self.kept.keep(_ROWS, json.dumps(report))
        if self.record.is_array and not self.kept.text(STATES_FILE):
            states = self.array_file(status, STATES_FILE)
            if states:  # else it had no elements yet, or they cannot be read now
                results = self.array_file(status, RESULTS_FILE)
                self.kept.keep(RESULTS_FILE, "\n".join([*results, ""]))
                self.kept.keep(STATES_FILE, "\n".join([*states, ""]))  # last: with it, all is kept
        if not self.misses_log:
            return
        deadline = monotonic() + COPY_S

        def in_time(texts: Iterator[str]) -> Iterator[str]:
            for text in texts:
                if monotonic() > deadline:
                    raise JobError("it did not arrive in time.")
                yield text

        # Those of a chain's earlier allocations alone are not all while its cluster answers.
        if self.left_logs()[status.attempt - 1 if self._api() else 0 :]:
            texts = self.saved_log()
        else:
            texts = self._joined(self._read(one + 1, at_once=True) for one in range(status.attempt))
        self.kept.keep_log(in_time(texts), self.record.keep_logs_max_bytes)

    def left_logs(self) -> list[Path]:
        """The logs of its attempts that a cluster which has died has left."""
        archive, logs = self._archive(), list[Path]()
        for number in count(1):
            path = archive.log(attempt_id(self.id, number))
            if path:
                logs.append(path)
            elif number > len(self.record.attempts):  # there may be more than anybody has seen
                break
        return logs

    def saved_log(self) -> Iterator[str]:
        """The log that the experiment's folder has, or that a cluster which has died has left."""
        paths = [self.kept.log] if self.kept.log.exists() else self.left_logs()
        return self._joined(map(text_of, paths))

    def with_begin_times(self, attempts: Attempts) -> Attempts:
        """The attempts; of those that ended and that nobody saw begin, by their end records."""
        found = dict(attempts)
        for name, attempt in attempts.items():
            if not attempt.state.is_terminal or not attempt.node or attempt.running_at:
                continue
            with suppress(NemoRunRayError):
                api, lines = self._api(), list[str]()
                if api:
                    lines = api.state.last_lines(attempt.node, name, _LAST_LINES)
                elif path := self._archive().log(name):
                    lines = "".join(text_of(path)).splitlines()
                end = record_in(lines, self.record.nonces)
                if end and end.began_at:
                    found[name] = replace(attempt, running_at=end.began_at)
        return found

    @property
    def end_marks(self) -> tuple[str, ...]:
        """The possible beginnings of the last line of its log."""
        return tuple(map(end_mark, self.record.nonces))

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
            before = number
            while number < status.attempt:
                number += 1
                is_over = partial(self._is_over, number)
                if is_followed or is_over():
                    yield follow(partial(self._read, number), is_over, self.end_marks, time.sleep)
                else:
                    yield self._read(number, at_once=True)
            if status.state.is_terminal or not is_followed or self.never_starts(status):
                break
            if number == before:  # after a log was followed, the status is out of date: no pause
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

    def _read(self, number: int, at_once: bool) -> Iterator[str]:
        """The log of an attempt: all that there is now, or as it grows."""
        api, name = self.api(), attempt_id(self.id, number)
        path = api.dashboard.earlier.log(name)
        if path:
            return text_of(path)
        if at_once:
            return api.whole_log(name)
        return api.tail_log(name, lambda: not self._is_over(number))

    def _is_over(self, number: int) -> bool:
        """Whether an attempt has ended."""
        snapshot = Snapshot()
        status = self.look(snapshot)
        if status.state is JobState.LOST:
            raise JobError(f"There is no log any more. {status.message}")
        if status.state.is_terminal or status.attempt > number:
            return True
        rows = snapshot.rows(self.api())
        return state_of_row(rows.get(attempt_id(self.id, number), {})).is_terminal


def indices_of(selection: str, states: Mapping[int, tuple[str, int, int]], name: str) -> list[int]:
    """The indices, in their order, of the elements that ``select_elements`` selects."""
    if selection in ("", *STATES):
        return [index for index, row in states.items() if selection in ("", row[0])]
    indices: set[int] = set()
    for part in str(selection).split(","):
        first, dash, last = part.partition("-")
        try:
            chosen = range(int(first), int(last if dash else first) + 1)
        except ValueError:
            chosen = range(0)
        if not chosen or chosen[-1] >= len(states):
            raise ConfigError(
                f"{selection!r} selects no elements of the array {name!r}, which has the elements "
                f"0 to {len(states) - 1}; expected is one of {', '.join(STATES)}, or indices such "
                "as 3,7-9."
            )
        indices.update(chosen)
    return sorted(indices)


def values_of(folder: Path, wanted: set[int]) -> dict[int, Json]:
    """The values of elements from the file that was sent, if the folder of the job still has it."""
    for path in sorted((folder / SCRIPTS_DIR).glob("*")):
        with path.open(encoding="utf-8", errors="replace") as file:
            if any(line.startswith('{"array"') for line in file):  # else it is any other script
                rows = {at: json.loads(line) for at, line in enumerate(file) if at in wanted}
                return {at: row.get("values") or {"task": row["name"]} for at, row in rows.items()}
    return {}


def not_ready(group: GroupRows) -> list[str]:
    """The services of a group that are not ready for long, each with what its probe gets."""
    return [
        f"{row['role']}/{row['replica']} is {row['waits_for']}"
        for row in group["roles"]
        if row.get("waits_for")  # the driver may be of an older version
    ]


def _json_rows(lines: Iterable[str], shape: Any) -> Iterator[list[Any]]:
    """The lines that are JSON of this shape; the last one may be half written."""
    for line in lines:
        with suppress(ValueError, RecursionError):
            row = json.loads(line)
            if fits(row, shape):
                yield row


def why_waiting(
    ask: ResourceRequest, room: ClusterRoom | None, rows: JobRows
) -> tuple[Reason, str] | None:
    """The reason of a task's wait for nodes, and sentences; ``None`` when there is room."""
    if not room:
        return None
    never = why_not(ask, room.nodes)
    if never:
        text = f"It asks for {ask}; no node can ever take it: {never}. Ray waits for such a node."
        return Reason.UNSCHEDULABLE, text
    node = best(ask, room.nodes)
    if not node or node.free is None or not (missing := scarce(ask, node)):
        return None
    count = len(room.nodes)
    which = f"the node {node.host}" if count == 1 else f"the best of {count} nodes, {node.host},"
    text = f"It asks for {ask}; {which} has {free_text(ask, node)}"
    programs = {row["job_id"]: name for name, row in rows.items() if row.get("job_id")}
    #: By holder, the amounts of what it finds too little of.
    held: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for holding in room.holdings.get(node.node_id, ()):
        program = programs.get(holding.job_id, f"the Ray program {holding.job_id}")
        for name in missing:
            if holding.resources.get(name):
                held[holding.submission_id or program][name] += holding.resources[name]
    if held:
        largest = sorted(held, key=lambda name: (-sum(held[name].values()), name))
        shown = [f"{name} ({amounts_text(held[name])})" for name in largest[:_HOLDERS_MAX]]
        more = f" and {len(held) - _HOLDERS_MAX} more" if len(held) > _HOLDERS_MAX else ""
        text = f"{text}; there it is held by {', '.join(shown)}{more}"
    return Reason.ROOM, f"{text}."


def record(
    seen: Iterable[tuple[RemoteJob, JobStatus]],
    snapshot: Snapshot,
    is_final: bool = False,
    copy_s: float | None = None,
) -> list[str]:
    """Write down attempts and ends, then copy the logs of jobs that have ended.

    Nothing is written into a folder that cannot be written to (another user's, a full disk), and no
    wait fails for that.

    Args:
        seen: jobs, and what the snapshot says of them.
        snapshot: what clusters say.
        is_final: the cluster is about to be stopped, and with it all that runs on it.
        copy_s: seconds to wait for the copies, which continue after that; ``None`` waits for all.

    Returns:
        A sentence for each log that could not be copied now; one that is given up is logged.
    """
    problems = []
    ended = []
    for job, status in seen:
        store = store_of(job.record.exp_dir)
        if not os.access(store.exp_dir, os.W_OK):
            continue
        with store.recording:  # another thread that has seen the same end waits for the note
            _note(store, job, status, snapshot, is_final)
        # A client that does not wait looks again soon: one thread at a time is enough.
        is_copying = copy_s == 0 and store.copying.locked()
        has_ended = status.state.is_terminal and status.state is not JobState.LOST
        if has_ended and status.attempt and job.id not in store.copied and not is_copying:
            ended.append((job, status))

    def copy() -> None:
        for job, status in ended:
            store = store_of(job.record.exp_dir)
            with store.copying:  # another thread that has seen the same end waits for the copy
                if job.id in store.copied:
                    continue
                # Another process may have tried.
                job.record = store.ledger.job(job.id) or job.record
                try:
                    job.keep(status)
                except (JobError, OSError) as error:
                    log.warning("The log of %s is not copied whole: %s", job.id, error)
                    store.ledger.note(UNKEPT, job.id)
                except NemoRunRayError as error:
                    problems.append(f"The log of {job.id} is not copied whole: {error}")
                    continue
                store.copied.add(job.id)

    if ended:
        thread = threading.Thread(target=copy, name="copy-logs", daemon=True)
        thread.start()
        thread.join(copy_s)
    return problems


def _note(
    store: ExperimentStore, job: RemoteJob, status: JobStatus, snapshot: Snapshot, is_final: bool
) -> None:
    """Append what is new of a job to the ledger."""
    current = store.ledger.job(job.id)
    if not current or current.terminal:
        return
    now, seen = time.time(), {**job.attempts_in(snapshot)}
    for name, attempt in seen.items():
        if attempt.state is not JobState.RUNNING:
            store.waited_at[name] = now
        # The attempt was posted, or seen waiting, a moment ago, so it has begun now.
        elif now - max(attempt.posted_at, store.waited_at.get(name, 0.0)) <= 10.0:
            seen[name] = replace(attempt, running_at=now)
    # Ray still holds a pending attempt back, which may start after all and be stopped then.
    is_held_back = job.is_direct and not all(attempt.state.is_terminal for attempt in seen.values())
    has_ended = status.state.is_terminal and (is_final or not is_held_back)
    # A foreign nonce may be ours, of a `resume` that this process has not read yet.
    is_foreign = status.reason is Reason.TAKEN
    attempts = merged(current.attempts, seen)
    rows = list(attempts.values())
    if not has_ended or is_foreign or status.state is JobState.LOST:
        if attempts != current.attempts:
            store.ledger.note(SEEN, job.id, attempts=rows)
        return
    end = {"state": status.state, "reason": status.reason.value}
    end |= {"detail": status.detail, "ended_at": now}
    # Attempts that are not over end like the job: Ray stops a pending one as soon as it starts.
    rows = [row if row.state.is_terminal else replace(row, **end) for row in rows]
    store.ledger.note(TERMINAL, job.id, status=status, attempts=rows)


def find(name: str) -> list[RemoteJob]:
    """See ``nemo_run_ray.find``."""
    if not isinstance(name, str):
        raise JobError(f"A job is found by the name of an experiment or its own, not by {name!r}.")
    with suppress(JobError):
        return [find_job(name.rpartition("/")[2])]
    folder = find_experiment(name)
    if not folder:
        raise JobError(
            f"There is no experiment {name!r} in NeMo-Run's home {get_nemorun_home()}, and no job "
            f"or handle of that name.{did_you_mean(name, titles())} `nemo-run-ray list --all` "
            "lists those that reached a cluster; NEMORUN_HOME names another home."
        )
    jobs = jobs_of(folder)
    if not jobs:
        raise JobError(
            f"The experiment {name!r} has submitted nothing to Ray. If its program was refused, "
            "correct what it said and run it again; if it was killed, this submits its jobs: "
            f"nemo-run-ray resume {shlex.quote(name)}"
        )
    return jobs


def find_job(submission_id: str) -> RemoteJob:
    """The job of a submission id."""
    return RemoteJob(find_record(submission_id))


def jobs_of(exp_dir: Path) -> list[RemoteJob]:
    """The jobs that an experiment's ledger knows, in the order in which they were added to it."""
    records = sorted(records_of(exp_dir), key=lambda record: record.place)
    return [RemoteJob(record) for record in records if not record.is_dispatcher]


# ---------------------------------------------------------------- the end of several jobs

#: Seconds until the cluster is stopped under what has not ended, longer than most grace periods.
_END_LIMIT_S = 60.0


def cancel_all(jobs: Sequence[RemoteJob]) -> Iterator[str]:
    """Cancel jobs, some at the same time, and wait for their ends.

    Yields:
        A sentence about the end of each, in their order.
    """
    snapshot = Snapshot()
    for dispatch in {job.dispatch for job in jobs if not job.is_direct}:
        given = [job for job in jobs if job.record.dispatcher == dispatch.id]
        is_over = all(job.status_in(snapshot).state.is_terminal for job in given)
        if len(given) == len(dispatch.spec.jobs) > 1 and not is_over:
            # One claim for all that have not started; else they are cancelled one by one.
            with suppress(NemoRunRayError):
                spec, api = dispatch.spec, given[0].api()
                repeat(partial(claim, api, spec.cancel_id, spec.nonce), PATIENCE_S)
    with ThreadPoolExecutor(8) as pool:  # each job that waits for room takes some seconds
        ends = [pool.submit(cancel_one, job) for job in jobs]
        try:
            for end in ends:
                yield end.result()
        except KeyboardInterrupt:  # those that were stopped are waited for
            pool.shutdown(cancel_futures=True)
            raise


def cancel_one(job: RemoteJob) -> str:
    """Cancel a job, wait for its end, and say how it ended."""
    snapshot = Snapshot()
    status = job.status_in(snapshot)
    if status.state.is_terminal and status.state is not JobState.CANCELLED:
        record([(job, status)], snapshot)
        return f"{job.name} is {status.state.value}: there is nothing to cancel"
    if not job.record.terminal:
        status = job.cancel()
    proof = ""
    if status.state is JobState.CANCELLED:
        with suppress(JobError):  # its cluster has been stopped since, with all of it
            proof = f"; {job.proof_of_end(status)}"
    return f"{job.name} is {status.state.value.lower()}{proof}"


def active(rows: JobRows) -> list[str]:
    """Submission ids of what runs or may start; not of a pending one whose next id is claimed."""
    given_up = set()
    for name, row in rows.items():
        first, _, number = name.rpartition("@")
        if attempt_of_row(row).claim and number.isdecimal():
            given_up.add(attempt_id(first, int(number) - 1))
    return [
        name
        for name, row in rows.items()
        if is_active(row) and not (is_pending(row) and name in given_up)
    ]


def end_all(api: JobsApi) -> list[str]:
    """Stop all jobs of a cluster that is about to be stopped, and wait until none runs.

    Dispatchers go first, so that they start nothing more. What waits for room is not waited for.

    Returns:
        Submission ids of those that still run after ``_END_LIMIT_S``.
    """
    stops, deadline = StopRequests(), monotonic() + _END_LIMIT_S
    while True:
        rows = api.table(fresh=True, patience_s=_END_LIMIT_S)
        names = sorted(active(rows), key=lambda name: not name.endswith(f".{DISPATCHER}"))
        running = [name for name in names if is_running(rows[name])]
        for name in names:
            with suppress(Unanswered):  # it is asked again
                stops.ask(api, name)
        if not running or monotonic() > deadline:
            return running
        time.sleep(0.2)


def note_ends(api: JobsApi, is_forced: bool) -> list[str]:
    """Write down how the jobs of this NeMo-Run home ended, and keep their logs.

    Args:
        api: the dashboard of the cluster that is about to be stopped.
        is_forced: its jobs were stopped; those that have not ended are noted as cancelled.

    Returns:
        A sentence for each thing that could not be kept.
    """
    rows = api.table(fresh=True, patience_s=_END_LIMIT_S)
    problems = []
    snapshot, seen = Snapshot(), []
    for one in chain.from_iterable(map(records_of, experiments())):
        if one.is_dispatcher or rows.keys().isdisjoint((one.submission_id, one.dispatcher)):
            continue
        try:
            job = RemoteJob(one)
            status = job.look(snapshot)
        except (NemoRunRayError, OSError) as error:
            problems.append(f"{one.submission_id} could not be looked at: {error}")
            continue
        if is_forced and not status.state.is_terminal:
            detail = "cancelled when its cluster was stopped"
            status = job.as_seen(snapshot, JobState.CANCELLED, Reason.CANCELLED, detail)
        seen.append((job, status))
    return problems + record(seen, snapshot, is_final=True)
