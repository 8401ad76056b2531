"""Explains why a job that Ray has does not start: its request, the nodes, and who holds them.

It explains a status and never changes a state. What it says comes from Ray's state API; when that
is closed or slow, the status stays as it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from nemo_run_ray.dashboard.state import ClusterRoom, Holding, StateApi
from nemo_run_ray.errors import NemoRunRayError
from nemo_run_ray.remote.fit import (
    Node,
    ResourceRequest,
    amounts_text,
    best,
    free_text,
    has_room,
    request_of,
    scarce,
    why_not,
)
from nemo_run_ray.remote.spec import JobRow
from nemo_run_ray.remote.status import JobState, JobStatus, Reason

#: Seconds that a start takes where there is room; before that nothing is asked.
_STARTS_S = 3.0
#: Seconds in which Ray starts a worker by an interpreter of the task's.
_WORKER_S = 15.0
#: Number of holders that a message names.
_HOLDERS_MAX = 3


def explain(
    row: JobRow,
    status: JobStatus,
    reservation: Mapping[str, Any],
    state: StateApi,
    programs: Callable[[], Mapping[str, str]],
) -> JobStatus:
    """The status of a task with what it waits for, if it is pending: room, or a worker.

    Args:
        row: the task in Ray's table.
        status: what the row says, and what was found out of its runtime environment.
        reservation: the parts of its request that say what it asks for.
        state: asks the cluster.
        programs: gives the names of those who may hold what it waits for.
    """
    ask = request_of(reservation)
    waits = status.state is JobState.PENDING and status.reason is Reason.NONE
    posted_at = (row.get("start_time") or 0) / 1000
    age_s = time.time() - posted_at
    if not waits or 0 <= age_s < _STARTS_S:
        return status
    try:
        room = state.room() if ask else None
        told = None if room is None else why_waiting(ask, room, programs, posted_at)
    except NemoRunRayError:
        return status  # this only explains
    told = told or _no_worker(row, posted_at, age_s)
    return status if told is None else replace(status, reason=told[0], detail=told[1])


def _no_worker(row: JobRow, posted_at: float, age_s: float) -> tuple[Reason, str] | None:
    """Explain a job whose own interpreter has not come up; Ray tries for six minutes."""
    executable = (row.get("runtime_env") or {}).get("py_executable")
    if not executable or 0 <= age_s < _WORKER_S:
        return None
    return (
        Reason.REBUILDING,
        f"No worker has come up for it with py_executable={executable!r} of its runtime "
        "environment, which Ray starts each of its workers by: it must be there on the node, and "
        f"be able to import ray; it waits since {_clock(posted_at)}.",
    )


def why_waiting(
    ask: ResourceRequest,
    room: ClusterRoom,
    programs: Callable[[], Mapping[str, str]],
    posted_at: float,
) -> tuple[Reason, str] | None:
    """The reason of a task's wait, and a sentence; ``None`` when there is room.

    Args:
        ask: what it asks for.
        room: what the cluster has.
        programs: gives the submission ids of the Ray programs that have one.
        posted_at: since when it waits, in seconds since the epoch.
    """
    if ask.key not in room.explained:
        room.explained[ask.key] = _why(ask, room, programs)
    explained = room.explained[ask.key]
    if explained is None:
        return None
    reason, before, after = explained
    since = f"it waits since {_clock(posted_at)}" if posted_at else "it waits"
    return reason, f"{before}; {since}.{after}"


def _why(
    ask: ResourceRequest, room: ClusterRoom, programs: Callable[[], Mapping[str, str]]
) -> tuple[Reason, str, str] | None:
    """The reason of a task's wait, and the sentence before and after its beginning.

    To look at each holder for each task that asks for the same would be quadratic.
    """
    never = why_not(ask, room.nodes)
    if never:
        return (
            Reason.UNSCHEDULABLE,
            f"It asks for {ask}; no node can ever take it: {never}",
            " Ray waits for such a node to join.",
        )
    node = best(ask, room.nodes)
    if node is None or node.free is None or has_room(ask, node):
        return None
    count = len(room.nodes)
    which = f"the node {node.host}" if count == 1 else f"the best of {count} nodes, {node.host},"
    texts = [f"It asks for {ask}", f"{which} has {free_text(ask, node)}"]
    held = holders(ask, node, room.holdings.get(node.node_id, ()), programs())
    if held:
        more = f" and {len(held) - _HOLDERS_MAX} more" if len(held) > _HOLDERS_MAX else ""
        shown = ", ".join(
            f"{name} ({amounts_text(amounts)})" for name, amounts in held[:_HOLDERS_MAX]
        )
        texts.append(f"there it is held by {shown}{more}")
    return Reason.ROOM, "; ".join(texts), ""


def holders(
    ask: ResourceRequest, node: Node, here: Iterable[Holding], programs: Mapping[str, str]
) -> list[tuple[str, dict[str, float]]]:
    """The jobs that hold what a task finds too little of on a node, the largest holder first."""
    names = scarce(ask, node)
    found: dict[str, dict[str, float]] = {}
    for holding in here:
        owner = holding.submission_id or programs.get(holding.job_id)
        amounts = found.setdefault(owner or f"the Ray program {holding.job_id}", {})
        for name in names:
            if holding.resources.get(name):
                amounts[name] = amounts.get(name, 0.0) + holding.resources[name]
    held = [(owner, amounts) for owner, amounts in found.items() if amounts]
    weights = {name: ask.resources[name] for name in names}
    held.sort(key=lambda one: (-sum(one[1][name] / weights[name] for name in one[1]), one[0]))
    return held


def _clock(at: float) -> str:
    """A moment as this machine's clock shows it, with the day unless that is today."""
    then = time.localtime(at)
    is_today = then[:3] == time.localtime()[:3]
    return time.strftime("%H:%M" if is_today else "%Y-%m-%d %H:%M", then)
