"""Calls of actors: made again when nobody answers."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_run_ray.remote.fit import Node
from nemo_run_ray.remote.hosts import actors as actors_module
from nemo_run_ray.remote.hosts.actors import Actors, ReplicaHandle
from nemo_run_ray.remote.spec import JobSpec, RoleSpec
from nemo_run_ray.remote.status import Reason


class RayError(Exception):
    pass


class RuntimeEnvSetupError(RayError):
    pass


class StartFailed(RayError):
    actor_init_failed = True


class Ray:
    """Ray with one actor that answers what the test says: by the number of the call."""

    exceptions = SimpleNamespace(RayError=RayError, RuntimeEnvSetupError=RuntimeEnvSetupError)

    def __init__(self) -> None:
        self.made = 0
        self.answers: dict[int, Any] = {}
        role = RoleSpec("a", JobSpec(("true",)))
        self.replica = ReplicaHandle(("a", 0), role, Node("n", "n", "n"), "", "")
        self.replica.actor = SimpleNamespace(pull=SimpleNamespace(remote=self._call))

    def _call(self, *_: object) -> int:
        self.made += 1
        return self.made

    def wait(
        self, references: list[int], num_returns: int, timeout: float
    ) -> tuple[list[int], None]:
        return [one for one in references if one in self.answers][:num_returns], None

    def get(self, reference: int) -> Any:
        if isinstance(self.answers[reference], Exception):
            raise self.answers[reference]
        return self.answers[reference]


@pytest.fixture
def ray() -> Ray:
    return Ray()


@pytest.fixture
def unanswered(ray) -> Actors:
    """An actor that has been asked for reports."""
    found = Actors.__new__(Actors)  # without a connection
    found.ray, found._awaited, found._gather_s = ray, {}, 0.0
    found.pull(ray.replica)
    return found


@pytest.fixture
def actors(ray, unanswered) -> Actors:
    """An actor that has answered once and is asked again."""
    found = unanswered
    ray.answers[1] = ("n", 0, ['{"at": "ready"}'])
    assert list(found.answers()) == [(ray.replica, [{"at": "ready"}])]
    return found


def later(monkeypatch, seconds: float) -> None:
    now = time.monotonic() + seconds
    monkeypatch.setattr(actors_module, "monotonic", lambda: now)


def test_an_actor_that_does_not_answer_is_asked_again_and_answers_once(ray, actors, monkeypatch):
    later(monkeypatch, 10)
    assert not list(actors.answers())
    assert ray.made == 2, "it may still be gathering reports"
    later(monkeypatch, 16)
    assert not [*actors.answers(), *actors.answers()]
    assert ray.made == 3
    ray.answers.update({2: ("n", 1, []), 3: ("n", 1, [])})
    assert len(list(actors.answers())) == 1


def test_a_report_that_comes_twice_counts_once(ray, actors):
    ray.answers[2] = ("n", 0, ['{"at": "ready"}', '{"at": "exited"}'])
    assert list(actors.answers()) == [(ray.replica, [{"at": "exited"}])]


def test_an_actor_that_is_still_to_come_up_is_asked_once(ray, unanswered, monkeypatch):
    later(monkeypatch, 600)
    assert not list(unanswered.answers())
    assert ray.made == 1


def test_a_start_that_has_failed_is_told_with_its_error(ray, actors):
    ray.answers[2] = StartFailed("The actor died in its creation task\n\nOSError: disk full\n")
    words = "Ray's worker there failed at its start: OSError: disk full"
    died = {"at": "died", "words": words, "cause": Reason.NOT_STARTED}
    assert list(actors.answers()) == [(ray.replica, [died])]
