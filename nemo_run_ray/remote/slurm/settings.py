"""Settings of the node program: variables of Slurm, of the job's script and of the user."""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from typing import Any, Iterator, Mapping, NamedTuple

from ..files import LIFE, RUN, own_folder
from ..spec import Env, ProbeSpec

#: Variables that the client sets in the script of a named allocation.
IDLE_TIMEOUT = "NEMO_RUN_RAY_IDLE_TIMEOUT"
RENEW = "NEMO_RUN_RAY_RENEW"
SIDECARS = "NEMO_RUN_RAY_SIDECARS"
#: The sidecar whose readiness NeMo-RL's programs read from a folder.
SANDBOX = "sandbox"
#: Variables with which users set a port of Ray; the names are NeMo-Run's, and those of the options
#: of ``ray start`` in capitals. The first three are the head's alone.
HEAD_PORTS = ("PORT", "DASHBOARD_PORT", "RAY_CLIENT_SERVER_PORT")
NODE_PORTS = (
    "NODE_MANAGER_PORT",
    "OBJECT_MANAGER_PORT",
    "RUNTIME_ENV_AGENT_PORT",
    "DASHBOARD_AGENT_GRPC_PORT",
    "DASHBOARD_AGENT_LISTEN_PORT",
    "METRICS_EXPORT_PORT",
    "MIN_WORKER_PORT",
    "MAX_WORKER_PORT",
)


class CannotContinue(Exception):
    """This node cannot take part; the message says why, and names a variable that is wrong."""


class SidecarSpec(NamedTuple):
    """A command that runs beside Ray for the whole job."""

    name: str
    command: str  # a line for bash; empty where Slurm runs it in a step of its own
    everywhere: bool = True  # on every node, or on the head's alone
    probe: ProbeSpec | None = None  # decides when it is ready; None: at once
    env: Mapping[str, str] = {}  # added to the job's environment


