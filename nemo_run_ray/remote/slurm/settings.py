"""What the node program is told: by Slurm, by the job's script, and by the user's variables."""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

from ..variables import LIFE, RUN

if TYPE_CHECKING:
    from ..spec import ProbeSpec  # most nodes do without it

#: Seconds that an allocation may be idle; see ``allocation.py``.
IDLE_TIMEOUT = "NEMO_RUN_RAY_IDLE_TIMEOUT"
#: Set to 1 where another allocation goes on with the dispatches of this one.
RENEW = "NEMO_RUN_RAY_RENEW"
#: The sidecars of a ``SlurmCluster``, as JSON.
SIDECARS = "NEMO_RUN_RAY_SIDECARS"
#: The sidecar whose readiness NeMo-RL's programs read from a folder.
SANDBOX = "sandbox"
#: Set in the step that runs sidecars in a container of their own, beside the step with Ray.
COMPANION = "NEMO_RUN_RAY_COMPANION"
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
    """A command that runs beside Ray for the whole job.

    Attributes:
        name: for messages and its log.
        command: a line for ``bash``.
        everywhere: on every node, or on the head's alone.
        probe: what says that it is ready; ``None`` means at once.
        env: added to the job's environment.
    """

    name: str
    command: str
    everywhere: bool = True
    probe: Optional[ProbeSpec] = None
    env: Mapping[str, str] = {}


class Settings(NamedTuple):
    """One node's part in the cluster. Times are in seconds.

    Attributes:
        run: folder of this run, shared by all nodes.
        logs: folder of the logs that people read.
        log_prefix: of the logs' names.
        cluster: folder of the Ray cluster, which outlives the run; empty where there is none.
        job: Slurm's number of the job, and how often it was started again: ``12.0``.
        rank: of this node; 0 is the head.
        nodes: how many there are.
        host: Slurm's name of this node.
        hosts: Slurm's names of all nodes, by rank; empty when Slurm does not tell them.
        cpus: that Ray may give away here.
        worker_units: how many of NeMo-Run's ``worker_units`` this node is worth: its GPUs, or one.
        temp_dir: Ray's folder on the node.
        ports: that the user has set, by variable.
        interface: of the network that Ray shall use; empty lets the nodes find out.
        min_workers: with so many workers the cluster is ready.
        start_limit_s: until the cluster must be ready.
        share_limit_s: until every node must see the others' files.
        fail_fast: whether the death of a worker ends the job.
        pre_start: shell commands before Ray starts.
        debugger: whether ``ray start`` gets ``--ray-debugger-external``.
        log_sync_s: from one copy of Ray's logs to the next; ``None`` copies none.
        ends_at: seconds since 1970 at which Slurm's time limit ends the job, or ``None``.
        sidecars: that this program runs on this node.
        companions: those of this node that a step of their own runs, in another container.
        sandbox_ports: folder for the seeds' files of readiness; empty for none.
        life: folder of the allocation, when a client has asked for it by the cluster's name.
        idle_timeout_s: after which an allocation without a job ends; ``None`` for never.
        renew: whether another allocation goes on with the dispatches of this one.
        driver_gpus: whether the driver sees the head's GPUs.
    """

    run: str
    logs: str
    log_prefix: str
    cluster: str
    job: str
    rank: int
    nodes: int
    host: str
    hosts: Tuple[str, ...]
    cpus: Optional[int]
    worker_units: int
    temp_dir: str
    ports: Mapping[str, int]
    interface: str = ""
    min_workers: int = 0
    start_limit_s: float = 600.0
    share_limit_s: float = 60.0
    fail_fast: bool = True
    pre_start: str = ""
    debugger: bool = False
    log_sync_s: Optional[float] = None
    ends_at: Optional[float] = None
    sidecars: Tuple[SidecarSpec, ...] = ()
    companions: Tuple[SidecarSpec, ...] = ()
    sandbox_ports: str = ""
    life: str = ""
    idle_timeout_s: Optional[float] = None
    renew: bool = False
    driver_gpus: bool = False

    @property
    def is_head(self) -> bool:
        return self.rank == 0

    def host_of(self, rank: int) -> str:
        return self.hosts[rank] if rank < len(self.hosts) else f"the node with rank {rank}"

    def log(self, what: str) -> str:
        """The path of a log: ``head``, ``worker-03``, ``job``."""
        return os.path.join(self.logs, f"{self.log_prefix}{what}.log")

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
        temp_dir: Ray's folder where the user names none.

    Raises:
        WrongSetting: a value is not allowed, or Slurm's variables are not there.
    """
    rank, nodes = _number(env, "SLURM_PROCID"), _number(env, "SLURM_STEP_NUM_TASKS")
    if rank is None or nodes is None or not env.get(RUN):
        raise WrongSetting(
            "the variables SLURM_PROCID, SLURM_STEP_NUM_TASKS and NEMO_RUN_RAY_RUN are not all "
            "set; this program is started by `srun` in the job's script"
        )
    own, companions = _sidecars(env), _companions(env)
    _check_names([*own, *companions])
    if env.get(COMPANION):
        own, companions = [*companions], ()
    return Settings(
        run=env[RUN],
        logs=env.get("LOG_DIR") or env[RUN],
        log_prefix=env.get("NEMO_RUN_RAY_LOG_PREFIX", "ray-"),
        cluster=env.get("CLUSTER_DIR", ""),
        job=job_of(env),
        rank=rank,
        nodes=nodes,
        host=env.get("SLURMD_NODENAME") or os.uname().nodename,
        hosts=tuple(expand(env.get("SLURM_STEP_NODELIST") or "")),
        cpus=_number(env, "SLURM_CPUS_ON_NODE"),
        worker_units=_gpus(env) or 1,
        temp_dir=env.get("RAY_TEMP_DIR") or temp_dir,
        ports=_ports(env),
        sidecars=tuple(sidecar for sidecar in own if sidecar.everywhere or rank == 0),
        companions=companions,
        sandbox_ports=env.get("SANDBOX_PORTS_DIR", ""),
        ends_at=_number(env, "SLURM_JOB_END_TIME"),
        **_choices(env, nodes - 1),
    )


def _choices(env: Mapping[str, str], workers: int) -> Dict[str, Any]:
    """What users may choose, where they have."""
    least = _number(env, "NEMO_RUN_RAY_MIN_WORKERS")
    start_limit = _number(env, "RAY_HEAD_START_TIMEOUT")
    share_limit = _number(env, "NEMO_RUN_RAY_SHARE_TIMEOUT")
    return {
        "interface": env.get("NEMO_RUN_RAY_INTERFACE", ""),
        "min_workers": workers if least is None else min(least, workers),
        "start_limit_s": 600.0 if start_limit is None else float(start_limit),
        "share_limit_s": 60.0 if share_limit is None else float(share_limit),
        "fail_fast": env.get("NEMO_RUN_RAY_FAIL_FAST", "1") != "0",
        "pre_start": env.get("NEMO_RUN_RAY_PRE_START", ""),
        "debugger": env.get("RAY_DEBUG") == "legacy",
        "log_sync_s": _number(env, "RAY_LOG_SYNC_FREQUENCY") or None,
        "life": env.get(LIFE, ""),
        "idle_timeout_s": _number(env, IDLE_TIMEOUT),
        "renew": env.get(RENEW) == "1",
        "driver_gpus": env.get("NEMO_RUN_RAY_DRIVER_GPUS") == "1",
    }


def job_of(env: Mapping[str, str]) -> str:
    """Slurm's number of the job and of its start: ``12.0``, and ``12.1`` after a requeue."""
    return f"{env.get('SLURM_JOB_ID', '0')}.{env.get('SLURM_RESTART_COUNT') or '0'}"


