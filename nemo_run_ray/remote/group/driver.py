"""The driver of a group: places the roles on nodes, feeds the pure machine, and does what it says.

It is a Ray program that holds no resources. One placement group gives all replicas their nodes. An
actor in the bundle of a replica starts its process and passes its reports back. The replicas of a
node that are alike to Ray share one, since each is a process of 70 MiB that takes 0.5 s to start.
"""

from __future__ import annotations

import json
import math
import random
import secrets
import time
from collections import Counter
from contextlib import suppress
from time import monotonic
from typing import Any, Iterable, Mapping, Sequence

from ..end_record import NO_PROCESS_LEFT
from ..files import log_folder, write_file
from ..fit import (
    Amounts,
    Node,
    ResourceRequest,
    amounts_text,
    fits,
    hosts,
    nodes_of,
    slots,
    why_not,
)
from ..hosts.actors import Actors, ReplicaHandle, ReplicaId, code_of, is_cancelled, name
from ..node.output import say, write_lines
from ..node.rundir import take_secrets
from ..node.supervise import Runner
from ..spec import RENDEZVOUS, GroupRows, GroupSpec, Json, RoleSpec, env_key, status_file_name
from ..status import Phase, Reason, ReplicaState
from . import machine
from .machine import Event, Group, Kind, Replica

#: Label of every node that holds its id.
NODE_ID = "ray.io/node-id"
#: Seconds beyond the grace period until a replica that was told to end is given up.
_END_MARGIN_S = 30.0
#: Seconds between two looks at the nodes while the replicas are prepared, and two lines in the log.
_WATCH_S, _TELL_S = 5.0, 30.0
#: Seconds between two looks at the placement group, at first and later on.
_LOOK_S, _LOOK_MAX_S = 0.1, 1.0
#: Seconds until a group whose roles spread tries other nodes, until the first line about one that
#: waits, and for which one must look infeasible, since nodes may be joining right now.
_FIRST_S = 3.0
#: Seconds in which a worker must come up by a ``py_executable``, after those at least in which
#: something is installed for it: Ray itself tries it for ever.
_OWN_PYTHON_S, _BUILD_S = 90.0, 600.0


