"""The driver of an array: a Ray program that leases elements to hosts and writes down their ends.

It holds no resources. On every node with room one host runs as many elements as the node can take;
nodes that join get one, and what a dead host had is leased again when it is proven that nothing of
it runs. Killed, the driver is started again and continues from its journal.

``ray`` is imported late; ``_free_of`` asks it for what each node has free.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from contextlib import suppress
from typing import Any, Callable, Dict, List, Mapping, Optional, Set, Tuple

from ..files import write_file
from ..fit import Node, ResourceRequest, matches, nodes_of, slots, why_not
from ..group.driver import connect
from ..hosts.actors import forget_runtime_env
from ..hosts.calls import Answer, Calls, Died, Pulled
from ..node.output import MAY_BE_LEFT, NO_PROCESS_LEFT, say, write
from ..node.rundir import jobs_folder, remove_secrets, secrets_of
from ..node.supervise import Runner
from ..spec import ArrayRows, ArraySpec, status_file_name
from ..status import STATES_FILE, JobExit, Reason, cause_of, file_of, node_dead_s
from .cancel_request import CancelRequests, log_folder
from .elements import ArrayProgress, ElementState, HostRecord, Leases
from .hosts import Backoff, Host, HostStarts, HostState, hosts_to_start

#: Seconds for which a host gets no elements whose node has no room for another process.
_FULL_S = 30.0
#: Seconds between two looks at the nodes, and two attempts to write to a disk that is full.
_LOOK_S = 1.0
#: Seconds at the end, beyond the grace period, for hosts that have died or do not answer.
_CLOSE_S = 60.0
#: Seconds that a host's reports may wait for others: short elements end by the hundred.
_GATHER_S = 0.05
#: Hosts that die on a node without a reason before it counts as one that cannot run elements; any
#: may be killed once. And such nodes that stand for all those that no host could be tried on.
_DEATHS_MAX, _NODES_MAX = 5, 3
#: Seconds between two lines of progress, and two that say that the array waits for resources.
_TELL_S = 30.0
#: Seconds beyond the grace period until a host is given up that was told to end or to leave.
_END_MARGIN_S = 30.0
#: Seconds until dead hosts are swept again, and until an answer of a sweep counts as lost.
_SWEEP_AGAIN_S, _SWEEP_MAX_S = 5.0, 120.0
#: Seconds between two writes of a status file; that of all elements' states may take longer, and
#: is written so seldom that it costs the driver a twentieth of its time.
_WRITE_S, _PAUSE = 1.0, 20
#: Writes over which the rate is measured.
_RATE_ROWS = 30


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
    requests = CancelRequests(folder, submission_id)
    ray = connect()
    try:
        starts = HostStarts(ray, spec, job, values, config, leases.progress.count)
        calls = Calls(ray, _GATHER_S)
        driver = ArrayDriver(runner, spec, leases, ray, starts, calls, status, requests, _free_of)
        return driver.run()
    finally:
        requests.remove_all()
        leases.close()
        ray.shutdown()


def _free_of(ray: Any) -> Dict[str, Dict[str, float]]:
    """The free resources of every node."""
    from ray.autoscaler.v2.sdk import get_cluster_status

    try:
        status = get_cluster_status(ray.get_runtime_context().gcs_address)
    except ray.exceptions.RayError as error:  # no host is started meanwhile
        say(f"Ray does not say what its nodes have free: {error}")
        return {}
    return {
        node.node_id: {row.resource_name: row.total - row.used for row in node.resource_usage.usage}
        for node in (*status.active_nodes, *status.idle_nodes)
    }


class ArrayDriver:
    """The driver of one array.

    Attributes:
        hosts: the living hosts by their numbers.
        dead: the dead ones, of whose notes something is to be done: whether it is proven that
            nothing of them runs.
        broken: why the array cannot be run at all; ``None`` as long as it can.
    """

    def __init__(
        self,
        runner: Runner,
        spec: ArraySpec,
        leases: Leases,
        ray: Any,
        starts: HostStarts,
        calls: Calls,
        status: StatusFile,
        requests: CancelRequests,
        free_of: Callable[[Any], Dict[str, Dict[str, float]]],
    ) -> None:
        self._runner = runner
        self._spec = spec
        self._leases = leases
        self._progress = leases.progress
        self._ray = ray
        self._starts = starts
        self._calls = calls
        self._status = status
        self._requests = requests
        self._free_of = free_of
        self._look_at = self._tell_at = 0.0
        self._nodes: Dict[str, Node] = {}
        self._refusals = Backoff()
        self._cannot: Set[str] = set()  # nodes that cannot run elements
        self._dead_since: Dict[str, float] = {}  # nodes, as far as this driver knows
        self._sweeps: Dict[str, Tuple[float, Any]] = {}  # by node, with the time of the next one
        self._settled_at: Optional[float] = None
        #: The reason to lease no more; empty when the job was cancelled.
        self._stopped_by: Optional[str] = None
        self.hosts: Dict[int, Host] = {}
        # Also when nothing was leased: an earlier driver's hosts have folders, and may be there.
        self.dead = dict.fromkeys((record.number for record in leases.hosts), False)
        self.broken: Optional[Tuple[Reason, str]] = None
        leases.pause = self._pause

    def run(self) -> int:
        """Run it to its end; the exit code."""
        self._runner.left_on = None  # until all hosts have ended
        if self._leases.continues:
            ended, count = self._progress.ended_count, self._progress.count
            say(f"the driver continues: {ended} of {count} elements have ended")
        while not self._is_done():
            self._turn()
        is_written = self._leases.commit()
        self._progress.is_over = True
        self._status.write(self._progress, 0)
        code, ending = self._outcome(is_written)
        nodes = self._left_on()
        place = f"on {', '.join(nodes)}, where nothing says that all have ended"
        self._runner.left_on = (place,) if nodes else ()
        if nodes:
            ending = f"{ending}; {MAY_BE_LEFT} {place}"
        elif self._runner.cancelled:
            ending = f"{ending}; {NO_PROCESS_LEFT}"
        self._runner.ending = ending
        return code

    def _turn(self) -> None:
        self._obey()
        self._calls.repeat()
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + _LOOK_S
            self._cancel_requested()
            self.look(now)
        for answer in self._calls.answers():
            if isinstance(answer, Died):
                self.died(answer)
            else:
                self.hear(answer)
        self._check_failures()
        if self._settled_at is None and (self._is_stopped or self._progress.is_settled):
            self._settled_at = now
        if not self._is_stopped:
            self.lease()
        self._status.write(
            self._progress,
            sum(min(len(self._held(host)), host.slots) for host in self.hosts.values()),
        )

    def _held(self, host: Host) -> Dict[int, int]:
        return self._leases.held(host.record.number)

    def _order(self, host: Host, do: str, **values: Any) -> None:
        self._calls.order(host.replica, {"do": do, **values})

    # ------------------------------------------------------------------ leases

    def lease(self) -> None:
        """Lease elements to the hosts; the disk has it before a host hears of it."""
        leases, now = self._leases, time.monotonic()
        rows: Dict[Host, List[List[Any]]] = {}
        for host in self.hosts.values():
            may_have = host.state is HostState.READY and now >= host.rests_until
            most = leases.pace.held(host.slots) if may_have else 0
            if self._is_held_up(host, now):
                most = min(most, host.slots)
            while len(self._held(host)) < most:
                row = leases.take(host.record.number)
                if row is None:
                    break
                rows.setdefault(host, []).append(row)
        if leases.commit():
            for host, elements in rows.items():
                self._order(host, "run", elements=elements)

    def _is_held_up(self, host: Host, now: float) -> bool:
        """Whether none has ended on a host for much longer than elements take."""
        return now >= host.heard_at + self._leases.pace.patience_s

    def _cancel_requested(self) -> None:
        """Cancel what clients want, and say so to them when the disk has it."""
        for path, ranges, only_waiting in self._requests.find(self._progress.count):
            wanted = self._leases.cancel(ranges, only_waiting)
            for host in self.hosts.values():
                leased = wanted & self._held(host).items()
                if leased:
                    self._order(host, "cancel", elements=list(leased))
            if self._leases.commit():
                text = ", ".join(f"{first} to {last}" for first, last in ranges[:5])
                say(f"the user has cancelled the elements {text}; {len(wanted)} have a host")
                self._requests.remove(path)

    # ------------------------------------------------------------------ reports

    def _host_of(self, answer: Answer) -> Optional[Host]:
        """The host that has answered, unless it is given up."""
        return self.hosts.get(answer.actor.replicas[0].replica_id[1])

    def died(self, answer: Died) -> None:
        """An actor cannot answer any more."""
        host = self._host_of(answer)
        if host is not None and answer.cause is not None:
            self._refused(host, answer.words, answer.cause, has_started=False)
        elif host is not None:
            self._dead(host, answer.words)

    def hear(self, answer: Pulled) -> None:
        """Take what an actor has answered, and ask it again."""
        for first, reports in answer.reports.values():
            for number, report in enumerate(reports, start=first):
                host = self._host_of(answer)
                if host is not None and number == host.replica.seen:
                    host.replica.seen += 1
                    self._report(host, json.loads(report))
        if self._host_of(answer) is not None:
            self._calls.pull(answer.actor)

    def _report(self, host: Host, report: Mapping[str, Any]) -> None:
        kind, node, number = report["at"], host.replica.node.host, host.record.number
        if kind == "text":
            prefix = f"{report['element']}| "
            write(prefix + str(report["text"])[:-1].replace("\n", f"\n{prefix}") + "\n")
        elif kind == "ended":
            if self._leases.ended(number, report["row"]):
                host.heard_at = time.monotonic()
                self._refusals.forget(host.record.node_id)
                self._cannot.discard(host.record.node_id)
        elif kind == "prepared":
            if host.state is HostState.STARTING:
                host.state, host.deadline = HostState.READY, float("inf")
                host.heard_at = time.monotonic()
                say(f"{node} runs {host.slots} element(s) at a time")
        elif kind == "unprepared":
            self._refused(host, str(report["reason"]), Reason.NOT_STARTED, has_started=True)
        elif kind == "obstacles":
            say(
                f"on {node} the imports {', '.join(report['obstacles'])}, which a fork does "
                "not have. So each element imports anew, which takes seconds in place of "
                "milliseconds"
            )
        elif kind == "lost":
            if self._leases.give_back(report["lease"], number, has_run=True):
                element, _ = report["lease"]
                say(f"the process was killed that knew how element {element} has ended")
        elif kind == "handed_back":
            host.is_asked = False
            for lease in report["leases"]:
                self._leases.give_back(lease, number, has_run=False)
            if "reason" in report:
                host.rests_until = time.monotonic() + _FULL_S
                say(f"elements wait for other nodes, or for {_FULL_S:g} s: {report['reason']}")
        elif kind == "idle":
            # What it still has came when it was told to end.
            self._leases.give_back_all(number, has_run=False)
            self._leases.commit()  # before it removes its notes
            self._order(host, "leave")
            host.state, host.deadline = HostState.LEAVING, time.monotonic() + _END_MARGIN_S
        elif kind == "gone" and host.state is HostState.LEAVING:
            self._drop(host)
        else:  # ``failed`` or ``gone``
            self._dead(host, str(report.get("reason", "it was killed")))

    def _dead(self, host: Host, reason: str) -> None:
        """A host has died, or its actor has."""
        if host.state is HostState.STARTING:
            self._refused(host, reason, None, has_started=True)
        else:
            say(f"the host on {host.replica.node.host} has died: {reason}")
            self._give_up(host)

    def _refused(self, host: Host, reason: str, cause: Optional[Reason], has_started: bool) -> None:
        """A host cannot run elements: others may, or none can.

        Args:
            host: the host; none is started on its node for a while.
            reason: why.
            cause: the kind of the reason; ``None`` when it has just died.
            has_started: its actor was there, and may have begun something.
        """
        node_id, node = host.record.node_id, host.replica.node.host
        may_run = self._progress.has_run or any(map(self._leases.held, self._perhaps_alive))
        deaths = self._refusals.add(node_id, time.monotonic())
        if cause is not None or deaths >= _DEATHS_MAX:
            self._cannot.add(node_id)
        if has_started:
            self._give_up(host)
        else:
            self._drop(host)
        write(f"{reason}\n")
        if may_run or self.broken is not None or not self._is_hopeless():
            last = _last_line(reason)
            say(f"a host on {node} could not begin; another one is tried later: {last}")
        elif cause is Reason.RUNTIME_ENV:
            self.broken = cause, cause_of(reason)
        else:
            self.broken = Reason.NOT_STARTED, f"on {node}: {_last_line(reason)}"

    def _is_hopeless(self) -> bool:
        """Whether no node can be expected to run elements."""
        if not self._cannot or any(
            host.state is not HostState.STARTING or host.record.node_id not in self._cannot
            for host in self.hosts.values()
        ):
            return False
        role = self._spec.host
        fitting = {
            node_id
            for node_id, node in self._nodes.items()
            if matches(role.label_selector, node.labels) and slots(node.resources, role.resources)
        }
        return len(self._cannot & fitting) >= min(_NODES_MAX, len(fitting))

    # ------------------------------------------------------------------ hosts

    def look(self, now: float) -> None:
        """Start hosts where there is room, end idle ones, and prove that dead ones are dead."""
        self._nodes = {node.node_id: node for node in nodes_of(self._ray.nodes())}
        waiting = self._progress.number(ElementState.WAITING)
        for host in list(self.hosts.values()):
            held = self._held(host)
            is_ending = host.state in (HostState.ENDING, HostState.LEAVING)
            if host.record.node_id not in self._nodes or now >= host.deadline:
                self._give_up(host)
            elif not is_ending and not held and not waiting:
                self._end(host)
            elif len(held) > host.slots and self._is_held_up(host, now) and not host.is_asked:
                host.is_asked = True  # those that wait behind the ones that run are for others
                self._order(host, "hand_back", count=len(held) - host.slots)
        self._prove(now)
        if waiting and not self._is_stopped:
            self._grow(now, waiting)

    def _grow(self, now: float, wanted: int) -> None:
        hosts, role = list(self.hosts.values()), self._spec.host
        starting = [host for host in hosts if host.state is HostState.STARTING]
        wanted -= sum(host.slots for host in starting)
        if self._spec.max_in_flight is not None:
            used = sum(host.slots for host in hosts)
            used += sum(len(self._leases.held(number)) for number in self._perhaps_alive)
            wanted = min(wanted, self._spec.max_in_flight - used)
        busy = {host.record.node_id for host in starting}
        busy |= {self._leases.hosts[number].node_id for number in self._perhaps_alive}
        available = {
            node_id: resources
            for node_id, resources in self._free_of(self._ray).items()
            if node_id in self._nodes
            and node_id not in busy
            and self._refusals.is_over(node_id, now)
            and matches(role.label_selector, self._nodes[node_id].labels)
        }
        planned = hosts_to_start(available, role.resources, wanted)
        records = [self._leases.add_host(node_id) for node_id, _ in planned]
        if planned and self._leases.commit():
            for record, (node_id, count) in zip(records, planned):
                host = self._starts.start(record, self._nodes[node_id], count)
                self.hosts[record.number] = host
                self._calls.pull(host.actor)
                self._calls.order(host.replica, self._starts.prepare(host))
        if self.hosts:
            self._tell_at = now + _TELL_S
        elif now >= self._tell_at:
            self._tell_at = now + _TELL_S
            request = ResourceRequest(role.resources, role.label_selector)
            why = why_not(request, list(self._nodes.values()))
            why = why or f"no node has room now for an element, which needs {request}"
            say(f"no element can begin: {why}; waiting")

    def _end(self, host: Host) -> None:
        """Let a host end what it runs; one that has not come up ends with its actor."""
        if not host.actor.answers:
            self._drop(host)
            return
        host.state = HostState.ENDING
        host.deadline = time.monotonic() + self._spec.grace_s + _END_MARGIN_S
        self._order(host, "end")

    def _drop(self, host: Host) -> None:
        """End the actor of a host of which nothing runs."""
        self._ray.kill(host.actor.handle, no_restart=True)
        host.actor.dead = True
        del self.hosts[host.record.number]

    def _give_up(self, host: Host) -> None:
        """End the actor of a host: what it had may run until the contrary is proven."""
        self._drop(host)
        self.dead[host.record.number] = False

    # ------------------------------------------------------------------ proof

    @property
    def _perhaps_alive(self) -> List[int]:
        """The dead hosts whose processes may still run."""
        return [number for number, is_proven in self.dead.items() if not is_proven]

    def _prove(self, now: float) -> None:
        """End what dead hosts have left: by their nodes' death, or by a program on the node."""
        by_node: Dict[str, List[HostRecord]] = {}
        for number in list(self.dead):
            record = self._leases.hosts[number]
            if record.node_id in self._nodes:
                by_node.setdefault(record.node_id, []).append(record)
                continue
            # A node that was only cut off continues until its raylet has noticed.
            since = self._dead_since.setdefault(record.node_id, now)
            if not self._leases.held(number) or now >= since + node_dead_s():
                # What had begun there, nobody knows.
                self._leases.give_back_all(number, has_run=True)
                del self.dead[number]
        for node_id, records in by_node.items():
            until, sweep = self._sweeps.get(node_id, (0.0, None))
            answer = None if sweep is None else self._starts.swept(sweep)
            if answer is not None:
                until = now
                self._swept(records, answer)
                if answer["remaining"]:
                    until = now + _SWEEP_AGAIN_S
                    node = self._nodes[node_id].host
                    say(f"a dead host on {node} may still run elements: {answer['remaining']}")
                self._sweeps[node_id] = until, None
            elif now >= until:
                unproven = [record for record in records if not self.dead[record.number]]
                forgotten = [record.run_dir for record in records if record not in unproven]
                sweep = self._starts.sweep(node_id, unproven, forgotten)
                self._sweeps[node_id] = now + _SWEEP_MAX_S, sweep

    def _swept(self, records: List[HostRecord], answer: Mapping[str, Any]) -> None:
        """Take over the notes of dead hosts, of which nothing runs any more."""
        for record in records if not answer["remaining"] else ():
            if self.dead[record.number]:
                del self.dead[record.number]  # its notes are removed
        for number, ended, begun in answer["swept"]:
            before = len(self._leases.held(number))
            for row in ended:
                self._leases.ended(number, row)
            again = len(self._leases.held(number))
            for lease in begun:
                self._leases.give_back(lease, number, has_run=True)
            self._leases.give_back_all(number, has_run=False)
            if before:
                say(
                    f"nothing of a dead host runs: of {before} elements, {before - again} had "
                    f"ended, and {again} are leased again"
                )
            self.dead[number] = True
        self._leases.commit()

    # ------------------------------------------------------------------ the end

    @property
    def _is_stopped(self) -> bool:
        return self._stopped_by is not None

    def _is_done(self) -> bool:
        """Whether all has ended; what dead hosts have left is not waited for without a bound."""
        if self._settled_at is None:
            return False
        is_late = time.monotonic() >= self._settled_at + self._spec.grace_s + _CLOSE_S
        # An array that is being ended does not wait for dead nodes: nothing runs a second time.
        dead = (
            number
            for number in self.dead
            if not self._is_stopped or self._leases.hosts[number].node_id in self._nodes
        )
        return is_late or not (self.hosts or any(True for _ in dead))

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
        code = 0 if is_written else 1
        if is_written and failed:
            code = JobExit.SOME_FAILED
        self._runner.cause = (Reason.EXIT_CODE if code else Reason.NONE).name
        return code, f"exit code {code}"

    def _left_on(self) -> List[str]:
        """The nodes where processes may be left; none when the contrary is proven."""
        living = [host for host in self.hosts.values() if host.state is not HostState.LEAVING]
        numbers = {*(host.record.number for host in living), *self._perhaps_alive}
        return sorted({self._leases.hosts[number].node_id[:12] for number in numbers})

    def _obey(self) -> None:
        order = self._runner.order()
        if order == b"":
            say("our first process was killed; Ray ends what the array runs")
            os._exit(1)  # with the driver end its actors, and with them all processes
        if order is not None:
            self._stop("")

    def _pause(self) -> bool:
        """Wait a moment for the head's disk; false when nobody waits for it any longer."""
        time.sleep(_LOOK_S)
        self._obey()
        return self._stopped_by != "" and self.broken is None

    def _stop(self, why: str) -> None:
        """End what runs, and lease no more."""
        if not self._is_stopped:
            self._stopped_by = why
            self._leases.is_ending = True
            for host in list(self.hosts.values()):
                if host.state in (HostState.STARTING, HostState.READY):
                    self._end(host)

    def _check_failures(self) -> None:
        if self.broken is not None:
            self._stop(self.broken[1])
        failed, limit = self._progress.number(ElementState.FAILED), self._spec.max_failures
        if limit is not None and failed > limit and not self._is_stopped:
            reason = f"more than {limit} elements have failed (max_failures)"
            say(f"ending the array: {reason}")
            self._stop(reason)


