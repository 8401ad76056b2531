"""Logs of jobs on other hosts than the head, and what reading them does there."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from nemo_run_ray.experiment.job import RemoteJob, find
from nemo_run_ray.remote.status import JobState, Reason
from tests.conftest import wait_for
from tests.hosts.conftest import Hosts
from tests.hosts.head import bed
from tests.hosts.steps import Step, submit

ON_N2 = {"label_selector": {"pool": "gpu"}, "cpus_per_node": 0.5}


def until(file: str) -> str:
    return f"until test -e {file}; do sleep 0.05; done"


def end(job: RemoteJob, folder: Path) -> None:
    (folder / f"end-{job.name}").touch()
    time.sleep(3)  # Ray's job managers look at their jobs each second


@pytest.mark.soak
def test_a_log_that_is_read_harms_no_job_that_fails_now(hosts: Hosts, unique, tmp_path):
    """The agent of a node whose Ray is new has no job manager yet: see ``end_record.py``."""
    bed("crash", "n2")
    hosts.wait_for_nodes("n1", "n3")
    hosts.revive("n2")
    hosts.wait_for_nodes("n1", "n2", "n3")
    folder = tmp_path / "run"
    folder.mkdir()
    names = ("long", "one", "two")
    steps = (Step(name, end=f"{until(f'end-{name}')}; exit 5", fields=ON_N2) for name in names)
    submit(unique, hosts.cluster, folder, *steps)
    jobs = {job.name: job for job in find(unique)}
    wait_for(lambda: all(job.status.state is JobState.RUNNING for job in jobs.values()))

    assert "long runs" in "".join(hosts.api.whole_log(jobs["long"].id))
    end(jobs["one"], folder)
    assert hosts.get(f"/api/jobs/{jobs['one'].id}")["driver_exit_code"] == 5

    # As Ray's dashboard and `ray job logs` do.
    assert "long runs" in hosts.get(f"/api/jobs/{jobs['long'].id}/logs")["logs"]
    time.sleep(0.3)  # until its job manager has found the jobs that go on
    end(jobs["two"], folder)
    print("Ray 2.60 has lost it:", hosts.get(f"/api/jobs/{jobs['two'].id}"))
    assert jobs["two"].status.detail == "exit code 5"
    end(jobs["long"], folder)
    assert jobs["long"].wait(60).reason is Reason.EXIT_CODE


@pytest.mark.soak
@pytest.mark.parametrize("code", [0, 7])
def test_an_end_while_the_head_is_away_for_long(hosts: Hosts, unique, tmp_path, code):
    """Ray's supervisor gives the head 30 s, and then it writes that the command did not start."""
    folder = tmp_path / "run"
    folder.mkdir()
    submit(unique, hosts.cluster, folder, Step("one", end=f"sleep 5; exit {code}", fields=ON_N2))
    (job,) = find(unique)
    wait_for(lambda: job.status.state is JobState.RUNNING)
    hosts.head.kill()
    time.sleep(65)
    hosts.head.start()
    hosts.wait_for_nodes("n1", "n2", "n3")
    status = job.wait(150)  # who waits makes Ray look after what a head has left behind
    print("Ray 2.60 says:", hosts.get(f"/api/jobs/{job.id}"))
    assert status.state is (JobState.FAILED if code else JobState.SUCCEEDED)
    assert hosts.api.job(job.id)["driver_exit_code"] == code
