"""The actors that a driver keeps on nodes: how they start, and what they are sent.

``ray`` is imported late. The class is sent by value and the archives go through Ray's object store,
so that the actors run in workers that Ray keeps ready: a worker for the job's runtime environment
is started anew, 1.1 s more (measured with three).
"""

from __future__ import annotations

import importlib
import io
import json
import logging
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Dict, Iterator, List, Mapping, Sequence, Tuple

from .. import FOLDER
from ..fit import Amounts, Node
from ..node.output import say, write
from ..node.rundir import JOB_CONFIG, jobs_folder
from ..node.supervise import Runner
from ..spec import CODE, Json, RoleSpec, to_json
from ..status import Reason, cause_of

#: One replica of one role.
ReplicaId = Tuple[str, int]
#: Seconds to wait for an answer.
_WAIT_S = 0.2
#: Seconds for which an actor keeps the question for reports open.
_PULL_S = 2.0
#: Seconds without an answer until an actor is asked for its reports again. Where an answer was lost
#: with its connection, Ray's client misses it 300 s later, with its own keepalive, or when it has
#: something to send: then all calls on that connection are known to be lost at once.
_UNANSWERED_S = 15.0
#: Seconds for the replicas' processes to remove their folders.
_CLOSE_S = 10.0
#: Reports of a replica, of which each has its kind as ``at``. Those of the kind ``died`` are made
#: here: with ``words``, and as ``cause`` that of an actor which never came up.
Reports = List[Json]
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
        end_by: when it is given up.
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
    end_by: float = math.inf


class Actors:
    """Connects to Ray, starts actors, gives them orders and awaits their reports.

    Ray makes a call again while its actor cannot be reached; orders are numbered, and reports
    counted, so that nothing is lost or done twice. What all actors need goes to Ray's object store
    once.

    A report waits ``gather_s`` for others: many small ones cost more to send than to make.

    Attributes:
        ray: the module, connected.
        run_module: a task that runs a module of it.
    """

    def __init__(self, job: str, secrets: Mapping[str, str], gather_s: float):
        self._job, self._secrets, self._gather_s = job, secrets, gather_s
        # The actors need nothing of the job's runtime environment.
        self._config: Json = json.loads(os.environ.get(JOB_CONFIG, "{}"))
        self._runtime_env = self._config.pop("runtime_env", {})
        os.environ[JOB_CONFIG] = json.dumps(self._config)
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
        self._class, self.run_module = map(ray.remote, sent_by_value())
        self._codes: Json = {}  # by the folder on this node
        self._awaited: Dict[Any, Tuple[float, ReplicaHandle]] = {}  # since when

    def pack(self) -> None:
        """Put this package and the job's files into Ray's object store, for the actors."""
        self.package = self.ray.put(tar(os.path.dirname(FOLDER), os.path.dirname(jobs_folder())))

    def start(
        self,
        replicas: Sequence[ReplicaHandle],
        resources: Amounts,
        strategy: Any,
        program: str = "group.replica",
    ) -> None:
        """Start an actor for replicas of one node that are alike, and ask for their reports.

        The process of each replica runs the program, a module of this package.
        """
        code: Any = b""
        folder = code_of(replicas[0].role)
        if folder:
            code = self._codes.get(folder) or self.ray.put(tar(folder))
            self._codes[folder] = code
        others = dict(resources)  # but those for which Ray has options of their own
        actor = self._class.options(
            num_cpus=others.pop("CPU", 0),
            num_gpus=others.pop("GPU", 0),
            memory=int(others.pop("memory", 0)) or None,
            resources=others,
            # Pulls that wait, pulls behind broken lines, orders.
            max_concurrency=6 + 2 * len(replicas),
            max_task_retries=-1,  # while its node is away; what is sent is numbered
            runtime_env=replicas[0].role.runtime_env or None,
            scheduling_strategy=strategy,
        ).remote([(one.tag, one.run_dir, program) for one in replicas], self.package, code)
        for replica in replicas:
            replica.actor = actor
            self.pull(replica)

    def prepare_order(self, replica: ReplicaHandle) -> Json:
        """The order that makes the run directory of a role on its node, and reserves its ports."""
        role = replica.role
        given = {key: os.environ[key] for key in _PASSED_ON if key in os.environ}
        # A role that is a Ray program gets its own code and this package, but of what was sent with
        # the job neither the code of other roles nor the archive of secrets.
        runtime_env = {**self._runtime_env}
        runtime_env["py_modules"] = runtime_env.get("py_modules", [])[:1]
        archive = _archive_of(role)
        if archive:
            runtime_env["working_dir"] = f"gcs://{archive}"
        given[JOB_CONFIG] = json.dumps({**self._config, "runtime_env": runtime_env})
        return {
            "do": "prepare",
            "role": to_json(role),
            "index": replica.replica_id[1],
            "job": self._job,
            "run_dir": replica.run_dir,
            "address": replica.node.address,
            "tag": replica.tag,
            "given": given,
            "secrets": {secret: self._secrets[secret] for secret in role.task.secrets},
        }

    def order(self, replica: ReplicaHandle, order: Json) -> None:
        """Give a replica an order; nothing is answered to it."""
        replica.actor.order.remote(replica.tag, replica.orders, order)
        replica.orders += 1

    def pull(self, replica: ReplicaHandle) -> None:
        """Ask an actor for its replica's reports that are not here yet."""
        reference = replica.actor.pull.remote(replica.tag, replica.seen, _PULL_S, self._gather_s)
        self._awaited[reference] = monotonic(), replica

    def answers(self) -> Iterator[Tuple[ReplicaHandle, Reports]]:
        """Wait a moment for the next answer, and yield all that have arrived.

        An actor is asked again when its reports have been taken.
        """
        now = monotonic()
        for reference, (asked_at, replica) in list(self._awaited.items()):
            if now >= asked_at + _UNANSWERED_S and replica.answers:
                del self._awaited[reference]
                self.pull(replica)
        references = list(self._awaited)
        if not references:
            time.sleep(_WAIT_S)
            return
        ready, _ = self.ray.wait(references, num_returns=1, timeout=_WAIT_S)
        if ready:
            ready, _ = self.ray.wait(references, num_returns=len(references), timeout=0)
        for reference in ready:
            replica = self._awaited.pop(reference)[1]
            yield replica, self._reports(replica, reference)
            if not replica.dead:
                self.pull(replica)

    def close(self, replicas: Sequence[ReplicaHandle]) -> bool:
        """Let living actors end their replicas; true if all have confirmed that nothing runs."""
        ends = [replica.actor.close.remote(replica.tag) for replica in replicas]
        try:
            return not ends or all(self.ray.get(ends, timeout=_CLOSE_S))
        except (self.ray.exceptions.RayError, TimeoutError):
            return False

    def _reports(self, replica: ReplicaHandle, reference: Any) -> Reports:
        """The reports of an answer that are new."""
        exceptions, cause = self.ray.exceptions, None
        try:
            node_id, first, reports = self.ray.get(reference)
        except exceptions.RayError as error:
            replica.dead = True
            lines = [line.strip()[:300] for line in str(error).splitlines() if line.strip()]
            words = f"Ray's worker there died: {lines[0] if lines else ''}"
            if isinstance(error, exceptions.RuntimeEnvSetupError):
                write(f"{error}\n")  # the whole error, for readers of the log
                words = f"the runtime environment could not be built: {cause_of(str(error))}"
                cause = Reason.RUNTIME_ENV
            elif getattr(error, "actor_init_failed", False):  # a traceback's last line says why
                words = f"Ray's worker there failed at its start: {lines[-1]}"
                cause = Reason.NOT_STARTED
            return [{"at": "died", "words": words, "cause": cause}]
        replica.answers = True
        new = [json.loads(report) for report in reports[replica.seen - first :]]
        replica.seen += len(new)
        if node_id != replica.node.node_id:
            words = f"Ray has moved the replica to the node {node_id}"
            new.append({"at": "died", "words": words, "cause": None})
        return new


