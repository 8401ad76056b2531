"""The head: starts Ray, waits for the workers, runs the driver, and ends the run for all."""

from __future__ import annotations

import json
import os
import secrets
import time
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any, Mapping, Sized

from ..dashboard import DashboardClient, Unanswered
from ..end_record import describe_exit
from ..files import DASHBOARD, write_file
from ..node.supervise import Child
from .carry import Allocation
from .folder import CLUSTER_FAILED, HeadAddress, NodeReport, RunEnd
from .network import head_address
from .node import LISTED, TURN_S, NodeProgram, driver_environment, listed

#: NeMo-Run's file that ends the nodes.
ENDED = "ENDED"
#: Seconds between two requests for Ray's nodes, before the cluster is ready and after.
_ASK_S, _ASK_READY_S = 0.5, 5.0
#: Seconds in which the tables of earlier runs must become readable.
_READ_S = 60.0
#: Requests in a row without a node, each ``_ASK_READY_S`` after the last one, that make it lost.
LOST_AFTER = 4


class Head(NodeProgram):
    """The node with rank 0."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.reports: dict[int, NodeReport] = {}  # by rank
        self.address = ""
        self.alive: set[str] = set()  # addresses of Ray's nodes
        self.was_ready = False
        self.missed: dict[int, int] = {}  # requests in a row without a node that had joined
        #: Set when Ray is started.
        self._ports: Mapping[str, int]
        self._head: HeadAddress
        self._token = secrets.token_hex(32)
        self._allocation = Allocation(self.settings)
        self.ray_env.update(self._allocation.ray_env)
        self._said_at = self._asked_at = float("-inf")
        self._driver: Child | None = None
        self._info = f"{self.settings.cluster}/ray_cluster_info.json"

    def step(self) -> RunEnd | None:
        end = None
        if self.looks or not self.was_ready:
            self.reports = self.folder.reports()
            self.watched = {rank for rank, row in self.reports.items() if rank and not row.left}
            end = self._requested_end()
        if not self.ray:
            try:
                self._allocation.begin()
            except OSError:
                if monotonic() - self.began > _READ_S:
                    raise
                return end
            own = partial(os.open, mode=0o600)
            with open(f"{self.settings.run}/token", "w", opener=own) as file:
                file.write(self._token)
            self.address = head_address(
                self.settings.host, self.env.get("NEMO_RUN_RAY_INTERFACE", "")
            )
            self.publish(address=self.address)
            self.start_ray()
        self.watch_ray()
        self._follow_ray()
        if self.was_ready:
            end = end or self._driver_end() or self._allocation.step()
        if end:
            return end
        waiting, why = decide(self, monotonic() - self.began)
        if why:
            return RunEnd(CLUSTER_FAILED, why)
        if not waiting and not self.was_ready:
            self.was_ready = True
            head = self._head
            self.say(
                f"Ray is ready: {self._members} nodes, GCS {head.gcs}, dashboard {head.dashboard}"
            )
            if self.settings.cluster:
                # NeMo-Run reads this file, and takes its presence for readiness.
                row = {
                    "head_ip": head.address,
                    "dashboard_port": str(head.dashboard_port),
                    "port": str(head.port),
                    "job": self.settings.job,
                }
                write_file(self._info, json.dumps(row, indent=2) + "\n")
            names = {name: str(port) for name, port in self._ports.items()}
            names["RAY_TEMP_DIR"] = self.settings.temp_dir
            self.folder.publish_ready(head, driver_environment(self.ray_env, head), names)
        elif waiting and monotonic() - self._said_at >= 30.0:
            self._said_at = monotonic()
            self.say(waiting)
        return None

    def ray_start_argv(self, ports: Mapping[str, int]) -> list[str]:
        """Without a token the dashboard is for the node itself alone."""
        self._ports, self.alive = ports, set()
        self._head = HeadAddress(self.address, ports["PORT"], ports["DASHBOARD_PORT"], self.starts)
        self._allocation.dashboard = DashboardClient(
            f"http://127.0.0.1:{ports['DASHBOARD_PORT']}", self._authorize, timeout_s=5.0
        )
        self.ray_env[DASHBOARD] = self._head.dashboard
        # On all interfaces: NeMo-Run's port_forward ends at the head's localhost.
        host = "0.0.0.0" if self.ray_env["RAY_AUTH_MODE"] == "token" else "127.0.0.1"
        return [
            *("ray", "start", "--head", f"--node-ip-address={self.address}"),
            *(f"--dashboard-host={host}", "--include-dashboard=true"),
            f"--temp-dir={self.settings.temp_dir}",
        ]

    def leave(self, end: RunEnd) -> int:
        if self.was_ready and self.settings.allocation:
            # From the last table the next allocation takes over jobs.
            any(self._allocation.keep_table() is not None for _ in range(3 if end.renews else 1))
            # Whoever sees the end of this run can read the logs of the jobs that had ended here.
            ended = {
                f"job-driver-{row.get('submission_id')}.log"
                for row in self._allocation.table
                if row.get("driver_exit_code") is not None
            }
            self.keep_job_logs(1.0, ended)
        failed = end.code == CLUSTER_FAILED and not self.was_ready
        if failed and not self._requested_end() and self._allocation.may_try_again():
            end = end._replace(renews=True)
        with suppress(OSError):  # on a full disk the workers miss the head's heartbeat
            end = self.folder.publish_end(end)
        self.say(f"The run is over: {end.why}")
        # After `scancel` the job's script has no time to remove it.
        with suppress(OSError), open(self._info, encoding="utf-8") as file:
            if f'"{self.settings.job}"' in file.read():  # and not another job's by now
                os.unlink(self._info)
        super().leave(end)
        while monotonic() < self.leaves_at and not all(
            report.left for report in self.folder.reports().values()
        ):
            time.sleep(TURN_S)
        with suppress(OSError):
            os.unlink(f"{self.settings.run}/token")
        return end.code

    def _requested_end(self) -> RunEnd | None:
        """The end that the job's script, a user by NeMo-Run's file, or a client asks for."""
        why = self.folder.text("script_failed")
        if why is not None:
            return RunEnd(CLUSTER_FAILED, f"the job's script: {why.strip()}")
        if os.path.exists(f"{self.settings.logs}/{ENDED}"):
            return RunEnd(CLUSTER_FAILED, f"a user has written {ENDED} into {self.settings.logs}")
        # By a client, whom Slurm's controller may not have heard.
        folder = self.settings.allocation or self.settings.run
        with suppress(OSError), open(f"{folder}/stop", encoding="utf-8") as file:
            return RunEnd(143, file.read().strip())
        return None

    def _follow_ray(self) -> None:
        """Ask for Ray's nodes after a pause, and tell the workers of Ray once they can join."""
        if monotonic() - self._asked_at >= (_ASK_READY_S if self.was_ready else _ASK_S):
            with suppress(Unanswered):  # without an answer the last one stays
                self.alive = {row["node_ip"] for row in self._allocation.dashboard.alive_nodes()}
                for rank, report in self.reports.items():
                    if report.address in self.alive:
                        self.missed[rank] = 0
                    elif rank in self.missed and self.was_ready:
                        self.missed[rank] += 1
            # NeMo-RL's scripts watch the resource of Ray's living nodes.
            with suppress(OSError):  # the next turn tries again
                write_file(
                    f"{self.settings.logs}/ray_worker_units",
                    f"{self.settings.worker_units * self._members}\n",
                )
            self._asked_at = monotonic()
        # Before this node is registered, `ray start` of a worker soon gives up.
        if self.address in self.alive:
            self.publish(ray=self._head)

    @property
    def _members(self) -> int:
        """The number of this cluster's nodes that Ray counts as alive."""
        return sum(report.address in self.alive for report in self.reports.values())

    def _authorize(self) -> str:
        """The token for one more request, before which this node shows that it lives."""
        self.beat()
        return self._token

    def _driver_end(self) -> RunEnd | None:
        """The end of the driver, which is started when the job's script names it."""
        code = self._driver.code if self._driver else None
        elsewhere, command = self.folder.text("driver_exit_code"), self.folder.text("command")
        if elsewhere is not None:
            code = int(elsewhere)
        if code is not None:
            ending = self._driver.ending if self._driver else describe_exit(code)
            return RunEnd(code, f"the driver: {ending}")
        if not self._driver and command is not None:
            env = {**self.ray_env, **driver_environment(self.ray_env, self._head)}
            if self.env.get("NEMO_RUN_RAY_DRIVER_GPUS") != "1":
                env["CUDA_VISIBLE_DEVICES"] = ""  # Ray gives GPUs to tasks; NeMo-Run: `--gpus=0`
            self._driver = self.start(
                ["bash", "-c", command],
                self.settings.log("job"),
                env,
                self.folder.text("workdir") or None,
            )
        return None


