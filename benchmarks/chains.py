"""A chain of many short jobs beside a plain loop of requests that keeps as many of them going."""

from __future__ import annotations

import re
import statistics
import threading
import time
import uuid
from collections import Counter
from typing import Any

import httpx
import nemo_run as run
import psutil

from benchmarks.common import ROOT, Add, quietly, wait_for
from nemo_run_ray import RayExecutor
from nemo_run_ray.cli import main as cli
from nemo_run_ray.clusters import Dashboard
from nemo_run_ray.dashboard.jobs_api import JobsApi
from nemo_run_ray.remote.rows import JobRow

JOBS, IN_FLIGHT = 300, 4
#: Jobs of the loop before the chain, and as many after it, so that the machine's moods hit both.
LOOP = 75
#: The chain as a page, to look at.
PAGE = ROOT / "benchmarks" / "results" / "chain-of-300.html"
_ENDED = ("SUCCEEDED", "FAILED", "STOPPED")


def measure_chain(dashboard: Dashboard) -> dict[str, object]:
    """300 jobs of ``true``, four at once: jobs per minute, memory, ends."""
    api = JobsApi.of(dashboard)
    http = httpx.Client(headers=dashboard.headers, trust_env=False, timeout=60)
    watch = _Watch(dashboard)
    before = _by_loop(http, dashboard.url)
    with watch:
        ours, ended = _by_chain(api)
    after = _by_loop(http, dashboard.url)
    return {
        "jobs": JOBS,
        "per_minute": 60 / ours,
        "bare_per_minute": [60 / before, 60 / after],
        "rate_of_bare": statistics.mean((before, after)) / ours,
        "ended": ended,
        **watch.found(),
    }


def _by_loop(http: httpx.Client, url: str) -> float:
    """Seconds a job, by bare requests: always four in flight, looked at as often as we look."""
    left = [f"bare-{uuid.uuid4().hex}" for _ in range(LOOP)]
    flying: set[str] = set()
    began = time.monotonic()
    while left or flying:
        while left and len(flying) < IN_FLIGHT:
            name = left.pop()
            body = {"submission_id": name, "entrypoint": "true"}
            http.post(f"{url}/api/jobs/", json=body).raise_for_status()
            flying.add(name)
        rows = http.get(f"{url}/api/jobs/").json()
        flying -= {row["submission_id"] for row in rows if row["status"] in _ENDED}
        time.sleep(0.1)
    return (time.monotonic() - began) / LOOP


def _by_chain(api: JobsApi) -> tuple[float, dict[str, int]]:
    """Seconds a job from the first one's start to the last one's end, and how they ended."""
    title = f"chain{uuid.uuid4().hex[:8]}"

    def hand_over() -> None:
        with run.Experiment(title) as experiment:
            for number in range(JOBS):
                executor = RayExecutor(max_in_flight=IN_FLIGHT)
                experiment.add(run.Script(inline="true"), executor=executor, name=f"job{number}")
            experiment.run(detach=True)

    quietly(hand_over)

    def rows() -> list[JobRow]:
        found = api.table(fresh=True).items()
        return [row for name, row in found if re.match(rf"{title}_\d+\.job", name)]

    def is_over() -> bool:
        time.sleep(2)
        return sum(row["status"] in _ENDED for row in rows()) >= JOBS

    wait_for(is_over, within_s=3600)
    done = rows()
    wait_for(lambda: not _dispatchers())
    quietly(lambda: cli.timeline(title, PAGE))
    took_ms = max(one["end_time"] or 0 for one in done) - min(
        one["start_time"] or 0 for one in done
    )
    return took_ms / 1000 / JOBS, dict(Counter(one["status"] for one in done))


class _Watch:
    """Memory of the dispatcher and of the head's own processes while a chain is at work."""

    def __init__(self, dashboard: Dashboard) -> None:
        self._dashboard = dashboard
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._dispatcher: list[int] = []
        self._head: list[tuple[int, int]] = []  # jobs that wait, bytes

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def found(self) -> dict[str, object]:
        early = [size for waiting, size in self._head if waiting > JOBS * 0.8]
        late = [size for waiting, size in self._head if waiting < JOBS * 0.2]
        return {
            "dispatcher_rss_bytes": max(self._dispatcher),
            "head_bytes_when_most_wait": statistics.median(early),
            "head_bytes_when_few_wait": statistics.median(late),
        }

    def _look(self) -> None:
        api = JobsApi(self._dashboard)
        before = len(api.table(fresh=True))
        while not self._over.wait(2):
            for one in _dispatchers():
                self._dispatcher.append(one.memory_info().rss)
            ran = len(api.table(fresh=True)) - before - 1
            self._head.append((JOBS - ran, _head_bytes()))


def _dispatchers() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if "dispatch" in command:
            found.append(process)
    return found


def _head_bytes() -> int:
    """Memory of Ray's control service and its dashboard."""
    total = 0
    for process in psutil.process_iter(["cmdline", "memory_info"]):
        words = " ".join(process.info["cmdline"] or [])
        if "gcs_server" in words or "dashboard" in words:
            total += process.info["memory_info"].rss if process.info["memory_info"] else 0
    return total


def show(found: dict[str, Any], add: Add) -> None:
    mb = 1024**2
    low, high = sorted(found["bare_per_minute"])
    add("a chain's jobs per minute / a bare loop's", f"{found['rate_of_bare']:.2f}", "≥ 0.9")
    add("jobs per minute", f"{found['per_minute']:.1f}; the loop's {low:.1f} and {high:.1f}")
    add(f"ends of {found['jobs']} jobs", str(found["ended"]), "no FAILED")
    add("dispatcher (RSS)", f"{found['dispatcher_rss_bytes'] / mb:.1f} MiB", "< 28.6")
    early, late = found["head_bytes_when_most_wait"], found["head_bytes_when_few_wait"]
    add("head while most wait, while few do", f"{early / mb:.0f} MiB, {late / mb:.0f} MiB")
