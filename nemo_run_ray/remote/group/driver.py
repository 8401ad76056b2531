"""The driver of a group: a Ray program that feeds the pure machine and carries out its actions.

It holds no resources. One placement group gives all replicas their nodes. On every node one actor
starts the replicas' processes and passes their reports back; a replica with accelerators or a
runtime environment of its own gets an actor of its own, since only Ray can give it those. An actor
is a worker with ray imported: 0.6 s of a CPU and some 60 MB, which plain replicas can share.
"""

from __future__ import annotations

import json
import logging
import os
import random
import secrets
import signal
import socket
import sys
import time
from typing import Any, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple

from ..files import write_file
from ..fit import (
    Node,
    ResourceRequest,
    amounts_text,
    fits,
    hosts,
    nodes_of,
    slots,
    why_not,
)
from ..hosts.actors import (
    Actor,
    ReplicaHandle,
    ReplicaId,
    actor_of,
    forget_runtime_env,
    name,
    prepare_order,
    start_actors,
)
from ..hosts.calls import Answer, Calls, Died, Pulled
from ..node.output import NO_PROCESS_LEFT, say, write
from ..node.rundir import take_secrets
from ..node.supervise import Runner
from ..spec import RENDEZVOUS, GroupRows, GroupSpec, RoleSpec, env_key, status_file_name
from ..status import Phase, Reason, ReplicaState
from . import machine
from .machine import Event, Group, Kind, Outcome, Replica

#: Label of every node that holds its id.
NODE_ID = "ray.io/node-id"
#: Seconds beyond the grace period until a replica that was told to end is given up.
_END_MARGIN_S = 30.0
#: Seconds between two looks at the nodes while the replicas are prepared, and two lines in the log.
_WATCH_S, _TELL_S = 5.0, 30.0
#: Seconds in which a worker comes up by an interpreter of the role's own: one that is there, and
#: one that is a command, which may install something first. Ray starts it again and again, and
#: nothing else on the node meanwhile: it must have an end.
_OWN_PYTHON_S, _OWN_COMMAND_S = 90.0, 360.0
#: Fields that Ray builds before it starts a worker, and its default time limit for that.
_BUILT, _BUILD_S = ("pip", "uv", "conda"), 600.0
#: Seconds between two looks at the placement group, at first and later on.
_LOOK_S, _LOOK_MAX_S = 0.1, 1.0
#: Seconds until a group whose roles spread tries other nodes.
_OTHERS_S = 3.0
#: Seconds until the first line about a group that waits for room.
_FIRST_TELL_S = 3.0
#: Seconds for which a group must look infeasible: nodes may be joining right now.
_INFEASIBLE_S = 3.0


def own_python_s(runtime_env: Mapping[str, Any]) -> float:
    """Seconds in which a worker must have come up by ``py_executable`` of an environment."""
    is_command = len(str(runtime_env["py_executable"]).split()) > 1
    start_s = _OWN_COMMAND_S if is_command else _OWN_PYTHON_S
    if not any(runtime_env.get(name) for name in _BUILT):
        return start_s
    given = (runtime_env.get("config") or {}).get("setup_timeout_seconds", _BUILD_S)
    return start_s + (float(given) if given > 0 else float("inf"))


def run(runner: Runner, spec: GroupSpec, job: str, submission_id: str) -> int:
    """Run a group to its end; its exit code."""
    runner.left_on = None  # until all nodes have confirmed it
    driver = _Driver(runner, spec, job, submission_id)
    outcome = driver.run()
    if driver.all_ended:
        runner.left_on = ()
    runner.cause, runner.ending = outcome.cause.name, outcome.words
    if outcome.cause is Reason.CANCELLED:
        runner.cancelled = True
        proof = NO_PROCESS_LEFT if driver.all_ended else "not every node has confirmed it"
        runner.ending = f"cancelled; {proof}"
    elif outcome.cause is Reason.NONE:
        runner.ending = "exit code 0"
    return outcome.code


