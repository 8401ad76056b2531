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
import secrets
import signal
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Tuple

from ..env_error import cause_of
from ..node.output import NO_PROCESS_LEFT, say, write
from ..node.process import Runner
from ..node.rundir import take_secrets
from ..spec import GroupSpec
from ..states import Cause, Life, Phase
from . import machine, packing
from .actors import (
    Actor,
    ReplicaHandle,
    code_of,
    forget_runtime_env,
    key_of,
    passed_on,
    start_actors,
)
from .addresses import variables
from .machine import ReplicaId, name
from .placement_group import NoRoom, PlacementGroup
from .roles_file import RolesFile

#: Seconds of one turn of the loop when nothing happens.
_TURN_S = 0.2
#: Seconds for which an actor keeps the question for reports open.
_PULL_S = 2.0
#: Seconds until a call is made again whose actor could not be reached.
_AGAIN_S = 1.0
#: Seconds beyond the grace period until a replica that was told to end is given up.
_END_MARGIN_S = 30.0
#: Seconds for the replicas' processes to remove their folders.
_CLOSE_S = 10.0
#: Seconds between two looks at the nodes, and two lines, while the replicas are prepared.
_WATCH_S, _TELL_S = 5.0, 30.0


def run(runner: Runner, spec: GroupSpec, job: str, submission_id: str) -> int:
    """Run a group to its end; its exit code."""
    driver = _Driver(runner, spec, job, submission_id)
    outcome = driver.run()
    if outcome.cause is Cause.CANCELLED:
        runner.cancelled = True
        proof = NO_PROCESS_LEFT if driver.all_ended else "not every node has confirmed it"
        runner.ending = f"cancelled; {proof}"
    elif outcome.cause is Cause.DONE:
        runner.ending = "exit code 0"
    else:
        runner.ending = f"[{outcome.cause.value}] {outcome.words}"
    return outcome.code


