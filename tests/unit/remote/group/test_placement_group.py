"""Waiting for room: against a Ray that is made up, with a clock that is turned by hand."""

from __future__ import annotations

import types

import pytest

from nemo_run_ray.remote.group import driver
from nemo_run_ray.remote.group.driver import NoRoom, PlacementGroup
from nemo_run_ray.remote.spec import GroupSpec, JobSpec, RoleSpec
from nemo_run_ray.remote.status import Reason


class Clock:
    """Seconds that pass only in a sleep."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Ray:
    """Nodes and placement groups as Ray tells of them; it refuses what it does not know."""

    __version__ = "2.60.0"

    def __init__(self, clock: Clock, cpus: dict[str, float]) -> None:
        self.clock = clock
        self.cpus = cpus
        self.free_at = float("inf")
        self.state = "NO_RESOURCES"
        self.asked: list[dict] = []
        self.removed = 0
        self.where = list(cpus)
        self.util = types.SimpleNamespace(
            placement_group=self._create,
            placement_group_table=self._table,
            remove_placement_group=self._remove,
        )

    def nodes(self) -> list[dict]:
        return [
            {
                "NodeID": name,
                "Alive": True,
                "NodeManagerHostname": f"host-{name}",
                "NodeManagerAddress": "10.0.0.1",
                "Resources": {"CPU": cpus},
                "Labels": {"ray.io/node-id": name},
            }
            for name, cpus in self.cpus.items()
        ]

    def available_resources(self) -> dict[str, float]:
        return {"CPU": 0.0}

    def _create(self, bundles, strategy="PACK", name="", bundle_label_selector=None):
        self.asked.append({"bundles": bundles, "selectors": bundle_label_selector})
        number = len(self.asked)

        def wait(seconds: float) -> bool:
            return number == len(self.asked) and self.clock.now >= self.free_at

        return types.SimpleNamespace(wait=wait, count=len(bundles))

    def _table(self, group) -> dict:
        places = {number: self.where[number % len(self.where)] for number in range(group.count)}
        return {"stats": {"scheduling_state": self.state}, "bundles_to_node_id": places}

    def _remove(self, group) -> None:
        self.removed += 1


@pytest.fixture
def clock(monkeypatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(driver, "time", found)
    return found


@pytest.fixture
def ray(clock) -> Ray:
    return Ray(clock, {"a": 4.0, "b": 4.0})


def group(cpus: float = 1.0, replicas: int = 1, **fields) -> GroupSpec:
    task, spread = JobSpec(("true",)), fields.pop("spread", "")
    role = RoleSpec("worker", task, replicas, resources={"CPU": cpus}, spread=spread)
    return GroupSpec((role,), **fields)


def wait(waiting: PlacementGroup, clock: Clock, until: float) -> int:
    """Look until there is room or the time is up; how often it was looked."""
    looks = 0
    while clock.now < until:
        looks += 1
        if waiting.look():
            break
    return looks


def test_a_group_that_waits_looks_about_once_a_second(ray, clock):
    looks = wait(PlacementGroup(ray, group()), clock, until=clock.now + 600)
    assert looks < 700


def test_room_is_found_soon(ray, clock):
    ray.free_at = clock.now + 0.5
    began_at = clock.now
    waiting = PlacementGroup(ray, group(replicas=2))
    wait(waiting, clock, until=began_at + 10)
    assert clock.now - began_at < 1.0
    assert [node.host for node in waiting.nodes()] == ["host-a", "host-b"]


def test_what_no_node_can_host_is_refused_in_time_and_in_words(ray, clock):
    began_at = clock.now
    with pytest.raises(NoRoom, match="worker: a replica asks for CPU 5") as caught:
        wait(PlacementGroup(ray, group(cpus=5)), clock, until=began_at + 60)
    assert caught.value.cause is Reason.UNSCHEDULABLE
    assert 3 <= clock.now - began_at < 10


def test_nodes_that_join_in_time_are_waited_for(ray, clock):
    waiting = PlacementGroup(ray, group(cpus=5))
    wait(waiting, clock, until=clock.now + 2)
    ray.cpus["c"] = 8.0
    ray.free_at = clock.now
    assert waiting.look()


def test_what_ray_calls_infeasible_is_refused(ray, clock):
    ray.state = "INFEASIBLE"
    with pytest.raises(NoRoom, match="no nodes of this cluster can host the group"):
        wait(PlacementGroup(ray, group()), clock, until=clock.now + 60)


def test_wait_for_nodes_waits_for_them(ray, clock):
    spec = group(cpus=5, wait_for_nodes=True)
    wait(PlacementGroup(ray, spec), clock, until=clock.now + 600)


def test_a_limit_ends_the_wait(ray, clock):
    began_at = clock.now
    with pytest.raises(NoRoom, match="not placed within 20 s: asked CPU 1") as caught:
        wait(PlacementGroup(ray, group(placing_timeout_s=20)), clock, until=began_at + 60)
    assert caught.value.cause is Reason.NOT_PLACED
    assert 20 <= clock.now - began_at < 22


def test_every_30_seconds_a_line_says_what_is_missing(ray, clock, capfd):
    wait(PlacementGroup(ray, group()), clock, until=clock.now + 100)
    lines = [one for one in capfd.readouterr().out.splitlines() if "waiting for room" in one]
    assert len(lines) == 4
    assert "asked CPU 1 in 1 bundle(s); available CPU 0" in lines[0]
    assert "worker/0 waits: the nodes that can host it are busy (host-a, host-b)" in lines[0]


def test_a_node_that_died_since_is_no_room(ray, clock):
    ray.free_at = clock.now
    waiting = PlacementGroup(ray, group(replicas=2))
    del ray.cpus["b"]
    assert not waiting.look()
    ray.where = ["a"]
    assert waiting.look()


def test_a_role_that_spreads_tries_other_nodes_while_it_waits(ray, clock):
    wait(
        PlacementGroup(ray, group(replicas=2, spread="STRICT_SPREAD")), clock, until=clock.now + 30
    )
    assert 5 <= len(ray.asked) <= 12
    assert ray.removed == len(ray.asked) - 1
    for one in ray.asked:
        chosen = [selector["ray.io/node-id"] for selector in one["selectors"]]
        assert sorted(chosen) == ["in(a)", "in(b)"]
