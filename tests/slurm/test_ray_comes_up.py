"""NeMo-Run's ``RayJob`` with the patch, on a real Slurm: one step, files, and the driver's end."""

from __future__ import annotations

import json


def test_a_driver_on_four_nodes(slurm, start, tmp_path):
    slurm.forget_rpcs()
    job = start('pwd; cat shipped.txt; echo "to $RAY_ADDRESS, $ip_head"; exit 3')
    assert job.wait() == ("FAILED", "3:0")
    rpcs = slurm.rpcs()
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
    assert rpcs["REQUEST_JOB_STEP_CREATE"] == 1
    (call,) = map(json.loads, (tmp_path / "pyxis").read_text().splitlines())
    assert "--container-name=ray-head" in call["pyxis"]
    assert "--no-container-mount-home" in call["pyxis"]
    job.wait_gone()


def test_one_node_and_the_next_run_of_its_name(slurm, start):
    job = start("true", nodes=1)
    assert job.wait() == ("COMPLETED", "0:0")
    assert "Ray is ready: 1 nodes" in job.told


def test_without_a_driver_the_cluster_stays_up(slurm, start):
    job = start(None, nodes=2)
    job.wait_ready()
    info = json.loads((job.folder / "ray_cluster_info.json").read_text())
    assert info["port"] == "6379"
    assert info["dashboard_port"] == "8265"
    assert (job.run / "token").stat().st_mode & 0o777 == 0o600
    slurm.ask("scancel", job.job)
    assert job.wait()[0] == "CANCELLED"
    job.wait_gone()
    assert "cancelled" in job.why
    assert not (job.folder / "ray_cluster_info.json").exists()
