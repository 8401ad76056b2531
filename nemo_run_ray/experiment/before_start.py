"""The look at a cluster before the first job of an experiment is sent to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nemo_run.core.frontend.console.api import CONSOLE

from nemo_run_ray.clusters import Dashboard
from nemo_run_ray.errors import DoesNotFit, as_markup
from nemo_run_ray.executor import RayExecutor
from nemo_run_ray.plan.job_plan import JobPlan
from nemo_run_ray.plan.room import Ask, ask_of
from nemo_run_ray.remote.spec import ArraySpec, GroupSpec

if TYPE_CHECKING:
    from nemo_run_ray.cluster_files.check_rows import CheckRow


def misfit(
    dashboard: Dashboard,
    plans: Mapping[str, JobPlan],
    asks: Mapping[str, Ask],
    executors: Mapping[str, RayExecutor],
) -> DoesNotFit | None:
    """Why the cluster cannot run the jobs, when one of their executors asks for a look at it.

    Args:
        dashboard: of the cluster.
        plans: the jobs as this cluster gets them.
        asks: what their replicas ask for, see ``asks_of``.
        executors: of the jobs.
    """
    resolved = [
        role
        for executor in executors.values()
        for found in [executor.resolved()]
        for role in (found.resource_group or [found])
    ]
    if not any(executor.preflight for executor in resolved):
        return None
    # Imported when they are needed, for their libraries.
    from nemo_run_ray.cluster_files.check_rows import CheckState

    rows = _looked(dashboard, plans, asks, dict.fromkeys(plan.resolved_from for plan in resolved))
    _tell(
        [f"{row.check}: {row.message}" for row in rows if row.state is CheckState.WARNING],
        [row.check for row in rows if row.state is CheckState.UNKNOWN],
    )
    broken = [row for row in rows if row.state is CheckState.BROKEN]
    if not broken:
        return None
    lines = [f"- {row.check}: {row.message} {row.next_step}".rstrip() for row in broken]
    found = "\n".join(lines)
    return DoesNotFit(
        f"The cluster {dashboard.url} does not fit, so nothing was sent to it:\n{found}"
    )


def _looked(
    dashboard: Dashboard,
    plans: Mapping[str, JobPlan],
    asks: Mapping[str, Ask],
    names: Iterable[str | None],
) -> list[CheckRow]:
    """What is to be said of the cluster by each file that executors come from."""
    from nemo_run_ray.cluster_files.load import load
    from nemo_run_ray.cluster_files.preflight import Needs, look
    from nemo_run_ray.cluster_files.schema import ClusterFile

    rows: dict[CheckRow, None] = {}
    for name in names:
        file = load(name).file if name else ClusterFile()
        # The tasks themselves are looked at, and pools that they do not use do not matter.
        needs = Needs(asks=asks, jobs=len(plans), **_limits(list(plans.values())))
        rows |= dict.fromkeys(look(dashboard, file.model_copy(update={"pools": {}}), needs))
    return list(rows)


def _tell(warnings: Sequence[str], untold: Sequence[str]) -> None:
    for warning in warnings:
        CONSOLE.log(as_markup(f"Preflight: {warning}"))
    if untold:
        CONSOLE.log(as_markup(f"Preflight: the cluster does not tell: {', '.join(untold)}."))


def _limits(plans: Sequence[JobPlan]) -> dict[str, Any]:
    """Values of ``preflight.Needs``."""
    limits = [plan.max_in_flight for plan in plans if plan.max_in_flight is not None]
    since = [plan.selector_since for plan in plans if plan.selector_since is not None]
    return {
        "selector_since": max(since, default=None),
        "max_in_flight": min(limits, default=None),
    }


def asks_of(plan: JobPlan) -> Iterator[tuple[str, Ask]]:
    """What one replica of each role asks for, by a name for people.

    A group that waits for nodes to join asks for nothing that must be there.
    """
    if isinstance(plan.spec, ArraySpec):
        host = plan.spec.host
        yield f"element of {plan.job}", Ask(dict(host.resources), dict(host.label_selector))
    elif not isinstance(plan.spec, GroupSpec):
        yield f"task {plan.job}", ask_of(plan.reservation)
    elif not plan.spec.wait_for_nodes:
        for role in plan.spec.roles:
            ask = Ask(dict(role.resources), dict(role.label_selector))
            yield f"role {role.name} of {plan.job}", ask
