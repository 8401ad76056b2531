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
def test_every_process_knows_every_roles_hosts_and_ports(replica_id):
    expected = {
        "NEMO_RUN_RM_SERVER_V2_HOST": "10.0.0.1",
        "NEMO_RUN_RM_SERVER_V2_HOSTS": "10.0.0.1",
        "NEMO_RUN_RM_SERVER_V2_PORT_HTTP": "8001",
        "NEMO_RUN_RM_SERVER_V2_PORT_GRPC_WEB": "9000",
        "NEMO_RUN_TRAIN_HOST": "10.0.0.2",
        "NEMO_RUN_TRAIN_HOSTS": "10.0.0.2,10.0.0.3,10.0.0.2",
        "NEMO_RUN_WORKERS_HOSTS": "10.0.0.4,10.0.0.5",
        "NEMO_RUN_WORKERS_PORT_RPC": "7002" if replica_id == ("workers", 1) else "7001",
        "NEMO_RUN_WORKERS_PORTS_RPC": "7001,7002",
    }
    assert expected.items() <= _of(*replica_id).items()


def test_nemo_runs_macros_and_ranks_are_those_of_ones_own_role():
    expected = {
        "NEMO_RUN_HEAD_NODE_IP": "10.0.0.2",
        "NEMO_RUN_NUM_NODES": "3",
        "NEMO_RUN_NODE_RANK": "2",
        "NEMO_RUN_NPROC_PER_NODE": "4",
        "NODE_RANK": "2",
        "WORLD_SIZE": "12",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "10.0.0.2",
        "MASTER_PORT": "29501",
        "NEMO_RUN_RDZV_PORT": "29501",
    }
    assert expected.items() <= _of("train", 2).items()
    assert _of("workers", 1)["NEMO_RUN_HEAD_NODE_IP"] == "10.0.0.4"


@pytest.mark.parametrize(
    ("index", "env", "expected"),
    [
        (0, {}, {"PET_RDZV_CONF": "is_host=1", "PET_LOCAL_ADDR": "10.0.0.1"}),
        (1, {}, {"PET_RDZV_CONF": "is_host=0", "PET_LOCAL_ADDR": "10.0.0.2"}),
        (1, {"PET_RDZV_CONF": "mine"}, {"PET_LOCAL_ADDR": "10.0.0.2"}),
    ],
)
def test_torchrun_learns_who_hosts_its_rendezvous_and_sets_the_ranks_itself(index, env, expected):
    spec = GroupSpec((RoleSpec("train", JobSpec(("torchrun",), env), 2, ports={RENDEZVOUS: 0}),))
    hosts = {("train", 0): "10.0.0.1", ("train", 1): "10.0.0.2"}
    ports = {("train", number): {RENDEZVOUS: 29500 + number} for number in range(2)}
    found = variables(spec, ("train", index), hosts, ports)
    assert found["NEMO_RUN_RDZV_PORT"] == "29500"
    assert {name: value for name, value in found.items() if name.startswith("PET_")} == expected
    assert not {"MASTER_PORT", "WORLD_SIZE"} & set(found)


@pytest.mark.parametrize(
    ("name", "variable"),
    [("rm-server.v2", "RM_SERVER_V2"), ("a b/c", "A_B_C"), ("é1", "_1"), ("_x", "_X")],
)
def test_all_but_letters_and_digits_is_an_underscore(name, variable):
    assert env_key(name) == variable