class _Driver:
    """One group."""

    def __init__(
        self,
        runner: Runner,
        spec: GroupSpec,
        job: str,
        submission_id: str,
    ) -> None:
        self._runner = runner
        self._spec = spec
        self._submission_id = submission_id
        self._job = job
        self._secrets = take_secrets(spec.secrets)
        self._config = forget_runtime_env()
        self._replicas: Dict[ReplicaId, ReplicaHandle] = {}
        self._actors: List[Actor] = []
        self._watch_at = self._tell_at = self._placed_at = 0.0
        #: Every node has confirmed that nothing of the group runs there.
        self.all_ended = False
        log = os.readlink("/proc/self/fd/1")
        is_rays = os.path.basename(log) == f"job-driver-{submission_id}.log"
        folder = os.path.dirname(log)
        self._rows_path = os.path.join(folder, status_file_name(submission_id)) if is_rays else None
        self._shown = ""
        self._group = Group.of(
            Replica(role.name, index, role.service, role.restarts)
            for role in spec.roles
            for index in range(role.replicas)
        )

    def run(self) -> Outcome:
        self._ray = connect()
        self._calls = Calls(self._ray)
        room = None
        try:
            room = self._wait_for_room()
            while self._group.phase is not Phase.OVER:
                self._turn()
            assert self._group.outcome is not None  # no group is over without one
            return self._group.outcome
        finally:
            self._close(room)

    # ------------------------------------------------------------------ room

    def _wait_for_room(self) -> Optional[PlacementGroup]:
        try:
            room = PlacementGroup(self._ray, self._spec)
            while self._group.phase is not Phase.OVER:
                if room.look():
                    self._settle(room)
                    break
                self._show(room.waits_for)
                self._obey()
            return room
        except NoRoom as error:
            self._happened(Event(Kind.REFUSED, None, error.words, cause=error.cause))
            return None  # Ray drops the request for room when the driver ends

    def _settle(self, room: PlacementGroup) -> None:
        self._replicas = _replicas_on(room.nodes(), self._spec, self._group, self._submission_id)
        for role in self._spec.roles:
            hosts = [self._replicas[role.name, index].node.host for index in range(role.replicas)]
            say(f"{role.name} goes to {', '.join(dict.fromkeys(hosts))}")
        self._actors = start_actors(self._ray, room.group, self._replicas.values())
        for actor in self._actors:
            self._calls.pull(actor)
        self._tell_at = time.monotonic() + _TELL_S
        self._placed_at = time.monotonic()
        self._happened(Event(Kind.PLACED))

    # ------------------------------------------------------------------ what happens

    def _turn(self) -> None:
        self._obey()
        self._calls.repeat()
        now = time.monotonic()
        for replica in self._replicas.values():
            if replica.end_by is not None and now >= replica.end_by:
                replica.end_by = None
                self._give_up(replica)
        if self._group.phase is Phase.PREPARING and now >= self._watch_at:
            self._watch_at = now + _WATCH_S
            self._watch(now)
        for answer in self._calls.answers():
            for event in events_of(answer):
                self._happened(event)
            if isinstance(answer, Pulled) and not self._are_lost(answer.actor):
                self._calls.pull(answer.actor)

    def _obey(self) -> None:
        order = self._runner.order()
        if order == b"":
            say("our first process was killed; Ray ends what the group runs")
            os._exit(1)  # with the driver end its actors, and with them all processes
        if order is not None:
            self._happened(Event(Kind.STOP, words="cancelled"))

    def _give_up(self, replica: ReplicaHandle) -> None:
        """Its processes have not ended in time: the node is away, or the kernel holds them."""
        actor = actor_of(replica)
        if not any(
            self._life(neighbour.replica_id) in (ReplicaState.STARTED, ReplicaState.READY)
            for neighbour in actor.replicas
        ):
            self._ray.kill(actor.handle, no_restart=True)
            actor.dead = True
        self._lost(replica, "it did not end when told to, and was given up")

    def _watch(self, now: float) -> None:
        """End the wait for nodes that have died since the placing, and say what is waited for."""
        alive = {node.node_id for node in nodes_of(self._ray.nodes())}
        waiting = [
            replica
            for replica in self._replicas.values()
            if self._life(replica.replica_id) is ReplicaState.AWAITED
        ]
        for replica in waiting:
            if replica.node.node_id not in alive:
                self._lost(replica, "the node died before the replica was prepared")
            elif not actor_of(replica).answers:
                self._refuse_own_python(replica, now - self._placed_at)
        if now >= self._tell_at and waiting:
            self._tell_at = now + _TELL_S
            texts = [
                f"{name(replica.replica_id)} on {replica.node.host}{_built_for(replica)}"
                for replica in waiting[:8]
            ]
            say(f"waiting for {len(waiting)} replica(s) to be prepared: {', '.join(texts)}")

    def _refuse_own_python(self, replica: ReplicaHandle, waited_s: float) -> None:
        executable = replica.role.runtime_env.get("py_executable")
        if executable and waited_s >= own_python_s(replica.role.runtime_env):
            words = (
                f"no worker on node {replica.node.host} ({replica.node.address}) has come up in "
                f"{waited_s:.0f} s with py_executable={executable!r}: it must be there on the "
                "node, and be able to import ray"
            )
            cause = Reason.RUNTIME_ENV
            self._happened(Event(Kind.UNPREPARED, replica.replica_id, words, cause=cause))

    def _lost(self, replica: ReplicaHandle, why: str) -> None:
        for event in losses(replica, why):
            self._happened(event)

    def _are_lost(self, actor: Actor) -> bool:
        return all(
            self._life(replica.replica_id) is ReplicaState.LOST for replica in actor.replicas
        )

    def _life(self, replica_id: ReplicaId) -> ReplicaState:
        return self._group.replicas[replica_id].life

    # ------------------------------------------------------------------ what is done about it

    def _happened(self, event: Event) -> None:
        before = self._group.phase
        orders = self._group.step(event)
        phase = self._group.phase
        if before is not phase is Phase.ENDING and self._group.outcome is not None:
            say(f"ending the group: {self._group.outcome.words}")
        elif before is not phase is Phase.PRIMARIES:
            has_services = any(role.service for role in self._spec.roles)
            say("every service is ready; the primaries start" if has_services else "started")
        for order, replica_id in orders:
            self._order(order, self._replicas[replica_id])
        self._show()

    def _order(self, order: str, replica: ReplicaHandle) -> None:
        if order == machine.PREPARE:
            values = prepare_order(replica, self._job, self._secrets, self._config)
        elif order == machine.START:
            replica.starts += 1
            if replica.starts > 1:
                left = self._group.replicas[replica.replica_id].restarts
                say(f"{name(replica.replica_id)} is started again, {left} left")
            addresses = {key: handle.node.address for key, handle in self._replicas.items()}
            ports = {key: handle.ports for key, handle in self._replicas.items()}
            values = {"env": variables(self._spec, replica.replica_id, addresses, ports)}
        else:
            replica.end_by = time.monotonic() + replica.role.task.grace_s + _END_MARGIN_S
            values = {}
        self._calls.order(replica, {**values, "do": order})

    def _show(self, waits_for: str = "") -> None:
        """Write the group's state beside the job's log, where Ray's log API serves it."""
        nodes = {replica_id: replica.node for replica_id, replica in self._replicas.items()}
        text = json.dumps(group_rows(self._group, nodes, waits_for))
        if self._rows_path is None or text == self._shown:
            return
        try:
            write_file(self._rows_path, text)
        except OSError:  # a full disk: the group continues, and its roles are not shown
            return
        self._shown = text

    def _close(self, room: Optional[PlacementGroup]) -> None:
        """Let the nodes clean up, and give everything back."""
        # An actor that never answered has not started anything, or ends it with its own end.
        living = [actor for actor in self._actors if actor.answers and not actor.dead]
        confirmed = self._calls.close(living)
        lost = any(state.life is ReplicaState.LOST for state in self._group.replicas.values())
        self.all_ended = confirmed and not lost
        if room is not None:
            room.leave()
        self._ray.shutdown()