class Settings:
    """One node's part in the cluster. Times are in seconds.

    Args:
        env: the environment of Slurm's task.

    Raises:
        CannotContinue: a value is not allowed, or Slurm's variables are missing.
    """

    def __init__(self, env: Env):
        #: 0 is the head.
        self.rank, self.nodes = _number(env, "SLURM_PROCID"), _number(env, "SLURM_STEP_NUM_TASKS")
        #: Folder of this run, shared by all nodes.
        self.run = env.get(RUN, "")
        if None in (self.rank, self.nodes) or not self.run:
            raise CannotContinue(
                "the variables SLURM_PROCID, SLURM_STEP_NUM_TASKS and NEMO_RUN_RAY_RUN are not "
                "all set; this program is started by `srun` in the job's script"
            )
        #: Folder of the logs that people read, and of the Ray cluster, which outlives the run.
        self.logs = env.get("LOG_DIR") or self.run
        self.cluster = env.get("CLUSTER_DIR", "")
        self._log_prefix = env.get("NEMO_RUN_RAY_LOG_PREFIX", "ray-")
        #: Slurm's number of the job and of its start: ``12.0``, and ``12.1`` after a requeue.
        self.job = f"{env.get('SLURM_JOB_ID', '0')}.{env.get('SLURM_RESTART_COUNT') or '0'}"
        #: Slurm's names of this node, and of all nodes by rank.
        self.host = env.get("SLURMD_NODENAME", "")
        self.hosts = env.get("NEMO_RUN_RAY_HOSTS", "").split()
        #: The log of this node's Ray. Numbers are as wide as the largest, so that names sort.
        width = len(str(self.nodes - 1))
        self.node_log = self.log(f"worker-{self.rank:0{width}d}" if self.rank else "head")
        #: CPUs that Ray may give away here, and NeMo-Run's resource: this node's GPUs, or 1. Steps
        #: without GPUs of their own see those of the job.
        self.cpus = _number(env, "SLURM_CPUS_ON_NODE")
        gpus = env.get("SLURM_GPUS_ON_NODE", "")
        seen = re.findall("[^, ]+", env.get("CUDA_VISIBLE_DEVICES", ""))
        self.worker_units = (int(gpus) if gpus.isdigit() else len(seen)) or 1
        #: Ray's folder on the node; short, since Linux limits the names of the sockets inside. It
        #: lies in a folder of this user alone: Ray lets everybody write into its own.
        own = f"/tmp/nrr-{os.getuid()}-{self.job}"
        self.temp_dir = env.get("RAY_TEMP_DIR") or f"{own_folder(own)}/r"
        #: Ports that the user has set, by variable.
        self.ports = {
            name: _port(env, name) for name in (*HEAD_PORTS, *NODE_PORTS) if env.get(name)
        }
        #: With that many workers the cluster is ready.
        self.min_workers: int = min(
            _number(env, "NEMO_RUN_RAY_MIN_WORKERS", self.nodes), self.nodes - 1
        )
        #: Until the cluster must be ready, and until every node must see the others' files.
        self.start_limit_s = _number(env, "RAY_HEAD_START_TIMEOUT", 600)
        self.share_limit_s = _number(env, "NEMO_RUN_RAY_SHARE_TIMEOUT", 60)
        #: The death of a worker ends the job.
        self.fail_fast = env.get("NEMO_RUN_RAY_FAIL_FAST", "1") != "0"
        #: Between two copies of Ray's logs; without it, no copies.
        self.log_sync_s = _number(env, "RAY_LOG_SYNC_FREQUENCY")
        #: When Slurm's time limit ends the job, since the epoch.
        self.ends_at = _number(env, "NEMO_RUN_RAY_END_TIME")
        #: Folder for NeMo-RL's files of readiness.
        self.sandbox_ports = env.get("SANDBOX_PORTS_DIR", "")
        #: Of this node.
        self.sidecars = [row for row in _sidecars(env) if row.everywhere or self.rank == 0]
        #: Folder of the allocation, of a cluster that clients find by name; the time without a job
        #: until it ends; and the user's setting: whether another one may continue its dispatches.
        self.allocation = env.get(LIFE, "")
        self.idle_timeout_s = _number(env, IDLE_TIMEOUT)
        self.renew = env.get(RENEW) == "1"

    def log(self, name: str) -> str:
        """The path of a log: ``head``, ``worker-03``, ``job``."""
        return f"{self.logs}/{self._log_prefix}{name}.log"


def _number(env: Env, name: str, default: int | None = None) -> Any:
    text = env.get(name, "").strip()
    if text and not text.isdigit():
        raise CannotContinue(f"{name} is {text!r}; expected is a whole number from 0")
    return int(text) if text else default


def _port(env: Env, name: str) -> int:
    with suppress(ValueError):
        if 1 <= int(env[name]) <= 65535:
            return int(env[name])
    raise CannotContinue(f"{name} is {env[name]!r}; expected is a port from 1 to 65535")


def _sidecars(env: Env) -> Iterator[SidecarSpec]:
    """The sandbox of NeMo-RL's ``ray.sub``, a server on every node, and the client's sidecars.

    ``SANDBOX_ENV_VARS`` is written as ``srun --export`` takes it: ``NAME=value`` sets a variable,
    and a ``NAME`` alone is passed on anyway.
    """
    command = env.get("SANDBOX_COMMAND", "")
    if command:
        name = "NEMO_SKILLS_SANDBOX_PORT"
        port = _port(env, name) if env.get(name) else 6000
        variables = {
            **dict(re.findall("([^,= ]+)=([^,]*)", env.get("SANDBOX_ENV_VARS", ""))),
            "NGINX_PORT": str(port),
            "SANDBOX_WORKER_BASE_PORT": env.get("SANDBOX_BASE_PORT") or "6001",
        }
        probe = ProbeSpec(kind="port", port=port, timeout_s=600.0)
        command = "" if env.get("SANDBOX_CONTAINER") else command
        yield SidecarSpec(SANDBOX, command, probe=probe, env=variables)
    for name, command, everywhere, probe, variables in json.loads(env.get(SIDECARS) or "[]"):
        yield SidecarSpec(name, command, everywhere, probe and ProbeSpec(*probe), variables)
