"""Items, batches and shapes; what becomes of items whose task fails."""

import math
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_run_ray.errors import ConfigError, WorkerDied
from nemo_run_ray.remote.fit import Node
from nemo_run_ray.work import tasks, worker
from nemo_run_ray.work.tasks import (
    BATCH_BYTES_MAX,
    BATCH_MAX,
    LOSSES_MAX,
    TASKS_PER_WORKER,
    Function,
    Item,
    Pace,
    Scheduler,
    Shape,
    shape_of,
)
from tests.conftest import wait_for

CPU = Shape((("CPU", 1.0),))


def paced(seconds: float, result_bytes: int = 10) -> Pace:
    pace = Pace()
    pace.measured(seconds, result_bytes)
    return pace


@pytest.mark.parametrize(
    ("pace", "waiting", "item_bytes", "count"),
    [
        (Pace(), 10_000, 10, 1),  # the first item travels alone
        (paced(0.001), 10_000, 10, 50),
        (paced(0.1), 10_000, 10, 1),
        (paced(1e-7), 10**6, 10, BATCH_MAX),
        (paced(0.001), 10_000, BATCH_BYTES_MAX, 1),
        (paced(0.001, 10 * 2**20), 10_000, 10, 1),
        (paced(0.001), 8, 10, 2),  # at the end each worker gets its share
    ],
)
def test_short_items_travel_together_and_long_or_large_ones_alone(pace, waiting, item_bytes, count):
    assert pace.batch(waiting, workers=2, item_bytes=item_bytes) == count


@given(
    seconds=st.floats(0, 1e3),
    result_bytes=st.integers(0, 2**30),
    waiting=st.integers(1, 10**6),
    workers=st.integers(0, 1000),
    item_bytes=st.floats(0, 2**30),
)
def test_a_batch_has_an_item_and_keeps_to_its_bounds(
    seconds, result_bytes, waiting, workers, item_bytes
):
    pace = paced(seconds, result_bytes)
    count = pace.batch(waiting, workers, item_bytes)
    share = math.ceil(waiting / max(workers * TASKS_PER_WORKER, 1))
    assert 1 <= count <= min(BATCH_MAX, share)
    assert count == 1 or count * max(item_bytes, result_bytes) <= BATCH_BYTES_MAX
    assert pace.window(workers, item_bytes) > max(workers, 1)


def test_the_median_ignores_the_few_items_that_were_interrupted():
    pace = Pace()
    for number in range(1000):
        pace.measured(1.0 if number % 20 == 0 else 2e-6, 1)
    pace.measured(1.0, 1)
    assert pace.seconds > 0.1
    assert pace.median_s < 1e-5


def node(labels: dict[str, str] | None = None, **resources: float) -> Node:
    return Node("n", "host", "10.0.0.1", labels or {}, resources)


@pytest.mark.parametrize(
    ("fields", "slots"),
    [
        ({}, 12),
        ({"cpus": 3}, 3),
        ({"cpus": 16}, 0),
        ({"cpus": 1, "gpus": 1}, 2),
        ({"label_selector": {"pool": "a"}}, 8),
        ({"max_workers": 5}, 5),
        ({"cpus": 0, "max_workers": 3}, 3),
        ({"cpus": 0.1}, 120),
        ({"cpus": 0.5, "gpus": 0.2}, 10),
    ],
)
def test_living_nodes_have_slots_for_workers(fields, slots):
    nodes = [node(CPU=8.0, GPU=2.0, labels={"pool": "a"}), node(CPU=4.0)]
    assert shape_of(**fields).slots(nodes) == slots


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cpus": -1}, "CPU is -1"),
        ({"cpus": "two"}, "CPU is 'two'"),
        ({"max_workers": 0}, "max_workers must be greater than 0"),
        ({"cpus": 0}, "needs max_workers"),
        ({"label_selector": "pool=a"}, "label_selector is 'pool=a'; expected is a dict of values"),
        ({"label_selector": {"zone": ["a"]}}, "expected is a dict of values by label"),
        ({"resources": 5}, "resources is 5; expected is a dict of amounts"),
        ({"resources": {"disk": "much"}}, "disk is 'much'; expected is a number from 0"),
        ({"cpus": 1e-5}, "CPU is 1e-05; expected is 0, or a number from 0.0001"),
    ],
)
def test_what_no_worker_can_reserve_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        shape_of(**fields)