def _last_line(reason: str) -> str:
    """Of a traceback this is the error."""
    return reason.strip().rpartition("\n")[2]


class StatusFile:
    """Files beside the job's log for clients: counts, and the states of all elements.

    Nothing that the array does is decided by these files.

    Args:
        folder: of Ray's logs.
        submission_id: of the job.
    """

    def __init__(self, folder: str, submission_id: str) -> None:
        self._folder, self._submission_id = folder, submission_id
        self._write_at = self._write_states_at = 0.0
        self._tell_at = time.monotonic() + _TELL_S
        self._seen = deque([(time.monotonic(), 0)], maxlen=_RATE_ROWS)

    def write(self, progress: ArrayProgress, running: int) -> None:
        """Show where the array is, at most once a second before its end.

        Args:
            progress: of the elements.
            running: how many slots are busy.
        """
        now, is_over = time.monotonic(), progress.is_over
        if now >= self._write_at or is_over:
            self._write_at = now + _WRITE_S
            rows = self._rows(progress, running, now)
            if now >= self._tell_at and not is_over:
                self._tell_at = now + _TELL_S
                say(_progress_line(rows))
            self._replace(status_file_name(self._submission_id), json.dumps(rows))
        if now >= self._write_states_at or is_over:
            states = "".join(json.dumps(stretch) + "\n" for stretch in progress.stretches())
            self._replace(file_of(self._submission_id, STATES_FILE), states)
            self._write_states_at = now + _WRITE_S + _PAUSE * (time.monotonic() - now)

    def _replace(self, name: str, content: str) -> None:
        with suppress(OSError):  # a full disk: the array continues, and is not shown
            write_file(os.path.join(self._folder, name), content)

    def _rows(self, progress: ArrayProgress, running: int, now: float) -> ArrayRows:
        ended = progress.ended_count
        self._seen.append((now, ended))
        first_at, first = self._seen[0]
        rate = (ended - first) / (now - first_at) if now > first_at else 0.0
        left = progress.count - ended
        return {
            "elements": progress.count,
            "succeeded": progress.number(ElementState.SUCCEEDED),
            "failed": progress.number(ElementState.FAILED),
            "cancelled": progress.number(ElementState.CANCELLED),
            "running": running,
            "waiting": left - running,
            "elements_per_s": round(rate, 3),
            "left_s": round(left / rate, 1) if rate > 0 else None,
            "failures": [*progress.failures],
        }


def _progress_line(rows: ArrayRows) -> str:
    """The progress, for those who follow the log."""
    over = rows["succeeded"] + rows["failed"] + rows["cancelled"]
    line = f"{over} of {rows['elements']} elements are over, {rows['failed']} failed"
    if rows["left_s"] is None:
        return line
    return f"{line}; {rows['elements_per_s']:.3g} elements/s, about {rows['left_s']:.0f} s left"
