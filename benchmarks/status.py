"""One look at a chain of many jobs: its own time, and how often the cluster is asked."""

from __future__ import annotations

import contextlib
import gc
import io
import statistics
import time
import uuid
from pathlib import Path
from typing import Any

import typer

from benchmarks.common import FOLDER, Add
from nemo_run_ray import ExistingCluster
from nemo_run_ray.cli import main as cli
from nemo_run_ray.experiment.dispatch import Dispatch
from nemo_run_ray.experiment.store import INTENT, SUBMITTED, store_of
from nemo_run_ray.remote.spec import NONCE_KEY, DispatchedJobSpec, DispatchSpec
from tests.fake_ray import NODE, FakeRay, fake_ray
from tests.rooms import FakeNode, supervisor, tables

SIZES = 500, 1000, 2000
ROUNDS = 5
#: So many of four jobs have ended; the others wait, run, or wait for their turn.
_STATUSES = ("SUCCEEDED", "FAILED", "RUNNING", "PENDING")


def measure() -> dict[str, object]:
    """Seconds of ``status --once`` at each size, the first look and later ones, and its requests.

    The first look writes down how jobs have ended. The clusters are simulated, in this process.
    What is there before the first look is left out of the work of Python's collector of cycles: it
    would go through the imported libraries too, 0.1 s once in a look at 1,000 jobs and never in one
    at 500.
    """
    found: dict[str, object] = {"jobs": list(SIZES)}
    firsts, laters, requests = [], [], []
    for size in SIZES:
        with fake_ray(now=time.time()) as ray:
            name = _hand_over(ray, size)
            gc.collect()
            gc.freeze()
            try:
                firsts.append(_look(name))
                ray.requests.clear()
                laters.append(statistics.median(_look(name) for _ in range(ROUNDS)))
            finally:
                gc.unfreeze()
            requests.append(ray.requests.count(("GET", "/api/jobs/")) / ROUNDS)
    found |= {"first_look_s": firsts, "later_look_s": laters, "tables_a_look": requests}
    found["growth"] = laters[-1] / laters[0]
    return found


def _look(name: str) -> float:
    time.sleep(2)  # a table serves everybody in a process for a moment
    began = time.monotonic()
    # Some of the jobs have failed, which the command's exit code says.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(typer.Exit):
        cli.status(name, as_json=False, once=True)
    return time.monotonic() - began


def _hand_over(ray: FakeRay, size: int) -> str:
    """What a client leaves of a chain of so many jobs; the experiment's id.

    Those that run hold all CPUs of the cluster, which those that are pending wait for.
    """
    title = f"wide{size}"
    name = f"{title}_{uuid.uuid4().hex[:8]}"
    exp_dir = Path(FOLDER, "home", "experiments", title, name)
    exp_dir.mkdir(parents=True)
    dispatcher, nonce = f"{name}.dispatcher", uuid.uuid4().hex[:16]
    jobs = [_job(f"{name}.job{number}", f"job{number}") for number in range(size)]
    spec = DispatchSpec(dispatcher, nonce, tuple(jobs), ray.session, (ray.url,))
    Dispatch.of(exp_dir, dispatcher).save(spec, {}, [], {})
    common: dict[str, Any] = {
        "cluster": ExistingCluster(url=ray.url).record(),
        "session": ray.session,
        "dispatcher": dispatcher,
        "reservation": {"entrypoint_num_cpus": 1.0},
    }
    events = [
        (INTENT, one.id, {**common, "job": one.name, "role": one.name, "nonce": one.nonce})
        for one in jobs
    ]
    own = {**common, "job": "dispatcher", "role": "dispatcher", "nonce": nonce}
    events.append((INTENT, dispatcher, {**own, "is_dispatcher": True}))
    events.append((SUBMITTED, dispatcher, {}))
    store_of(exp_dir).ledger.write_all(events)
    ray.add(dispatcher, {NONCE_KEY: nonce}, status="RUNNING")
    for number, one in enumerate(jobs):
        status = _STATUSES[number % len(_STATUSES)]
        code = {"SUCCEEDED": 0, "FAILED": 1}.get(status)
        node = None if status == "PENDING" else NODE
        ray.add(one.id, {NONCE_KEY: one.nonce}, status=status, driver_exit_code=code)
        ray.rows[one.id]["driver_node_id"] = node
        ray.rows[one.id]["start_time"] -= 60_000
    running = _STATUSES.index("RUNNING")
    busy = FakeNode("busy", {"CPU": size / 4})
    actors = [supervisor(one.id, busy, CPU=1.0) for one in jobs[running :: len(_STATUSES)]]
    ray.tables = tables(busy, actors=actors)
    return name


def _job(submission_id: str, name: str) -> DispatchedJobSpec:
    nonce = uuid.uuid4().hex[:16]
    body = {"submission_id": submission_id, "entrypoint": "true", "metadata": {NONCE_KEY: nonce}}
    return DispatchedJobSpec(name, submission_id, nonce, body)


def show(found: dict[str, Any], add: Add) -> None:
    for size, first, later in zip(
        found["jobs"], found["first_look_s"], found["later_look_s"], strict=True
    ):
        add(f"status --once of {size} jobs", f"{later:.2f} s; the first look {first:.2f} s")
    most = max(found["tables_a_look"])
    add("job tables asked for by one look", f"{most:.0f}", "1")
    add("time of 2000 jobs / of 500", f"{found['growth']:.1f}", "about 4")
