"""NeMo-Run's ``RayJob`` with the patch, on a real Slurm: one step, files, and the driver's end."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nemo_run as run
import pytest
from nemo_run.run.ray.slurm import SlurmRayRequest

from tests.conftest import patched, wait_for
from tests.slurm.conftest import BIN, PYTHON, RayOnSlurm, Slurm

#: Debian's "daemon": a user that Slurm can look up on any machine.
_OTHER_USER = 1


def test_a_driver_on_four_nodes(slurm, start, tmp_path):
    slurm.forget_rpcs()
    job = start('pwd; cat shipped.txt; echo "to $RAY_ADDRESS, $ip_head"; exit 3')
    assert job.wait() == ("FAILED", "3:0")
    folder, shipped, addresses = job.log("ray-job.log").splitlines()
    assert (folder, shipped) == (str(job.folder / "code"), "here")
    first, second = addresses.removeprefix("to ").split(", ")
    assert first == second == f"10.77.{first.split('.')[2]}.1:6379"
    assert "Ray is ready: 4 nodes" in job.told
    assert "The run is over: the driver: exit code 3" in job.told
    assert job.log("ray_worker_units") == "4\n"
    assert [job.log(f"ray-worker-{rank}.log")[:3] for rank in (1, 2, 3)] == ["Ray"] * 3
    assert json.loads((job.folder / "job_ids.json").read_text()) == [job.job]
    assert not (job.folder / "ray_cluster_info.json").exists()
    assert not (job.run / "token").exists()
    assert slurm.rpcs()["REQUEST_JOB_STEP_CREATE"] == 1
    assert b"slurm/head.pyc" in (job.run / "node.pyz").read_bytes(), "compiled by the script"
    (call,) = map(json.loads, (tmp_path / "pyxis").read_text().splitlines())
    assert call["pyxis"] == [], "without an image there is no container"
    job.wait_gone()


def test_one_node_with_an_image(slurm, start, tmp_path):
    job = start("true", nodes=1, container_image="image:1")
    assert job.wait() == ("COMPLETED", "0:0")
    assert "Ray is ready: 1 nodes" in job.told
    (call,) = map(json.loads, (tmp_path / "pyxis").read_text().splitlines())
    expected = {"--container-image=image:1", "--container-name=ray-head"}
    assert expected | {"--no-container-mount-home"} <= set(call["pyxis"])


def test_without_a_driver_the_cluster_stays_up(slurm, start):
    job = start(None, nodes=2)
    job.wait_ready()
    attach = job.folder / "scripts" / f"{job.job}-attach.sh"
    wait_for(attach.exists, 30)
    time.sleep(1)  # the job's script has nothing to do any more
    info = json.loads((job.folder / "ray_cluster_info.json").read_text())
    assert (info["port"], info["dashboard_port"]) == ("6379", "8265")
    assert (job.run / "token").stat().st_mode & 0o777 == 0o600
    assert job.run.stat().st_mode & 0o777 == 0o700
    slurm.ask("scancel", job.job)
    assert job.wait()[0] == "CANCELLED"
    job.wait_gone()
    assert "cancelled" in job.why
    assert not (job.folder / "ray_cluster_info.json").exists()


def test_who_writes_nemo_runs_file_ends_the_cluster(slurm, start):
    job = start(None, nodes=1)
    job.wait_ready()
    (job.logs / "ENDED").touch()
    assert job.wait() == ("FAILED", "70:0")
    assert "ENDED" in job.why


def test_a_driver_sees_what_nemo_runs_has_and_no_ranks(slurm, start):
    job = start(
        "echo $PORT $NUM_ACTORS $num_retries; "
        "env | grep -E '^(SLURM_PROCID|SLURM_NTASKS|CUDA_VISIBLE_DEVICES)='",
        nodes=2,
        setup_lines='echo "setup on $head_node_ip, $ip_head"',
    )
    assert job.wait() == ("COMPLETED", "0:0")
    first, *rest = job.log("ray-job.log").splitlines()
    assert first.startswith("6379 2 ")
    assert sorted(rest) == ["CUDA_VISIBLE_DEVICES=", "SLURM_NTASKS=1", "SLURM_PROCID=0"]
    (setup,) = (line for line in job.told.splitlines() if line.startswith("setup on"))
    address = setup.split()[2].rstrip(",")
    assert setup.endswith(f"{address}:6379")
    assert address.startswith("10.77.")


@pytest.mark.parametrize(
    ("word", "host"), [pytest.param("", "n1", marks=pytest.mark.soak), ("1", "n2")]
)
def test_the_attach_script_gives_a_shell_on_a_node(slurm, start, word, host):
    job = start(None, nodes=2)
    job.wait_ready()
    attach = job.folder / "scripts" / f"{job.job}-attach.sh"
    wait_for(attach.exists, 30)
    # NeMo-Run's script asks for a terminal, and `script` gives one.
    done = subprocess.run(
        ["script", "-qec", f"bash {attach} {word}", "/dev/null"],
        input="unset HISTFILE; echo on $(hostname); exit\n",
        text=True,
        capture_output=True,
        timeout=60,
    )
    assert f"on {host}" in done.stdout, done.stdout + done.stderr
    slurm.ask("scancel", job.job)
    job.wait_gone()


def test_a_command_that_the_script_cannot_read_ends_the_job_at_once(slurm, start):
    """Not an idle cluster until the time limit."""
    job = start("echo $NO_SUCH_VARIABLE", nodes=1)
    assert job.wait() == ("FAILED", "70:0")
    assert "NO_SUCH_VARIABLE: unbound variable" in job.told
    assert "the job's script: it has ended with exit code 1" in job.why


def test_a_driver_with_arguments_of_srun_has_its_own_step(slurm, start):
    job = start("exit 3", nodes=2, srun_args=["--comment=own"])
    assert job.wait() == ("FAILED", "3:0")
    job.wait_gone()


def test_the_next_job_of_a_name_has_logs_of_its_own(slurm, start):
    for word in ("one", "two"):
        job = start(f"echo {word}", nodes=1, name="again")
        assert job.wait() == ("COMPLETED", "0:0")
        job.wait_gone()
    assert job.log("ray-job.log") == "two\n"
    assert len(json.loads((job.folder / "job_ids.json").read_text())) == 2


def _submit(slurm: Slurm, name: str, executor: run.SlurmExecutor, **fields: Any) -> RayOnSlurm:
    """Submit the script of one of NeMo-Run's requests, for what its ``RayJob`` cannot ask for."""
    folder = slurm.folder / "jobs" / name
    (folder / "logs").mkdir(parents=True)
    with patched("slurm_ray"):
        script = SlurmRayRequest(
            name=name, cluster_dir=str(folder), executor=executor, launch_cmd=["sbatch"], **fields
        ).materialize()
    (folder / "script").write_text(script)
    job = slurm.ask("sbatch", "--parsable", str(folder / "script")).partition(";")[0].strip()
    return RayOnSlurm(slurm, name, job, slurm.folder / "jobs")


