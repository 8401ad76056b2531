"""The embedded Ray of the tests of one folder, whose ``conftest.py`` imports these.

The folder is a package, since that is the scope that ends with it.
"""

from collections.abc import Iterator

import pytest

from nemo_run_ray import ExistingCluster, LocalCluster
from nemo_run_ray.clusters import Dashboard
from nemo_run_ray.dashboard.jobs import JobsApi


@pytest.fixture(scope="package")
def local_cluster() -> Iterator[LocalCluster]:
    """The embedded Ray that ``RayExecutor()`` finds, kept for all tests of a folder.

    An idle Ray takes a tenth of a processor, so it ends before tests that have no use for it.
    """
    cluster = LocalCluster(num_cpus=4, keep=True)
    cluster.connect()
    yield cluster
    cluster.stop()


@pytest.fixture(scope="package")
def dashboard(local_cluster: LocalCluster) -> Dashboard:
    found = local_cluster.find()
    assert found is not None
    return found


@pytest.fixture(scope="package")
def token(dashboard: Dashboard) -> str:
    return dashboard.headers["Authorization"].removeprefix("Bearer ")


@pytest.fixture
def existing(dashboard: Dashboard, token: str, monkeypatch) -> ExistingCluster:
    """The same Ray, reached as another user's cluster: by its address and a token."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", token)
    return ExistingCluster(url=dashboard.url)


@pytest.fixture(scope="package")
def api(dashboard: Dashboard) -> JobsApi:
    return JobsApi.of(dashboard)
