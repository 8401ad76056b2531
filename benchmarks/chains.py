"""A chain of many short jobs beside a plain loop of requests that keeps as many of them going."""

from __future__ import annotations

import re
import statistics
import threading
import time
import uuid
from collections.abc import Callable

import httpx
import nemo_run as run
import psutil

from benchmarks.common import quietly, wait_for
from nemo_run_ray import RayExecutor
from nemo_run_ray.clusters import Dashboard
from nemo_run_ray.jobs_api import JobsApi

JOBS, IN_FLIGHT = 300, 4
#: Jobs of one turn: the two peers take turns, so that the machine's moods hit both.
TURN = 60
_ENDED = ("SUCCEEDED", "FAILED", "STOPPED")


def measure_chain(dashboard: Dashboard) -> dict[str, object]:
    """300 jobs of ``true``, four at once: jobs per minute, memory, requests, failures."""
    api = JobsApi.of(dashboard)
    http = httpx.Client(headers=dashboard.headers, trust_env=False, timeout=60)
    ours, bare = [], []
    watch = _Watch(dashboard)
    for _ in range(JOBS // TURN):
        bare.append(_by_loop(http, dashboard.url))
        ours.append(_by_chain(api, TURN))
    with watch:
        minutes = _by_chain(api, JOBS) * JOBS / 60
    failed = [one for one, row in api.table(fresh=True).items() if row["status"] == "FAILED"]
    return {
        "jobs": JOBS,
        "minutes": minutes,
        "seconds_per_job": statistics.median(ours),
        "seconds_per_job_range": (min(ours), max(ours)),
        "bare_seconds_per_job": statistics.median(bare),
        "bare_seconds_per_job_range": (min(bare), max(bare)),
        "rate_of_bare": statistics.median(bare) / statistics.median(ours),
        "failed": len(failed),
        **watch.found(),
    }


def _by_loop(http: httpx.Client, url: str) -> float:
    """Seconds a job, by bare requests: always four in flight, looked at as often as we look."""
    left = [f"bare-{uuid.uuid4().hex}" for _ in range(TURN)]
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
    return (time.monotonic() - began) / TURN


def _by_chain(api: JobsApi, count: int) -> float:
    """Seconds a job from the first one's start to the last one's end, by the cluster's times."""
    title = f"chain{uuid.uuid4().hex[:8]}"

    def hand_over() -> None:
        with run.Experiment(title) as experiment:
            for number in range(count):
                executor = RayExecutor(max_in_flight=IN_FLIGHT)
                experiment.add(run.Script(inline="true"), executor=executor, name=f"job{number}")
            experiment.run(detach=True)

    quietly(hand_over)

    def rows() -> list[dict]:
        found = api.table(fresh=True).items()
        return [row for name, row in found if re.match(rf"{title}_\d+\.job", name)]

    def is_over() -> bool:
        time.sleep(2)
        return sum(row["status"] in _ENDED for row in rows()) == count

    wait_for(is_over, within_s=3600)
    done = rows()
    assert all(row["status"] == "SUCCEEDED" for row in done), done
    wait_for(lambda: not _dispatchers())
    return (max(one["end_time"] for one in done) - min(one["start_time"] for one in done)) / (
        1000 * count
    )


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
        if "-I" in command and "dispatch" in command:
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


def show(found: dict, add: Callable[..., None]) -> None:
    """Add the rows of the benchmark's table."""
    mb = 1024**2
    add("a chain's jobs per minute / bare loop", f"{found['rate_of_bare']:.2f}", "≥ 0.9")
    low, high = found["seconds_per_job_range"]
    add("seconds a job, chain", f"{found['seconds_per_job']:.2f} ({low:.2f} to {high:.2f})")
    low, high = found["bare_seconds_per_job_range"]
    add("seconds a job, loop", f"{found['bare_seconds_per_job']:.2f} ({low:.2f} to {high:.2f})")
    add(f"{found['jobs']} jobs: failed ones", str(found["failed"]), "0")
    add("dispatcher (RSS)", f"{found['dispatcher_rss_bytes'] / mb:.1f} MiB", "< 28.6")
    early, late = found["head_bytes_when_most_wait"], found["head_bytes_when_few_wait"]
    add("head while most wait, while few do", f"{early / mb:.0f} MiB, {late / mb:.0f} MiB")
