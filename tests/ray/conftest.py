"""These tests run on an embedded Ray."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import nemo_run as run
import pytest

from nemo_run_ray import LocalCluster, RayExecutor, work
from nemo_run_ray.experiment.job import RemoteJob, find_job
from nemo_run_ray.plan.array import Array
from tests.embedded import api, dashboard, existing, local_cluster, token

__all__ = ["api", "dashboard", "existing", "local_cluster", "pool", "token"]


@pytest.fixture(scope="module")
def pool(local_cluster: LocalCluster) -> Iterator[work.Pool]:
    """Workers of that Ray. Its token is set as in the environment of a program that starts."""
    from ray._raylet import Config

    with pytest.MonkeyPatch.context() as patch:
        for name, value in local_cluster.driver_environment().items():
            patch.setenv(name, value)
        Config.initialize("")  # another test module has imported ray before
        with work.connect() as found:
            yield found
    Config.initialize("")


@pytest.fixture
def start(existing, unique) -> Callable[..., RemoteJob]:
    """Hands an array over and leaves; the job."""

    def started(made: Array, **fields: Any) -> RemoteJob:
        given = {"cluster": existing, "cpus_per_node": 1, "python": sys.executable, **fields}
        with run.Experiment(unique, executor=RayExecutor(**given)) as experiment:
            experiment.add(made, name="array")
            experiment.run(detach=True)
        return find_job(f"{experiment._id}.array")

    return started
