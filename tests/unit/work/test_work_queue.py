"""What becomes of the items of a worker that cannot be reached."""

import pickle
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from nemo_run_ray.errors import WorkerDied
from nemo_run_ray.work.items import Item
from nemo_run_ray.work.pickling import Function
from nemo_run_ray.work.shape import Shape
from nemo_run_ray.work.work_queue import NODE_DEATHS_MAX, WorkQueue

FUNCTION = Function("double", "digest", b"")


class Away(Exception):
    """Ray's ``ActorUnavailableError``."""


class Died(Exception):
    """Ray's ``ActorDiedError``."""


class Worker:
    """Ray's handle of an actor; a test gives the answers.

    Attributes:
        begun: questions whether it is there.
        calls: batches of items that it was given.
    """

    def __init__(self):
        self.begun, self.calls = [], []
        self.begin = self._method(self.begun)
        self.load = self._method([])
        self.run = self._method(self.calls)

    def _method(self, answers):
        def remote(*_):
            answers.append(Future())
            return SimpleNamespace(future=lambda: answers[-1])

        return SimpleNamespace(remote=remote)


class Ray:
    """As much of Ray as a queue of items uses: nodes of one CPU, and a worker on each."""

    def __init__(self):
        self.exceptions = SimpleNamespace(
            RayError=Exception,
            ActorUnavailableError=Away,
            ActorDiedError=Died,
            RuntimeEnvSetupError=KeyError,
        )
        self.alive = ["one"]
        self.workers, self.killed = [], []
        self.kill = self.killed.append

    def remote(self, _):
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._start))

    def _start(self):
        self.workers.append(Worker())
        return self.workers[-1]

    def nodes(self):
        return [{"NodeID": one, "Alive": True, "Resources": {"CPU": 1.0}} for one in self.alive]

    def is_initialized(self):
        return True

    def put(self, data):
        return data


class Desk:
    """A queue with items and its clock."""

    def __init__(self, retries=0, items=1):
        self.ray = Ray()
        self.queue = WorkQueue(self.ray, Shape((("CPU", 1.0),)), lambda tell: tell(), print)
        self.now = 0.0
        self.items = [Item(FUNCTION, b"", None, retries) for _ in range(items)]
        self.queue.pace(FUNCTION).measured(0.1, 1)  # so short that a worker holds two calls
        self.queue.add(self.items)

    def turn(self, seconds=1.5):
        self.now += seconds
        self.queue.step(self.now, 0.0)

    def start(self, node="one"):
        """Let the worker that was started last begin, with all items that it may have."""
        self.turn()
        self.ray.workers[-1].begun[0].set_result(node)
        self.turn(0.1)
        return self.ray.workers[-1]


def row(value):
    return ["result", pickle.dumps(value), "", 0.1]


@pytest.fixture
def desk():
    return Desk()


def test_an_item_whose_worker_was_cut_off_is_run_by_another(desk):
    first = desk.start()
    first.calls[0].set_exception(Away("Socket closed"))
    desk.turn()
    assert not desk.items[0].future.done()
    assert len(desk.ray.workers) == 1, "it may still run"
    first.begun[-1].set_result("one")  # it is there again, and its answer is lost
    desk.turn()
    assert desk.ray.killed == [first]
    second = desk.start()
    second.calls[0].set_result([row(2)])
    assert desk.items[0].future.result(0) == 2
    assert desk.items[0].attempts == 0, "it has done nothing wrong"


def test_an_item_whose_node_has_died_is_run_on_another(desk):
    desk.start().calls[0].set_exception(Away("Socket closed"))
    desk.ray.alive = ["two"]
    desk.turn()
    second = desk.start("two")
    second.calls[0].set_result([row(2)])
    assert desk.items[0].future.result(0) == 2


def test_an_item_that_has_killed_its_worker_fails(desk):
    first = desk.start()
    first.calls[0].set_exception(Away("Socket closed"))
    first.begun[-1].set_exception(Died("Its process was killed by SIGKILL."))
    desk.turn()
    with pytest.raises(WorkerDied, match="ran double has died: Its process was killed by SIGKILL"):
        desk.items[0].future.result(0)


