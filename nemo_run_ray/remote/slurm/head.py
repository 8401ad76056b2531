"""The head: starts Ray, waits for the workers, runs the driver, and ends the run for all."""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from contextlib import suppress
from typing import Any, Dict, FrozenSet, List, Optional, Set, Union

from ..dashboard import DASHBOARD, DashboardClient, Unanswered
from ..files import write_file
from ..node.supervise import describe_exit
from .carry import Allocation
from .decide import ClusterReady, ClusterView, Wait, decide
from .folder import (
    ADDRESSES,
    CLUSTER_FAILED,
    HEAD,
    HeadAddress,
    HeadAddresses,
    NodeReport,
    RunEnd,
)
from .network import AddressDiscovery, Ports, head_addresses, listening
from .node import TURN_S, NodeProgram, driver_environment, node_options
from .processes import Command
from .settings import HEAD_PORTS

#: NeMo-Run's file that ends the nodes.
ENDED = "ENDED"
#: Seconds between two lines that say what the head waits for.
_SAY_S = 30.0
#: Seconds between two looks at the reports of all nodes, after the cluster was ready.
_LOOK_READY_S = 1.0
#: Seconds between two requests for Ray's nodes, before the cluster is ready and after.
_ASK_S, _ASK_READY_S = 0.5, 5.0
#: Limit of a request, during which the head shows no life.
_ANSWER_S = 5.0


