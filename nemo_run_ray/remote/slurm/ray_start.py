"""How Ray is started on a node: words and environment."""

from __future__ import annotations

import json
from typing import Dict, List, Mapping

from ..variables import DASHBOARD, EMBEDDED, ENDS_AT, LASTS_S, RENEWS
from .run_folder import HeadAddress
from .settings import HEAD_PORTS, NODE_PORTS, Settings

#: Variables that would lead Ray, or a driver, to another cluster; and what that says of itself.
_FOREIGN = {"RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_TOKEN", DASHBOARD}
_FOREIGN |= {EMBEDDED, ENDS_AT, LASTS_S, RENEWS}
#: How variables of PMI begin, and Slurm's of a step: its counts, places and lists of nodes.
_RANKED = ("PMI_", "PMI2_", "PMIX_", "SLURM_PMI", "SLURM_PMIX")
_COUNTS = {"SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NNODES", "SLURM_TASKS_PER_NODE"}
_COUNTS |= {"SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_STEP_TASKS_PER_NODE"}
_PLACES = ("SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID")
_LISTS = ("SLURM_STEP_NODELIST",)
#: How variables begin by which an MPI in one of Ray's workers takes it for a rank of the step, and
#: the ones among them that say where Slurm is.
_OF_STEP = ("SLURM_", "OMPI_", "MPI_", "PMI_", "PMI2_", "PMIX_")
_WHERE_SLURM_IS = {"SLURM_CONF", "SLURM_CLUSTERS"}


def head_words(
    settings: Settings, address: str, ports: Mapping[str, int], has_token: bool
) -> List[str]:
    """``ray start`` of the head. Without a token its dashboard is for the node itself alone."""
    words = ["ray", "start", "--head", f"--node-ip-address={address}"]
    # On all interfaces: NeMo-Run's port_forward ends at the head's localhost.
    host = "0.0.0.0" if has_token else "127.0.0.1"
    words += [f"--dashboard-host={host}", "--include-dashboard=true"]
    words += [f"--temp-dir={settings.temp_dir}"]
    words += [f"--{option}={ports[name]}" for name, option in HEAD_PORTS.items()]
    return words + _node_words(settings, ports)


def worker_words(
    settings: Settings, head: HeadAddress, address: str, ports: Mapping[str, int]
) -> List[str]:
    """``ray start`` of a worker."""
    words = ["ray", "start", f"--address={head.gcs}", f"--node-ip-address={address}"]
    return words + _node_words(settings, ports)


def _node_words(settings: Settings, ports: Mapping[str, int]) -> List[str]:
    # The second one is how NeMo-RL sees that Slurm has started its Ray.
    resources = {"worker_units": settings.worker_units, "slurm_managed_ray_cluster": 1}
    words = [f"--{option}={ports[name]}" for name, option in NODE_PORTS.items()]
    words += [f"--resources={json.dumps(resources)}", "--disable-usage-stats", "--block"]
    if settings.cpus is not None:
        # Ray counts the CPUs of the machine, which may not all be the job's.
        words.append(f"--num-cpus={settings.cpus}")
    if settings.debugger:
        words.append("--ray-debugger-external")
    return words


def with_pre_start(words: List[str], pre_start: str, env: Mapping[str, str]) -> List[str]:
    """The words behind the user's commands: what those export reaches Ray.

    What the step has for its ranks in ``env`` ends there: Ray's workers would have it for ever.
    """
    step = [
        name
        for name in sorted(env)
        if name.startswith(_OF_STEP) and name not in _WHERE_SLURM_IS and name.isidentifier()
    ]
    unset = f"unset {' '.join(step)}"
    return ["bash", "-c", f'{pre_start}\n{unset}\nexec "$@"', "pre-start", *words]


def ray_environment(base: Mapping[str, str], settings: Settings, token_path: str) -> Dict[str, str]:
    """The environment of Ray on this node, and of what runs beside it.

    Token authentication is on, unless the user has set ``RAY_AUTH_MODE``.
    """
    env = {name: value for name, value in base.items() if name not in _FOREIGN}
    env.setdefault("RAY_AUTH_MODE", "token")
    if env["RAY_AUTH_MODE"] == "token":
        env["RAY_AUTH_TOKEN_PATH"] = token_path
    # A node that leaves has nothing to hand over: the others leave with it.
    env.setdefault("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "0")
    # Ray notes the last cluster of this machine there, and must not find another job's.
    env["RAY_TMPDIR"] = settings.temp_dir
    return _alone(env, settings.host)


def _alone(env: Mapping[str, str], host: str) -> Dict[str, str]:
    """The environment without what tells a program that it is one rank of many.

    The step has a task on every node. MPI, Lightning and NVSHMEM would take a driver, or one of
    Ray's workers, for one of them, and wait for the others.
    """
    found = {name: value for name, value in env.items() if not name.startswith(_RANKED)}
    ones = {name: "1" for name in _COUNTS if name in found}
    zeros = {name: "0" for name in _PLACES if name in found}
    lists = {name: host for name in _LISTS if name in found}
    return {**found, **ones, **zeros, **lists}


def for_drivers(ray_env: Mapping[str, str], head: HeadAddress) -> Dict[str, str]:
    """The variables by which a program finds this cluster and may use it."""
    names = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_TMPDIR")
    found = {name: ray_env[name] for name in names if name in ray_env}
    return {**found, "RAY_ADDRESS": head.gcs, "RAY_API_SERVER_ADDRESS": head.dashboard}
