"""Settings of the node program: variables of Slurm, of the job's script and of the user."""

from __future__ import annotations

import json
import os
from typing import List, Mapping, NamedTuple, Optional

from ..files import LIFE, RUN
from ..spec import ProbeSpec

#: Variables that the client sets in the script of a named allocation.
IDLE_TIMEOUT = "NEMO_RUN_RAY_IDLE_TIMEOUT"
RENEW = "NEMO_RUN_RAY_RENEW"
SIDECARS = "NEMO_RUN_RAY_SIDECARS"
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


class CannotContinue(Exception):
    """This node cannot take part; the message says why, and names a variable that is wrong."""


class SidecarSpec(NamedTuple):
    """A command that runs beside Ray for the whole job."""

    name: str
    command: str  # a line for bash; empty where Slurm runs it in a step of its own
    everywhere: bool = True  # on every node, or on the head's alone
    probe: Optional[ProbeSpec] = None  # decides when it is ready; None: at once
    env: Mapping[str, str] = {}  # added to the job's environment


class Settings:
    """One node's part in the cluster. Times are in seconds.

    Args:
        env: the environment of Slurm's task.
        temp_dir: Ray's folder unless the user names one.

    Raises:
        CannotContinue: a value is not allowed, or Slurm's variables are missing.
    """

    def __init__(self, env: Mapping[str, str], temp_dir: str) -> None:
        rank, nodes = _number(env, "SLURM_PROCID"), _number(env, "SLURM_STEP_NUM_TASKS")
        if rank is None or nodes is None or not env.get(RUN):
            raise CannotContinue(
                "the variables SLURM_PROCID, SLURM_STEP_NUM_TASKS and NEMO_RUN_RAY_RUN are not "
                "all set; this program is started by `srun` in the job's script"
            )
        #: Folder of this run, shared by all nodes; of the logs that people read; and of the Ray
        #: cluster, which outlives the run.
        self.run = env[RUN]
        self.logs = env.get("LOG_DIR") or self.run
        self.cluster = env.get("CLUSTER_DIR", "")
        self.log_prefix = env.get("NEMO_RUN_RAY_LOG_PREFIX", "ray-")
        #: Slurm's number of the job, and how often Slurm restarted it: 12.0.
        self.job = job_of(env)
        #: 0 is the head.
        self.rank, self.nodes = rank, nodes
        #: Slurm's names of this node, and of all nodes by rank.
        self.host = env.get("SLURMD_NODENAME") or os.uname().nodename
        self.hosts = env.get(HOSTS, "").split()
        #: CPUs that Ray may give away here, and NeMo-Run's resource: this node's GPUs, or 1.
        self.cpus = _number(env, "SLURM_CPUS_ON_NODE")
        self.worker_units = _gpus(env) or 1
        #: Ray's folder on the node.
        self.temp_dir = env.get("RAY_TEMP_DIR") or temp_dir
        #: Ports that the user has set, by variable.
        ports = {name: _port(env, name) for name in (*HEAD_PORTS, *NODE_PORTS)}
        self.ports = {name: port for name, port in ports.items() if port is not None}
        #: The network that Ray shall use; empty: the nodes find one.
        self.interface = env.get("NEMO_RUN_RAY_INTERFACE", "")
        #: With that many workers the cluster is ready.
        self.min_workers = min(_number(env, "NEMO_RUN_RAY_MIN_WORKERS", nodes) or 0, nodes - 1)
        #: Until the cluster must be ready, and until every node must see the others' files.
        self.start_limit_s = _number(env, "RAY_HEAD_START_TIMEOUT", 600) or 0
        self.share_limit_s = _number(env, "NEMO_RUN_RAY_SHARE_TIMEOUT", 60) or 0
        #: The death of a worker ends the job.
        self.fail_fast = env.get("NEMO_RUN_RAY_FAIL_FAST", "1") != "0"
        #: Shell commands before Ray starts.
        self.pre_start = env.get("NEMO_RUN_RAY_PRE_START", "")
        #: For ``ray start --ray-debugger-external``.
        self.debugger = env.get("RAY_DEBUG") == "legacy"
        #: Between two copies of Ray's logs; ``None``: no copies.
        self.log_sync_s = _number(env, "RAY_LOG_SYNC_FREQUENCY") or None
        #: When Slurm's time limit ends the job, since the epoch.
        self.ends_at = _number(env, "SLURM_JOB_END_TIME")
        #: Of this node.
        self.sidecars = [row for row in _sidecars(env) if row.everywhere or rank == 0]
        #: Folder for NeMo-RL's files of readiness.
        self.sandbox_ports = env.get("SANDBOX_PORTS_DIR", "")
        #: Folder of the allocation, of a cluster that clients find by name.
        self.allocation = env.get(LIFE, "")
        #: Without a job, until the allocation ends.
        self.idle_timeout_s = _number(env, IDLE_TIMEOUT)
        #: Another allocation continues the dispatches of this one.
        self.renew = env.get(RENEW) == "1"
        #: The driver sees the head's GPUs.
        self.driver_gpus = env.get("NEMO_RUN_RAY_DRIVER_GPUS") == "1"

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
        width = len(str(self.nodes - 1))
        return self.log("head" if self.is_head else f"worker-{self.rank:0{width}d}")


