"""Jobs of others on the same Ray: nothing that we do touches them, however they look."""

import time

import nemo_run as run
import pytest
from ray.job_submission import JobSubmissionClient

from nemo_run_ray import RayExecutor, find
from nemo_run_ray.dashboard import jobs
from nemo_run_ray.dashboard.http import Http
from nemo_run_ray.dashboard.state import StateApi
from nemo_run_ray.experiment.dispatch import tend
from nemo_run_ray.remote.status import JobState
from tests.conftest import tool, wait_for


@pytest.fixture
def theirs(dashboard, token, unique, api):
    """Submission id of a job that waits for a resource which no node has."""
    client = JobSubmissionClient(
        dashboard.url, headers={"Authorization": f"Bearer {token}"}, verify=False
    )
    name = f"{unique}-theirs"
    client.submit_job(
        entrypoint="true", submission_id=name, entrypoint_resources={"nobody-has-this": 1}
    )
    yield name
    api.stop(name)
    wait_for(lambda: api.table(fresh=True)[name]["status"] in ("STOPPED", "PENDING"))


@pytest.fixture
def ours(existing, unique):
    """An experiment with a job that has ended, and one that waits for what no node has."""
    waits = RayExecutor(cluster=existing, resources_per_node={"nobody-has-this": 1})
    with run.Experiment(unique, skip_status_at_exit=True) as experiment:
        executor = RayExecutor(cluster=existing)
        experiment.add(run.Script(inline="echo ours"), executor=executor, name="job")
        experiment.add(run.Script(inline="true"), executor=waits, name="waits")
        experiment.run(detach=True)
    job, waiting = find(unique)
    job.wait(timeout_s=60)
    yield job, waiting
    waiting.cancel()


def test_a_strangers_job_that_waits_for_ever_stays_as_it_is(existing, unique, api, ours, theirs):
    before = api.table(fresh=True)[theirs]
    known = set(api.table(fresh=True))
    verbs = (["status", "--json"], ["status", "--once"], ["logs", "--job", "job"])
    for verb in verbs:
        done = tool("nemo-run-ray", *verb, unique)
        assert done.returncode == 0, done.stderr
    assert tool("nemo-run-ray", "doctor", "--address", existing.url).returncode == 0
    run.Experiment.from_title(unique).status()
    assert run.Experiment.from_title(unique).status(return_dict=True)["job"]["status"]
    task = run.Script(inline="true")
    run.run(task, executor=RayExecutor(cluster=existing), name=f"{unique}-dry", dryrun=True)
    after = api.table(fresh=True)
    assert after[theirs] == before
    assert set(after) == known


def test_ray_is_woken_for_ours_and_not_for_theirs(unique, api, ours, theirs, monkeypatch):
    """Both jobs look as if they were older than the head."""
    monkeypatch.setattr(StateApi, "head_since", lambda _: time.time())
    monkeypatch.setattr(jobs, "_WAKE_AGAIN_S", 0.0)
    before = api.table(fresh=True)[theirs]
    known = set(api.table(fresh=True))
    sent = []
    request = Http.request

    def spy(self, method, path, *arguments, **content):
        if method != "GET":
            sent.append((method, path, content.get("json", {}).get("submission_id")))
        return request(self, method, path, *arguments, **content)

    monkeypatch.setattr(Http, "request", spy)
    tend(ours[0].record.exp_dir)
    assert sent == [("POST", "/api/jobs/", ours[1].id)]
    after = api.table(fresh=True)
    assert after[theirs] == before
    assert set(after) == known
    assert ours[1].status.state is JobState.PENDING
