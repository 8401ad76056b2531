"""Tasks that a shell starts, on a real Ray."""

import sys

import nemo_run as run
import pytest

from nemo_run_ray import RayExecutor, nemo
from nemo_run_ray.experiment.job import jobs_of
from tests.groups import client, finish, submit


@pytest.fixture
def profile(tmp_path) -> str:
    """A home whose profile puts a folder with a tool on the path."""
    tool = tmp_path / "bin" / "from-profile"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\nfor word in "$@"; do echo "[$word]"; done; echo "A is $A"\n')
    tool.chmod(0o755)
    (tmp_path / ".bash_profile").write_text('export PATH="$HOME/bin:$PATH"\n')
    return str(tmp_path)


def test_a_task_and_a_role_start_from_a_login_shell(existing, unique, profile):
    fields = {
        "entrypoint_shell": "login",
        "startup_commands": ["export A='a b'"],
        "env_vars": {"HOME": profile},
    }
    failing = {**fields, "startup_commands": ["export A=1", "no-such-tool-1"]}
    task = run.Script(entrypoint="from-profile", path="$HOME", args=["a  b", "*"])
    with run.Experiment(unique, skip_status_at_exit=True) as experiment:
        for name, own in (("good", fields), ("bad", failing)):
            executor = RayExecutor(cluster=existing, python=sys.executable, **own)
            experiment.add(task, executor=executor, name=name)
        experiment.run(detach=True)
    group = submit(f"{unique}g", existing, client("from-profile 'c  d'", role="one", **fields))

    jobs = {job.name: job for job in jobs_of(nemo.experiment_dir(experiment))}
    good, bad = jobs["good"], jobs["bad"]
    state, _, log = finish(good)
    assert (state, log.count("[a  b]\n[*]\nA is a b\n")) == ("SUCCEEDED", 1), log
    assert "[$HOME]\n" in log
    state, reason, log = finish(bad)
    assert (state, reason) == ("FAILED", "exit code")
    assert "127" in bad.status.message
    assert "the startup command 'no-such-tool-1' ended with exit code 127" in log
    assert "A is" not in log
    state, _, log = finish(group)
    assert (state, "one/0| [c  d]\none/0| A is a b\n" in log) == ("SUCCEEDED", True), log
