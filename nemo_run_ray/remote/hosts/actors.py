"""The actors that a driver keeps on nodes, one a replica: how they start, and what they are sent.

``ray`` is imported late. The class is sent by value and the archives go through Ray's object store,
so that the actors run in workers that Ray keeps ready: a worker for the job's runtime environment
is started anew, 1.1 s more (measured with three).
"""

from __future__ import annotations

import importlib
import io
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import zlib
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Dict, Mapping, Optional, Tuple

from .. import FOLDER
from ..fit import Node
from ..node.rundir import JOB_CONFIG, jobs_folder
from ..spec import CODE, RoleSpec, to_json

#: One replica of one role.
ReplicaId = Tuple[str, int]
#: Variables of the driver that a role needs: which attempt it is, and what a Ray program needs.
_PASSED_ON = ("NEMO_RUN_ATTEMPT", "RAY_ADDRESS", "RAY_OVERRIDE_JOB_RUNTIME_ENV")


def name(replica_id: ReplicaId) -> str:
    """``role/replica``, as it stands before the lines of its output."""
    return f"{replica_id[0]}/{replica_id[1]}"


@dataclass(eq=False)
class ReplicaHandle:
    """One replica and its actor, as the driver knows them.

    Attributes:
        actor: Ray's handle, once it is started.
        answers: the actor has answered once.
        dead: the actor's worker is gone.
        seen: number of reports that were taken.
        orders: number of orders that were given.
    """

    replica_id: ReplicaId
    role: RoleSpec
    node: Node
    tag: str
    run_dir: str
    actor: Any = None
    answers: bool = False
    dead: bool = False
    seen: int = 0
    orders: int = 0
    ports: Dict[str, int] = field(default_factory=dict)
    end_by: Optional[float] = None


