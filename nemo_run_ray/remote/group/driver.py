"""The driver of a group: a Ray program that feeds the pure machine and carries out its actions.

It holds no resources. One placement group gives all replicas their nodes. On every node one actor
starts the replicas' processes and passes their reports back; a replica with accelerators or a
runtime environment of its own gets an actor of its own, since only Ray can give it those. An actor
is a worker with ray imported: 0.6 s of a CPU and some 60 MB, which plain replicas can share.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import sys
import time
from typing import Any, Dict, List, Mapping, Optional, Sequence

from ..fit import Node, nodes_of
from ..hosts.actors import (
    Actor,
    ReplicaHandle,
    ReplicaId,
    actor_of,
    forget_runtime_env,
    name,
    start_actors,
)
from ..hosts.calls import Calls, Pulled
from ..node.output import NO_PROCESS_LEFT, say
from ..node.rundir import take_secrets
from ..node.supervise import Runner
from ..spec import GroupSpec
from ..states import Life, Phase, Reason
from . import machine
from .orders import Orders
from .placement_group import NoRoom, PlacementGroup
from .reports import events_of, losses
from .roles_file import RolesFile

#: Seconds beyond the grace period until a replica that was told to end is given up.
_END_MARGIN_S = 30.0
#: Seconds between two looks at the nodes, and two lines, while the replicas are prepared.
_WATCH_S, _TELL_S = 5.0, 30.0
#: Seconds in which a worker comes up by an interpreter of the role's own: one that is there, and
#: one that is a command, which may install something first. Ray starts it again and again, and
#: nothing else on the node meanwhile: it must have an end.
_OWN_PYTHON_S, _OWN_COMMAND_S = 90.0, 360.0
#: What Ray builds before it starts a worker, and how long it may take for that by default.
_BUILT, _BUILD_S = ("pip", "uv", "conda"), 600.0


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
        self._orders = Orders(spec, job, take_secrets(spec.secrets), forget_runtime_env())
        self._replicas: Dict[ReplicaId, ReplicaHandle] = {}
        self._actors: List[Actor] = []
        self._watch_at = self._tell_at = self._placed_at = 0.0
        #: Every node has confirmed that nothing of the group runs there.
        self.all_ended = False
        self._file = RolesFile(submission_id)
        self._outcome: Optional[machine.Outcome] = None
        self._group = machine.Group(
            tuple(
                machine.ReplicaState(role.name, index, role.service, role.restarts)
                for role in spec.roles
                for index in range(role.replicas)
            )
        )

    def run(self) -> machine.Outcome:
        self._ray = connect()
        self._calls = Calls(self._ray)
        room = None
        try:
            room = self._wait_for_room()
            while self._outcome is None:
                self._turn()
            return self._outcome
        finally:
            self._close(room)

    # ------------------------------------------------------------------ room

    def _wait_for_room(self) -> Optional[PlacementGroup]:
        try:
            room = PlacementGroup(self._ray, self._spec)
            while self._outcome is None:
                if room.look():
                    self._settle(room)
                    break
                self._show(room.waits_for)
                self._obey()
            return room
        except NoRoom as error:
            self._happened(machine.PlacementRefused(error.cause, error.words))
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
        self._happened(machine.Placed())

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
            self._happened(machine.Stop())

    def _give_up(self, replica: ReplicaHandle) -> None:
        """Its processes have not ended in time: the node is away, or the kernel holds them."""
        actor = actor_of(replica)
        if not any(
            self._life(neighbour.replica_id) in (Life.STARTED, Life.READY)
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
            if self._life(replica.replica_id) is Life.AWAITED
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
            self._happened(machine.Unprepared(replica.replica_id, words, cause))

    def _lost(self, replica: ReplicaHandle, why: str) -> None:
        for event in losses(replica, why):
            self._happened(event)

    def _are_lost(self, actor: Actor) -> bool:
        return all(self._life(replica.replica_id) is Life.LOST for replica in actor.replicas)

    def _life(self, replica_id: ReplicaId) -> Life:
        return self._group.replica(replica_id).life

    # ------------------------------------------------------------------ what is done about it

    def _happened(self, event: machine.Event) -> None:
        before = self._group.phase
        self._group, actions = machine.step(self._group, event)
        if self._group.phase is Phase.ENDING is not before and self._group.outcome is not None:
            say(f"ending the group: {self._group.outcome.words}")
        elif self._group.phase is not before and self._group.phase is Phase.PRIMARIES:
            say("every service is ready; the primaries start" if self._has_services else "started")
        for action in actions:
            self._do(action)
        self._show()

    @property
    def _has_services(self) -> bool:
        return any(role.service for role in self._spec.roles)

    def _do(self, action: machine.Action) -> None:
        if isinstance(action, machine.Finish):
            self._outcome = action.outcome
            return
        replica = self._replicas[action.replica_id]
        if isinstance(action, machine.Prepare):
            self._calls.order(replica, self._orders.prepare(replica))
        elif isinstance(action, machine.Start):
            order = self._orders.start(replica, self._replicas)
            replica.starts += 1
            if replica.starts > 1:
                left = self._group.replica(replica.replica_id).restarts
                say(f"{name(replica.replica_id)} is started again, {left} left")
            self._calls.order(replica, order)
        else:
            replica.end_by = time.monotonic() + replica.role.task.grace_s + _END_MARGIN_S
            self._calls.order(replica, self._orders.end())

    def _show(self, waits_for: str = "") -> None:
        nodes = {replica_id: replica.node for replica_id, replica in self._replicas.items()}
        self._file.write(self._group, nodes, waits_for)

    def _close(self, room: Optional[PlacementGroup]) -> None:
        """Let the nodes clean up, and give everything back."""
        # An actor that never answered has not started anything, or ends it with its own end.
        living = [actor for actor in self._actors if actor.answers and not actor.dead]
        confirmed = self._calls.close(living)
        lost = any(state.life is Life.LOST for state in self._group.replicas)
        self.all_ended = confirmed and not lost
        if room is not None:
            room.leave()
        self._ray.shutdown()


def _built_for(replica: ReplicaHandle) -> str:
    """What Ray makes on the node before the replica's worker comes up."""
    if actor_of(replica).answers or not replica.role.runtime_env:
        return ""
    return f" (Ray makes its runtime environment: {', '.join(sorted(replica.role.runtime_env))})"


def _replicas_on(
    nodes: Sequence[Node], spec: GroupSpec, group: machine.Group, submission_id: str
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
        for number, (state, node) in enumerate(zip(group.replicas, nodes))
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
