"""A named allocation: its users, its walltime, and the dispatches that it carries on.

The client has made the folder of the allocation, below that of the cluster::

    dispatches/…    dispatches that continue in the next allocation, see ``../carried_over.py``
    lives/3/
        ray.sub     the script of the job
        job         Slurm's number of the job
        run/, logs/ written by the job, see ``folder.py``
        users/…     one file for each program that uses the cluster
        released    the last user has left
        keep        the cluster stays without users
        over        why the allocation can no longer be used
        stop        why it has to end now, also when Slurm does not end it
        renewed     it continues the dispatches of the one before

A folder with a higher number means that this allocation was given up.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import closing, suppress
from typing import Any, Callable, Dict, List, Mapping, Optional, Set, cast

from .. import carried_over
from ..dashboard import DashboardClient, RequestRefused, Unanswered
from ..end_record import LostEnds
from ..files import ENDS_AT, LASTS_S, RENEWS, write_file
from ..node.output import say
from ..spec import JobRow, JobRows
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
    started_as,
    status_of_row,
)
from .folder import CLUSTER_FAILED, RunEnd
from .settings import Settings

#: Names in the folder of an allocation.
USERS, RELEASED, KEEP, OVER, STOP = "users", "released", "keep", "over", "stop"
#: Seconds between two looks at Ray's job table, and between two at the file ``stop``.
_LOOK_S, _STOP_LOOK_S = 5.0, 5.0
#: Tries to read Ray's last job table, from which the next allocation takes over jobs.
_LAST_TRIES = 3
#: A renewed allocation ends by itself before its walltime, in time for jobs to end and for its
#: script to submit the next one: by a tenth of the walltime, within these limits.
_MARGIN_MIN_S, _MARGIN_MAX_S = 30.0, 120.0
#: Longest time from the start of the node program to that of the first job.
_FIRST_JOB_S = 30.0
#: In the folder of a run after Slurm has sent the job's script the signal of ``--signal``.
SIGNALLED = "signalled"
_SIGNAL = "Slurm has sent the job's script SIGUSR1 or SIGUSR2, as --signal asks"
#: Pause after a request that failed, and the tries after which a dispatch is given up.
_PAUSE_S, _TRIES = 5.0, 60
#: Limit of the upload of an archive, which may be large; the head shows no life meanwhile.
_UPLOAD_S = 20.0


class Allocation:
    """Decides when a named allocation ends; without a name it does nothing.

    Args:
        settings: of the head.
        monotonic: seconds that only grow.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        settings: Settings,
        monotonic: Callable[[], float] = time.monotonic,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._folder = settings.allocation
        self._monotonic = monotonic
        self._clock = clock
        self._dispatches = CarriedDispatches(settings, monotonic)
        self._looked_at = self._stop_looked_at = float("-inf")
        self._stop_reason = ""
        self._idle_since: Optional[float] = None
        self._written = ""
        self._dashboard: Optional[DashboardClient] = None
        self._lost_ends = LostEnds(self._log_end)
        self._rows: List[Any] = []
        self._seen_users: Set[str] = set()
        #: Ray's name of its session; empty until the dashboard has answered.
        self.session = ""
        self._ends_at: Optional[float] = None
        self._lasts_s = 0.0
        if settings.ends_at is not None:
            remaining_s = settings.ends_at - clock()
            margin_s = min(max(remaining_s / 10, _MARGIN_MIN_S), _MARGIN_MAX_S)
            margin_s = margin_s if settings.renew else 0.0
            self._ends_at = settings.ends_at - margin_s
            self._lasts_s = remaining_s - margin_s - _FIRST_JOB_S

    def ray_env(self) -> Dict[str, str]:
        """The variables by which a dispatcher knows how long its jobs may take."""
        if self._ends_at is None or not self._folder:
            return {}
        renews = "1" if self._settings.renew else "0"
        return {ENDS_AT: f"{self._ends_at:.0f}", LASTS_S: f"{self._lasts_s:.0f}", RENEWS: renews}

    def begin(self) -> None:
        """Remove dispatches that no allocation continues, before clients can add others."""
        self._dispatches.clear()

    def step(self, dashboard: DashboardClient) -> Optional[RunEnd]:
        """Start dispatches that are carried over; the end of an allocation that nobody needs."""
        if not self._folder:
            return None
        self._dispatches.step(dashboard)
        now = self._monotonic()
        if now - self._looked_at < _LOOK_S:
            return None
        self._looked_at = now
        with suppress(Unanswered):
            self.session = self.session or dashboard.session()
        rows = self.keep_table(dashboard)
        is_idle = rows is not None and not any(_is_active(row) for row in rows)
        is_idle = is_idle and not self._dispatches.is_busy
        # A dashboard that hangs does not delay the next allocation.
        self._rows = self._rows if rows is None else rows
        end = self.renewal(self._rows, is_idle)
        if end is not None:
            return end
        if not is_idle:
            self._idle_since = None
            return None
        # A new user needs time to submit.
        users = self._users() or set()
        if self._idle_since is None or users - self._seen_users:
            self._idle_since = now
        self._seen_users |= users
        why = "" if self._idle_since == now else self._idle_reason(now - self._idle_since)
        return RunEnd(0, why) if why else None

    def stop_reason(self) -> str:
        """The reason for which a client has stopped this allocation; empty if none has.

        Slurm's controller may have been away when the client asked it.
        """
        now = self._monotonic()
        is_time = now - self._stop_looked_at >= _STOP_LOOK_S
        if self._folder and not self._stop_reason and is_time:
            self._stop_looked_at = now
            path = os.path.join(self._folder, STOP)
            with suppress(OSError), open(path, encoding="utf-8") as file:
                self._stop_reason = file.read().strip()
        return self._stop_reason

    def keep_table(self, dashboard: DashboardClient) -> Optional[List[Any]]:
        """Ray's job table, which is kept in a file with the rows that were carried over.

        It is ``None`` if Ray does not answer.
        """
        self._dashboard = dashboard
        try:
            rows = [self._lost_ends.restored(row) for row in dashboard.table()]
        except Unanswered:
            return None
        if self._dispatches.is_read:  # else the next run would read a table without its rows
            text = json.dumps([*self._dispatches.rows_beside(rows), *rows])
            if text != self._written:
                with suppress(OSError):  # the next look tries again
                    write_file(os.path.join(self._settings.run, carried_over.TABLE), text)
                    self._written = text
        return rows

    def keep_last_table(self, dashboard: DashboardClient, end: RunEnd) -> None:
        """Keep the table from which the next allocation takes the ends of jobs."""
        for _ in range(_LAST_TRIES if end.renews else 1):
            if not self._folder or self.keep_table(dashboard) is not None:
                return
        if end.renews:
            say(
                "Ray does not answer with its job table. Jobs that have ended since the last look "
                "count as ended by the walltime."
            )

    def renewal(self, rows: List[Any], is_idle: bool) -> Optional[RunEnd]:
        """The end after which the next allocation continues; ``None`` while this one is of use.

        Args:
            rows: Ray's job table.
            is_idle: whether no job is active.
        """
        if not self._settings.renew or self._ends_at is None:
            return None
        has_signal = os.path.exists(os.path.join(self._settings.run, SIGNALLED))
        is_late = self._clock() >= self._ends_at or has_signal
        try:
            names = self._dispatches.unfinished(rows, out_of_time=not is_late)
            if not names or not (is_late or is_idle) or not self._dispatches.may_gain(names, rows):
                return RunEnd(CLUSTER_FAILED, _SIGNAL) if has_signal else None
        except OSError:  # the dispatches cannot be read now
            return None
        why = "its walltime is over" if is_late else "the remaining jobs need more time than it has"
        return RunEnd(0, why, True)

    def may_try_again(self) -> bool:
        """Whether the next allocation shall try to bring Ray up after this one has failed to.

        It shall if Ray was up in the allocation before: one bad node must not end a chain of days,
        and a second failure in a row does.
        """
        if not (self._folder and self._settings.renew):
            return False
        parent, number = os.path.split(self._folder)
        with suppress(OSError, ValueError):
            if carried_over.exists(os.path.join(self._folder, carried_over.RENEWED)):
                runs = os.path.join(parent, str(int(number) - 1), "run")
                paths = (os.path.join(runs, run, "ready.json") for run in os.listdir(runs))
                return any(map(carried_over.exists, paths))
        return False

    def _log_end(self, node: str, submission_id: str) -> Optional[str]:
        return self._dashboard.log_end(node, submission_id) if self._dashboard else None

    def _idle_reason(self, idle_s: float) -> str:
        limit_s = self._settings.idle_timeout_s
        is_kept = os.path.exists(os.path.join(self._folder, KEEP))
        is_released = os.path.exists(os.path.join(self._folder, RELEASED))
        if is_released and not is_kept and self._users() == set():
            return "its last user has left, and no job runs"
        if limit_s is not None and idle_s >= limit_s:
            return f"no job has run for {limit_s:g} s"
        return ""

    def _users(self) -> Optional[Set[str]]:
        """Names of the programs that use it; ``None`` if the folder cannot be read now."""
        with suppress(OSError):
            return set(os.listdir(os.path.join(self._folder, USERS)))
        return None


