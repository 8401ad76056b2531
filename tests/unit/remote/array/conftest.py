from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from nemo_run_ray.remote.array import driver
from nemo_run_ray.remote.array.elements import Leases
from nemo_run_ray.remote.spec import ArraySpec
from tests.unit.remote.array.pools import ID, ROLE, Cluster, Drive, close


@pytest.fixture
def spec(request) -> ArraySpec:
    return ArraySpec(**{"host": ROLE, "elements": "elements", **getattr(request, "param", {})})


@pytest.fixture
def leases(tmp_path, spec) -> Iterator[Leases]:
    path = tmp_path / "elements"
    path.write_text("\n".join(['{"array": "a"}', *['{"values": {}}'] * 12]) + "\n")
    made = Leases(spec, str(path), ID, str(tmp_path))
    yield made
    with contextlib.suppress(OSError):  # the test has
        close(made)


@pytest.fixture
def cluster(leases, spec, tmp_path, monkeypatch) -> Cluster:
    made = Cluster(leases, spec, tmp_path)
    monkeypatch.setattr(driver, "monotonic", made.now)
    made.look()
    return made


@pytest.fixture
def drive(cluster, monkeypatch) -> Drive:
    return Drive(cluster, monkeypatch)
