"""The head: starts Ray, waits for the workers, runs the driver, and ends the run for all."""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from contextlib import suppress
from typing import Any, Dict, FrozenSet, List, Mapping, NamedTuple, Optional, Set, Tuple

from ..dashboard import DASHBOARD, DashboardClient, Unanswered
from ..files import write_file
from ..node.supervise import Child, describe_exit
from .carry import Allocation
from .folder import CLUSTER_FAILED, HeadAddress, NodeReport, RunEnd
from .network import AddressDiscovery, head_addresses, reachable
from .node import LOOK_S, TURN_S, NodeProgram, driver_environment, node_options
from .settings import HEAD_PORTS, Settings

#: NeMo-Run's file that ends the nodes.
ENDED = "ENDED"
#: Seconds between two lines that say what the head waits for.
_SAY_S = 30.0
#: Seconds between two requests for Ray's nodes, before the cluster is ready and after.
_ASK_S, _ASK_READY_S = 0.5, 5.0
#: Limit of a request, during which the head shows no life.
_ANSWER_S = 5.0
#: Requests in a row without a node, each ``_ASK_READY_S`` after the last one, that make it lost.
LOST_AFTER = 4
#: Nodes that a message lists at most.
_LISTED = 8


class ClusterView(NamedTuple):
    """One look of the head at the cluster."""

    elapsed_s: float  # since the head's program began
    reports: Mapping[int, NodeReport]  # by rank
    dead: FrozenSet[int] = frozenset()  # ranks whose program has shown no life for long
    address: str = ""  # the head's, once it is chosen
    gcs_listens: bool = False  # so workers can join
    alive: Optional[FrozenSet[str]] = None  # addresses of Ray's nodes; None: no answer yet
    was_ready: bool = False
    missed: Mapping[int, int] = {}  # requests in a row in which Ray has missed a node, by rank


