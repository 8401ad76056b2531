"""Batches, and what becomes of items whose task fails."""

import math
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, wait
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from nemo_run_ray.errors import ConfigError, WorkerDied, WorkError
from nemo_run_ray.work import tasks
from nemo_run_ray.work.tasks import (
    BATCH_BYTES_MAX,
    BATCH_MAX,
    LOSSES_MAX,
    Function,
    Item,
    TaskQueue,
)
from tests.conftest import wait_for


def paced(seconds: float | None, result_bytes: int = 10) -> Function:
    function = Function("double", b"")
    if seconds is not None:
        function.measured(seconds, result_bytes)
    return function


@pytest.mark.parametrize(
    ("function", "waiting", "item_bytes", "count"),
    [
        (paced(None), 10_000, 10, 1),  # the first item travels alone
        (paced(0.001), 10_000, 10, 220),
        (paced(0.1), 10_000, 10, 2),
        (paced(0.12), 10_000, 10, 1),
        (paced(1e-7), 10**6, 10, BATCH_MAX),
        (paced(0.001), 10_000, BATCH_BYTES_MAX, 1),
        (paced(0.001, 10 * 2**20), 10_000, 10, 1),
        (paced(0.02), 8, 10, 2),  # at the end each worker gets its share,
        (paced(0.001), 8, 10, 10),  # if that is worth a task
    ],
)
def test_short_items_travel_together_and_long_or_large_ones_alone(
    function, waiting, item_bytes, count
):
    assert function.batch(waiting, workers=2, item_bytes=item_bytes) == count


class RayError(Exception):
    pass


class NodeDied(RayError):
    pass


Crashed, NoStart = type("Crashed", (RayError,), {}), type("NoStart", (RayError,), {})


class Task:
    """What a Ray task of a test yields: its node, then its rows."""

    def __init__(self, items: list[bytes]) -> None:
        self.items = items
        self.yielded: list[object] = []
        self.future_of_end: Future[None] = Future()
        self.is_cancelled = False

    def __iter__(self) -> Iterator[object]:
        return self

    def __next__(self) -> object:
        if not self.yielded:
            raise StopIteration
        value = self.yielded.pop(0)
        ready: Future[object] = Future()
        ready.set_result(value)
        return SimpleNamespace(value=value, future=lambda: ready)

    def completed(self) -> object:
        return SimpleNamespace(future=lambda: self.future_of_end)

    def begin(self, node_id: str) -> None:
        self.yielded.append(node_id)

    def fail(self, error: Exception) -> None:
        self.yielded.clear()  # as Ray does
        self.future_of_end.set_exception(error)

    def finish(self, *values: object) -> None:
        self.yielded.append([(pickle.dumps(value), "", 0.1) for value in values])
        self.future_of_end.set_result(None)


class Ray:
    """As much of Ray as the scheduler uses; a test says what becomes of each task."""

    exceptions = SimpleNamespace(
        RayError=RayError,
        NodeDiedError=NodeDied,
        ObjectLostError=NodeDied,
        WorkerCrashedError=Crashed,
        OutOfMemoryError=Crashed,
        RuntimeEnvSetupError=NoStart,
    )
    util = SimpleNamespace(client=SimpleNamespace(ray=SimpleNamespace(is_connected=lambda: False)))
    cloudpickle = SimpleNamespace(register_pickle_by_value=lambda _: None)

    def __init__(self) -> None:
        self.alive = ["one", "two"]
        self.tasks: list[Task] = []

    def remote(self, _: object) -> object:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._send))

    def _send(self, function: bytes, items: list[bytes], timeout_s: float) -> Task:
        self.tasks.append(Task(items))
        return self.tasks[-1]

    def nodes(self) -> list[dict]:
        return [
            {
                "NodeID": one,
                "NodeManagerHostname": one,
                "NodeManagerAddress": one,
                "Alive": True,
                "Resources": {"CPU": 1.0},
            }
            for one in self.alive
        ]

    def available_resources(self) -> dict[str, float]:
        return {}

    def put(self, data: bytes) -> bytes:
        return data

    def get(self, ref: object) -> object:
        return ref.value

    def wait(self, tasks: list[Task], num_returns: int, timeout: float) -> tuple[list, list]:
        return [task for task in tasks if task.yielded or task.future_of_end.done()], []

    def cancel(self, task: Task, force: bool) -> None:
        task.is_cancelled = force


