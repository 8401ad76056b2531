"""What the head does next: a pure function of what all nodes have told."""

from __future__ import annotations

from typing import FrozenSet, List, Mapping, NamedTuple, Optional, Union

from .run_folder import CLUSTER_FAILED, NodeReport, RunEnd
from .settings import Settings


class ClusterView(NamedTuple):
    """What the head sees in one look.

    Attributes:
        elapsed_s: since the head's program began.
        reports: of the nodes, by rank.
        dead: ranks whose program has shown no life for long.
        address: the head's, once it is chosen.
        gcs_listens: whether workers can join.
        alive: addresses of the nodes that Ray counts as alive; ``None`` until Ray's dashboard
            has told it.
        was_ready: whether the cluster has been ready before.
        missing_for_s: how long a node of a cluster that was ready has been missing in ``alive``.
    """

    elapsed_s: float
    reports: Mapping[int, NodeReport]
    dead: FrozenSet[int] = frozenset()
    address: str = ""
    gcs_listens: bool = False
    alive: Optional[FrozenSet[str]] = None
    was_ready: bool = False
    missing_for_s: Mapping[int, float] = {}


class Wait(NamedTuple):
    """Nothing yet; ``what`` says what is waited for."""

    what: str


class ClusterReady(NamedTuple):
    """The cluster can be used; ``workers`` have joined."""

    workers: int


#: Seconds that a node may be missing in Ray's list before the cluster counts it as lost.
LOST_AFTER_S = 15.0


def decide(settings: Settings, view: ClusterView) -> Union[Wait, ClusterReady, RunEnd]:
    """The next step of a cluster.

    Returns:
        ``Wait``; ``ClusterReady``, also at every later look while all is well; or ``RunEnd`` with
        the reason.
    """
    broken = _failed(settings, view)
    if broken is not None:
        return RunEnd(CLUSTER_FAILED, broken)
    waiting = _missing(settings, view)
    if not waiting or view.was_ready:
        return ClusterReady(_workers(view))
    absent = _absent(settings, view)
    if view.elapsed_s >= settings.share_limit_s and _too_few(settings, absent):
        return RunEnd(CLUSTER_FAILED, _not_shared(settings, absent))
    if view.elapsed_s >= settings.start_limit_s:
        return RunEnd(
            CLUSTER_FAILED,
            f"the cluster was not ready within {settings.start_limit_s:g} s, which "
            f"RAY_HEAD_START_TIMEOUT allows: {waiting}",
        )
    return Wait(waiting)


def _failed(settings: Settings, view: ClusterView) -> Optional[str]:
    """Why the cluster cannot go on; ``None`` while it can."""
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
    """Whether workers that have failed end the job; before it was ready, if too few are left."""
    if view.was_ready:
        return settings.fail_fast
    failed = {rank for rank, report in view.reports.items() if rank and report.failed}
    return settings.nodes - 1 - len(failed | view.dead) < settings.min_workers


def _missing(settings: Settings, view: ClusterView) -> str:
    """What a cluster lacks that is not ready, in words; empty when nothing is missing."""
    if not view.address:
        return f"the head {settings.host} waits for workers that reach it"
    more = _more(view.reports.get(0) or NodeReport(settings.host, log=settings.node_log))
    if not view.gcs_listens:
        return f"Ray's GCS on {settings.host} does not listen yet{more}"
    if view.alive is None:
        return f"Ray's dashboard on {settings.host} does not answer yet{more}"
    if view.address not in view.alive:
        return f"Ray on {settings.host} (the head) is not registered yet{more}"
    alive, late = view.alive, _late(settings, view)
    if _too_few(settings, late):
        return f"workers that have not joined: {'; '.join(late[:8])}"
    slow = [
        f"{sidecar.name} on {report.host} (log: {settings.sidecar_log(sidecar, rank, report.host)})"
        for rank, report in sorted(view.reports.items())
        for sidecar in (*settings.sidecars, *settings.companions)
        if (rank == 0 or sidecar.everywhere) and sidecar.name not in report.ready
        # A node that the cluster may be ready without is not waited for.
        if rank == 0 or (report.address in alive and rank not in view.dead)
    ]
    return f"sidecars that are not ready: {'; '.join(slow[:8])}" if slow else ""


def _too_few(settings: Settings, lacking: List[str]) -> bool:
    return settings.nodes - 1 - len(lacking) < settings.min_workers


def _late(settings: Settings, view: ClusterView) -> List[str]:
    alive = view.alive or frozenset()
    found = []
    for rank in range(1, settings.nodes):
        report = view.reports.get(rank)
        if report is None:
            found.append(f"{settings.host_of(rank)}, which has not begun")
        elif report.address not in alive:
            found.append(report.host + _more(report))
    return found


def _more(report: NodeReport) -> str:
    """What else is known of a node whose Ray is waited for."""
    if report.retried:
        return f", where Ray itself has given up: {report.retried}"
    return f" (log: {report.log})" if report.log else ""


def _workers(view: ClusterView) -> int:
    alive = view.alive or frozenset()
    return sum(1 for rank, one in view.reports.items() if rank and one.address in alive)


def _absent(settings: Settings, view: ClusterView) -> List[str]:
    found = [rank for rank in range(settings.nodes) if rank not in view.reports]
    return [settings.host_of(rank) for rank in found]


def _not_shared(settings: Settings, absent: List[str]) -> str:
    more = f" and {len(absent) - 8} more" if len(absent) > 8 else ""
    return (
        f"{', '.join(absent[:8])}{more} has not written into {settings.run} within "
        f"{settings.share_limit_s:g} s, which node {settings.host} sees. Either that folder is not "
        "on a file system that all nodes share, or the step has not begun there"
    )