class Actors:
    """Connects to Ray, and starts actors. What they all need goes to its object store once.

    Args:
        job: name of the job.
        secrets: the values of the job's secrets by name.

    Attributes:
        ray: the module, connected.
        package: reference of an archive of this package and the job's files.
    """

    def __init__(self, job: str, secrets: Mapping[str, str]) -> None:
        self._job, self._secrets = job, secrets
        self._config = os.environ.get(JOB_CONFIG, "")
        # The actors need nothing of the job's runtime environment.
        with suppress(KeyError, ValueError, AttributeError):  # slower, but right
            config = json.loads(self._config)
            config.pop("runtime_env")
            os.environ[JOB_CONFIG] = json.dumps(config)
        try:
            import ray
        except ImportError as error:
            raise RuntimeError(
                f"{sys.executable} on node {socket.gethostname()} has no ray, which a group or an "
                "array needs"
            ) from error
        ray.init(
            address=os.environ.get("RAY_ADDRESS", "auto"),
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Ray's handler would leave at once
        self.ray: Any = ray
        self._class = ray.remote(actor_class())
        self._codes: Dict[str, Any] = {}  # by the folder on this node
        self.package = ray.put(tar(os.path.dirname(FOLDER), os.path.dirname(jobs_folder())))

    def start(
        self,
        replica: ReplicaHandle,
        resources: Mapping[str, float],
        strategy: Any,
        program: str = "group.replica",
    ) -> None:
        """Start the actor of a replica; its process runs the program, a module of this package."""
        code = []
        if replica.role.task.has_code:
            folder = code_of(replica.role)
            if folder not in self._codes:
                self._codes[folder] = self.ray.put(tar(folder))
            code = [key_of(folder), self._codes[folder]]
        others = dict(resources)  # but those for which Ray has options of their own
        replica.actor = self._class.options(
            num_cpus=others.pop("CPU", 0),
            num_gpus=others.pop("GPU", 0),
            memory=int(others.pop("memory", 0)) or None,
            resources=others,
            max_concurrency=8,  # pulls that wait, pulls behind broken lines, orders
            max_task_retries=-1,  # while its node is away; what is sent is numbered
            runtime_env=replica.role.runtime_env or None,
            scheduling_strategy=strategy,
        ).remote((replica.tag, replica.run_dir, program), self.package, *code)

    def prepare_order(self, replica: ReplicaHandle) -> Dict[str, Any]:
        """The order that makes the run directory of a role on its node, and reserves its ports."""
        role = replica.role
        given = {key: os.environ[key] for key in _PASSED_ON if key in os.environ}
        # A role that is a Ray program gets its own code and this package, but of what was sent with
        # the job neither the code of other roles nor the archive of secrets.
        with suppress(KeyError, ValueError, TypeError):  # a Ray that says it otherwise
            config = json.loads(self._config)
            runtime_env = config["runtime_env"]
            runtime_env["py_modules"] = runtime_env["py_modules"][:1]
            if role.name in _archives():
                runtime_env["working_dir"] = f"gcs://{_archives()[role.name]}"
            given[JOB_CONFIG] = json.dumps(config)
        return {
            "do": "prepare",
            "role": to_json(role),
            "index": replica.replica_id[1],
            "job": self._job,
            "run_dir": replica.run_dir,
            "code": key_of(code_of(role)) if role.task.has_code else "",
            "address": replica.node.address,
            "tag": replica.tag,
            "given": given,
            "secrets": {secret: self._secrets[secret] for secret in role.task.secrets},
        }


def code_of(role: RoleSpec) -> str:
    """The folder in which Ray has unpacked the code of a role."""
    archive = _archives().get(role.name)
    if archive is None:
        return os.getcwd()
    for folder in os.environ["PYTHONPATH"].split(os.pathsep):
        if os.path.basename(folder.rstrip("/")) == archive.removesuffix(".zip"):
            return folder
    raise FileNotFoundError(f"the code {archive} of the role {role.name} is not on this node")


def key_of(folder: str) -> str:
    """Name of a code folder on the replicas' nodes."""
    return f"code-{zlib.crc32(folder.encode()):08x}"


def _archives() -> Mapping[str, str]:
    archives: Mapping[str, str] = json.loads(os.environ.get(CODE, "{}"))
    return archives


def tar(*folders: str) -> bytes:
    """The files of all folders, but for compiled ones: other jobs may be writing those."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for folder in folders:
            archive.add(folder, ".", filter=lambda one: None if "__pycache__" in one.name else one)
    return buffer.getvalue()


def actor_class() -> Any:
    """The class of the actors; defined here, so that it is sent by value and needs no archive.

    It may use nothing of this package, only the standard library, whose modules are sent as names.
    """

    class ReplicaActor:
        def __init__(
            self, place: Tuple[str, str, str], package: bytes, name: str = "", code: bytes = b""
        ) -> None:
            import ray

            self._node = ray.get_runtime_context().get_node_id()
            folder = tempfile.mkdtemp(prefix="nemo_run_ray_")
            try:
                for kind, data in (("package", package), (name, code)):
                    if data:
                        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
                            archive.extraction_filter = lambda member, path: member  # it is trusted
                            archive.extractall(os.path.join(folder, kind))
                sys.path.append(os.path.join(folder, "package"))
                relay = importlib.import_module("nemo_run_ray_remote.hosts.relay")
                self._relay = relay.Relay(folder, *place)
            except BaseException:  # a full disk
                shutil.rmtree(folder, ignore_errors=True)
                raise

        def order(self, number: int, order: Dict[str, Any]) -> None:
            self._relay.order(number, order)

        def pull(self, seen: int, patience_s: float) -> Any:
            return self._node, *self._relay.pull(seen, patience_s)

        def close(self) -> Any:
            return self._relay.close()

    return ReplicaActor


def module_function() -> Any:
    """A function that runs a module of this package on a node, for a task; sent by value, too."""

    def run_module(
        package: bytes, program: str, module: str, request: str, env: Dict[str, str]
    ) -> str:
        with tempfile.TemporaryDirectory(prefix="nemo_run_ray_") as folder:
            with tarfile.open(fileobj=io.BytesIO(package)) as archive:
                archive.extraction_filter = lambda member, path: member  # it is trusted
                archive.extractall(folder)
            return subprocess.run(
                [sys.executable, "-I", "-c", program, folder, "", "", module],
                input=request,
                stdout=subprocess.PIPE,
                env={**os.environ, **env},
                text=True,
                check=True,
            ).stdout

    return run_module