class Head(NodeProgram):
    """The node with rank 0."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._began = time.monotonic()
        self._ports: Dict[str, int] = {}
        self._address = ""
        self._token = secrets.token_hex(32)
        self._allocation = Allocation(self.settings)
        self._reports: Dict[int, NodeReport] = {}
        self._looked_at = self._said_at = float("-inf")
        self._discovery: Optional[AddressDiscovery] = None
        self._head: Optional[HeadAddress] = None
        self._dashboard: Optional[DashboardClient] = None
        self._asked_at = float("-inf")
        self._missing_since: Dict[int, float] = {}
        #: Addresses of Ray's living nodes; ``None`` until the dashboard has answered.
        self.alive: Optional[FrozenSet[str]] = None
        self._was_ready = self._has_published_head = False
        self._driver: Optional[Command] = None
        self._written_units: Optional[int] = None
        self._info = os.path.join(self.settings.cluster, "ray_cluster_info.json")

    def announce(self) -> None:
        self._allocation.begin()
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with open(os.open(self.folder.file("token"), flags, 0o600), "w") as file:
            file.write(self._token)
        addresses = head_addresses(self.settings.host, self.settings.interface)
        ports = Ports({}, False, self.ports.salt)
        self._discovery = AddressDiscovery(addresses, self.settings.nodes - 1, ports)
        self.folder.publish(ADDRESSES, HeadAddresses(tuple(addresses), self._discovery.port))
        self.publish()

    def step(self) -> Optional[RunEnd]:
        self._read_reports()
        self._start_when_reached()
        why = self.watch_ray()
        if why is not None:
            return self.failed(why)
        self._await_gcs()
        if self._dashboard is not None:
            self._ask_for_nodes(self._dashboard)
            self._let_workers_join()
            self._write_units()
        end = self._requested_end()
        if end is not None:
            return end
        code = self._driver_code()
        if code is not None:
            return RunEnd(code, f"the driver: {describe_exit(code)}")
        return self._allocation_end() or self._act(decide(self.settings, self._view()))

    def ray_start_argv(self) -> List[str]:
        """Without a token the dashboard is for the node itself alone."""
        self._ports = self.ports.choose()
        self._head, self._dashboard, self._has_published_head = None, None, False
        self.alive = None  # that of the last try
        # On all interfaces: NeMo-Run's port_forward ends at the head's localhost.
        has_token = self.ray_env()["RAY_AUTH_MODE"] == "token"
        host = "0.0.0.0" if has_token else "127.0.0.1"
        argv = ["ray", "start", "--head", f"--node-ip-address={self._address}"]
        argv += [f"--dashboard-host={host}", "--include-dashboard=true"]
        argv += [f"--temp-dir={self.settings.temp_dir}"]
        argv += [f"--{option}={self._ports[name]}" for name, option in HEAD_PORTS.items()]
        return argv + node_options(self.settings, self._ports)

    def ray_env(self) -> Dict[str, str]:
        env = {**super().ray_env(), **self._allocation.ray_env()}
        if self._ports:
            env[DASHBOARD] = f"http://{self._address}:{self._ports['DASHBOARD_PORT']}"
        return env

    def failed(self, why: str) -> RunEnd:
        return RunEnd(CLUSTER_FAILED, f"node {self.settings.host} (the head): {why}")

    def watched(self) -> Set[int]:
        return {rank for rank, report in self._reports.items() if rank and not report.left}

    def leave(self, end: RunEnd) -> int:
        if self._was_ready and self._dashboard is not None:
            self._allocation.keep_last_table(self._dashboard, end)
        failed = end.code == CLUSTER_FAILED and not self._was_ready
        if failed and self._requested_end() is None and self._allocation.may_try_again():
            end = end._replace(renews=True)
        with suppress(OSError):  # on a full disk the workers miss the head's heartbeat
            end = self.folder.publish_end(end)
        self.say(f"The run is over: {end.why}")
        with suppress(OSError, ValueError, KeyError, TypeError):
            with open(self._info, encoding="utf-8") as file:
                is_own = json.load(file)["job"] == self.settings.job
            if is_own:  # and not another job's by now
                os.unlink(self._info)
        super().leave(end)
        while time.monotonic() < self.leaves_at and not self._all_left():
            time.sleep(TURN_S)
        with suppress(OSError):
            os.unlink(self.folder.file("token"))
        with suppress(OSError):
            self._mark(ENDED, f"{self.settings.job}\n")
        return end.code

    def _mark(self, name: str, text: str) -> None:
        """Write a file by which NeMo-Run's programs see a cluster, beside its logs."""
        write_file(os.path.join(self.settings.logs, name), text)

    def _write_units(self) -> None:
        """Write the ``worker_units`` of Ray's living nodes, which NeMo-RL's scripts watch."""
        alive = self.alive or ()
        addresses = {0: self._address, **{rank: row.address for rank, row in self._reports.items()}}
        units = self.settings.worker_units * sum(one in alive for one in addresses.values())
        if units != self._written_units:
            with suppress(OSError):  # the next turn tries again
                self._mark("ray_worker_units", f"{units}\n")
                self._written_units = units

    def _is_ended_by_user(self) -> bool:
        """Whether a user has asked for the end of this run.

        A file that names another run was written at the end of that run. It may be the run of the
        job before, which Slurm still completes while this one has its nodes.
        """
        try:
            with open(os.path.join(self.settings.logs, ENDED), encoding="utf-8") as file:
                text = file.read().strip()
        except (OSError, ValueError):
            return False
        return text == self.settings.job or not re.fullmatch(r"\d+\.\d+", text)

    def _requested_end(self) -> Optional[RunEnd]:
        """The end that the job's script, a user by NeMo-Run's file, or a client asks for."""
        why = self.folder.text("script_failed")
        if why is not None:
            return RunEnd(CLUSTER_FAILED, f"the job's script: {why.strip()}")
        if self._is_ended_by_user():
            return RunEnd(CLUSTER_FAILED, f"a user has written {ENDED} into {self.settings.logs}")
        stopped = self._allocation.stop_reason()
        return RunEnd(143, stopped) if stopped else None

    def _all_left(self) -> bool:
        return all(report.left for report in self.folder.reports().values())

    def _read_reports(self) -> None:
        """Read the nodes' reports: they are many, and seldom change once the cluster is ready."""
        pause = _LOOK_READY_S if self._was_ready else 0.0
        if time.monotonic() - self._looked_at >= pause:
            self._looked_at = time.monotonic()
            self._reports = self.folder.reports()

    def _start_when_reached(self) -> None:
        """Start Ray once it is known at which address the others reach it."""
        if self.ray is None and self._discovery is not None:
            address = self._discovery.choose(self._reports)
            if address is not None:
                self._address = address
                self.publish(address=address)
                self.start_ray()

    def _await_gcs(self) -> None:
        if self._head is not None or self.ray is None:
            return
        port, dashboard_port = self._ports["PORT"], self._ports["DASHBOARD_PORT"]
        if listening(self._address, port):
            self._head = HeadAddress(self._address, port, dashboard_port, self.starts)
            url = f"http://127.0.0.1:{dashboard_port}"
            self._dashboard = DashboardClient(url, self._authorize, _ANSWER_S)
            self._mark("STARTED_RAY_HEAD", "")

    def _ask_for_nodes(self, dashboard: DashboardClient) -> None:
        """Ask for Ray's nodes after a pause; without an answer the last one stays."""
        if time.monotonic() - self._asked_at < (_ASK_READY_S if self._was_ready else _ASK_S):
            return
        try:
            self.alive = frozenset(row["node_ip"] for row in dashboard.alive_nodes())
        except Unanswered:
            return
        finally:
            self._asked_at = time.monotonic()
        for rank, report in self._reports.items():
            if self._was_ready and rank and report.address and report.address not in self.alive:
                self._missing_since.setdefault(rank, self._asked_at)
            else:
                self._missing_since.pop(rank, None)

    def _authorize(self) -> str:
        """The token for one more request, before which this node shows that it lives."""
        self._beat()
        return self._token

    def _let_workers_join(self) -> None:
        """Publish the address once this node is registered: before, `ray start` soon gives up."""
        is_registered = self._address in (self.alive or ())
        if self._head is not None and is_registered and not self._has_published_head:
            self._has_published_head = True
            self.folder.publish(HEAD, self._head)

    def _view(self) -> ClusterView:
        return ClusterView(
            elapsed_s=time.monotonic() - self._began,
            reports=self._reports,
            dead=frozenset(self.dead),
            address=self._address,
            gcs_listens=self._head is not None,
            alive=self.alive,
            was_ready=self._was_ready,
            missing_for_s={
                rank: self._asked_at - since for rank, since in self._missing_since.items()
            },
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
            self._publish_ready(self._head, decision.workers)
        return None

    def _publish_ready(self, head: HeadAddress, workers: int) -> None:
        self.say(f"Ray is ready: {workers + 1} nodes, GCS {head.gcs}, dashboard {head.dashboard}")
        if self.settings.cluster:
            # NeMo-Run reads this file, and takes its presence for readiness.
            row = {
                "head_ip": head.address,
                "dashboard_port": str(head.dashboard_port),
                "port": str(head.port),
                "job": self.settings.job,
            }
            write_file(self._info, json.dumps(row, indent=2) + "\n")
        names = {"RAY_TEMP_DIR": self.settings.temp_dir}
        names.update((name, str(port)) for name, port in self._ports.items())
        self.folder.publish_ready(head, driver_environment(self.ray_env(), head), names)

    def _allocation_end(self) -> Optional[RunEnd]:
        """The end of a cluster that nobody needs; ``None`` while a client may."""
        if not self._was_ready or self._dashboard is None:
            return None
        session = self._allocation.session
        end = self._allocation.step(self._dashboard)
        if self._allocation.session != session:
            with suppress(OSError):  # it is for people who look later
                write_file(self.folder.file("session"), self._allocation.session)
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
            env = self.ray_env()
            env.update(driver_environment(env, self._head))
            if not self.settings.driver_gpus:
                env["CUDA_VISIBLE_DEVICES"] = ""  # Ray gives GPUs to tasks; NeMo-Run: `--gpus=0`
            cwd = self.folder.text("workdir") or None
            argv = ["bash", "-c", command]
            self._driver = self.commands.start("driver", argv, self.settings.log("job"), env, cwd)
        return None
