"""What a user gets who does it wrong: one paragraph, within seconds, and nothing started."""

import json
import re
import shutil
import time

import nemo_run as run
import pytest

from nemo_run_ray import RayExecutor
from nemo_run_ray.errors import Conflict, Unauthorised
from tests.conftest import TRUE, python, refused, tool


@pytest.fixture(autouse=True)
def nothing_started(api, unique):
    """A refused task leaves no job; tests that do run one name it otherwise."""
    yield
    assert [one for one in api.table(fresh=True) if one.startswith(f"{unique}_")] == []


def test_a_module_that_nobody_shipped_is_named(unique, existing, tmp_path):
    (tmp_path / "mine.py").write_text("def work():\n    pass\n")
    (tmp_path / "train.py").write_text(
        "import sys\nimport nemo_run as run\nimport mine\n"
        "from nemo_run_ray import ExistingCluster, RayExecutor\n"
        "if __name__ == '__main__':\n"
        "    executor = RayExecutor(cluster=ExistingCluster(sys.argv[1]), python=sys.executable)\n"
        "    run.run(run.Partial(mine.work), executor=executor, name=sys.argv[2])\n"
    )
    done = python("train.py", existing.url, f"x{unique}", cwd=tmp_path)
    shown = " ".join(re.sub(r"scheduler.py:\d+", "", done.stdout).split())
    assert "the module 'mine' is not on that node" in shown, done.stdout + done.stderr
    assert "packager" in shown


def test_no_token(unique, dashboard, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    message = refused(Unauthorised, RayExecutor(address=dashboard.url), unique)
    assert "No token was sent" in message
    assert "RAY_AUTH_TOKEN" in message


def test_a_wrong_token(unique, dashboard, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "f" * 64)
    assert "is not its token" in refused(Unauthorised, RayExecutor(address=dashboard.url), unique)


def test_an_id_that_another_home_used(unique, existing, home, api):
    def go() -> None:
        with run.Experiment(
            unique, id=f"{unique}-1", executor=RayExecutor(cluster=existing)
        ) as exp:
            exp.add(TRUE, name="job")
            exp.run(detach=True)

    go()
    shutil.rmtree(home / "experiments" / unique)
    with pytest.raises(Conflict, match="another run"):
        go()
    (row,) = json.loads(tool("nemo-run-ray", "status", f"{unique}-1", "--json").stdout)
    assert row["reason"] == "its id belongs to another run's job"
    began = time.monotonic()
    assert tool("nemo-run-ray", "cancel", f"{unique}-1").returncode == 0
    assert time.monotonic() - began < 45
    assert api.job(f"{unique}-1.job")["status"] in ("PENDING", "RUNNING", "SUCCEEDED")


def outcome(executor: RayExecutor, script: run.Script, name: str) -> dict:
    run.run(script, executor=executor, name=name, tail_logs=False)
    done = tool("nemo-run-ray", "status", name, "--json")
    (row,) = json.loads(done.stdout)
    return row


def test_failures_name_their_cause(existing, unique, local_cluster):
    executor = RayExecutor(cluster=existing)
    row = outcome(executor, run.Script(inline="echo the last words; exit 3"), f"x{unique}")
    assert row["state"] == "FAILED"
    assert row["message"].startswith("exit code 3;")
    assert "the last words" in row["message"]

    row = outcome(executor, run.Script(inline="kill -SEGV $$"), f"y{unique}")
    assert (row["state"], row["reason"]) == ("FAILED", "killed by a signal")
    assert "SIGSEGV" in row["message"]