@dataclass(frozen=True)
class _Call:
    """A call of an actor whose answer is awaited: an order to a replica, or a pull for all."""

    actor: Actor
    replica: Optional[ReplicaHandle] = None
    order: Optional[Mapping[str, Any]] = None
    number: int = 0


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
        self._job = job
        self._submission_id = submission_id
        self._secrets = take_secrets(spec.secrets)
        self._replicas: Dict[ReplicaId, ReplicaHandle] = {}
        self._actors: List[Actor] = []
        self._watch_at = self._tell_at = 0.0
        #: Every node has confirmed that nothing of the group runs there.
        self.all_ended = False
        self._calls: Dict[Any, _Call] = {}
        self._again: List[Tuple[float, _Call]] = []
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
        self._config = forget_runtime_env()
        self._ray = _connect()
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
            self._happened(machine.Refused(error.cause, error.words))
            return None  # what was asked for goes with the driver

    def _settle(self, room: PlacementGroup) -> None:
        roles = {role.name: role for role in self._spec.roles}
        mark = secrets.token_hex(8)
        for number, (state, node) in enumerate(zip(self._group.replicas, room.nodes())):
            self._replicas[state.replica_id] = ReplicaHandle(
                replica_id=state.replica_id,
                role=roles[state.role],
                node=node,
                bundle=number,
                tag=f"{self._submission_id}/{mark}.{number}",
                run_dir=f"{self._submission_id}~{state.role}-{state.index}",
            )
        for role in self._spec.roles:
            hosts = [self._replicas[role.name, index].node.host for index in range(role.replicas)]
            say(f"{role.name} goes to {', '.join(dict.fromkeys(hosts))}")
        self._actors = start_actors(self._ray, room.group, self._replicas.values())
        for actor in self._actors:
            self._call(_Call(actor))
        self._tell_at = time.monotonic() + _TELL_S
        self._happened(machine.Placed())

    # ------------------------------------------------------------------ the loop

    def _turn(self) -> None:
        self._obey()
        now = time.monotonic()
        again, self._again = self._again, []
        for due_at, call in again:
            if now >= due_at:
                self._call(call)
            else:
                self._again.append((due_at, call))
        for replica in self._replicas.values():
            if replica.end_by is not None and now >= replica.end_by:
                replica.end_by = None
                self._give_up(replica)
        if self._group.phase is Phase.PREPARING and now >= self._watch_at:
            self._watch_at = now + _WATCH_S
            self._watch(now)
        if not self._calls:
            time.sleep(_TURN_S)
            return
        ready, _ = self._ray.wait(list(self._calls), num_returns=1, timeout=_TURN_S)
        if ready:
            ready, _ = self._ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)
        for reference in ready:
            self._answered(self._calls.pop(reference), reference)

    def _give_up(self, replica: ReplicaHandle) -> None:
        """Its processes have not ended in time: the node is away, or the kernel holds them."""
        actor = _actor_of(replica)
        if not any(
            self._life(one.replica_id) in (Life.STARTED, Life.READY) for one in actor.replicas
        ):
            self._ray.kill(actor.handle, no_restart=True)
            actor.dead = True
        self._lost(replica, "it did not end when told to, and was given up")

    def _watch(self, now: float) -> None:
        """See to it that nobody waits for ever for a node that has died since the placing."""
        alive = {node.node_id for node in packing.nodes_of(self._ray.nodes())}
        waiting = [
            one for one in self._replicas.values() if self._life(one.replica_id) is Life.AWAITED
        ]
        for replica in waiting:
            if replica.node.node_id not in alive:
                self._lost(replica, "the node died before the replica was prepared")
        if now >= self._tell_at and waiting:
            self._tell_at = now + _TELL_S
            hosts = ", ".join(f"{name(one.replica_id)} on {one.node.host}" for one in waiting[:8])
            say(f"waiting for {len(waiting)} replica(s) to be prepared: {hosts}")

    def _obey(self) -> None:
        order = self._runner.order()
        if order == b"":
            say("our first process was killed; Ray ends what the group runs")
            os._exit(1)  # with the driver go its actors, and with them all processes
        if order is not None:
            self._happened(machine.Stop())

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
            self._order(replica, self._preparation(replica))
        elif isinstance(action, machine.Start):
            hosts = {replica_id: one.node.address for replica_id, one in self._replicas.items()}
            ports = {replica_id: one.ports for replica_id, one in self._replicas.items()}
            env = variables(self._spec, replica.replica_id, hosts, ports)
            replica.starts += 1
            if replica.starts > 1:
                say(f"{name(replica.replica_id)} is started again, {self._restarts(replica)} left")
            self._order(replica, {"do": "start", "env": env})
        else:
            replica.end_by = time.monotonic() + replica.role.task.grace_s + _END_MARGIN_S
            self._order(replica, {"do": "end"})

    def _restarts(self, replica: ReplicaHandle) -> int:
        return next(
            one.restarts for one in self._group.replicas if one.replica_id == replica.replica_id
        )

    def _preparation(self, replica: ReplicaHandle) -> Dict[str, Any]:
        names = replica.role.task.secrets
        return {
            "do": "prepare",
            "role": replica.role.to_json(),
            "index": replica.replica_id[1],
            "job": self._job,
            "run_dir": replica.run_dir,
            "code": key_of(code_of(replica.role)),
            "address": replica.node.address,
            "tag": replica.tag,
            "given": passed_on(replica.role, self._config),
            "secrets": {one: self._secrets[one] for one in names},
        }

    # ------------------------------------------------------------------ calls and answers

    def _order(self, replica: ReplicaHandle, order: Mapping[str, Any]) -> None:
        self._call(_Call(_actor_of(replica), replica, order, replica.orders))
        replica.orders += 1

    def _call(self, call: _Call) -> None:
        if call.replica is None or call.order is None:
            seen = {name(one.replica_id): one.seen for one in call.actor.replicas}
            reference = call.actor.handle.pull.remote(seen, _PULL_S)
        else:
            key = name(call.replica.replica_id)
            reference = call.actor.handle.order.remote(key, call.number, dict(call.order))
        self._calls[reference] = call

    def _answered(self, call: _Call, reference: Any) -> None:
        try:
            answer = self._ray.get(reference)
        except self._ray.exceptions.ActorUnavailableError:
            self._again.append((time.monotonic() + _AGAIN_S, call))  # its node may come back
            return
        except self._ray.exceptions.RayError as error:
            call.actor.dead = True
            words = f"Ray's worker there died: {_first_line(error)}"
            if isinstance(error, self._ray.exceptions.RuntimeEnvSetupError):
                write(f"{error}\n")  # whole, for who reads the log
                words = f"the runtime environment could not be built: {cause_of(str(error))}"
            for replica in call.actor.replicas:
                self._lost(replica, words)
            return
        call.actor.answers = True
        if call.replica is None:
            self._pulled(call.actor, *answer)

    def _pulled(
        self, actor: Actor, node_id: str, answer: Mapping[str, Tuple[int, List[str]]]
    ) -> None:
        for replica in actor.replicas:
            if replica.node.node_id != node_id:
                self._lost(replica, f"Ray has moved the replica to the node {node_id} since")
            first, reports = answer.get(name(replica.replica_id), (0, []))
            for number, report in enumerate(reports, start=first):
                if number == replica.seen:
                    replica.seen += 1
                    self._reported(replica, json.loads(report))
        if any(self._life(one.replica_id) is not Life.LOST for one in actor.replicas):
            self._call(_Call(actor))

    def _life(self, replica_id: ReplicaId) -> Life:
        return next(one.life for one in self._group.replicas if one.replica_id == replica_id)

    def _lost(self, replica: ReplicaHandle, why: str) -> None:
        where = f"node {replica.node.host} ({replica.node.address})"
        if self._life(replica.replica_id) is Life.AWAITED and _actor_of(replica).dead:
            # Ray's own reason: a runtime_env that cannot be built, an image that is not there.
            self._happened(machine.Unprepared(replica.replica_id, f"no worker on {where}: {why}"))
        self._happened(machine.Lost(replica.replica_id, f"{where}: {why}"))

    def _reported(self, replica: ReplicaHandle, report: Mapping[str, Any]) -> None:
        replica_id, kind = replica.replica_id, report["at"]
        if kind == "text":
            text = str(report["text"])
            prefix = replica.prefix
            write(prefix + text[:-1].replace("\n", f"\n{prefix}") + "\n")
        elif kind == "prepared":
            replica.ports = report["ports"]
            self._happened(machine.Prepared(replica_id))
        elif kind == "unprepared":
            self._happened(machine.Unprepared(replica_id, report["words"]))
        elif kind == "ready":
            self._happened(machine.Ready(replica_id))
        elif kind == "unready":
            self._happened(machine.Unready(replica_id, report["words"]))
        elif kind == "exited":
            replica.end_by = None
            say(f"{name(replica_id)} on {replica.node.host} ended: {report['words']}")
            self._happened(machine.Exited(replica_id, report["code"], report["words"]))
        elif kind == "failed":
            self._lost(replica, report["words"])
        elif kind == "gone":
            others = f", and {report['left']} others with it" if report["left"] else ""
            self._lost(replica, f"our process there was killed{others}")

    # ------------------------------------------------------------------ what one sees, the end

    def _show(self, waits_for: str = "") -> None:
        rows = []
        for state in self._group.replicas:
            replica = self._replicas.get(state.replica_id)
            rows.append(
                {
                    "role": state.role,
                    "replica": state.index,
                    "service": state.service,
                    "state": state.life.value,
                    "exit_code": state.code,
                    "node": replica.node.node_id if replica else "",
                    "host": replica.node.host if replica else "",
                    "address": replica.node.address if replica else "",
                }
            )
        phase = self._group.phase.value
        self._file.write({"phase": phase, "waits_for_room": waits_for, "roles": rows})

    def _close(self, room: Optional[PlacementGroup]) -> None:
        """Let the nodes clean up, and give everything back."""
        living = [actor for actor in self._actors if actor.answers and not actor.dead]
        ends = [actor.handle.close.remote() for actor in living]
        ready: List[Any] = []
        if ends:
            ready, _ = self._ray.wait(ends, num_returns=len(ends), timeout=_CLOSE_S)
        confirmed = [self._has_ended(reference) for reference in ready]
        # An actor that never answered has not started anything, or ends it with its own end.
        lost = any(state.life is Life.LOST for state in self._group.replicas)
        self.all_ended = len(confirmed) == len(ends) and all(confirmed) and not lost
        if room is not None:
            room.leave()
        self._ray.shutdown()

    def _has_ended(self, reference: Any) -> bool:
        try:
            return bool(self._ray.get(reference))
        except self._ray.exceptions.RayError:
            return False


def _actor_of(replica: ReplicaHandle) -> Actor:
    if replica.actor is None:
        raise ValueError(f"{name(replica.replica_id)} has no actor yet")
    return replica.actor


def _connect() -> Any:
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


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__