def test_an_item_that_finds_its_worker_dead_after_a_pause_is_run_by_another(desk, monkeypatch):
    """It is sent again once: nothing says whether it is what kills them."""
    for module in ("crew", "work_queue"):
        monkeypatch.setattr(f"nemo_run_ray.work.{module}.monotonic", lambda: desk.now)
    worker = desk.start()
    worker.calls[0].set_result([row(1)])
    for _ in range(2):
        desk.turn(5.0)
        late = Item(FUNCTION, b"")
        desk.queue.add([late])
        desk.turn(0.1)
        worker.calls[-1].set_exception(Died("The actor is dead."))
        assert not late.future.done()
        worker = desk.start()
        worker.calls[-1].set_result([row(3)])
        assert late.future.result(0) == 3

    desk.turn(5.0)
    late = Item(FUNCTION, b"")
    desk.queue.add([late])
    desk.turn(0.1)
    desk.turn(6.0)  # so it has begun, and is what has killed its worker
    worker.calls[-1].set_exception(Died("Its process was killed by SIGKILL."))
    with pytest.raises(WorkerDied, match="SIGKILL"):
        late.future.result(0)

    desk.queue.add([Item(FUNCTION, b"")])
    worker = desk.start()
    worker.calls[0].set_result([row(3)])
    desk.turn(5.0)
    guilty = Item(FUNCTION, b"")
    desk.queue.add([guilty])
    desk.turn(0.1)
    worker.calls[-1].set_exception(Died("Its process was killed by SIGSEGV."))
    desk.start().calls[-1].set_exception(Died("Its process was killed by SIGSEGV."))
    with pytest.raises(WorkerDied, match="SIGSEGV"):
        guilty.future.result(0)


def test_an_item_that_cannot_be_sent_is_no_failure_of_those_on_their_way():
    desk = Desk(items=2)
    desk.ray.alive = ["one", "two"]
    first = desk.start()
    big = Item(Function("big", "other", b""), b"", retries=1)
    puts = []

    def put(data):
        puts.append(data)
        raise OSError("No space left on device")

    desk.ray.put = put
    desk.queue.add([big])
    desk.ray.workers[0].begun[0].set_result("two")
    desk.turn(2.0)
    with pytest.raises(OSError, match="No space left"):
        big.future.result(0)
    assert len(puts) == 2, "it was tried again"
    assert first not in desk.ray.killed
    for number, call in enumerate(first.calls):
        call.set_result([row(number)])
    assert [item.future.result(0) for item in desk.items] == [0, 1]


@pytest.mark.parametrize("error", [Died("x"), KeyError("its runtime environment")])
def test_workers_that_cannot_be_started_are_no_failure_while_others_live(error, monkeypatch):
    desk = Desk(items=9)
    for module in ("crew", "work_queue"):
        monkeypatch.setattr(f"nemo_run_ray.work.{module}.monotonic", lambda: desk.now)
    worker = desk.start()
    desk.ray.alive = ["one", "two"]
    for _ in range(40):
        desk.turn(2.0)
        for other in desk.ray.workers[1:]:
            if not other.begun[0].done():
                other.begun[0].set_exception(error)
    assert not any(item.future.done() for item in desk.items)
    assert len(desk.ray.workers) < 40, "they are not started without end"
    worker.calls[0].set_result([row(1)])
    assert desk.items[0].future.result(0) == 1


def test_an_item_does_not_take_node_after_node(desk):
    for number in range(NODE_DEATHS_MAX + 1):
        assert not desk.items[0].future.done()
        worker = desk.start(f"node {number}")
        worker.calls[0].set_exception(Away("Socket closed"))
        desk.turn()
        desk.turn()
    with pytest.raises(WorkerDied):
        desk.items[0].future.result(0)


def test_the_first_of_two_calls_is_answered_after_the_second_has_broken():
    desk = Desk(items=2)
    first = desk.start()
    assert len(first.calls) == 2
    first.calls[1].set_exception(Died("Its process was killed by SIGKILL."))
    first.calls[0].set_result([row(2)])
    assert desk.items[0].future.result(0) == 2
    with pytest.raises(WorkerDied):
        desk.items[1].future.result(0)


