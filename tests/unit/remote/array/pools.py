"""An array's driver and hosts without processes, on a cluster that a test holds in its hand."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from nemo_run_ray.remote.array import driver as driver_module
from nemo_run_ray.remote.array.driver import ArrayDriver
from nemo_run_ray.remote.array.elements import ElementState, Leases
from nemo_run_ray.remote.array.hosts import Host, HostPool, HostRecord, HostState
from nemo_run_ray.remote.fit import Node
from nemo_run_ray.remote.hosts.actors import Actor, ReplicaHandle
from nemo_run_ray.remote.hosts.calls import Died, Pulled
from nemo_run_ray.remote.spec import ArraySpec, JobSpec, RoleSpec

ID = "e_1.array"
ROLE = RoleSpec("element", JobSpec(("true",)), resources={"CPU": 1.0})


class Ray:
    """A cluster of nodes that have two processors each and run nothing else."""

    def __init__(self) -> None:
        self.alive = ["n1", "n2"]
        self.busy: list[str] = []
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
                "Labels": {"pool": "gpu"} if node == "n2" else None,
            }
            for node in self.alive
        ]

    def _free(self) -> dict[str, dict[str, float]]:
        return {node: {"CPU": 2.0} for node in self.alive if node not in self.busy}

    def kill(self, handle: object, no_restart: bool) -> None:
        self.killed.append(handle)


class Starts:
    """Starts hosts that have no processes."""

    def start(self, record: HostRecord, node: Node, slots: int) -> Host:
        replica = ReplicaHandle(("element", record.number), ROLE, node, 0, record.tag, "run")
        replica.actor = Actor(SimpleNamespace(), [replica])
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
        self.runner = SimpleNamespace(order=lambda: None, ending="", cancelled=False)
        status = SimpleNamespace(write=lambda *_: None)
        requests = SimpleNamespace(find=lambda _: [])
        self.driver = ArrayDriver(
            self.runner, spec, leases, self.pool, self.calls, status, requests
        )

    def now(self) -> float:
        return time.monotonic() + self.passed_s

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

    def tells(self, teller: Host, *reports: dict[str, Any], **report: Any) -> None:
        """Let a host report something, or several things at once."""
        key, seen = f"element/{teller.record.number}", teller.replica.seen
        rows = {key: (seen, [json.dumps(one) for one in [*reports, *([report] if report else [])]])}
        teller.actor.answers = True
        self.driver.hear(Pulled(teller.actor, teller.record.node_id, rows))

    def ready(self, *hosts: Host) -> None:
        for host in hosts:
            self.tells(host, at="prepared")

    def dies(self, host: Host) -> Host:
        """Let a host die; the one that is to end what it has left."""
        self.tells(host, at="gone")
        self.look()
        return self.sweeper(host.record.node_id)

    def sweep(self, host: Host, ended: Any = (), begun: Any = ()) -> None:
        """Let another host end what a dead one has left, and read its notes."""
        number = host.record.number
        sweeper = self.sweeper(host.record.node_id)
        self.tells(sweeper, at="swept", host=number, ended=ended, begun=begun)
        self.look()
        if sweeper.state is HostState.LEAVING:
            self.tells(sweeper, {"at": "left"}, {"at": "gone", "left": 0})

    def feed(self) -> None:
        self.driver.lease()

    def end_all(self, host: Host) -> None:
        """Let all elements of a host succeed, and those that it gets after them."""
        while host.in_hand:
            element, attempt = next(iter(host.in_hand.items()))
            self.tells(host, at="ended", row=[element, attempt, 0, 0.01, "exit code 0"])
            self.feed()

    def attempts(self) -> list[int]:
        """How often each element was begun, as far as is known."""
        stretches = self.leases.progress.stretches()
        return [one.attempts for one in stretches for _ in range(one.first, one.last + 1)]


class Drive:
    """A driver whose every turn takes a second.

    Hosts do at once what they are told, but those that are ``stuck``; ``later`` is done after so
    many seconds.
    """

    def __init__(self, cluster: Cluster, monkeypatch: Any) -> None:
        self.cluster, self.seconds, self.code = cluster, 0, -1
        self.stuck: set[int] = set()
        self.later: dict[int, Callable[[], object]] = {}
        cluster.calls.repeat, cluster.calls.answers = lambda: None, self._answers
        clock = SimpleNamespace(monotonic=cluster.now, sleep=lambda _: self._pass())
        monkeypatch.setattr(driver_module, "time", clock)

    def cancel(self) -> None:
        self.cluster.runner.order = lambda: b"T"

    def run(self) -> str:
        """Run it to its end; how it ended in words."""
        self.code = self.cluster.driver.run()
        return str(self.cluster.runner.ending)

    def _pass(self) -> None:
        self.seconds += 1
        self.cluster.passed_s += 1
        assert self.seconds < 600, "it does not end"
        self.later.pop(self.seconds, lambda: None)()

    def _answers(self) -> Iterator[Died]:
        self._pass()
        told, self.cluster.calls.orders[:] = list(self.cluster.calls.orders), []
        for number, order in told:
            host = self.cluster.pool.hosts.get(number)
            if host is not None and number not in self.stuck:
                if order["do"] == "end":
                    self.cluster.tells(host, at="idle")
                if order["do"] == "leave":
                    self.cluster.tells(host, {"at": "left"}, {"at": "gone", "left": 0})
        yield from ()