def is_cancelled(runner: Runner) -> bool:
    """Whether a driver is to end what it runs."""
    order = runner.order()
    if order == b"":
        say("this program's first process was killed; Ray ends what it runs")
        os._exit(1)  # with the driver end its actors, and with them all processes
    return order is not None


def code_of(role: RoleSpec) -> str:
    """The folder in which Ray has unpacked the code of a role; empty if it has none."""
    if not role.task.has_code:
        return ""
    archive = _archive_of(role)
    if not archive:
        return os.getcwd()
    for folder in os.environ["PYTHONPATH"].split(os.pathsep):
        if os.path.basename(folder.rstrip("/")) == archive.removesuffix(".zip"):
            return folder
    raise FileNotFoundError(f"the code {archive} of the role {role.name} is not on this node")


def _archive_of(role: RoleSpec) -> str:
    """The archive with the code of a role; empty if all roles have the same."""
    return str(json.loads(os.environ.get(CODE, "{}")).get(role.name, ""))


def tar(*folders: str) -> bytes:
    """The files of all folders, but for compiled ones: other jobs may be writing those."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for folder in folders:
            archive.add(folder, ".", filter=lambda one: None if "__pycache__" in one.name else one)
    return buffer.getvalue()


def sent_by_value() -> Tuple[Any, Any]:
    """The class of the actors, and a function that runs a module of this package on a node.

    They are defined here, so that they are sent by value and need no archive. They may use nothing
    of this package, only the standard library, whose modules are sent as names.
    """

    def unpack(data: bytes, folder: str) -> None:
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            archive.extraction_filter = lambda member, path: member  # it is trusted
            archive.extractall(folder)

    class ReplicaActor:
        def __init__(self, places: List[Tuple[str, str, str]], package: bytes, code: bytes):
            import ray

            self._node = ray.get_runtime_context().get_node_id()
            self._relays: Dict[str, Any] = {}  # by tag
            for place in places:
                folder = tempfile.mkdtemp(prefix="nemo_run_ray_")
                try:
                    # The first replica removes it while others may run: they import nothing late.
                    if not self._relays:
                        unpack(package, f"{folder}/package")
                        sys.path.append(f"{folder}/package")
                    if code:
                        unpack(code, f"{folder}/code")
                    relay = importlib.import_module("nemo_run_ray_remote.hosts.relay")
                    self._relays[place[0]] = relay.Relay(folder, *place)
                except BaseException:  # a full disk
                    shutil.rmtree(folder, ignore_errors=True)
                    raise

        def order(self, tag: str, number: int, order: Json) -> None:
            self._relays[tag].order(number, order)

        def pull(self, tag: str, *args: Any) -> Any:
            return self._node, *self._relays[tag].pull(*args)

        def close(self, tag: str) -> Any:
            return self._relays[tag].close()

    def run_module(
        package: bytes, program: str, module: str, request: str, env: Dict[str, str]
    ) -> str:
        with tempfile.TemporaryDirectory(prefix="nemo_run_ray_") as folder:
            unpack(package, folder)
            return subprocess.run(
                [sys.executable, "-I", "-c", program, folder, "", "", module],
                input=request,
                stdout=subprocess.PIPE,
                env={**os.environ, **env},
                text=True,
                check=True,
            ).stdout

    return ReplicaActor, run_module
