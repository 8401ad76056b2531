"""The head: starts Ray, waits for the workers, runs the driver, and ends the run for all."""

from __future__ import annotations

import json
import os
import secrets
import time
from contextlib import suppress
from typing import Any, Dict, List, Optional, Set, Tuple

from ..dashboard import DASHBOARD, DashboardClient, Unanswered
from ..files import write_file
from ..node.supervise import Child, describe_exit
from .carry import Allocation
from .folder import CLUSTER_FAILED, HeadAddress, NodeReport, RunEnd
from .network import AddressDiscovery, head_addresses, reachable
from .node import TURN_S, NodeProgram, driver_environment, node_options
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


class ClusterView:
    """The cluster as the head sees it."""

    def __init__(self) -> None:
        self.reports: Dict[int, NodeReport] = {}  # by rank
        self.dead: Set[int] = set()  # ranks whose program has shown no life for long
        self.address = ""  # the head's, once it is chosen
        self.alive: Set[str] = set()  # addresses of Ray's nodes
        self.was_ready = False
        self.missed: Dict[int, int] = {}  # requests in a row without a node that had joined


class Head(NodeProgram):
    """The node with rank 0."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._ports: Dict[str, int] = {}
        self.view = ClusterView()
        self._token = secrets.token_hex(32)
        self._allocation = Allocation(self.settings)
        self._said_at = self._asked_at = float("-inf")
        self._head: Optional[HeadAddress] = None
        self._dashboard: Optional[DashboardClient] = None
        self._discovery: Optional[AddressDiscovery] = None
        self._driver: Optional[Child] = None
        self._written_units: Optional[int] = None
        self._info = os.path.join(self.settings.cluster, "ray_cluster_info.json")

    def step(self) -> Optional[RunEnd]:
        end = self._look()
        self.watch_ray()
        self._follow_ray()
        if self.view.was_ready:
            end = end or self._driver_end() or self._allocation.step()
        if end is not None:
            return end
        self.view.dead = self.dead
        waiting, why = decide(self.settings, self.view, time.monotonic() - self.began)
        if why:
            return RunEnd(CLUSTER_FAILED, why)
        if not waiting and not self.view.was_ready and self._head is not None:
            self.view.was_ready = True
            self._publish_ready(self._head)
        elif waiting and time.monotonic() - self._said_at >= _SAY_S:
            self._said_at = time.monotonic()
            self.say(waiting)
        return None

    def ray_start_argv(self) -> List[str]:
        """Without a token the dashboard is for the node itself alone."""
        self._ports = self.ports.choose()
        self._dashboard, self.view.alive = None, set()  # of the last try
        # On all interfaces: NeMo-Run's port_forward ends at the head's localhost.
        has_token = self.ray_env()["RAY_AUTH_MODE"] == "token"
        host = "0.0.0.0" if has_token else "127.0.0.1"
        argv = ["ray", "start", "--head", f"--node-ip-address={self.view.address}"]
        argv += [f"--dashboard-host={host}", "--include-dashboard=true"]
        argv += [f"--temp-dir={self.settings.temp_dir}"]
        argv += [f"--{option}={self._ports[name]}" for name, option in HEAD_PORTS.items()]
        return argv + node_options(self.settings, self._ports)

    def ray_env(self) -> Dict[str, str]:
        env = {**super().ray_env(), **self._allocation.ray_env()}
        if self._ports:
            env[DASHBOARD] = f"http://{self.view.address}:{self._ports['DASHBOARD_PORT']}"
        return env

    def leave(self, end: RunEnd) -> int:
        if self.view.was_ready:
            self._allocation.keep_last_table(end)
        failed = end.code == CLUSTER_FAILED and not self.view.was_ready
        if failed and self._requested_end() is None and self._allocation.may_try_again():
            end = end._replace(renews=True)
        with suppress(OSError):  # on a full disk the workers miss the head's heartbeat
            end = self.folder.publish_end(end)
        self.say(f"The run is over: {end.why}")
        # After `scancel` the job's script has no time to remove it.
        with suppress(OSError), open(self._info, encoding="utf-8") as file:
            if f'"{self.settings.job}"' in file.read():  # and not another job's by now
                os.unlink(self._info)
        super().leave(end)
        while time.monotonic() < self.leaves_at and not self._all_left():
            time.sleep(TURN_S)
        with suppress(OSError):
            os.unlink(self.folder.file("token"))
        return end.code

    def _look(self) -> Optional[RunEnd]:
        """Read the files of others, seldom once the cluster is ready; start a reachable Ray."""
        if self.view.was_ready and not self.looks:
            return None
        reports = self.view.reports = self.folder.reports()
        self.watched = {rank for rank, report in reports.items() if rank and not report.left}
        if self._discovery is None:
            self._discovery = self._announce()
        if self.ray is None:
            self.view.address = self._discovery.choose(reports) or ""
            if self.view.address:
                self.publish(address=self.view.address)
                self.start_ray()
        return self._requested_end()

    def _announce(self) -> AddressDiscovery:
        """Tell the workers where they may reach this node."""
        self._allocation.begin()
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with open(os.open(self.folder.file("token"), flags, 0o600), "w") as file:
            file.write(self._token)
        addresses = head_addresses(self.settings.host, self.settings.interface)
        discovery = AddressDiscovery(addresses, self.settings, self.ports)
        self.publish(candidates=addresses, test_port=discovery.port)
        return discovery

    def _requested_end(self) -> Optional[RunEnd]:
        """The end that the job's script, a user by NeMo-Run's file, or a client asks for."""
        why = self.folder.text("script_failed")
        if why is not None:
            return RunEnd(CLUSTER_FAILED, f"the job's script: {why.strip()}")
        if os.path.exists(os.path.join(self.settings.logs, ENDED)):
            return RunEnd(CLUSTER_FAILED, f"a user has written {ENDED} into {self.settings.logs}")
        stopped = self._allocation.stop_reason()
        return RunEnd(143, stopped) if stopped else None

    def _all_left(self) -> bool:
        return all(report.left for report in self.folder.reports().values())

    def _follow_ray(self) -> None:
        """Ask for Ray's nodes after a pause, and tell the workers of Ray once they can join."""
        if self.ray is None:
            return
        port, dashboard_port = self._ports["PORT"], self._ports["DASHBOARD_PORT"]
        if self._dashboard is None and reachable([self.view.address], port):
            self._head = HeadAddress(self.view.address, port, dashboard_port, self.starts)
            url = f"http://127.0.0.1:{dashboard_port}"
            self._dashboard = DashboardClient(url, self._authorize, _ANSWER_S)
            self._allocation.dashboard = self._dashboard
        pause_s = _ASK_READY_S if self.view.was_ready else _ASK_S
        if self._dashboard is not None and time.monotonic() - self._asked_at >= pause_s:
            with suppress(Unanswered):  # without an answer the last one stays
                self.view.alive = {row["node_ip"] for row in self._dashboard.alive_nodes()}
                for rank, report in self.view.reports.items():
                    if report.address in self.view.alive:
                        self.view.missed[rank] = 0
                    elif rank in self.view.missed and self.view.was_ready:
                        self.view.missed[rank] += 1
            self._asked_at = time.monotonic()
        # Before this node is registered, `ray start` of a worker soon gives up.
        if self._head is not None and self.view.address in self.view.alive:
            self.publish(ray=self._head)
        self._write_units()

    def _write_units(self) -> None:
        """Write the ``worker_units`` of Ray's living nodes, which NeMo-RL's scripts watch."""
        units = self.settings.worker_units * len(self._members())
        if units != self._written_units:
            with suppress(OSError):  # the next turn tries again
                write_file(os.path.join(self.settings.logs, "ray_worker_units"), f"{units}\n")
                self._written_units = units

    def _members(self) -> List[str]:
        """The addresses of this cluster's nodes that Ray counts as alive."""
        addresses = [report.address for report in self.view.reports.values()]
        return [address for address in addresses if address in self.view.alive]

    def _authorize(self) -> str:
        """The token for one more request, before which this node shows that it lives."""
        self.beat()
        return self._token

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

    def _driver_end(self) -> Optional[RunEnd]:
        """The end of the driver, which is started when the job's script names it."""
        if self._driver is not None:
            code, ending = self._driver.code, self._driver.ending
            return None if code is None else RunEnd(code, f"the driver: {ending}")
        elsewhere, command = self.folder.text("driver_exit_code"), self.folder.text("command")
        if elsewhere is not None:
            return RunEnd(int(elsewhere), f"the driver: {describe_exit(int(elsewhere))}")
        if command is not None and self._head is not None:
            env = self.ray_env()
            env.update(driver_environment(env, self._head))
            if not self.settings.driver_gpus:
                env["CUDA_VISIBLE_DEVICES"] = ""  # Ray gives GPUs to tasks; NeMo-Run: `--gpus=0`
            cwd = self.folder.text("workdir") or None
            log = self.settings.log("job")
            self._driver = self.start(["bash", "-c", command], log, env, cwd)
        return None


def decide(settings: Settings, view: ClusterView, elapsed_s: float) -> Tuple[str, str]:
    """Say what the cluster waits for, and why it has failed; empty texts while it can be used.

    Args:
        settings: of the head.
        view: of the head.
        elapsed_s: since the head's program began.
    """
    why = _failure(settings, view)
    waiting = "" if why or view.was_ready else _missing(settings, view)
    if not waiting:
        return "", why
    absent = [settings.host_of(rank) for rank in range(settings.nodes) if rank not in view.reports]
    if elapsed_s >= settings.share_limit_s and _too_few(settings, absent):
        more = f" and {len(absent) - _LISTED} more" if len(absent) > _LISTED else ""
        return "", (
            f"{', '.join(absent[:_LISTED])}{more} has not written into {settings.run} within "
            f"{settings.share_limit_s:g} s, which node {settings.host} sees. Either that folder is "
            "not on a file system that all nodes share, or the step has not begun there"
        )
    if elapsed_s >= settings.start_limit_s:
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
            return view.reports[rank].failed
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
    if view.address not in view.alive:
        return f"Ray on {settings.host} (the head) is not up yet{details}"
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
