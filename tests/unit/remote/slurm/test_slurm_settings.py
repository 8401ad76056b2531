"""What the node program reads from Slurm's variables, the script's and the user's."""

import json
import os
import subprocess

import pytest

from nemo_run_ray.remote.slurm.node import ray_environment, with_pre_start
from nemo_run_ray.remote.slurm.settings import CannotContinue, Settings, SidecarSpec
from nemo_run_ray.remote.spec import ProbeSpec

_SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "12",
    "SLURM_STEP_NODELIST": "n[01-12]",
    "NEMO_RUN_RAY_HOSTS": " ".join(f"n{number:02}" for number in range(1, 13)),
    "SLURM_JOB_ID": "42",
    "SLURMD_NODENAME": "n04",
    "SLURM_CPUS_ON_NODE": "8",
    "NEMO_RUN_RAY_RUN": "/shared/run/42.0",
    "LOG_DIR": "/shared/logs",
}


def _read(**variables: str) -> Settings:
    return Settings({**_SLURM, **variables})


def test_a_node_of_twelve():
    found = _read()
    assert (found.rank, found.nodes, found.host, found.cpus) == (3, 12, "n04", 8)
    assert found.hosts[11] == "n12"
    assert found.job == "42.0"
    assert found.min_workers == 11
    assert found.fail_fast
    assert found.temp_dir == f"/tmp/nrr-{os.getuid()}-42.0/r"
    assert found.node_log == "/shared/logs/ray-worker-03.log"
    assert _read(SLURM_RESTART_COUNT="2", RAY_TEMP_DIR="").job == "42.2", "after a requeue"
    assert _read(RAY_TEMP_DIR="").temp_dir == found.temp_dir


def test_a_count_of_gpus_that_is_no_number_is_not_believed():
    found = _read(SLURM_GPUS_ON_NODE="gpu:2", CUDA_VISIBLE_DEVICES="0,1, 2")
    assert found.worker_units == 3


def test_ports_and_choices_of_the_user():
    found = _read(
        NODE_MANAGER_PORT="53001",
        PORT="6380",
        RAY_TEMP_DIR="/ray-cluster",
        NEMO_RUN_RAY_MIN_WORKERS="4",
        NEMO_RUN_RAY_FAIL_FAST="0",
        RAY_HEAD_START_TIMEOUT="30",
        RAY_LOG_SYNC_FREQUENCY="15",
    )
    assert dict(found.ports) == {"NODE_MANAGER_PORT": 53001, "PORT": 6380}
    assert found.temp_dir == "/ray-cluster"
    assert (found.min_workers, found.fail_fast) == (4, False)
    assert (found.start_limit_s, found.log_sync_s) == (30, 15)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"PORT": "six"}, "PORT is 'six'; expected is a port from 1 to 65535"),
        ({"PORT": "0"}, "PORT is '0'; expected is a port"),
        ({"PORT": " "}, "PORT is ' '; expected is a port"),
        ({"DASHBOARD_PORT": "70000"}, "DASHBOARD_PORT is '70000'; expected is a port"),
        ({"NEMO_RUN_RAY_MIN_WORKERS": "-1"}, "NEMO_RUN_RAY_MIN_WORKERS is '-1'"),
        ({"SLURM_PROCID": ""}, "started by `srun`"),
        ({"NEMO_RUN_RAY_RUN": ""}, "started by `srun`"),
    ],
)
def test_a_wrong_variable_is_named(variables, message):
    with pytest.raises(CannotContinue, match=message):
        _read(**variables)


def test_sidecars_of_the_head_and_of_all():
    rows = [
        SidecarSpec("all", "serve", probe=ProbeSpec(kind="port", port=8000, command=[])),
        SidecarSpec("one", "watch", everywhere=False),
    ]
    text = json.dumps(rows)
    assert [one.name for one in _read(NEMO_RUN_RAY_SIDECARS=text).sidecars] == ["all"]
    head = _read(NEMO_RUN_RAY_SIDECARS=text, SLURM_PROCID="0").sidecars
    assert head == rows


def test_the_sandbox_of_nemo_rl():
    """Its variables are given as ``srun --export`` takes them."""
    (sandbox,) = _read(SANDBOX_COMMAND="/start.sh", SANDBOX_ENV_VARS="A=1,B,C=x=y").sidecars
    assert sandbox.command == "/start.sh"
    assert sandbox.env == {
        "A": "1",
        "C": "x=y",
        "NGINX_PORT": "6000",
        "SANDBOX_WORKER_BASE_PORT": "6001",
    }
    assert sandbox.probe is not None
    assert (sandbox.probe.kind, sandbox.probe.port) == ("port", 6000)


def test_a_driver_is_no_rank_of_the_step():
    """The step has a task on every node, and a program in it must not wait for the others."""
    given = {
        **_SLURM,
        "SLURM_NTASKS": "12",
        "SLURM_NODEID": "3",
        "SLURM_JOB_NUM_NODES": "12",
        "PMI_RANK": "3",
        "PMIX_NAMESPACE": "x",
        "SLURM_PMIX_MAPPING_SERV": "y",
    }
    found = ray_environment(given, _read(), "/token")
    assert {name: found[name] for name in ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_NODEID")} == {
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "1",
        "SLURM_NODEID": "0",
    }
    assert found["SLURM_STEP_NODELIST"] == "n04"
    assert found["SLURM_JOB_NUM_NODES"] == "12", "the job has them"
    assert not [name for name in found if "PMI" in name]


def test_rays_workers_have_nothing_of_the_step():
    """TensorRT-LLM would start by MPI in each of them. What a user exports before Ray is kept."""
    step = {"OMPI_COMM_WORLD_RANK": "3", "PMIX_RANK": "3", "MPI_LOCALRANKID": "0", "PMI_FD": "9"}
    kept = {"SLURM_CONF": "/etc/slurm.conf", "MPIX": "a", "PATH": os.environ["PATH"]}
    env = {**_SLURM, **step, **kept}
    pre_start = 'export OWN="$SLURM_JOB_ID" && OMPI_COMM_WORLD_RANK=4\nexport MPI_OWN=b'
    words = with_pre_start(["env"], pre_start, env)
    told = subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout
    found = dict(line.partition("=")[::2] for line in told.splitlines())
    assert {**kept, "OWN": "42", "MPI_OWN": "b"}.items() <= found.items()
    gone = set(step) | {name for name in _SLURM if name.startswith("SLURM_")}
    assert not gone & set(found)
