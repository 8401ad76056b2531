"""A fault of one item, or of one kind of workers, is not that of the others."""

import os
import pickle
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from nemo_run_ray.errors import ItemFailed, PoolClosed
from nemo_run_ray.work.engine import Engine
from nemo_run_ray.work.functions import Functions
from nemo_run_ray.work.items import Item
from nemo_run_ray.work.pickling import Function
from nemo_run_ray.work.shape import Shape
from nemo_run_ray.work.worker import FUNCTIONS_MAX, WorkActor
from tests.conftest import wait_for

FUNCTION = Function("double", "digest", b"")
CPU = Shape((("CPU", 1.0),))


class Ray:
    """A Ray whose workers are there at once and answer nothing, on one node."""

    exceptions = SimpleNamespace(
        RayError=RuntimeError,
        ActorUnavailableError=ConnectionError,
        RuntimeEnvSetupError=KeyError,
    )

    def __init__(self):
        self.full = False
        self.answers = []

    def remote(self, _):
        return SimpleNamespace(options=self._options)

    def _options(self, **_):
        return SimpleNamespace(remote=lambda: self)

    @property
    def begin(self):
        answer = Future()
        answer.set_result("node")
        return SimpleNamespace(remote=lambda *_: SimpleNamespace(future=lambda: answer))

    @property
    def run(self):
        self.answers.append(Future())
        return SimpleNamespace(remote=lambda *_: SimpleNamespace(future=lambda: self.answers[-1]))

    load = begin

    def nodes(self):
        return [{"NodeID": "node", "Alive": True, "Resources": {"CPU": 1.0}}]

    def is_initialized(self):
        return True

    def available_resources(self):
        return {}

    def kill(self, _):
        pass

    def put(self, data):
        if self.full:
            raise OSError("No space left on device")
        return data


@pytest.fixture
def ray():
    return Ray()


@pytest.fixture
def engine(ray):
    made = Engine(ray, print)
    yield made
    made.close()


def test_an_item_whose_function_cannot_be_stored_fails(engine, ray):
    ray.full = True
    item = Item(FUNCTION, b"")
    engine.submit(CPU, [item])
    with pytest.raises(OSError, match="No space left"):
        item.future.result(10)
    ray.full = False
    engine.submit(CPU, [Item(FUNCTION, b"")])
    wait_for(lambda: ray.answers)  # another one is with a worker: the pool goes on


def test_items_that_were_answered_in_time_are_not_late_when_others_keep_the_engine(engine, ray):
    item = Item(FUNCTION, b"", timeout_s=1.0)
    engine.submit(CPU, [item])
    wait_for(lambda: ray.answers)
    is_busy = threading.Event()

    def callback():  # a slow one of a caller
        is_busy.set()
        time.sleep(1.5)

    engine._events.put(callback)
    assert is_busy.wait(10)
    ray.answers[0].set_result([["result", pickle.dumps(1), "", 0.1]])
    assert item.future.result(10) == 1


def test_a_program_that_stood_still_has_no_late_items(engine, ray):
    """As after Ctrl-Z, or while C code of another thread let no other one run."""
    item = Item(FUNCTION, b"", timeout_s=2.0)
    engine.submit(CPU, [item])
    wait_for(lambda: ray.answers)
    next_event, has_stood = engine._next_event, threading.Event()

    def stand_still():
        found = next_event()
        if not has_stood.is_set():
            time.sleep(4.0)
            has_stood.set()
        return found

    engine._next_event = stand_still
    assert has_stood.wait(20)
    time.sleep(0.3)  # for a turn that would end it
    ray.answers[0].set_result([["result", pickle.dumps(1), "", 0.1]])
    assert item.future.result(10) == 1


def test_a_closed_pool_says_so_in_an_error_of_this_package(ray):
    closed = Engine(ray, print)
    closed.close()
    with pytest.raises(PoolClosed, match="takes no more work: The pool was closed"):
        closed.submit(CPU, [Item(FUNCTION, b"")])


def test_a_fork_is_told_that_the_pool_is_not_its_own(engine, monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(RuntimeError, match=r"which forked this one.*'spawn' or 'forkserver'"):
        engine.submit(CPU, [Item(FUNCTION, b"")])
    monkeypatch.undo()


def test_a_failure_comes_whole_from_another_process():
    failed = pickle.loads(pickle.dumps(ItemFailed(3, ValueError("x"), "score")))
    assert (failed.index, repr(failed.cause)) == (3, "ValueError('x')")
    assert str(failed) == "item 3 of score has failed: ValueError: x"


def test_functions_of_single_calls_are_not_kept_for_ever(ray):
    functions = Functions(ray)
    made = [Function("f", str(number), b"%d" % number) for number in range(FUNCTIONS_MAX + 5)]
    first = functions.pace(made[0])
    for function in made:
        functions.stored(function)
    assert functions.pace(made[-1]) is functions.pace(made[-1])
    assert functions.pace(made[0]) is not first
    assert len(functions._known) == FUNCTIONS_MAX


def test_a_worker_does_not_keep_them_either():
    actor = WorkActor()
    for number in range(FUNCTIONS_MAX + 5):
        (row,) = actor.run(str(number), pickle.dumps(abs), [pickle.dumps(((-number,), {}))])
        assert pickle.loads(row[1]) == number
    assert len(actor._functions) == FUNCTIONS_MAX


def test_a_batch_that_takes_long_comes_back_with_what_is_done(monkeypatch):
    actor = WorkActor()
    items = [pickle.dumps(((0.3,), {}))] * 10
    rows = actor.run("sleep", pickle.dumps(time.sleep), items)
    assert len(rows) == 2