@pytest.mark.parametrize("command", ["echo driver on $(hostname); exit 3", None])
def test_the_script_for_enroot(slurm, unique, tmp_path, monkeypatch, command):
    """The driver runs in the step that is there; a shell enters the container that runs."""
    monkeypatch.setenv("SLURM_CONF", slurm.conf)
    monkeypatch.setenv("PATH", f"{BIN}:{PYTHON}:{os.environ['PATH']}")
    executor = run.SlurmExecutor(
        account="root",
        partition="batch",
        time="00:05:00",
        nodes=2,
        container_image="image:1",
        packager=run.Packager(),
        tunnel=run.LocalTunnel(job_dir=str(slurm.folder / "jobs")),
        env_vars={"PATH": f"{BIN}:{PYTHON}:$PATH"},
    )
    job = _submit(
        slurm,
        unique,
        executor,
        template_name="ray_enroot.sub.j2",
        command=command,
        workdir=str(tmp_path),
    )
    if command is not None:
        assert job.wait() == ("FAILED", "3:0")
        assert job.log("ray-job.log") == "driver on n1\n"
    else:
        job.wait_ready()
        attach = job.folder / "scripts" / f"{job.job}-attach.sh"
        wait_for(attach.exists, 30)
        for words, host in (([], "n1"), (["1"], "n2")):
            told = subprocess.run(
                ["bash", str(attach), *words],
                env={**os.environ, "COMMAND": "echo in $CONTAINER_PROCESS on $(hostname) $PWD"},
                text=True,
                capture_output=True,
                timeout=60,
            )
            assert told.stdout == f"in 1 on {host} {Path.cwd()}\n", told.stdout + told.stderr
        slurm.ask("scancel", job.job)
    job.wait_gone()


