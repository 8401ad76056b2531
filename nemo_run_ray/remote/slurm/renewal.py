"""The end of an allocation as its jobs see it, and when it ends so that the next one goes on."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Any, Callable, Dict, List, Optional

from ..attempts import first_id
from ..earlier import RENEWED, is_there, kept_ids
from ..states import JobState, Reason, status_of_row
from ..variables import ENDS_AT, LASTS_S, RENEWS
from .run_folder import CLUSTER_FAILED, HeadAddress, RunEnd
from .settings import Settings
from .spool import Spool

#: An allocation that is renewed ends by itself before its walltime, in time for jobs to end and for
#: its script to submit the next one: by a tenth of it, at least and at most so many seconds.
_MARGIN_MIN_S, _MARGIN_MAX_S = 30.0, 120.0
#: Seconds from the start of the node program to that of the first job, at most.
_FIRST_JOB_S = 30.0
#: In the folder of a run when Slurm has sent the job's script what ``--signal`` asks for.
SIGNALLED = "signalled"
_SIGNAL = "Slurm has sent the job's script SIGUSR1 or SIGUSR2, as --signal asks"


class Renewal:
    """What the head knows of the walltime of its allocation, and of the dispatches that go on.

    Args:
        settings: of the head.
        token_path: of the file with Ray's token.
        clock: seconds since the epoch.
    """

    def __init__(
        self, settings: Settings, token_path: str, clock: Callable[[], float] = time.time
    ) -> None:
        self._settings = settings
        self._spool = Spool(settings, token_path)
        self._clock = clock
        self._ends_at: Optional[float] = None
        self._lasts_s = 0.0
        if settings.ends_at is not None:
            left_s = settings.ends_at - clock()
            margin_s = min(max(left_s / 10, _MARGIN_MIN_S), _MARGIN_MAX_S) if settings.renew else 0
            self._ends_at = settings.ends_at - margin_s
            self._lasts_s = left_s - margin_s - _FIRST_JOB_S

    def environment(self) -> Dict[str, str]:
        """The variables by which a dispatcher knows how long its jobs may take."""
        if self._ends_at is None or not self._settings.life:
            return {}
        renews = "1" if self._settings.renew else "0"
        return {ENDS_AT: f"{self._ends_at:.0f}", LASTS_S: f"{self._lasts_s:.0f}", RENEWS: renews}

    def may_try_again(self) -> bool:
        """Whether another allocation shall try to bring Ray up, which this one could not.

        One does when the dispatches were at work in the allocation before: one bad node must not
        end a dispatch of days. A second failure in a row ends them.
        """
        life = self._settings.life
        if not (life and self._settings.renew):
            return False
        parent, number = os.path.split(life)
        with suppress(OSError, ValueError):
            if is_there(os.path.join(life, RENEWED)):
                runs = os.path.join(parent, str(int(number) - 1), "run")
                return any(
                    is_there(os.path.join(runs, run, "ready.json")) for run in os.listdir(runs)
                )
        return False

    def begin(self) -> None:
        """Forget dispatches that went on nowhere, before there is a cluster for others."""
        self._spool.clear()

    def step(self, head: HeadAddress) -> None:
        """Go on with starting the dispatchers of dispatches that go on here."""
        self._spool.step(head)

    @property
    def is_busy(self) -> bool:
        """Whether a dispatcher is not started yet."""
        return bool(self._settings.life) and self._spool.is_busy

    def end(self, rows: List[Any], is_idle: bool) -> Optional[RunEnd]:
        """The end by which the next allocation goes on; ``None`` while this one is of use.

        Args:
            rows: Ray's job table as it is now.
            is_idle: whether no job of it goes on.
        """
        if not self._settings.renew or self._ends_at is None:
            return None
        has_signal = os.path.exists(os.path.join(self._settings.run, SIGNALLED))
        is_late = self._clock() >= self._ends_at or has_signal
        try:
            dispatches = self._spool.open_dispatches(rows, out_of_time=not is_late)
            if not dispatches or not (is_late or is_idle) or not self._is_of_use(dispatches, rows):
                return RunEnd(CLUSTER_FAILED, _SIGNAL) if has_signal else None
        except OSError:  # the dispatches cannot be read now
            return None
        why = "its walltime is over" if is_late else "what is left needs more time than it has"
        return RunEnd(0, why, True)

    def _is_of_use(self, dispatches: List[str], rows: List[Any]) -> bool:
        """Whether the next allocation may do better; else they would follow each other for ever.

        It has all of its time for a dispatch that was handed over late in this one. Otherwise a
        job of a dispatch must have been started in this run, beside the dispatchers.
        """
        if not all(self._spool.is_taken_over(name) for name in dispatches):
            return True
        jobs = kept_ids(self._settings.life) - self._spool.dispatchers()
        return any(first_id(str(row.get("submission_id"))) in jobs and _began(row) for row in rows)


def _began(row: Any) -> bool:
    """Whether the job of a row was started; one that waits for room was not."""
    status = status_of_row(row)
    return status.state is not JobState.PENDING and status.reason is not Reason.START_TIMEOUT
