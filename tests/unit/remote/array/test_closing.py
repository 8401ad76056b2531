"""Hosts that have nothing to do any more: whether it is known that they have ended."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_run_ray.remote.array import hosts
from nemo_run_ray.remote.array.elements import Leases
from nemo_run_ray.remote.array.hosts import Closings, HostRecord
from nemo_run_ray.remote.spec import ArraySpec, JobSpec, RoleSpec

SPEC = ArraySpec(RoleSpec("element", JobSpec(("true",)), resources={"CPU": 1.0}), "elements")
RECORD = HostRecord(0, "n1", "e_1.array/tag.0", "e_1.array~host-0")


class RayError(Exception):
    pass


class Ray:
    """Ray with one actor of a host, whose answers the test gives: by the call's name."""

    exceptions = SimpleNamespace(RayError=RayError)

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.called: list[str] = []
        self.killed = 0

    def wait(self, references: list[str], timeout: float) -> tuple[list[str], list[str]]:
        ready = [one for one in references if one in self.answers]
        return ready, [one for one in references if one not in ready]

    def get(self, reference: str) -> Any:
        answer = self.answers[reference]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self, handle: object, no_restart: bool) -> None:
        self.killed += 1

    def call(self, name: str) -> SimpleNamespace:
        def remote(*_: object) -> str:
            self.called.append(name)
            return name

        return SimpleNamespace(remote=remote)

    def host(self) -> Any:
        handle = SimpleNamespace(order=self.call("order"), close=self.call("close"))
        replica = SimpleNamespace(replica_id=("element", 0), orders=3)
        return SimpleNamespace(record=RECORD, replica=replica, actor=SimpleNamespace(handle=handle))


@pytest.fixture
def leases(tmp_path) -> Iterator[Leases]:
    path = tmp_path / "elements"
    path.write_text(json.dumps({"fields": []}) + "\n[]\n")
    found = Leases(SPEC, str(path), "e_1.array", str(tmp_path))
    yield found
    found.close()


def turns(ray: Ray, leases: Leases, *times: float) -> list[HostRecord]:
    """Those that are left after turns, so many seconds after the beginning."""
    closings = Closings(ray, leases)
    closings.add(ray.host(), [RECORD])
    left: list[HostRecord] = []
    for seconds in times:
        left += [record for closed in closings.turn(seconds) for record in closed.left]
    assert bool(closings.node_ids) == (ray.killed == 0)
    return left


def test_a_host_that_says_so_has_ended(leases):
    ray = Ray(order=None, close=True)
    assert turns(ray, leases, 0, 1, 2) == []
    assert ray.called == ["order", "close"]
    assert ray.killed == 1


@pytest.mark.parametrize(
    ("answers", "steps"),
    [
        ({"order": RayError(), "close": True}, 2),
        ({"order": None, "close": RayError()}, 3),
        ({"order": None, "close": False}, 3),
        ({"order": None}, 4),
        ({}, 4),
    ],
    ids=["dies at once", "dies", "its process does not end", "stopped", "stuck"],
)
def test_one_that_does_not_is_left(leases, answers, steps):
    late = [number * (hosts._STEP_S + 1) for number in range(steps)]
    ray = Ray(**answers)
    assert turns(ray, leases, *late) == [RECORD]
    assert ray.killed == 1, "its actor is ended all the same"


def test_a_host_is_waited_for_while_it_may_answer(leases):
    ray = Ray(order=None)
    assert turns(ray, leases, 0, 1, hosts._STEP_S) == []
    assert ray.killed == 0
