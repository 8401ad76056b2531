"""What every process of a group is told about the others."""

import pytest

from nemo_run_ray.remote.group.driver import variables
from nemo_run_ray.remote.spec import RENDEZVOUS, GroupSpec, JobSpec, RoleSpec, env_key

_TASK = JobSpec(argv=("true",))

_SPEC = GroupSpec(
    (
        RoleSpec("rm-server.v2", _TASK, service=True, ports={"http": 0, "grpc-web": 9000}),
        RoleSpec("train", _TASK, 3, processes=4, ranked=True, ports={RENDEZVOUS: 0}),
        RoleSpec("workers", _TASK, 2, ports={"rpc": 0}),
    )
)
_HOSTS = {
    ("rm-server.v2", 0): "10.0.0.1",
    ("train", 0): "10.0.0.2",
    ("train", 1): "10.0.0.3",
    ("train", 2): "10.0.0.2",
    ("workers", 0): "10.0.0.4",
    ("workers", 1): "10.0.0.5",
}
_PORTS = {
    ("rm-server.v2", 0): {"http": 8001, "grpc-web": 9000},
    ("train", 0): {RENDEZVOUS: 29501},
    ("train", 1): {RENDEZVOUS: 29502},
    ("train", 2): {RENDEZVOUS: 29503},
    ("workers", 0): {"rpc": 7001},
    ("workers", 1): {"rpc": 7002},
}


def _of(role: str, index: int = 0) -> dict[str, str]:
    return variables(_SPEC, (role, index), _HOSTS, _PORTS)


@pytest.mark.parametrize("replica_id", _HOSTS)
def test_every_process_knows_every_roles_hosts(replica_id):
    found = _of(*replica_id)
    assert found["NEMO_RUN_RM_SERVER_V2_HOST"] == "10.0.0.1"
    assert found["NEMO_RUN_RM_SERVER_V2_HOSTS"] == "10.0.0.1"
    assert found["NEMO_RUN_TRAIN_HOST"] == "10.0.0.2"
    assert found["NEMO_RUN_TRAIN_HOSTS"] == "10.0.0.2,10.0.0.3,10.0.0.2"
    assert found["NEMO_RUN_WORKERS_HOSTS"] == "10.0.0.4,10.0.0.5"


@pytest.mark.parametrize("replica_id", _HOSTS)
def test_every_process_knows_every_roles_ports(replica_id):
    found = _of(*replica_id)
    assert found["NEMO_RUN_RM_SERVER_V2_PORT_HTTP"] == "8001"
    assert found["NEMO_RUN_RM_SERVER_V2_PORT_GRPC_WEB"] == "9000"
    assert found["NEMO_RUN_WORKERS_PORTS_RPC"] == "7001,7002"


def test_nemo_runs_macros_are_those_of_ones_own_role():
    found = _of("train", 1)
    assert found["NEMO_RUN_HEAD_NODE_IP"] == "10.0.0.2"
    assert found["NEMO_RUN_NUM_NODES"] == "3"
    assert found["NEMO_RUN_NODE_RANK"] == "1"
    assert found["NEMO_RUN_NPROC_PER_NODE"] == "4"
    assert _of("workers", 1)["NEMO_RUN_HEAD_NODE_IP"] == "10.0.0.4"


def test_ranked_processes_get_what_torch_distributed_reads():
    found = _of("train", 2)
    assert found["NODE_RANK"] == "2"
    assert found["WORLD_SIZE"] == "12"
    assert found["LOCAL_WORLD_SIZE"] == "4"
    assert found["MASTER_ADDR"] == "10.0.0.2"
    assert found["MASTER_PORT"] == found["NEMO_RUN_RDZV_PORT"] == "29501"


def _launched(task: JobSpec, index: int) -> dict[str, str]:
    spec = GroupSpec((RoleSpec("train", task, 2, ports={RENDEZVOUS: 0}),))
    hosts = {("train", 0): "10.0.0.1", ("train", 1): "10.0.0.2"}
    ports = {("train", number): {RENDEZVOUS: 29500 + number} for number in range(2)}
    return variables(spec, ("train", index), hosts, ports)


def test_a_launcher_finds_its_rendezvous_and_sets_the_ranks_itself():
    found = _launched(_TASK, 1)
    assert found["NEMO_RUN_RDZV_PORT"] == "29500"
    assert "MASTER_PORT" not in found
    assert "WORLD_SIZE" not in found


@pytest.mark.parametrize(("index", "host"), [(0, "10.0.0.1"), (1, "10.0.0.2")])
def test_torchrun_is_told_who_hosts_and_ones_own_address(index, host):
    found = _launched(_TASK, index)
    assert found["PET_RDZV_CONF"] == f"is_host={int(index == 0)}"
    assert found["PET_LOCAL_ADDR"] == host


@pytest.mark.parametrize("name", ["PET_RDZV_CONF", "PET_LOCAL_ADDR"])
def test_what_the_user_tells_torchrun_is_left_alone(name):
    found = _launched(JobSpec(("torchrun",), {name: "mine"}), 0)
    assert name not in found
    assert [one for one in found if one.startswith("PET_")] != []


@pytest.mark.parametrize(
    ("name", "variable"),
    [
        ("train", "TRAIN"),
        ("rm-server.v2", "RM_SERVER_V2"),
        ("a b/c", "A_B_C"),
        ("é1", "_1"),
        ("_x", "_X"),
    ],
)
def test_all_but_letters_and_digits_is_an_underscore(name, variable):
    assert env_key(name) == variable
