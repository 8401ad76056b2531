"""What becomes of a group on one host when something of it dies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import httpx
import pytest

from nemo_run_ray import LocalCluster
from nemo_run_ray.clusters import Dashboard
from nemo_run_ray.dashboard.jobs import JobsApi
from tests import groups
from tests.conftest import processes_of_home
from tests.group_faults import FAULTS, strike


@dataclass
class Embedded:
    """The embedded Ray of these tests, as ``tests.group_faults`` strikes it."""

    cluster: LocalCluster
    api: JobsApi

    def processes(self, wanted: Callable[[int, list[str]], bool]) -> list[int]:
        return processes_of_home(wanted)

    def leftovers(self) -> list[str]:
        url, headers = self.api.dashboard.url, self.api.dashboard.headers
        found = []
        for kind, states in (("actors", ("ALIVE",)), ("placement_groups", ("CREATED", "PENDING"))):
            answer = httpx.get(f"{url}/api/v0/{kind}?limit=5000", headers=headers, timeout=20)
            rows = answer.json()["data"]["result"]["result"]
            found += [f"{kind} {row}" for row in rows if row["state"] in states]
        return [one for one in found if "JobSupervisor" not in one]

    def server(self, *program: str, **fields: object) -> groups.Role:
        return groups.server(*program, **fields)

    def client(self, *program: str, **fields: object) -> groups.Role:
        return groups.client(*program, **fields)


@pytest.fixture
def embedded(local_cluster: LocalCluster, dashboard: Dashboard) -> Embedded:
    return Embedded(local_cluster, JobsApi.of(dashboard))


#: Second ways to an end that another fault has too.
RARE = {
    "the first process is killed",
    "a replica's process is killed",  # across hosts always
    "a service hangs on SIGTERM",
    "a service is never ready",
}
OFTEN = [name for name in FAULTS if name not in RARE]


@pytest.mark.parametrize(
    "name", [*OFTEN, *(pytest.param(name, marks=pytest.mark.soak) for name in sorted(RARE))]
)
def test_a_fault(embedded, unique, name):
    strike(embedded, FAULTS[name], unique, seed=0)