@pytest.fixture
def ray(monkeypatch):
    monkeypatch.setattr(tasks, "_LOOK_S", 0.05)
    return Ray()


@pytest.fixture
def make(ray):
    """Makes queues of tasks."""
    made = []

    def queue(**reserved) -> TaskQueue:
        connection = SimpleNamespace(ray=ray, check_process=lambda: None)
        made.append(TaskQueue(connection, **reserved))
        return made[-1]

    yield queue
    for one in made:
        one.close()


@pytest.fixture
def send(make, ray):
    """Submits items and waits for their tasks."""
    function, tasks = Function("double", b""), make()

    def sent(count=1, **fields) -> list[Item]:
        items = [Item(function, b"", **fields) for _ in range(count)]
        number = len(ray.tasks)
        for item in items:
            tasks.submit(item)
        wait_for(lambda: len(ray.tasks) > number)
        return items

    sent.function, sent.queue = function, tasks
    return sent


def next_task(ray, number: int, node_id: str = "") -> Task:
    wait_for(lambda: len(ray.tasks) > number)
    if node_id:
        ray.tasks[number].begin(node_id)
    return ray.tasks[number]


@pytest.mark.parametrize("is_seen_first_by_ray", [True, False])
def test_an_item_whose_node_has_died_runs_on_another_one(send, ray, is_seen_first_by_ray):
    (item,) = send()
    first = next_task(ray, 0, "two")
    wait_for(lambda: not first.yielded)
    if is_seen_first_by_ray:
        first.fail(NodeDied("its node has died"))
    else:
        ray.alive = ["one"]
        wait_for(lambda: first.is_cancelled)
    next_task(ray, 1, "one").finish(2)
    assert item.future.result(10) == 2
    assert item.failures == 0


@pytest.mark.parametrize(
    ("attempts", "node_id", "error", "message"),
    [
        (LOSSES_MAX + 1, "one", NodeDied("it is gone"), "for double has died: it is gone"),
        (LOSSES_MAX + 1, "", NoStart("no pip"), "for double could not be started: no pip"),
        (2, "", Crashed("killed"), "for double has died: killed"),
        (1, "one", Crashed("killed"), "for double has died: killed"),
    ],
)
def test_an_item_does_not_take_node_after_node(send, ray, attempts, node_id, error, message):
    (item,) = send()
    for number in range(attempts):
        task = next_task(ray, number, node_id)
        wait_for(lambda task=task: not task.yielded)
        task.fail(error)
    with pytest.raises(WorkerDied, match=message):
        item.future.result(10)


def test_a_node_on_which_no_worker_starts_uses_up_no_attempt_while_others_can(send, ray):
    running, item = send(2)
    next_task(ray, 0, "one")
    for number in range(1, LOSSES_MAX + 3):
        next_task(ray, number, "").fail(NoStart("its disk is full"))
    next_task(ray, LOSSES_MAX + 3, "one").finish(2)
    assert item.future.result(10) == 2
    assert not running.future.done()


def test_of_a_batch_that_has_crashed_unseen_each_item_runs_alone_and_twice_at_most(make, ray):
    queue, function, may_go = make(), Function("double", b""), threading.Event()
    function.measured(0.001, 1)
    queue._post(lambda: may_go.wait(10))
    items = [Item(function, b"") for _ in range(8)]
    for item in items:
        queue.submit(item)
    may_go.set()
    for number, count in enumerate([8] + [1] * 8):
        task = next_task(ray, number)
        assert len(task.items) == count
        task.fail(Crashed("killed"))
    assert all("has died" in str(item.future.exception(10)) for item in items)


def test_the_rest_of_a_long_batch_waits_for_a_worker_again(send, ray):
    send.function.measured(0.001, 1)
    items = send(8)
    for answered in range(8):
        next_task(ray, answered, "one").finish(5)  # one row, however many items
    assert [item.future.result(10) for item in items] == [5] * 8


def test_a_call_has_its_time_from_when_it_has_begun(send, ray):
    (item,) = send(timeout_s=0.3)
    time.sleep(0.6)
    assert not item.future.done()
    next_task(ray, 0, "one")
    with pytest.raises(TimeoutError, match=r"double took longer than 0.3 s"):
        item.future.result(10)
    assert ray.tasks[0].is_cancelled


