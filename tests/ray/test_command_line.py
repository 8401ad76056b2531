"""The verbs that look at several jobs: list, wait, logs of an experiment, open, timeline."""

import json
import os
import time

import nemo_run as run
import pytest

from nemo_run_ray import RayExecutor
from tests.conftest import tool


@pytest.fixture(scope="module")
def mixed(local_cluster, tmp_path_factory):
    """The title of an experiment of two jobs, and a file: one fails, one waits for the file."""
    title, go = f"mixed{time.time_ns()}", tmp_path_factory.mktemp("mixed") / "go"
    with run.Experiment(title, executor=RayExecutor(), skip_status_at_exit=True) as experiment:
        experiment.add(run.Script(inline="seq 3; exit 3"), name="bad")
        experiment.add(
            run.Script(inline=f"until [ -e {go} ]; do sleep 0.2; done; seq 3"), name="good"
        )
        experiment.run(detach=True)
    yield title, go
    go.touch()


def test_list_wait_and_logs_of_an_experiment(mixed, tmp_path):
    title, go = mixed
    rows = json.loads(tool("nemo-run-ray", "list", "--json").stdout)
    (row,) = (row for row in rows if row["title"] == title)
    assert row["cluster"] == "the embedded Ray"

    late = tool("nemo-run-ray", "wait", title, "--timeout", "0")
    assert (late.returncode, "good" in late.stderr) == (124, True), late.stderr
    go.touch()
    done = tool("nemo-run-ray", "wait", title)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "bad: FAILED, exit code 3" in done.stdout
    assert "good: SUCCEEDED" in done.stdout

    assert title not in tool("nemo-run-ray", "list").stdout
    assert title in tool("nemo-run-ray", "list", "--all").stdout
    table = tool("nemo-run-ray", "status", "--once", title).stdout
    assert "exit code 3" in table
    assert "waits for" not in table  # an empty column

    assert tool("nemo-run-ray", "logs", title).stdout.splitlines() == [
        *("bad| 1", "bad| 2", "bad| 3", "good| 1", "good| 2", "good| 3"),
    ]
    last = tool("nemo-run-ray", "logs", title, "--job", "bad", "--tail", "2", "--follow").stdout
    assert last == "2\n3\n"
    (job,) = json.loads(tool("nemo-run-ray", "status", title, "--job", "good", "--json").stdout)
    assert job["attempts"][0]["running_at"] > job["attempts"][0]["posted_at"]
    assert job["host"]

    page = tool("nemo-run-ray", "open", title, "--job", "bad").stdout.splitlines()
    assert page[0].endswith(f"/#/jobs/{job['id'].rpartition('.')[0]}.bad")
    assert "token" in page[1]
    tool("nemo-run-ray", "timeline", title, cwd=tmp_path)
    assert title in (tmp_path / f"{title}.html").read_text()


def test_names_are_completed(mixed):
    title, _ = mixed

    def completed(line: str) -> str:
        env = {"_TYPER_COMPLETE_ARGS": line, "_NEMO_RUN_RAY_COMPLETE": "complete_zsh"}
        return tool("nemo-run-ray", env={**os.environ, **env}).stdout

    assert title in completed(f"nemo-run-ray status {title[:3]}")
    (job, _) = json.loads(tool("nemo-run-ray", "status", title, "--json").stdout)
    assert job["id"] in completed(f"nemo-run-ray status {job['id'][:-1]}")
    assert "good" in completed(f"nemo-run-ray logs {title} --job g")


def test_options_of_the_command_itself():
    assert tool("nemo-run-ray", "--version").stdout.startswith("nemo_run_ray ")