def job_of(env: Mapping[str, str]) -> str:
    """Slurm's number of the job and of its start: ``12.0``, and ``12.1`` after a requeue."""
    return f"{env.get('SLURM_JOB_ID', '0')}.{env.get('SLURM_RESTART_COUNT') or '0'}"


def _number(env: Mapping[str, str], name: str, default: Optional[int] = None) -> Optional[int]:
    text = env.get(name, "").strip()
    if text and not text.isdigit():
        raise CannotContinue(f"{name} is {text!r}; expected is a whole number from 0")
    return int(text) if text else default


def _port(env: Mapping[str, str], name: str) -> Optional[int]:
    port = _number(env, name)
    if port is not None and not 1 <= port <= 65535:
        raise CannotContinue(f"{name} is {port}; expected is a port from 1 to 65535")
    return port


def _gpus(env: Mapping[str, str]) -> int:
    count = env.get("SLURM_GPUS_ON_NODE", "")
    if count.isdigit():
        return int(count)
    # Steps without GPUs of their own see those of the job.
    devices = env.get("CUDA_VISIBLE_DEVICES", "")
    return len([device for device in devices.split(",") if device.strip()])


def _sidecars(env: Mapping[str, str]) -> List[SidecarSpec]:
    sidecars = _sandbox(env)
    try:
        for row in json.loads(env.get(SIDECARS) or "[]"):
            probe = ProbeSpec(**row["probe"]) if row.get("probe") else None
            sidecars.append(SidecarSpec(**{**row, "probe": probe}))
    except (ValueError, TypeError) as error:
        raise CannotContinue(f"{SIDECARS} cannot be read: {error!r}") from error
    return sidecars


def _sandbox(env: Mapping[str, str]) -> List[SidecarSpec]:
    """The sandbox of NeMo-RL's ``ray.sub``: a server on every node, ready when its port is.

    ``SANDBOX_ENV_VARS`` is written as ``srun --export`` takes it: ``NAME=value`` sets a variable,
    and a ``NAME`` alone is passed on anyway.
    """
    command = env.get("SANDBOX_COMMAND", "")
    if not command:
        return []
    pairs = [pair.strip() for pair in env.get("SANDBOX_ENV_VARS", "").split(",") if "=" in pair]
    variables = dict(pair.split("=", 1) for pair in pairs)
    port = _port(env, "NEMO_SKILLS_SANDBOX_PORT") or 6000
    variables["NGINX_PORT"] = str(port)
    variables["SANDBOX_WORKER_BASE_PORT"] = env.get("SANDBOX_BASE_PORT") or "6001"
    probe = ProbeSpec(kind="port", port=port, timeout_s=600.0)
    return [
        SidecarSpec(
            SANDBOX, "" if env.get("SANDBOX_CONTAINER") else command, probe=probe, env=variables
        )
    ]