def _built_for(replica: ReplicaHandle) -> str:
    """Name what Ray builds on the node before the replica's worker comes up."""
    if actor_of(replica).answers or not replica.role.runtime_env:
        return ""
    return f" (Ray makes its runtime environment: {', '.join(sorted(replica.role.runtime_env))})"


def group_rows(group: Group, nodes: Mapping[ReplicaId, Node], waits_for: str) -> GroupRows:
    """A group's state for ``status``.

    Args:
        group: the state.
        nodes: the node of every replica that has one.
        waits_for: why there is no room yet, in words; empty when there is.
    """
    rows: GroupRows = {"phase": group.phase.value, "waits_for_room": waits_for, "roles": []}
    for state in group.replicas.values():
        node = nodes.get(state.replica_id)
        rows["roles"].append(
            {
                "role": state.role,
                "replica": state.index,
                "service": state.service,
                "state": state.life.value,
                "exit_code": state.code,
                "waits_for": state.waits_for if state.life is ReplicaState.STARTED else "",
                "node": node.node_id if node else "",
                "host": node.host if node else "",
                "address": node.address if node else "",
            }
        )
    return rows


def _replicas_on(
    nodes: Sequence[Node], spec: GroupSpec, group: Group, submission_id: str
) -> Dict[ReplicaId, ReplicaHandle]:
    """The replicas of a group on the nodes that Ray has given them, in order."""
    roles = {role.name: role for role in spec.roles}
    mark = secrets.token_hex(8)
    return {
        state.replica_id: ReplicaHandle(
            replica_id=state.replica_id,
            role=roles[state.role],
            node=node,
            bundle=number,
            tag=f"{submission_id}/{mark}.{number}",
            run_dir=f"{submission_id}~{state.role}-{state.index}",
        )
        for number, (state, node) in enumerate(zip(group.replicas.values(), nodes))
    }


