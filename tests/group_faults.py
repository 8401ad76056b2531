"""The faults of a group, struck on one host by ``tests/ray`` and on several by ``tests/hosts``."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import psutil

from nemo_run_ray import PortProbe
from nemo_run_ray.clusters import Cluster
from nemo_run_ray.dashboard.jobs import JobsApi
from nemo_run_ray.experiment.job import RemoteJob
from tests.conftest import wait_for
from tests.groups import Role, assert_nothing_left, finish, submit

STAYS = 'echo "client runs"; sleep 600'
STUBBORN = "trap '' TERM\n{python} -m http.server $NEMO_RUN_SERVER_PORT_HTTP >/dev/null 2>&1"
FORKS = "sleep 1000 &\nsetsid sleep 1000 &\n(sleep 1000 &)\necho forked; kill -9 $$"


class Bench(Protocol):
    """A Ray whose groups are struck, and the processes on its hosts."""

    @property
    def cluster(self) -> Cluster: ...

    @property
    def api(self) -> JobsApi: ...

    def leftovers(self) -> list[str]:
        """What groups hold on the cluster."""

    def processes(self, wanted: Callable[[int, list[str]], bool]) -> list[int]:
        """The processes of this Ray, and of nobody else, for which this holds of id and words."""

    def server(self, *program: str, **fields: object) -> Role: ...

    def client(self, *program: str, **fields: object) -> Role: ...


@dataclass
class Fault:
    """One group, what happens to it, and how it must end.

    Attributes:
        roles: of the group.
        state, reason: of the job at its end.
        cause: a text that must be in its log.
        strike: happens when the client runs; gets the Ray, the job and the seed's random numbers.
    """

    roles: Callable[[Bench], list[Role]]
    state: str
    reason: str
    cause: str
    strike: Callable[[Bench, RemoteJob, random.Random], None] | None = None


def pair(bench: Bench) -> list[Role]:
    return [bench.server(), bench.client(STAYS)]


def ours(bench: Bench, job: RemoteJob) -> list[int]:
    """Our processes on the head: the one that Ray started, and the driver that it started."""
    return sorted(bench.processes(lambda _, words: job.id in words and "-I" in words))


def kill_driver(bench: Bench, job: RemoteJob, chance: random.Random) -> None:
    _, driver = ours(bench, job)
    os.kill(driver, signal.SIGKILL)


def kill_supervisor(bench: Bench, job: RemoteJob, chance: random.Random) -> None:
    supervisor, _ = ours(bench, job)
    os.kill(supervisor, signal.SIGKILL)


def kill_actor(bench: Bench, job: RemoteJob, chance: random.Random) -> None:
    actors = bench.processes(lambda _, words: words[0].startswith("ray::Replica"))
    os.kill(chance.choice(actors), signal.SIGKILL)


def replicas_and_watchdogs(bench: Bench) -> tuple[list[int], list[int]]:
    """The replicas' processes, and their parents, which outlive them."""
    found = bench.processes(lambda _, words: any(one.endswith("group.replica") for one in words))
    replicas = [pid for pid in found if psutil.Process(pid).ppid() in found]
    return replicas, [pid for pid in found if pid not in replicas]


def kill_replica(bench: Bench, job: RemoteJob, chance: random.Random) -> None:
    os.kill(chance.choice(replicas_and_watchdogs(bench)[0]), signal.SIGKILL)


def kill_watchdog(bench: Bench, job: RemoteJob, chance: random.Random) -> None:
    os.kill(chance.choice(replicas_and_watchdogs(bench)[1]), signal.SIGKILL)
    for sleeps in bench.processes(lambda _, words: words[:2] == ["sleep", "599"]):
        os.kill(sleeps, signal.SIGTERM)  # now the client may end


def stop(bench: Bench, job: RemoteJob, chance: random.Random) -> None:
    bench.api.stop(job.id)


_ready = PortProbe("http", interval_s=0.2, timeout_s=3)
FAULTS = {
    "the driver is killed": Fault(
        pair, "FAILED", "killed by a signal", "process on this node was killed", kill_driver
    ),
    "the first process is killed": Fault(
        pair,
        "FAILED",
        "killed by a signal",
        "this program's first process was killed",
        kill_supervisor,
    ),
    "an actor is killed": Fault(
        pair, "FAILED", "its node or its supervisor died", "Ray's worker there died", kill_actor
    ),
    "a replica's process is killed": Fault(
        pair, "FAILED", "its node or its supervisor died", "was killed", kill_replica
    ),
    "a watchdog of a replica is killed": Fault(
        lambda bench: [bench.server(), bench.client('echo "client runs"; sleep 599; sleep 3')],
        "SUCCEEDED",
        "",
        "client/0 on",
        kill_watchdog,
    ),
    "the job is stopped": Fault(pair, "CANCELLED", "cancelled", "end", stop),
    "a service exits with 0": Fault(
        lambda bench: [bench.server("sleep 1", ready=None), bench.client(STAYS)],
        "FAILED",
        "a service ended before the primaries",
        "the service server/0 ended before the primaries: exit code 0",
    ),
    "a service is never ready": Fault(
        lambda bench: [bench.server("sleep 600", ready=_ready), bench.client(STAYS)],
        "FAILED",
        "a service was not ready in time",
        "server/0: not ready within 3 s: port ",
    ),
    "a service hangs on SIGTERM": Fault(
        lambda bench: [bench.server(STUBBORN, grace_s=2), bench.client("true")],
        "SUCCEEDED",
        "",
        "ended: killed by SIGKILL (exit code 137)",
    ),
    "a primary forks children and dies": Fault(
        lambda bench: [bench.server(), bench.client(FORKS)],
        "FAILED",
        "killed by a signal",
        "client/0: killed by SIGKILL (exit code 137)",
    ),
}


def strike(bench: Bench, fault: Fault, title: str, seed: int) -> None:
    """Run one group through one fault and check how it ends and what is left."""
    job = submit(title, bench.cluster, *fault.roles(bench))
    try:
        if fault.strike is not None:
            wait_for(lambda: "client runs" in "".join(job.log()), within_s=60)
            fault.strike(bench, job, random.Random(seed))
        state, reason, log = finish(job)
        assert (state, reason) == (fault.state, fault.reason), log
        assert fault.cause in log, log
    finally:
        assert_nothing_left(bench, job)
