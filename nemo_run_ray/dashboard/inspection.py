"""What a cluster tells of itself when it is looked at before anything is sent to it.

Seen on Ray 2.60: ``/api/v0/cluster_metadata`` has the Python of the head (``pythonVersion``). What
the dashboard takes in one request (100 MiB) is a constant of Ray's, which no answer tells.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TypeVar

import httpx

from nemo_run_ray.clusters import Dashboard
from nemo_run_ray.dashboard.http import Http
from nemo_run_ray.dashboard.nodes import ClusterNode, with_names
from nemo_run_ray.dashboard.state_api import StateApi
from nemo_run_ray.errors import ClusterError, Unauthorised
from nemo_run_ray.remote.rows import job_rows
from nemo_run_ray.remote.states import is_active

#: Seconds until each answer must have come. All are asked for at once, so that a look takes no
#: longer than one connection and one answer.
_ANSWER_S = 4.0
_T = TypeVar("_T")


@dataclass(frozen=True)
class Inspection:
    """One look at a cluster.

    Attributes:
        url: of its dashboard.
        unreachable: why it cannot be asked at all; empty when it can.
        unauthorised: why it refuses the credentials; empty when it takes them.
        version: of its Ray; empty when it is not told.
        jobs: how many it knows, and how many of these are pending or running; ``None`` when it does
            not say.
        nodes: those that live; ``None`` when it does not say.
        has_label_names: the labels of the nodes have their own names, see ``ClusterNode``.
        is_free_told: the nodes say what nobody holds.
        python: version on the head, such as ``3.11.7``; empty when it is not told.
        skew_s: seconds by which its clock is ahead of this machine's; ``None`` when not told.
    """

    url: str
    unreachable: str = ""
    unauthorised: str = ""
    version: str = ""
    jobs: tuple[int, int] | None = None
    nodes: tuple[ClusterNode, ...] | None = None
    has_label_names: bool = False
    python: str = ""
    skew_s: float | None = None

    @property
    def is_free_told(self) -> bool:
        return bool(self.nodes) and all(node.free is not None for node in self.nodes or ())


def inspect(dashboard: Dashboard) -> Inspection:
    """Look at a cluster, within 10 s, whatever it answers. Looking changes nothing."""
    http = Http(dashboard)
    state = StateApi(http)
    with ThreadPoolExecutor(5) as pool:
        version = pool.submit(lambda: _version(http))
        jobs = pool.submit(lambda: _jobs(http))
        summary = pool.submit(lambda: state.nodes(_ANSWER_S))
        table = pool.submit(lambda: state.node_table(_ANSWER_S))
        python = pool.submit(lambda: state.python(_ANSWER_S))
    http.close()
    runs, skew_s = _or(version, ("", None))
    failures = [answer.exception() for answer in (version, jobs)]
    for error in failures:
        if error is not None and not isinstance(error, ClusterError):
            raise error
    refusals = [error for error in failures if isinstance(error, Unauthorised)]
    # A job table that comes too late is no cluster that is away.
    is_away = not refusals and None not in failures
    return Inspection(
        url=dashboard.url,
        unreachable=str(failures[0]) if is_away else "",
        unauthorised=str(refusals[0]) if refusals else "",
        version=runs,
        jobs=None if jobs.exception() else jobs.result(),
        nodes=_nodes(_or(summary, None), _or(table, None)),
        has_label_names=bool(_or(table, None)),
        python=_or(python, None) or "",
        skew_s=skew_s,
    )


def _or(answer: Future[_T], otherwise: _T) -> _T:
    """What was answered, or this when nothing was."""
    error = answer.exception()
    if error is None:
        return answer.result()
    if isinstance(error, ClusterError):
        return otherwise
    raise error


def _nodes(
    summary: list[ClusterNode] | None, table: list[ClusterNode] | None
) -> tuple[ClusterNode, ...] | None:
    if summary is None:
        return None if table is None else tuple(table)
    return tuple(with_names(summary, table or ()))


def _version(http: Http) -> tuple[str, float | None]:
    began = time.time()
    response = http.get("/api/version", limit_s=_ANSWER_S)
    version = http.read(response, lambda answer: str(answer["ray_version"]))
    return version, _skew(response, began, time.time())


def _skew(response: httpx.Response, began: float, ended: float) -> float | None:
    """How far a clock is ahead that is read in whole seconds, between two moments here."""
    try:
        there = parsedate_to_datetime(response.headers["date"]).timestamp()
    except (KeyError, ValueError, TypeError, OverflowError):
        return None
    if there + 1 < began:
        return there + 1 - began
    return max(0.0, there - ended)


def _jobs(http: Http) -> tuple[int, int]:
    rows = http.read(http.get("/api/jobs/", limit_s=_ANSWER_S), job_rows)
    return len(rows), sum(is_active(row) for row in rows)
