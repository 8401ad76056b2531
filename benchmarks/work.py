"""``work.map`` beside plain Ray tasks: the same items, one after the other, with warm workers.

In a process of its own with an embedded Ray of its own: Ray takes a token when it is imported, and
sixteen CPUs are declared, so that items that sleep show what the way to them costs.
"""

from __future__ import annotations

from typing import Any

from benchmarks.common import Add, apart

ITEMS, CPUS, ROUNDS = 10_000, 16, 3
MILLISECONDS = (1, 10, 100)
#: Results of 10 MB each, for the memory of the program that takes them.
LARGE, LARGE_BYTES = 10_000, 10_000_000

_PROGRAM = """
import json, statistics, sys, time
from nemo_run_ray import LocalCluster, work
items, cpus, rounds, milliseconds, large, large_bytes = json.loads(sys.argv[1])
cluster = LocalCluster(num_cpus=cpus, keep=True)
cluster.connect()
try:
    with work.connect() as pool:
        import psutil, ray
        pause = lambda seconds: time.sleep(seconds)
        task = ray.remote(num_cpus=1, scheduling_strategy="SPREAD")(pause)

        def of_map(seconds):
            list(pool.map(pause, [0.01] * (40 * cpus)))
            began = time.perf_counter()
            list(pool.map(pause, [seconds] * items))
            return time.perf_counter() - began

        def of_tasks(seconds):
            ray.get([task.remote(0.01) for _ in range(40 * cpus)])
            began = time.perf_counter()
            ray.get([task.remote(seconds) for _ in range(items)])
            return time.perf_counter() - began

        found = {}
        for length in milliseconds:
            peers = {"map": of_map, "ray.get": of_tasks}
            seconds = {name: [] for name in peers}
            for number in range(rounds if length < 100 else 1):
                for name in sorted(peers, reverse=number % 2 == 1):
                    seconds[name].append(peers[name](length / 1000))
                    print(length, name, round(seconds[name][-1], 1), file=sys.stderr, flush=True)
            ratios = [theirs / ours for ours, theirs in zip(seconds["map"], seconds["ray.get"])]
            found[str(length)] = {
                "speed_of_ray": statistics.median(ratios),
                **{name: statistics.median(values) for name, values in seconds.items()},
            }
        process = psutil.Process()
        before = most = process.memory_full_info().uss
        results = pool.map(lambda number: bytes([number % 256]) * large_bytes, range(large))
        for number, data in enumerate(results):
            most = max(most, process.memory_full_info().uss) if number % 20 == 0 else most
        found["growth_bytes"] = most - before
        print(json.dumps(found))
finally:
    cluster.stop()
"""


def measure() -> dict[str, Any]:
    """By the milliseconds of an item: seconds of both, and the speed in that of plain Ray."""
    return apart(_PROGRAM, ITEMS, CPUS, ROUNDS, MILLISECONDS, LARGE, LARGE_BYTES)


def show(found: dict[str, Any], add: Add) -> None:
    for length in MILLISECONDS:
        row = found[str(length)]
        add(
            f"{ITEMS} items of {length} ms, work.map / plain Ray tasks: speed",
            f"{row['speed_of_ray']:.2f} ({row['map']:.1f} s, {row['ray.get']:.1f} s)",
            "> 1" if length == 1 else "≥ 0.95",
        )
    growth = found["growth_bytes"] / 1024**2
    add(f"growth by {LARGE} results of 10 MB", f"{growth:.0f} MiB", "< 500")
