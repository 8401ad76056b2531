"""Settings of the node program: variables of Slurm, of the job's script and of the user."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

from ..files import LIFE, RUN

if TYPE_CHECKING:
    from ..spec import ProbeSpec  # most nodes do without it

#: Variables that the client sets in the script of a named allocation.
IDLE_TIMEOUT = "NEMO_RUN_RAY_IDLE_TIMEOUT"
RENEW = "NEMO_RUN_RAY_RENEW"
SIDECARS = "NEMO_RUN_RAY_SIDECARS"
#: Variable of the step that runs sidecars in a container of their own, beside the step with Ray.
SIDECAR_STEP = "NEMO_RUN_RAY_SIDECAR_STEP"
#: Variable of Slurm's names of all nodes, by rank, which the job's script sets.
HOSTS = "NEMO_RUN_RAY_HOSTS"
#: The sidecar whose readiness NeMo-RL's programs read from a folder.
SANDBOX = "sandbox"
#: Variables with which users set a port of Ray (the names are NeMo-Run's), and their options of
#: ``ray start``. The first three are the head's alone.
HEAD_PORTS = {
    "PORT": "port",
    "DASHBOARD_PORT": "dashboard-port",
    "RAY_CLIENT_SERVER_PORT": "ray-client-server-port",
}
NODE_PORTS = {
    "NODE_MANAGER_PORT": "node-manager-port",
    "OBJECT_MANAGER_PORT": "object-manager-port",
    "RUNTIME_ENV_AGENT_PORT": "runtime-env-agent-port",
    "DASHBOARD_AGENT_GRPC_PORT": "dashboard-agent-grpc-port",
    "DASHBOARD_AGENT_LISTEN_PORT": "dashboard-agent-listen-port",
    "METRICS_EXPORT_PORT": "metrics-export-port",
    "MIN_WORKER_PORT": "min-worker-port",
    "MAX_WORKER_PORT": "max-worker-port",
}


class WrongSetting(Exception):
    """A variable's value is not allowed; the message names it."""


class SidecarSpec(NamedTuple):
    """A command that runs beside Ray for the whole job."""

    name: str
    command: str  # a line for bash
    everywhere: bool = True  # on every node, or on the head's alone
    probe: Optional[ProbeSpec] = None  # decides when it is ready; None: at once
    env: Mapping[str, str] = {}  # added to the job's environment
    is_separate: bool = False  # in a container and a step of its own


