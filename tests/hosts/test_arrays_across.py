"""Arrays that lose a host: its elements go on elsewhere, and none runs twice at a time."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import nemo_run as run
import pytest

from nemo_run_ray import RayExecutor
from nemo_run_ray.experiment.job import RemoteJob, find_job
from tests.arrays import check, ended, scripts
from tests.conftest import wait_for
from tests.hosts.conftest import Hosts, bed
from tests.hosts.test_group_faults import kill_raylet

#: Longer than Ray needs to count a host as dead, and shorter than its raylet needs to notice.
LONG_CUT_S = 35.0


def lose_power(hosts: Hosts, job: RemoteJob) -> None:
    bed("crash", "n2")


def lose_raylet(hosts: Hosts, job: RemoteJob) -> None:
    kill_raylet(hosts, job, random.Random(0))


def cut_for_long(hosts: Hosts, job: RemoteJob) -> None:
    bed("cut", "n2")
    time.sleep(LONG_CUT_S)
    bed("heal", "n2")


def cut_for_a_moment(hosts: Hosts, job: RemoteJob) -> None:
    bed("cut", "n2")
    time.sleep(5)
    bed("heal", "n2")


FAULTS = (lose_power, lose_raylet, cut_for_long, cut_for_a_moment)


@pytest.fixture
def whole(hosts) -> Iterator[Callable[[], None]]:
    """Makes the hosts three again."""

    def revive() -> None:
        bed("crash", "n2")  # after a moment without its cable it goes on
        hosts.wait_for_nodes("n1", "n3")
        hosts.revive("n2")
        hosts.wait_for_nodes("n1", "n2", "n3")

    yield revive
    revive()


def _strike(
    hosts: Hosts,
    title: str,
    folder: Path,
    fault: Callable[[Hosts, RemoteJob], None],
    count: int = 1,
) -> None:
    """Do something to a host on which each of so many arrays has two elements at that moment."""
    executor = RayExecutor(
        cluster=hosts.cluster,
        cpus_per_node=1 / count,
        max_in_flight=6,  # so together they need all that the three hosts have
        python=sys.executable,
    )
    struck = []
    for number in range(count):
        notes = folder / str(number)
        notes.mkdir()
        with run.Experiment(f"{title}a{number}", executor=executor) as experiment:
            # The first one still runs when the last one has begun.
            experiment.add(scripts(notes, seconds=1.0, is_gated=True), name="array")
            experiment.run(detach=True)
        struck.append((find_job(f"{experiment._id}.array"), notes))
        # One by one: on a busy machine not all jobs would start within Ray's bound.
        wait_for(lambda notes=notes: ended(notes) >= 4, 90)
    for _, notes in struck:
        (notes / "go").touch()
    fault(hosts, struck[0][0])
    for job, notes in struck:
        # How what the host had in hand has ended, it could tell nobody.
        check(job, notes, logs=None, unseen=8)


@pytest.mark.soak  # Ray's raylets here notice after 150 s that they are alone
def test_an_array_outlives_a_host(hosts, unique, tmp_path, whole):
    _strike(hosts, unique, tmp_path, lose_power)


@pytest.mark.soak
def test_arrays_outlive_every_loss(hosts, unique, tmp_path, whole):
    """RUNS losses of a host, each with so many arrays on it as ARRAYS says.

    Several need Ray's own RAY_gcs_rpc_server_reconnect_timeout_s, 60, to end within one's time, and
    its RAY_JOB_START_TIMEOUT_SECONDS, 900, to begin on a busy machine.
    """
    arrays = int(os.environ.get("ARRAYS", "1"))
    seed = int(os.environ.get("SEED", random.randrange(10**6)))
    chance = random.Random(seed)
    order = [FAULTS[number % len(FAULTS)] for number in range(int(os.environ.get("RUNS", "20")))]
    chance.shuffle(order)
    print(f"seed {seed}", file=sys.stderr)
    for number, fault in enumerate(order):
        folder = tmp_path / str(number)
        folder.mkdir()
        _strike(hosts, f"{unique}n{number}", folder, fault, count=arrays)
        print(f"{number} {fault.__name__}: held", file=sys.stderr)
        whole()
