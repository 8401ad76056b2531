"""Which nodes Ray counts as alive, as its dashboard tells the head."""

from __future__ import annotations

import time
from typing import Dict, FrozenSet, Mapping, Optional

from .dashboard import answer_of
from .run_folder import HeadAddress, NodeReport

#: Seconds between two questions, before the cluster is ready and after.
_PAUSE_S, _PAUSE_READY_S = 0.5, 5.0


class RayNodes:
    """Ray's own list of nodes, asked now and then.

    Args:
        token_path: of the file with Ray's token.
    """

    def __init__(self, token_path: str) -> None:
        self._token_path = token_path
        self._asked_at = float("-inf")
        self._missing_since: Dict[int, float] = {}
        #: Addresses of the nodes that are alive; ``None`` until the dashboard has answered.
        self.alive: Optional[FrozenSet[str]] = None

    def ask(self, head: HeadAddress, reports: Mapping[int, NodeReport], is_ready: bool) -> None:
        """Ask, when it is time to. A dashboard that is busy leaves the last answer as it is."""
        pause = _PAUSE_READY_S if is_ready else _PAUSE_S
        if time.monotonic() - self._asked_at < pause:
            return
        alive = self._answer(head)
        self._asked_at = time.monotonic()
        if alive is None:
            return
        self.alive = alive
        for rank, report in reports.items():
            if is_ready and rank and report.address and report.address not in alive:
                self._missing_since.setdefault(rank, self._asked_at)
            else:
                self._missing_since.pop(rank, None)

    def missing_for_s(self) -> Dict[int, float]:
        """How long each node has been missing that Ray once had, by rank."""
        return {rank: self._asked_at - since for rank, since in self._missing_since.items()}

    def _answer(self, head: HeadAddress) -> Optional[FrozenSet[str]]:
        found = answer_of(head, self._token_path, "/api/v0/nodes?limit=10000")
        try:
            rows = found["data"]["result"]["result"]
            return frozenset(str(row["node_ip"]) for row in rows if row["state"] == "ALIVE")
        except (KeyError, TypeError):
            return None