class Settings(NamedTuple):
    """One node's part in the cluster. Times are in seconds."""

    run: str  # folder of this run, shared by all nodes
    logs: str  # folder of the logs that people read
    log_prefix: str
    cluster: str  # folder of the Ray cluster, which outlives the run; empty if there is none
    job: str  # Slurm's number of the job, and how often Slurm restarted it: 12.0
    rank: int  # 0 is the head
    nodes: int
    host: str  # Slurm's name of this node
    hosts: Tuple[str, ...]  # Slurm's names of all nodes, by rank; empty if unknown
    cpus: Optional[int]  # that Ray may give away here
    worker_units: int  # NeMo-Run's resource: the GPUs of this node, or 1
    temp_dir: str  # Ray's folder on the node
    ports: Mapping[str, int]  # that the user has set, by variable
    interface: str = ""  # the network that Ray shall use; empty: the nodes find one
    min_workers: int = 0  # with that many workers the cluster is ready
    start_limit_s: float = 600.0  # until the cluster must be ready
    share_limit_s: float = 60.0  # until every node must see the others' files
    fail_fast: bool = True  # the death of a worker ends the job
    pre_start: str = ""  # shell commands before Ray starts
    debugger: bool = False  # for ``ray start --ray-debugger-external``
    log_sync_s: Optional[float] = None  # between two copies of Ray's logs; None: no copies
    ends_at: Optional[float] = None  # when Slurm's time limit ends the job, since the epoch
    sidecars: Tuple[SidecarSpec, ...] = ()  # of this node
    is_sidecar_step: bool = False  # this program runs the separate ones, and no Ray
    sandbox_ports: str = ""  # folder for NeMo-RL's files of readiness
    allocation: str = ""  # folder of the allocation, of a cluster that clients find by name
    idle_timeout_s: Optional[float] = None  # without a job, until the allocation ends
    renew: bool = False  # another allocation continues the dispatches of this one
    driver_gpus: bool = False  # the driver sees the head's GPUs

    @property
    def is_head(self) -> bool:
        return self.rank == 0

    def host_of(self, rank: int) -> str:
        return self.hosts[rank] if rank < len(self.hosts) else f"the node with rank {rank}"

    def log(self, name: str) -> str:
        """The path of a log: ``head``, ``worker-03``, ``job``."""
        return os.path.join(self.logs, f"{self.log_prefix}{name}.log")

    def sidecar_log(self, sidecar: SidecarSpec, rank: int, host: str) -> str:
        """The log of a sidecar on a node; a sandbox's is where NeMo-RL looks for it."""
        if sidecar.name == SANDBOX and self.sandbox_ports:
            return os.path.join(self.sandbox_ports, f"sandbox-{rank}.log")
        return self.log(f"{sidecar.name}-{host}")

    @property
    def ray_logs(self) -> str:
        """The folder for copies of Ray's own logs on this node, where NeMo-RL has them."""
        return os.path.join(self.logs, "ray", "" if self.is_head else self.host)

    @property
    def node_log(self) -> str:
        """The log of this node's Ray. Numbers are as wide as the largest, so that names sort."""
        if self.is_head:
            return self.log("head")
        return self.log(f"worker-{self.rank:0{len(str(self.nodes - 1))}d}")


def read(env: Mapping[str, str], temp_dir: str) -> Settings:
    """The settings in an environment.

    Args:
        env: the environment of Slurm's task.
        temp_dir: Ray's folder unless the user names one.

    Raises:
        WrongSetting: a value is not allowed, or Slurm's variables are missing.
    """
    rank, nodes = _number(env, "SLURM_PROCID"), _number(env, "SLURM_STEP_NUM_TASKS")
    if rank is None or nodes is None or not env.get(RUN):
        raise WrongSetting(
            "the variables SLURM_PROCID, SLURM_STEP_NUM_TASKS and NEMO_RUN_RAY_RUN are not all "
            "set; this program is started by `srun` in the job's script"
        )
    workers = nodes - 1
    min_workers = _number(env, "NEMO_RUN_RAY_MIN_WORKERS", workers)
    ports = {name: _port(env, name) for name in (*HEAD_PORTS, *NODE_PORTS)}
    return Settings(
        run=env[RUN],
        logs=env.get("LOG_DIR") or env[RUN],
        log_prefix=env.get("NEMO_RUN_RAY_LOG_PREFIX", "ray-"),
        cluster=env.get("CLUSTER_DIR", ""),
        job=job_of(env),
        rank=rank,
        nodes=nodes,
        host=env.get("SLURMD_NODENAME") or os.uname().nodename,
        hosts=tuple(env.get(HOSTS, "").split()),
        cpus=_number(env, "SLURM_CPUS_ON_NODE"),
        worker_units=_gpus(env) or 1,
        temp_dir=env.get("RAY_TEMP_DIR") or temp_dir,
        ports={name: port for name, port in ports.items() if port is not None},
        interface=env.get("NEMO_RUN_RAY_INTERFACE", ""),
        min_workers=min(workers if min_workers is None else min_workers, workers),
        start_limit_s=_number(env, "RAY_HEAD_START_TIMEOUT", 600) or 0.0,
        share_limit_s=_number(env, "NEMO_RUN_RAY_SHARE_TIMEOUT", 60) or 0.0,
        fail_fast=env.get("NEMO_RUN_RAY_FAIL_FAST", "1") != "0",
        pre_start=env.get("NEMO_RUN_RAY_PRE_START", ""),
        debugger=env.get("RAY_DEBUG") == "legacy",
        log_sync_s=_number(env, "RAY_LOG_SYNC_FREQUENCY") or None,
        ends_at=_number(env, "SLURM_JOB_END_TIME"),
        sidecars=tuple(row for row in _sidecars(env) if row.everywhere or rank == 0),
        is_sidecar_step=bool(env.get(SIDECAR_STEP)),
        sandbox_ports=env.get("SANDBOX_PORTS_DIR", ""),
        allocation=env.get(LIFE, ""),
        idle_timeout_s=_number(env, IDLE_TIMEOUT),
        renew=env.get(RENEW) == "1",
        driver_gpus=env.get("NEMO_RUN_RAY_DRIVER_GPUS") == "1",
    )


