"""How many elements a host may have in hand: pure."""

from __future__ import annotations

from typing import Optional

#: Seconds from an element's end until its host has another one, when that is not there already.
_ROUND_TRIP_S = 0.3
#: Elements that take longer wait where any host can take them.
_LONG_S = 3.0
#: So many for each slot at most: they are lost for others when the host has become slow.
_PER_SLOT_MAX = 64
#: Weight of the newest element in the mean.
_WEIGHT = 0.1


class ElementPace:
    """How long an element takes: the mean of those that have ended, newer ones weighing more."""

    def __init__(self) -> None:
        self.seconds: Optional[float] = None

    def measured(self, seconds: float) -> None:
        """Take one more into account."""
        if self.seconds is None:
            self.seconds = seconds
        else:
            self.seconds += _WEIGHT * (seconds - self.seconds)

    @property
    def patience_s(self) -> float:
        """For how long none may end on a host until those that wait there are for others."""
        return _LONG_S + 2 * (self.seconds or 0.0)

    def held(self, slots: int) -> int:
        """How many elements a host may have: those that run, and those that keep it busy until
        the driver has heard of their end."""
        if self.seconds is None or self.seconds > _LONG_S:
            return slots
        ahead = slots * _ROUND_TRIP_S / max(self.seconds, 1e-4)
        return slots + min(int(ahead) + 1, slots * _PER_SLOT_MAX)
