"""The verbs that look at several jobs: list, wait, logs of an experiment, open, timeline."""

import json
import os

import nemo_run as run
import pytest

from nemo_run_ray import RayExecutor
from tests.conftest import tool


@pytest.fixture
def mixed(local_cluster, unique, tmp_path):
    """The title of an experiment of two jobs: one fails with 3, one waits for a file `go`."""
    with run.Experiment(unique, executor=RayExecutor(), skip_status_at_exit=True) as experiment:
        experiment.add(run.Script(inline="seq 3; exit 3"), name="bad")
        experiment.add(
            run.Script(inline=f"until [ -e {tmp_path}/go ]; do sleep 0.2; done; seq 3"), name="good"
        )
        experiment.run(detach=True)
    return unique


def test_list_wait_and_logs_of_an_experiment(mixed, tmp_path):
    rows = json.loads(tool("nemo-run-ray", "list", "--json").stdout)
    (row,) = (row for row in rows if row["title"] == mixed)
    assert row["cluster"] == "the embedded Ray"

    late = tool("nemo-run-ray", "wait", mixed, "--timeout", "0")
    assert (late.returncode, "good" in late.stderr) == (124, True), late.stderr
    (tmp_path / "go").touch()
    done = tool("nemo-run-ray", "wait", mixed)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "bad: FAILED, exit code 3" in done.stdout
    assert "good: SUCCEEDED" in done.stdout

    assert mixed not in tool("nemo-run-ray", "list").stdout
    assert mixed in tool("nemo-run-ray", "list", "--all").stdout
    table = tool("nemo-run-ray", "status", "--once", mixed).stdout
    assert "exit code 3" in table
    assert "waits for" not in table  # an empty column

    assert tool("nemo-run-ray", "logs", mixed).stdout.splitlines() == [
        *("bad| 1", "bad| 2", "bad| 3", "good| 1", "good| 2", "good| 3"),
    ]
    last = tool("nemo-run-ray", "logs", mixed, "--job", "bad", "--tail", "2", "--follow").stdout
    assert last == "2\n3\n"
    (job,) = json.loads(tool("nemo-run-ray", "status", mixed, "--job", "good", "--json").stdout)
    assert job["attempts"][0]["running_at"] > job["attempts"][0]["posted_at"]
    assert job["host"]

    page = tool("nemo-run-ray", "open", mixed, "--job", "bad").stdout.splitlines()
    assert page[0].endswith(f"/#/jobs/{job['id'].rpartition('.')[0]}.bad")
    assert "token" in page[1]
    tool("nemo-run-ray", "timeline", mixed, cwd=tmp_path)
    assert mixed in (tmp_path / f"{mixed}.html").read_text()


def test_names_are_completed(mixed):
    def completed(line: str) -> str:
        env = {"_TYPER_COMPLETE_ARGS": line, "_NEMO_RUN_RAY_COMPLETE": "complete_zsh"}
        return tool("nemo-run-ray", env={**os.environ, **env}).stdout

    assert mixed in completed(f"nemo-run-ray status {mixed[:3]}")
    assert "good" in completed(f"nemo-run-ray logs {mixed} --job g")
    assert tool("nemo-run-ray", "cancel", mixed).returncode == 0


def test_options_of_the_command_itself():
    assert tool("nemo-run-ray", "--version").stdout.startswith("nemo_run_ray ")
