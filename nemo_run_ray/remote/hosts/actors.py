"""The actors that a driver keeps on nodes: who shares one, how they start, what is sent to them.

``ray`` is passed in: the driver imports it. The class is sent by value and the archives go
through Ray's object store, so that the actors run in workers that Ray keeps ready: a worker for the
job's runtime environment is started anew, 1.1 s more (measured with three).
"""

from __future__ import annotations

import importlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zlib
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Dict, Iterable, Iterator, List, Mapping, Optional, Tuple

from .. import FOLDER
from ..fit import Node
from ..node.rundir import JOB_CONFIG, jobs_folder
from ..spec import CODE, RoleSpec, to_json

#: One replica of one role.
ReplicaId = Tuple[str, int]
#: Variables of the driver that a role needs: which attempt it is, and what a Ray program needs.
_PASSED_ON = ("NEMO_RUN_ATTEMPT", "RAY_ADDRESS", "RAY_OVERRIDE_JOB_RUNTIME_ENV")
#: Replicas that ask for these alone share an actor: Ray hands neither out piece by piece.
_SHARED = {"CPU", "memory"}
#: Resources for which Ray's actors have options of their own.
_OWN_OPTIONS = ("CPU", "GPU", "memory")


def name(replica_id: ReplicaId) -> str:
    """``role/replica``, as it stands before the lines of its output."""
    return f"{replica_id[0]}/{replica_id[1]}"


@dataclass(eq=False)
class ReplicaHandle:
    """One replica, as the driver knows it."""

    replica_id: ReplicaId
    role: RoleSpec
    node: Node
    bundle: int
    tag: str
    run_dir: str
    actor: Optional[Actor] = None
    seen: int = 0  # reports
    orders: int = 0
    ports: Dict[str, int] = field(default_factory=dict)
    end_by: Optional[float] = None
    starts: int = 0

    @property
    def prefix(self) -> str:
        return f"{name(self.replica_id)}| "

    @property
    def can_share_actor(self) -> bool:
        """Whether one actor can serve it together with others of its node."""
        return not self.role.runtime_env and set(self.role.resources) <= _SHARED


@dataclass(eq=False)
class Actor:
    """One actor, its replicas, and what is known of it.

    Attributes:
        handle: Ray's.
        replicas: those that it serves, all on one node.
        answers: it has answered once.
        dead: its worker is gone.
    """

    handle: Any
    replicas: List[ReplicaHandle]
    answers: bool = False
    dead: bool = False


def actor_of(replica: ReplicaHandle) -> Actor:
    """The actor that serves a replica."""
    if replica.actor is None:
        raise ValueError(f"{name(replica.replica_id)} has no actor yet")
    return replica.actor


class Actors:
    """Starts actors. What they all need goes to Ray's object store once.

    Args:
        ray: the module, connected.

    Attributes:
        package: reference of an archive of this package and the job's files.
    """

    def __init__(self, ray: Any) -> None:
        self._class = ray.remote(actor_class())
        self._put = ray.put
        self._codes: Dict[str, Any] = {}  # by the folder on this node
        self.package = ray.put(tar(os.path.dirname(FOLDER), os.path.dirname(jobs_folder())))

    def start(
        self,
        replicas: List[ReplicaHandle],
        resources: Mapping[str, float],
        strategy: Any,
        program: str = "group.replica",
    ) -> Actor:
        """Start the actor that serves some replicas of one node.

        Args:
            replicas: these; they have one runtime environment.
            resources: to reserve for them, by Ray's names.
            strategy: where Ray places it.
            program: module of this package that the replicas' processes run.
        """
        roles = [replica.role for replica in replicas]
        folders = dict.fromkeys(code_of(role) for role in roles if role.task.has_code)
        for folder in folders:
            if folder not in self._codes:
                self._codes[folder] = self._put(tar(folder))
        others = {key: amount for key, amount in resources.items() if key not in _OWN_OPTIONS}
        handle = self._class.options(
            num_cpus=resources.get("CPU", 0),
            num_gpus=resources.get("GPU", 0),
            memory=int(resources.get("memory", 0)) or None,
            resources=others,
            max_concurrency=8,  # pulls that wait, pulls behind broken lines, orders
            runtime_env=roles[0].runtime_env or None,
            scheduling_strategy=strategy,
        ).remote(
            [(name(one.replica_id), one.tag, one.run_dir, program) for one in replicas],
            [key_of(folder) for folder in folders],
            self.package,
            *(self._codes[folder] for folder in folders),
        )
        actor = Actor(handle, replicas)
        for replica in replicas:
            replica.actor = actor
        return actor