class Head(NodeProgram):
    """The node with rank 0."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._ports: Dict[str, int] = {}
        self._address = ""
        self._token = secrets.token_hex(32)
        self._allocation = Allocation(self.settings)
        self._reports: Dict[int, NodeReport] = {}
        self._looked_at = self._said_at = self._asked_at = float("-inf")
        self._discovery: Optional[AddressDiscovery] = None
        self._head: Optional[HeadAddress] = None
        self._dashboard: Optional[DashboardClient] = None
        self._missed: Dict[int, int] = {}
        #: Addresses of Ray's living nodes; ``None`` until the dashboard has answered.
        self.alive: Optional[FrozenSet[str]] = None
        self._was_ready = False
        self._driver: Optional[Child] = None
        self._written_units: Optional[int] = None
        self._info = os.path.join(self.settings.cluster, "ray_cluster_info.json")

    def announce(self) -> None:
        self._allocation.begin()
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with open(os.open(self.folder.file("token"), flags, 0o600), "w") as file:
            file.write(self._token)
        addresses = head_addresses(self.settings.host, self.settings.interface)
        self._discovery = AddressDiscovery(addresses, self.settings.nodes - 1, self.ports)
        self.publish(candidates=addresses, test_port=self._discovery.port)

    def step(self) -> Optional[RunEnd]:
        end = self._look()
        if end is not None:
            return end
        why = self.watch_ray()
        if why:
            return self.failed(why)
        self._follow_ray()
        code = self._driver_code()
        if code is not None:
            return RunEnd(code, f"the driver: {describe_exit(code)}")
        if self._was_ready and self._dashboard is not None:
            end = self._allocation.step(self._dashboard)
            if end is not None:
                return end
        waiting, why = decide(self.settings, self._view())
        if why:
            return RunEnd(CLUSTER_FAILED, why)
        if not waiting and not self._was_ready and self._head is not None:
            self._was_ready = True
            self._publish_ready(self._head)
        elif waiting and time.monotonic() - self._said_at >= _SAY_S:
            self._said_at = time.monotonic()
            self.say(waiting)
        return None

    def ray_start_argv(self) -> List[str]:
        """Without a token the dashboard is for the node itself alone."""
        self._ports = self.ports.choose()
        self._head = self._dashboard = self.alive = None  # of the last try
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
        with suppress(OSError, ValueError), open(self._info, encoding="utf-8") as file:
            if json.load(file).get("job") == self.settings.job:  # and not another job's by now
                os.unlink(self._info)
        super().leave(end)
        while time.monotonic() < self.leaves_at and not self._all_left():
            time.sleep(TURN_S)
        with suppress(OSError):
            os.unlink(self.folder.file("token"))
            self._mark(ENDED, f"{self.settings.job}\n")
        return end.code

    def _mark(self, name: str, text: str) -> None:
        """Write a file by which NeMo-Run's programs see a cluster, beside its logs."""
        write_file(os.path.join(self.settings.logs, name), text)

    def _look(self) -> Optional[RunEnd]:
        """Read the files of others, seldom once the cluster is ready; start a reachable Ray."""
        if time.monotonic() - self._looked_at < (LOOK_S if self._was_ready else 0.0):
            return None
        self._looked_at = time.monotonic()
        self._reports = self.folder.reports()
        if self.ray is None and self._discovery is not None:
            self._address = self._discovery.choose(self._reports) or ""
            if self._address:
                self.publish(address=self._address)
                self.start_ray()
        return self._requested_end()

    def _requested_end(self) -> Optional[RunEnd]:
        """The end that the job's script, a user by NeMo-Run's file, or a client asks for."""
        why = self.folder.text("script_failed")
        if why is not None:
            return RunEnd(CLUSTER_FAILED, f"the job's script: {why.strip()}")
        with suppress(OSError), open(os.path.join(self.settings.logs, ENDED), "rb") as file:
            # One that names a run was written at its end, perhaps of the job before.
            if not re.fullmatch(rb"\d+\.\d+\n", file.read()):
                why = f"a user has written {ENDED} into {self.settings.logs}"
                return RunEnd(CLUSTER_FAILED, why)
        stopped = self._allocation.stop_reason()
        return RunEnd(143, stopped) if stopped else None

    def _all_left(self) -> bool:
        return all(report.left for report in self.folder.reports().values())

    def _follow_ray(self) -> None:
        """Ask for Ray's nodes after a pause, and tell the workers of Ray once they can join."""
        if self.ray is None:
            return
        port, dashboard_port = self._ports["PORT"], self._ports["DASHBOARD_PORT"]
        if self._dashboard is None and reachable([self._address], port):
            self._head = HeadAddress(self._address, port, dashboard_port, self.starts)
            url = f"http://127.0.0.1:{dashboard_port}"
            self._dashboard = DashboardClient(url, self._authorize, _ANSWER_S)
            self._mark("STARTED_RAY_HEAD", "")
        pause_s = _ASK_READY_S if self._was_ready else _ASK_S
        if self._dashboard is not None and time.monotonic() - self._asked_at >= pause_s:
            with suppress(Unanswered):  # without an answer the last one stays
                self.alive = frozenset(row["node_ip"] for row in self._dashboard.alive_nodes())
                for rank, report in self._reports.items():
                    is_missed = self._was_ready and rank and report.address not in self.alive
                    self._missed[rank] = self._missed.get(rank, 0) + 1 if is_missed else 0
            self._asked_at = time.monotonic()
        # Before this node is registered, `ray start` of a worker soon gives up.
        if self._head is not None and self._address in (self.alive or ()):
            self.publish(ray=self._head)
        self._write_units()

    def _write_units(self) -> None:
        """Write the ``worker_units`` of Ray's living nodes, which NeMo-RL's scripts watch."""
        units = self.settings.worker_units * len(self._members())
        if units != self._written_units:
            with suppress(OSError):  # the next turn tries again
                self._mark("ray_worker_units", f"{units}\n")
                self._written_units = units

    def _members(self) -> List[str]:
        """The addresses of this cluster's nodes that Ray counts as alive."""
        addresses = [report.address for report in self._reports.values()]
        return [address for address in addresses if address in (self.alive or ())]

    def _authorize(self) -> str:
        """The token for one more request, before which this node shows that it lives."""
        self.beat()
        return self._token

    def _view(self) -> ClusterView:
        return ClusterView(
            elapsed_s=time.monotonic() - self.began,
            reports=self._reports,
            dead=frozenset(self.dead),
            address=self._address,
            gcs_listens=self._head is not None,
            alive=self.alive,
            was_ready=self._was_ready,
            missed=self._missed,
        )

    def _publish_ready(self, head: HeadAddress) -> None:
        nodes = len(self._members())
        self.say(f"Ray is ready: {nodes} nodes, GCS {head.gcs}, dashboard {head.dashboard}")
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

    def _driver_code(self) -> Optional[int]:
        """The driver's exit code once it has ended; starts it when the job's script names it."""
        if self._driver is not None:
            return self._driver.code
        if not self._was_ready or self._head is None:
            return None
        elsewhere, command = self.folder.text("driver_exit_code"), self.folder.text("command")
        if elsewhere is not None:
            return int(elsewhere)
        if command is not None:
            env = self.ray_env()
            env.update(driver_environment(env, self._head))
            if not self.settings.driver_gpus:
                env["CUDA_VISIBLE_DEVICES"] = ""  # Ray gives GPUs to tasks; NeMo-Run: `--gpus=0`
            cwd = self.folder.text("workdir") or None
            log = self.settings.log("job")
            self._driver = self.start(["bash", "-c", command], log, env, cwd)
        return None


