"""What the dispatcher finds on the head: the dashboard of its cluster, and the node's memory."""

from __future__ import annotations

import os
import time
from typing import Callable, Optional

from ..spec import DispatchSpec
from . import rest

#: Memory of the head for each job's supervisor (measured: 85 to 110 MB), and the part of the
#: head's memory that supervisors may take when the user sets no limit.
SUPERVISOR_BYTES, HEAD_PART = 110 * 10**6, 0.5
#: Seconds in which only other clusters' dashboards answer until the own one is taken to be gone.
FOREIGN_MAX_S = 120.0


def find_dashboard(
    dispatch: DispatchSpec,
    within_s: float = FOREIGN_MAX_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Optional[rest.Rest]:
    """The dashboard that belongs to the dispatch's session, however long it is away.

    It is ``None`` when other sessions have answered for so long: then this is not the cluster of
    the dispatch.
    """
    foreign_since: Optional[float] = None
    while foreign_since is None or clock() - foreign_since < within_s:
        for url in rest.candidates(dispatch.dashboards):
            try:
                found = rest.Rest(url, timeout_s=5.0).session()
                # Where Ray has set the address it is this cluster's; and the dispatches of an
                # allocation go on in the next one, whose Ray has another name.
                if found == dispatch.session or url == rest.own_dashboard():
                    return rest.Rest(url)
            except rest.Unanswered:
                continue
            foreign_since = clock() if foreign_since is None else foreign_since
        sleep(1.0)
    return None


def default_limit(memory_bytes: int) -> int:
    """How many jobs a head of this size may have at once when the user sets no limit."""
    return max(4, int(memory_bytes * HEAD_PART / SUPERVISOR_BYTES))


def memory_bytes() -> int:
    """This node's memory, or what its container may use of it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path, encoding="ascii") as file:
                total = min(total, int(file.read()))
        except (OSError, ValueError):
            continue  # no such file, or no limit in it
    return total