class GroupDriver:
    """One group."""

    def __init__(self, runner: Runner, spec: GroupSpec, job: str, submission_id: str):
        self._runner = runner
        self._spec = spec
        self._submission_id = submission_id
        self._runner.left_on = None  # until all nodes have confirmed it
        self._actors = Actors(job, take_secrets(spec.secrets), gather_s=0.02)
        self._ray = self._actors.ray
        self._watch_at = self._tell_at = self._placed_at = 0.0
        keys = {(role.name, index): role for role in spec.roles for index in range(role.replicas)}
        self._group = Group(
            {key: Replica(key, role.service, role.restarts) for key, role in keys.items()}
        )

    def run(self) -> int:
        """Run the group to its end; its exit code."""
        room = PlacementGroup(self._ray, self._spec)
        rows_path, shown = f"{log_folder()}/{status_file_name(self._submission_id)}", ""
        try:
            self._actors.pack()  # while Ray places the group
            while self._group.phase is not Phase.OVER:
                if self._group.phase is not Phase.PLACING:
                    self._turn()
                else:
                    event = room.look()
                    if event:
                        if event.kind is Kind.PLACED:
                            self._start_actors(room)
                        self._happened(event)
                if is_cancelled(self._runner):
                    self._happened(Event(Kind.STOP, words="cancelled"))
                # Where Ray's log API serves it.
                text = json.dumps(group_rows(self._group, room.waits_for))
                if text != shown:
                    shown = text
                    with suppress(OSError):  # a full disk: its roles are not shown
                        write_file(rows_path, text)
        finally:
            # An actor that never answered has not started anything, or ends it with its own end.
            replicas = self._group.replicas.values()
            handles = [replica.handle for replica in replicas if replica.handle]
            all_ended = self._actors.close([one for one in handles if one.answers and not one.dead])
            all_ended &= all(replica.life is not ReplicaState.LOST for replica in replicas)
            self._ray.util.remove_placement_group(room.group)
            self._ray.shutdown()
        runner, outcome = self._runner, self._group.outcome
        assert outcome  # no group is over without one
        runner.left_on = () if all_ended else None
        runner.cause, runner.ending = outcome.cause.name, outcome.words
        if outcome.cause is Reason.CANCELLED:
            proof = NO_PROCESS_LEFT if all_ended else "not every node has confirmed it"
            runner.ending = f"cancelled; {proof}"
        return outcome.code

    def _start_actors(self, room: PlacementGroup) -> None:
        mark = secrets.token_hex(8)
        nodes = iter(enumerate(room.nodes))
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        shared: dict[Any, tuple[int, list[ReplicaHandle]]] = {}
        for role in self._spec.roles:
            names = []
            for index in range(role.replicas):
                bundle, node = next(nodes)
                tag = f"{self._submission_id}/{mark}.{bundle}"
                run_dir, key = f"{self._submission_id}~{role.name}-{index}", (role.name, index)
                handle = ReplicaHandle(key, role, node, tag, run_dir)
                self._group.replicas[key].handle = handle
                alike: Any = node.node_id, code_of(role), tuple(role.resources.items())
                if role.runtime_env or not role.resources.keys() <= {"CPU", "memory"}:
                    alike = key  # a worker has one environment, and variables for its GPUs
                shared.setdefault(alike, (bundle, []))[1].append(handle)
                names.append(node.host)
            say(f"{role.name} goes to {', '.join(dict.fromkeys(names))}")
        for bundle, handles in shared.values():
            self._actors.start(handles, handles[0].role.resources, strategy(room.group, bundle))
        self._placed_at = monotonic()
        self._tell_at = self._placed_at + _TELL_S

    # ------------------------------------------------------------------ what happens

    def _turn(self) -> None:
        now, replicas = monotonic(), self._group.replicas.values()
        for handle in [one.handle for one in replicas]:
            if now >= handle.end_by:
                handle.end_by = math.inf
                # The node is away, or the kernel holds the processes.
                self._happened(lost(handle, "it did not end when told to, and was given up"))
        if self._group.phase is Phase.PREPARING and now >= self._watch_at:
            self._watch_at = now + _WATCH_S
            alive = {node.node_id for node in nodes_of(self._ray.nodes())}
            waiting = [one.handle for one in replicas if one.life is ReplicaState.AWAITED]
            for handle in waiting:
                runtime_env = handle.role.runtime_env
                executable = runtime_env.get("py_executable") or ""
                limit_s = _OWN_PYTHON_S
                if " " in executable or runtime_env.keys() & {"pip", "uv", "conda"}:  # `uv run …`
                    given_s = (runtime_env.get("config") or {}).get("setup_timeout_seconds", 0)
                    limit_s += math.inf if given_s < 0 else max(given_s, _BUILD_S)
                if handle.node.node_id not in alive:
                    self._happened(lost(handle, "the node died before the replica was prepared"))
                elif executable and not handle.answers and now >= self._placed_at + limit_s:
                    words = (
                        f"no worker on node {handle.node.host} ({handle.node.address}) has come up "
                        f"by py_executable={executable!r}: it must exist on the node, and be able "
                        "to import ray"
                    )
                    cause = Reason.RUNTIME_ENV
                    self._happened(Event(Kind.UNPREPARED, handle.replica_id, words, cause=cause))
            if now >= self._tell_at and waiting:
                self._tell_at = now + _TELL_S
                texts = [f"{name(one.replica_id)} on {one.node.host}" for one in waiting[:8]]
                say(f"waiting for {len(waiting)} replica(s) to be prepared: {', '.join(texts)}")
        for handle, reports in self._actors.answers():
            for report in reports:
                event = event_of(handle, report)
                if event:
                    self._happened(event)

    # ------------------------------------------------------------------ what is done about it

    def _happened(self, event: Event) -> None:
        before, replicas = self._group.phase, self._group.replicas
        orders = self._group.step(event)
        phase = self._group.phase
        outcome = self._group.outcome
        if outcome and before is not phase is Phase.ENDING:
            say(f"ending the group: {outcome.words}")
        elif before is not phase is Phase.PRIMARIES:
            has_services = any(role.service for role in self._spec.roles)
            say("every service is ready; the primaries start" if has_services else "started")
        for order, replica_id in orders:
            replica = replicas[replica_id]
            handle = replica.handle
            command: Json = {"do": order}
            if order == machine.PREPARE:
                command = self._actors.prepare_order(handle)
            elif order == machine.START:
                if replica.restarts < handle.role.restarts:
                    say(f"{name(replica_id)} is started again, {replica.restarts} left")
                addresses = {key: one.handle.node.address for key, one in replicas.items()}
                ports = {key: one.handle.ports for key, one in replicas.items()}
                command["env"] = variables(self._spec, replica_id, addresses, ports)
            else:
                handle.end_by = monotonic() + handle.role.task.grace_s + _END_MARGIN_S
            self._actors.order(handle, command)


