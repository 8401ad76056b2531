"""The slots of a host: each runs one element at a time, with GPUs of its own."""

from __future__ import annotations

import os
from typing import Dict, List, Tuple

_VISIBLE = "CUDA_VISIBLE_DEVICES"


class Slots:
    """Slots that are free.

    Args:
        count: of all slots.
        gpus: of one element; a part is a share of a GPU that slots have together.
    """

    def __init__(self, count: int, gpus: float) -> None:
        self._free: List[int] = list(range(count - 1, -1, -1))
        self._gpus = gpus
        given = os.environ.get(_VISIBLE, "")
        self._devices = given.split(",") if given else []

    @property
    def is_free(self) -> bool:
        return bool(self._free)

    def take(self) -> Tuple[int, Dict[str, str]]:
        """A free slot, and the variables of what runs in it."""
        slot = self._free.pop()
        return slot, self._variables(slot)

    def give_back(self, slot: int) -> None:
        """Let another element have the slot."""
        self._free.append(slot)

    def _variables(self, slot: int) -> Dict[str, str]:
        if not self._gpus or not self._devices:
            return {}
        if self._gpus < 1:
            own = [self._devices[int(slot * self._gpus + 1e-6) % len(self._devices)]]
        else:
            each = int(self._gpus)
            own = self._devices[slot * each : (slot + 1) * each]
        return {_VISIBLE: ",".join(own)}
