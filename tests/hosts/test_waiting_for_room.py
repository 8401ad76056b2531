"""Jobs that wait for room longer than Ray lets them: its limit is 20 s here, 900 s by default."""

import pytest

from nemo_run_ray.experiment.job import find_job
from nemo_run_ray.remote.decide import STARTING_MAX
from tests.conftest import wait_for
from tests.hosts.steps import Step, complaints, starts, submit

#: The only one of its kind in the cluster.
ROOM = {"resources_per_node": {"worker": 2}}
COUNT = 64


@pytest.mark.soak
def test_sixty_four_jobs_in_the_room_of_one(hosts, unique, tmp_path):
    steps = [Step(f"job{number}", seconds=1, fields=ROOM) for number in range(COUNT)]
    name = submit(unique, hosts.cluster, tmp_path, *steps, max_in_flight=COUNT)
    jobs = [find_job(f"{name}.{step.name}") for step in steps]

    wait_for(lambda: all(job.status.state.is_terminal for job in jobs), within_s=1200)

    assert {job.status.state.value for job in jobs} == {"SUCCEEDED"}
    assert complaints(tmp_path) == ""
    assert len(starts(tmp_path)) == COUNT
    # Ray gave up some of the eight that were submitted together, before it was known that there
    # is room for one. From then on one at a time waits.
    rows = hosts.api.table(fresh=True).items()
    own = [row for id_, row in rows if id_.startswith(f"{name}.job")]
    given_up = [row for row in own if row["status"] == "FAILED"]
    assert {row["error_type"] for row in given_up} <= {"JOB_SUPERVISOR_ACTOR_START_TIMEOUT"}
    assert len(given_up) < STARTING_MAX
