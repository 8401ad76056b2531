"""What is said of a worker that cannot be reached."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from nemo_run_ray.work.doubt import Doubt


class Away(Exception):
    """Ray's ``ActorUnavailableError``."""


RAY = SimpleNamespace(exceptions=SimpleNamespace(ActorUnavailableError=Away))


class Actor:
    """Ray's handle of an actor; a test gives the answers."""

    def __init__(self):
        self.answers = []
        self.begin = SimpleNamespace(remote=lambda: SimpleNamespace(future=self._ask))

    def _ask(self):
        self.answers.append(Future())
        return self.answers[-1]


@pytest.fixture
def actor():
    return Actor()


@pytest.fixture
def doubt(actor):
    return Doubt(RAY, actor, "Socket closed", lambda tell: tell(), now=0.0)


def _yes() -> bool:
    return True


def test_a_worker_that_died_alone_is_not_lost(actor, doubt):
    assert not doubt.is_over(0.5, _yes)
    actor.answers[0].set_exception(RuntimeError("its process\nwas killed"))
    assert doubt.is_over(0.6, _yes)
    assert (doubt.is_lost, doubt.why) == (False, "its process was killed")


def test_a_worker_is_lost_with_its_node(actor, doubt):
    assert not doubt.is_over(2.0, _yes)
    assert doubt.is_over(3.5, lambda: False)
    assert (doubt.is_lost, doubt.why) == (True, "Socket closed")


def test_a_worker_that_answers_again_was_cut_off(actor, doubt):
    actor.answers[0].set_result("node")
    assert doubt.is_over(0.1, _yes)
    assert doubt.is_lost


def test_it_is_asked_again_while_it_is_away(actor, doubt):
    actor.answers[0].set_exception(Away())
    assert not doubt.is_over(0.5, _yes)
    assert len(actor.answers) == 1
    assert not doubt.is_over(1.5, _yes)
    assert not doubt.is_over(2.6, _yes)
    assert len(actor.answers) == 2, "one question at a time"


def test_a_worker_of_which_nothing_is_heard_is_lost(actor, doubt):
    assert not doubt.is_over(119.0, _yes)
    assert doubt.is_over(120.5, _yes)
    assert doubt.is_lost
