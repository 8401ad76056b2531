"""What is entered into NeMo-Run's registries."""

import logging
import sys
from dataclasses import dataclass

import nemo_run as run
import pytest
from nemo_run.run.experiment import Experiment
from nemo_run.run.torchx_backend.schedulers.api import EXECUTOR_MAPPING

import nemo_run_ray.nemo
from nemo_run_ray import ExistingCluster, RayExecutor, nemo

ADDRESS = "http://ray.example.org:8265"


@dataclass(kw_only=True)
class TeamExecutor(RayExecutor):
    """A subclass with a field of its own, defined after the registration."""

    team: str = "vision"


class Own(TeamExecutor):
    """A subclass of a subclass."""


def test_a_subclass_is_registered_by_itself(unique):
    """NeMo-Run looks the very class up."""
    for kind in (TeamExecutor, Own):
        executor = kind(address=ADDRESS, cpus_per_node=2)
        with run.Experiment(unique) as experiment:
            first = experiment.add(run.Script(inline="true"), executor=executor, name="a")
            experiment.add(
                run.Script(inline="true"), executor=executor, name="b", dependencies=[first]
            )
            experiment.add([run.Script(inline="true")] * 2, executor=executor, name="group")
            experiment.dryrun(log=False)
        assert kind in Experiment._DETACH_SUPPORTED_EXECUTORS
        assert kind in Experiment._PARALLEL_SUPPORTED_EXECUTORS
        assert kind in experiment._DEPENDENCY_SUPPORTED_EXECUTORS


@pytest.mark.parametrize("others", ["team-a", "team-b"])
def test_clusters_of_one_address_with_other_headers_are_two(unique, others):
    with run.Experiment(unique) as experiment:
        for team in ("team-a", others):
            cluster = ExistingCluster(ADDRESS, headers={"X-Team": team})
            executor = RayExecutor(cluster=cluster)
            experiment.add(run.Script(inline="true"), executor=executor, name=unique)
    assert nemo._is_on_one_cluster(experiment) == (others == "team-a")


def test_twice_is_once():
    nemo.register()
    before = dict(EXECUTOR_MAPPING), Experiment._DETACH_SUPPORTED_EXECUTORS
    nemo.register()
    assert (dict(EXECUTOR_MAPPING), Experiment._DETACH_SUPPORTED_EXECUTORS) == before


@pytest.mark.parametrize(
    "lacks",
    [
        "_PARALLEL_SUPPORTED_EXECUTORS",
        "_DETACH_SUPPORTED_EXECUTORS",
        "_DEPENDENCY_SUPPORTED_EXECUTORS",
    ],
)
def test_a_nemo_run_that_lacks_one_list_is_left_as_it_is(monkeypatch, caplog, lacks):
    monkeypatch.delattr(Experiment, lacks)
    for kind in (RayExecutor, TeamExecutor, Own):
        monkeypatch.delitem(EXECUTOR_MAPPING, kind)
    before = dict(vars(Experiment))
    monkeypatch.setattr(nemo_run_ray.log, "handlers", [caplog.handler])
    nemo_run_ray._register()
    assert lacks in caplog.records[0].getMessage()
    assert dict(vars(Experiment)) == before
    assert RayExecutor not in EXECUTOR_MAPPING


@pytest.mark.parametrize(
    "broken", ["nemo_run.run.torchx_backend.schedulers.api", "nemo_run.run.experiment"]
)
def test_a_nemo_run_with_other_registries_gets_one_warning(monkeypatch, caplog, broken):
    monkeypatch.setitem(sys.modules, broken, None)
    monkeypatch.delitem(sys.modules, "nemo_run_ray.nemo")
    monkeypatch.delattr(nemo_run_ray, "nemo")
    # NeMo-Run takes the handlers of the root logger away when it sets its console up.
    monkeypatch.setattr(nemo_run_ray.log, "handlers", [caplog.handler])
    nemo_run_ray._register()
    (record, *_) = caplog.records  # the root logger's handler may have it too
    assert record.levelno == logging.WARNING
    for word in ("RayExecutor cannot be used", broken, "ModuleNotFoundError"):
        assert word in record.getMessage()
