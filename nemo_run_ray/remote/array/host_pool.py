"""All hosts of an array: started where there is room, given back, proven dead."""

from __future__ import annotations

import time
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Set

from ..attempts import first_id
from ..hosts.calls import Calls
from ..node.output import say
from ..node_death import node_dead_s
from ..spec import ArraySpec
from .closing import Closed, Closings
from .host_room import HostRoom
from .hosts import Host, HostBook, HostRecord, HostStarts
from .leases import Leases
from .refusals import Refusal
from .unproven import Unproven

#: Seconds beyond the grace period until a host that was told to end is given up.
_END_MARGIN_S = 30.0


class HostPool:
    """The hosts that there are, and those of which it is not known yet that nothing of them runs.

    Args:
        ray: the module, connected.
        spec: the array.
        submission_id: of the job.
        starts: starts hosts.
        calls: to their actors.
        leases: the elements.

    Attributes:
        unproven: hosts of which it is not known that nothing runs.
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
        self.unproven = Unproven(self._book.records, leases.held, node_dead_s())
        self.room = HostRoom(ray, spec)
        self._closings = Closings(ray, leases)
        self._end_by: Optional[float] = None
        self.hosts: Dict[int, Host] = {}

    @property
    def has_ended(self) -> bool:
        """Whether nothing runs any more, after ``end`` or when all elements are over."""
        are_idle = self._end_by is None or all(host.is_idle for host in self.hosts.values())
        return are_idle and not self.unproven

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
            is_late = is_late and not host.is_idle and not host.sweeps
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
                if host.is_ready and not host.in_hand and not host.is_closing:
                    host.is_closing = True
                    self._calls.order(host.replica, {"do": "end"})

    def end(self) -> None:
        """Let all hosts end what they run."""
        self._end_by = time.monotonic() + self._spec.grace_s + _END_MARGIN_S
        self._leases.is_ending = True
        for host in list(self.hosts.values()):
            if host.is_ready:
                self._calls.order(host.replica, {"do": "end"})
            elif not host.sweeps:
                self.give_up(host)

    def idle(self, host: Host) -> None:
        """A host has ended all that it ran, as it was told."""
        # What it has in hand came when it was told to end.
        self._leases.give_back_all(host.in_hand, host.record.number, has_run=False)
        host.in_hand.clear()
        host.is_idle = True
        if self._end_by is None:
            self._let_go(host, [host.record])

    def give_up(self, host: Host) -> None:
        """End the actor of a host."""
        self._ray.kill(host.actor.handle, no_restart=True)
        host.actor.dead = True
        self.lost(host)

    def refused(self, host: Host, refusal: Refusal, has_started: bool) -> None:
        """A host cannot run elements: start none on its node for a while.

        ``has_started`` is whether its actor was there, and may have begun something.
        """
        if host.slots:
            self.room.refusals.add(host.record.node_id, time.monotonic(), refusal)
        if has_started:
            self.give_up(host)
        else:
            self.lost(host)
            self.unproven.proven(host.record.number)

    def lost(self, host: Host) -> None:
        """A host is dead, or its actor is: what it had may run until that is proven."""
        if self.hosts.pop(host.record.number, None) is None:
            return
        self.unproven.add(host.record.number, host.in_hand, host.slots)
        if not host.slots:
            self.unproven.sweeper_died(host.record.node_id, time.monotonic())
        for record in host.swept:  # their notes may still be there
            self.unproven.add(record.number, {})

    def swept(self, host: Host, report: Mapping[str, Any]) -> None:
        """A host has ended what an earlier one had left on its node, and read its notes."""
        number = int(report["host"])
        words = take_notes(self.unproven.proven(number), report, self._leases)
        if words:
            say(f"nothing of a dead host runs on {host.replica.node.host}: {words}")
        host.swept.append(host.sweeps.pop(number))
        if not host.sweeps:
            self._let_go(host, [*host.swept, host.record])

    @property
    def left_on(self) -> Set[str]:
        """The nodes where hosts are, or may have left something."""
        hosts = {host.record.node_id for host in self.hosts.values()}
        return hosts | self._closings.node_ids | self.unproven.node_ids

    def close(self) -> None:
        """Let living actors end; those of which that is not known are unproven then."""
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
                self.unproven.add(record.number, {})
            if left and not host.slots:
                self.unproven.sweeper_died(host.record.node_id, time.monotonic())
            elif not host.slots:
                self.unproven.sweeper_closed(host.record.node_id)

    def _let_go(self, host: Host, records: Sequence[HostRecord]) -> None:
        """End a host that has nothing to do any more; it removes the notes of these before."""
        self.hosts.pop(host.record.number, None)
        self._closings.add(host, records)

    # ------------------------------------------------------------------ room

    def _grow(self, now: float, wanted: int) -> None:
        hosts, running = list(self.hosts.values()), self.unproven.running
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
        self._calls.pull(host.actor)
        return host

    # ------------------------------------------------------------------ proof

    def _prove(self, now: float) -> None:
        """End what dead hosts have left: by their nodes' death, or by another host there."""
        sweeping = {number for host in self.hosts.values() for number in host.sweeps}
        steps = self.unproven.steps(now, self.room.nodes, sweeping, self._end_by is not None)
        for number in steps.proven:  # what had begun there, nobody knows
            held = self.unproven.proven(number)
            if self._book.records[number].node_id in self.unproven.unconfirmed:
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
