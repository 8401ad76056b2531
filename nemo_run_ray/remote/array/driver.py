"""The driver of an array: a Ray program that leases elements to hosts and writes down their ends.

It holds no resources. On every node with room one host runs as many elements as the node can take;
nodes that join get one, and what a dead host had is leased again when it is proven that nothing of
it runs. Killed, the driver is started again and goes on from its journal.
"""

from __future__ import annotations

import os
import time
from typing import Collection, Mapping, Optional, Tuple

from ..attempts import JobExit
from ..group.driver import connect
from ..hosts.actors import forget_runtime_env
from ..hosts.calls import Calls, Died
from ..node.output import MAY_BE_LEFT, NO_PROCESS_LEFT, say
from ..node.rundir import jobs_folder, remove_secrets, secrets_of
from ..node.supervise import Runner
from ..node_death import NODE_DEAD_S
from ..spec import ArraySpec
from ..states import Reason
from .handing_out import feed, fulfil, take_back
from .host_pool import HostPool
from .host_reports import HostReports
from .hosts import HostStarts
from .leases import DISK_S, Leases
from .progress import ElementState
from .status import StatusFile
from .wishes import Wishes

#: Seconds between two looks at the nodes.
_LOOK_S = 1.0
#: Seconds at the end for hosts that have died or do not answer.
_CLOSE_S = 60.0
#: Seconds that a host's reports may wait for others: short elements end by the hundred.
_GATHER_S = 0.05


def run(runner: Runner, spec: ArraySpec, job: str, submission_id: str) -> int:
    """Run an array to its end; its exit code."""
    values = secrets_of(spec.secrets)
    try:
        return _run(runner, spec, job, submission_id, values)
    finally:
        remove_secrets()  # of a driver that is killed they are left: it is started again


def _run(
    runner: Runner, spec: ArraySpec, job: str, submission_id: str, values: Mapping[str, str]
) -> int:
    config = forget_runtime_env()
    folder = _log_folder(submission_id)
    path = os.path.join(jobs_folder(), job, spec.elements)
    leases = Leases(spec, path, submission_id, folder)
    status = StatusFile(folder, submission_id)
    ray = connect()
    try:
        calls = Calls(ray, _GATHER_S)
        starts = HostStarts(ray, spec, job, values, config, leases.progress.count)
        pool = HostPool(ray, spec, submission_id, starts, calls, leases)
        wishes = Wishes(ray, submission_id)
        driver = _ArrayDriver(runner, spec, leases, pool, calls, status, wishes)
        try:
            return driver.run()
        finally:
            pool.close()
            wishes.remove_all()
            status.write(leases.progress, 0, is_over=True)
            leases.close()
    finally:
        ray.shutdown()


