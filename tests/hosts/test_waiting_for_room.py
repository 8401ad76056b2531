"""Jobs that wait for room longer than Ray lets them: its limit is 20 s here, 900 s by default."""

import pytest

from nemo_run_ray.jobs.find import find_job
from nemo_run_ray.remote.dispatch.decide import STARTING_MAX
from tests.conftest import wait_for
from tests.hosts.steps import Step, complaints, hand_over, starts

#: The only one of its kind in the cluster.
ROOM = {"resources_per_node": {"worker": 2}}


def run_all(hosts, title, folder, count: int, seconds: float, within_s: float) -> list[dict]:
    """Run jobs that each need all the room; the rows of the job table that they left."""
    steps = [Step(f"job{number}", seconds=seconds, fields=ROOM) for number in range(count)]
    name = hand_over(title, hosts.cluster, folder, *steps, max_in_flight=count)
    jobs = [find_job(f"{name}.{step.name}") for step in steps]

    wait_for(lambda: all(job.status.state.is_terminal for job in jobs), within_s)

    assert {job.status.state.value for job in jobs} == {"SUCCEEDED"}
    assert complaints(folder) == ""
    assert len(starts(folder)) == count
    rows = hosts.api.table(fresh=True).items()
    return [row for id_, row in rows if id_.startswith(f"{name}.job")]


def test_a_start_that_ray_gave_up_is_made_again(hosts, unique, tmp_path):
    rows = run_all(hosts, unique, tmp_path, count=2, seconds=26, within_s=120)

    given_up = [row for row in rows if row["status"] == "FAILED"]
    assert [row["error_type"] for row in given_up] == ["JOB_SUPERVISOR_ACTOR_START_TIMEOUT"]


@pytest.mark.soak
def test_sixty_four_jobs_in_the_room_of_one(hosts, unique, tmp_path):
    rows = run_all(hosts, unique, tmp_path, count=64, seconds=1, within_s=1200)

    # Ray gave up some of the eight that were handed over together, before it was known that there
    # is room for one. From then on one at a time waits.
    given_up = [row for row in rows if row["status"] == "FAILED"]
    assert {row["error_type"] for row in given_up} <= {"JOB_SUPERVISOR_ACTOR_START_TIMEOUT"}
    assert len(given_up) < STARTING_MAX