def connect() -> Any:
    try:
        import ray
    except ImportError as error:
        raise RuntimeError(
            f"{sys.executable} on node {socket.gethostname()} has no ray, which a group needs"
        ) from error
    ray.init(
        address=os.environ.get("RAY_ADDRESS", "auto"),
        log_to_driver=False,
        logging_level=logging.WARNING,
    )
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Ray's handler would leave at once
    return ray


# ---------------------------------------------------------------------- room


class NoRoom(Exception):
    """The group will not be placed."""

    def __init__(self, cause: Reason, words: str) -> None:
        super().__init__(words)
        self.cause = cause
        self.words = words


class PlacementGroup:
    """One placement group for all replicas: all get their nodes, or none does."""

    def __init__(self, ray: Any, spec: GroupSpec) -> None:
        self._ray = ray
        self._spec = spec
        self._began_at = time.monotonic()
        self._tell_at = self._began_at + _FIRST_TELL_S
        self._infeasible_since: Optional[float] = None
        self._turn = 0
        self._others_at = self._began_at + _OTHERS_S
        self._pause_s = _LOOK_S
        self.waits_for = ""
        self.group = self._ask()

    def look(self) -> bool:
        """Whether the group has its room now; this waits a moment for it.

        Raises:
            NoRoom: it never will, or not in time.
        """
        nodes = nodes_of(self._ray.nodes())
        # Ray places the bundles of a node that has died anew.
        if self.group.wait(0) and set(self._places()) <= {node.node_id for node in nodes}:
            return True
        time.sleep(self._pause_s)  # Ray's own wait takes whole seconds only: 0.2 is none at all
        self._pause_s = min(self._pause_s * 1.3, _LOOK_MAX_S)
        now = time.monotonic()
        never = why_never(self._spec, nodes)
        stats = self._ray.util.placement_group_table(self.group).get("stats", {})
        if not never and stats.get("scheduling_state") == "INFEASIBLE":
            strategies = {self._spec.strategy, *(role.spread for role in self._spec.roles)}
            words = ", ".join(sorted(filter(None, strategies)))
            never = f"no nodes of this cluster can host the group ({words})"
        words = why_waiting(self._spec, nodes, self._ray.available_resources(), never)
        if not never:
            self._infeasible_since = None
        elif self._infeasible_since is None:
            self._infeasible_since = now
        elif now - self._infeasible_since >= _INFEASIBLE_S and not self._spec.wait_for_nodes:
            raise NoRoom(Reason.UNSCHEDULABLE, words)
        limit_s = self._spec.placing_timeout_s
        if limit_s is not None and now - self._began_at >= limit_s:
            raise NoRoom(Reason.NOT_PLACED, f"not placed within {limit_s:g} s: {words}")
        if now >= self._tell_at:
            self.waits_for = words
            say(f"waiting for room for {now - self._began_at:.0f} s: {words}")
            self._tell_at = now + _TELL_S
        if now >= self._others_at and any(role.spread for role in self._spec.roles):
            self._others_at, self._turn = now + _OTHERS_S, self._turn + 1
            self.leave()
            self.group = self._ask()
        return False

    def nodes(self) -> List[Node]:
        """The node of every replica, in the order of the bundles."""
        known = {node.node_id: node for node in nodes_of(self._ray.nodes())}
        return [known[node_id] for node_id in self._places()]

    def leave(self) -> None:
        """Give everything back."""
        self._ray.util.remove_placement_group(self.group)

    def _places(self) -> List[str]:
        where = self._ray.util.placement_group_table(self.group)["bundles_to_node_id"]
        return [where[number] for number in sorted(where)]

    def _ask(self) -> Any:
        requests = requests_of(self._spec, nodes_of(self._ray.nodes()), self._turn)
        return self._ray.util.placement_group(
            [dict(request.resources) for request in requests],
            strategy=self._spec.strategy,
            bundle_label_selector=[dict(request.selector) for request in requests],
        )


