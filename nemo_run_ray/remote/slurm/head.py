"""The head: starts Ray, waits for the workers, runs the driver, and ends the run for all."""

from __future__ import annotations

import os
import secrets
import time
from contextlib import suppress
from typing import Any, Dict, List, Optional, Set, Union

from ..node.supervise import describe_exit
from ..variables import DASHBOARD
from .allocation import Allocation
from .commands import Command
from .decide import ClusterReady, ClusterView, Wait, decide
from .greeting import Greeting
from .nemo_files import ENDED, NemoFiles
from .network import Ports, head_addresses, listening
from .node import TURN_S, NodeProgram
from .ray_nodes import RayNodes
from .ray_start import for_drivers, head_words
from .renewal import Renewal
from .run_folder import CLUSTER_FAILED, HeadAddress, HeadAddresses, NodeReport, RunEnd

#: Seconds between two lines that say what is waited for.
_SAY_S = 30.0
#: Seconds between two looks at what all nodes say, of a cluster that was ready.
_LOOK_READY_S = 1.0


class Head(NodeProgram):
    """The node with rank 0."""

    def __init__(self, *args: Any) -> None:
        settings, folder = args[0], args[1]
        self._ports: Dict[str, int] = {}
        self._address = ""
        self._renewal = Renewal(settings, folder.file("token"))
        self._allocation = Allocation(settings, folder.file("token"), self._renewal)
        super().__init__(*args)
        self._began = time.monotonic()
        self._reports: Dict[int, NodeReport] = {}
        self._looked_at = float("-inf")
        self._greeting: Optional[Greeting] = None
        self._head: Optional[HeadAddress] = None
        self._nodes = RayNodes(self.folder.file("token"))
        self._was_ready = self._is_told = False
        self._said_at = float("-inf")
        self._driver: Optional[Command] = None
        self._files = NemoFiles(self.settings)

    def greet(self) -> None:
        self._renewal.begin()
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with open(os.open(self.folder.file("token"), flags, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        addresses = head_addresses(self.settings.host, self.settings.interface)
        free = Ports({}, False, self.ports.salt)
        self._greeting = Greeting(addresses, self.settings.nodes - 1, free)
        self.folder.publish_addresses(HeadAddresses(tuple(addresses), self._greeting.port))
        self.publish()

    def step(self) -> Optional[RunEnd]:
        self._look()
        self._start()
        why = self.watch_ray()
        if why is not None:
            return self.failed(why)
        self._await_gcs()
        if self._head is not None:
            self._nodes.ask(self._head, self._reports, self._was_ready)
            self._tell_workers(self._head)
            self._files.tell_units(self._units())
        told = self._told_to_end()
        if told is not None:
            return told
        code = self._driver_code()
        if code is not None:
            return RunEnd(code, f"the driver: {describe_exit(code)}")
        return self._unneeded() or self._act(decide(self.settings, self._view()))

    def words(self) -> List[str]:
        self._ports = self.ports.choose()
        self._head, self._is_told = None, False
        self._nodes.alive = None  # that of the last try
        has_token = self.ray_env().get("RAY_AUTH_MODE") == "token"
        return head_words(self.settings, self._address, self._ports, has_token)

    def ray_env(self) -> Dict[str, str]:
        env = {**super().ray_env(), **self._renewal.environment()}
        if self._ports:
            env[DASHBOARD] = f"http://{self._address}:{self._ports['DASHBOARD_PORT']}"
        return env

    def failed(self, why: str) -> RunEnd:
        return RunEnd(CLUSTER_FAILED, f"node {self.settings.host} (the head): {why}")

    def watched(self) -> Set[int]:
        return {rank for rank, one in self._reports.items() if rank and not one.left}

    def leave(self, end: RunEnd) -> int:
        if self._was_ready and self._head is not None and self.settings.life:
            self._allocation.keep_last_table(self._head, end)
        if self._may_try_again(end):
            end = end._replace(renews=True)
        with suppress(OSError):  # on a full disk the workers miss the head's beat
            end = self.folder.publish_end(end)
        self.say(f"The run is over: {end.why}")
        self._files.take_back()
        super().leave(end)
        while time.monotonic() < self._leaves_at and not self._all_left():
            time.sleep(TURN_S)
        with suppress(OSError):
            os.unlink(self.folder.file("token"))
        self._files.tell_ended()
        return end.code

    def _may_try_again(self, end: RunEnd) -> bool:
        """Whether another allocation shall do what this one could not; nobody has ended it."""
        failed = end.code == CLUSTER_FAILED and not self._was_ready
        return failed and self._told_to_end() is None and self._renewal.may_try_again()

    def _units(self) -> int:
        """The ``worker_units`` of the nodes that Ray counts as alive."""
        alive = self._nodes.alive or ()
        addresses = {0: self._address, **{rank: one.address for rank, one in self._reports.items()}}
        return self.settings.worker_units * sum(one in alive for one in addresses.values())

    def _told_to_end(self) -> Optional[RunEnd]:
        """The end that the job's script asks for, or a user who has written NeMo-Run's file."""
        why = self.folder.text("script_failed")
        if why is not None:
            return RunEnd(CLUSTER_FAILED, f"the job's script: {why.strip()}")
        if self._files.is_ended_by_user():
            return RunEnd(CLUSTER_FAILED, f"a user has written {ENDED} into {self.settings.logs}")
        stopped = self._allocation.why_stopped()
        return RunEnd(143, stopped) if stopped else None

    def _all_left(self) -> bool:
        return all(report.left for report in self.folder.reports().values())

    def _look(self) -> None:
        """Read what the nodes say: they are many, and it is seldom new once all are there."""
        pause = _LOOK_READY_S if self._was_ready else 0.0
        if time.monotonic() - self._looked_at >= pause:
            self._looked_at = time.monotonic()
            self._reports = self.folder.reports()

    def _start(self) -> None:
        """Start Ray once it is known by which address the others reach it."""
        if self.ray is None and self._greeting is not None:
            address = self._greeting.choose(self._reports)
            if address is not None:
                self._address = address
                self.publish(address=address)
                self.start_ray()

    def _await_gcs(self) -> None:
        if self._head is not None or self.ray is None:
            return
        if listening(self._address, self._ports["PORT"]):
            ports = self._ports
            found = (self._address, ports["PORT"], ports["DASHBOARD_PORT"], self._starts)
            self._head = HeadAddress(*found)
            self._files.tell_started()

    def _tell_workers(self, head: HeadAddress) -> None:
        """Let the workers join: until this node is registered, `ray start` there gives up soon."""
        if not self._is_told and self._address in (self._nodes.alive or ()):
            self._is_told = True
            self.folder.publish_head(head)

    def _view(self) -> ClusterView:
        return ClusterView(
            elapsed_s=time.monotonic() - self._began,
            reports=self._reports,
            dead=frozenset(self.dead),
            address=self._address,
            gcs_listens=self._head is not None,
            alive=self._nodes.alive,
            was_ready=self._was_ready,
            missing_for_s=self._nodes.missing_for_s(),
        )

    def _act(self, decision: Union[Wait, ClusterReady, RunEnd]) -> Optional[RunEnd]:
        if isinstance(decision, RunEnd):
            return decision
        if isinstance(decision, Wait):
            if time.monotonic() - self._said_at >= _SAY_S:
                self._said_at = time.monotonic()
                self.say(decision.what)
        elif not self._was_ready and self._head is not None:
            self._was_ready = True
            self._tell_ready(self._head, decision.workers)
        return None

    def _tell_ready(self, head: HeadAddress, workers: int) -> None:
        self.say(f"Ray is ready: {workers + 1} nodes, GCS {head.gcs}, dashboard {head.dashboard}")
        self._files.tell_ready(head)
        names = {"RAY_TEMP_DIR": self.settings.temp_dir}
        names.update((name, str(port)) for name, port in self._ports.items())
        self.folder.publish_ready(head, for_drivers(self.ray_env(), head), names)

    def _unneeded(self) -> Optional[RunEnd]:
        """How the run ends because nobody needs this cluster; ``None`` while a client may."""
        if not self._was_ready or self._head is None:
            return None
        told = self._allocation.session
        end = self._allocation.end(self._head)
        if self._allocation.session != told:
            with suppress(OSError):  # it is for people who look later
                self.folder.publish_session(self._allocation.session)
        return end

    def _driver_code(self) -> Optional[int]:
        """The driver's exit code once it has ended; starts it when the job's script names it."""
        if self._driver is not None:
            return self._driver.exit_code
        if not self._was_ready or self._head is None:
            return None
        elsewhere = self.folder.text("driver_exit_code")
        if elsewhere is not None:
            return int(elsewhere)
        command = self.folder.text("command")
        if command is not None:
            env = {**self.ray_env(), **for_drivers(self.ray_env(), self._head)}
            if not self.settings.driver_gpus:
                env["CUDA_VISIBLE_DEVICES"] = ""  # Ray gives GPUs to tasks; NeMo-Run: `--gpus=0`
            cwd = self.folder.text("workdir") or None
            words = ["bash", "-c", command]
            self._driver = self.commands.start("driver", words, self.settings.log("job"), env, cwd)
        return None
