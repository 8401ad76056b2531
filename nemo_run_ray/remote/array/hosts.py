"""The element hosts of an array: where they start, what they have, when they are proven dead.

``ray`` is passed in. Each actor passes the orders and reports of one host.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from .. import FOLDER
from ..fit import TOLERANCE, Node, ResourceRequest, matches, nodes_of, slots, why_not
from ..hosts.actors import (
    Actor,
    ReplicaHandle,
    actor_class,
    code_of,
    key_of,
    name,
    prepare_order,
    tar,
)
from ..hosts.calls import Calls
from ..node.output import say
from ..node.rundir import jobs_folder
from ..spec import ArraySpec
from ..status import first_id, node_dead_s
from .elements import Lease, Leases, LinesFile

#: The module that the process of a host runs.
_PROGRAM = "array.host"
#: Seconds until a node is tried again: where no host could begin at first and at most, and where
#: the host has died that was to end what others have left.
_AGAIN_S, _AGAIN_MAX_S, _SWEEP_AGAIN_MAX_S = 5.0, 300.0, 60.0
#: Hosts that die on a node without a reason before it counts as one that cannot run elements; any
#: may be killed once. And such nodes that stand for all those that no host could be tried on.
_DEATHS_MAX, _NODES_MAX = 5, 3
#: Seconds until a host that has not come up is given up when its node's resources seem to have gone
#: to another. Its own part counts as taken too while Ray makes its runtime environment.
_PLACED_S = 900.0
#: Seconds until a line says that the array waits for resources, and between two.
_TELL_S = 30.0
#: Seconds beyond the grace period until a host that was told to end is given up.
_END_MARGIN_S = 30.0
#: Seconds for a host to remove its notes and folders.
_LEAVE_S = 30.0


class HostRecord(NamedTuple):
    """A host, as it is written down before it may start anything.

    Attributes:
        number: of the host, over all drivers of the array.
        node_id: where it is.
        tag: in the environment of all its processes.
        run_dir: name of its run directory.
    """

    number: int
    node_id: str
    tag: str
    run_dir: str


class HostState(Enum):
    """The state of an element host."""

    #: It ends what earlier hosts have left on its node, and runs no elements.
    SWEEPING = "sweeping"
    #: It was started, and is not prepared yet.
    STARTING = "starting"
    READY = "ready"
    #: It was told to end, since nothing waited.
    CLOSING = "closing"
    #: It has ended everything that it was to end.
    IDLE = "idle"
    #: It was told to remove notes and folders.
    LEAVING = "leaving"
    #: It has removed its notes, and is about to be gone.
    LEFT = "left"


@dataclass(eq=False)
class Host:
    """One host.

    Attributes:
        record: its record.
        replica: its handle for the driver's calls.
        slots: how many elements it runs at a time; 0 if it only sweeps.
        in_hand: the elements that it has, with their attempts.
        is_asked: it was asked to hand elements back, and has not answered.
        heard_at: when it was ready, or has reported the last end of an element.
        rests_until: when it may have elements again, after its node had no room for more.
        sweeps: earlier hosts that it is to end.
        swept: those of them that it has ended.
        leave_by: when it is given up that was told to leave.
    """

    record: HostRecord
    replica: ReplicaHandle
    actor: Actor
    slots: int
    started_at: float
    in_hand: Dict[int, int] = field(default_factory=dict)
    state: HostState = HostState.STARTING
    is_asked: bool = False
    heard_at: float = 0.0
    rests_until: float = 0.0
    sweeps: Dict[int, HostRecord] = field(default_factory=dict)
    swept: List[HostRecord] = field(default_factory=list)
    leave_by: float = 0.0

    def takes_back(self, lease: Lease) -> bool:
        """Remove an attempt; false when the host has not got it."""
        has = self.in_hand.get(lease.element) == lease.attempt
        if has:
            del self.in_hand[lease.element]
        return has


class HostStarts:
    """Starts hosts.

    Args:
        ray: the module, connected.
        spec: the array.
        job: name of the job.
        secrets: the values of its secrets.
        config: the job's configuration as Ray gave it to the driver.
        count: number of elements.
    """

    def __init__(
        self,
        ray: Any,
        spec: ArraySpec,
        job: str,
        secrets: Mapping[str, str],
        config: str,
        count: int,
    ) -> None:
        self._ray = ray
        self._spec = spec
        self._job = job
        self._secrets = secrets
        self._config = config
        self._count = count
        self._class = ray.remote(actor_class())
        self._package = ray.put(tar(os.path.dirname(FOLDER), os.path.dirname(jobs_folder())))
        self._codes: List[Any] = []
        self._keys: List[str] = []
        if spec.host.task.has_code:
            folder = code_of(spec.host)
            self._codes, self._keys = [ray.put(tar(folder))], [key_of(folder)]

    def start(self, record: HostRecord, node: Node, slots: int) -> Host:
        """Start the actor of a host on a node; Ray keeps its resources for the slots."""
        role = self._spec.host
        resources = {key: amount * slots for key, amount in role.resources.items()} if slots else {}
        affinity = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        memory = resources.pop("memory", None)
        options = self._class.options(
            num_cpus=resources.pop("CPU", 0),
            num_gpus=resources.pop("GPU", 0),
            memory=int(memory) if memory else None,
            resources=resources,
            max_concurrency=8,
            runtime_env=(role.runtime_env if slots else _folder_of(role.runtime_env)) or None,
            scheduling_strategy=affinity(node.node_id, soft=False),
        )
        replica = ReplicaHandle(
            (role.name, record.number), role, node, 0, record.tag, record.run_dir
        )
        places = [(name(replica.replica_id), record.tag, record.run_dir, _PROGRAM)]
        keys, codes = (self._keys, self._codes) if slots else ([], [])
        handle = options.remote(places, keys, self._package, *codes)
        replica.actor = Actor(handle, [replica])
        return Host(record, replica, replica.actor, slots, time.monotonic())

    def prepare(self, host: Host) -> Dict[str, Any]:
        """The order that makes a host ready."""
        return {
            **prepare_order(host.replica, self._job, self._secrets, self._config),
            "slots": host.slots,
            "gpus": self._spec.host.resources.get("GPU", 0.0),
            "runs": self._spec.runs,
            "targets": self._spec.targets,
            "elements": self._spec.elements,
            "count": self._count,
        }


def _folder_of(runtime_env: Mapping[str, Any]) -> Dict[str, Any]:
    """The part of a runtime environment that decides where hosts have their folders."""
    variables = runtime_env.get("env_vars") or {}
    kept = {name: value for name, value in variables.items() if name in ("TMPDIR", "TEMP", "TMP")}
    return {"env_vars": kept} if kept else {}


class HostBook:
    """All hosts that an array has ever had, in a file beside the journal.

    Args:
        path: of the file.
        job_id: submission id of the job's first attempt.
    """

    def __init__(self, path: str, job_id: str) -> None:
        self._file = LinesFile(path)
        self._job_id = job_id
        self.records = [HostRecord(*json.loads(line)) for line in self._file.read()]

    def add(self, node_ids: Sequence[str]) -> List[HostRecord]:
        """Write down a new host for each of these nodes, and return when the disk has it."""
        records = []
        for number, node_id in enumerate(node_ids, start=len(self.records)):
            nonce = secrets.token_hex(8)
            tag, run_dir = f"{nonce}.{number}", f"{self._job_id}~host-{number}-{nonce}"
            records.append(HostRecord(number, node_id, f"{self._job_id}/{tag}", run_dir))
        self._file.append("".join(json.dumps(record) + "\n" for record in records))
        self.records += records
        return records


def hosts_to_start(
    available: Mapping[str, Mapping[str, float]], need: Mapping[str, float], wanted: int
) -> List[Tuple[str, int]]:
    """The hosts to start, as nodes and slots: evenly over the nodes that have room.

    Args:
        available: what each node has free.
        need: of one element; never empty.
        wanted: how many elements they are to run at a time in all.
    """
    left = {node: slots(resources, need) for node, resources in available.items()}
    sizes: Dict[str, int] = {}
    while wanted > 0 and any(left.values()):
        for node in sorted(left, key=lambda node_id: -left[node_id]):
            if wanted > 0 and left[node] > 0:
                left[node] -= 1
                sizes[node] = sizes.get(node, 0) + 1
                wanted -= 1
    gpus = need.get("GPU", 0.0)
    if gpus == int(gpus):
        return list(sizes.items())
    most = max(
        1, int(1.0 / gpus + TOLERANCE)
    )  # Ray gives an actor a part of one GPU, or whole ones
    return [
        (node, min(most, size - first))
        for node, size in sizes.items()
        for first in range(0, size, most)
    ]


class Backoff:
    """The nodes that are tried again later, after twice as long each time.

    Args:
        most_s: seconds to wait at most.
    """

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._counts: Dict[str, int] = {}
        self._not_before: Dict[str, float] = {}

    def add(self, node_id: str, now: float) -> int:
        """Note a failure; how many there were in a row."""
        count = self._counts.get(node_id, 0)
        if not self.wait_s(node_id, now):  # what ends several hosts of a node counts once
            count = self._counts[node_id] = count + 1
        self._not_before[node_id] = now + min(_AGAIN_S * 2 ** min(count - 1, 10), self._most_s)
        return count

    def forget(self, node_id: str) -> None:
        self._counts.pop(node_id, None)
        self._not_before.pop(node_id, None)

    def wait_s(self, node_id: str, now: float) -> float:
        """Seconds until a node is tried again; 0 when it may be used."""
        return max(0.0, self._not_before.get(node_id, now) - now)


class HostPool:
    """The living hosts, and the dead ones whose processes may still run.

    Args:
        ray: the module, connected.
        spec: the array.
        submission_id: of the job.
        starts: starts hosts.
        calls: to their actors.
        leases: the elements.

    Attributes:
        hosts: the living ones by their numbers.
        dead: by the numbers of dead ones the attempts that they had and whose end is not known.
        nodes: the living nodes by their ids, as of the last look.
        unconfirmed: dead nodes that were not waited for at the end, where processes may still run.
    """

    def __init__(
        self,
        ray: Any,
        spec: ArraySpec,
        submission_id: str,
        starts: HostStarts,
        calls: Calls,
        leases: Leases,
    ) -> None:
        self._ray = ray
        self._spec = spec
        self._starts = starts
        self._calls = calls
        self._leases = leases
        self._book = HostBook(leases.hosts_path, first_id(submission_id))
        self.hosts: Dict[int, Host] = {}
        # Also when nothing was leased: an earlier driver's hosts have folders, and may be there.
        self.dead = {
            record.number: leases.held.get(record.number, {}) for record in self._book.records
        }
        self.nodes: Dict[str, Node] = {}
        self.unconfirmed: Set[str] = set()
        self._slots: Dict[int, int] = {}  # of dead hosts of this driver
        self._node_dead_s = node_dead_s()
        self._dead_since: Dict[str, float] = {}  # nodes, as far as this driver knows
        self._refusals, self._sweeps = Backoff(_AGAIN_MAX_S), Backoff(_SWEEP_AGAIN_MAX_S)
        self._cannot: Set[str] = set()  # nodes that cannot run elements
        self._end_by: Optional[float] = None
        self._is_closing = False
        self._tell_at = 0.0

    @property
    def has_ended(self) -> bool:
        """Whether nothing runs any more, after ``end`` or when all elements are over."""
        states = {host.state for host in self.hosts.values()}
        are_idle = self._end_by is None or states <= {HostState.IDLE}
        return are_idle and not self.dead

    @property
    def is_leaving(self) -> bool:
        """Whether a host was told to leave, and is not gone."""
        states = {host.state for host in self.hosts.values()}
        return not states.isdisjoint([HostState.LEAVING, HostState.LEFT])

    @property
    def node_ids(self) -> Set[str]:
        """The nodes where hosts are, or may have left something."""
        hosts = {host.record.node_id for host in self.hosts.values()}
        return hosts | {self._book.records[number].node_id for number in self.dead}

    @property
    def running_on_dead(self) -> int:
        """The number of elements that may still run on dead hosts."""
        return sum(
            min(len(held), self._slots.get(number, len(held))) for number, held in self.dead.items()
        )

    def of(self, actor: Actor) -> List[Host]:
        """The host of an actor, unless it is given up."""
        return [host for host in self.hosts.values() if host.actor is actor]

    def look(self, now: float, waiting: int) -> None:
        """Start hosts where there is room, end idle ones, and prove that dead ones are dead.

        Args:
            now: the time.
            waiting: how many elements wait.
        """
        self.nodes = {node.node_id: node for node in nodes_of(self._ray.nodes())}
        for host in list(self.hosts.values()):
            if host.record.node_id not in self.nodes:
                self.lost(host)
            elif self._is_late(host, now):
                self.give_up(host)
            elif host.state is HostState.IDLE:
                self._let_go(host)
        self._prove(now)
        if self._end_by is not None:
            return
        if waiting:
            self._grow(now, waiting)
            return
        for host in self.hosts.values():
            if host.state is HostState.READY and not host.in_hand:
                host.state = HostState.CLOSING
                self._calls.order(host.replica, {"do": "end"})

    def end(self) -> None:
        """Let all hosts end what they run."""
        self._end_by = time.monotonic() + self._spec.grace_s + _END_MARGIN_S
        self._leases.is_ending = True
        for host in list(self.hosts.values()):
            if host.state is HostState.STARTING:
                self.give_up(host)
            elif host.state in (HostState.READY, HostState.CLOSING):
                self._calls.order(host.replica, {"do": "end"})

    def close(self) -> None:
        """Let the hosts leave; those that have not come up end with the driver."""
        self._is_closing = True
        self._end_by = self._end_by or time.monotonic() + _END_MARGIN_S
        for host in list(self.hosts.values()):
            if not host.actor.answers:
                del self.hosts[host.record.number]
            elif not host.sweeps:
                self._let_go(host)

    def give_up(self, host: Host) -> None:
        """End the actor of a host."""
        self._ray.kill(host.actor.handle, no_restart=True)
        host.actor.dead = True
        self.lost(host)

    def lost(self, host: Host) -> None:
        """A host is dead, or its actor is: what it had may run until that is proven."""
        number = host.record.number
        if self.hosts.pop(number, None) is None:
            return
        self.dead[number], self._slots[number] = host.in_hand, host.slots
        for record in host.swept:  # their notes may still be there
            self.dead.setdefault(record.number, {})
        if not host.slots:
            self._sweeps.add(host.record.node_id, time.monotonic())

    # ------------------------------------------------------------------ what hosts report

    def idle(self, host: Host) -> None:
        """A host has ended all that it ran, as it was told."""
        # What it has in hand came when it was told to end.
        self._leases.give_back_all(host.in_hand, host.record.number, has_run=False)
        host.in_hand.clear()
        self._let_go(host)

    def swept(self, host: Host, report: Mapping[str, Any]) -> None:
        """A host has ended what an earlier one had left on its node, and read its notes."""
        number = int(report["host"])
        result = take_notes(self._take_dead(number), report, self._leases)
        if result:
            say(f"nothing of a dead host runs on {host.replica.node.host}: {result}")
        host.swept.append(host.sweeps.pop(number))
        if not host.sweeps:
            self._let_go(host)

    def gone(self, host: Host) -> None:
        """A host has left, and removed everything."""
        self._ray.kill(host.actor.handle, no_restart=True)
        del self.hosts[host.record.number]
        if not host.slots:
            self._sweeps.forget(host.record.node_id)

    def refused(self, host: Host, is_explained: bool, has_started: bool) -> None:
        """A host cannot run elements: start none on its node for a while.

        ``has_started`` is whether its actor was there, and may have begun something.
        """
        node_id = host.record.node_id
        if host.slots:
            deaths = self._refusals.add(node_id, time.monotonic())
            if is_explained or deaths >= _DEATHS_MAX:
                self._cannot.add(node_id)
        if has_started:
            self.give_up(host)
        else:
            self.lost(host)
            self._take_dead(host.record.number)

    def can_run(self, node_id: str) -> None:
        """An element has ended on a node."""
        self._refusals.forget(node_id)
        self._cannot.discard(node_id)

    @property
    def is_hopeless(self) -> bool:
        """Whether no node can be expected to run elements."""
        hosts = [host for host in self.hosts.values() if host.slots]
        if not self._cannot or any(
            host.state is HostState.READY or host.record.node_id not in self._cannot
            for host in hosts
        ):
            return False
        role = self._spec.host
        fitting = {
            node_id
            for node_id, node in self.nodes.items()
            if matches(role.label_selector, node.labels) and slots(node.resources, role.resources)
        }
        return len(self._cannot & fitting) >= min(_NODES_MAX, len(fitting))

    # ------------------------------------------------------------------ starts and ends

    def _is_late(self, host: Host, now: float) -> bool:
        """Whether a host is given up."""
        if host.state in (HostState.LEAVING, HostState.LEFT):
            return now >= host.leave_by
        if self._end_by is not None and now >= self._end_by:
            return host.state is not HostState.IDLE and not host.sweeps
        # Ray cannot place a host whose resources others have got sooner.
        if host.actor.answers or not host.slots or now < host.started_at + _PLACED_S:
            return False
        free = self._available().get(host.record.node_id, {})
        return slots(free, self._spec.host.resources) < host.slots

    def _let_go(self, host: Host) -> None:
        """Let a host remove its notes, which the head's disk has as well, and leave.

        An array that is being ended has its outcome first.
        """
        host.state = HostState.IDLE
        may_leave = self._end_by is None or self._is_closing
        if not (may_leave and self._leases.can_write and self._leases.commit()):
            return
        host.state, host.leave_by = HostState.LEAVING, time.monotonic() + _LEAVE_S
        run_dirs = [record.run_dir for record in (*host.swept, host.record)]
        self._calls.order(host.replica, {"do": "leave", "run_dirs": run_dirs})

    def _grow(self, now: float, wanted: int) -> None:
        hosts, role = list(self.hosts.values()), self._spec.host
        wanted -= sum(host.slots for host in hosts if host.state is HostState.STARTING)
        if self._spec.max_in_flight is not None:
            used = sum(host.slots for host in hosts) + self.running_on_dead
            wanted = min(wanted, self._spec.max_in_flight - used)
        not_yet = (HostState.STARTING, HostState.SWEEPING)
        starting = {host.record.node_id for host in hosts if host.state in not_yet}
        available = {
            node_id: resources
            for node_id, resources in self._available().items()
            if node_id in self.nodes
            and node_id not in starting
            and not self._refusals.wait_s(node_id, now)
            and matches(role.label_selector, self.nodes[node_id].labels)
        }
        planned = hosts_to_start(available, role.resources, wanted)
        if planned:
            records = self._book.add([node_id for node_id, _ in planned])
            for record, (_, count) in zip(records, planned):
                host = self._start(record, count, HostState.STARTING)
                self._calls.order(host.replica, self._starts.prepare(host))
        if any(host.slots for host in self.hosts.values()):
            self._tell_at = now + _TELL_S
        elif now >= self._tell_at:
            self._tell_at = now + _TELL_S
            say(self._why_waiting(now))

    def _start(self, record: HostRecord, count: int, state: HostState) -> Host:
        node = self.nodes[record.node_id]
        host = self.hosts[record.number] = self._starts.start(record, node, count)
        host.state = state
        self._calls.pull(host.actor)
        return host

    def _why_waiting(self, now: float) -> str:
        role = self._spec.host
        request = ResourceRequest(role.resources, role.label_selector)
        why = why_not(request, list(self.nodes.values()))
        if why:
            return f"no element can begin: {why}; waiting for a node that joins"
        waits_s = [self._refusals.wait_s(node_id, now) for node_id in self.nodes]
        if any(waits_s):
            count, least_s = sum(map(bool, waits_s)), min(filter(None, waits_s))
            return (
                f"hosts could not begin on {count} node(s); one is tried again in {least_s:.0f} s"
            )
        need = json.dumps(role.resources)
        return f"no node has room for an element, which needs {need}; waiting"

    def _available(self) -> Dict[str, Dict[str, float]]:
        """The free resources of every node."""
        state = self._ray._private.state
        available: Dict[str, Dict[str, float]] = state.available_resources_per_node()
        return available

    # ------------------------------------------------------------------ proof

    def _take_dead(self, number: int) -> Dict[int, int]:
        """Nothing of a host runs any more; the attempts that it had."""
        self._slots.pop(number, None)
        return self.dead.pop(number, {})

    def _prove(self, now: float) -> None:
        """End what dead hosts have left: by their nodes' death, or by another host there."""
        swept = {number for host in self.hosts.values() for number in host.sweeps}
        to_sweep: Dict[str, List[HostRecord]] = {}
        for number in [number for number in self.dead if number not in swept]:
            record = self._book.records[number]
            if record.node_id not in self.nodes:
                self._prove_by_node(record, now)
            elif not self._sweeps.wait_s(record.node_id, now):
                to_sweep.setdefault(record.node_id, []).append(record)
        for node_id, records in to_sweep.items():
            host = self._start(self._book.add([node_id])[0], 0, HostState.SWEEPING)
            host.sweeps = {record.number: record for record in records}
            places = [[record.number, record.tag, record.run_dir] for record in records]
            self._calls.order(host.replica, {"do": "sweep", "hosts": places})

    def _prove_by_node(self, record: HostRecord, now: float) -> None:
        """Take back what a host has that Ray counts as dead with its node.

        A node that was only cut off continues until its raylet has noticed. An array that is being
        ended does not wait for that, since nothing runs a second time.
        """
        number, is_ending = record.number, self._end_by is not None
        since = self._dead_since.setdefault(record.node_id, now)
        is_over = not self.dead[number] or now >= since + self._node_dead_s
        if is_over:  # what had begun there, nobody knows
            self._leases.give_back_all(self._take_dead(number), number, has_run=True)
        elif is_ending:
            self.unconfirmed.add(record.node_id)
            self._leases.leave_all(self._take_dead(number))


def take_notes(held: Dict[int, int], noted: Mapping[str, Any], leases: Leases) -> str:
    """Take over the notes of a dead host, of which nothing runs any more.

    Args:
        held: the elements that it had, with their attempts.
        noted: the host's number, the rows of the ends, and the attempts that have only begun.
        leases: the elements.

    Returns:
        What became of them, in words; empty when it had none.
    """
    number, count = noted["host"], len(held)
    for row in noted["ended"]:
        if held.get(row[0]) == row[1]:
            del held[row[0]]
            leases.ended(number, row)
    begun = {
        element: attempt for element, attempt in noted["begun"] if held.get(element) == attempt
    }
    leases.give_back_all(begun, number, has_run=True)
    waited = {element: held[element] for element in held if element not in begun}
    leases.give_back_all(waited, number, has_run=False)
    ended = count - len(held)
    return f"of {count} elements, {ended} had ended, and {len(held)} are leased again" * (count > 0)