def requests_of(spec: GroupSpec, nodes: Sequence[Node], turn: int = 0) -> List[ResourceRequest]:
    """The request of every replica, in order.

    Ray has one strategy for all bundles. To spread one role's replicas inside a packed group, each
    of them gets a disjoint set of candidate nodes: other sets each time, at random, and for a role
    that only prefers to spread the first time alone.
    """
    requests = []
    for role in spec.roles:
        request = ResourceRequest(role.resources, role.label_selector)
        able = sorted(node.node_id for node in hosts(request, nodes))
        random.Random(turn).shuffle(able)
        for index in range(role.replicas):
            chosen = able[index :: role.replicas]
            if role.spread == "STRICT_SPREAD" or (role.spread and turn == 0 and chosen):
                # No node has the label "none": the replica waits until asked for again.
                selector = {**role.label_selector, NODE_ID: f"in({','.join(chosen) or 'none'})"}
                requests.append(ResourceRequest(role.resources, selector))
            else:
                requests.append(request)
    return requests


def why_never(spec: GroupSpec, nodes: Sequence[Node]) -> str:
    """The reason why these nodes can never host the group, even when idle; empty if unknown.

    Ray calls infeasible what its strategy forbids, and not what is too much in all.
    """
    for role in spec.roles:
        request = ResourceRequest(role.resources, role.label_selector)
        why = why_not(request, nodes)
        able = hosts(request, nodes)
        if not why and role.replicas > sum(_slots(node, role.resources) for node in able):
            why = (
                f"its {role.replicas} replicas ask for {amounts_text(role.resources)} each; the "
                f"{len(able)} node(s) that can host one, idle, cannot give that at once"
            )
        if why:
            return f"{role.name}: {why}"
    asked, total = _asked(spec), _sum((node.resources, 1) for node in nodes)
    if fits(asked, total):
        return ""
    shown = {key: total.get(key, 0.0) for key in asked}
    return f"the nodes, idle, cannot give that at once ({amounts_text(shown)})"