def test_the_options_of_a_task_are_rays():
    options = shape_of(gpus=0.5, memory=2**30, resources={"disk": 2}).options()
    assert options == {
        "num_cpus": 1,
        "num_gpus": 0.5,
        "memory": 2**30,
        "resources": {"disk": 2},
        "max_retries": 0,
        "scheduling_strategy": "SPREAD",
    }


def test_a_worker_keeps_a_bounded_number_of_functions():
    for number in range(worker.FUNCTIONS_MAX + 5):
        item = pickle.dumps(((-number,), {}))
        (row,) = worker.call_items_by_client(str(number), pickle.dumps(abs), [item], None)
        assert pickle.loads(row[1]) == number
    assert len(worker._functions) == worker.FUNCTIONS_MAX
    worker._functions.clear()


class RayError(Exception):
    pass


class NodeDied(RayError):
    pass


class Crashed(RayError):
    pass


class Task:
    """What a Ray task of a test yields: its node, then its rows."""

    def __init__(self, items: list[bytes]) -> None:
        self.items = items
        self.yielded: list[object] = []
        self.future_of_end: Future[None] = Future()
        self.is_cancelled = False

    def next_ready(self) -> bool:
        return bool(self.yielded)

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

    def finish(self, *values: object) -> None:
        self.yielded.append([("result", pickle.dumps(value), "", 0.1) for value in values])
        self.future_of_end.set_result(None)


class Ray:
    """As much of Ray as the scheduler uses; a test says what becomes of each task."""

    exceptions = SimpleNamespace(
        RayError=RayError, NodeDiedError=NodeDied, ObjectLostError=NodeDied
    )
    util = SimpleNamespace(client=SimpleNamespace(ray=SimpleNamespace(is_connected=lambda: False)))
    cloudpickle = SimpleNamespace(register_pickle_by_value=lambda _: None)

    def __init__(self) -> None:
        self.is_full = False
        self.alive = ["one", "two"]
        self.tasks: list[Task] = []

    def remote(self, _: object) -> object:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._send))

    def _send(self, digest: str, function: bytes, items: list[bytes], timeout_s: float) -> Task:
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
        if self.is_full:
            raise OSError("No space left on device")
        return data

    def get(self, ref: object) -> object:
        return ref.value

    def wait(self, refs: list, timeout: float) -> tuple[list, list]:
        return [ref for ref in refs if ref.future().done()], []

    def cancel(self, task: Task, force: bool) -> None:
        task.is_cancelled = force


@pytest.fixture
def ray(monkeypatch):
    monkeypatch.setattr(tasks, "_LOOK_S", 0.05)
    return Ray()


@pytest.fixture
def scheduler(ray):
    made = Scheduler(ray, print)
    yield made
    made.close()


@pytest.fixture
def send(scheduler, ray):
    """Submits items and waits for their tasks."""
    function = Function("double", "digest", b"")

    def sent(count=1, shape=CPU, **fields) -> list[Item]:
        items = [Item(function, b"", **fields) for _ in range(count)]
        number = len(ray.tasks)
        scheduler.queue(shape).submit(items)
        wait_for(lambda: len(ray.tasks) > number)
        return items

    sent.function = function
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
        first.future_of_end.set_exception(NodeDied("its node has died"))
    else:
        ray.alive = ["one"]
        wait_for(lambda: first.is_cancelled)
    next_task(ray, 1, "one").finish(2)
    assert item.future.result(10) == 2
    assert item.failures == 0


def test_an_item_does_not_take_node_after_node(send, ray):
    (item,) = send()
    for number in range(LOSSES_MAX + 1):
        next_task(ray, number, "one").future_of_end.set_exception(NodeDied("its node has died"))
    with pytest.raises(WorkerDied, match="ran double has died: its node has died"):
        item.future.result(10)


def test_an_item_whose_worker_never_begins_is_tried_elsewhere(send, ray):
    (item,) = send()
    for number in range(LOSSES_MAX + 1):
        next_task(ray, number).future_of_end.set_exception(RayError("pip has failed"))
    with pytest.raises(WorkerDied, match="No worker could be started for double: pip has failed"):
        item.future.result(10)


