"""What becomes of a group when something of it dies: each fault once, in the soak ten times."""

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from nemo_run_ray import PortProbe
from nemo_run_ray.jobs.job import RemoteJob
from tests.conftest import wait_for
from tests.groups import Role, assert_nothing_left, finish, submit
from tests.hosts.conftest import POOLS, Hosts, bed, client, server

STAYS = 'echo "client runs"; sleep 600'
STUBBORN = "trap '' TERM\n{python} -m http.server $NEMO_RUN_SERVER_PORT_HTTP >/dev/null 2>&1"
FORKS = "sleep 1000 &\nsetsid sleep 1000 &\n(sleep 1000 &)\necho forked; kill -9 $$"


@dataclass
class Fault:
    """One group, what happens to it, and how it must end.

    Attributes:
        roles: of the group.
        strike: happens when the client runs; gets the hosts, the job and the seed's random numbers.
        state, reason: of the job at its end.
        cause: a text that must be in its log.
    """

    roles: Callable[[], list[Role]]
    state: str
    reason: str
    cause: str
    strike: Callable[[Hosts, RemoteJob, random.Random], None] | None = None


def pair(program: str = STAYS, **fields) -> list[Role]:
    return [server(**fields), client(program)]


def processes(wanted: Callable[[int, list[str]], bool]) -> list[int]:
    """The processes of our hosts, and of nobody else, for which this holds of id and words."""
    found = []
    hosts = {bed("exec", name, "--", "readlink", "/proc/self/ns/pid").strip() for name in POOLS}
    for folder in Path("/proc").iterdir():
        try:
            if not folder.name.isdigit() or os.readlink(folder / "ns" / "pid") not in hosts:
                continue
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if words[0] and wanted(int(folder.name), [word.decode() for word in words]):
                found.append(int(folder.name))
        except (OSError, UnicodeDecodeError):
            continue  # it ended while we looked
    return found


def ours(job: RemoteJob) -> list[int]:
    """Our processes on the head: the one that Ray started, and the driver that it started."""
    return sorted(processes(lambda _, words: job.id in words and "-I" in words))


def kill_driver(hosts: Hosts, job: RemoteJob, chance: random.Random) -> None:
    _, driver = ours(job)
    os.kill(driver, signal.SIGKILL)


def kill_keeper(hosts: Hosts, job: RemoteJob, chance: random.Random) -> None:
    keeper, _ = ours(job)
    os.kill(keeper, signal.SIGKILL)


def kill_actor(hosts: Hosts, job: RemoteJob, chance: random.Random) -> None:
    actors = processes(lambda _, words: words[0].startswith("ray::Replica"))
    os.kill(chance.choice(actors), signal.SIGKILL)


def kill_replica(hosts: Hosts, job: RemoteJob, chance: random.Random) -> None:
    replicas = processes(lambda pid, words: any("replica import main" in one for one in words))
    os.kill(chance.choice(replicas), signal.SIGKILL)


def kill_raylet(hosts: Hosts, job: RemoteJob, chance: random.Random) -> None:
    namespace = bed("exec", "n2", "--", "readlink", "/proc/self/ns/pid").strip()
    (raylet,) = processes(
        lambda pid, words: (
            words[0].endswith("/raylet") and os.readlink(f"/proc/{pid}/ns/pid") == namespace
        )
    )
    os.kill(raylet, signal.SIGKILL)


def crash(hosts: Hosts, job: RemoteJob, chance: random.Random) -> None:
    bed("crash", "n2")


def cut_and_heal(hosts: Hosts, job: RemoteJob, chance: random.Random) -> None:
    bed("cut", "n2")
    time.sleep(20)
    bed("heal", "n2")


def stop(hosts: Hosts, job: RemoteJob, chance: random.Random) -> None:
    hosts.api.stop(job.id)


_ready = PortProbe("http", interval_s=0.2, timeout_s=3)
FAULTS = {
    "the driver is killed": Fault(
        pair, "FAILED", "killed by a signal", "our process on this node was killed", kill_driver
    ),
    "the first process is killed": Fault(
        pair, "FAILED", "killed by a signal", "our first process was killed", kill_keeper
    ),
    "an actor is killed": Fault(
        pair, "FAILED", "its node or its supervisor died", "Ray's worker there died", kill_actor
    ),
    "a replica's process is killed": Fault(
        pair, "FAILED", "its node or its supervisor died", "was killed", kill_replica
    ),
    "a raylet is killed": Fault(
        pair, "FAILED", "its node or its supervisor died", "server/0: node n2", kill_raylet
    ),
    "a host loses power": Fault(
        pair, "FAILED", "its node or its supervisor died", "server/0: node n2 (10.77.0.2)", crash
    ),
    "a host is cut off for 20 s": Fault(
        lambda: pair("echo client runs; sleep 30"), "SUCCEEDED", "", "exit code 0", cut_and_heal
    ),
    "the job is stopped": Fault(pair, "CANCELLED", "cancelled", "end", stop),
    "a service exits with 0": Fault(
        lambda: [server("sleep 1", ready=None), client(STAYS)],
        "FAILED",
        "a service ended before the primaries",
        "the service server/0 ended before the primaries: exit code 0",
    ),
    "a service exits with 1": Fault(
        lambda: [server("sleep 1; exit 1", ready=None), client(STAYS)],
        "FAILED",
        "a service ended before the primaries",
        "the service server/0 ended before the primaries: exit code 1",
    ),
    "a service is never ready": Fault(
        lambda: [server("sleep 600", ready=_ready), client(STAYS)],
        "FAILED",
        "a service was not ready in time",
        "server/0: not ready within 3 s: port 10.77.0.2:",
    ),
    "a service hangs on SIGTERM": Fault(
        lambda: [server(STUBBORN, grace_s=2), client("true")],
        "SUCCEEDED",
        "",
        "server/0 on n2 ended: killed by SIGKILL (exit code 137)",
    ),
    "a primary forks children and dies": Fault(
        lambda: pair(FORKS), "FAILED", "exit code", "client/0: killed by SIGKILL (exit code 137)"
    ),
}


def strike(hosts: Hosts, name: str, title: str, seed: int) -> None:
    """Run one group through one fault and check how it ends and what is left."""
    fault = FAULTS[name]
    job = submit(title, hosts.cluster, *fault.roles())
    try:
        if fault.strike is not None:
            wait_for(lambda: "client runs" in "".join(job.log(follow=False)), within_s=60)
            fault.strike(hosts, job, random.Random(seed))
        state, reason, log = finish(job)
        assert (state, reason) == (fault.state, fault.reason), log
        assert fault.cause in log, log
    finally:
        if name in ("a host loses power", "a raylet is killed"):
            hosts.wait_for_nodes("n1", "n3")
            hosts.revive("n2")
            hosts.wait_for_nodes("n1", "n2", "n3")
        assert_nothing_left(hosts, job)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault(hosts, unique, name):
    strike(hosts, name, unique, seed=0)


@pytest.mark.soak
def test_every_fault_ten_times(hosts, unique):
    seed = int(os.environ.get("SEED", random.randrange(10**6)))
    chance = random.Random(seed)
    order = [name for name in FAULTS for _ in range(10)]
    chance.shuffle(order)
    print(f"seed {seed}", file=sys.stderr)
    for number, name in enumerate(order):
        began_at = time.monotonic()
        strike(hosts, name, f"{unique}n{number}", seed=chance.randrange(10**6))
        print(f"{number} {name}: {time.monotonic() - began_at:.0f} s", file=sys.stderr)