def why_waiting(
    spec: GroupSpec, nodes: Sequence[Node], available: Mapping[str, float], never: str = ""
) -> str:
    """One line for a group that waits: asked, available, what does not fit and why."""
    asked = _asked(spec)
    free = {key: available.get(key, 0.0) for key in asked}
    count = sum(role.replicas for role in spec.roles)
    busy = next((role for role in spec.roles if not fits(role.resources, free)), None)
    if never:
        why = never
    elif busy is not None:
        able = hosts(ResourceRequest(busy.resources, busy.label_selector), nodes)
        names = ", ".join(sorted(node.host for node in able)[:8])
        why = f"{busy.name}/0 waits: the nodes that can host it are busy ({names})"
    elif not fits(asked, free):
        why = "all bundles start together, and what is free now is too little for all of them"
    else:  # what is free is known of all nodes together
        why = "that is enough: Ray is about to place them" + (
            ", unless it lies on nodes that cannot take them" if len(nodes) > 1 else ""
        )
    return (
        f"asked {amounts_text(asked)} in {count} bundle(s); available {amounts_text(free)}; {why}"
    )


def _slots(node: Node, resources: Mapping[str, float]) -> float:
    need = {key: amount for key, amount in resources.items() if amount}
    return slots(node.resources, need) if need else float("inf")


def _asked(spec: GroupSpec) -> Dict[str, float]:
    return _sum((role.resources, role.replicas) for role in spec.roles)


def _sum(amounts: Iterable[Tuple[Mapping[str, float], int]]) -> Dict[str, float]:
    total: Dict[str, float] = {}
    for resources, times in amounts:
        for key, amount in resources.items():
            total[key] = total.get(key, 0.0) + amount * times
    return total


# ---------------------------------------------------------------------- reports


def events_of(answer: Answer) -> Iterator[Event]:
    """Turn an answer into events, and write what the replicas have printed into the log."""
    if isinstance(answer, Died):
        for replica in answer.actor.replicas:
            cause = Reason.RUNTIME_ENV if answer.is_env else Reason.NOT_STARTED
            yield from losses(replica, answer.words, cause)
        return
    for replica in answer.actor.replicas:
        if replica.node.node_id != answer.node_id:
            words = f"Ray has moved the replica to the node {answer.node_id} since"
            yield from losses(replica, words)
        first, reports = answer.reports.get(name(replica.replica_id), (0, []))
        for number, report in enumerate(reports, start=first):
            if number == replica.seen:
                replica.seen += 1
                yield from _events_of_report(replica, json.loads(report))


def losses(replica: ReplicaHandle, why: str, cause: Reason = Reason.NOT_STARTED) -> Iterator[Event]:
    """The events of a replica that is lost.

    A dead actor means that a replica which is awaited still cannot be prepared, for Ray's own
    reason: a runtime_env that cannot be built, an image that does not exist. For other replicas the
    machine ignores that event.
    """
    where = f"node {replica.node.host} ({replica.node.address})"
    if actor_of(replica).dead:
        words = f"no worker on {where}: {why}"
        yield Event(Kind.UNPREPARED, replica.replica_id, words, cause=cause)
    yield Event(Kind.LOST, replica.replica_id, f"{where}: {why}")


def _events_of_report(replica: ReplicaHandle, report: Mapping[str, Any]) -> Iterator[Event]:
    kind, words = report["at"], report.get("words", "")
    if kind == "text":
        text = str(report["text"])
        prefix = replica.prefix
        write(prefix + text[:-1].replace("\n", f"\n{prefix}") + "\n")
    elif kind == "failed":
        yield from losses(replica, words)
    elif kind == "gone":
        others = f", and {report['left']} others with it" if report["left"] else ""
        yield from losses(replica, f"our process there was killed{others}")
    else:
        who = name(replica.replica_id)
        if kind == "prepared":
            replica.ports = report["ports"]
        elif kind == "waiting":
            say(f"{who} is {words}")
        elif kind == "exited":
            replica.end_by = None
            say(f"{who} on {replica.node.host} ended: {words}")
        yield Event(Kind(kind), replica.replica_id, words, report.get("code", 0))


