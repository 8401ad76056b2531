"""The next step of the head: a pure function of the reports of all nodes."""

from __future__ import annotations

from typing import FrozenSet, List, Mapping, NamedTuple, Optional, Union

from .folder import CLUSTER_FAILED, NodeReport, RunEnd
from .settings import Settings


class ClusterView(NamedTuple):
    """One look of the head at the cluster."""

    elapsed_s: float  # since the head's program began
    reports: Mapping[int, NodeReport]  # by rank
    dead: FrozenSet[int] = frozenset()  # ranks whose program has shown no life for long
    address: str = ""  # the head's, once it is chosen
    gcs_listens: bool = False  # so workers can join
    alive: Optional[FrozenSet[str]] = None  # addresses of Ray's nodes; None: no answer yet
    was_ready: bool = False
    missing_for_s: Mapping[int, float] = {}  # seconds for which Ray has missed a node, by rank


class Wait(NamedTuple):
    """The cluster is not ready yet."""

    what: str  # what the head waits for


class ClusterReady(NamedTuple):
    """The cluster can be used, with as many workers."""

    workers: int


#: Seconds that a node may be missing in Ray's list before the cluster counts it as lost.
LOST_AFTER_S = 15.0
#: Nodes that a message lists at most.
_LISTED = 8


def decide(settings: Settings, view: ClusterView) -> Union[Wait, ClusterReady, RunEnd]:
    """The next step of a cluster.

    Returns:
        ``Wait``; ``ClusterReady``, also at every later look while all is well; or ``RunEnd`` with
        the reason.
    """
    why = _failure(settings, view)
    if why is not None:
        return RunEnd(CLUSTER_FAILED, why)
    waiting = _missing(settings, view)
    if not waiting or view.was_ready:
        alive, rows = view.alive or frozenset(), view.reports.items()
        return ClusterReady(sum(1 for rank, row in rows if rank and row.address in alive))
    absent = [settings.host_of(rank) for rank in range(settings.nodes) if rank not in view.reports]
    if view.elapsed_s >= settings.share_limit_s and _too_few(settings, absent):
        more = f" and {len(absent) - _LISTED} more" if len(absent) > _LISTED else ""
        return RunEnd(
            CLUSTER_FAILED,
            f"{', '.join(absent[:_LISTED])}{more} has not written into {settings.run} within "
            f"{settings.share_limit_s:g} s, which node {settings.host} sees. Either that folder is "
            "not on a file system that all nodes share, or the step has not begun there",
        )
    if view.elapsed_s >= settings.start_limit_s:
        return RunEnd(
            CLUSTER_FAILED,
            f"the cluster was not ready within {settings.start_limit_s:g} s, which "
            f"RAY_HEAD_START_TIMEOUT allows: {waiting}",
        )
    return Wait(waiting)


def _failure(settings: Settings, view: ClusterView) -> Optional[str]:
    """The reason why the cluster cannot continue; ``None`` while it can."""
    for rank, report in sorted(view.reports.items()):
        if report.failed and (rank == 0 or _is_needed(settings, view)):
            return f"node {report.host} (rank {rank}): {report.failed}"
    if not _is_needed(settings, view):
        return None
    for rank in sorted(view.dead):
        return (
            f"node {settings.host_of(rank)} (rank {rank}) shows no life: its program writes "
            f"nothing into {settings.run} any more. It has lost its power, its network or its file "
            "system"
        )
    for rank, seconds in sorted(view.missing_for_s.items()):
        lost = view.reports.get(rank)  # its file may be out of reach for a moment
        if lost is not None and seconds >= LOST_AFTER_S:
            return (
                f"node {lost.host} (rank {rank}) was lost: Ray has not counted {lost.address} as "
                f"alive for {seconds:.0f} s. Its log: {lost.log}"
            )
    return None


def _is_needed(settings: Settings, view: ClusterView) -> bool:
    """Whether workers that have failed end the job; before it was ready, if too few remain."""
    if view.was_ready:
        return settings.fail_fast
    failed = {rank for rank, report in view.reports.items() if rank and report.failed}
    return settings.nodes - 1 - len(failed | view.dead) < settings.min_workers


def _missing(settings: Settings, view: ClusterView) -> str:
    """A phrase for what the cluster lacks to be ready; empty if nothing is missing."""
    if not view.address:
        return f"the head {settings.host} waits for workers that reach it"
    details = _details(view.reports.get(0) or NodeReport(settings.host, log=settings.node_log))
    if not view.gcs_listens:
        return f"Ray's GCS on {settings.host} does not listen yet{details}"
    if view.alive is None:
        return f"Ray's dashboard on {settings.host} does not answer yet{details}"
    if view.address not in view.alive:
        return f"Ray on {settings.host} (the head) is not registered yet{details}"
    alive, late = view.alive, _late(settings, view)
    if _too_few(settings, late):
        return f"workers that have not joined: {'; '.join(late[:_LISTED])}"
    slow = [
        f"{sidecar.name} on {report.host} (log: {settings.sidecar_log(sidecar, rank, report.host)})"
        for rank, report in sorted(view.reports.items())
        for sidecar in (*settings.sidecars, *settings.separate_sidecars)
        if (rank == 0 or sidecar.everywhere) and sidecar.name not in report.ready
        # A node that the cluster may be ready without is not waited for.
        if rank == 0 or (report.address in alive and rank not in view.dead)
    ]
    return f"sidecars that are not ready: {'; '.join(slow[:_LISTED])}" if slow else ""


def _too_few(settings: Settings, lacking: List[str]) -> bool:
    return settings.nodes - 1 - len(lacking) < settings.min_workers


def _late(settings: Settings, view: ClusterView) -> List[str]:
    alive = view.alive or frozenset()
    late = []
    for rank in range(1, settings.nodes):
        report = view.reports.get(rank)
        if report is None:
            late.append(f"{settings.host_of(rank)}, which has not begun")
        elif report.address not in alive:
            late.append(report.host + _details(report))
    return late


def _details(report: NodeReport) -> str:
    """More about a node whose Ray is not up."""
    if report.retried:
        return f", where Ray itself has given up: {report.retried}"
    return f" (log: {report.log})" if report.log else ""
