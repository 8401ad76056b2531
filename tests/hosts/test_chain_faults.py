"""Chains whose dispatcher, dashboard and head are struck at random moments.

Every job takes a lock, looks for its upstreams' results and complains: see ``steps.py``.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from nemo_run_ray import ExistingCluster
from nemo_run_ray.dashboard.jobs import JobsApi
from nemo_run_ray.experiment.dispatch import Dispatch, dispatches_of, start_dispatcher, tend
from nemo_run_ray.experiment.job import jobs_of
from nemo_run_ray.experiment.store import Ledger
from nemo_run_ray.remote.status import JobState, Reason, is_pending
from tests.conftest import wait_for
from tests.hosts.conftest import HEAD, TOKEN, Hosts
from tests.hosts.steps import FLAKY, Step, complaints, starts, submit

WAY = 8267
ON_WORKERS = {"label_selector": {"pool": "in(gpu,cpu)"}}
STEPS = (
    Step("prepare", fields=ON_WORKERS),
    Step("left", ("prepare",), 1.5, fields=ON_WORKERS),
    Step("right", ("prepare",), 1, fields=ON_WORKERS),
    Step("flaky", ("prepare",), end=FLAKY, fields={**ON_WORKERS, "retries": 2}),
    Step("join", ("left", "right", "flaky"), fields=ON_WORKERS),
    Step("broken", ("prepare",), end="exit 7", fields=ON_WORKERS),
    Step("never", ("broken",), fields=ON_WORKERS),
)
ENDS = {
    **dict.fromkeys(("prepare", "left", "right", "flaky", "join"), ("SUCCEEDED", "")),
    "broken": ("FAILED", "exit code"),
    "never": ("CANCELLED", "upstream"),
}


@dataclass
class Run:
    """A chain that was submitted, and what may be struck."""

    hosts: Hosts
    dispatch: Dispatch
    api: JobsApi
    record: dict
    drop: Path
    chance: random.Random


def kill_process(run: Run) -> None:
    def dispatchers() -> list[int]:
        return run.hosts.processes(lambda _, words: "dispatch" in words)

    found = wait_for(lambda: dispatchers() or is_over(run), 60)
    if isinstance(found, list):  # else the chain was faster, as it may still be
        with contextlib.suppress(ProcessLookupError):
            os.kill(run.chance.choice(found), signal.SIGKILL)


def stop_job(run: Run) -> None:
    run.api.stop(newest(run))


def start_second(run: Run) -> None:
    start_dispatcher(run.dispatch, run.api, run.record)


def drop_answers(run: Run) -> None:
    run.drop.write_text("0.5")
    time.sleep(run.chance.uniform(2, 6))
    run.drop.unlink()


def restart_dashboard(run: Run) -> None:
    run.hosts.head.restart_dashboard()


def restart_head(run: Run) -> None:
    run.hosts.head.kill()
    time.sleep(run.chance.uniform(0, 5))
    run.hosts.head.start()


def restart_head_at_a_start(run: Run) -> None:
    """Ray gives up what was about to start, and some of it twice over (see ``end_record.py``)."""

    def is_starting() -> bool:
        rows = run.api.table(fresh=True)
        return any(is_pending(row) for name, row in rows.items() if name != run.dispatch.id)

    wait_for(lambda: is_starting() or is_over(run), 60)
    restart_head(run)


FAULTS = (
    kill_process,
    stop_job,
    start_second,
    drop_answers,
    restart_dashboard,
    restart_head,
    restart_head_at_a_start,
)


@pytest.fixture(scope="module")
def drop(hosts, tmp_path_factory) -> Path:
    """The file that says which part of the answers on the other way is lost."""
    file = tmp_path_factory.mktemp("drop") / "share"
    hosts.head.start_way(WAY, file)
    return file


def is_over(run: Run) -> bool:
    """As a client that waits: a dispatcher that died with the head is started again by that."""
    return ended(run.dispatch.exp_dir) is not None


def newest(run: Run) -> str:
    """Id of the newest dispatcher in the job table."""
    rows = run.api.table(fresh=True)
    ours = [row for name, row in rows.items() if name.partition("@")[0] == run.dispatch.id]
    return max(ours, key=lambda row: row["start_time"])["submission_id"]


def strike(
    hosts: Hosts,
    drop: Path,
    title: str,
    folder: Path,
    chance: random.Random,
    faults: list[Callable[[Run], None]],
) -> None:
    """Hand a chain over, strike it, and check that everything ended as it had to."""
    folder.mkdir()
    cluster = ExistingCluster(url=f"http://{HEAD}:{WAY}", token=TOKEN)
    name = submit(title, cluster, folder, *STEPS, max_in_flight=3)
    (exp_dir,) = Path(os.environ["NEMORUN_HOME"]).glob(f"experiments/*/{name}")
    (dispatch,) = dispatches_of(exp_dir)
    record = next(iter(Ledger(exp_dir).jobs().values())).cluster
    run = Run(hosts, dispatch, hosts.api, record, drop, chance)
    for fault in faults:
        time.sleep(chance.uniform(0.2, 3))
        fault(run)
    # An attempt that the head has lost is tried again after 165 s: raylets wait for their head here
    # for 150 s, and until then its command may run.
    ends = wait_for(lambda: ended(exp_dir), within_s=450)
    assert ends == ENDS
    assert complaints(folder) == ""
    assert [one for one in starts(folder) if one.startswith("never")] == []
    hosts.wait_for_nodes("n1", "n2", "n3")


def ended(exp_dir: Path) -> dict[str, tuple[str, str]] | None:
    """How every job ended, or ``None`` as long as one has not; who waits looks after them."""
    tend(exp_dir)
    statuses = {job.name: job.status for job in jobs_of(exp_dir)}
    time.sleep(1)  # as a person watches, not as a loop does
    if not all(one.state.is_terminal for one in statuses.values()):
        return None
    return {name: (one.state.value, one.reason.value) for name, one in statuses.items()}


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(
            (kill_process, drop_answers, restart_dashboard),
            id="dispatcher and dashboard",
            marks=pytest.mark.soak,
        ),
        pytest.param((restart_head,), id="head", marks=pytest.mark.soak),
        pytest.param((restart_head_at_a_start,), id="head at a start"),
    ],
)
def test_a_chain_outlives(hosts, drop, unique, tmp_path, faults):
    print(f"seed {unique}")
    strike(hosts, drop, unique, tmp_path / "run", random.Random(unique), list(faults))


@pytest.mark.soak
def test_what_a_lost_head_had_is_lost(hosts, unique, tmp_path):
    """Without the tables in Redis nobody knows how the jobs ended."""
    tmp_path.joinpath("run").mkdir()
    steps = (Step("one", fields=ON_WORKERS), Step("two", ("one",), 600, fields=ON_WORKERS))
    name = submit(unique, hosts.cluster, tmp_path / "run", *steps, Step("three", ("two",)))
    (exp_dir,) = Path(os.environ["NEMORUN_HOME"]).glob(f"experiments/*/{name}")
    jobs = {job.name: job for job in jobs_of(exp_dir)}
    wait_for(lambda: jobs["two"].status.state is JobState.RUNNING)
    assert jobs["one"].wait(60).state is JobState.SUCCEEDED

    hosts.head.kill()
    wait_for(lambda: jobs["two"].status.state is JobState.UNKNOWN)
    away = jobs["two"].status
    hosts.start_anew(keeps_its_table=False)
    try:
        lost = {job.name: job.status for job in jobs_of(exp_dir)}
    finally:
        hosts.head.kill()
        hosts.start_anew(keeps_its_table=True)

    assert (away.state, away.reason) == (JobState.UNKNOWN, Reason.UNREACHABLE)
    assert lost["one"].state is JobState.SUCCEEDED, "it was written down before"
    for one in ("two", "three"):
        assert (lost[one].state, lost[one].reason) == (JobState.LOST, Reason.CLUSTER_GONE)
        assert "not the one that had it" in lost[one].detail


@pytest.mark.soak
def test_fifty_chains_with_faults_at_random(hosts, drop, unique, tmp_path):
    first = int(os.environ.get("SEED", random.randrange(10**6)))
    for seed in range(first, first + int(os.environ.get("RUNS", 50))):
        chance = random.Random(seed)
        faults = chance.choices(FAULTS, k=chance.randint(1, 4))
        began_at = time.monotonic()
        strike(hosts, drop, f"{unique}s{seed}", tmp_path / str(seed), chance, faults)
        names = ", ".join(one.__name__ for one in faults)
        print(f"seed {seed}: {names}: {time.monotonic() - began_at:.0f} s", file=sys.stderr)
