"""An array beside one job each, plain Ray tasks with a subprocess, submitit and a process pool.

In a process of its own with an embedded Ray of its own, once with two declared CPUs and once with
sixteen. Every peer runs ``true``; a Partial calls a trivial function, of Python's own library, and
of NeMo-Run, whose import each fork copies. An array is run with few elements and with many: the
difference gives its rate, as the workers of its peers are warm too, and the few say what its start
costs.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.common import Add, apart

START, ELEMENTS, JOBS, ROUNDS, CPUS = 500, 4500, 12, 3, (2, 16)
#: Elements of the two arrays whose memory is compared.
FEW, MANY = 1000, 50_000

_PROGRAM = """
import concurrent.futures, contextlib, io, json, os, subprocess, sys, tempfile, textwrap, time
import nemo_run as run
import psutil
import submitit
from nemo_run_ray import LocalCluster, RayExecutor, array, find, work
from tests.conftest import processes_of_home

start, elements, jobs, rounds, cpus, few, many, with_memory = json.loads(sys.argv[1])

def true(_):
    subprocess.run(["true"], check=True)

def launched(made, name):
    executor = RayExecutor(cluster=cluster, cpus_per_node=1, python=sys.executable)
    with contextlib.redirect_stdout(io.StringIO()):
        with run.Experiment(name, executor=executor) as experiment:
            for number, one in enumerate(made):
                experiment.add(one, name=f"n{number}")
            experiment.run(detach=True)
    return find(experiment._id)

def until_the_end(found):
    for job in found:
        status = job.wait()
        assert status.state.value == "SUCCEEDED", status
    return max(attempt.ended_at for job in found for attempt in job.attempts)

def of_scripts(count):
    began = time.time()
    made = array(run.Script(inline="true"), over={"env.X": range(count)})
    return until_the_end(launched([made], "scripts")) - began

def of_commands(count):
    script = run.Script(path="x", entrypoint="true")
    began = time.time()
    made = array(script, over={"env.X": range(count)})
    return until_the_end(launched([made], "commands")) - began

def of_partials(count, task=run.Partial(textwrap.dedent, text=""), field="text"):
    began = time.time()
    made = array(task, over={field: [""] * count})
    return until_the_end(launched([made], "partials")) - began

def of_partials_with_nemo_run(count):
    return of_partials(count, run.Partial(run.config.set_nemorun_home, path=""), "path")

def of_jobs(count):
    began = time.time()
    scripts = [run.Script(inline="true") for _ in range(count)]
    return until_the_end(launched(scripts, "jobs")) - began

def of_tasks(count):
    began = time.time()
    ray.get([task.remote(number) for number in range(count)])
    return time.time() - began

def of_submitit(count):
    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        for job in submitit.LocalExecutor(folder).map_array(true, range(count)):
            job.result()
        return time.time() - began

def of_pool(count):
    began = time.time()
    with concurrent.futures.ProcessPoolExecutor(cpus) as pool:
        list(pool.map(true, range(count)))
    return time.time() - began

def uss(pid):
    return psutil.Process(pid).memory_full_info().uss

def memory(count):
    made = array(run.Script(path="x", entrypoint="true"), over={"env.X": range(count)})
    (job,) = launched([made], "memory")
    driver, head = 0, 0
    programs = "gcs_server", "dashboard/dashboard.py", "raylet/raylet"
    is_driver = lambda _, words: "array" in words and job.id in words
    is_heads = lambda _, words: any(name in " ".join(words[:4]) for name in programs)
    while not job.status.state.is_terminal:
        with contextlib.suppress(psutil.Error):
            driver = max([driver, *map(uss, processes_of_home(is_driver))])
            head = max(head, sum(map(uss, processes_of_home(is_heads))))
        time.sleep(1)
    return driver, head

cluster = LocalCluster(num_cpus=cpus, keep=True)
dashboard = cluster.connect()
try:
    os.environ["RAY_AUTH_TOKEN"] = dashboard.headers["Authorization"].removeprefix("Bearer ")
    found = {}
    peers = {
        "array of Script": (of_scripts, elements),
        "array of a program": (of_commands, elements),
        "array of Partial": (of_partials, elements),
        "array of Partial that imports NeMo-Run": (of_partials_with_nemo_run, elements),
        "one job each": (of_jobs, jobs),
        "Ray tasks": (of_tasks, elements),
        "submitit": (of_submitit, jobs),
        "process pool": (of_pool, elements),
    }
    with work.connect():
        import ray
        task = ray.remote(num_cpus=1)(true)
        ray.get([task.remote(0) for _ in range(4 * cpus)])
        rates = {name: [] for name in peers}
        starts = {name: [] for name in peers}
        for number in range(rounds):
            for name, (peer, count) in peers.items():
                if count == elements and name.startswith("array"):
                    starts[name].append(peer(start))
                    rates[name].append((count - start) / (peer(count) - starts[name][-1]))
                else:
                    rates[name].append(count / peer(count))
                print(name, round(rates[name][-1], 2), file=sys.stderr, flush=True)
    found.update(rates=rates, starts=starts)
    if with_memory:
        found["memory"] = [memory(few), memory(many)]
    print(json.dumps(found))
finally:
    cluster.stop()
"""


def measure() -> dict[str, Any]:
    """By the number of CPUs: the rates of all peers in elements/s, and the memory of two arrays."""
    return {str(cpus): _measure(cpus, with_memory=cpus == CPUS[-1]) for cpus in CPUS}


def _measure(cpus: int, with_memory: bool) -> dict[str, Any]:
    return apart(_PROGRAM, START, ELEMENTS, JOBS, ROUNDS, cpus, FEW, MANY, with_memory)


def show(found: dict[str, Any], add: Add) -> None:
    for cpus in CPUS:
        rates = {name: statistics.median(one) for name, one in found[str(cpus)]["rates"].items()}
        ranges = {name: (min(one), max(one)) for name, one in found[str(cpus)]["rates"].items()}
        for name, rate in rates.items():
            low, high = ranges[name]
            add(f"{name}, {cpus} CPUs: elements/s", f"{rate:.4g} ({low:.4g} to {high:.4g})")
        start_s = statistics.median(found[str(cpus)]["starts"]["array of Script"])
        add(f"array of {START} Scripts, {cpus} CPUs: from the call to the end", f"{start_s:.1f} s")
        ours, each = rates["array of Script"], rates["one job each"]
        add(f"array of Script / one job each, {cpus} CPUs", f"{ours / each:.0f}", "≥ 100")
        plain = rates["Ray tasks"]
        add(f"array of Script / plain Ray tasks, {cpus} CPUs", f"{ours / plain:.2f}", "≥ 0.9")
        add(
            f"array of Partial, {cpus} CPUs: elements/s",
            f"{rates['array of Partial']:.0f}",
            "≥ 100",
        )
    few, many = found[str(CPUS[-1])]["memory"]
    for number, name in enumerate(("driver", "head")):
        growth = (many[number] - few[number]) / 1024**2
        add(f"memory of the {name}, {MANY} elements beside {FEW}", f"{growth:+.1f} MiB", "≤ 10")
