"""A named allocation: its users, its walltime, and the dispatches that continue in the next one.

The files in the folders of the cluster and of the allocation, and the words "renew", "renews" and
"renewed", are explained in ``clusters/slurm/__init__.py``.
"""

from __future__ import annotations

import glob
import json
import os
import time
from contextlib import suppress
from os.path import basename
from time import monotonic
from typing import Mapping

from .. import carried_over
from ..dashboard import DashboardClient, RequestRefused, Unanswered
from ..end_record import LostEnds
from ..files import ENDS_AT, LASTS_S, RENEWS, write_file
from ..node.output import say
from ..spec import SUBMISSION_ID, JobRow, JobRows
from ..status import (
    Attempt,
    JobExit,
    JobState,
    Reason,
    attempt_id,
    attempt_of_row,
    attempts_of,
    first_id,
    is_active,
    status_of_row,
)
from .folder import CLUSTER_FAILED, READY, RunEnd
from .settings import Settings

#: Seconds between two looks at Ray's job table.
_LOOK_S = 5.0
#: A renewed allocation ends by itself before its walltime, in time for jobs to end and for its
#: script to submit the next one: by a tenth of the walltime, within these limits.
_MARGIN_MIN_S, _MARGIN_MAX_S = 30.0, 120.0
#: Tries after which a dispatch is given up.
_TRIES = 60


