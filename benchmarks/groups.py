"""Groups beside single tasks: how much later they start, how fast their output flows, what they
take.
"""

from __future__ import annotations

import shlex
import statistics
import sys
import time
import uuid
from typing import Any

import nemo_run as run
import psutil

from benchmarks.common import FOLDER, Add, quietly, wait_for
from nemo_run_ray import LocalCluster, RayExecutor, find
from nemo_run_ray.experiment.job import RemoteJob

ROUNDS = 5
ROLES, LINES = 4, 100_000
REPLICAS = 64


def measure_start() -> dict[str, object]:
    """Seconds from the call to the first instruction of the first process, rounds interleaved."""
    folder = FOLDER / "group-marks"
    folder.mkdir()
    taken: dict[str, list[float]] = {"single": [], "group of 3": []}
    for number in range(ROUNDS + 1):
        for name, roles in (("single", 1), ("group of 3", 3)):
            marks = [folder / f"{number}-{roles}-{role}" for role in range(roles)]
            began_at = time.time()
            job = submit([f"date +%s.%N > {mark}.new; mv {mark}.new {mark}" for mark in marks])
            _wait_for_end(job)
            first = min(float(mark.read_text()) for mark in marks)
            if number:  # the first round warms up
                taken[name].append(first - began_at)
    medians = {name: statistics.median(values) for name, values in taken.items()}
    return {
        "median_s": medians,
        "range_s": {name: [min(values), max(values)] for name, values in taken.items()},
        "later_s": medians["group of 3"] - medians["single"],
    }


def measure_log() -> dict[str, object]:
    """Lines a second of four roles that print as fast as they may, all of them counted."""
    mark = FOLDER / "group-log"
    mark.mkdir()
    printing = "import sys\nfor n in range(int(sys.argv[1])): print(n, 'words of a log')"
    program = f"date +%s.%N > {mark}/$$\n{sys.executable} -c {shlex.quote(printing)} {LINES}"
    job = submit([program] * ROLES)
    _wait_for_end(job)
    row = job.api().job(job.id) or {}
    began_at = min(float(one.read_text()) for one in mark.iterdir())
    seen: dict[str, int] = {}
    for line in "".join(job.log()).splitlines():
        role, _, text = line.partition("| ")
        number = text.partition(" ")[0]
        if "/" in role and number.isdigit():
            if int(number) != seen.get(role, 0):
                raise AssertionError(f"{role}: line {number} after {seen.get(role)}")
            seen[role] = int(number) + 1
    if sorted(seen.values()) != [LINES] * ROLES:
        raise AssertionError(f"lines are missing: {seen}")
    taken_s = (row["end_time"] or 0) / 1000 - began_at
    return {"seconds": taken_s, "lines_per_s": ROLES * LINES / taken_s}


def measure_replicas() -> dict[str, object]:
    """64 replicas on a Ray that declares 64 CPUs: when they start, what memory each one takes."""
    folder = FOLDER / "replicas"
    folder.mkdir()
    cluster = LocalCluster(num_cpus=REPLICAS, keep=True, state_dir=str(FOLDER / "wide"))
    cluster.connect()
    try:
        before = psutil.virtual_memory().available
        program = (
            f"date +%s.%N > {folder}/$RANK.new; mv {folder}/$RANK.new {folder}/$RANK.mark; "
            f"while [ ! -e {folder}/go ]; do sleep 1; done"
        )
        job = submit([program], cluster, nodes=REPLICAS, cpus_per_node=1)
        wait_for(lambda: len(list(folder.glob("*.mark"))) == REPLICAS, within_s=600)
        held = before - psutil.virtual_memory().available
        (folder / "go").touch()
        _wait_for_end(job)
        if job.status.state.value != "SUCCEEDED":
            raise AssertionError(job.status)
    finally:
        cluster.stop()
    starts = [float(one.read_text()) for one in folder.glob("*.mark")]
    return {"starts_s": max(starts) - min(starts), "memory_bytes": held / REPLICAS}


def _wait_for_end(job: RemoteJob) -> None:
    wait_for(lambda: job.status.state.is_terminal, within_s=300)


def submit(programs: list[str], cluster: LocalCluster | None = None, **fields: Any) -> RemoteJob:
    name = f"b{uuid.uuid4().hex[:10]}"
    scripts = [run.Script(inline=program) for program in programs]
    executors = [RayExecutor(cluster=cluster, role=f"r{n}", **fields) for n in range(len(programs))]
    found: list[str] = []

    def hand_over() -> None:
        with run.Experiment(name) as experiment:
            if len(scripts) == 1:
                experiment.add(scripts[0], executor=executors[0], name="job")
            else:
                experiment.add(scripts, executor=executors, name="job")
            experiment.run(detach=True)
            found.append(f"{experiment._id}.job")

    quietly(hand_over)
    return find(found[0])[0]


def show_start(found: dict[str, Any], add: Add) -> None:
    add("a group of 3 starts later than a task by", f"{found['later_s']:.2f} s", "≤ 2.0")


def show_log(found: dict[str, Any], add: Add) -> None:
    add("output of 4 roles", f"{found['lines_per_s']:,.0f} lines/s", "≥ 20,000")


def show_replicas(found: dict[str, Any], add: Add) -> None:
    add("64 replicas: from the first start to the last", f"{found['starts_s']:.2f} s")
    add("64 replicas: memory of each", f"{found['memory_bytes'] / 1024**2:.0f} MiB")