@pytest.mark.soak
def test_ray_in_the_first_part_of_a_heterogeneous_job(slurm, tmp_path, unique, monkeypatch):
    """And a command beside it in the second part, with a variable of its own."""
    monkeypatch.setenv("SLURM_CONF", slurm.conf)
    executor = run.SlurmExecutor(
        account="root",
        partition="batch",
        time="00:05:00",
        nodes=2,
        heterogeneous=True,
        tunnel=run.LocalTunnel(job_dir=str(slurm.folder / "jobs")),
        env_vars={"PATH": f"{BIN}:{PYTHON}:$PATH"},
    )
    executor.run_as_group = True
    executor.resource_group = [
        run.SlurmExecutor.ResourceRequest(
            packager=run.Packager(),
            nodes=nodes,
            ntasks_per_node=1,
            het_group_index=index,
            env_vars={"ROLE": f"r{index}"},
        )
        for index, nodes in enumerate((2, 1))
    ]
    found = _submit(
        slurm,
        unique,
        executor,
        template_name="ray.sub.j2",
        command="sleep 3; echo other $het_group_host_1",
        workdir=str(tmp_path),
        command_groups=[["true"], ["bash", "-c", "'echo $ROLE on $(hostname)'"]],
    )
    assert found.wait() == ("COMPLETED", "0:0"), found.told
    assert "Ray is ready: 2 nodes" in found.told
    host = found.log("ray-job.log").split()[-1]
    (beside,) = found.logs.glob("ray-overlap-1*.out")
    assert beside.read_text().strip() == f"r1 on {host}"
    found.wait_gone()


_PROGRAM = """
import os, urllib.error, urllib.request, ray
try:
    urllib.request.urlopen(os.environ["RAY_API_SERVER_ADDRESS"] + "/api/version")
except urllib.error.HTTPError as error:
    print("without a token:", error.code)
ray.init(log_to_driver=False)
print("nodes:", sum(node["Alive"] for node in ray.nodes()))
print("units:", ray.cluster_resources()["worker_units"])
"""


@pytest.mark.soak
def test_a_real_ray_on_two_nodes(slurm, start, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "srun").symlink_to(BIN / "srun")
    (tmp_path / "program.py").write_text(_PROGRAM)
    path = f"{tools}:{Path(sys.executable).parent}:$PATH"
    job = start(f"python {tmp_path}/program.py", nodes=2, env={"PATH": path})
    assert job.wait(within_s=300) == ("COMPLETED", "0:0"), job.told
    printed = [line for line in job.log("ray-job.log").splitlines() if ": " in line]
    for line in ("without a token: 401", "nodes: 2", "units: 2.0"):
        assert line in printed
    job.wait_gone()


@pytest.mark.soak
def test_clusters_of_two_users_on_one_node(slurm, start, tmp_path):
    """They meet in no port and no folder, and neither may read what the other one has."""
    here = {"additional_parameters": {"nodelist": "n1"}, "nodes": 1}
    own = start(None, **here)
    own.wait_ready()
    with tempfile.TemporaryDirectory(prefix="nemo-run-ray-", dir="/tmp") as name:
        other = Path(name)
        other.chmod(0o755)
        shutil.copytree(BIN, other / "bin")
        jobs, script = other / "jobs", other / "ray.sub"
        text = (own.folder / "ray.sub").read_text()
        moved = {own.folder: jobs / "theirs", BIN: other / "bin", tmp_path: jobs}
        for before, after in moved.items():
            text = text.replace(str(before), str(after))
        script.write_text(text)
        (jobs / "theirs" / "logs").mkdir(parents=True)
        for path in (jobs, *jobs.rglob("*")):
            os.chown(path, _OTHER_USER, _OTHER_USER)
        someone = ["setpriv", f"--reuid={_OTHER_USER}", f"--regid={_OTHER_USER}", "--clear-groups"]
        env = {**os.environ, "PATH": "/usr/bin:/bin", "HOME": name}
        words = [*someone, "sbatch", "--parsable", f"--chdir={jobs}", str(script)]
        done = subprocess.run(words, env=env, capture_output=True, text=True, cwd=name)
        assert done.returncode == 0, done.stderr
        theirs = RayOnSlurm(slurm, "theirs", done.stdout.strip(), jobs)
        try:
            theirs.wait_ready()
            for job in (own, theirs):
                assert slurm.state(job.job)[0] == "RUNNING"
            ports = [json.loads((job.run / "ready.json").read_text()) for job in (own, theirs)]
            assert ports[0]["port"] != ports[1]["port"]
            assert ports[0]["dashboard_port"] != ports[1]["dashboard_port"]
            for job in (own, theirs):
                assert (job.run / "token").stat().st_mode & 0o077 == 0
                (folder,) = Path("/tmp").glob(f"nrr-*-{job.job}.0")
                assert folder.stat().st_mode & 0o077 == 0
            slurm.ask("scancel", own.job)
            own.wait_gone()
            assert slurm.state(theirs.job)[0] == "RUNNING"
        finally:
            slurm.ask("scancel", theirs.job)
            theirs.wait_gone()
