"""The value of a secret is found nowhere but in the task."""

import hashlib
import json
import secrets
from pathlib import Path

import nemo_run as run
import pytest

from nemo_run_ray import RayExecutor
from tests.conftest import files_with


@pytest.fixture
def value(monkeypatch):
    value = f"s3cr3t{secrets.token_hex(16)}"
    monkeypatch.setenv("MY_TOKEN", value)
    return value


def test_the_task_sees_it_and_nobody_else(existing, local_cluster, api, unique, value, home, capfd):
    executor = RayExecutor(cluster=existing, secrets=["MY_TOKEN"])
    script = run.Script(inline='printf %s "$MY_TOKEN" | sha256sum\n')
    run.run(script, executor=executor, name=unique, dryrun=True)
    run.run(script, executor=executor, name=unique)

    shown = "".join(capfd.readouterr())
    assert "secrets MY_TOKEN" in " ".join(shown.split())
    assert hashlib.sha256(value.encode()).hexdigest() in shown
    assert value not in shown
    assert value not in json.dumps(api.table(fresh=True))
    assert files_with(value, home) == []
    ray = Path(local_cluster._read().root)
    assert files_with(value, ray / "r" / "session_latest" / "logs") == []
    assert files_with(value, ray) == []


def test_a_token_given_in_code_is_in_no_file(dashboard, token, unique, home):
    from nemo_run_ray import ExistingCluster

    executor = RayExecutor(cluster=ExistingCluster(url=dashboard.url, token=token))
    run.run(run.Script(inline="true"), executor=executor, name=unique)

    found = files_with(token, home / "experiments")
    assert found == []
