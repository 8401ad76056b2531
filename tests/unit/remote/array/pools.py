"""An array's hosts without processes, on a cluster that a test holds in its hand."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any

from nemo_run_ray.remote.array.driver import HostReports, lease_elements
from nemo_run_ray.remote.array.elements import ElementState, Leases
from nemo_run_ray.remote.array.hosts import Host, HostPool, HostRecord
from nemo_run_ray.remote.fit import Node
from nemo_run_ray.remote.hosts.actors import Actor, ReplicaHandle
from nemo_run_ray.remote.hosts.calls import Pulled
from nemo_run_ray.remote.spec import ArraySpec, JobSpec, RoleSpec

ID = "e_1.array"
ROLE = RoleSpec("element", JobSpec(("true",)), resources={"CPU": 1.0})


STUCK = "stuck"


class RayError(Exception):
    pass


class Ray:
    """A cluster of nodes that have two processors each and run nothing else.

    All calls succeed, but those that are answered with ``STUCK``.
    """

    exceptions = SimpleNamespace(RayError=RayError)

    def __init__(self) -> None:
        self.alive = ["n1", "n2"]
        self.killed: list[object] = []
        free = SimpleNamespace(available_resources_per_node=self._free)
        self._private = SimpleNamespace(state=free)

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {
                "NodeID": node,
                "NodeManagerHostname": node,
                "NodeManagerAddress": node,
                "Alive": True,
                "Resources": {"CPU": 2.0},
            }
            for node in self.alive
        ]

    def _free(self) -> dict[str, dict[str, float]]:
        return {node: {"CPU": 2.0} for node in self.alive}

    def kill(self, handle: object, no_restart: bool) -> None:
        self.killed.append(handle)

    def wait(self, references: list[object], timeout: float) -> tuple[list[object], list[object]]:
        return references, []

    def get(self, reference: object) -> bool:
        return reference != STUCK


class Starts:
    """Starts hosts that have no processes."""

    def start(self, record: HostRecord, node: Node, slots: int) -> Host:
        replica = ReplicaHandle(("element", record.number), ROLE, node, 0, record.tag, "run")
        order, close = (SimpleNamespace(remote=lambda *_: object()) for _ in range(2))
        replica.actor = Actor(SimpleNamespace(order=order, close=close), [replica])
        return Host(record, replica, replica.actor, slots, time.monotonic())

    def prepare(self, host: Host) -> dict[str, Any]:
        return {"do": "prepare"}


class Calls:
    """Keeps what hosts were told; nobody answers."""

    def __init__(self) -> None:
        self.orders: list[tuple[int, dict[str, Any]]] = []

    def order(self, replica: ReplicaHandle, order: dict[str, Any]) -> None:
        self.orders.append((replica.replica_id[1], order))

    def pull(self, actor: Actor) -> None: ...


class Cluster:
    """An array of twelve elements on two nodes, with a host on each."""

    def __init__(self, leases: Leases, spec: ArraySpec) -> None:
        self.passed_s = 0.0
        self.leases, self.calls, self.ray = leases, Calls(), Ray()
        self.pool = HostPool(self.ray, spec, ID, Starts(), self.calls, leases)
        self.reports = HostReports(leases, self.pool, self.calls)
        self.look()

    def now(self) -> float:
        return time.monotonic() + self.passed_s

    def sleep(self, seconds: float) -> None:
        self.passed_s += seconds

    def look(self, later_s: float = 0.0) -> None:
        """Let some seconds pass, and look."""
        self.passed_s += later_s
        self.pool.look(self.now(), self.leases.progress.number(ElementState.WAITING))

    def on(self, node: str) -> list[Host]:
        """The hosts on a node that run elements."""
        hosts = self.pool.hosts.values()
        return [host for host in hosts if host.record.node_id == node and host.slots]

    def sweeper(self, node: str) -> Host:
        (found,) = [
            host for host in self.pool.hosts.values() if host.sweeps and host.record.node_id == node
        ]
        return found

    def tells(self, teller: Host, **report: Any) -> None:
        """Let a host report something."""
        self.answers(teller, report)

    def answers(self, teller: Host, *reports: dict[str, Any]) -> None:
        """Let a host report several things at once."""
        key, seen = f"element/{teller.record.number}", teller.replica.seen
        rows = {key: (seen, [json.dumps(report) for report in reports])}
        teller.actor.answers = True
        self.reports.hear(Pulled(teller.actor, teller.record.node_id, rows))

    def ready(self, *hosts: Host) -> None:
        for host in hosts:
            self.tells(host, at="prepared")

    def feed(self) -> None:
        lease_elements(self.leases, self.pool, self.calls)

    def attempts(self) -> list[int]:
        """How often each element was begun, as far as is known."""
        stretches = self.leases.progress.stretches()
        return [one.attempts for one in stretches for _ in range(one.first, one.last + 1)]
