"""These tests run on an embedded Ray."""

from collections.abc import Iterator

import pytest

from nemo_run_ray import LocalCluster, work
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
