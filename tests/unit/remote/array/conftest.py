from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from nemo_run_ray.remote.array import hosts
from nemo_run_ray.remote.array.elements import Leases
from nemo_run_ray.remote.spec import ArraySpec
from tests.unit.remote.array.pools import ID, ROLE, Cluster


@pytest.fixture
def spec(request) -> ArraySpec:
    return ArraySpec(ROLE, "elements", **getattr(request, "param", {}))


@pytest.fixture
def cluster(tmp_path, spec, monkeypatch) -> Iterator[Cluster]:
    path = tmp_path / "elements"
    path.write_text("\n".join(['{"fields": []}', *["[]"] * 12]) + "\n")
    leases = Leases(spec, str(path), ID, str(tmp_path))
    made = Cluster(leases, spec)
    monkeypatch.setattr(hosts, "time", SimpleNamespace(monotonic=made.now, sleep=made.sleep))
    yield made
    leases.close()
