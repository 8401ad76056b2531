"""Why a task does not start, said of a real Ray, and what saying it costs."""

import json
import time
from collections.abc import Iterator

import nemo_run as run
import pytest

from nemo_run_ray import RayExecutor
from nemo_run_ray.cli.status_report import observe
from nemo_run_ray.experiment.job import RemoteJob, cancel_all, jobs_of
from nemo_run_ray.experiment.store import find_experiment
from nemo_run_ray.remote.status import JobState, Reason
from tests.conftest import wait_for

#: What tasks ask for, of 4 CPUs of which ``holder`` has 3.
_ASKS = {
    "waits": {"cpus_per_node": 2},
    "no_label": {"cpus_per_node": 1, "label_selector": {"gpu_kind": "h100"}},
}
#: The limit needs a dispatcher.
_TOO_LARGE = {"too_large": {"cpus_per_node": 16, "pending_timeout_s": 600}}


def submit(title: str, tasks: dict[str, dict]) -> dict[str, RemoteJob]:
    with run.Experiment(title, skip_status_at_exit=True) as experiment:
        for name, fields in tasks.items():
            executor = RayExecutor(**fields)
            experiment.add(run.Script(inline="sleep 600"), executor=executor, name=name)
        experiment.run(detach=True)
    exp_dir = find_experiment(experiment._id)
    assert exp_dir is not None
    return {job.name: job for job in jobs_of(exp_dir)}


@pytest.fixture(scope="module")
def jobs(local_cluster) -> Iterator[dict[str, RemoteJob]]:
    """A task that runs, others that cannot, and one of them from a dispatcher."""
    title = f"why{time.time_ns()}"
    found = submit(title, {"holder": {"cpus_per_node": 3}})
    wait_for(lambda: found["holder"].status.state is JobState.RUNNING)
    found |= submit(f"{title}a", _ASKS)
    found |= submit(f"{title}b", _TOO_LARGE)
    yield found
    list(cancel_all(list(found.values())))


def explained(job: RemoteJob) -> str:
    """The status in words, once Ray has told what its nodes have free."""
    wait_for(lambda: job.status.reason in (Reason.ROOM, Reason.UNSCHEDULABLE), within_s=120)
    assert job.status.state is JobState.PENDING
    return job.status.detail


def test_more_than_is_free(jobs):
    # What was asked while the holder started itself is told for seconds: Ray's table of actors did
    # not have the holder then.
    wait_for(lambda: f"held by {jobs['holder'].id} " in jobs["waits"].status.detail)
    words = explained(jobs["waits"])
    assert jobs["waits"].status.reason is Reason.ROOM
    assert words.startswith("It asks for CPU 2; the node ")
    assert f"has CPU 1 of 4 free; there it is held by {jobs['holder'].id} (CPU 3). " in words
    assert "It has been waiting since " in words


def test_status_shows_it_for_people_and_programs(jobs):
    for job in jobs.values():
        if job.name != "holder":
            explained(job)
    rows = {row["job"]: row for row in json.loads(observe(list(jobs.values())).as_json())}
    assert rows["holder"]["waits_for_room"] == ""
    assert rows["waits"]["waits_for_room"].startswith("It asks for CPU 2; ")
    assert {row["state"] for row in rows.values() if row["waits_for_room"]} == {"PENDING"}
    assert {name for name, row in rows.items() if row["waits_for_room"]} == {*_ASKS, *_TOO_LARGE}
