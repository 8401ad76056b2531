"""Asking for the end of jobs again and again, until there is one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from nemo_run_ray.dashboard.jobs import JobsApi
from nemo_run_ray.errors import ClusterError, Unanswered
from nemo_run_ray.remote.attempts import STOP_AGAIN_S, STOP_TRUST_S

#: Seconds beyond the grace period until a cancelled job must be terminal, and all jobs of a
#: dispatch, which end one after the other.
JOB_MARGIN_S, DISPATCH_MARGIN_S = 40.0, 60.0
#: Seconds that a cluster may take for its first answer.
_AWAY_S = 20.0
_TURN_S = 0.2
_T = TypeVar("_T")


def insist(turn: Callable[[], _T | None], limit_s: float, what: str) -> _T:
    """Take one turn after the other until one gives something, and return that.

    Args:
        turn: looks and asks; a cluster that does not answer is asked again in the next turn.
        limit_s: seconds for all turns.
        what: the object, for the error: ``the job …``.

    Raises:
        ClusterError: no turn gave anything in that time.
    """
    began = time.monotonic()
    trouble: Unanswered | None = None
    has_answered = False
    while time.monotonic() < began + (limit_s if has_answered else min(limit_s, _AWAY_S)):
        try:
            found = turn()
            if found is not None:
                return found
            trouble, has_answered = None, True
        except Unanswered as error:
            trouble = error
        time.sleep(_TURN_S)
    if trouble is not None and not has_answered:
        raise ClusterError(
            f"It is not known whether {what} was told to end. {trouble} Cancel it "
            "again when the cluster answers."
        ) from trouble
    reason = "it goes on." if trouble is None else str(trouble)
    raise ClusterError(
        f"Within {limit_s:.0f} s of being cancelled {what} did not end: {reason} Cancel it again, "
        "or look at it in Ray's dashboard."
    )


class Stops:
    """The requests to stop what one cancellation is about."""

    def __init__(self, api: JobsApi) -> None:
        self._api = api
        self._began_at = time.monotonic()
        self._asked_at: dict[str, float] = {}

    def ask(self, submission_id: str) -> None:
        """Ask Ray to stop it, unless it was asked a moment ago."""
        now = time.monotonic()
        if now - self._asked_at.get(submission_id, -STOP_AGAIN_S) >= STOP_AGAIN_S:
            self._api.stop(submission_id)
            self._asked_at[submission_id] = now

    @property
    def are_trusted(self) -> bool:
        """Whether what is still pending waits for room, and Ray holds it back from its start."""
        return max(self._asked_at.values(), default=0.0) - self._began_at >= STOP_TRUST_S