def test_a_program_that_stood_still_has_no_late_calls(send, ray, monkeypatch):
    monkeypatch.setattr(tasks, "_STILL_S", 0.5)
    (item,) = send(timeout_s=1.0)
    task = next_task(ray, 0, "one")
    wait_for(lambda: not task.yielded)
    events, naps = send.queue._events, iter([2.0])
    late = Mock(wraps=events)
    late.get.side_effect = lambda timeout: time.sleep(next(naps, 0)) or events.get(timeout=timeout)
    send.queue._events = late
    time.sleep(2.7)
    task.finish(2)
    assert item.future.result(10) == 2


def test_a_cancelled_error_of_the_function_does_not_cancel_its_caller(send, ray):
    (item,) = send()
    task = next_task(ray, 0, "one")
    wait_for(lambda: not task.yielded)
    task.yielded.append([(pickle.dumps(CancelledError("it")), "Traceback\n", 0.1)])
    task.future_of_end.set_result(None)
    with pytest.raises(WorkError, match="has raised CancelledError: it"):
        item.future.result(10)


def test_a_line_says_what_the_first_worker_waits_for(send, monkeypatch, capsys):
    monkeypatch.setattr(tasks, "_FIRST_TELL_S", 0.1)
    send()
    line = wait_for(lambda: capsys.readouterr().err)
    assert line.startswith("No worker is ready yet: it starts, or waits for room. Each asks for")
    assert "CPU 1; the nodes can have 2 when nothing else runs" in line


def test_items_that_come_while_others_are_given_up_are_not_lost(make, ray):
    queue, function = make(), Function("double", b"")
    may_go = threading.Event()
    queue._post(lambda: may_go.wait(10))
    old, new = Item(function, b"old"), Item(function, b"new")
    queue.submit(old)
    queue.give_up([old])
    queue.submit(new)
    may_go.set()
    next_task(ray, 0, "one").finish(1)
    assert new.future.result(10) == 1


_HANGS = """
import pickle, time
from nemo_run_ray.work import tasks
class Hangs:
    def __reduce__(self):
        return time.sleep, (60,)
tasks._IMPORT_S = 0.2
tasks._prepare(pickle.dumps(((Hangs(),), {})), 1.0)
"""


def test_an_import_that_hangs_ends_the_worker():
    ended = subprocess.run([sys.executable, "-c", _HANGS], capture_output=True, timeout=50)
    assert ended.returncode == 1
    assert b"in _prepare" in ended.stderr


def test_a_future_that_is_cancelled_has_ended_though_no_worker_is_free(send, ray):
    ray.alive = ["one"]
    (running,) = send(is_alone=True)
    waiting = Item(send.function, b"")
    send.queue.submit(waiting)
    assert waiting.future.cancel()
    assert wait([waiting.future], 10).done
    assert not running.future.done()


def test_what_no_worker_can_reserve_is_refused(make):
    with pytest.raises(ConfigError, match="reserves nothing needs it"):
        make(cpus=0)
    with pytest.raises(ConfigError, match="max_workers must be greater than 0"):
        make(max_workers=0)


@pytest.mark.parametrize(
    ("reserved", "slots"),
    [
        ({}, 12),
        ({"cpus": 16}, 0),
        ({"cpus": 1, "gpus": 1}, 2),
        ({"label_selector": {"pool": "a"}}, 8),
        ({"max_workers": 5}, 5),
        ({"cpus": 0, "max_workers": 3}, 3),
        ({"cpus": 0.5, "gpus": 0.2}, 10),
    ],
)
def test_living_nodes_have_slots_for_workers(ray, make, reserved, slots):
    gpus = {"Labels": {"pool": "a"}, "Resources": {"CPU": 8.0, "GPU": 2.0}}
    (first, second) = ray.nodes()
    ray.nodes = lambda: [{**first, **gpus}, {**second, "Resources": {"CPU": 4.0}}]
    tasks = make(**reserved)
    tasks._look(0.0)
    assert tasks._slots == slots


def test_items_fail_only_after_no_node_was_large_enough_for_long(make, ray):
    queue, item = make(), Item(Function("double", b""), b"")
    queue._look_at = math.inf  # the queue's own thread does not look
    queue.submit(item)
    next_task(ray, 0)  # it waits for room
    for now in (0.0, 500.0):
        queue._look(now)
    ray.alive = []
    for now in (501.0, 499.0 + tasks._NEVER_S):
        queue._look(now)
        assert not item.future.done()
    queue._look(500.0 + tasks._NEVER_S)
    with pytest.raises(WorkerDied, match="No node can have a worker"):
        item.future.result(0)
