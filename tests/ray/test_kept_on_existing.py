"""Logs of jobs of an existing cluster outlive it: a real Ray that is stopped."""

import nemo_run as run
import pytest

from nemo_run_ray import ExistingCluster, LocalCluster, RayExecutor
from tests.conftest import tool


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A Ray that nobody else uses, reached as another user's cluster."""
    cluster = LocalCluster(num_cpus=3, keep=True, state_dir=str(tmp_path / "ray"))
    dashboard = cluster.connect()
    monkeypatch.setenv("RAY_AUTH_TOKEN", dashboard.headers["Authorization"].removeprefix("Bearer "))
    yield cluster, ExistingCluster(url=dashboard.url)
    cluster.stop()


@pytest.mark.soak
def test_the_log_of_a_waiting_client_outlives_the_cluster(own, unique):
    cluster, existing = own
    executors = {
        "whole": RayExecutor(cluster=existing),
        "end": RayExecutor(cluster=existing, keep_logs_max_bytes=1000),
        "tried": RayExecutor(cluster=existing, retries=1),
    }
    script = "seq 1 20000; test $NEMO_RUN_ATTEMPT = 2"
    with run.Experiment(unique) as experiment:
        for name, executor in executors.items():
            experiment.add(run.Script(inline=script), executor=executor, name=name)
        experiment.run()
    before = {
        name: tool("nemo-run-ray", "logs", unique, "--job", name).stdout for name in executors
    }
    cluster.stop()

    after = {name: tool("nemo-run-ray", "logs", unique, "--job", name).stdout for name in executors}

    numbers = "".join(f"{number}\n" for number in range(1, 20001))
    assert before["whole"] == after["whole"]
    assert after["whole"].startswith(numbers)
    first, _, rest = after["end"].partition("\n")
    assert first.startswith("nemo_run_ray| the first ")
    assert before["end"].endswith(rest), "the cluster had all of it"
    assert before["end"].startswith(numbers)
    assert rest.startswith("19")
    assert rest.endswith("20000\n")
    assert before["tried"] == after["tried"]
    assert after["tried"].count(numbers) == 2
