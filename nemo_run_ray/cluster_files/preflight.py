"""Whether a cluster fits what is to run on it, known before anything is sent.

``look`` asks the cluster and ``check`` says what that means. Looking changes nothing. What the
cluster does not tell is "unknown", never "ok".
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nemo_run_ray.cluster_files.check_rows import CheckRow, CheckRows, CheckState
from nemo_run_ray.cluster_files.images import labels_of
from nemo_run_ray.cluster_files.schema import ClusterFile, PoolPart
from nemo_run_ray.clusters import Dashboard
from nemo_run_ray.dashboard.state import Inspection, inspect
from nemo_run_ray.fields import parse_memory
from nemo_run_ray.plan.roles import BUNDLE_SELECTORS_SINCE, JOB_SELECTORS_SINCE
from nemo_run_ray.remote.fit import ResourceRequest


@dataclass(frozen=True)
class Needs:
    """What is to run there, beside what a cluster file says.

    Attributes:
        asks: what one replica asks for, by a name for people; under the name of a pool of the file
            in place of what that says.
        selector_since: first version of Ray that knows the tasks' label selectors; ``None`` when
            they have none.
        max_in_flight: so many jobs at once; ``None`` is what the file says, or no limit.
        jobs: how many there are, of which no more run at once; ``None`` when it is not known.
        python: version of the client, with which Partials are made.
    """

    asks: Mapping[str, ResourceRequest] = field(default_factory=dict)
    selector_since: tuple[int, int] | None = None
    max_in_flight: int | None = None
    jobs: int | None = None
    python: str = "{}.{}".format(*sys.version_info)


def look(
    dashboard: Dashboard, file: ClusterFile | None = None, needs: Needs | None = None
) -> list[CheckRow]:
    """Look at a cluster, within 10 s, and say of each thing whether it fits.

    Args:
        dashboard: of the cluster.
        file: what its cluster file says, if it has one.
        needs: what is to run there.
    """
    return check(inspect(dashboard), file, needs)


def check(
    found: Inspection, file: ClusterFile | None = None, needs: Needs | None = None
) -> list[CheckRow]:
    """What is to be said of one look; a pure function. See ``look``."""
    file, needs = file or ClusterFile(), needs or Needs()
    checks = CheckRows(found, file.preflight.strict)
    if file.preflight.require_address:
        checks.address(file.cluster.address)
    if not checks.front():
        return checks.rows
    if file.preflight.only_required and needs.jobs is not None:  # `doctor` looks at everything
        if file.preflight.required_labels or file.preflight.min_resources:
            checks.nodes()
            _check_required(checks, file)
        return checks.rows
    asks = {**pool_asks(file), **needs.asks}
    since = needs.selector_since
    if since is None and any(ask.selector for ask in asks.values()):
        since = BUNDLE_SELECTORS_SINCE
    checks.ray(since, BUNDLE_SELECTORS_SINCE, JOB_SELECTORS_SINCE)
    checks.python(needs.python)
    checks.nodes()
    _check_required(checks, file)
    for name, ask in asks.items():
        pool = file.pools.get(name)
        what = f"pool {name}" if pool else name
        if pool and pool.address and pool.address != file.cluster.address:
            checks.elsewhere(what, pool.address)
        else:
            checks.room(what, ask)
    checks.head_memory(_at_once(file, needs))
    if needs.jobs is None:  # what jobs send is compared with it when it is packed
        checks.package_size()
    checks.clock()
    checks.disk()
    return checks.rows


def _check_required(checks: CheckRows, file: ClusterFile) -> None:
    for label in file.preflight.required_labels:
        checks.label(label.key, label.value)
    for name, amount in sorted(file.preflight.min_resources.items()):
        checks.resource(name, amount)


def _at_once(file: ClusterFile, needs: Needs) -> int | None:
    """How many jobs run at once at most; ``None`` when nobody limits them."""
    limit = needs.max_in_flight
    if limit is None:
        limit = file.defaults.get("max_in_flight")
    limits = [most for most in (limit, needs.jobs) if most is not None]
    return min(limits, default=None)


def pool_asks(file: ClusterFile) -> dict[str, ResourceRequest]:
    """What one replica asks for in each pool, as ``resolve.py`` gives it to an executor.

    The pool's fields lie over the file's defaults, and those over the labels of its image.
    """
    return {name: _pool_ask(pool, file) for name, pool in file.pools.items()}


def _pool_ask(pool: PoolPart, file: ClusterFile) -> ResourceRequest:
    defaults = file.defaults

    def given(name: str) -> Any:
        own = getattr(pool, name)
        return defaults.get(name) if own is None else own

    memory = given("memory_per_node")
    resources = {
        "CPU": float(given("cpus_per_node") or 0),
        "GPU": float(given("gpus_per_node") or 0),
        "memory": float(0 if memory is None else parse_memory(memory)),
        **(defaults.get("resources_per_node") or {}),
        **pool.resources_per_node,
    }
    image = given("image")
    by_label = image is not None and file.images_as == "label"
    selector = {
        **(labels_of(str(image), file) if by_label else {}),
        **(defaults.get("label_selector") or {}),
        **pool.label_selector,
    }
    return ResourceRequest({name: amount for name, amount in resources.items() if amount}, selector)


__all__ = ["CheckRow", "CheckState", "Inspection", "Needs", "check", "look", "pool_asks"]
