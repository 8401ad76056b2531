"""Jobs of others on the same Ray: nothing that we do touches them, however they look."""

import pytest
from ray.job_submission import JobSubmissionClient

from nemo_run_ray import RayExecutor, find
from nemo_run_ray.dashboard import wake
from nemo_run_ray.jobs.tend import tend
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


def test_a_strangers_job_that_waits_for_ever_stays_as_it_is(
    existing, unique, api, theirs, monkeypatch
):
    import nemo_run as run

    monkeypatch.setattr(wake, "_PENDING_LONG_S", 0.0)
    with run.Experiment(unique, skip_status_at_exit=True) as experiment:
        script = run.Script(inline="echo ours")
        experiment.add(script, executor=RayExecutor(cluster=existing), name="job")
        experiment.run()
    before = api.table(fresh=True)[theirs]
    known = set(api.table(fresh=True))
    for verb in (["status", "--json", unique], ["status", "--once", unique], ["logs", unique]):
        done = tool("nemo-run-ray", *verb)
        assert done.returncode == 0, done.stderr
    assert tool("nemo-run-ray", "doctor", "--address", existing.url).returncode == 0
    run.Experiment.from_title(unique).status()
    assert run.Experiment.from_title(unique).status(return_dict=True)["job"]["status"]
    task = run.Script(inline="true")
    run.run(task, executor=RayExecutor(cluster=existing), name=f"{unique}-dry", dryrun=True)
    (job,) = find(unique)
    tend(job.record.exp_dir)
    after = api.table(fresh=True)
    assert after[theirs] == before
    assert set(after) == known