class _ArrayDriver:
    """One array."""

    def __init__(
        self,
        runner: Runner,
        spec: ArraySpec,
        leases: Leases,
        pool: HostPool,
        calls: Calls,
        status: StatusFile,
        wishes: Wishes,
    ) -> None:
        self._runner = runner
        self._spec = spec
        self._leases = leases
        self._progress = leases.progress
        self._pool = pool
        self._calls = calls
        self._status = status
        self._wishes = wishes
        self._look_at = 0.0
        self._reports = HostReports(leases, pool, calls)
        self._settled_at: Optional[float] = None
        #: Why no more is leased, in words; empty when the job was cancelled.
        self._stopped_by: Optional[str] = None

    def run(self) -> int:
        """Run it to its end; the exit code."""
        self._runner.left_on = None  # until all hosts have ended
        if self._leases.goes_on:
            ended, count = self._progress.ended_count, self._progress.count
            say(f"the driver goes on: {ended} of {count} elements have ended")
        while not self._is_done():
            self._turn()
        self._give_up()
        is_written = self._write_all()
        code, ending = self._outcome(is_written)
        self._close(is_written)
        left_on = self._left_on()
        left = f"{MAY_BE_LEFT} {', and '.join(left_on)}" if left_on else ""
        left = left or (NO_PROCESS_LEFT if self._runner.cancelled else "")
        self._runner.ending = "; ".join(filter(None, (ending, left)))
        self._runner.left_on = left_on
        return code

    def _turn(self) -> None:
        self._obey()
        self._calls.repeat()
        now = time.monotonic()
        self._pool.let_hosts_end(now)
        if now >= self._look_at:
            self._look_at = now + _LOOK_S
            fulfil(self._wishes, self._leases, self._pool, self._calls)
            take_back(self._leases, self._pool, self._calls)
            try:
                self._pool.look(now, self._progress.number(ElementState.WAITING))
            except OSError as error:  # a full disk: no host is started meanwhile
                say(f"the head cannot write down a new host: {error}")
                self._look_at = now + DISK_S
        for answer in self._calls.answers():
            if isinstance(answer, Died):
                self._reports.died(answer)
            else:
                self._reports.hear(answer)
        self._check_failures()
        if self._settled_at is None and (self._is_stopped or self._progress.is_settled):
            self._settled_at = now
        if not self._is_stopped and self._leases.can_write:
            feed(self._leases, self._pool, self._calls)
        busy = (min(len(host.in_hand), host.slots) for host in self._pool.hosts.values())
        self._status.write(self._progress, sum(busy))

    # ------------------------------------------------------------------ the end

    @property
    def _is_stopped(self) -> bool:
        return self._stopped_by is not None

    def _is_done(self) -> bool:
        """Whether all has ended; what dead hosts have left is not waited for without a bound."""
        if self._settled_at is None:
            return False
        if self._pool.has_ended and (self._is_stopped or self._progress.is_over):
            return True
        return time.monotonic() >= self._settled_at + self._spec.grace_s + _CLOSE_S

    def _give_up(self) -> None:
        """Wait no longer for what does not end on hosts, and for what dead ones have left."""
        for host in list(self._pool.hosts.values()):
            if host.in_hand or host.sweeps:
                self._pool.give_up(host)
        for held in self._pool.unproven.abandon():
            self._leases.leave_all(held)

    def _close(self, is_written: bool) -> None:
        """End all hosts, and what a host has left that has died meanwhile or does not answer.

        They remove their notes when the head's disk has the same.
        """
        is_given_up = self._pool.unproven or not is_written
        until = time.monotonic() + (0.0 if is_given_up else _CLOSE_S)
        self._pool.close()
        while self._pool.left_on and time.monotonic() < until:
            self._turn()

    def _outcome(self, is_written: bool) -> Tuple[int, str]:
        """The exit code, and how the array ended in words."""
        failed = self._progress.number(ElementState.FAILED)
        succeeded = self._progress.number(ElementState.SUCCEEDED)
        say(f"{succeeded} of {self._progress.count} elements succeeded, {failed} failed")
        if not is_written:
            say("the head's disk has not taken how the last elements have ended, or their results")
        if self._reports.broken is not None:
            cause, words = self._reports.broken
            self._runner.cause = cause.name
            return 1, words
        if self._stopped_by == "":
            self._runner.cancelled, self._runner.cause = True, Reason.CANCELLED.name
            return 143, "cancelled"
        self._runner.cause = (Reason.EXIT_CODE if failed or not is_written else Reason.NONE).name
        if not is_written:
            return 1, "exit code 1"
        code = JobExit.SOME_FAILED if failed else 0
        return code, f"exit code {code}"

    def _write_all(self) -> bool:
        """Wait for the head's disk as long as for dead hosts; whether it has all."""
        until = time.monotonic() + _CLOSE_S
        while not (self._leases.can_write and self._leases.commit()):
            if self._reports.broken is not None or time.monotonic() >= until:
                return False
            self._obey()
            if self._stopped_by == "":  # nobody waits for the rest of it
                return False
            time.sleep(_LOOK_S)
        return True

    def _left_on(self) -> Tuple[str, ...]:
        """Where processes may be left, in words; empty when it is proven that there is none."""
        dead, others = self._pool.unproven.unconfirmed, self._pool.left_on
        words = []
        if dead:
            nodes = _names(dead)
            words.append(f"for {NODE_DEAD_S:.0f} s on {nodes}, which Ray counts as dead")
        if others:
            words.append(f"on {_names(others)}, where nothing says that all have ended")
        return tuple(words)

    def _obey(self) -> None:
        order = self._runner.order()
        if order == b"":
            say("our first process was killed; Ray ends what the array runs")
            os._exit(1)  # with the driver end its actors, and with them all processes
        if order is not None:
            self._stop("")

    def _stop(self, why: str) -> None:
        """End what runs, and lease no more."""
        if not self._is_stopped:
            self._stopped_by = why
            self._progress.cancel_waiting()
            self._pool.end()

    def _check_failures(self) -> None:
        if self._reports.broken is not None and not self._is_stopped:
            self._stop(self._reports.broken[1])
        failed, limit = self._progress.number(ElementState.FAILED), self._spec.max_failures
        if limit is not None and failed > limit and not self._is_stopped:
            words = f"more than {limit} elements have failed (max_failures)"
            say(f"ending the array: {words}")
            self._stop(words)


def _names(node_ids: Collection[str]) -> str:
    """Nodes as a line of a log names them."""
    return ", ".join(sorted(node_id[:12] for node_id in node_ids))


def _log_folder(submission_id: str) -> Optional[str]:
    """Ray's folder of logs; ``None`` when the output goes elsewhere."""
    log = os.readlink("/proc/self/fd/1")
    is_rays = os.path.basename(log) == f"job-driver-{submission_id}.log"
    return os.path.dirname(log) if is_rays else None
