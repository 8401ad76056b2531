"""``make bench``: this executor beside its peers on one warm embedded Ray, medians and spread.

Absolute times say little on a shared machine; the ratios are what is promised. Each part prints its
table and is written into ``benchmarks/results/latest.json`` as soon as it is measured;
``python -m benchmarks log chain`` measures two parts.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import logging
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import FOLDER, ROOT, Add, quietly, ratio_range, wait_for  # isort: skip

import httpx
import nemo_run as run
import psutil

from benchmarks import arrays, chains, cloud, groups, slurm, status, work
from nemo_run_ray import ExistingCluster, LocalCluster, RayExecutor, find
from nemo_run_ray.clusters import Dashboard
from nemo_run_ray.dashboard.jobs import JobsApi
from tests.flaky_proxy import FlakyProxy

ROUNDS = 9
#: Rounds of the two peers whose ratio is promised; one start differs from the next by a tenth.
START_ROUNDS = 31
MB = 1024**2
LOG_BYTES = 200 * 1024**2


@functools.cache
def embedded() -> Dashboard:
    """The embedded Ray, from the first measure on that needs it: it takes a part of a CPU."""
    cluster = LocalCluster()
    dashboard = cluster.connect()
    atexit.register(cluster.stop)  # the detached runs would keep it
    os.environ["RAY_AUTH_TOKEN"] = dashboard.headers["Authorization"].removeprefix("Bearer ")
    return dashboard


def main(wanted: list[str]) -> None:
    # NeMo-Run prints this process's log, and to write the peers' requests costs time of theirs.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    latest = ROOT / "benchmarks" / "results" / "latest.json"
    latest.parent.mkdir(exist_ok=True)
    results: dict[str, object] = json.loads(latest.read_text()) if latest.exists() else {}
    results |= {"python": platform.python_version()}
    measures: dict[str, Callable[[], object]] = {
        "cloud": cloud.measure,  # these six before there is a Ray
        "import": measure_import,
        "status": status.measure,
        "slurm": slurm.measure,
        "work": work.measure,
        "arrays": arrays.measure,
        "start": lambda: measure_start(embedded()),
        "upload": lambda: measure_upload(embedded()),
        "polling": lambda: measure_polling(embedded()),
        "footprint": lambda: measure_footprint(embedded()),
        "log": lambda: measure_log(embedded()),
        "group start": groups.measure_start,
        "group log": groups.measure_log,
        "64 replicas": groups.measure_replicas,
        "chain": lambda: chains.measure_chain(embedded()),
    }
    for name in wanted or measures:
        print(f"measuring: {name}", file=sys.stderr, flush=True)
        if name not in ("cloud", "import", "status", "slurm", "work", "arrays"):
            embedded()
        results[name] = measures[name]()
        latest.write_text(json.dumps(results, indent=1))
        show(name, results[name])


def measure_start(dashboard: Dashboard) -> dict[str, object]:
    """Seconds from the call to the command's first instruction and to the return, interleaved in
    random order.

    Between the two lie the command, Ray's note of its end and, for ``run.run``, the two seconds
    from one look of NeMo-Run to the next. ``client_cpu_s`` is what the call costs this process.
    """
    http = httpx.Client(headers=dashboard.headers, trust_env=False, timeout=60)
    folder = FOLDER / "marks"
    folder.mkdir()

    def bare(mark: Path) -> None:
        name = uuid.uuid4().hex
        body = {"submission_id": name, "entrypoint": f"date +%s.%N > {mark}"}
        # A Ray that has just started may answer 500 for a moment.
        wait_for(lambda: http.post(f"{dashboard.url}/api/jobs/", json=body).is_success)
        wait_for(lambda: http.get(f"{dashboard.url}/api/jobs/{name}").json()["end_time"])

    existing = ExistingCluster(url=dashboard.url)
    peers: dict[str, Callable[[Path], None]] = {
        "bare REST": bare,
        "RayExecutor": lambda mark: launch(RayExecutor(), mark),
        "RayExecutor, existing": lambda mark: launch(RayExecutor(cluster=existing), mark),
        "RayExecutor, Partial": lambda mark: launch(RayExecutor(), mark, partial=True),
        "LocalExecutor": lambda mark: launch(run.LocalExecutor(), mark),
        "LocalExecutor, Partial": lambda mark: launch(run.LocalExecutor(), mark, partial=True),
    }
    taken: dict[str, list[float]] = {name: [] for name in peers}
    returned: dict[str, list[float]] = {name: [] for name in peers}
    cpu: dict[str, list[float]] = {name: [] for name in peers}
    for number in range(START_ROUNDS + 1):
        names = list(peers) if number <= ROUNDS else ["bare REST", "RayExecutor"]
        random.Random(number).shuffle(names)
        for name in names:
            mark = folder / f"{name}-{number}".replace(" ", "")
            began, cpu_began = time.time(), time.process_time()
            peers[name](mark)
            ended, cpu_ended = time.time(), time.process_time()
            wait_for(functools.partial(_has_text, mark))
            if number > 0:  # the first round warms everything
                taken[name].append(float(mark.read_text()) - began)
                returned[name].append(ended - began)
                cpu[name].append(cpu_ended - cpu_began)
            wait_for(lambda: is_idle(dashboard))
    medians = {name: statistics.median(one) for name, one in taken.items()}
    ours, bare_s = taken["RayExecutor"], taken["bare REST"]
    return {
        "median_s": medians,
        "quartiles_s": {name: statistics.quantiles(one)[::2] for name, one in taken.items()},
        "returned_s": {name: statistics.median(one) for name, one in returned.items()},
        "client_cpu_s": {name: statistics.median(one) for name, one in cpu.items()},
        "ratio_of_medians": medians["RayExecutor"] / medians["bare REST"],
        "ratio_range": ratio_range(ours, bare_s),
    }


def _has_text(mark: Path) -> bool:
    return mark.exists() and bool(mark.read_text().strip())


def launch(executor: run.Executor, mark: Path, partial: bool = False) -> None:
    """A user's call as it is, attached and tailing; the command itself notes when it started."""
    task: run.Script | run.Partial = run.Script(inline=f"date +%s.%N > {mark}")
    if partial:
        task = run.Partial(subprocess.getoutput, cmd=f"date +%s.%N > {mark}")
    quietly(lambda: run.run(task, executor=executor, name="bench", tail_logs=True))