def job_of(env: Mapping[str, str]) -> str:
    """Slurm's number of the job and of its start: ``12.0``, and ``12.1`` after a requeue."""
    return f"{env.get('SLURM_JOB_ID', '0')}.{env.get('SLURM_RESTART_COUNT') or '0'}"


def _number(env: Mapping[str, str], name: str, default: Optional[int] = None) -> Optional[int]:
    text = env.get(name, "").strip()
    if text and not text.isdigit():
        raise WrongSetting(f"{name} is {text!r}; expected is a whole number from 0")
    return int(text) if text else default


def _port(env: Mapping[str, str], name: str) -> Optional[int]:
    port = _number(env, name)
    if port is not None and not 1 <= port <= 65535:
        raise WrongSetting(f"{name} is {port}; expected is a port from 1 to 65535")
    return port


def _gpus(env: Mapping[str, str]) -> int:
    count = env.get("SLURM_GPUS_ON_NODE", "")
    if count.isdigit():
        return int(count)
    # Steps without GPUs of their own see those of the job.
    devices = env.get("CUDA_VISIBLE_DEVICES", "")
    return len([device for device in devices.split(",") if device.strip()])


def _sidecars(env: Mapping[str, str]) -> List[SidecarSpec]:
    try:
        rows = json.loads(env.get(SIDECARS) or "[]")
        sidecars = [SidecarSpec(**{**row, "probe": _probe(row.get("probe"))}) for row in rows]
    except (ValueError, TypeError) as error:
        raise WrongSetting(f"{SIDECARS} cannot be read: {error!r}") from error
    return [*sidecars, *_sandbox(env)]


def _probe(row: Optional[Dict[str, Any]]) -> Optional[ProbeSpec]:
    if row is None:
        return None
    from ..spec import ProbeSpec

    return ProbeSpec(**{**row, "command": tuple(row.get("command", ()))})


def _sandbox(env: Mapping[str, str]) -> List[SidecarSpec]:
    """The sandbox of NeMo-RL's ``ray.sub``: a server on every node, ready when its port is.

    ``SANDBOX_ENV_VARS`` is written as ``srun --export`` takes it: ``NAME=value`` sets a variable,
    and ``NAME`` passes on what the job's script has.
    """
    command = env.get("SANDBOX_COMMAND", "")
    if not command:
        return []
    from ..spec import ProbeSpec

    variables: Dict[str, str] = {}
    for pair in env.get("SANDBOX_ENV_VARS", "").split(","):
        name, equals, value = pair.strip().partition("=")
        if equals or name in env:
            variables[name] = value if equals else env[name]
    port = _port(env, "NEMO_SKILLS_SANDBOX_PORT") or 6000
    variables["NGINX_PORT"] = str(port)
    variables["SANDBOX_WORKER_BASE_PORT"] = env.get("SANDBOX_BASE_PORT") or "6001"
    probe = ProbeSpec(kind="port", port=port, timeout_s=600.0)
    return [
        SidecarSpec(SANDBOX, command, True, probe, variables, bool(env.get("SANDBOX_CONTAINER")))
    ]
