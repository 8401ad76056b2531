"""A chain goes on in the next allocation of its cluster."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from time import monotonic, sleep

import pytest

from nemo_run_ray.clusters import Dashboard, from_record
from nemo_run_ray.remote.status import Reason
from tests.conftest import wait_for
from tests.slurm.conftest import BIN
from tests.slurm.test_slurm_cluster import Allocations, allocations

__all__ = ["allocations"]

_START = {"submission_id": "d", "entrypoint": "python -m x @submission_id@", "metadata": {}}


def _table(dashboard: Dashboard) -> list[dict]:
    request = urllib.request.Request(f"{dashboard.url}/api/jobs/", headers=dashboard.headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)


def test_what_is_left_goes_on_in_the_next_allocation(allocations: Allocations):
    cluster = allocations.cluster(renew=True)
    cluster.connect()
    remembered = from_record(cluster.record())
    cluster.keep_dispatch("d", ["a", "b"], dict(_START), lambda: {"_ray_pkg_x.zip": b"x"})
    rows = [
        {"submission_id": "a", "status": "SUCCEEDED"},
        # A dispatcher that had no time for what is left.
        {"submission_id": "d", "status": "FAILED", "driver_exit_code": 9},
        {"submission_id": "other", "status": "SUCCEEDED"},
    ]
    (allocations.folder / "jobs.json").write_text(json.dumps(rows))
    first = allocations.life()
    session = wait_for(lambda: next(first.glob("run/*/session"), None)).read_text()
    wait_for(lambda: list(first.glob("run/*/end.json")), 60)
    allocations.run_jobs()  # the next Ray has none
    archive = wait_for(lambda: remembered.archive(session), 30)
    assert archive.continues
    waits = archive.reason
    assert "the remaining jobs need more time than it has, and " in waits

    dashboard = wait_for(remembered.find, 90)
    assert sorted(dashboard.earlier.rows) == ["a", "d"], "no other jobs than those of chains"
    (posted,) = wait_for(lambda: _table(dashboard), 30)
    assert (posted["submission_id"], posted["entrypoint"]) == ("d@2", "python -m x d@2")
    second = allocations.life(2)
    assert os.listdir(second / "users") == os.listdir(first / "users"), "they wait for it"
    (number,) = allocations.jobs("RUNNING")
    assert number == (second / "job").read_text().strip()
    assert f"chains continue in Slurm job {number}" in remembered.archive(session).reason
    cluster._leave()
    assert os.listdir(second / "users") == []


def test_without_progress_there_is_no_next_one(allocations: Allocations):
    """A dispatcher that always fails would go on for ever."""
    cluster = allocations.cluster(renew=True, idle_timeout_s=3)
    cluster.connect()
    cluster.keep_dispatch("d", ["a"], dict(_START), dict)
    rows = [{"submission_id": "d", "status": "FAILED", "driver_exit_code": 1}]
    (allocations.folder / "jobs.json").write_text(json.dumps(rows))
    wait_for(lambda: not allocations.jobs(), 60)
    assert not allocations.life(2).exists()
    (end,) = allocations.life().glob("run/*/end.json")
    assert "no job has run for 3 s" in json.loads(end.read_text())["why"]


#: Submits a chain of six and leaves, or waits for it; each job writes down that it began.
_CHAIN = """
import sys
import nemo_run as run
from nemo_run_ray import RayExecutor, SlurmCluster
slurm = run.SlurmExecutor(account="root", nodes=1, time="00:02:00", setup_lines=sys.argv[2],
                          tunnel=run.LocalTunnel(job_dir=sys.argv[1]))
cluster = SlurmCluster(executor=slurm, renew=True)
leaves = sys.argv[3] == "leaves"
fields = {"retries": 1} if leaves else {"time_s": 28}
with run.Experiment("long", executor=RayExecutor(cluster=cluster, **fields)) as experiment:
    before = []
    for number in range(1, 7):
        line = f"echo job {number}; echo {number} >> {sys.argv[1]}/began; sleep 20"
        before = [experiment.add(run.Script(inline=line), name=f"job{number}", dependencies=before)]
    experiment.run(detach=leaves)
"""


@pytest.mark.soak
@pytest.mark.parametrize("client", ["stays", "is killed", "leaves"])
def test_a_chain_that_is_longer_than_the_walltime(allocations: Allocations, tmp_path, client):
    """Neither its client nor a look sees a loss during the renewals.

    Where it knows how long a job takes, every job runs once; else, for the client that leaves, each
    walltime may cut one off, which is tried again.
    """
    env = {**os.environ, "NEMORUN_HOME": str(tmp_path / "home")}
    env["PATH"] = env["PATH"].removeprefix(f"{BIN}:")  # Slurm's own srun, which has no pyxis
    setup = f"export PATH={Path(sys.executable).parent}:$PATH"

    def done(*words: str) -> str:
        found = subprocess.run(
            [*words], env=env, capture_output=True, text=True, timeout=240, cwd=tmp_path
        )
        assert found.returncode == 0, found.stdout + found.stderr
        return found.stdout

    words = [sys.executable, "-c", _CHAIN, str(allocations.folder), setup, client]
    with open(tmp_path / "out", "w") as out:
        process = subprocess.Popen(words, env=env, cwd=tmp_path, stdout=out)
    allocations.clients.append(process)
    if client == "leaves":
        assert process.wait(240) == 0
    file = allocations.folder / "began"
    wait_for(lambda: file.exists() and (client != "is killed" or "2" in file.read_text()), 240)
    if client == "is killed":
        process.kill()
    command = str(Path(sys.executable).parent / "nemo-run-ray")
    deadline = monotonic() + 600
    seen = set()
    while True:
        rows = json.loads(done(command, "status", "--json", "long"))
        states = [row["state"] for row in rows]
        seen |= set(states)
        if set(states) <= {"SUCCEEDED", "FAILED", "CANCELLED", "LOST"}:
            break
        assert monotonic() < deadline, rows
        sleep(3)
    assert states == ["SUCCEEDED"] * 6, rows
    assert "LOST" not in seen
    assert process.wait(60) == (-signal.SIGKILL if client == "is killed" else 0)
    assert "LOST" not in (tmp_path / "out").read_text()
    began = (allocations.folder / "began").read_text().split()
    tries = {row["job"].removeprefix("job"): len(row["attempts"]) for row in rows}
    assert began == [number for number in "123456" for _ in range(tries[number])]
    lives = sorted(path.name for path in (allocations.folder / "ray" / "lives").iterdir())
    assert len(lives) > 1
    cut_off = [attempt["reason"] for row in rows for attempt in row["attempts"][:-1]]
    assert len(cut_off) < len(lives) if client == "leaves" else not cut_off, (rows, lives)
    assert set(cut_off) <= {Reason.ALLOCATION.value}, "nothing else is tried again"
    for number in "123456":
        log = done(command, "logs", "long", "--job", f"job{number}")
        assert re.findall(r"^job \d$", log, re.M) == [f"job {number}"] * tries[number]
    # The last one ends by itself, since its chain is over and nobody uses it.
    assert set(lives) == {str(number) for number in range(1, len(lives) + 1)}