def group_rows(group: Group, waits_for: str) -> GroupRows:
    """A group's state for ``status``: with the nodes of replicas, and why there is no room yet."""
    waits_for = waits_for if group.phase is Phase.PLACING else ""
    rows: GroupRows = {"phase": group.phase.value, "waits_for_room": waits_for, "roles": []}
    for replica in group.replicas.values():
        node = replica.handle.node if replica.handle else Node("", "", "")
        rows["roles"].append(
            {
                "role": replica.replica_id[0],
                "replica": replica.replica_id[1],
                "service": replica.service,
                "state": replica.life.value,
                "exit_code": replica.code,
                "waits_for": replica.waits_for if replica.life is ReplicaState.STARTED else "",
                "node": node.node_id,
                "host": node.host,
                "address": node.address,
            }
        )
    return rows


# ---------------------------------------------------------------------- room


class PlacementGroup:
    """One placement group for all replicas: all get their nodes, or none does."""

    def __init__(self, ray: Any, spec: GroupSpec):
        self._ray = ray
        self._spec = spec
        self._began_at = monotonic()
        self._tell_at = self._others_at = self._infeasible_at = self._began_at + _FIRST_S
        self._turn = 0
        self._pause_s = _LOOK_S
        self.waits_for = ""
        self.nodes: list[Node] = []  # of every replica, in the order of the bundles
        self.group = self._ask()

    def look(self) -> Event | None:
        """``PLACED``, ``REFUSED``, or ``None`` after a moment of waiting."""
        known = {node.node_id: node for node in nodes_of(self._ray.nodes())}
        if self.group.wait(0):
            where = self._ray.util.placement_group_table(self.group)["bundles_to_node_id"]
            self.nodes = [
                known[node_id] for _, node_id in sorted(where.items()) if node_id in known
            ]
            if len(self.nodes) == len(where):  # Ray places the bundles of a dead node anew
                self.waits_for = ""
                return Event(Kind.PLACED)
        time.sleep(self._pause_s)  # Ray's own wait takes whole seconds only: 0.2 is none at all
        self._pause_s = min(self._pause_s * 1.3, _LOOK_MAX_S)
        now, spec = monotonic(), self._spec
        infeasible = ""
        stats = self._ray.util.placement_group_table(self.group).get("stats", {})
        if stats.get("scheduling_state") == "INFEASIBLE":
            strategies = sorted({spec.strategy, *(role.spread for role in spec.roles)} - {""})
            infeasible = f"no nodes of this cluster can host the group ({', '.join(strategies)})"
        available = self._ray.available_resources()
        words, is_never = why_waiting(spec, list(known.values()), available, infeasible)
        if not is_never:
            self._infeasible_at = now + _FIRST_S
        elif now >= self._infeasible_at and not spec.wait_for_nodes:
            return Event(Kind.REFUSED, words=words, cause=Reason.UNSCHEDULABLE)
        limit_s = spec.placing_timeout_s
        if limit_s is not None and now - self._began_at >= limit_s:
            words = f"not placed within {limit_s:g} s: {words}"
            return Event(Kind.REFUSED, words=words, cause=Reason.NOT_PLACED)
        if now >= self._tell_at:
            self.waits_for = words
            say(f"waiting for room for {now - self._began_at:.0f} s: {words}")
            self._tell_at = now + _TELL_S
        if now >= self._others_at and any(role.spread for role in spec.roles):
            self._others_at, self._turn = now + _FIRST_S, self._turn + 1
            self._ray.util.remove_placement_group(self.group)
            self.group = self._ask()
        return None

    def _ask(self) -> Any:
        requests = requests_of(self._spec, nodes_of(self._ray.nodes()), self._turn)
        return self._ray.util.placement_group(
            [dict(request.resources) for request in requests],
            strategy=self._spec.strategy,
            bundle_label_selector=[dict(request.selector) for request in requests],
        )