# ---------------------------------------------------------------------- addresses


def variables(
    spec: GroupSpec,
    replica_id: ReplicaId,
    hosts: Mapping[ReplicaId, str],
    ports: Mapping[ReplicaId, Mapping[str, int]],
) -> Dict[str, str]:
    """The variables of one replica.

    Every role's addresses by the role's name (docs/groups.md), NeMo-Run's macros, and for roles
    without a launcher what ``torch.distributed`` reads.

    Args:
        spec: the group.
        replica_id: the replica.
        hosts: address of every replica's node.
        ports: every replica's ports by name.
    """
    found: Dict[str, str] = {}
    for number, role in enumerate(spec.roles):
        replicas = [(role.name, index) for index in range(role.replicas)]
        prefix = f"NEMO_RUN_{env_key(role.name)}"
        found[f"{prefix}_HOST"] = hosts[replicas[0]]
        found[f"{prefix}_HOSTS"] = ",".join(hosts[replica] for replica in replicas)
        found[f"NEMO_RUN_HET_GROUP_HOST_{number}"] = hosts[replicas[0]]
        for port in role.ports:
            if port != RENDEZVOUS:
                # A replica asks for its own ports by the name by which others ask for the first's.
                own = replica_id if replica_id[0] == role.name else replicas[0]
                found[f"{prefix}_PORT_{env_key(port)}"] = str(ports[own][port])
                found[f"{prefix}_PORTS_{env_key(port)}"] = ",".join(
                    str(ports[replica][port]) for replica in replicas
                )
    return {**found, **_own(spec, replica_id, hosts, ports)}


def _own(
    spec: GroupSpec,
    replica_id: ReplicaId,
    hosts: Mapping[ReplicaId, str],
    ports: Mapping[ReplicaId, Mapping[str, int]],
) -> Dict[str, str]:
    role = next(role for role in spec.roles if role.name == replica_id[0])
    head = (role.name, 0)
    found = {
        "NEMO_RUN_HEAD_NODE_IP": hosts[head],
        "NEMO_RUN_NUM_NODES": str(role.replicas),
        "NEMO_RUN_NODE_RANK": str(replica_id[1]),
        "NEMO_RUN_NPROC_PER_NODE": str(role.processes),
    }
    if RENDEZVOUS in role.ports:
        found["NEMO_RUN_RDZV_PORT"] = str(ports[head][RENDEZVOUS])
        if not role.ranked:
            found.update(_torchrun(role, replica_id, hosts))
    if role.ranked:
        found.update(
            NODE_RANK=str(replica_id[1]),
            WORLD_SIZE=str(role.replicas * role.processes),
            LOCAL_WORLD_SIZE=str(role.processes),
            MASTER_ADDR=hosts[head],
            MASTER_PORT=found["NEMO_RUN_RDZV_PORT"],
        )
    return found


def _torchrun(
    role: RoleSpec, replica_id: ReplicaId, hosts: Mapping[ReplicaId, str]
) -> Dict[str, str]:
    """Variables that keep torchrun from asking for the host's own name.

    It hosts the rendezvous only where that name resolves to the rendezvous' address, and gives the
    name to the workers as ``MASTER_ADDR``; beside ``127.0.0.1`` in /etc/hosts (Debian) both fail.
    """
    found = {
        "PET_RDZV_CONF": f"is_host={int(replica_id[1] == 0)}",
        "PET_LOCAL_ADDR": hosts[replica_id],
    }
    return {name: value for name, value in found.items() if name not in role.task.env}
