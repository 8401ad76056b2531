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
from typing import (
    Any,
    Collection,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Set,
)

from .. import FOLDER
from ..attempts import NODE_DEAD_S, first_id, node_dead_s
from ..fit import TOLERANCE, Node, ResourceRequest, matches, nodes_of, why_not
from ..fit import slots as slots_in
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
from ..trust import open_own
from .elements import Lease, Leases

#: The module that the process of a host runs.
_PROGRAM = "array.host"


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
    #: It was told to end, and has ended everything.
    IDLE = "idle"


@dataclass(eq=False)
class Host:
    """One host.

    Attributes:
        record: which one.
        replica: what the driver's calls know it by.
        slots: how many elements it runs at a time; 0 of one that is sweeping.
        in_hand: the elements that it has, with their attempts.
        state: of the host.
        is_asked: it was asked to hand elements back, and has not answered.
        heard_at: when it was ready, or has told of the last end of an element.
        rests_until: when it may have elements again, after its node had no room for more.
        sweeps: earlier hosts that it is to end.
        swept: those of them that it has ended.
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

    @property
    def is_sweeping(self) -> bool:
        return self.state is HostState.SWEEPING

    def takes_back(self, lease: Lease) -> bool:
        """Take an attempt from it; false when it has not got it."""
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
            replica_id=(role.name, record.number),
            role=role,
            node=node,
            bundle=0,
            tag=record.tag,
            run_dir=record.run_dir,
        )
        places = [(name(replica.replica_id), record.tag, record.run_dir, _PROGRAM)]
        keys, codes = (self._keys, self._codes) if slots else ([], [])
        handle = options.remote(places, keys, self._package, *codes)
        replica.actor = Actor(handle, [replica])
        return Host(record, replica, replica.actor, slots, time.monotonic())

    def prepare(self, host: Host) -> Dict[str, Any]:
        """The order that makes a host ready."""
        role = self._spec.host
        return {
            **prepare_order(host.replica, self._job, self._secrets, self._config),
            "slots": host.slots,
            "gpus": role.resources.get("GPU", 0.0),
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
    """All hosts that there have ever been, in a file beside the journal.

    Args:
        path: of the file.
        job_id: submission id of the job's first attempt.
    """

    def __init__(self, path: str, job_id: str) -> None:
        self._path = path
        self._job_id = job_id
        self.records: List[HostRecord] = []
        self._good = 0  # bytes that are whole
        if os.path.lexists(path):
            with open(open_own(path, os.O_RDONLY), encoding="utf-8") as file:
                lines = [line for line in file if line.endswith("\n")]
            self.records = [HostRecord(*json.loads(line)) for line in lines]
            self._good = sum(len(line.encode()) for line in lines)

    def add(self, node_ids: Sequence[str]) -> List[HostRecord]:
        """Write down a new host for each of these nodes, and return when the disk has it."""
        records = []
        for number, node_id in enumerate(node_ids, start=len(self.records)):
            nonce = secrets.token_hex(8)
            tag, run_dir = f"{nonce}.{number}", f"{self._job_id}~host-{number}-{nonce}"
            records.append(HostRecord(number, node_id, f"{self._job_id}/{tag}", run_dir))
        data = "".join(json.dumps(record) + "\n" for record in records).encode()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with open(open_own(self._path, flags), "ab") as file:
            file.truncate(self._good)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self._good += len(data)
        self.records += records
        return records


class Share(NamedTuple):
    """A host that can be started.

    Attributes:
        node_id: where.
        slots: for so many elements at a time.
    """

    node_id: str
    slots: int


def shares(
    available: Mapping[str, Mapping[str, float]], need: Mapping[str, float], wanted: int
) -> List[Share]:
    """The hosts to start: evenly over the nodes that have room.

    Args:
        available: what each node has free.
        need: of one element; never empty.
        wanted: for so many elements at a time in all.
    """
    left = {node: slots_in(resources, need) for node, resources in available.items()}
    given: Dict[str, int] = {}
    while wanted > 0 and any(left.values()):
        for node in sorted(left, key=lambda node_id: -left[node_id]):
            if wanted > 0 and left[node] > 0:
                left[node] -= 1
                given[node] = given.get(node, 0) + 1
                wanted -= 1
    return [share for node, slots in given.items() for share in _cut(node, slots, need)]


def _cut(node: str, slots: int, need: Mapping[str, float]) -> List[Share]:
    """One host for all slots; Ray gives one actor a part of a GPU, or whole ones."""
    gpus = need.get("GPU", 0.0)
    if gpus == 0.0 or gpus == int(gpus):
        return [Share(node, slots)]
    together = max(1, int(1.0 / gpus + TOLERANCE))
    sizes = [together] * (slots // together)
    if slots % together:
        sizes.append(slots % together)
    return [Share(node, size) for size in sizes]


#: Seconds until a node is tried again where no host could begin: at first, and at most.
_AGAIN_S, _AGAIN_MAX_S = 5.0, 300.0
#: Hosts that die on a node without a reason before it counts as one that cannot run elements; any
#: may be killed once. And such nodes that stand for all those that no host could be tried on.
_DEATHS_MAX, _NODES_MAX = 5, 3


class Refusals:
    """The nodes where no host could begin since an element has ended there."""

    def __init__(self) -> None:
        self._counts: Dict[str, int] = {}  # in a row, by node
        self._cannot: Set[str] = set()
        self._not_before: Dict[str, float] = {}

    def add(self, node_id: str, now: float, is_explained: bool) -> None:
        """Note that a host could not begin on a node, which has a reason or has just died."""
        count = self._counts.get(node_id, 0)
        if not self.again_in_s(node_id, now):  # what ends several hosts of a node counts once
            count = self._counts[node_id] = count + 1
        if is_explained or count >= _DEATHS_MAX:
            self._cannot.add(node_id)
        self._not_before[node_id] = now + min(_AGAIN_S * 2 ** min(count - 1, 10), _AGAIN_MAX_S)

    def forget(self, node_id: str) -> None:
        """Note that an element has ended on a node."""
        self._counts.pop(node_id, None)
        self._not_before.pop(node_id, None)
        self._cannot.discard(node_id)

    def again_in_s(self, node_id: str, now: float) -> float:
        """Seconds until a node is tried again; 0 when it may be used."""
        return max(0.0, self._not_before.get(node_id, now) - now)

    def are_all(self, trying: Collection[str], fitting: Collection[str]) -> bool:
        """Whether no node can be expected to run elements any more.

        Args:
            trying: ids of the nodes where hosts are.
            fitting: those of the living nodes that could have an element.
        """
        cannot = self._cannot & set(fitting)
        if not self._cannot or set(trying) - self._cannot:
            return False
        return len(cannot) >= _NODES_MAX or cannot == set(fitting)


#: Seconds until a host that has not come up is given up when its node's room seems to have gone to
#: another. Its own part counts as taken too while Ray makes its runtime environment.
_PLACED_S = 900.0
#: Seconds until a line says that the array waits for room, and between two.
_TELL_S = 30.0


class HostRoom:
    """The room for the elements of one array.

    Args:
        ray: the module, connected.
        spec: the array.

    Attributes:
        nodes: the living ones by their ids, as the last look has found them.
        refusals: the nodes where hosts could not begin.
    """

    def __init__(self, ray: Any, spec: ArraySpec) -> None:
        self._ray = ray
        self._spec = spec
        self._tell_at = 0.0
        self.nodes: Dict[str, Node] = {}
        self.refusals = Refusals()

    def look(self) -> None:
        """Ask Ray for the nodes."""
        self.nodes = {node.node_id: node for node in nodes_of(self._ray.nodes())}

    def shares(
        self,
        hosts: Sequence[Host],
        wanted: int,
        running: int,
        now: float,
    ) -> List[Share]:
        """The hosts that can be started now.

        Args:
            hosts: that there are.
            wanted: how many elements wait.
            running: how many may run that none of these hosts has.
            now: the time.
        """
        wanted -= sum(host.slots for host in hosts if host.state is HostState.STARTING)
        if self._spec.max_in_flight is not None:
            used = sum(host.slots for host in hosts) + running
            wanted = min(wanted, self._spec.max_in_flight - used)
        not_yet = (HostState.STARTING, HostState.SWEEPING)
        starting = {host.record.node_id for host in hosts if host.state in not_yet}
        available = {
            node_id: resources
            for node_id, resources in self._available().items()
            if node_id in self.nodes
            and node_id not in starting
            and not self.refusals.again_in_s(node_id, now)
            and matches(self._spec.host.label_selector, self.nodes[node_id].labels)
        }
        return shares(available, self._spec.host.resources, wanted)

    def can_none(self, hosts: Collection[Host]) -> bool:
        """Whether nothing says any more that a node could run elements."""
        role = self._spec.host
        if any(host.state is HostState.READY for host in hosts):  # its elements may be long
            return False
        fitting = [
            node.node_id
            for node in self.nodes.values()
            if matches(role.label_selector, node.labels)
            and slots_in(node.resources, role.resources)
        ]
        return self.refusals.are_all(
            [host.record.node_id for host in hosts if not host.is_sweeping], fitting
        )

    def is_lost(self, host: Host, now: float) -> bool:
        """Whether Ray cannot place a host that was to be started, since others were quicker."""
        if host.actor.answers or host.is_sweeping or now - host.started_at < _PLACED_S:
            return False
        free = self._available().get(host.record.node_id, {})
        return slots_in(free, self._spec.host.resources) < host.slots

    def tell(self, hosts: Sequence[Host], now: float) -> None:
        """Say now and then what is waited for while there is no host."""
        if not all(host.is_sweeping for host in hosts):
            self._tell_at = now + _TELL_S
        elif now >= self._tell_at:
            self._tell_at = now + _TELL_S
            say(self._waits_for(now))

    def _waits_for(self, now: float) -> str:
        role = self._spec.host
        why = why_not(
            ResourceRequest(role.resources, role.label_selector), list(self.nodes.values())
        )
        if why:
            return f"no element can begin: {why}; waiting for a node that joins"
        waits_s = [self.refusals.again_in_s(node_id, now) for node_id in self.nodes]
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
        found: Dict[str, Dict[str, float]] = state.available_resources_per_node()
        return found


#: Seconds until a node gets another host that ends what is left there, when the last one has died:
#: at first, and at most.
_SWEEP_AGAIN_S, _SWEEP_AGAIN_MAX_S = 5.0, 60.0


@dataclass
class Steps:
    """The next steps.

    Attributes:
        proven: numbers of hosts of which nothing runs any more.
        to_sweep: by node the hosts of which a new one there must end what is left.
    """

    proven: List[int] = field(default_factory=list)
    to_sweep: Dict[str, List[HostRecord]] = field(default_factory=dict)


class DeadHosts:
    """These hosts, and what they had in hand.

    Args:
        records: all hosts that there have ever been, by their numbers; it grows.
        held: by number what each host of an earlier driver had, with the attempts.
        node_dead_s: seconds from a node's death until nothing of it runs.

    Attributes:
        unconfirmed: nodes that were not waited for at the end, where processes may go on.
    """

    def __init__(
        self,
        records: Sequence[HostRecord],
        held: Mapping[int, Dict[int, int]],
        node_dead_s: float = NODE_DEAD_S,
    ) -> None:
        self._records = records
        self._held = {record.number: dict(held.get(record.number, {})) for record in records}
        self._node_dead_s = node_dead_s
        self._slots: Dict[int, int] = {}  # of hosts of this driver
        self._dead_since: Dict[str, float] = {}  # nodes, as far as this driver knows
        self._sweep_at: Dict[str, float] = {}
        self._sweepers_died: Dict[str, int] = {}  # by node
        self.unconfirmed: Set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._held)

    @property
    def node_ids(self) -> Set[str]:
        """The nodes of these hosts."""
        return {self._records[number].node_id for number in self._held}

    def abandon(self) -> List[Dict[int, int]]:
        """Wait for none of them any longer; what each of them had in hand."""
        return list(self._held.values())

    @property
    def running(self) -> int:
        """The number of elements that may still run."""
        return sum(
            min(len(held), self._slots.get(number, len(held)))
            for number, held in self._held.items()
        )

    def add(self, number: int, in_hand: Mapping[int, int], slots: int = 0) -> None:
        """A host is dead, or its actor is.

        Args:
            number: of the host.
            in_hand: the elements that it had, with their attempts.
            slots: how many of them it ran at a time.
        """
        self._held.setdefault(number, {}).update(in_hand)
        self._slots[number] = slots

    def sweeper_died(self, node_id: str, now: float) -> None:
        """The host has died that was to end what others have left on a node."""
        count = self._sweepers_died[node_id] = self._sweepers_died.get(node_id, 0) + 1
        again_s = min(_SWEEP_AGAIN_S * 2 ** min(count - 1, 10), _SWEEP_AGAIN_MAX_S)
        self._sweep_at[node_id] = now + again_s

    def sweeper_closed(self, node_id: str) -> None:
        """Such a host has ended as it should."""
        self._sweepers_died.pop(node_id, None)

    def held(self, number: int) -> Dict[int, int]:
        """The elements that a host had and whose end is not known."""
        return self._held.get(number, {})

    def proven(self, number: int) -> Dict[int, int]:
        """Nothing of a host runs any more; what it had in hand."""
        self._slots.pop(number, None)
        return self._held.pop(number, {})

    def steps(
        self, now: float, alive: Collection[str], sweeping: Collection[int], is_ending: bool
    ) -> Steps:
        """The next steps.

        Args:
            now: the time.
            alive: ids of the living nodes.
            sweeping: numbers of the hosts of which another one ends what is left.
            is_ending: the array is being ended. Then nothing runs a second time, and a dead node
                need not be waited for.
        """
        found = Steps()
        for number in [number for number in self._held if number not in sweeping]:
            record = self._records[number]
            if record.node_id not in alive:
                if self._is_over(record, now, is_ending):
                    found.proven.append(number)
            elif now >= self._sweep_at.get(record.node_id, now):
                found.to_sweep.setdefault(record.node_id, []).append(record)
        return found

    def _is_over(self, record: HostRecord, now: float, is_ending: bool) -> bool:
        """Whether nothing of a host can run again whose node Ray counts as dead."""
        since = self._dead_since.setdefault(record.node_id, now)
        if not self._held[record.number] or now >= since + self._node_dead_s:
            return True
        if is_ending:
            self.unconfirmed.add(record.node_id)
        return is_ending


#: Seconds for one step until a host is ended without it: more than an actor waits for its host.
_STEP_S = 15.0
#: Seconds between two looks while the driver waits for all of them.
_LOOK_S = 0.02


class Closed(NamedTuple):
    """A host whose actor was ended.

    Attributes:
        host: the host.
        left: the hosts whose notes and processes may still be there, itself among them; none when
            it has ended as it should.
    """

    host: Host
    left: Sequence[HostRecord]


@dataclass
class _Closing:
    """One host.

    Attributes:
        host: the host.
        records: the hosts whose notes it removes.
        until: when the last step is given up.
        steps: Ray's references to the answers of those calls that were made: ``forget``, ``close``.
    """

    host: Host
    records: Sequence[HostRecord]
    until: float
    steps: List[Any] = field(default_factory=list)


class Closings:
    """All hosts that are on their way out. Nothing waits for them but ``finish``.

    Args:
        ray: the module, connected.
        leases: they say the same as the notes, which are removed when the head's disk has them.
    """

    def __init__(self, ray: Any, leases: Leases) -> None:
        self._ray = ray
        self._leases = leases
        self._closings: Dict[int, _Closing] = {}

    @property
    def node_ids(self) -> Set[str]:
        """The nodes of these hosts."""
        return {closing.host.record.node_id for closing in self._closings.values()}

    def add(self, host: Host, records: Sequence[HostRecord]) -> None:
        """Let a host remove the notes of these hosts, and end."""
        number = host.record.number
        self._closings[number] = _Closing(host, records, time.monotonic() + _STEP_S)

    def turn(self, now: float) -> Iterator[Closed]:
        """Go on with all that can.

        Yields:
            A host that has ended, has died, or has not answered in time.
        """
        if not self._closings or not self._leases.can_write or not self._leases.commit():
            return
        for number, closing in list(self._closings.items()):
            try:
                has_ended = self._go_on(closing, now)
            except self._ray.exceptions.RayError:
                has_ended = False
            if has_ended is None:
                continue
            del self._closings[number]
            self._ray.kill(closing.host.actor.handle, no_restart=True)
            yield Closed(closing.host, () if has_ended else closing.records)

    def finish(self) -> List[Closed]:
        """Wait until all have ended, as long as two steps may take and the disk is not full."""
        closed: List[Closed] = []
        until = time.monotonic() + 2 * _STEP_S
        while self._closings and self._leases.can_write and time.monotonic() < until:
            closed += self.turn(time.monotonic())
            time.sleep(_LOOK_S)
        return closed

    def _go_on(self, closing: _Closing, now: float) -> Optional[bool]:
        """Make the next call when the last one was answered.

        Returns:
            Whether the host has ended; ``None`` as long as that is not known.
        """
        if closing.steps:
            ready, _ = self._ray.wait([closing.steps[-1]], timeout=0)
            answer = bool(ready) and self._ray.get(ready[0])
            if not ready and now < closing.until:
                return None
            if len(closing.steps) == 2:
                return bool(answer)
        closing.until = now + _STEP_S
        closing.steps.append(self._call(closing.host, closing))
        return None

    def _call(self, host: Host, closing: _Closing) -> Any:
        if closing.steps:
            return host.actor.handle.close.remote(True)  # else it may not have read the first order
        order = {"do": "forget", "run_dirs": [record.run_dir for record in closing.records]}
        number, host.replica.orders = host.replica.orders, host.replica.orders + 1
        return host.actor.handle.order.remote(name(host.replica.replica_id), number, order)


#: Seconds beyond the grace period until a host that was told to end is given up.
_END_MARGIN_S = 30.0


class HostPool:
    """The hosts that there are, and those of which nothing proves yet that no process of them runs.

    Args:
        ray: the module, connected.
        spec: the array.
        submission_id: of the job.
        starts: starts hosts.
        calls: to their actors.
        leases: the elements.

    Attributes:
        dead_hosts: hosts of which it is not known that nothing runs.
        room: for more of them.
        hosts: those that there are, by their numbers.
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
        # Also when nothing was leased: an earlier driver's hosts have folders, and may be there.
        self.dead_hosts = DeadHosts(self._book.records, leases.held, node_dead_s())
        self.room = HostRoom(ray, spec)
        self._closings = Closings(ray, leases)
        self._end_by: Optional[float] = None
        self.hosts: Dict[int, Host] = {}

    @property
    def has_ended(self) -> bool:
        """Whether nothing runs any more, after ``end`` or when all elements are over."""
        are_idle = self._end_by is None or all(
            host.state is HostState.IDLE for host in self.hosts.values()
        )
        return are_idle and not self.dead_hosts

    def of(self, actor: Any) -> List[Host]:
        """The host of an actor, unless it is given up."""
        return [host for host in self.hosts.values() if host.actor is actor]

    def look(self, now: float, waiting: int) -> None:
        """Start hosts where there is room, end idle ones, and prove that dead ones are dead.

        Args:
            now: the time.
            waiting: how many elements wait.
        """
        self.room.look()
        for host in list(self.hosts.values()):
            is_late = self._end_by is not None and now >= self._end_by
            is_late = is_late and host.state is not HostState.IDLE and not host.sweeps
            if host.record.node_id not in self.room.nodes:
                self.lost(host)
            elif is_late or self.room.is_lost(host, now):
                self.give_up(host)
        self._prove(now)
        if self._end_by is not None:
            return
        if waiting:
            self._grow(now, waiting)
        else:
            for host in self.hosts.values():
                if host.state is HostState.READY and not host.in_hand:
                    host.state = HostState.CLOSING
                    self._calls.order(host.replica, {"do": "end"})

    def end(self) -> None:
        """Let all hosts end what they run."""
        self._end_by = time.monotonic() + self._spec.grace_s + _END_MARGIN_S
        self._leases.is_ending = True
        for host in list(self.hosts.values()):
            if host.state in (HostState.READY, HostState.CLOSING, HostState.IDLE):
                self._calls.order(host.replica, {"do": "end"})
            elif not host.sweeps:
                self.give_up(host)

    def idle(self, host: Host) -> None:
        """A host has ended all that it ran, as it was told."""
        # What it has in hand came when it was told to end.
        self._leases.give_back_all(host.in_hand, host.record.number, has_run=False)
        host.in_hand.clear()
        host.state = HostState.IDLE
        if self._end_by is None:
            self._let_go(host, [host.record])

    def give_up(self, host: Host) -> None:
        """End the actor of a host."""
        self._ray.kill(host.actor.handle, no_restart=True)
        host.actor.dead = True
        self.lost(host)

    def refused(self, host: Host, is_explained: bool, has_started: bool) -> None:
        """A host cannot run elements: start none on its node for a while.

        ``has_started`` is whether its actor was there, and may have begun something.
        """
        if not host.is_sweeping:
            self.room.refusals.add(host.record.node_id, time.monotonic(), is_explained)
        if has_started:
            self.give_up(host)
        else:
            self.lost(host)
            self.dead_hosts.proven(host.record.number)

    def lost(self, host: Host) -> None:
        """A host is dead, or its actor is: what it had may run until that is proven."""
        if self.hosts.pop(host.record.number, None) is None:
            return
        self.dead_hosts.add(host.record.number, host.in_hand, host.slots)
        if host.is_sweeping:
            self.dead_hosts.sweeper_died(host.record.node_id, time.monotonic())
        for record in host.swept:  # their notes may still be there
            self.dead_hosts.add(record.number, {})

    def swept(self, host: Host, report: Mapping[str, Any]) -> None:
        """A host has ended what an earlier one had left on its node, and read its notes."""
        number = int(report["host"])
        words = take_notes(self.dead_hosts.proven(number), report, self._leases)
        if words:
            say(f"nothing of a dead host runs on {host.replica.node.host}: {words}")
        host.swept.append(host.sweeps.pop(number))
        if not host.sweeps:
            self._let_go(host, [*host.swept, host.record])

    @property
    def left_on(self) -> Set[str]:
        """The nodes where hosts are, or may have left something."""
        hosts = {host.record.node_id for host in self.hosts.values()}
        return hosts | self._closings.node_ids | self.dead_hosts.node_ids

    def close(self) -> None:
        """Let living actors end; those of which that is not known are dead_hosts then."""
        for host in [host for host in self.hosts.values() if host.actor.answers]:
            self._let_go(host, [host.record])
        self.hosts.clear()  # the others have not come up; Ray ends them with the driver
        self._take(self._closings.finish())

    def let_hosts_end(self, now: float) -> None:
        """Go on with the ends of hosts that have nothing to do any more."""
        self._take(self._closings.turn(now))

    def _take(self, closed: Iterable[Closed]) -> None:
        """Note which hosts have ended, and of which that is not known."""
        for host, left in closed:
            for record in left:
                self.dead_hosts.add(record.number, {})
            if left and host.is_sweeping:
                self.dead_hosts.sweeper_died(host.record.node_id, time.monotonic())
            elif host.is_sweeping:
                self.dead_hosts.sweeper_closed(host.record.node_id)

    def _let_go(self, host: Host, records: Sequence[HostRecord]) -> None:
        """End a host that has nothing to do any more; it removes the notes of these before."""
        self.hosts.pop(host.record.number, None)
        self._closings.add(host, records)

    # ------------------------------------------------------------------ room

    def _grow(self, now: float, wanted: int) -> None:
        hosts, running = list(self.hosts.values()), self.dead_hosts.running
        found = self.room.shares(hosts, wanted, running, now)
        if found:
            records = self._book.add([share.node_id for share in found])
            for record, share in zip(records, found):
                host = self._start(record, share.slots)
                self._calls.order(host.replica, self._starts.prepare(host))
        self.room.tell(list(self.hosts.values()), now)

    def _start(self, record: HostRecord, slots: int) -> Host:
        node = self.room.nodes[record.node_id]
        host = self.hosts[record.number] = self._starts.start(record, node, slots)
        host.state = HostState.STARTING if slots else HostState.SWEEPING
        self._calls.pull(host.actor)
        return host

    # ------------------------------------------------------------------ proof

    def _prove(self, now: float) -> None:
        """End what dead hosts have left: by their nodes' death, or by another host there."""
        sweeping = {number for host in self.hosts.values() for number in host.sweeps}
        steps = self.dead_hosts.steps(now, self.room.nodes, sweeping, self._end_by is not None)
        for number in steps.proven:  # what had begun there, nobody knows
            held = self.dead_hosts.proven(number)
            if self._book.records[number].node_id in self.dead_hosts.unconfirmed:
                self._leases.leave_all(held)
            else:
                self._leases.give_back_all(held, number, has_run=True)
        for node_id, dead in steps.to_sweep.items():
            host = self._start(self._book.add([node_id])[0], 0)
            host.sweeps = {record.number: record for record in dead}
            places = [[record.number, record.tag, record.run_dir] for record in dead]
            self._calls.order(host.replica, {"do": "sweep", "hosts": places})


def take_notes(held: Dict[int, int], noted: Mapping[str, Any], leases: Leases) -> str:
    """Take over what a dead host has noted, of which nothing runs any more.

    Args:
        held: the elements that it had, with their attempts.
        noted: the host's number, what has ended, and what had begun, as ``sweeping.Noted`` has it.
        leases: the elements.

    Returns:
        What became of them, in words; empty when it had none.
    """
    number, count = noted["host"], len(held)
    for row in noted["ended"]:
        if held.get(row[0]) == row[1]:
            del held[row[0]]
            leases.ended(number, row)
    has_begun = {tuple(lease) for lease in noted["begun"] or ()}
    waited = {}
    if noted["begun"] is not None:
        waited = dict(lease for lease in held.items() if lease not in has_begun)
    begun = {element: held[element] for element in held if element not in waited}
    leases.give_back_all(waited, number, has_run=False)
    leases.give_back_all(begun, number, has_run=True)
    ended = count - len(held)
    return f"of {count} elements, {ended} had ended, and {len(held)} are leased again" * (count > 0)
