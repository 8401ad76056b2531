"""Cancelling jobs that run, wait for room, ignore SIGTERM or have ended; chains."""

import re

import nemo_run as run
import pytest

from nemo_run_ray import RayExecutor
from nemo_run_ray.experiment.job import RemoteJob, cancel_one, find_job
from nemo_run_ray.remote.status import JobState
from tests.conftest import processes_of, wait_for
from tests.groups import submit_one


@pytest.fixture
def start(existing):
    def start(name: str, inline: str, **fields) -> RemoteJob:
        executor = RayExecutor(cluster=existing, **fields)
        return submit_one(name, executor, run.Script(inline=inline))

    return start


def test_a_job_that_waits_for_room_never_runs_its_command(start, unique, tmp_path, api):
    room = start(f"{unique}a", "sleep 300", cpus_per_node=4)
    wait_for(lambda: room.status.state is JobState.RUNNING)
    waiting = start(f"{unique}b", f"date > {tmp_path}/ran", cpus_per_node=4)
    wait_for(lambda: waiting.status.state is JobState.PENDING)

    status = waiting.cancel()
    assert status.state is JobState.CANCELLED
    assert find_job(waiting.id).status.state is JobState.CANCELLED
    assert "Running entrypoint" not in "".join(waiting.log(follow=True))
    assert room.cancel().state is JobState.CANCELLED

    wait_for(lambda: api.job(waiting.id)["status"] == "STOPPED")
    assert not (tmp_path / "ran").exists()


def test_a_command_that_ignores_sigterm_is_killed_after_its_grace(start, unique):
    job = start(unique, "trap 'echo asked' TERM; while :; do sleep 1; done", grace_s=2)
    wait_for(lambda: len(processes_of(job.id)) >= 2)

    assert job.cancel().state is JobState.CANCELLED
    assert job.cancel().state is JobState.CANCELLED, "what has ended stays as it is"

    assert processes_of(job.id) == []
    log = "".join(job.log(follow=True))
    assert log.count("asked") == 1
    assert "no process of it is left" in log


def test_cancelling_what_has_ended_changes_nothing(start, unique):
    job = start(unique, "true")
    wait_for(lambda: job.status.state is JobState.SUCCEEDED)
    assert job.cancel().state is JobState.SUCCEEDED
    assert cancel_one(job) == "job is SUCCEEDED: there is nothing to cancel"


@pytest.mark.soak
def test_nemo_run_orders_a_chain(existing, unique, tmp_path):
    order = tmp_path / "order"
    with run.Experiment(unique, executor=RayExecutor(cluster=existing)) as experiment:
        for name in ("first", "second"):
            script = run.Script(inline=f"sleep 1; echo {name} >> {order}")
            experiment.add(script, name=name)
        experiment.run(sequential=True)

    assert re.findall(r"\w+", order.read_text()) == ["first", "second"]
