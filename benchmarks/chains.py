"""A chain of many short jobs beside a plain loop of requests that keeps as many of them going."""

from __future__ import annotations

import re
import statistics
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import httpx
import nemo_run as run
import psutil

from benchmarks.common import ROOT, Add, quietly, wait_for
from nemo_run_ray import RayExecutor
from nemo_run_ray.cli import main as cli
from nemo_run_ray.clusters import Dashboard
from nemo_run_ray.dashboard.jobs import JobsApi
from nemo_run_ray.remote.spec import JobRow

#: Jobs of the chain; as many of it, and as many of the loop, are in flight at a time.
JOBS, IN_FLIGHT = 120, 2
#: The chain as a page, to look at.
PAGE = ROOT / "benchmarks" / "results" / f"chain-of-{JOBS}.html"
_ENDED = ("SUCCEEDED", "FAILED", "STOPPED")


def measure_chain(dashboard: Dashboard) -> dict[str, object]:
    """120 jobs of ``true`` beside a loop at the same time: jobs per minute, memory, ends.

    The two share the processors, so that the machine's moods hit both: one after the other they
    were 12 to 27 % apart for a loop before the chain and the same loop after it.
    """
    api = JobsApi.of(dashboard)
    title = f"chain{uuid.uuid4().hex[:8]}"
    loop = _Loop(dashboard)
    watch = _Watch(dashboard, title)
    with _beside(loop.run), _beside(watch.run):
        rows = _by_chain(api, title)
    began, ended = min(_times(rows, "start_time")), max(_times(rows, "end_time"))
    ours, bare = (_per_minute(some, began, ended) for some in (rows, loop.rows()))
    return {
        "jobs": JOBS,
        "per_minute": ours,
        "bare_per_minute": bare,
        "rate_of_bare": ours / bare,
        "ended": dict(Counter(row["status"] for row in rows)),
        **watch.found(),
    }


def _times(rows: Iterable[JobRow], name: Literal["start_time", "end_time"]) -> list[int]:
    """Milliseconds since 1970 at which jobs have started, or ended."""
    return [found for row in rows if (found := row[name])]


def _per_minute(rows: Iterable[JobRow], began_ms: int, ended_ms: int) -> float:
    """Jobs a minute, from the first to the last end that lies in that time."""
    ends = sorted(at for at in _times(rows, "end_time") if began_ms <= at <= ended_ms)
    return (len(ends) - 1) / (ends[-1] - ends[0]) * 60_000


def _by_chain(api: JobsApi, title: str) -> list[JobRow]:
    """Run the chain; its jobs."""

    def hand_over() -> None:
        with run.Experiment(title) as experiment:
            for number in range(JOBS):
                executor = RayExecutor(max_in_flight=IN_FLIGHT)
                experiment.add(run.Script(inline="true"), executor=executor, name=f"job{number}")
            experiment.run(detach=True)

    quietly(hand_over)

    def is_over() -> bool:
        time.sleep(2)
        return sum(row["status"] in _ENDED for row in _jobs_of(api, title)) >= JOBS

    wait_for(is_over, within_s=3600)
    wait_for(lambda: not _dispatchers())
    quietly(lambda: cli.timeline(title, PAGE))
    return _jobs_of(api, title)


def _jobs_of(api: JobsApi, title: str) -> list[JobRow]:
    """The jobs of a chain that have been submitted."""
    found = api.table(fresh=True).items()
    return [row for name, row in found if re.match(rf"{title}_\d+\.job", name)]


@contextmanager
def _beside(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Let a thread work until the block, and so the event, is over."""
    over = threading.Event()
    thread = threading.Thread(target=work, args=(over,))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class _Loop:
    """Keeps as many bare jobs going, and looks at them as often as we look."""

    def __init__(self, dashboard: Dashboard) -> None:
        self._url = dashboard.url
        self._http = httpx.Client(headers=dashboard.headers, trust_env=False, timeout=60)
        self._names: set[str] = set()

    def rows(self) -> list[JobRow]:
        """Its jobs."""
        rows: list[JobRow] = self._http.get(f"{self._url}/api/jobs/").json()
        return [row for row in rows if row["submission_id"] in self._names]

    def run(self, over: threading.Event) -> None:
        """Keep them going."""
        flying: set[str] = set()
        while not over.is_set():
            while len(flying) < IN_FLIGHT:
                name = f"bare-{uuid.uuid4().hex}"
                body = {"submission_id": name, "entrypoint": "true"}
                self._http.post(f"{self._url}/api/jobs/", json=body).raise_for_status()
                flying.add(name)
                self._names.add(name)
            flying -= {row["submission_id"] for row in self.rows() if row["status"] in _ENDED}
            time.sleep(0.1)


class _Watch:
    """Memory of the dispatcher and of the head's own processes while a chain is at work."""

    def __init__(self, dashboard: Dashboard, title: str) -> None:
        self._dashboard = dashboard
        self._title = title
        self._dispatcher: list[int] = []
        self._head: list[tuple[int, int]] = []  # jobs that wait, bytes

    def found(self) -> dict[str, object]:
        early = [size for waiting, size in self._head if waiting > JOBS * 0.8]
        late = [size for waiting, size in self._head if waiting < JOBS * 0.2]
        return {
            "dispatcher_rss_bytes": max(self._dispatcher),
            "head_bytes_when_most_wait": statistics.median(early),
            "head_bytes_when_few_wait": statistics.median(late),
        }

    def run(self, over: threading.Event) -> None:
        """Look now and then."""
        api = JobsApi(self._dashboard)
        while not over.wait(2):
            for one in _dispatchers():
                self._dispatcher.append(one.memory_info().rss)
            self._head.append((JOBS - len(_jobs_of(api, self._title)), _head_bytes()))


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
    add("a chain's jobs per minute / a bare loop's", f"{found['rate_of_bare']:.2f}", "≥ 0.9")
    add("jobs per minute", f"{found['per_minute']:.1f}; the loop's {found['bare_per_minute']:.1f}")
    add(f"ends of {found['jobs']} jobs", str(found["ended"]), "no FAILED")
    add("dispatcher (RSS)", f"{found['dispatcher_rss_bytes'] / mb:.1f} MiB", "< 28.6")
    early, late = found["head_bytes_when_most_wait"], found["head_bytes_when_few_wait"]
    add("head while most wait, while few do", f"{early / mb:.0f} MiB, {late / mb:.0f} MiB")