class CarriedDispatches:
    """The dispatches that this run of an allocation takes over from the one before.

    Args:
        settings: of the head.
        clock: seconds that only grow.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._allocation = settings.allocation
        self._clock = clock
        self._rows: JobRows = {}
        self._waiting: Optional[List[str]] = None  # folders; None: the rows are not read yet
        self._sent: Set[str] = set()
        self._decided: Set[str] = set()
        self._tries: Dict[str, int] = {}
        self._pause_until = float("-inf")

    @property
    def is_read(self) -> bool:
        """Whether the rows from before this run are known."""
        return self._waiting is not None

    @property
    def is_busy(self) -> bool:
        """Whether a dispatcher is not started yet."""
        return self._waiting is None or bool(self._waiting)

    def rows_beside(self, rows: List[Any]) -> List[JobRow]:
        """The rows that were carried over and are not in Ray's own table."""
        own = {row.get("submission_id") for row in rows if isinstance(row, dict)}
        return [row for name, row in self._rows.items() if name not in own]

    def step(self, dashboard: DashboardClient) -> None:
        """Make one request for the first dispatch whose dispatcher is not started yet.

        Between two requests the head shows that it lives. A request that fails is made again,
        after those of the other dispatches.
        """
        if not self.is_busy or self._clock() < self._pause_until:
            return
        name = ""
        try:
            if self._waiting is None:
                self._waiting = self._take_over()
            elif self._waiting:
                name = os.path.basename(self._waiting[0])
                if self._start(dashboard, self._waiting[0]):
                    del self._waiting[0]
        except (OSError, ValueError, KeyError, Unanswered, RequestRefused) as error:
            self._failed(name, f"{error or type(error).__name__}")

    def clear(self) -> None:
        """Remove the archives of dispatches that no allocation continues.

        Their ids stay: they tell which rows of old job tables belong to them.
        """
        with suppress(OSError):  # what stays does no harm
            allocation, run = self._allocation, self._settings.run
            if allocation and not carried_over.carries_dispatches(allocation, run):
                for folder in carried_over.kept_dispatches(allocation):
                    _remove_archives(folder)

    def unfinished(self, rows: List[Any], out_of_time: bool) -> List[str]:
        """Ids of the dispatchers of dispatches that were started and are not decided.

        Args:
            rows: Ray's job table.
            out_of_time: only those whose dispatcher had no time for the remaining jobs. Another
                dispatcher that has died would die again.

        Raises:
            OSError: the dispatches cannot be read now.
        """
        table: Dict[str, Any] = dict(self._rows)
        table.update((str(row.get("submission_id")), row) for row in rows if isinstance(row, dict))
        names = []
        for folder, attempts in self._attempts(table).items():
            start = os.path.join(folder, carried_over.START)
            if folder in self._decided:
                continue
            if _is_decided(attempts) or not carried_over.exists(start):
                self._decided.add(folder)
                _remove_archives(folder)
            elif attempts:
                last = attempts[max(attempts)]
                if not out_of_time or last.exit_code == JobExit.OUT_OF_TIME:
                    names.append(os.path.basename(folder))
        return names

    def may_gain(self, names: List[str], rows: List[Any]) -> bool:
        """Whether the next allocation may do better; else they would follow each other for ever.

        It has all of its time for a dispatch that was handed over late in this one. Otherwise a
        job of a dispatch must have been started in this run, beside the dispatchers.
        """
        taken_over = {first_id(name) for name in self._rows}
        if not taken_over.issuperset(names):
            return True
        folders = carried_over.kept_dispatches(self._allocation)
        jobs = carried_over.kept_ids(self._allocation) - {*map(os.path.basename, folders)}
        return any(first_id(str(row.get("submission_id"))) in jobs and _began(row) for row in rows)

    def _take_over(self) -> List[str]:
        allocation, run = self._allocation, self._settings.run
        if not allocation or not carried_over.carries_dispatches(allocation, run):
            return []
        self._rows = carried_over.rows_before(allocation, run)
        # A dispatch without an attempt is of another allocation, or its client died early.
        return [
            folder
            for folder, attempts in self._attempts(self._rows).items()
            if attempts and not _is_decided(attempts)
        ]

    def _attempts(self, rows: JobRows) -> Dict[str, Dict[int, Attempt]]:
        """The attempts of the dispatchers, by the folder of the dispatch and number."""
        folders = carried_over.kept_dispatches(self._allocation)
        names = [os.path.basename(folder) for folder in folders]
        table = {name: attempt_of_row(row) for name, row in rows.items() if first_id(name) in names}
        attempts = attempts_of(names, table)
        return {folder: attempts[os.path.basename(folder)] for folder in folders}

    def _start(self, dashboard: DashboardClient, folder: str) -> bool:
        """Send the next archive of a dispatch, or start its dispatcher; whether that was done."""
        with open(os.path.join(folder, carried_over.START), encoding="utf-8") as file:
            start = json.load(file)
        for name in start["archives"]:
            if name not in self._sent:
                uploads = DashboardClient(dashboard.url, dashboard.token, _UPLOAD_S)
                with open(os.path.join(folder, name), "rb") as archive, closing(uploads):
                    uploads.put_package(name, archive.read())
                self._sent.add(name)
                return False
        body = start["body"]
        first = body["submission_id"]
        number = 1 + max(self._attempts(self._rows)[folder], default=0)
        body["submission_id"] = attempt_id(first, number)
        body["entrypoint"] = started_as(body["entrypoint"], body["submission_id"])
        dashboard.post(body)
        say(f"The chain {first} continues as {body['submission_id']}.")
        return True

    def _failed(self, name: str, why: str) -> None:
        """Print once that a request is made again; give a dispatch up after many tries."""
        self._pause_until = self._clock() + _PAUSE_S
        what = f"The chain {name} cannot continue" if name else "Earlier chains cannot be read"
        self._tries[name] = self._tries.get(name, 0) + 1
        is_given_up = self._tries[name] >= _TRIES
        if is_given_up:
            say(f"{what}, and {'is given up' if name else 'none of them continues here'}: {why}")
        elif self._tries[name] == 1:
            say(f"{what} yet: {why}")
        if not name:
            self._waiting = [] if is_given_up else None
        elif self._waiting:
            folder = self._waiting.pop(0)
            self._waiting += [] if is_given_up else [folder]


def _is_active(row: Any) -> bool:
    return isinstance(row, dict) and is_active(cast(JobRow, row))


def _began(row: Any) -> bool:
    """Whether the job of a row was started; one that waits for resources was not."""
    status = status_of_row(row)
    return status.state is not JobState.PENDING and status.reason is not Reason.START_TIMEOUT


def _is_decided(attempts: Mapping[int, Attempt]) -> bool:
    """Whether a dispatcher of a dispatch has decided all its jobs."""
    return any(
        attempt.status.state is JobState.SUCCEEDED or attempt.exit_code == JobExit.SOME_FAILED
        for attempt in attempts.values()
    )


def _remove_archives(folder: str) -> None:
    """Remove all files of a decided dispatch but its ids."""
    with suppress(OSError):  # what stays does no harm
        for name in os.listdir(folder):
            if name != carried_over.IDS:
                os.unlink(os.path.join(folder, name))
