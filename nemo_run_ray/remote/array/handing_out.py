"""What hosts are told: which elements to run, and which ones to end."""

from __future__ import annotations

import time
from typing import Any, Dict, List, Sequence

from ..hosts.calls import Calls
from ..node.output import say
from .host_pool import HostPool
from .hosts import Host
from .leases import Leases
from .progress import Lease
from .wishes import Wishes


def feed(leases: Leases, pool: HostPool, calls: Calls) -> None:
    """Lease elements to the hosts; the disk has it before a host hears of it."""
    now = time.monotonic()
    given: Dict[int, List[List[Any]]] = {}
    for number, host in pool.hosts.items():
        may_have = host.may_have_more and now >= host.rests_until
        room = leases.pace.held(host.slots) if may_have else 0
        if _is_held_up(host, leases, now):
            room = min(room, host.slots)
        while len(host.in_hand) < room:
            row = leases.take(number)
            if row is None:
                break
            host.in_hand[row[0]] = row[1]
            given.setdefault(number, []).append(row)
    is_written = leases.commit()
    for number, rows in given.items():
        host = pool.hosts[number]
        if is_written:
            calls.order(host.replica, {"do": "run", "elements": rows})
            continue
        for element, attempt, _ in rows:
            del host.in_hand[element]
            leases.give_back(Lease(element, attempt), number, has_run=False)


def take_back(leases: Leases, pool: HostPool, calls: Calls) -> None:
    """Let hosts on which no element ends hand back those that wait behind the ones that run."""
    now = time.monotonic()
    for host in pool.hosts.values():
        waiting = len(host.in_hand) - host.slots
        may_be_asked = host.may_have_more and not host.is_asked
        if may_be_asked and waiting > 0 and _is_held_up(host, leases, now):
            host.is_asked = True
            calls.order(host.replica, {"do": "hand_back", "count": waiting})


def _is_held_up(host: Host, leases: Leases, now: float) -> bool:
    """Whether none has ended on a host for much longer than elements take."""
    return now >= host.heard_at + leases.pace.patience_s


def fulfil(wishes: Wishes, leases: Leases, pool: HostPool, calls: Calls) -> None:
    """Do what clients want, and say so to them when the disk has it."""
    if not leases.can_write:
        return
    for wish in wishes.find(leases.progress.count):
        leased: List[Lease] = []
        for first, last in wish.ranges:
            leased += leases.cancel(range(first, last + 1), wish.only_waiting)
        _cancel(leased, pool, calls)
        if leases.commit():
            ranges = ", ".join(f"{first} to {last}" for first, last in wish.ranges[:5])
            say(f"the user has cancelled the elements {ranges}; {len(leased)} have a host")
            wishes.remove(wish.key)


def _cancel(leases: Sequence[Lease], pool: HostPool, calls: Calls) -> None:
    """Let those hosts end attempts that have them."""
    wanted = set(leases)
    for host in pool.hosts.values():
        found = [lease for lease in host.in_hand.items() if Lease(*lease) in wanted]
        if found:
            calls.order(host.replica, {"do": "cancel", "elements": found})
