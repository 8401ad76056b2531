"""An array's driver and hosts without processes, on a cluster that a test holds in its hand."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nemo_run_ray.remote.array import driver as driver_module
from nemo_run_ray.remote.array.driver import ArrayDriver, Host
from nemo_run_ray.remote.array.elements import HostRecord, Leases
from nemo_run_ray.remote.fit import Node
from nemo_run_ray.remote.hosts.actors import ReplicaHandle
from nemo_run_ray.remote.spec import ArraySpec, JobSpec, RoleSpec

ID = "e_1.array"
ROLE = RoleSpec("element", JobSpec(("true",)), resources={"CPU": 1.0})


def close(leases: Leases) -> None:
    """Let another driver have the journal."""
    leases._file.close()
    for file in (leases._journal, leases._results):
        os.close(file.fd)


class Ray:
    """A cluster of nodes that have two processors each and run nothing else."""

    def __init__(self) -> None:
        self.alive = ["n1", "n2"]
        self.busy: list[str] = []
        self.killed: list[object] = []

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

    def kill(self, handle: object, no_restart: bool) -> None:
        self.killed.append(handle)


class Actors:
    """Keeps what hosts were told; nobody answers."""

    def __init__(self, ray: Ray) -> None:
        self.ray = ray
        self.orders: list[tuple[int, dict[str, Any]]] = []

    def order(self, replica: ReplicaHandle, order: dict[str, Any]) -> None:
        self.orders.append((replica.replica_id[1], order))


class Starts:
    """Starts hosts that have no processes, and programs that sweep when the test says so."""

    def __init__(self, ray: Ray) -> None:
        self.ray, self.actors = ray, Actors(ray)
        self.sweeps: dict[str, list[int]] = {}
        self.answers: dict[str, dict[str, Any]] = {}
        self.forgotten: list[str] = []

    def free(self) -> dict[str, dict[str, float]]:
        return {node: {"CPU": 2.0} for node in self.ray.alive if node not in self.ray.busy}

    def start(self, record: HostRecord, node: Node, slots: int) -> Host:
        place = ("element", record.number), ROLE, node, record.tag, record.run_dir
        return Host(*place, actor=SimpleNamespace(), slots=slots)

    def sweep(self, node_id: str, records: list[HostRecord]) -> dict[str, Any] | None:
        self.sweeps[node_id] = [record.number for record in records]
        return self.answers.pop(node_id, None)

    def forget(self, node_id: str, run_dirs: list[str]) -> None:
        self.forgotten.extend(run_dirs)


class Cluster:
    """An array of twelve elements on two nodes, with a host on each."""

    def __init__(self, leases: Leases, spec: ArraySpec, folder: Path) -> None:
        self.passed_s = 0.0
        self.leases, self.ray = leases, Ray()
        self.starts = Starts(self.ray)
        self.actors = self.starts.actors
        self.runner = SimpleNamespace(order=lambda: None, ending="", cancelled=False)
        self.driver = ArrayDriver(self.runner, spec, leases, self.starts, str(folder), ID)

    def now(self) -> float:
        return time.monotonic() + self.passed_s

    def look(self, later_s: float = 0.0) -> None:
        """Let some seconds pass, and look."""
        self.passed_s += later_s
        self.driver.look(self.now())

    def on(self, node: str) -> list[Host]:
        """The hosts on a node."""
        return [host for host in self.driver.hosts.values() if host.node.node_id == node]

    def held(self, host: Host) -> dict[int, int]:
        return self.leases.progress.held[host.number]

    def tells(self, teller: Host, *reports: dict[str, Any], **report: Any) -> None:
        """Let a host report something, or several things at once."""
        teller.answers = True
        for one in [*reports, *([report] if report else [])]:
            self.driver.hear(teller, one)

    def ready(self, *hosts: Host) -> None:
        for host in hosts:
            self.tells(host, at="prepared")

    def dies(self, host: Host) -> None:
        self.tells(host, at="gone", was_killed=False)  # and it was not told to leave
        self.look()

    def sweep(self, *hosts: Host, ended: Any = (), begun: Any = ()) -> None:
        """Let a program end what dead hosts have left, and read their notes."""
        rows = [[host.number, ended, begun] for host in hosts]
        answer = {"swept": rows, "remaining": ""}
        self.starts.answers[hosts[0].node.node_id] = answer
        self.look()

    def feed(self) -> None:
        self.driver.lease()

    def end_all(self, host: Host) -> None:
        """Let all elements of a host succeed, and those that it gets after them."""
        while self.held(host):
            element, attempt = next(iter(self.held(host).items()))
            self.tells(host, at="ended", row=[element, attempt, 0, 0.01, "exit code 0"])
            self.feed()

    def attempts(self) -> list[int]:
        """How often each element was begun, as far as is known."""
        stretches = self.leases.progress.stretches()
        return [one[3] for one in stretches for _ in range(one[0], one[1] + 1)]


class Drive:
    """A driver whose every turn takes a second.

    Hosts do at once what they are told, but those that are ``stuck``; ``later`` is done after so
    many seconds.
    """

    def __init__(self, cluster: Cluster, monkeypatch: Any) -> None:
        self.cluster, self.seconds, self.code = cluster, 0, -1
        self.stuck: set[int] = set()
        self.later: dict[int, Callable[[], object]] = {}
        cluster.actors.answers = self._answers
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

    def _answers(self) -> Iterator[tuple[ReplicaHandle, list[dict[str, Any]]]]:
        self._pass()
        told, self.cluster.actors.orders[:] = list(self.cluster.actors.orders), []
        for number, order in told:
            host = self.cluster.driver.hosts.get(number)
            if host is not None and number not in self.stuck:
                if order["do"] == "end":
                    self.cluster.tells(host, at="idle")
                if order["do"] == "leave":
                    self.cluster.tells(host, at="gone", was_killed=False)
        yield from ()