def expand(nodelist: str) -> List[str]:
    """The names in Slurm's short form of a list: ``n[1-2,07],login`` is n1, n2, n07, login."""
    found = [""]
    names: List[str] = []
    for part in re.findall(r"\[[^]]*\]|[^\[\],]+|,", nodelist):
        if part == ",":
            names += found
            found = [""]
        else:
            ends = _numbers(part[1:-1]) if part.startswith("[") else [part]
            found = [start + end for start in found for end in ends]
    return [name for name in names + found if name]


def _numbers(ranges: str) -> List[str]:
    found = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        numbers = range(int(first), int(last or first) + 1)
        found += [f"{number:0{len(first)}d}" for number in numbers]
    return found


def _number(env: Mapping[str, str], name: str) -> Optional[int]:
    text = env.get(name, "").strip()
    if not text:
        return None
    if not text.isdigit():
        raise WrongSetting(f"{name} is {text!r}; expected is a whole number from 0")
    return int(text)


def _port(env: Mapping[str, str], name: str) -> Optional[int]:
    port = _number(env, name)
    if port is not None and not 1 <= port <= 65535:
        raise WrongSetting(f"{name} is {port}; expected is a port from 1 to 65535")
    return port


def _ports(env: Mapping[str, str]) -> Dict[str, int]:
    found = {name: _port(env, name) for name in (*HEAD_PORTS, *NODE_PORTS)}
    return {name: port for name, port in found.items() if port is not None}


def _gpus(env: Mapping[str, str]) -> int:
    count = env.get("SLURM_GPUS_ON_NODE", "")
    if count.isdigit():
        return int(count)
    # Steps without GPUs of their own see those of the job.
    devices = env.get("CUDA_VISIBLE_DEVICES", "")
    return len([device for device in devices.split(",") if device.strip()])


def _sidecars(env: Mapping[str, str]) -> List[SidecarSpec]:
    text = env.get(SIDECARS, "")
    try:
        rows = json.loads(text) if text else []
        found = [SidecarSpec(**{**row, "probe": _probe(row.get("probe"))}) for row in rows]
    except (ValueError, TypeError) as error:
        raise WrongSetting(f"{SIDECARS} cannot be read: {error!r}") from error
    if not env.get("SANDBOX_CONTAINER"):
        found += _sandbox(env)
    return found


def _companions(env: Mapping[str, str]) -> Tuple[SidecarSpec, ...]:
    return tuple(_sandbox(env)) if env.get("SANDBOX_CONTAINER") else ()


def _check_names(sidecars: List[SidecarSpec]) -> None:
    twice = repeated([sidecar.name for sidecar in sidecars])
    if twice:
        raise WrongSetting(f"two sidecars have the name {twice[0]!r}; give each its own")


def repeated(names: List[str]) -> List[str]:
    """The names that come more than once, sorted."""
    return sorted({name for name in names if names.count(name) > 1})


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

    given: Dict[str, str] = {}
    for pair in env.get("SANDBOX_ENV_VARS", "").split(","):
        name, equals, value = pair.strip().partition("=")
        if equals:
            given[name] = value
        elif name and name in env:
            given[name] = env[name]
    port = _port(env, "NEMO_SKILLS_SANDBOX_PORT") or 6000
    given["NGINX_PORT"] = str(port)
    given["SANDBOX_WORKER_BASE_PORT"] = env.get("SANDBOX_BASE_PORT") or "6001"
    probe = ProbeSpec(kind="port", port=port, timeout_s=600.0)
    return [SidecarSpec(name=SANDBOX, command=command, probe=probe, env=given)]