def requests_of(spec: GroupSpec, nodes: Sequence[Node], turn: int = 0) -> list[ResourceRequest]:
    """The request of every replica, in order.

    Ray has one strategy for all bundles. To spread one role's replicas inside a packed group, each
    of them gets a disjoint set of candidate nodes: other sets each time, at random, and for a role
    that only prefers to spread the first time alone. Nodes that other roles need come last.
    """
    requests: list[ResourceRequest] = []
    able_of = _able(spec, nodes)
    needs = Counter(node_id for able in able_of.values() for node_id in able)
    for role in spec.roles:
        request = ResourceRequest(role.resources, role.label_selector)
        able = sorted(able_of[role.name])
        random.Random(turn).shuffle(able)
        able.sort(key=needs.__getitem__)
        for index in range(role.replicas):
            chosen = able[index :: role.replicas]
            if role.spread == "STRICT_SPREAD" or (role.spread and turn == 0 and chosen):
                # No node has the label "none": the replica waits until asked for again.
                selector = {**role.label_selector, NODE_ID: f"in({','.join(chosen) or 'none'})"}
                requests.append(ResourceRequest(role.resources, selector))
            else:
                requests.append(request)
    return requests


def why_waiting(
    spec: GroupSpec, nodes: Sequence[Node], available: Amounts, infeasible: str = ""
) -> tuple[str, bool]:
    """One line for a group that waits: asked, available, what does not fit and why.

    Ray calls infeasible what its strategy forbids, and not what is too much in all.

    Returns:
        The line, and whether these nodes can never host the group, even when idle.
    """
    able_of, asked, never, busy = _able(spec, nodes), _sum(spec.roles), "", ""
    for role in spec.roles:
        why = why_not(ResourceRequest(role.resources, role.label_selector), nodes)
        able = able_of[role.name].values()
        is_apart = "STRICT_SPREAD" in (role.spread, spec.strategy)
        room = sum(1 if is_apart else slots(node.resources, role.resources) for node in able)
        if not why and role.replicas > room:
            why = (
                f"its {role.replicas} replicas ask for {amounts_text(role.resources)} each; the "
                f"{len(able)} node(s) that can host one, idle, cannot give that at once"
            )
        if why and not never:
            never = f"{role.name}: {why}"
        if not busy and not fits(role.resources, available):
            names = ", ".join(sorted(node.host for node in able)[:8])
            busy = f"{role.name}/0 waits: the nodes that can host it are busy ({names})"
    for some in (*able_of.values(), {node.node_id: node for node in nodes}):
        total = Counter[str]()
        for node in some.values():
            total.update(node.resources)
        inside = _sum(role for role in spec.roles if able_of[role.name].keys() <= some.keys())
        if not never and not fits(inside, total):
            never = f"{len(some)} node(s), idle, cannot give {amounts_text(inside)} at once"
    never = never or infeasible
    # What is free is known of all nodes together.
    together = "all bundles start together, and the nodes that can take them have too little free"
    count = sum(role.replicas for role in spec.roles)
    free = amounts_text({key: available.get(key, 0.0) for key in asked})
    shown = f"asked {amounts_text(asked)} in {count} bundle(s); available {free}"
    return f"{shown}; {never or busy or together}", bool(never)


def _able(spec: GroupSpec, nodes: Sequence[Node]) -> dict[str, dict[str, Node]]:
    """Of each role the nodes that can host a replica when they are idle, by their ids."""
    return {
        role.name: {
            node.node_id: node
            for node in hosts(ResourceRequest(role.resources, role.label_selector), nodes)
        }
        for role in spec.roles
    }


def _sum(roles: Iterable[RoleSpec]) -> Counter[str]:
    """The resources of all replicas of roles."""
    total = Counter[str]()
    for role in roles:
        for key, amount in role.resources.items():
            total[key] += amount * role.replicas  # type: ignore[assignment]
    return total