def serve(ray, items: list[Item], rows: Callable[[Task], list[object]]) -> None:
    """Answer each task with its rows, until all items have ended; without rows it has crashed."""
    answered: set[Task] = set()
    deadline = time.monotonic() + 20
    while not all(item.future.done() for item in items):
        assert time.monotonic() < deadline
        for task in [one for one in ray.tasks if one not in answered]:
            answered.add(task)
            task.begin("one")
            if values := rows(task):
                task.finish(*values)
            else:
                task.future_of_end.set_exception(Crashed("killed by SIGKILL"))
        time.sleep(0.01)


def test_the_rest_of_a_long_batch_waits_for_a_worker_again(send, ray):
    send.function.pace.measured(0.001, 1)
    items = send(8)
    serve(ray, items, lambda _: [5])  # one row, however many items
    assert [item.future.result(0) for item in items] == [5] * 8


def test_a_call_has_its_time_from_when_it_has_begun(send, ray):
    (item,) = send(timeout_s=0.3)
    time.sleep(0.6)
    assert not item.future.done()
    next_task(ray, 0, "one")
    with pytest.raises(TimeoutError, match=r"double took longer than 0.3 s"):
        item.future.result(10)
    assert ray.tasks[0].is_cancelled


def test_a_program_that_stood_still_does_not_end_what_is_done(send, ray, scheduler):
    (item,) = send(timeout_s=0.5)
    task = next_task(ray, 0, "one")
    wait_for(lambda: not task.yielded)

    def stand_still():
        time.sleep(1.0)
        task.finish(1)

    scheduler.post(stand_still)
    assert item.future.result(10) == 1


def test_other_shapes_are_held_back_while_one_finds_no_room(send, ray, monkeypatch):
    monkeypatch.setattr(tasks, "_STARVED_S", 0.3)
    send(20)
    next_task(ray, 1, "one").finish(1)
    (large,) = send(shape=Shape((("CPU", 0.5),)))
    wait_for(lambda: ray.tasks[-1].items)
    time.sleep(0.6)
    number = len(ray.tasks)
    for task in ray.tasks[:-1]:
        if not task.future_of_end.done():
            task.begin("one")
            task.finish(1)
    time.sleep(0.3)
    assert len(ray.tasks) == number, "no further task of the other shape"
    ray.tasks[-1].begin("two")
    ray.tasks[-1].finish(3)
    assert large.future.result(10) == 3
    wait_for(lambda: len(ray.tasks) > number)


def test_a_line_says_what_the_first_worker_waits_for(ray, monkeypatch):
    monkeypatch.setattr(tasks, "_FIRST_TELL_S", 0.1)
    lines: list[str] = []
    scheduler = Scheduler(ray, lines.append)
    scheduler.queue(CPU).submit([Item(Function("double", "digest", b""), b"")])
    wait_for(lambda: lines)
    scheduler.close()
    assert lines[0].startswith("No worker is ready yet: it starts, or waits for room. Each asks")
    assert "CPU 1; the nodes can have 2 when nothing else runs" in lines[0]


def test_an_item_whose_function_cannot_be_stored_fails_alone(ray, scheduler):
    ray.is_full = True
    item = Item(Function("double", "digest", b""), b"")
    scheduler.queue(CPU).submit([item])
    with pytest.raises(OSError, match="No space left"):
        item.future.result(10)
    ray.is_full = False
    scheduler.queue(CPU).submit([Item(Function("double", "digest", b""), b"")])
    wait_for(lambda: ray.tasks)


def test_items_that_come_while_others_are_given_up_are_not_lost(scheduler, ray):
    queue, function = scheduler.queue(CPU), Function("double", "digest", b"")
    may_go = threading.Event()
    scheduler.post(lambda: may_go.wait(10))
    old, new = Item(function, b"old"), Item(function, b"new")
    queue.submit([old])
    queue.give_up([old])
    queue.submit([new])
    may_go.set()
    next_task(ray, 0, "one").finish(1)
    assert new.future.result(10) == 1


def test_a_bounded_number_of_functions_is_kept(scheduler):
    queue = scheduler.queue(CPU)
    first = queue.function(abs)
    assert queue.function(abs) is first
    for number in range(worker.FUNCTIONS_MAX):
        queue.function(lambda _, number=number: number)
    assert queue.function(abs) is not first