def measure_upload(dashboard: Dashboard) -> dict[str, object]:
    """Bytes of archives that two submissions of the same code send."""
    source = FOLDER / "source"
    source.mkdir()
    for number in range(20):
        (source / f"module{number}.py").write_text(f"VALUE = '{uuid.uuid4().hex * 200}'\n")
    sent = []
    for _ in range(2):
        with FlakyProxy(dashboard.url) as proxy:
            packager = run.PatternPackager(include_pattern=str(source), relative_path=str(source))
            executor = RayExecutor(cluster=ExistingCluster(url=proxy.url), packager=packager)
            quietly(functools.partial(_upload, executor))
            sent.append(sum(size for line, size in proxy.sent.items() if line.startswith("PUT")))
        wait_for(lambda: is_idle(dashboard))
    return {"first_bytes": sent[0], "second_bytes": sent[1]}


def _upload(executor: RayExecutor) -> None:
    run.run(run.Script(inline="true"), executor=executor, name="upload", detach=True)


def measure_polling(dashboard: Dashboard) -> dict[str, object]:
    """Requests that 200 jobs cost in a round of NeMo-Run's two seconds, each asked by a thread."""
    with FlakyProxy(dashboard.url) as proxy:
        api = JobsApi.of(Dashboard(proxy.url, dashboard.headers))
        api.table(fresh=True)
        proxy.requests.clear()
        rounds, jobs = 5, 200
        began = time.monotonic()

        def watch(offset: float) -> None:
            for number in range(rounds):
                time.sleep(max(0.0, began + offset + 2 * number - time.monotonic()))
                api.table()

        threads = [threading.Thread(target=watch, args=(2 * i / jobs,)) for i in range(jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {"jobs": jobs, "rounds": rounds, "requests_per_round": len(proxy.requests) / rounds}


def measure_footprint(dashboard: Dashboard) -> dict[str, object]:
    """Memory of our two processes on the node, and of Ray's own for one job."""
    quietly(
        lambda: run.run(
            run.Script(inline="sleep 20"), executor=RayExecutor(), name="footprint", detach=True
        )
    )
    ours = wait_for(lambda: found if len(found := remote_processes()) == 2 else None)
    rss = [process.memory_info().rss for process in ours]
    pss = [pss_bytes(process.pid) for process in ours]
    for job in find("footprint"):
        job.cancel()
    wait_for(lambda: is_idle(dashboard))
    return {"processes": 2, "rss_bytes": max(rss), "pss_bytes_of_both": sum(pss)}


def measure_log(dashboard: Dashboard) -> dict[str, object]:
    """Growth of the client while it follows a log of 200 MB."""
    lines = LOG_BYTES // 100
    program = f"seq -f '%098.0f' {lines}"
    quietly(
        lambda: run.run(run.Script(inline=program), executor=RayExecutor(), name="log", detach=True)
    )
    (job,) = find("log")
    process = psutil.Process()
    before = peak = process.memory_info().rss
    characters = 0
    began = time.monotonic()
    for number, text in enumerate(job.log(follow=True)):
        characters += len(text)
        if number % 20 == 0:
            peak = max(peak, process.memory_info().rss)
    peak = max(peak, process.memory_info().rss)
    return {
        "log_bytes": characters,
        "growth_bytes": peak - before,
        "megabytes_per_s": characters / 1e6 / (time.monotonic() - began),
    }


def measure_import() -> dict[str, object]:
    """What ``import nemo_run_ray`` adds to ``import nemo_run``, by CPU time, interleaved."""

    def cpu_s(program: str) -> float:
        done = subprocess.run(
            [sys.executable, "-c", f"{program}\nimport time; print(time.process_time())"],
            capture_output=True,
            text=True,
            check=True,
        )
        return float(done.stdout)

    added = "import nemo_run, time; b = time.process_time(); import nemo_run_ray"
    values = []
    for _ in range(ROUNDS):
        done = subprocess.run(
            [sys.executable, "-c", f"{added}; print(time.process_time() - b)"],
            capture_output=True,
            text=True,
            check=True,
        )
        values.append(float(done.stdout))
    return {"nemo_run_s": cpu_s("import nemo_run"), "added_s": statistics.median(values)}


def is_idle(dashboard: Dashboard) -> bool:
    rows = JobsApi.of(dashboard).table(fresh=True).values()
    return all(row["status"] not in ("PENDING", "RUNNING") for row in rows)


def remote_processes() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            command = process.cmdline()
            if "nemo_run_ray_remote.start" in command:
                found.append(process)
    return found


def pss_bytes(pid: int) -> int:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(re.findall(r"^Pss:\s+(\d+) kB", text, re.M)[0]) * 1024


def show(name: str, found: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("what", "figure", "promise", title=name)
    SHOW[name](found, table.add_row)
    Console().print(table)


def _show_start(found: dict[str, Any], add: Add) -> None:
    for name, median in found["median_s"].items():
        low, high = found["quartiles_s"][name]
        add(
            f"{name}: call to first instruction",
            f"{median:.2f} s (quartiles {low:.2f}, {high:.2f})",
        )
        back, cpu = found["returned_s"][name], found["client_cpu_s"][name]
        add(f"{name}: call to return", f"{back:.2f} s, {cpu:.2f} s of it the client's CPU")
    low, high = found["ratio_range"]
    ratio = f"{found['ratio_of_medians']:.2f} (90 % of samples: {low:.2f} to {high:.2f})"
    add("RayExecutor / bare REST, medians", ratio, "≤ 1.15")


def _show_upload(found: dict[str, Any], add: Add) -> None:
    # The key of its end record is the job's own.
    add("second submission uploads", f"{found['second_bytes']} bytes", "< 1000")
    add("first submission uploads", f"{found['first_bytes']} bytes")


def _show_footprint(found: dict[str, Any], add: Add) -> None:
    both, larger = found["pss_bytes_of_both"] / MB, found["rss_bytes"] / MB
    add("our processes on the node (PSS of both)", f"{both:.1f} MiB", "< 25")
    add("the larger one (RSS)", f"{larger:.1f} MiB", "< 25")


def _show_log(found: dict[str, Any], add: Add) -> None:
    add("client's growth, 200 MB log", f"{found['growth_bytes'] / MB:.1f} MiB", "< 64")
    add("following that log", f"{found['megabytes_per_s']:.1f} MB/s")


SHOW: dict[str, Callable[[dict[str, Any], Add], None]] = {
    "start": _show_start,
    "upload": _show_upload,
    "polling": lambda found, add: add(
        "requests per round for 200 jobs", f"{found['requests_per_round']:.1f}", "≤ 2"
    ),
    "footprint": _show_footprint,
    "log": _show_log,
    "status": status.show,
    "group start": groups.show_start,
    "group log": groups.show_log,
    "64 replicas": groups.show_replicas,
    "chain": chains.show,
    "cloud": cloud.show,
    "slurm": slurm.show,
    "work": work.show,
    "arrays": arrays.show,
    "import": lambda found, add: add(
        "import nemo_run_ray adds", f"{found['added_s']:.3f} s", "< 0.1"
    ),
}


if __name__ == "__main__":
    main(sys.argv[1:])