def decide(settings: Settings, view: ClusterView) -> Tuple[str, str]:
    """What the cluster waits for, and why it has failed; both are empty while it can be used."""
    why = _failure(settings, view)
    waiting = "" if why or view.was_ready else _missing(settings, view)
    if not waiting:
        return "", why
    absent = [settings.host_of(rank) for rank in range(settings.nodes) if rank not in view.reports]
    if view.elapsed_s >= settings.share_limit_s and _too_few(settings, absent):
        more = f" and {len(absent) - _LISTED} more" if len(absent) > _LISTED else ""
        return "", (
            f"{', '.join(absent[:_LISTED])}{more} has not written into {settings.run} within "
            f"{settings.share_limit_s:g} s, which node {settings.host} sees. Either that folder is "
            "not on a file system that all nodes share, or the step has not begun there"
        )
    if view.elapsed_s >= settings.start_limit_s:
        return "", (
            f"the cluster was not ready within {settings.start_limit_s:g} s, which "
            f"RAY_HEAD_START_TIMEOUT allows: {waiting}"
        )
    return waiting, ""


def _failure(settings: Settings, view: ClusterView) -> str:
    """The reason why the cluster cannot continue; empty while it can."""
    failed = {rank for rank, report in view.reports.items() if report.failed}
    is_needed = settings.fail_fast
    if not view.was_ready:  # only if too few workers remain
        lost = (failed | view.dead) - {0}
        is_needed = settings.nodes - 1 - len(lost) < settings.min_workers
    for rank in sorted(failed):
        if rank == 0 or is_needed:
            return f"node {view.reports[rank].host} (rank {rank}): {view.reports[rank].failed}"
    if not is_needed:
        return ""
    for rank in sorted(view.dead):
        return (
            f"node {settings.host_of(rank)} (rank {rank}) shows no life: its program writes "
            f"nothing into {settings.run} any more. It has lost its power, its network or its file "
            "system"
        )
    for rank, count in sorted(view.missed.items()):
        if count >= LOST_AFTER and rank in view.reports:
            lost_node = view.reports[rank]
            return (
                f"node {lost_node.host} (rank {rank}) was lost: Ray does not count "
                f"{lost_node.address} as alive any more. Its log: {lost_node.log}"
            )
    return ""


def _missing(settings: Settings, view: ClusterView) -> str:
    """A phrase for what the cluster lacks to be ready; empty if nothing is missing."""
    if not view.address:
        return f"the head {settings.host} waits for workers that reach it"
    details = _details(view.reports.get(0) or NodeReport(settings.host, log=settings.node_log))
    if not view.gcs_listens:
        return f"Ray's GCS on {settings.host} does not listen yet{details}"
    if view.alive is None:
        return f"Ray's dashboard on {settings.host} does not answer yet{details}"
    if view.address not in view.alive:
        return f"Ray on {settings.host} (the head) is not registered yet{details}"
    late = []
    for rank in range(1, settings.nodes):
        report = view.reports.get(rank)
        if report is None:
            late.append(f"{settings.host_of(rank)}, which has not begun")
        elif report.address not in view.alive:
            late.append(report.host + _details(report))
    if _too_few(settings, late):
        return f"workers that have not joined: {'; '.join(late[:_LISTED])}"
    slow = [
        f"{sidecar.name} on {report.host} (log: {settings.sidecar_log(sidecar, rank, report.host)})"
        for rank, report in sorted(view.reports.items())
        for sidecar in settings.sidecars
        if (rank == 0 or sidecar.everywhere) and sidecar.name not in report.ready
        # A node that the cluster may be ready without is not waited for.
        if rank == 0 or (report.address in view.alive and rank not in view.dead)
    ]
    return f"sidecars that are not ready: {'; '.join(slow[:_LISTED])}" if slow else ""


def _too_few(settings: Settings, lacking: List[str]) -> bool:
    return settings.nodes - 1 - len(lacking) < settings.min_workers


def _details(report: NodeReport) -> str:
    """More about a node whose Ray is not up."""
    if report.retried:
        return f", where Ray itself has given up: {report.retried}"
    return f" (log: {report.log})" if report.log else ""
