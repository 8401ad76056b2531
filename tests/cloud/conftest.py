"""Both platforms with a folder that all pods share, and their executors."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from nemo_run.core.execution import dgxcloud, lepton
from nemo_run.core.execution.base import Executor

from nemo_run_ray import patches
from tests.cloud.pods import Cluster, Image
from tests.cloud.projects import Project
from tests.cloud.servers import Lepton, RunAI, Server
from tests.patches.dgxcloud import make_executor

MOUNT = "/shared"


@dataclasses.dataclass
class Platform:
    """One of the two: its server, its executor, its cluster."""

    name: str
    server: Server
    cluster: Cluster
    make: Callable[..., Executor]

    def jobs(self) -> list:
        """Workloads of users, not of data movers."""
        return self.cluster.of("trainings", "distributed", "job")

    def movers(self) -> list:
        return self.cluster.of("workspaces", "mover")


@pytest.fixture(autouse=True)
def hasty(monkeypatch) -> None:
    """NeMo-Run's executors sleep 5, 10 or 15 seconds between two looks."""
    clock = SimpleNamespace(time=time.time, sleep=lambda seconds: time.sleep(min(seconds, 0.1)))
    monkeypatch.setattr(dgxcloud, "time", clock)
    monkeypatch.setattr(lepton, "time", clock)


@pytest.fixture(autouse=True)
def unpatched() -> Iterator[None]:
    """``ShipSource`` leaves its patches on, as users want it; no test sees those of another."""
    yield
    assert patches.undo(*(name for name in patches.MODULES if name != "job_group"))


@pytest.fixture
def cluster(tmp_path) -> Iterator[Cluster]:
    (tmp_path / "shared").mkdir()
    one = Cluster(tmp_path / "shared", tmp_path / "pods", Image(tmp_path / "image"))
    yield one
    one.close()


@pytest.fixture
def runai(cluster) -> Iterator[Platform]:
    server = RunAI(cluster)

    def make(**changes) -> Executor:
        known = {"pvc_nemo_run_dir": f"{MOUNT}/runs", "pvcs": [{"path": MOUNT, "name": "claim"}]}
        return make_executor(**{"base_url": server.url, **known, **changes})

    yield Platform("DGX Cloud", server, cluster, make)
    server.close()


@pytest.fixture
def lepton_ai(cluster, monkeypatch, tmp_path) -> Iterator[Platform]:
    server = Lepton(cluster)
    monkeypatch.setenv("LEPTON_WORKSPACE_ID", "test")
    monkeypatch.setenv("LEPTON_WORKSPACE_TOKEN", server.token)
    monkeypatch.setenv("LEPTON_WORKSPACE_URL", server.url)

    def make(**changes) -> Executor:
        known = {
            "container_image": "image",
            "nemo_run_dir": f"{MOUNT}/runs",
            "node_group": "group",
            "mounts": [{"path": "/", "mount_path": MOUNT}],
        }
        return lepton.LeptonExecutor(**{**known, **changes})

    yield Platform("Lepton", server, cluster, make)
    server.close()


@pytest.fixture(params=["runai", "lepton_ai"])
def platform(request) -> Platform:
    return request.getfixturevalue(request.param)


@pytest.fixture
def project(tmp_path) -> Project:
    return Project(tmp_path / "project")


@pytest.fixture
def results(cluster) -> Path:
    return cluster.shared / "results"
