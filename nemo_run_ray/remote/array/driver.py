"""The driver of an array: a Ray program that leases elements to hosts and writes down their ends.

It holds no resources. On every node with room one host runs as many elements as the node can take;
nodes that join get one, and what a dead host had is leased again when it is proven that nothing of
it runs. Killed, the driver is started again and goes on from its journal.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any, List, Mapping, Optional, Sequence, Tuple

from ..env_error import cause_of
from ..group.actors import forget_runtime_env
from ..group.calls import Calls, Died, Pulled
from ..group.driver import connect
from ..group.machine import name
from ..node.output import NO_PROCESS_LEFT, say, write
from ..node.process import Runner
from ..node.rundir import jobs_folder, remove_secrets, secrets_of
from ..node_death import NODE_DEAD_S
from ..spec import ArraySpec
from ..states import Cause
from .handing_out import feed, fulfil
from .host_pool import HostPool
from .hosts import Host, HostStarts
from .leases import DISK_S, Leases
from .progress import ElementState, Lease
from .status_file import StatusFile
from .wishes import Wishes

#: Exit code when elements have failed, and when tasks were cancelled that others may depend on.
SOME_FAILED, SOME_CANCELLED = 8, 9
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
        #: Why no more is leased, in words; empty when the job was cancelled.
        self._stopped_by: Optional[str] = None
        self._broken: Optional[Tuple[Cause, str]] = None

    def run(self) -> int:
        """Run it to its end; the exit code."""
        if self._leases.goes_on:
            ended, count = self._progress.ended_count, self._progress.count
            say(f"the driver goes on: {ended} of {count} elements have ended")
        while not self._is_done():
            self._turn()
        code = self._outcome()
        self._close()
        return code

    def _turn(self) -> None:
        self._obey()
        self._calls.repeat()
        now = time.monotonic()
        self._pool.let_hosts_end(now)
        if now >= self._look_at:
            self._look_at = now + _LOOK_S
            fulfil(self._wishes, self._leases, self._pool)
            try:
                self._pool.look(now, self._progress.number(ElementState.WAITING))
            except OSError as error:  # a full disk: no host is started meanwhile
                say(f"the head cannot write down a new host: {error}")
                self._look_at = now + DISK_S
        for answer in self._calls.answers():
            if isinstance(answer, Died):
                self._died(answer)
            else:
                self._hear(answer)
        self._check_failures()
        if self._stopped_by is None and self._leases.can_write:
            feed(self._leases, self._pool, self._calls)
        busy = (min(len(host.in_hand), host.slots) for host in self._pool.hosts.values())
        self._status.write(self._progress, sum(busy), is_over=False)

    # ------------------------------------------------------------------ the end

    def _is_done(self) -> bool:
        if self._stopped_by is not None:
            return self._pool.has_ended
        return self._progress.is_over and self._pool.are_proven

    def _close(self) -> None:
        """End all hosts, and what a host has left that has died meanwhile or does not answer."""
        self._pool.close()
        until = time.monotonic() + _CLOSE_S
        while not self._pool.is_empty and time.monotonic() < until:
            self._turn()
        if not self._pool.is_empty:
            left = self._pool.unproven.records()
            nodes = ", ".join(sorted({record.node_id[:12] for record in left}))
            say(f"nothing says that all processes and folders of the array are gone on {nodes}")

    def _outcome(self) -> int:
        self._leases.commit()
        failed = self._progress.number(ElementState.FAILED)
        succeeded = self._progress.number(ElementState.SUCCEEDED)
        say(f"{succeeded} of {self._progress.count} elements succeeded, {failed} failed")
        if self._broken is not None:
            cause, words = self._broken
            self._runner.ending = f"[{cause.value}] {words}"
            return 1
        if self._stopped_by == "":
            self._runner.cancelled = True
            self._runner.ending = f"cancelled; {self._left()}"
            return 143
        code = SOME_FAILED if failed else 0
        if not code and self._spec.is_of_tasks and succeeded < self._progress.count:
            code = SOME_CANCELLED  # what depends on the tasks must not start
        self._runner.ending = f"exit code {code}"
        return code

    def _left(self) -> str:
        """What is known of processes that may be left, in words."""
        if not self._pool.unproven.unconfirmed:
            return NO_PROCESS_LEFT
        nodes = ", ".join(sorted(node[:12] for node in self._pool.unproven.unconfirmed))
        return f"Ray counts {nodes} as dead, where processes may go on for {NODE_DEAD_S:.0f} s"

    def _obey(self) -> None:
        order = self._runner.order()
        if order == b"":
            say("our first process was killed; Ray ends what the array runs")
            os._exit(1)  # with the driver end its actors, and with them all processes
        if order is not None:
            self._stop("")

    def _stop(self, why: str) -> None:
        """End what runs, and lease no more."""
        if self._stopped_by is None:
            self._stopped_by = why
            self._progress.cancel_waiting()
            self._pool.end()

    def _check_failures(self) -> None:
        failed, limit = self._progress.number(ElementState.FAILED), self._spec.max_failures
        if limit is not None and failed > limit and self._stopped_by is None:
            words = f"more than {limit} elements have failed (max_failures)"
            say(f"ending the array: {words}")
            self._stop(words)

    def _break(self, cause: Cause, words: str) -> None:
        """The array cannot be run at all."""
        if self._broken is None:
            last = words.strip().splitlines()[-1]  # of a traceback it is the error
            self._broken = cause, cause_of(words) if cause is Cause.RUNTIME_ENV else last
            write(f"{words}\n")
            self._stop(words)

    # ------------------------------------------------------------------ what the hosts say

    def _died(self, answer: Died) -> None:
        for host in self._pool.of(answer.actor):
            if answer.is_env:
                self._break(Cause.RUNTIME_ENV, answer.words)
            self._pool.lost(host)

    def _hear(self, answer: Pulled) -> None:
        for host in self._pool.of(answer.actor):
            first, reports = answer.reports.get(name(host.replica.replica_id), (0, []))
            for number, report in enumerate(reports, start=first):
                if number == host.replica.seen:
                    host.replica.seen += 1
                    self._report(host, json.loads(report))
        for _ in self._pool.of(answer.actor):  # it may be given up by now
            self._calls.pull(answer.actor)

    def _report(self, host: Host, report: Mapping[str, Any]) -> None:
        kind, node = report["at"], host.replica.node.host
        if kind == "text":
            prefix = f"{report['element']}| "
            write(prefix + str(report["text"])[:-1].replace("\n", f"\n{prefix}") + "\n")
        elif kind == "ended":
            self._ended(host, report["row"])
        elif kind == "prepared":
            host.is_ready = True
            say(f"{node} runs {host.slots} element(s) at a time")
        elif kind == "unprepared":
            self._break(Cause.NOT_PREPARED, f"on {node}: {report['words']}")
        elif kind == "obstacles":
            say(_of_obstacles(node, report["words"], report["forks"], self._spec.is_of_tasks))
        elif kind == "swept":
            self._pool.swept(host, report)
        elif kind == "unswept":
            say(f"a host on {node} is dead, and this does not end there: {report['words']}")
        elif kind == "stuck":
            say(f"element {report['element']} on {node} has ended, but not {report['words']}")
        elif kind == "lost":
            self._lost(host, Lease(*report["lease"]))
        elif kind == "idle":
            self._pool.idle(host)
        else:  # ``failed`` or ``gone``
            say(f"the host on {node} has died: {report.get('words', 'it was killed')}")
            self._pool.give_up(host)

    def _ended(self, host: Host, row: List[Any]) -> None:
        element, attempt, code = row[:3]
        host.in_hand.pop(element, None)
        if self._stopped_by is not None and code:
            self._progress.cancelled(Lease(element, attempt))
        else:
            self._leases.ended(host.record.number, row)

    def _lost(self, host: Host, lease: Lease) -> None:
        """An element has ended, and nobody knows how."""
        host.in_hand.pop(lease.element, None)
        if self._stopped_by is not None:
            self._progress.cancelled(lease)
            return
        say(f"the process was killed that knew how element {lease.element} has ended")
        self._leases.give_back(lease, host.record.number, has_run=True)


def _log_folder(submission_id: str) -> Optional[str]:
    """Ray's folder of logs; ``None`` when the output goes elsewhere."""
    log = os.readlink("/proc/self/fd/1")
    is_rays = os.path.basename(log) == f"job-driver-{submission_id}.log"
    return os.path.dirname(log) if is_rays else None


def _of_obstacles(node: str, obstacles: Sequence[str], forks: bool, are_tasks: bool) -> str:
    """What is said of imports that begin something which a fork does not have."""
    words = f"on {node} the imports {', and '.join(obstacles)}, which a fork does not have"
    if are_tasks:
        return f"{words}. So each task imports anew, which takes seconds in place of milliseconds"
    if forks:
        return (
            f"{words}. With array(..., isolation='process') each element has a process of its own"
        )
    return f"{words}. So each element imports anew; array(..., isolation='fork') forks all the same"
