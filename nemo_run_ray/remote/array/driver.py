"""The driver of an array: a Ray program that leases elements to hosts and writes down their ends.

It holds no resources. On every node with room, also on one that joins, a host runs as many elements
as fit; another host starts there when there is more room. What a dead host had is leased again when
it is proven that nothing of it runs. Killed, the driver is started again and continues from its
journal.

``ray`` is imported late; ``HostStarts.free`` asks it for what each node has free.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from time import monotonic
from typing import Any, Dict, List, Mapping, Sequence, Set, Tuple

from ..end_record import MAY_BE_LEFT, NO_PROCESS_LEFT
from ..files import log_folder, open_own, write_file
from ..fit import TOLERANCE, Amounts, Node, ResourceRequest, matches, nodes_of, slots, why_not
from ..fit import hosts as nodes_that_fit
from ..hosts.actors import Actors, ReplicaHandle, is_cancelled
from ..hosts.relay import PROGRAM
from ..node.output import say, write, write_lines
from ..node.rundir import jobs_folder, read_secrets, remove_secrets
from ..node.supervise import Runner
from ..spec import ArrayRows, ArraySpec, Json, status_file_name
from ..status import STATES_FILE, JobExit, Reason, cause_of, file_of, node_dead_s
from .cancel_request import request_paths
from .elements import ElementState, HostRecord, Leases

#: Seconds between two looks at the nodes, and two attempts to write to a disk that is full.
_LOOK_S = 1.0
#: Seconds at the end, beyond the grace period, for hosts that have died or do not answer.
_CLOSE_S = 60.0
#: Seconds for which a full disk of the head is waited for: elements that run meanwhile continue.
_DISK_S = 3600.0
#: Hosts that die on a node without a reason before it counts as one that cannot run elements; any
#: may be killed once.
_DEATHS_MAX = 5
#: The array gives up after this many nodes that cannot run elements, or failures of the runtime
#: environment, while other jobs hold all other nodes.
_REFUSALS_MAX = 3
#: Seconds until a node is tried again where no host could begin, at first and at most.
_AGAIN_S, _AGAIN_MAX_S = 5.0, 300.0
#: Seconds between two lines of progress, and two that say that the array waits for resources.
_TELL_S = 30.0
#: Seconds until a host is given up that has not come up: others may have got its resources.
_PLACED_S = 900.0
#: Seconds beyond the grace period until a host is given up that was told to end or to leave.
_END_MARGIN_S = 30.0
#: Seconds until dead hosts are swept again.
_SWEEP_AGAIN_S = 5.0
#: Seconds between two writes of the status files, plus ``_PAUSE`` times the duration of the last
#: write.
_WRITE_S, _PAUSE = 1.0, 20
#: Writes over which the rate is measured.
_RATE_ROWS = 30


def run(runner: Runner, spec: ArraySpec, job: str, submission_id: str) -> int:
    """Run an array to its end; its exit code."""
    try:
        folder = log_folder()
        leases = Leases(spec, f"{jobs_folder()}/{job}/{spec.elements}", submission_id, folder)
        starts = HostStarts(spec, job, read_secrets(spec.secrets), leases.progress.count)
        try:
            code = ArrayDriver(runner, spec, leases, starts, folder, submission_id).run()
            starts.wait()
            return code
        finally:
            for late in request_paths(folder, submission_id):
                with suppress(OSError):
                    os.remove(late)
            starts.actors.ray.shutdown()
    finally:
        remove_secrets()  # of a driver that is killed they are left: it is started again


class HostState(Enum):
    """The state of an element host."""

    #: It was started, and is not prepared yet.
    STARTING = "starting"
    READY = "ready"
    #: It was told to end what it runs, and to start nothing.
    ENDING = "ending"
    #: It has ended everything, and was told to remove its notes and folders.
    LEAVING = "leaving"


@dataclass(eq=False)
class Host(ReplicaHandle):
    """One element host, as the driver knows it.

    Attributes:
        slots: how many elements it runs at a time.
        is_slow: it has returned elements, and gets no others until one has ended there.
    """

    slots: int = 0
    is_slow: bool = False
    state: HostState = HostState.STARTING

    @property
    def number(self) -> int:
        """Its number among all hosts of the array."""
        return self.replica_id[1]


class HostStarts:
    """Starts hosts, and programs that end what dead ones have left."""

    def __init__(self, spec: ArraySpec, job: str, secrets: Mapping[str, str], count: int):
        self._role, self.actors = spec.host, Actors(job, secrets, gather_s=0.05)
        self.actors.pack()
        self._ray = self.actors.ray
        self._order = {
            "gpus": spec.host.resources.get("GPU", 0.0),
            "runs": spec.runs,
            "args_at": spec.args_at,
            "elements": spec.elements,
            "count": count,
        }
        self._on = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        self._sweeps: Json = {}  # by node
        self._forgetting: List[Any] = []

    def free(self) -> Dict[str, Dict[str, float]]:
        """The free resources of every node."""
        from ray.autoscaler.v2.sdk import get_cluster_status

        try:
            status = get_cluster_status(self._ray.get_runtime_context().gcs_address)
        except self._ray.exceptions.RayError as error:  # no host is started meanwhile
            say(f"Ray does not say what its nodes have free: {error}")
            return {}
        return {
            node.node_id: {
                row.resource_name: row.total - row.used for row in node.resource_usage.usage
            }
            for node in (*status.active_nodes, *status.idle_nodes)
        }

    def start(self, record: HostRecord, node: Node, count: int) -> Host:
        """Start the actor of a host on a node, and let it prepare itself."""
        role, actors = self._role, self.actors
        host = Host((role.name, record.number), role, node, record.tag, record.run_dir, slots=count)
        host.end_by = monotonic() + _PLACED_S
        resources = {key: amount * count for key, amount in role.resources.items()}
        actors.start([host], resources, self._on(node.node_id, soft=False), "array.host")
        actors.order(host, {**actors.prepare_order(host), **self._order, "slots": count})
        return host

    def sweep(self, node_id: str, records: Sequence[HostRecord]) -> Json | None:
        """Run ``notes.py`` on the node of dead hosts; its answer, or ``None`` before its end."""
        if node_id not in self._sweeps:
            rows = [[record.number, record.tag, record.run_dir] for record in records]
            self._sweeps[node_id] = self._run_notes(node_id, sweep=rows)
        if not self._ray.wait([self._sweeps[node_id]], timeout=0)[0]:
            return None
        try:
            answer: Json = json.loads(self._ray.get(self._sweeps.pop(node_id)))
        except self._ray.exceptions.RayError as error:
            return {"swept": [], "remaining": f"{type(error).__name__}: {error}"}
        return answer

    def forget(self, node_id: str, run_dirs: Sequence[str]) -> None:
        """Remove notes on a node: the journal has what they say."""
        self._forgetting.append(self._run_notes(node_id, forget=run_dirs))

    def wait(self) -> None:
        """Wait a moment until all notes are removed."""
        if self._forgetting:
            count = len(self._forgetting)
            self._ray.wait(self._forgetting, num_returns=count, timeout=_END_MARGIN_S)

    def _run_notes(self, node_id: str, **request: Sequence[Any]) -> Any:
        env = self._role.runtime_env.get("env_vars") or {}  # where temporary files are
        task = self.actors.run_module.options(
            num_cpus=0, max_retries=0, scheduling_strategy=self._on(node_id, soft=False)
        )
        return task.remote(
            self.actors.package, PROGRAM, f"{__package__}.notes", json.dumps(request), env
        )


def hosts_to_start(
    available: Mapping[str, Amounts], need: Amounts, wanted: int
) -> List[Tuple[str, int]]:
    """The hosts to start, as nodes and slots: evenly over the nodes that have room.

    Args:
        available: what each node has free.
        need: of one element; never empty.
        wanted: how many elements they are to run at a time in all.
    """
    rooms = sorted((slots(resources, need), node) for node, resources in available.items())
    gpus = need.get("GPU", 0.0)
    # Ray gives an actor a part of one GPU, or whole ones.
    most = max(1, int(1.0 / gpus + TOLERANCE)) if gpus % 1 else sys.maxsize
    planned = []
    for index, (room, node) in enumerate(rooms):
        count = min(room, max(0, wanted) // (len(rooms) - index))
        wanted -= count
        while count > 0:
            planned.append((node, min(most, count)))
            count -= most
    return planned


class ArrayDriver:
    """The driver of one array.

    Attributes:
        hosts: the living hosts by their numbers.
        dead: the dead ones of which processes may still run.
        broken: why the array cannot be run at all; ``None`` as long as it can.
    """

    def __init__(
        self,
        runner: Runner,
        spec: ArraySpec,
        leases: Leases,
        starts: HostStarts,
        folder: str,
        submission_id: str,
    ):
        self._runner, self._spec = runner, spec
        self._leases, self._progress = leases, leases.progress
        self._starts, self._actors, self._ray = starts, starts.actors, starts.actors.ray
        self._folder, self._submission_id = folder, submission_id
        self._request = ResourceRequest(spec.host.resources, spec.host.label_selector)
        self._look_at = self._tell_at = self._write_at = self._sweep_at = 0.0
        self._tell_progress_at = monotonic() + _TELL_S
        self._counts = deque([(monotonic(), self._progress.ended_count)], maxlen=_RATE_ROWS)
        self._nodes: Dict[str, Node] = {}
        #: By node: starts of hosts that have failed in a row, and when the next one may come.
        self._refusals: Dict[str, Tuple[int, float]] = {}
        self._cannot: Set[str] = set()  # nodes that cannot run elements
        self._dead_since: Dict[str, float] = {}  # nodes, as far as this driver knows
        self._settled_at: float | None = None
        self._is_stopped = self._is_cancelled = False
        self.hosts: Dict[int, Host] = {}
        # Also when nothing was leased: an earlier driver's hosts have folders, and may be there.
        self.dead = {record.number: record for record in leases.hosts}
        self.broken: Tuple[Reason, str] | None = None

    def run(self) -> int:
        """Run it to its end; the exit code."""
        runner, progress = self._runner, self._progress
        runner.left_on = None  # until all hosts have ended
        if self._leases.hosts:
            say(
                f"the driver continues: {progress.ended_count} of {progress.count} elements "
                "have ended"
            )
        while not self._is_done():
            self._turn()
        self._commit()
        progress.cancel_rest()
        self._write_at = 0.0
        self._show()
        failed, succeeded = map(progress.number, (ElementState.FAILED, ElementState.SUCCEEDED))
        say(f"{succeeded} of {progress.count} elements succeeded, {failed} failed")
        code, cause = (JobExit.SOME_FAILED, Reason.EXIT_CODE) if failed else (0, Reason.NONE)
        ending = f"exit code {int(code)}"
        if failed:
            ending = (
                f"{failed} of {progress.count} elements failed, which `nemo-run-ray status` lists"
            )
        if self.broken:
            code, (cause, ending) = 1, self.broken
        elif self._is_cancelled:
            code, cause, ending = 143, Reason.CANCELLED, "cancelled"
        # Nothing says of these that their processes have ended.
        hosts = (host for host in self.hosts.values() if host.state is not HostState.LEAVING)
        nodes = {host.node.node_id for host in hosts}
        nodes |= {record.node_id for record in self.dead.values()}
        if nodes:
            names = ", ".join(sorted(node_id[:12] for node_id in nodes))
            runner.left_on = (f"on {names}, where nothing says that all have ended",)
            ending = f"{ending}; {MAY_BE_LEFT} {runner.left_on[0]}"
        else:
            runner.left_on = ()
            ending += f"; {NO_PROCESS_LEFT}" if cause is Reason.CANCELLED else ""
        runner.cause, runner.ending = cause.name, ending
        return code

    def _turn(self) -> None:
        self._obey()
        now = monotonic()
        if now >= self._look_at:
            self._look_at = now + _LOOK_S
            self._cancel_requested()
            self.look(now)
        for host, reports in self._actors.answers():
            for report in reports:
                self.hear(host, report)
        failed, limit = self._progress.number(ElementState.FAILED), self._spec.max_failures
        if self.broken:
            self._stop()
        elif limit is not None and failed > limit and not self._is_stopped:
            say(f"ending the array: more than {limit} elements have failed (max_failures)")
            self._stop()
        # A cancelled element may hang: the array does not wait for it.
        over = self._progress.ended_count + len(self._progress.unwanted)
        is_settled = self._is_stopped or over == self._progress.count
        if is_settled and not self._settled_at:
            self._settled_at = self._look_at = now  # the next turn looks, and ends idle hosts
        if not self._is_stopped:
            self.lease()
        self._show()

    def _commit(self) -> bool:
        """Write down what has changed, and return when the disk has it: whether it has.

        A disk that is full is waited for: meanwhile no element is started, and those that run
        continue. A cancelled array does not wait, and any other one fails after ``_DISK_S``.
        """
        seconds = 0.0
        while True:
            try:
                self._leases.commit()
                return True
            except OSError as error:
                if not seconds % _TELL_S:
                    say(f"the head cannot write its journal ({error}); no element starts meanwhile")
                if seconds >= _DISK_S:
                    words = f"the head could not write the array's journal for {_DISK_S:.0f} s"
                    self.broken = Reason.EXIT_CODE, f"{words}: {error}"
                    self._stop()
                if self._is_cancelled or self.broken:
                    return False
            time.sleep(_LOOK_S)
            seconds += _LOOK_S
            self._obey()

    def _show(self) -> None:
        """Write counts and the states of all elements beside the job's log, for clients.

        Nothing that the array does is decided by these files. A large array's take long to write,
        and are written so seldom that it costs the driver a twentieth of its time.
        """
        now, progress = monotonic(), self._progress
        if now < self._write_at:
            return
        ended, failed = progress.ended_count, progress.number(ElementState.FAILED)
        first_at, first = self._counts[0]
        self._counts.append((now, ended))
        rate = (ended - first) / (now - first_at) if now > first_at else 0.0
        remaining = progress.count - ended
        hosts = self.hosts.values()
        running = sum(min(len(progress.held[host.number]), host.slots) for host in hosts)
        running = min(running, remaining)
        rows: ArrayRows = {
            "elements": progress.count,
            "succeeded": progress.number(ElementState.SUCCEEDED),
            "failed": failed,
            "cancelled": progress.number(ElementState.CANCELLED),
            "running": running,
            "waiting": remaining - running,
            "elements_per_s": round(rate, 3),
            "left_s": round(remaining / rate, 1) if rate > 0 else None,
            "failures": [*progress.failures],
        }
        if now >= self._tell_progress_at:
            self._tell_progress_at = now + _TELL_S
            say(
                f"{ended} of {progress.count} elements are over, {failed} failed; "
                f"{rate:.3g} elements/s"
            )
        states = "".join(json.dumps(stretch) + "\n" for stretch in progress.stretches())
        with suppress(OSError):  # a full disk: the array continues, and is not shown
            write_file(f"{self._folder}/{status_file_name(self._submission_id)}", json.dumps(rows))
            write_file(f"{self._folder}/{file_of(self._submission_id, STATES_FILE)}", states)
        self._write_at = now + _WRITE_S + _PAUSE * (monotonic() - now)

    # ------------------------------------------------------------------ leases

    def lease(self) -> None:
        """Lease elements to the hosts; the disk has it before a host hears of it."""
        rows: Dict[Host, List[List[Any]]] = {}
        for host in self.hosts.values():
            if host.state is not HostState.READY or host.is_slow:
                continue
            held, most = self._progress.held[host.number], self._leases.most_held(host.slots)
            while len(held) < most and (row := self._leases.take(host.number)):
                rows.setdefault(host, []).append(row)
        self._commit()
        for host, elements in () if self._is_stopped else rows.items():
            self._actors.order(host, {"do": "run", "elements": elements})

    def _cancel_requested(self) -> None:
        """Cancel what clients want, and say so to them when the disk has it."""
        for path in request_paths(self._folder, self._submission_id):
            try:
                with open(open_own(path, os.O_RDONLY), encoding="utf-8") as file:
                    request = json.load(file)
                wanted = self._leases.cancel(request["cancel"], request["only_waiting"])
            except FileNotFoundError:
                continue  # its client has given up
            except (OSError, ValueError, TypeError, KeyError) as error:
                say(f"{path} is no request to cancel elements: {error}")
            else:
                for host in self.hosts.values():
                    leased = wanted & self._progress.held[host.number].items()
                    if leased:
                        self._actors.order(host, {"do": "cancel", "elements": list(leased)})
                self._commit()
                text = ", ".join(f"{first} to {last}" for first, last in request["cancel"][:5])
                say(f"the user has cancelled the elements {text}; {len(wanted)} have a host")
            with suppress(OSError):
                os.remove(path)

    # ------------------------------------------------------------------ reports

    def hear(self, handle: ReplicaHandle, report: Json) -> None:
        """Take what a host has reported, unless it is given up. ``host.py`` lists the reports."""
        host = self.hosts.get(handle.replica_id[1])
        if not host:
            return
        kind, node, number = report["at"], host.node, host.number
        if kind == "text":
            write_lines(str(report["element"]), str(report["text"]))
        elif kind == "ended":
            host.is_slow = report["row"][2] is None
            if self._leases.ended(number, report["row"]) and not host.is_slow:
                self._refusals.pop(node.node_id, None)
        elif kind == "prepared":
            if host.state is HostState.STARTING:
                host.state, host.end_by = HostState.READY, math.inf
                say(f"{node.host} runs {host.slots} element(s) at a time")
        elif kind == "obstacles":
            say(
                f"on {node.host} the imports {', '.join(report['obstacles'])}, so a fork is not "
                "safe. Each element imports anew, which takes seconds in place of milliseconds"
            )
        elif kind == "idle":
            # What it still has was leased to it before it was told to end, and has not begun.
            self._leases.give_back(number, begun=())
            if self._commit():  # before it removes its notes
                self._actors.order(host, {"do": "leave"})
                host.state, host.end_by = HostState.LEAVING, monotonic() + _END_MARGIN_S
            else:
                self._drop(host)  # its notes stay
        elif kind == "gone" and host.state is HostState.LEAVING and not report["was_killed"]:
            self._drop(host)
        else:  # ``unprepared``, ``failed``, ``gone`` or ``died``
            cause = Reason.NOT_STARTED if kind == "unprepared" else report.get("cause")
            if kind == "died" and cause:
                self._drop(host)  # it never came up
            else:
                self._give_up(host)
            self._note_loss(host, str(report.get("words", "it was killed")), cause)

    def _note_loss(self, host: Host, reason: str, cause: Reason | None) -> None:
        """Note the loss of a host. Where it could not begin, none is started for a while.

        The array is over when nothing has run and no node that fits can run it.
        """
        node_id, node, now = host.node.node_id, host.node.host, monotonic()
        if not cause and host.state is not HostState.STARTING:
            say(f"the host on {node} has died: {reason}")
            return
        failures, not_before = self._refusals.get(node_id, (0, 0.0))
        if now >= not_before:  # several hosts of a node count once
            failures += 1
        pause_s = min(_AGAIN_S * 2 ** min(failures - 1, 10), _AGAIN_MAX_S)
        self._refusals[node_id] = failures, now + pause_s
        if cause or failures >= _DEATHS_MAX:
            self._cannot.add(node_id)
        runs = any(one.state is not HostState.STARTING for one in self.hosts.values())
        fitting = {one.node_id for one in nodes_that_fit(self._request, list(self._nodes.values()))}
        write(f"{reason}\n")
        last_line = reason.strip().rpartition("\n")[2]  # of a traceback this is the error
        # A few refusals decide while other jobs have the resources of all other nodes.
        refusals = failures if cause is Reason.RUNTIME_ENV else len(self._cannot)
        is_open = fitting - self._cannot and (self.hosts or refusals < _REFUSALS_MAX)
        if self._progress.has_run or runs or not fitting or is_open:
            say(f"a host on {node} could not begin; another one is tried later: {last_line}")
        elif cause is Reason.RUNTIME_ENV:
            self.broken = cause, cause_of(reason)
        else:
            self.broken = Reason.NOT_STARTED, f"on {node}: {last_line}"

    # ------------------------------------------------------------------ hosts

    def look(self, now: float) -> None:
        """Start hosts where there is room, end idle ones, and prove that dead ones are dead."""
        self._nodes = {node.node_id: node for node in nodes_of(self._ray.nodes())}
        waiting = self._progress.number(ElementState.WAITING)
        for host in list(self.hosts.values()):
            if host.node.node_id not in self._nodes or now >= host.end_by:
                self._give_up(host)
            elif not waiting and not self._progress.held[host.number]:
                self._end(host)
        self._prove(now)
        if waiting and not self._is_stopped:
            self._grow(now, waiting)

    def _grow(self, now: float, wanted: int) -> None:
        hosts, nodes = list(self.hosts.values()), self._nodes
        starting = [host for host in hosts if host.state is HostState.STARTING]
        wanted -= sum(host.slots for host in starting)
        if self._spec.max_in_flight:
            used = sum(host.slots for host in hosts)
            used += sum(len(self._progress.held[number]) for number in self.dead)
            wanted = min(wanted, self._spec.max_in_flight - used)
        busy = {host.node.node_id for host in starting}
        busy |= {node_id for node_id, (_, until) in self._refusals.items() if now < until}
        available = {
            node_id: resources
            for node_id, resources in self._starts.free().items()
            if node_id in nodes
            and node_id not in busy
            and matches(self._request.selector, nodes[node_id].labels)
        }
        planned = hosts_to_start(available, self._request.resources, wanted)
        records = [self._leases.add_host(node_id) for node_id, _ in planned]
        self._commit()
        for record, (node_id, count) in zip(records, () if self._is_stopped else planned):
            self.hosts[record.number] = self._starts.start(record, nodes[node_id], count)
        if self.hosts:
            self._tell_at = now + _TELL_S
        elif now >= self._tell_at:
            self._tell_at = now + _TELL_S
            why = why_not(self._request, list(nodes.values()))
            why = why or f"no node has room now for an element, which needs {self._request}"
            say(f"no element can begin: {why}; waiting")

    def _end(self, host: Host) -> None:
        """Let a host end what it runs; one that has not come up ends with its actor."""
        if not host.answers:
            self._drop(host)
        elif host.state in (HostState.STARTING, HostState.READY):
            host.state = HostState.ENDING
            host.end_by = monotonic() + self._spec.grace_s + _END_MARGIN_S
            self._actors.order(host, {"do": "end"})

    def _drop(self, host: Host) -> None:
        """End the actor of a host of which nothing runs."""
        self._ray.kill(host.actor, no_restart=True)
        host.dead = True
        del self.hosts[host.number]

    def _give_up(self, host: Host) -> None:
        """End the actor of a host: what it had may run until the contrary is proven."""
        self._drop(host)
        self.dead[host.number] = self._leases.hosts[host.number]

    # ------------------------------------------------------------------ proof

    def _prove(self, now: float) -> None:
        """End what dead hosts have left: by their nodes' death, or by a program on the node."""
        for number, record in list(self.dead.items()):
            if record.node_id not in self._nodes:
                # A node that was only cut off continues until its raylet has noticed.
                since = self._dead_since.setdefault(record.node_id, now)
                if not self._progress.held[number] or now >= since + node_dead_s():
                    # Nobody knows which elements had begun there: all may have.
                    self._leases.give_back(number)
                    del self.dead[number]
        for node_id in {record.node_id for record in self.dead.values()} & self._nodes.keys():
            records = [record for record in self.dead.values() if record.node_id == node_id]
            answer = self._starts.sweep(node_id, records) if now >= self._sweep_at else None
            if answer is None:
                continue
            if answer["remaining"]:
                self._sweep_at = now + _SWEEP_AGAIN_S
                node = self._nodes[node_id].host
                say(f"a dead host on {node} may still run elements: {answer['remaining']}")
            for number, ended, begun in answer["swept"]:
                for row in ended:
                    self._leases.ended(number, row)
                again = len(self._progress.held[number])
                if again:
                    say(f"nothing of a dead host runs: {again} of its elements have not ended")
                self._leases.give_back(number, begun)
                self.dead.pop(number, None)
            is_written = self._commit()
            swept = [self._leases.hosts[number].run_dir for number, *_ in answer["swept"]]
            if swept and is_written:
                self._starts.forget(node_id, swept)

    # ------------------------------------------------------------------ the end

    def _is_done(self) -> bool:
        """Whether all has ended; what dead hosts have left is not waited for without a bound."""
        if not self._settled_at:
            return False
        # An array that is being ended does not wait for dead nodes: nothing runs a second time.
        dead = [
            record
            for record in self.dead.values()
            if not self._is_stopped or record.node_id in self._nodes
        ]
        until = self._settled_at + self._spec.grace_s + _CLOSE_S
        return not (self.hosts or dead) or monotonic() >= until

    def _obey(self) -> None:
        if is_cancelled(self._runner) and not self._is_stopped:
            self._is_cancelled = True
            self._stop()

    def _stop(self) -> None:
        """End what runs, and lease no more."""
        if not self._is_stopped:
            self._is_stopped = self._leases.is_ending = True
            for host in list(self.hosts.values()):
                self._end(host)