# ---------------------------------------------------------------------- reports


def lost(handle: ReplicaHandle, why: str, cause: Reason = Reason.NODE_DIED) -> Event:
    """The event of a replica that is lost; the cause counts while it is awaited.

    A worker that never came up has one of Ray's own: a runtime_env that cannot be built, an image
    that does not exist.
    """
    words = f"node {handle.node.host} ({handle.node.address}): {why}"
    return Event(Kind.LOST, handle.replica_id, words, cause=cause)


def event_of(handle: ReplicaHandle, report: Json) -> Event | None:
    """The event of a report; what the replica has printed is written into the log."""
    kind, words, who = report["at"], report.get("words", ""), name(handle.replica_id)
    if kind == "text":
        write_lines(who, str(report["text"]))
        return None
    if kind == "gone":
        others = f", and {report['left']} others with it" if report["left"] else ""
        words = f"this package's process there was killed{others}"
    if kind in ("gone", "failed", "died"):
        cause = Reason.NOT_STARTED if handle.dead else Reason.NODE_DIED
        return lost(handle, words, report.get("cause") or cause)
    if kind == "prepared":
        handle.ports = report["ports"]
    elif kind == "waiting":
        say(f"{who} is {words}")
    elif kind == "exited":
        handle.end_by = math.inf
        say(f"{who} on {handle.node.host} ended: {words}")
    return Event(Kind(kind), handle.replica_id, words, report.get("code", 0))


# ---------------------------------------------------------------------- addresses


def variables(
    spec: GroupSpec,
    replica_id: ReplicaId,
    hosts: Mapping[ReplicaId, str],
    ports: Mapping[ReplicaId, Mapping[str, int]],
) -> dict[str, str]:
    """The variables of one replica.

    Every role's addresses by the role's name (docs/guides/groups.md), NeMo-Run's macros, and for
    roles without a launcher what ``torch.distributed`` reads.
    """
    found: dict[str, str] = {}
    for number, other in enumerate(spec.roles):
        keys = [(other.name, index) for index in range(other.replicas)]
        prefix = f"NEMO_RUN_{env_key(other.name)}"
        found[f"{prefix}_HOST"] = found[f"NEMO_RUN_HET_GROUP_HOST_{number}"] = hosts[keys[0]]
        found[f"{prefix}_HOSTS"] = ",".join(hosts[key] for key in keys)
        for port in set(other.ports) - {RENDEZVOUS}:
            numbers = {key: str(ports[key][port]) for key in keys}
            # A replica asks for its own ports by the name by which others ask for the first's.
            found[f"{prefix}_PORT_{env_key(port)}"] = numbers.get(replica_id, numbers[keys[0]])
            found[f"{prefix}_PORTS_{env_key(port)}"] = ",".join(numbers.values())
    role = next(role for role in spec.roles if role.name == replica_id[0])
    head, rank, processes = (role.name, 0), str(replica_id[1]), str(role.processes)
    found |= {
        "NEMO_RUN_HEAD_NODE_IP": hosts[head],
        "NEMO_RUN_NUM_NODES": str(role.replicas),
        "NEMO_RUN_NODE_RANK": rank,
        "NEMO_RUN_NPROC_PER_NODE": processes,
    }
    if RENDEZVOUS not in role.ports:
        return found
    port = found["NEMO_RUN_RDZV_PORT"] = str(ports[head][RENDEZVOUS])
    if role.ranked:
        return {
            **found,
            "NODE_RANK": rank,
            "WORLD_SIZE": str(role.replicas * role.processes),
            "LOCAL_WORLD_SIZE": processes,
            "MASTER_ADDR": hosts[head],
            "MASTER_PORT": port,
        }
    # torchrun hosts the rendezvous only where the host's own name resolves to its address, and
    # gives that name to the workers; beside 127.0.0.1 in /etc/hosts (Debian) both fail.
    torchrun = {
        "PET_RDZV_CONF": f"is_host={int(replica_id == head)}",
        "PET_LOCAL_ADDR": hosts[replica_id],
    }
    return found | {key: torchrun[key] for key in torchrun.keys() - role.task.env.keys()}
