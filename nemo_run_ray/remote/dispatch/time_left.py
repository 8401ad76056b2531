"""How long the cluster of a dispatcher still lasts, where its allocation has an end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping, Optional

from ..variables import ENDS_AT, LASTS_S, RENEWS

#: Seconds before an allocation is renewed in which no job begins: Ray's job table is written down
#: then, and what it lacks would begin again.
CLOSING_S = 5.0


@dataclass(frozen=True)
class TimeLeft:
    """What is left of an allocation.

    Attributes:
        left_s: seconds from now until it ends.
        lasts_s: seconds that it lasts in all.
        renews: whether jobs go on in another one.
    """

    left_s: float
    lasts_s: float
    renews: bool

    def why_never(self, time_s: Optional[float]) -> str:
        """Why a job that needs so many seconds is not started at all; empty if it may be."""
        if time_s is None or time_s <= self.left_s:
            return ""
        if self.renews and time_s <= self.lasts_s:
            return ""  # in the next one
        if self.renews:
            return f"it needs {time_s:g} s, and each allocation lasts {self.lasts_s:.0f} s"
        return f"it needs {time_s:g} s, and its allocation ends in {max(self.left_s, 0):.0f} s"

    def has(self, time_s: Optional[float]) -> bool:
        """Whether a job that needs so many seconds may begin now."""
        if self.renews and self.left_s < CLOSING_S:
            return False  # the next allocation would not know that it has begun
        return time_s is None or time_s <= self.left_s


def time_left(env: Mapping[str, str], now: float) -> Optional[TimeLeft]:
    """What is left by a job's environment; ``None`` where nothing ends the cluster.

    Args:
        env: of the dispatcher.
        now: seconds since the epoch.
    """
    try:
        return TimeLeft(float(env[ENDS_AT]) - now, float(env[LASTS_S]), env.get(RENEWS) == "1")
    except (KeyError, ValueError):
        return None