def start_actors(ray: Any, placement_group: Any, replicas: Iterable[ReplicaHandle]) -> List[Actor]:
    """Start the actors that serve the replicas of a group, each in a bundle of theirs."""
    actors = Actors(ray)
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
    return [
        actors.start(
            served,
            {} if served[0].can_share_actor else served[0].role.resources,
            strategy(placement_group, served[0].bundle),
        )
        for served in _by_actor(replicas)
    ]


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


def passed_on(role: RoleSpec, config_of_job: str) -> Dict[str, str]:
    """The variables by which a role that is a Ray program finds the cluster and its own code.

    A role gets its own code and this package, but of what was sent with the job neither the code
    of other roles nor the archive of secrets.

    Args:
        role: the role.
        config_of_job: what ``forget_runtime_env`` has returned.
    """
    found = {variable: os.environ[variable] for variable in _PASSED_ON if variable in os.environ}
    with suppress(KeyError, ValueError, TypeError):  # a Ray that says it otherwise
        config = json.loads(config_of_job)
        runtime_env = config["runtime_env"]
        runtime_env["py_modules"] = runtime_env["py_modules"][:1]
        if role.name in _archives():
            runtime_env["working_dir"] = f"gcs://{_archives()[role.name]}"
        found[JOB_CONFIG] = json.dumps(config)
    return found


def prepare_order(
    replica: ReplicaHandle, job: str, secrets: Mapping[str, str], config_of_job: str
) -> Dict[str, Any]:
    """The order that makes the run directory of a role on its node, and reserves its ports.

    Args:
        replica: where.
        job: name of the job.
        secrets: the values of the job's secrets by name.
        config_of_job: what ``forget_runtime_env`` has returned.
    """
    role = replica.role
    return {
        "do": "prepare",
        "role": to_json(role),
        "index": replica.replica_id[1],
        "job": job,
        "run_dir": replica.run_dir,
        "code": key_of(code_of(role)) if role.task.has_code else "",
        "address": replica.node.address,
        "tag": replica.tag,
        "given": passed_on(role, config_of_job),
        "secrets": {secret: secrets[secret] for secret in role.task.secrets},
    }


def forget_runtime_env() -> str:
    """Keep the job's runtime environment from this driver's actors, which need nothing of it.

    Returns:
        The job's configuration as Ray gave it to the driver.
    """
    given = os.environ.get(JOB_CONFIG, "")
    with suppress(KeyError, ValueError, AttributeError):  # slower, but right
        config = json.loads(given)
        config.pop("runtime_env")
        os.environ[JOB_CONFIG] = json.dumps(config)
    return given


def _archives() -> Mapping[str, str]:
    archives: Mapping[str, str] = json.loads(os.environ.get(CODE, "{}"))
    return archives


def _by_actor(replicas: Iterable[ReplicaHandle]) -> Iterator[List[ReplicaHandle]]:
    """The replicas that share an actor."""
    sharing: Dict[str, List[ReplicaHandle]] = {}
    for replica in replicas:
        if replica.can_share_actor:
            sharing.setdefault(replica.node.node_id, []).append(replica)
        else:
            yield [replica]
    yield from sharing.values()


def tar(*folders: str) -> bytes:
    """The files of all folders, but for compiled ones: other jobs may be writing those."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for folder in folders:
            archive.add(folder, ".", filter=_unless_compiled)
    return buffer.getvalue()


def _unless_compiled(member: tarfile.TarInfo) -> Optional[tarfile.TarInfo]:
    return None if os.path.basename(member.name) == "__pycache__" else member


def actor_class() -> Any:
    """The class of the actors; defined here, so that it is sent by value and needs no archive.

    It may use nothing of this package, only the standard library, whose modules are sent as names.
    """

    class Replicas:
        def __init__(
            self,
            places: List[Tuple[str, ...]],
            names: List[str],
            package: bytes,
            *codes: bytes,
        ) -> None:
            import ray

            self._node = ray.get_runtime_context().get_node_id()
            folder = tempfile.mkdtemp(prefix="nemo_run_ray_")
            try:
                for kind, data in [("package", package), *zip(names, codes)]:
                    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
                        archive.extraction_filter = lambda member, path: member  # it is trusted
                        archive.extractall(os.path.join(folder, kind))
                sys.path.append(os.path.join(folder, "package"))
                relay = importlib.import_module("nemo_run_ray_remote.hosts.relay")
                self._relays = relay.Relays(folder, places)
            except BaseException:  # a full disk
                shutil.rmtree(folder, ignore_errors=True)
                raise

        def order(self, key: str, number: int, order: Dict[str, Any]) -> None:
            self._relays.order(key, number, order)

        def pull(self, seen: Dict[str, int], patience_s: float, gather_s: float) -> Any:
            return self._node, self._relays.pull(seen, patience_s, gather_s)

        def close(self) -> Any:
            return self._relays.close()

    return Replicas


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
