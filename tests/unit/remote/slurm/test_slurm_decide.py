"""When the head calls a cluster ready, and when it gives it up."""

import re

import pytest

from nemo_run_ray.remote.slurm.decide import ClusterReady, ClusterView, Wait, decide
from nemo_run_ray.remote.slurm.folder import CLUSTER_FAILED, NodeReport, RunEnd
from nemo_run_ray.remote.slurm.settings import Settings, SidecarSpec

_SETTINGS = Settings(
    run="/run",
    logs="/logs",
    log_prefix="ray-",
    cluster="",
    job="1.0",
    rank=0,
    nodes=3,
    host="n1",
    hosts=("n1", "n2", "n3"),
    cpus=4,
    worker_units=1,
    temp_dir="/tmp/x",
    ports={},
    min_workers=2,
)
_REPORTS = {
    rank: NodeReport(host=f"n{rank + 1}", address=f"10.0.0.{rank}", log=f"/logs/{rank}")
    for rank in range(3)
}
_RETRIED = {**_REPORTS, 2: _REPORTS[2]._replace(retried="try 2 of `ray start` has ended")}
_WHOLE = ClusterView(
    elapsed_s=20,
    reports=_REPORTS,
    address="10.0.0.0",
    gcs_listens=True,
    alive=frozenset(one.address for one in _REPORTS.values()),
)


def test_a_whole_cluster_is_ready():
    assert decide(_SETTINGS, _WHOLE) == ClusterReady(2)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"address": "", "gcs_listens": False, "alive": None}, "waits for workers that reach it"),
        ({"gcs_listens": False, "alive": None}, "GCS on n1 does not listen yet"),
        ({"alive": None}, "dashboard on n1 does not answer yet"),
        ({"alive": frozenset()}, r"n1 \(the head\) is not registered yet"),
        (
            {"alive": frozenset({"10.0.0.0", "10.0.0.1"}), "reports": _RETRIED},
            "n3, where Ray itself has given up: try 2 of",
        ),
        ({"alive": frozenset({"10.0.0.0", "10.0.0.1"})}, r"not joined: n3 \(log: /logs/2\)"),
        ({"reports": {0: _REPORTS[0], 1: _REPORTS[1]}}, "n3, which has not begun"),
    ],
)
def test_what_is_missing_is_said_and_has_an_end(changes, what):
    view = _WHOLE._replace(**changes)
    waiting = decide(_SETTINGS, view)
    assert isinstance(waiting, Wait)
    late = decide(_SETTINGS, view._replace(elapsed_s=600))
    assert isinstance(late, RunEnd)
    assert late.code == CLUSTER_FAILED
    assert re.search(what, waiting.what)
    assert "within" in late.why


def test_a_node_that_writes_nothing_is_named_after_a_minute():
    """Its folder is not the others', or the step has not begun there."""
    view = _WHOLE._replace(reports={0: _REPORTS[0], 2: _REPORTS[2]}, elapsed_s=60)
    end = decide(_SETTINGS, view)
    assert isinstance(end, RunEnd)
    assert "n2 has not written into /run within 60 s, which node n1 sees" in end.why


def test_fewer_workers_may_do():
    settings = _SETTINGS._replace(min_workers=1)
    view = _WHOLE._replace(reports={0: _REPORTS[0], 1: _REPORTS[1]}, elapsed_s=60)
    assert decide(settings, view) == ClusterReady(1)


def test_the_cluster_waits_for_its_sidecars():
    settings = _SETTINGS._replace(sidecars=(SidecarSpec("box", "x"),))
    ready = {rank: one._replace(ready=("box",)) for rank, one in _REPORTS.items()}
    waiting = decide(settings, _WHOLE._replace(reports={**ready, 1: _REPORTS[1]}))
    assert isinstance(waiting, Wait)
    assert "box on n2" in waiting.what
    assert decide(settings, _WHOLE._replace(reports=ready)) == ClusterReady(2)


_BROKEN = {
    "failed": {"reports": {**_REPORTS, 2: _REPORTS[2]._replace(failed="no Ray here")}},
    "dead": {"dead": frozenset({2})},
    "lost": {"missing_for_s": {2: 16.0}},
}


@pytest.mark.parametrize("how", _BROKEN)
def test_the_death_of_a_worker_ends_the_cluster_and_names_it(how):
    end = decide(_SETTINGS, _WHOLE._replace(was_ready=True, **_BROKEN[how]))
    assert isinstance(end, RunEnd)
    assert end.code == CLUSTER_FAILED
    assert "n3 (rank 2)" in end.why


@pytest.mark.parametrize("how", ["failed", "dead"])
def test_before_it_is_ready_a_bad_node_may_be_one_too_many(how):
    settings = _SETTINGS._replace(min_workers=1)
    alive = frozenset(_REPORTS[rank].address for rank in (0, 1))
    assert decide(settings, _WHOLE._replace(alive=alive, **_BROKEN[how])) == ClusterReady(1)


@pytest.mark.parametrize("how", _BROKEN)
def test_a_cluster_may_go_on_without_a_worker(how):
    settings = _SETTINGS._replace(fail_fast=False)
    view = _WHOLE._replace(**_BROKEN[how])
    if how != "lost":  # Ray is asked for lost nodes of a cluster that was ready
        assert isinstance(decide(settings, view), RunEnd), "not before it was ready"
    assert isinstance(decide(settings, view._replace(was_ready=True)), ClusterReady)


def test_the_head_itself_is_always_needed():
    settings = _SETTINGS._replace(fail_fast=False)
    reports = {**_REPORTS, 0: _REPORTS[0]._replace(failed="the sidecar box has ended")}
    end = decide(settings, _WHOLE._replace(was_ready=True, reports=reports))
    assert isinstance(end, RunEnd)
    assert "n1 (rank 0): the sidecar box" in end.why


def test_a_short_gap_in_rays_list_is_no_loss():
    view = _WHOLE._replace(was_ready=True, missing_for_s={2: 10.0})
    assert isinstance(decide(_SETTINGS, view), ClusterReady)