def test_an_answer_that_comes_while_its_worker_is_in_doubt_is_taken():
    desk = Desk(items=2)
    first = desk.start()
    first.calls[0].set_exception(Away("Socket closed"))
    first.calls[1].set_result([row(4)])
    assert desk.items[1].future.result(0) == 4
    first.begun[-1].set_result("one")
    desk.turn()
    second = desk.start()
    assert len(second.calls) == 1
    second.calls[0].set_result([row(2)])
    assert desk.items[0].future.result(0) == 2


def test_a_worker_in_doubt_gets_no_item(desk):
    worker = desk.start()
    worker.calls[0].set_exception(Away("Socket closed"))
    late = Item(FUNCTION, b"")
    desk.queue.add([late])
    desk.turn()
    assert len(worker.calls) == 1
    assert not late.future.done()


def test_no_item_waits_behind_one_that_is_sent_alone():
    desk = Desk()
    worker = desk.start()
    desk.items[0].is_alone = True  # as those of an executor: it may wait for the next one
    desk.queue.add([Item(FUNCTION, b"")])
    desk.turn()
    assert len(worker.calls) == 1


def test_what_is_left_of_a_long_batch_waits_for_a_worker_again():
    desk = Desk(items=4)
    for _ in range(40):
        desk.queue.pace(FUNCTION).measured(0.001, 1)
    worker = desk.start()
    assert len(worker.calls) == 2, "of two items and one"
    worker.calls[0].set_result([row(1)])  # one took longer than was expected
    desk.turn(0.1)
    worker.calls[1].set_result([row(3)])
    worker.calls[2].set_result([row(2)])
    desk.turn(0.1)
    worker.calls[3].set_result([row(4)])
    assert [item.future.result(0) for item in desk.items] == [1, 2, 3, 4]


def test_other_workers_wait_for_room_and_half_of_these_leave(desk):
    desk.ray.alive = ["one", "two"]
    desk.queue.add([Item(FUNCTION, b"") for _ in range(20)])
    desk.turn()
    for worker in desk.ray.workers:
        worker.begun[0].set_result("one")
    desk.turn(0.1)
    first, second = desk.ray.workers
    desk.queue.step(desk.now, starved_s=60.0)
    for worker in (first, second):
        for call in list(worker.calls):
            call.set_result([row(1)])
    desk.queue.step(desk.now, starved_s=60.0)
    assert desk.ray.killed == [second]
    assert len(desk.ray.workers) == 2, "no new one takes its room"
    desk.queue.step(desk.now + 1.0, starved_s=61.0)
    for call in list(first.calls):
        if not call.done():
            call.set_result([row(1)])
    desk.queue.step(desk.now + 2.0, starved_s=62.0)
    assert desk.ray.killed == [second], "the others have time to come up"


def test_a_node_that_may_come_back_is_waited_for(desk):
    desk.start().calls[0].set_exception(Died("The actor died because its node has died."))
    desk.ray.alive = []
    desk.turn()
    for _ in range(10):
        desk.turn(10.0)
        assert not desk.items[0].future.done()
    desk.turn(30.0)
    with pytest.raises(WorkerDied, match="No node can have a worker"):
        desk.items[0].future.result(0)


def test_what_no_node_can_have_fails_at_once_when_that_is_known():
    desk = Desk()
    desk.ray.alive = []
    desk.turn()
    desk.turn(6.0)
    assert desk.items[0].future.done()
    late = Item(FUNCTION, b"")
    desk.queue.add([late])
    desk.turn(0.1)
    assert late.future.done()


def test_a_worker_that_does_not_answer_is_sent_something_now_and_then(desk, monkeypatch):
    for module in ("crew", "work_queue"):
        monkeypatch.setattr(f"nemo_run_ray.work.{module}.monotonic", lambda: desk.now)
    worker = desk.start()
    began, ages = desk.now, []
    for _ in range(800):
        before = len(worker.begun)
        desk.turn(1.0)
        ages += [desk.now - began] * (len(worker.begun) - before)
    assert ages == pytest.approx([15, 30, 60, 120, 240], abs=2)


def test_each_call_has_its_time_before_its_worker_is_sent_something(monkeypatch):
    desk = Desk(items=2)
    for module in ("crew", "work_queue"):
        monkeypatch.setattr(f"nemo_run_ray.work.{module}.monotonic", lambda: desk.now)
    worker = desk.start()
    for number in range(2):
        desk.turn(14.0)
        worker.calls[number].set_result([row(1)])
    assert len(worker.begun) == 1
