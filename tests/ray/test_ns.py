"""Commands and programs of NeMo-Skills on a real Ray; a stand-in has their signatures."""

import os
import socket
import sys

import nemo_run as run
import pytest

from nemo_run_ray.experiment.job import find, find_job
from nemo_run_ray.remote.status import JobState
from tests import skills
from tests.conftest import tool, wait_for


@pytest.fixture
def folder(existing, tmp_path, monkeypatch):
    """A user's folder, with a cluster file and NeMo-Skills beside it."""
    skills.write(tmp_path / "site", "newer")
    (tmp_path / "cluster_configs").mkdir()
    (tmp_path / "cluster_configs" / "my-ray.yaml").write_text(
        f"executor: ray\nray: {{address: '{existing.url}', default_num_cpus: 0}}\n"
        "containers: {nemo-skills: a, vllm: b, sandbox: c}\nenv_vars: [GREETING=hello]\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ns(folder, *words: str) -> None:
    env = {**os.environ, "PYTHONPATH": str(folder / "site")}
    done = tool("nemo-run-ray", "ns", "run_cmd", *words, env=env, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr


def test_commands_run_after_each_other_on_ray(folder, unique):
    first, second = f"a{unique}", f"b{unique}"
    gate = folder / "gate"
    ns(
        folder,
        *("--cluster", "my-ray", "--expname", first),
        *(
            "--command",
            f"cd /nemo_run/code; ls -d nemo_skills; until [ -e {gate} ]; do sleep 0.1; done",
        ),
    )
    ns(
        folder,
        *("--cluster", "my-ray", "--expname", second, "--run_after", first),
        *("--command", "echo $GREETING as rank $SLURM_PROCID"),
    )
    (later,) = find(second)
    assert later.status.state is JobState.WAITING
    gate.touch()
    wait_for(lambda: later.status.state.is_terminal, 120)
    assert later.status.state is JobState.SUCCEEDED, later.status
    assert "".join(later.output()) == "hello as rank 0\n"
    (job,) = find(first)
    assert "".join(job.output()) == "nemo_skills\n"


def test_a_wrong_cluster_is_one_paragraph(folder, unique):
    path = folder / "cluster_configs" / "my-ray.yaml"
    path.write_text("backend: {name: rai}\n")
    env = {**os.environ, "PYTHONPATH": str(folder / "site")}
    words = ("--cluster", "my-ray", "--expname", unique, "--command", "true")
    done = tool("nemo-run-ray", "ns", "run_cmd", *words, env=env, cwd=folder)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "'rai' is no back-end" in done.stderr


def test_server_client_and_sandbox(folder, unique):
    with socket.socket() as one, socket.socket() as other:
        for holder in (one, other):
            holder.bind(("127.0.0.1", 0))
        ports = (one.getsockname()[1], other.getsockname()[1])
    exp = skills.submit_served_task(
        folder / "site", "my-ray", unique, "a", ports, python=sys.executable
    )
    job = find_job(f"{exp._id}.t")
    wait_for(lambda: job.status.state.is_terminal, 180)
    told = "".join(job.output())
    assert job.status.state is JobState.SUCCEEDED, told
    assert f"main/0| server on {socket.gethostname()}" in told
    assert f"main/0| sandbox on {socket.gethostname()}" in told
    assert isinstance(
        run.Experiment.from_id(exp._id).jobs[0].executors, type(exp.jobs[0].executors)
    )
