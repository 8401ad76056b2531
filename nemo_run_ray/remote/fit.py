"""What the nodes of a cluster can host: pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Iterable, List, Mapping


@dataclass(frozen=True)
class Node:
    """One living node of the cluster, with all that it can give, busy or not."""

    node_id: str
    host: str
    address: str
    labels: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, float] = field(default_factory=dict)


def nodes_of(rows: Iterable[Mapping[str, Any]]) -> List[Node]:
    """The living nodes of ``ray.nodes()``."""
    return [
        Node(
            node_id=str(row["NodeID"]),
            host=str(row["NodeManagerHostname"]),
            address=str(row["NodeManagerAddress"]),
            labels=dict(row.get("Labels") or {}),
            resources=dict(row.get("Resources") or {}),
        )
        for row in rows
        if row.get("Alive")
    ]