def decide(head: Head, elapsed_s: float) -> tuple[str, str]:
    """Say what the cluster waits for, and why it has failed; empty texts while it can be used.

    Args:
        head: as far as it has looked.
        elapsed_s: since its program began.
    """
    settings, reports = head.settings, head.reports

    def too_few(lacking: Sized) -> bool:
        return bool(settings.nodes - 1 - len(lacking) < settings.min_workers)

    failed = {rank for rank, report in reports.items() if report.failed}
    # Before it is ready, only if too few workers remain.
    if settings.fail_fast if head.was_ready else too_few(failed | head.dead):
        for rank in sorted(failed):
            return "", reports[rank].failed
        for rank in sorted(head.dead):
            return "", (
                f"node {settings.hosts[rank]} (rank {rank}) shows no life: its program writes "
                f"nothing into {settings.run} any more. It has lost its power, its network or its "
                "file system"
            )
        for rank, count in sorted(head.missed.items()):
            if count >= LOST_AFTER:
                lost = reports[rank]
                return "", (
                    f"node {lost.host} (rank {rank}) was lost: Ray does not count {lost.address} "
                    f"as alive any more. Its log: {lost.log}"
                )
    if head.was_ready:
        return "", ""
    late, slow = {}, []
    for rank in range(settings.nodes):
        report = reports.get(rank)
        if not report:
            late[rank] = f"{settings.hosts[rank]}, which has not begun"
        elif report.address not in head.alive:
            given_up = f", where Ray itself has given up: {report.retried}"
            late[rank] = report.host + (given_up if report.retried else f" (log: {report.log})")
        elif rank not in head.dead:
            slow += [
                f"{sidecar.name} on {report.host}"
                for sidecar in settings.sidecars
                if (rank == 0 or sidecar.everywhere) and sidecar.name not in report.ready
            ]
    if 0 in late:
        waiting = f"Ray on the head is not up yet: {late[0]}"
    elif too_few(late):
        waiting = f"workers that have not joined: {'; '.join([*late.values()][:LISTED])}"
    elif slow:
        waiting = f"sidecars that are not ready: {'; '.join(slow[:LISTED])}"
    else:
        return "", ""
    absent = [settings.hosts[rank] for rank in range(settings.nodes) if rank not in reports]
    if elapsed_s >= settings.share_limit_s and too_few(absent):
        return "", (
            f"{listed(absent)} has not written into {settings.run} within "
            f"{settings.share_limit_s:g} s, which node {settings.host} sees. Either that folder is "
            "not on a file system that all nodes share, or the step has not begun there"
        )
    if elapsed_s >= settings.start_limit_s:
        return "", (
            f"the cluster was not ready within {settings.start_limit_s:g} s, which "
            f"RAY_HEAD_START_TIMEOUT allows: {waiting}"
        )
    return waiting, ""
