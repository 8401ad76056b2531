"""How long the processes of a node may go on that Ray counts as dead."""

from __future__ import annotations

import os

#: Seconds from a node's death until nothing of it runs: a node that was cut off goes on until its
#: raylet has noticed, Ray's ``gcs_rpc_server_reconnect_timeout_s`` (60), and its processes for some
#: moments more.
NODE_DEAD_S = 75.0


def node_dead_s() -> float:
    """``NODE_DEAD_S``, or less where this Ray's raylets notice sooner that they are alone."""
    try:
        # Ray writes the name in two cases.
        given = os.environ["RAY_gcs_rpc_server_reconnect_timeout_s"]  # noqa: SIM112
        return float(given) + NODE_DEAD_S - 60.0
    except (KeyError, ValueError):
        return NODE_DEAD_S
