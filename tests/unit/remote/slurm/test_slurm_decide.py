"""When the head calls a cluster ready, and when it gives it up."""

import re
from types import SimpleNamespace

import pytest

from nemo_run_ray.remote.slurm.folder import NodeReport
from nemo_run_ray.remote.slurm.head import LOST_AFTER, decide
from nemo_run_ray.remote.slurm.settings import Settings, SidecarSpec

_ENV = {
    "NEMO_RUN_RAY_RUN": "/run",
    "LOG_DIR": "/logs",
    "SLURM_JOB_ID": "1",
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURMD_NODENAME": "n1",
    "NEMO_RUN_RAY_HOSTS": "n1 n2 n3",
}


def settings_with(**fields) -> Settings:
    """Those of the head of three nodes, with other values."""
    found = Settings(_ENV)
    for name, value in fields.items():
        setattr(found, name, value)
    return found


_REPORTS = {
    rank: NodeReport(host=f"n{rank + 1}", address=f"10.0.0.{rank}", log=f"/logs/{rank}")
    for rank in range(3)
}
_RETRIED = {**_REPORTS, 2: _REPORTS[2]._replace(retried="try 2 of `ray start` has ended")}


def _decide(view: dict, elapsed_s: float = 20, **fields) -> tuple[str, str]:
    """About a whole cluster, with these changes."""
    alive = {report.address for report in _REPORTS.values()}
    values = {"reports": _REPORTS, "alive": alive, "dead": set(), "missed": {}, "was_ready": False}
    head = SimpleNamespace(settings=settings_with(**fields), **{**values, **view})
    return decide(head, elapsed_s)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"alive": set()}, r"Ray on the head is not up yet: n1 \(log: /logs/0\)"),
        (
            {"alive": {"10.0.0.0", "10.0.0.1"}, "reports": _RETRIED},
            "n3, where Ray itself has given up: try 2 of",
        ),
        ({"alive": {"10.0.0.0", "10.0.0.1"}}, r"not joined: n3 \(log: /logs/2\)"),
        ({"reports": {0: _REPORTS[0], 1: _REPORTS[1]}}, "n3, which has not begun"),
    ],
)
def test_the_head_names_what_is_missing_until_the_time_is_over(changes, what):
    waiting, why = _decide(changes)
    assert re.search(what, waiting)
    assert why == ""
    waiting, why = _decide(changes, 600)
    assert waiting == ""
    assert "within" in why


def test_a_node_that_writes_nothing_is_named_after_a_minute():
    """Its folder is not the others', or the step has not begun there."""
    why = _decide({"reports": {0: _REPORTS[0], 2: _REPORTS[2]}}, 60)[1]
    assert "n2 has not written into /run within 60 s, which node n1 sees" in why


def test_of_many_absent_nodes_some_are_named():
    hosts = [f"n{number}" for number in range(1, 21)]
    why = _decide({"reports": {0: _REPORTS[0]}}, 60, nodes=20, hosts=hosts)[1]
    assert "n9 and 11 more has not written" in why


_TWO_ALIVE = {"alive": {"10.0.0.0", "10.0.0.1"}}
_FAILED = {"reports": {**_REPORTS, 2: _REPORTS[2]._replace(failed="node n3 (rank 2): no Ray here")}}
_DEAD = {"dead": {2}}
_LOST = {"missed": {2: LOST_AFTER}, "was_ready": True}
_LATER = {"was_ready": True}
_ONE_WORKER, _ANY = {"min_workers": 1}, {"fail_fast": False}


@pytest.mark.parametrize(
    ("settings", "changes", "why"),
    [
        ({}, {}, ""),
        # Before it is ready, a bad node may be one too many.
        (_ONE_WORKER, {"reports": {0: _REPORTS[0], 1: _REPORTS[1]}}, ""),
        (_ONE_WORKER, {**_TWO_ALIVE, **_FAILED}, ""),
        (_ONE_WORKER, {**_TWO_ALIVE, **_DEAD}, ""),
        # The death of a worker ends the cluster, unless the user does not want that.
        ({}, {**_FAILED, **_LATER}, "n3 (rank 2)"),
        ({}, {**_DEAD, **_LATER}, "n3 (rank 2)"),
        ({}, _LOST, "n3 (rank 2)"),
        ({}, {"missed": {2: LOST_AFTER - 1}, **_LATER}, ""),
        (_ANY, _FAILED, "n3 (rank 2)"),
        (_ANY, _DEAD, "n3 (rank 2)"),
        (_ANY, {**_FAILED, **_LATER}, ""),
        (_ANY, {**_DEAD, **_LATER}, ""),
        (_ANY, _LOST, ""),
    ],
)
def test_when_a_cluster_is_ready_and_when_it_has_failed(settings, changes, why):
    waiting, failed = _decide(changes, **settings)
    assert waiting == ""
    assert bool(failed) == bool(why)
    assert why in failed


def test_the_cluster_waits_for_its_sidecars():
    sidecars = [SidecarSpec("box", "x")]
    ready = {rank: one._replace(ready=("box",)) for rank, one in _REPORTS.items()}
    waiting = _decide({"reports": {**ready, 1: _REPORTS[1]}}, sidecars=sidecars)[0]
    assert "box on n2" in waiting
    assert _decide({"reports": ready}, sidecars=sidecars) == ("", "")