class Allocation:
    """Decides when a named allocation ends, and continues dispatches; unnamed, it does nothing."""

    def __init__(self, settings: Settings):
        self._settings = settings
        self._folder = settings.allocation
        self._carried: JobRows = {}  # rows of dispatches from before this run
        #: Folders of dispatches whose dispatcher is not started yet, with the number of failures.
        self._waiting: list[tuple[str, int]] = []
        #: The head sets it before the first step.
        self.dashboard: DashboardClient
        self._lost_ends = LostEnds(lambda *job: self.dashboard.log_end(*job))
        #: Ray's job table when it answered last.
        self.table: list[JobRow] = []
        self._written = self._session = ""
        self._looked_at = self._pause_until = float("-inf")
        self._idle_since: float | None = None
        self._seen_users: set[str] = set()
        self._ends_at: float | None = None
        #: The variables by which a dispatcher knows how long its jobs may take.
        self.ray_env: dict[str, str] = {}
        if self._folder and settings.ends_at:
            remaining_s = settings.ends_at - time.time()
            margin_s = 0.0
            if settings.renew:
                margin_s = min(max(remaining_s / 10, _MARGIN_MIN_S), _MARGIN_MAX_S)
            self._ends_at = settings.ends_at - margin_s
            self.ray_env = {
                ENDS_AT: f"{self._ends_at:.0f}",
                # Ray needs up to 30 s until the first job starts.
                LASTS_S: f"{remaining_s - margin_s - 30.0:.0f}",
                RENEWS: str(int(settings.renew)),
            }

    def begin(self) -> None:
        """Take over the dispatches of the runs before, before clients can add others.

        Archives of dispatches that nobody continues are removed. Their ids stay: they tell which
        rows of old job tables belong to them.

        Raises:
            OSError: a file of the runs before cannot be read; without it, jobs would run again.
        """
        if not self._folder:
            return
        if not any(carried_over.runs_before(self._folder, self._settings.run)):
            for folder in carried_over.kept_dispatches(self._folder):
                _remove_archives(folder)
        self._carried = carried_over.rows_before(self._folder, self._settings.run)
        # A dispatch without an attempt is of another allocation, or its client died early.
        self._waiting = [
            (folder, 0)
            for folder, attempts in self._attempts(self._carried).items()
            if attempts and not _is_decided(attempts)
        ]

    def step(self) -> RunEnd | None:
        """Start dispatches that are carried over; the end of an allocation that nobody needs."""
        if not self._folder:
            return None
        self._start_dispatcher()
        now = monotonic()
        if now - self._looked_at < _LOOK_S:
            return None
        self._looked_at = now
        if not self._session:
            with suppress(Unanswered, OSError):
                session = self.dashboard.session()
                write_file(f"{self._settings.run}/session", session)
                self._session = session
        rows = self.keep_table()
        is_idle = rows is not None and not self._waiting and not any(map(is_active, rows))
        try:
            # A dashboard that hangs does not delay the next allocation.
            end = self.renewal(self.table, is_idle)
            users = set(os.listdir(f"{self._folder}/users"))
        except OSError:  # the folder cannot be read now
            return None
        if end:
            return end
        # A new user needs time to submit.
        if not is_idle or self._idle_since is None or users - self._seen_users:
            self._idle_since = now if is_idle else None
            self._seen_users |= users
            return None
        limit_s = self._settings.idle_timeout_s
        if not users and self._has("released") and not self._has("keep"):
            return RunEnd(0, "its last user has left, and no job runs")
        if limit_s is not None and now - self._idle_since >= limit_s:
            return RunEnd(0, f"no job has run for {limit_s:g} s")
        return None

    def keep_table(self) -> list[JobRow] | None:
        """Ray's job table, which is kept in a file with the rows that were carried over.

        It is ``None`` if Ray does not answer.
        """
        try:
            rows = [self._lost_ends.restored(row) for row in self.dashboard.table()]  # type: ignore[arg-type]
        except Unanswered:
            return None
        self.table = rows
        text = json.dumps([*{**self._carried, **_by_id(rows)}.values()])
        if text != self._written:
            with suppress(OSError):  # the next look tries again
                write_file(f"{self._settings.run}/{carried_over.TABLE}", text)
                self._written = text
        return rows

    def renewal(self, rows: list[JobRow], is_idle: bool) -> RunEnd | None:
        """The end after which the next allocation continues; ``None`` while this one is of use.

        Args:
            rows: Ray's job table.
            is_idle: whether no job is active.

        Raises:
            OSError: the dispatches cannot be read now.
        """
        if not self._settings.renew or self._ends_at is None:
            return None
        # The job's script has made it, at the signal of `--signal`.
        has_signal = os.path.exists(f"{self._settings.run}/signalled")
        is_late = time.time() >= self._ends_at or has_signal
        table = _by_id(rows)
        names = set()  # dispatchers of dispatches that were started and are not decided
        for folder, attempts in self._attempts({**self._carried, **table}).items():
            if _is_decided(attempts):
                _remove_archives(folder)
            elif attempts and os.path.exists(f"{folder}/{carried_over.START}"):
                # Before the walltime only one that had no time for the remaining jobs: another one
                # that has died would die again.
                last = attempts[max(attempts)]
                if is_late or last.exit_code == JobExit.OUT_OF_TIME:
                    names.add(basename(folder))
        # They must not follow each other for ever. The next allocation has all of its time for a
        # dispatch that was submitted late in this one. Otherwise a job of a dispatch must have
        # been started in this run, beside the dispatchers; one that waits for resources was not.
        kept = carried_over.kept_dispatches(self._folder)
        jobs = set().union(*kept.values()) - set(map(basename, kept))
        began = {
            first_id(name)
            for name, row in table.items()
            if status_of_row(row).state is not JobState.PENDING
            and status_of_row(row).reason is not Reason.START_TIMEOUT
        }
        has_gained = names - {first_id(name) for name in self._carried} or began & jobs
        if names and has_gained and (is_late or is_idle):
            idle = "the remaining jobs need more time than it has"
            return RunEnd(0, "its walltime is over" if is_late else idle, True)
        if has_signal:
            why = "Slurm has sent the job's script SIGUSR1 or SIGUSR2, as --signal asks"
            return RunEnd(CLUSTER_FAILED, why)
        return None

    def may_try_again(self) -> bool:
        """Whether the next allocation shall try to bring Ray up after this one has failed to.

        It shall if Ray was up in the allocation before: one bad node must not end a chain of days,
        and a second failure in a row does.
        """
        if not self._settings.renew or not self._has(carried_over.RENEWED):
            return False
        parent, number = os.path.split(self._folder)
        return bool(glob.glob(f"{parent}/{int(number) - 1}/run/*/{READY}"))

    def _has(self, name: str) -> bool:
        return os.path.exists(f"{self._folder}/{name}")

    def _attempts(self, rows: JobRows) -> dict[str, dict[int, Attempt]]:
        """The attempts of the dispatchers, by the folder of the dispatch and number."""
        folders = {basename(path): path for path in carried_over.kept_dispatches(self._folder)}
        table = {
            name: attempt_of_row(row) for name, row in rows.items() if first_id(name) in folders
        }
        return {folders[name]: own for name, own in attempts_of(folders, table).items()}

    def _start_dispatcher(self) -> None:
        """Start the dispatcher of the first dispatch that waits; after a failure it is the last."""
        if not self._waiting or monotonic() < self._pause_until:
            return
        folder, failures = self._waiting.pop(0)
        name = basename(folder)
        try:
            with open(f"{folder}/{carried_over.START}", encoding="utf-8") as file:
                start = json.load(file)
            # An archive may be large; the head shows no life meanwhile.
            uploads = DashboardClient(self.dashboard.url, self.dashboard.token, timeout_s=20.0)
            for archive in start["archives"]:
                with open(f"{folder}/{archive}", "rb") as file:
                    uploads.put_package(archive, file.read())
            body = start["body"]
            last = max(self._attempts(self._carried)[folder])
            body["submission_id"] = attempt_id(name, last + 1)
            body["entrypoint"] = body["entrypoint"].replace(SUBMISSION_ID, body["submission_id"])
            self.dashboard.post(body)
            say(f"The chain {name} continues as {body['submission_id']}.")
        # A file may be torn.
        except (OSError, ValueError, KeyError, Unanswered, RequestRefused) as error:
            self._pause_until = monotonic() + 5.0
            failures, state = failures + 1, ", and is given up"
            if failures < _TRIES:
                self._waiting.append((folder, failures))
                state = " yet"
            if failures in (1, _TRIES):
                say(f"The chain {name} cannot continue{state}: {error}")


def _by_id(rows: list[JobRow]) -> JobRows:
    return {str(row["submission_id"]): row for row in rows if row.get("submission_id")}


def _is_decided(attempts: Mapping[int, Attempt]) -> bool:
    """Whether a dispatcher of a dispatch has decided all its jobs."""
    return any(
        attempt.status.state is JobState.SUCCEEDED or attempt.exit_code == JobExit.SOME_FAILED
        for attempt in attempts.values()
    )


def _remove_archives(folder: str) -> None:
    """Remove all files of a dispatch but its ids."""
    with suppress(OSError):  # what stays does no harm
        for name in os.listdir(folder):
            if name != carried_over.IDS:
                os.unlink(f"{folder}/{name}")
