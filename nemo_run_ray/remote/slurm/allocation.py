"""The users of an allocation that serves a cluster by name, and when it has none any more.

The client has made the folder of the allocation, below that of the cluster::

    dispatches/…    dispatches that go on in the next allocation, see ``../earlier.py``
    lives/3/
        ray.sub     the script of the job
        job         Slurm's number of the job
        run/, logs/ what the job writes, see ``run_folder.py``
        users/…     one file for each program that uses the cluster and stays
        released    the last of them has left
        keep        the cluster stays although nobody uses it
        over        why there is nothing to be had of it any more
        stop        why it has to end now, also when Slurm does not end it
        renewed     it goes on with the dispatches of the one before

A folder with a higher number means that this allocation was given up.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from typing import Any, Callable, List, Optional, Set, cast

from ..earlier import TABLE
from ..end_record import LostEnds
from ..files import write_file
from ..node.output import say
from ..rows import JobRow
from ..states import is_active
from .dashboard import answer_of, log_end
from .renewal import Renewal
from .run_folder import HeadAddress, RunEnd
from .settings import Settings

#: Names in the folder of an allocation.
USERS, RELEASED, KEEP, OVER, STOP = "users", "released", "keep", "over", "stop"
#: Seconds between two looks at Ray's job table, and at whether it has to end now.
_LOOK_S, _STOP_LOOK_S = 5.0, 5.0
#: How often Ray is asked for its last job table, of which dispatches go on.
_LAST_TRIES = 3


class Allocation:
    """What the head knows of the users of its allocation.

    Args:
        settings: of the head; without ``life`` nothing is watched.
        token_path: of the file with Ray's token.
        renewal: what it knows of the walltime, and of dispatches that go on.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        settings: Settings,
        token_path: str,
        renewal: Renewal,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._renewal = renewal
        self._token_path = token_path
        self._clock = clock
        self._looked_at = self._asked_at = float("-inf")
        self._stopped = ""
        self._idle_since: Optional[float] = None
        self._kept = ""
        self._head: Optional[HeadAddress] = None
        self._ends = LostEnds(self._log_end)
        self._rows: List[Any] = []
        self._seen_users: Set[str] = set()
        #: Ray's name of this life of the cluster; empty until its dashboard has told it.
        self.session = ""

    def end(self, head: HeadAddress) -> Optional[RunEnd]:
        """How it ends because nobody needs it any more; ``None`` while a client may.

        Args:
            head: where Ray's dashboard is.
        """
        if not self._settings.life:
            return None
        self._renewal.step(head)
        now = self._clock()
        if now - self._looked_at < _LOOK_S:
            return None
        self._looked_at = now
        if not self.session:
            self._ask_session(head)
        rows = self.keep_table(head)
        is_idle = rows is not None and not any(_goes_on(row) for row in rows)
        is_idle = is_idle and not self._renewal.is_busy
        # A dashboard that hangs does not keep the next allocation from its turn.
        self._rows = self._rows if rows is None else rows
        next_one = self._renewal.end(self._rows, is_idle)
        if next_one is not None:
            return next_one
        if not is_idle:
            self._idle_since = None
            return None
        # Whoever has come since needs time to submit.
        users = self._users() or set()
        if self._idle_since is None or users - self._seen_users:
            self._idle_since = now
        self._seen_users |= users
        why = "" if self._idle_since == now else self._why_idle(now - self._idle_since)
        return RunEnd(0, why) if why else None

    def why_stopped(self) -> str:
        """Why a client has stopped this allocation, as seen by the last look; empty while none has.

        Slurm's controller may not have heard of that: it was away when the client asked it.
        """
        now = self._clock()
        if self._settings.life and not self._stopped and now - self._asked_at >= _STOP_LOOK_S:
            self._asked_at = now
            path = os.path.join(self._settings.life, STOP)
            with suppress(OSError), open(path, encoding="utf-8") as file:  # nobody has
                self._stopped = file.read().strip()
        return self._stopped

    def keep_table(self, head: HeadAddress) -> Optional[List[Any]]:
        """Ray's job table, kept for those who look when the allocation has ended.

        It is ``None`` when Ray does not answer.
        """
        rows = answer_of(head, self._token_path, "/api/jobs/")
        if not isinstance(rows, list):
            return None
        self._head = head
        rows = [self._ends.restored(row) for row in rows]
        text = json.dumps(rows)
        if text != self._kept:
            with suppress(OSError):  # the next look tries again
                write_file(os.path.join(self._settings.run, TABLE), text)
                self._kept = text
        return rows

    def keep_last_table(self, head: HeadAddress, end: RunEnd) -> None:
        """Keep the table of which the next allocation takes what has become of its jobs."""
        for _ in range(_LAST_TRIES if end.renews else 1):
            if self.keep_table(head) is not None:
                return
        if end.renews:
            say(
                "Ray does not tell its job table. Jobs that have ended since the last look are "
                "taken for jobs that the walltime has ended."
            )

    def _log_end(self, node: str, submission_id: str) -> Optional[str]:
        if self._head is None:
            return None
        return log_end(self._head, self._token_path, node, submission_id)

    def _why_idle(self, idle_s: float) -> str:
        life, limit_s = self._settings.life, self._settings.idle_timeout_s
        kept = os.path.exists(os.path.join(life, KEEP))
        released = os.path.exists(os.path.join(life, RELEASED))
        if released and not kept and self._users() == set():
            return "its last user has left, and no job runs"
        if limit_s is not None and idle_s >= limit_s:
            return f"no job has run for {limit_s:g} s"
        return ""

    def _users(self) -> Optional[Set[str]]:
        """Names of the programs that use it; ``None`` when the folder cannot be read now."""
        with suppress(OSError):
            return set(os.listdir(os.path.join(self._settings.life, USERS)))
        return None

    def _ask_session(self, head: HeadAddress) -> None:
        version = answer_of(head, self._token_path, "/api/version")
        if isinstance(version, dict):
            self.session = str(version.get("session_name") or "")


def _goes_on(row: Any) -> bool:
    return isinstance(row, dict) and is_active(cast(JobRow, row))
