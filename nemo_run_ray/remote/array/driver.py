"""The driver of an array: a Ray program that leases elements to hosts and writes down their ends.

It holds no resources. On every node with room one host runs as many elements as the node can take;
nodes that join get one, and what a dead host had is leased again when it is proven that nothing of
it runs. Killed, the driver is started again and continues from its journal.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any, Collection, Dict, List, Mapping, Optional, Set, Tuple

from ..group.driver import connect
from ..hosts.actors import forget_runtime_env, name
from ..hosts.calls import Calls, Died, Pulled
from ..node.output import MAY_BE_LEFT, NO_PROCESS_LEFT, say, write
from ..node.rundir import jobs_folder, remove_secrets, secrets_of
from ..node.supervise import Runner
from ..spec import ArraySpec
from ..status import NODE_DEAD_S, JobExit, Reason, cause_of
from .cancel_request import CancelRequests, log_folder
from .elements import DISK_S, ElementState, Lease, Leases
from .hosts import Host, HostPool, HostStarts, HostState
from .status import StatusFile

#: Seconds for which a host gets no elements whose node has no room for another process.
_FULL_S = 30.0
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
    folder = log_folder(submission_id)
    path = os.path.join(jobs_folder(), job, spec.elements)
    leases = Leases(spec, path, submission_id, folder)
    status = StatusFile(folder, submission_id)
    ray = connect()
    try:
        calls = Calls(ray, _GATHER_S)
        starts = HostStarts(ray, spec, job, values, config, leases.progress.count)
        pool = HostPool(ray, spec, submission_id, starts, calls, leases)
        requests = CancelRequests(folder, submission_id)
        try:
            return ArrayDriver(runner, spec, leases, pool, calls, status, requests).run()
        finally:
            requests.remove_all()
            status.write(leases.progress, 0, is_over=True)
            leases.close()
    finally:
        ray.shutdown()


class ArrayDriver:
    """The driver of one array.

    Attributes:
        broken: why the array cannot be run at all; ``None`` as long as it can.
    """

    def __init__(
        self,
        runner: Runner,
        spec: ArraySpec,
        leases: Leases,
        pool: HostPool,
        calls: Calls,
        status: StatusFile,
        requests: CancelRequests,
    ) -> None:
        self._runner = runner
        self._spec = spec
        self._leases = leases
        self._progress = leases.progress
        self._pool = pool
        self._calls = calls
        self._status = status
        self._requests = requests
        self._look_at = 0.0
        self._written = ""  # the last reason of a host that cannot run elements
        self.broken: Optional[Tuple[Reason, str]] = None
        self._settled_at: Optional[float] = None
        #: The reason to lease no more; empty when the job was cancelled.
        self._stopped_by: Optional[str] = None

    def run(self) -> int:
        """Run it to its end; the exit code."""
        self._runner.left_on = None  # until all hosts have ended
        if self._leases.continues:
            ended, count = self._progress.ended_count, self._progress.count
            say(f"the driver continues: {ended} of {count} elements have ended")
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
        if now >= self._look_at:
            self._look_at = now + _LOOK_S
            self._cancel_requested()
            self.take_back()
            try:
                self._pool.look(now, self._progress.number(ElementState.WAITING))
            except OSError as error:  # a full disk: no host is started meanwhile
                say(f"the head cannot write down a new host: {error}")
                self._look_at = now + DISK_S
        for answer in self._calls.answers():
            if isinstance(answer, Died):
                self.died(answer)
            else:
                self.hear(answer)
        self._check_failures()
        if self._settled_at is None and (self._is_stopped or self._progress.is_settled):
            self._settled_at = now
        if not self._is_stopped and self._leases.can_write:
            self.lease()
        busy = (min(len(host.in_hand), host.slots) for host in self._pool.hosts.values())
        self._status.write(self._progress, sum(busy))

    # ------------------------------------------------------------------ leases

    def lease(self) -> None:
        """Lease elements to the hosts; the disk has it before a host hears of it."""
        leases, now = self._leases, time.monotonic()
        rows: Dict[int, List[List[Any]]] = {}
        for number, host in self._pool.hosts.items():
            may_have = host.state is HostState.READY and now >= host.rests_until
            most = leases.pace.held(host.slots) if may_have else 0
            if self._is_held_up(host, now):
                most = min(most, host.slots)
            while len(host.in_hand) < most and (row := leases.take(number)) is not None:
                host.in_hand[row[0]] = row[1]
                rows.setdefault(number, []).append(row)
        is_written = leases.commit()
        for number in rows:
            host = self._pool.hosts[number]
            if is_written:
                self._calls.order(host.replica, {"do": "run", "elements": rows[number]})
                continue
            for element, attempt, _ in rows[number]:
                del host.in_hand[element]
                leases.give_back(Lease(element, attempt), number, has_run=False)

    def take_back(self) -> None:
        """Let hosts on which no element ends hand back those that wait behind the ones that run."""
        now = time.monotonic()
        for host in self._pool.hosts.values():
            waiting = len(host.in_hand) - host.slots
            may_be_asked = host.state is HostState.READY and not host.is_asked
            if may_be_asked and waiting > 0 and self._is_held_up(host, now):
                host.is_asked = True
                self._calls.order(host.replica, {"do": "hand_back", "count": waiting})

    def _is_held_up(self, host: Host, now: float) -> bool:
        """Whether none has ended on a host for much longer than elements take."""
        return now >= host.heard_at + self._leases.pace.patience_s

    def _cancel_requested(self) -> None:
        """Cancel what clients want, and say so to them when the disk has it."""
        if not self._leases.can_write:
            return
        for request in self._requests.find(self._progress.count):
            wanted: Set[Lease] = set()
            for first, last in request.ranges:
                wanted |= set(self._leases.cancel(range(first, last + 1), request.only_waiting))
            for host in self._pool.hosts.values():
                leased = [lease for lease in host.in_hand.items() if Lease(*lease) in wanted]
                if leased:
                    self._calls.order(host.replica, {"do": "cancel", "elements": leased})
            if self._leases.commit():
                ranges = ", ".join(f"{first} to {last}" for first, last in request.ranges[:5])
                say(f"the user has cancelled the elements {ranges}; {len(wanted)} have a host")
                self._requests.remove(request.path)

    # ------------------------------------------------------------------ reports

    def died(self, answer: Died) -> None:
        """An actor cannot answer any more."""
        for host in self._pool.of(answer.actor):
            if answer.is_env:
                self._refused(host, answer.words, Reason.RUNTIME_ENV, has_started=False)
            elif answer.is_start:
                self._refused(host, answer.words, Reason.NOT_STARTED, has_started=False)
            else:
                self._dead(host, answer.words)

    def hear(self, answer: Pulled) -> None:
        """Take what an actor has answered, and ask it again."""
        for host in self._pool.of(answer.actor):
            first, reports = answer.reports.get(name(host.replica.replica_id), (0, []))
            for number, report in enumerate(reports, start=first):
                if number == host.replica.seen and host.record.number in self._pool.hosts:
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
            row = report["row"]
            if host.takes_back(Lease(*row[:2])):
                host.heard_at = time.monotonic()
                self._pool.can_run(host.record.node_id)
                self._leases.ended(host.record.number, row)
        elif kind == "prepared":
            host.state, host.heard_at = HostState.READY, time.monotonic()
            say(f"{node} runs {host.slots} element(s) at a time")
        elif kind == "unprepared":
            self._refused(host, str(report["reason"]), Reason.NOT_STARTED, has_started=True)
        elif kind == "obstacles":
            say(
                f"on {node} the imports {', and '.join(report['obstacles'])}, which a fork does "
                "not have. So each element imports anew, which takes seconds in place of "
                "milliseconds"
            )
        elif kind == "swept":
            self._pool.swept(host, report)
        elif kind == "unswept":
            say(f"a host on {node} is dead, and this does not end there: {report['processes']}")
        elif kind == "stuck":
            say(
                f"element {report['element']} on {node} has ended, but not what it has left, such "
                f"as processes of the group {report['group']}"
            )
        elif kind == "lost":
            lease = Lease(*report["lease"])
            if host.takes_back(lease):
                say(f"the process was killed that knew how element {lease.element} has ended")
                self._leases.give_back(lease, host.record.number, has_run=True)
        elif kind == "handed_back":
            host.is_asked = False
            for lease in (Lease(*row) for row in report["leases"]):
                if host.takes_back(lease):
                    self._leases.give_back(lease, host.record.number, has_run=False)
            if "reason" in report:
                host.rests_until = time.monotonic() + _FULL_S
                say(f"elements wait for other nodes, or for {_FULL_S:g} s: {report['reason']}")
        elif kind == "idle":
            self._pool.idle(host)
        elif kind == "left":
            host.state = HostState.LEFT
        elif kind == "gone" and host.state is HostState.LEFT:
            self._pool.gone(host)
        else:  # ``failed`` or ``gone``
            self._dead(host, str(report.get("reason", "it was killed")))

    def _dead(self, host: Host, reason: str) -> None:
        """A host has died, or its actor has."""
        if host.state is HostState.STARTING:
            self._refused(host, reason, None, has_started=True)
            return
        say(f"the host on {host.replica.node.host} has died: {reason}")
        self._pool.give_up(host)

    def _refused(self, host: Host, reason: str, cause: Optional[Reason], has_started: bool) -> None:
        """A host cannot run elements: others may, or none can."""
        node = host.replica.node.host
        may_run = self._pool.running_on_dead > 0 or self._leases.progress.has_run
        self._pool.refused(host, cause is not None, has_started)
        if host.slots and not may_run and self._pool.is_hopeless:
            if self.broken is None:
                write(f"{reason}\n")
                is_env = cause is Reason.RUNTIME_ENV
                last = cause_of(reason) if is_env else f"on {node}: {_last_line(reason)}"
                self.broken = Reason.RUNTIME_ENV if is_env else Reason.NOT_STARTED, last
            return
        if reason != self._written:
            write(f"{reason}\n")
            self._written = reason
        say(f"a host on {node} could not begin; another one is tried later: {_last_line(reason)}")

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
        for held in self._pool.dead.values():
            self._leases.leave_all(held)

    def _close(self, is_written: bool) -> None:
        """End all hosts, and what a host has left that has died meanwhile or does not answer.

        They remove their notes when the head's disk has the same.
        """
        waits_for_dead = not self._pool.dead
        until = time.monotonic() + (_CLOSE_S if is_written else 0.0)
        self._pool.close()
        while self._pool.is_leaving or (waits_for_dead and self._pool.dead):
            if time.monotonic() >= until:
                break
            self._turn()

    def _outcome(self, is_written: bool) -> Tuple[int, str]:
        """The exit code, and how the array ended in words."""
        failed = self._progress.number(ElementState.FAILED)
        succeeded = self._progress.number(ElementState.SUCCEEDED)
        say(f"{succeeded} of {self._progress.count} elements succeeded, {failed} failed")
        if not is_written:
            say("the head's disk has not taken how the last elements have ended, or their results")
        if self.broken is not None:
            cause, reason = self.broken
            self._runner.cause = cause.name
            return 1, reason
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
            if self.broken is not None or time.monotonic() >= until:
                return False
            self._obey()
            if self._stopped_by == "":  # nobody waits for the rest of it
                return False
            time.sleep(_LOOK_S)
        return True

    def _left_on(self) -> Tuple[str, ...]:
        """The nodes where processes may be left, in words; none when that is proven."""
        dead, others = self._pool.unconfirmed, self._pool.node_ids
        places = []
        if dead:
            nodes = _names(dead)
            places.append(f"for {NODE_DEAD_S:.0f} s on {nodes}, which Ray counts as dead")
        if others:
            places.append(f"on {_names(others)}, where nothing says that all have ended")
        return tuple(places)

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
        if self.broken is not None and not self._is_stopped:
            self._stop(self.broken[1])
        failed, limit = self._progress.number(ElementState.FAILED), self._spec.max_failures
        if limit is not None and failed > limit and not self._is_stopped:
            reason = f"more than {limit} elements have failed (max_failures)"
            say(f"ending the array: {reason}")
            self._stop(reason)


def _last_line(reason: str) -> str:
    """Of a traceback this is the error."""
    return reason.strip().rpartition("\n")[2]


def _names(node_ids: Collection[str]) -> str:
    """Nodes as a line of a log names them."""
    return ", ".join(sorted(node_id[:12] for node_id in node_ids))
