"""What is said of a worker that cannot be reached."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from nemo_run_ray.work.doubt import Doubt


class Away(Exception):
    """Ray's ``ActorUnavailableError``, or another one that says nothing of the actor."""


class Died(Exception):
    """Ray's ``ActorDiedError``."""


RAY = SimpleNamespace(exceptions=SimpleNamespace(ActorDiedError=Died, RayError=Away))


class Actor:
    """Ray's handle of an actor; a test gives the answers."""

    def __init__(self):
        self.answers = []
        self.is_closed = False
        self.begin = SimpleNamespace(remote=lambda: SimpleNamespace(future=self._ask))

    def _ask(self):
        if self.is_closed:
            raise Away
        self.answers.append(Future())
        return self.answers[-1]


@pytest.fixture
def actor():
    return Actor()


@pytest.fixture
def doubt(actor):
    return Doubt(RAY, actor, "Socket closed", lambda tell: tell(), now=0.0)


def test_a_worker_that_died_alone_is_not_lost(actor, doubt):
    doubt.step(0.5, has_node=True)
    assert not doubt.is_over
    actor.answers[0].set_exception(Died("its process\nwas killed"))
    doubt.step(0.6, has_node=True)
    assert doubt.is_over
    assert (doubt.is_lost, doubt.why) == (False, "its process was killed")


def test_a_worker_is_lost_with_its_node(actor, doubt):
    doubt.step(2.0, has_node=True)
    assert not doubt.is_over
    doubt.step(3.5, has_node=False)
    assert doubt.is_over
    assert (doubt.is_lost, doubt.why) == (True, "Socket closed")


def test_a_worker_that_answers_again_was_cut_off(actor, doubt):
    actor.answers[0].set_result("node")
    doubt.step(0.1, has_node=True)
    assert doubt.is_over
    assert doubt.is_lost


def test_it_is_asked_again_while_it_is_away(actor, doubt):
    actor.answers[0].set_exception(Away())
    doubt.step(1.5, has_node=True)
    assert not doubt.is_over
    doubt.step(2.6, has_node=True)
    assert not doubt.is_over
    assert len(actor.answers) == 2, "one question at a time"


def test_a_worker_of_which_nothing_is_heard_is_lost(actor, doubt):
    doubt.step(119.0, has_node=True)
    assert not doubt.is_over
    doubt.step(120.5, has_node=True)
    assert doubt.is_over
    assert doubt.is_lost


def test_a_closed_connection_is_asked_again_and_ends_nothing(actor, doubt):
    actor.answers[0].set_exception(Away())
    actor.is_closed = True
    doubt.step(1.5, has_node=True)
    actor.is_closed = False
    doubt.step(3.0, has_node=True)
    assert len(actor.answers) == 2
    actor.answers[1].set_exception(Died("gone"))
    assert doubt.is_over
