"""What the hosts of an array report, and what becomes of it."""

from __future__ import annotations

import json
import time
from typing import Any, List, Mapping, Optional, Sequence, Tuple

from ..env_error import cause_of
from ..hosts.actors import name
from ..hosts.calls import Calls, Died, Pulled
from ..node.output import say, write
from ..states import Reason
from .host_pool import HostPool
from .hosts import Host
from .leases import Leases
from .progress import Lease
from .refusals import Refusal

#: Seconds for which a host gets no elements whose node has no room for another process.
_FULL_S = 30.0


class HostReports:
    """Hears what the hosts of one array report.

    Args:
        leases: the elements.
        pool: the hosts.
        calls: to their actors.

    Attributes:
        broken: why the array cannot be run at all; ``None`` as long as it can.
    """

    def __init__(self, leases: Leases, pool: HostPool, calls: Calls) -> None:
        self._leases = leases
        self._pool = pool
        self._calls = calls
        self._written = ""  # what was written last of a host that cannot run elements
        self.broken: Optional[Tuple[Reason, str]] = None

    def died(self, answer: Died) -> None:
        """An actor cannot answer any more."""
        for host in self._pool.of(answer.actor):
            if answer.is_env:
                self._refused(host, answer.words, Refusal.RUNTIME_ENV, has_started=False)
            elif answer.is_start:
                self._refused(host, answer.words, Refusal.TOLD, has_started=False)
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
            self._ended(host, report["row"])
        elif kind == "prepared":
            host.is_ready, host.heard_at = True, time.monotonic()
            say(f"{node} runs {host.slots} element(s) at a time")
        elif kind == "unprepared":
            self._refused(host, str(report["words"]), Refusal.TOLD, has_started=True)
        elif kind == "obstacles":
            say(_of_obstacles(node, report["words"]))
        elif kind == "swept":
            self._pool.swept(host, report)
        elif kind == "unswept":
            say(f"a host on {node} is dead, and this does not end there: {report['words']}")
        elif kind == "stuck":
            say(f"element {report['element']} on {node} has ended, but not {report['words']}")
        elif kind == "lost":
            self._lost(host, Lease(*report["lease"]))
        elif kind == "handed_back":
            self._handed_back(host, [Lease(*lease) for lease in report["leases"]])
            if "words" in report:
                host.rests_until = time.monotonic() + _FULL_S
                say(f"elements wait for other nodes, or for {_FULL_S:g} s: {report['words']}")
        elif kind == "idle":
            self._pool.idle(host)
        else:  # ``failed`` or ``gone``
            self._dead(host, str(report.get("words", "it was killed")))

    def _ended(self, host: Host, row: List[Any]) -> None:
        if host.gives(Lease(*row[:2])):
            host.heard_at = time.monotonic()
            self._pool.room.refusals.forget(host.record.node_id)
            self._leases.ended(host.record.number, row)

    def _handed_back(self, host: Host, leases: Sequence[Lease]) -> None:
        """Elements have not begun on a host, and are for others."""
        host.is_asked = False
        for lease in leases:
            if host.gives(lease):
                self._leases.give_back(lease, host.record.number, has_run=False)

    def _lost(self, host: Host, lease: Lease) -> None:
        """An element has ended, and nobody knows how."""
        if host.gives(lease):
            say(f"the process was killed that knew how element {lease.element} has ended")
            self._leases.give_back(lease, host.record.number, has_run=True)

    def _dead(self, host: Host, words: str) -> None:
        """A host has died, or its actor has."""
        if host.slots and not host.is_ready:
            self._refused(host, words, Refusal.DIED, has_started=True)
            return
        say(f"the host on {host.replica.node.host} has died: {words}")
        self._pool.give_up(host)

    def _refused(self, host: Host, words: str, refusal: Refusal, has_started: bool) -> None:
        """A host cannot run elements: others may, or none can."""
        node, may_run = host.replica.node.host, self._pool.unproven.running > 0
        self._pool.refused(host, refusal, has_started)
        may_run = may_run or self._leases.progress.has_run
        if host.slots and not may_run and self._pool.room.can_none(self._pool.hosts.values()):
            if refusal is Refusal.RUNTIME_ENV:
                self._break(Reason.RUNTIME_ENV, words)
            else:
                self._break(Reason.NOT_STARTED, f"on {node}: {words}")
            return
        if words != self._written:
            write(f"{words}\n")
            self._written = words
        say(f"a host on {node} could not begin; another one is tried later: {_last_line(words)}")

    def _break(self, cause: Reason, words: str) -> None:
        """The array cannot be run at all."""
        if self.broken is None:
            is_env = cause is Reason.RUNTIME_ENV
            self.broken = cause, cause_of(words) if is_env else _last_line(words)
            write(f"{words}\n")


def _last_line(words: str) -> str:
    """Of a traceback this is the error."""
    return words.strip().rpartition("\n")[2]


def _of_obstacles(node: str, obstacles: Sequence[str]) -> str:
    """What is said of imports that begin something which a fork does not have."""
    words = f"on {node} the imports {', and '.join(obstacles)}, which a fork does not have"
    return f"{words}. So each element imports anew, which takes seconds in place of milliseconds"
