"""Groups that lose a host, and in the soak every other fault too, across hosts."""

import os
import random
import signal
import sys
import time

import pytest

from nemo_run_ray.experiment.job import RemoteJob
from tests.group_faults import FAULTS, Fault, pair, strike
from tests.hosts.conftest import Hosts, bed
from tests.hosts.head import address_of


def kill_raylet(hosts: Hosts, job: RemoteJob, chance: random.Random) -> None:
    namespace = bed("exec", "n2", "--", "readlink", "/proc/self/ns/pid").strip()
    (raylet,) = hosts.processes(
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


HOST_FAULTS = {
    "a raylet is killed": Fault(
        pair, "FAILED", "its node or its supervisor died", "server/0: node n2", kill_raylet
    ),
    "a host loses power": Fault(
        pair,
        "FAILED",
        "its node or its supervisor died",
        f"server/0: node n2 ({address_of('n2')})",
        crash,
    ),
    "a host is cut off for 20 s": Fault(
        lambda bench: [bench.server(), bench.client("echo client runs; sleep 30")],
        "SUCCEEDED",
        "",
        "exit code 0",
        cut_and_heal,
    ),
}


def strike_across(hosts: Hosts, name: str, title: str, seed: int) -> None:
    try:
        strike(hosts, {**FAULTS, **HOST_FAULTS}[name], title, seed)
    finally:
        if name in ("a host loses power", "a raylet is killed"):
            hosts.wait_for_nodes("n1", "n3")
            hosts.revive("n2")
            hosts.wait_for_nodes("n1", "n2", "n3")


@pytest.mark.parametrize(
    "name",
    [
        "a host loses power",
        "a replica's process is killed",
        *(
            pytest.param(name, marks=pytest.mark.soak)
            for name in HOST_FAULTS
            if "power" not in name
        ),
    ],
)
def test_a_fault_across_hosts(hosts, unique, name):
    strike_across(hosts, name, unique, seed=0)


@pytest.mark.soak
def test_every_fault_ten_times(hosts, unique):
    seed = int(os.environ.get("SEED", random.randrange(10**6)))
    chance = random.Random(seed)
    order = [name for name in (*FAULTS, *HOST_FAULTS) for _ in range(10)]
    chance.shuffle(order)
    print(f"seed {seed}", file=sys.stderr)
    for number, name in enumerate(order):
        began_at = time.monotonic()
        strike_across(hosts, name, f"{unique}n{number}", seed=chance.randrange(10**6))
        print(f"{number} {name}: {time.monotonic() - began_at:.0f} s", file=sys.stderr)
