"""When the elements of a dead host are leased again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from nemo_run_ray.remote.array.elements import HOSTS_FILE, ElementState, Leases, file_of
from nemo_run_ray.remote.array.hosts import HostBook, HostPool
from nemo_run_ray.remote.attempts import NODE_DEAD_S
from nemo_run_ray.remote.spec import ArraySpec, JobSpec, RoleSpec

ID = "e_1.array"
SPEC = ArraySpec(RoleSpec("element", JobSpec(("true",)), resources={"CPU": 1.0}), "elements")


class Ray:
    """A cluster as far as a driver looks at its nodes."""

    def __init__(self, *nodes: str) -> None:
        self.alive = nodes

    def nodes(self) -> list[dict]:
        return [
            {
                "NodeID": node,
                "NodeManagerHostname": node,
                "NodeManagerAddress": node,
                "Alive": node in self.alive,
            }
            for node in ("n1", "n2")
        ]


@pytest.fixture
def leases(tmp_path) -> Iterator[Leases]:
    """What an earlier driver has left: a host on n2 has an element, and another one has nothing."""
    path = tmp_path / "elements"
    path.write_text("\n".join(json.dumps(line) for line in ({"fields": []}, [], [])) + "\n")
    folder = str(tmp_path)
    earlier = Leases(SPEC, str(path), ID, folder)
    HostBook(earlier.hosts_path, ID).add(["n2", "n2"])
    earlier.take(0)
    earlier.commit()
    earlier.close()
    found = Leases(SPEC, str(path), ID, folder)
    yield found
    found.close()


def pool_of(leases: Leases) -> HostPool:
    """The pool of a driver on a cluster whose n2 is dead."""
    return HostPool(Ray("n1"), SPEC, ID, SimpleNamespace(), SimpleNamespace(), leases)


def test_what_a_dead_node_had_waits_until_the_node_itself_has_noticed(leases):
    pool = pool_of(leases)
    pool.look(now=1000.0, waiting=0)
    assert leases.progress.state(0) is ElementState.LEASED
    pool.look(now=1000.0 + NODE_DEAD_S - 1, waiting=0)
    assert pool.dead_hosts
    pool.look(now=1000.0 + NODE_DEAD_S, waiting=0)
    assert not pool.dead_hosts
    assert leases.progress.state(0) is ElementState.WAITING


def test_nobody_waits_for_a_dead_node_at_the_end(leases):
    pool = pool_of(leases)
    pool.end()
    pool.look(now=1000.0, waiting=0)
    assert pool.has_ended
    assert leases.progress.state(0) is ElementState.CANCELLED


def test_hosts_of_a_driver_that_was_killed_before_its_first_lease_are_ended_too(tmp_path):
    path = tmp_path / "elements"
    path.write_text('{"fields": []}\n[]\n')
    HostBook(str(tmp_path / file_of(ID, HOSTS_FILE)), ID).add(["n1"])
    leases = Leases(SPEC, str(path), ID, str(tmp_path))
    try:
        assert not leases.goes_on
        assert pool_of(leases).dead_hosts
    finally:
        leases.close()
