"""These tests run on an embedded Ray."""

from tests.embedded import api, dashboard, existing, local_cluster, token

__all__ = ["api", "dashboard", "existing", "local_cluster", "token"]
