"""A user's day: run, tail, detach, lose the client, find everything again, cancel."""

import json
import os
import re
import signal
import subprocess
import sys

import nemo_run as run
import pytest

from tests.conftest import processes_of, python, tool, wait_for

SCRIPT = """
import os, sys
import nemo_run as run
from nemo_run_ray import ExistingCluster, RayExecutor

def from_main(word):
    print("main says", word)

if __name__ == "__main__":
    import mytasks
    title, where, mode = sys.argv[1:4]
    packager = run.PatternPackager(include_pattern=os.getcwd(), relative_path=os.getcwd())
    executor = (
        RayExecutor() if where == "embedded" else
        RayExecutor(cluster=ExistingCluster(url=where), packager=packager, python=sys.executable)
    )
    with run.Experiment(title, executor=executor) as exp:
        if mode == "day":
            exp.add(run.Script("hello.sh", args=["a b", "$HOME", "*"]), name="script")
            exp.add(run.Script(inline="echo inline says $((6*7))"), name="inline")
            exp.add(run.Partial(from_main, word="hello"), name="main")
            exp.add(run.Partial(mytasks.from_module, word="hello"), name="module")
            exp.run(tail_logs=True)
        else:
            inline = "echo started\\nsleep 300 &\\nsetsid sleep 300 &\\nwait\\n"
            exp.add(run.Script(inline=inline), name="long")
            exp.run(detach=mode == "detach")
    print("ID", exp._id)
    sys.stdout.flush()
    if mode == "detach":
        os.kill(os.getpid(), 9)
"""


@pytest.fixture
def project(tmp_path):
    """The user's folder."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "mytasks.py").write_text(
        "import helper\ndef from_module(word):\n    print('module says', helper.shout(word))\n"
    )
    (tmp_path / "helper.py").write_text("def shout(word):\n    return word.upper()\n")
    (tmp_path / "hello.sh").write_text('for word in "$@"; do echo "[$word]"; done\n')
    return tmp_path


@pytest.fixture(params=["embedded", pytest.param("existing", marks=pytest.mark.soak)])
def where(request, dashboard, token, monkeypatch):
    if request.param == "existing":
        monkeypatch.setenv("RAY_AUTH_TOKEN", token)
        return dashboard.url
    return "embedded"


def test_tasks_of_all_kinds_run_and_their_logs_are_tailed(project, where, unique):
    done = python("train.py", unique, where, "day", cwd=project)

    assert done.returncode == 0, done.stdout + done.stderr
    lines = [re.sub(r"\x1b\[\d+m", "", line) for line in done.stdout.splitlines()]
    for expected in (
        "script/0 [a b]",
        "script/0 [$HOME]",
        "script/0 [*]",
        "inline/0 inline says 42",
        "main/0 main says hello",
        "module/0 module says HELLO",
    ):
        assert lines.count(expected) == 1, (expected, done.stdout)
    (experiment_id,) = re.findall(r"^ID (\S+)$", done.stdout, re.M)
    states = run.Experiment.from_id(experiment_id).status(return_dict=True)
    assert {name: str(one["status"]) for name, one in states.items()} == dict.fromkeys(
        ("script", "inline", "main", "module"), "SUCCEEDED"
    )


def test_a_detached_job_outlives_its_client_and_is_found_again(project, where, unique, api):
    env = {**os.environ, "TMPDIR": str(project.parent)}  # a killed client leaves its files there
    done = python("train.py", unique, where, "detach", cwd=project, env=env)
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    (experiment_id,) = re.findall(r"^ID (\S+)$", done.stdout, re.M)
    job = f"{experiment_id}.long"

    wait_for(lambda: len(processes_of(job)) >= 3)
    shown = tool("nemo", "experiment", "status", experiment_id)
    assert "Status: RUNNING" in re.sub(r"\x1b\[[\d;]*m", "", shown.stdout), shown.stdout
    wait_for(lambda: "started" in tool("nemo", "experiment", "logs", experiment_id, "0").stderr)
    rows = json.loads(tool("nemo-run-ray", "status", experiment_id, "--json").stdout)
    assert [(row["job"], row["state"]) for row in rows] == [("long", "RUNNING")]
    by_handle = tool("nemo-run-ray", "status", rows[0]["handle"], "--json")
    assert json.loads(by_handle.stdout) == rows

    cancelled = tool("nemo", "experiment", "cancel", experiment_id, "0")
    assert "no process of it is left" in " ".join(cancelled.stdout.split()), cancelled.stdout
    assert api.job(job)["status"] == "STOPPED"
    assert processes_of(job) == []
    (status,) = run.Experiment.from_id(experiment_id).status(return_dict=True).values()
    assert str(status["status"]) == "CANCELLED"


def test_ctrl_c_ends_the_wait_and_leaves_the_job(project, unique, local_cluster, api):
    client = subprocess.Popen(
        [sys.executable, "train.py", unique, "embedded", "attached"],
        cwd=project,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A shell's background processes, as in CI, ignore Ctrl-C and pass that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    job = wait_for(lambda: next((one for one in api.table() if one.startswith(f"{unique}_")), None))
    wait_for(lambda: len(processes_of(job)) >= 3)

    client.send_signal(signal.SIGINT)
    output, _ = client.communicate(timeout=30)

    assert "Traceback" not in output
    first, *commands = output.splitlines()[-4:]
    assert first == "Interrupted. Submitted jobs continue:"
    experiment = job.rpartition(".")[0]
    for verb, command in zip(("status", "logs --follow", "cancel"), commands, strict=True):
        assert command.endswith(f"nemo-run-ray {verb} {experiment}")
    assert api.job(job)["status"] == "RUNNING"
    assert tool("nemo-run-ray", "cancel", job).returncode == 0
    assert processes_of(job) == []
