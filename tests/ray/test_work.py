"""CPU work on a real Ray: results, failures, deaths, and the connection."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from nemo_run_ray import work
from nemo_run_ray.errors import (
    CannotBeSent,
    ConfigError,
    ItemFailed,
    TimedOut,
    WorkerDied,
    WorkError,
)
from nemo_run_ray.work import tasks
from tests.conftest import processes_of_home, wait_for


def double(number):
    return 2 * number


def slowly(number):
    time.sleep(0.01)
    return number


def fail_at_three(number):
    if number == 3:
        raise ValueError("three is too many")
    return number


def test_results_come_in_order(pool):
    assert list(pool.map(double, range(500))) == [2 * number for number in range(500)]


def test_items_are_taken_when_there_is_room_for_them(pool):
    taken = []

    def count():
        while True:
            taken.append(len(taken))
            yield taken[-1]

    results = pool.map(slowly, count())
    assert [next(results) for _ in range(100)] == list(range(100))
    results.close()
    assert len(taken) < 500, "a stream that never ends is not read in advance"


def test_a_failure_is_raised_with_its_number_and_cause(pool):
    with pytest.raises(ItemFailed, match="item 3 of fail_at_three") as caught:
        list(pool.map(fail_at_three, range(10)))
    assert caught.value.index == 3
    assert isinstance(caught.value.cause, ValueError)
    assert "raise ValueError" in str(caught.value.cause.__cause__)


def test_failures_are_yielded_in_their_places(pool):
    found = list(pool.map(fail_at_three, range(6), failures="yield"))
    assert [one for one in found if not isinstance(one, ItemFailed)] == [0, 1, 2, 4, 5]
    assert found[3].index == 3
    assert str(found[3].cause) == "three is too many"


def test_an_item_that_fails_is_tried_again(pool, tmp_path):
    def flaky(number):
        marks = len(list(tmp_path.glob(f"{number}-*")))
        (tmp_path / f"{number}-{marks}").touch()
        if marks < 2:
            raise OSError("not yet")
        return number

    assert list(pool.map(flaky, [1, 2], retries=2)) == [1, 2]
    with pytest.raises(ItemFailed, match="not yet"):
        list(pool.map(flaky, [3], retries=1))
    assert len(list(tmp_path.glob("3-*"))) == 2


def hang_at_two(number):
    if number == 2:
        time.sleep(600)
    return number, os.getpid()


def test_a_call_that_takes_too_long_ends_its_worker_alone(pool):
    began = time.monotonic()
    found = list(pool.map(hang_at_two, range(6), timeout_s=3, failures="yield"))
    assert time.monotonic() - began < 60
    assert isinstance(found[2], ItemFailed)
    assert isinstance(found[2].cause, TimedOut)
    assert "hang_at_two took longer than 3 s" in str(found[2].cause)
    assert [one[0] for number, one in enumerate(found) if number != 2] == [0, 1, 3, 4, 5]


def hang_at_150(number):
    if number == 150:
        time.sleep(600)
    return number


def test_one_that_hangs_in_a_batch_of_short_ones_fails_alone(pool):
    found = list(pool.map(hang_at_150, range(300), timeout_s=3, failures="yield"))
    failed = [place for place, one in enumerate(found) if isinstance(one, ItemFailed)]
    assert failed == [150]
    assert isinstance(found[150].cause, TimedOut)
    assert [one for one in found if not isinstance(one, ItemFailed)] == [
        number for number in range(300) if number != 150
    ]


def test_a_regular_expression_that_never_ends_is_ended(pool):
    """It holds the interpreter's lock: no thread and no signal handler of Python could end it."""

    def explode(text):
        import re

        return re.match(r"(a+)+$", text)

    (found,) = pool.map(explode, ["a" * 64 + "b"], timeout_s=2, failures="yield")
    assert isinstance(found.cause, TimedOut)


def die_at_one(number):
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def test_a_worker_that_dies_costs_its_item_alone(pool):
    found = list(pool.map(die_at_one, range(200), failures="yield"))
    assert isinstance(found[1], ItemFailed)
    assert isinstance(found[1].cause, WorkerDied)
    assert [one for one in found if not isinstance(one, ItemFailed)] == [0, *range(2, 200)]


@pytest.mark.parametrize(("seconds", "most"), [(0.5, 1), (0.0, 2)])
def test_a_call_that_kills_its_worker_is_made_twice_at_most(pool, tmp_path, seconds, most):
    def die(path):
        path.open("a").write("1")
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    (found,) = pool.map(die, [tmp_path / "calls"], failures="yield")
    assert "has died" in str(found.cause)
    assert 1 <= len((tmp_path / "calls").read_text()) <= most


def test_what_cannot_be_pickled_is_named(pool):
    lock = threading.Lock()

    class Job:
        def __init__(self):
            self.guard = lock

    with pytest.raises(
        CannotBeSent,
        match=r"[Ii]tem 1 of double cannot be sent to a worker: .*guard is of type lock; ",
    ):
        list(pool.map(double, [1, Job()]))
    with pytest.raises(
        CannotBeSent, match=r"[Tt]he function .* cannot be sent to a worker: .*lock"
    ):
        list(pool.map(lambda number: lock, [1]))
    with pytest.raises(CannotBeSent, match="not callable"):
        list(pool.map("double", [1]))


def test_every_exception_is_the_failure_of_its_item(pool):
    def fail(number):
        class Odd(Exception):
            def __reduce__(self):
                raise TypeError("never")

        raise SystemExit(3) if number == 0 else Odd(f"number {number}")

    ended, odd = pool.map(fail, [0, 5], failures="yield")
    assert str(ended.cause) == "the function has raised SystemExit: 3"
    assert "number 5" in str(odd.cause)


def test_what_no_node_has_is_told(pool, monkeypatch):
    monkeypatch.setattr(tasks, "_NEVER_S", 3.0)
    with pytest.raises(ItemFailed, match="the largest node has CPU 4, it asks for 400"):
        list(pool.map(double, [1], cpus=400))


def test_large_results_are_not_all_in_memory_at_once(pool):
    import psutil

    # Ray's object store is shared with this program, and not counted.
    before = most = psutil.Process().memory_full_info().uss
    for number, data in enumerate(pool.map(lambda number: b"x" * 10_000_000, range(100))):
        assert len(data) == 10_000_000
        if number % 10 == 0:
            most = max(most, psutil.Process().memory_full_info().uss)
    assert most - before < 400_000_000


def test_one_call_from_an_event_loop(pool):
    async def main():
        values = await asyncio.gather(*(pool.call(double, number) for number in range(20)))
        with pytest.raises(ValueError, match="three is too many"):
            await pool.call(fail_at_three, 3)
        with pytest.raises(TimedOut):
            await pool.call(time.sleep, 600, timeout_s=1)
        return values

    assert asyncio.run(main()) == [2 * number for number in range(20)]


def test_a_call_that_is_cancelled_ends_its_worker(pool, tmp_path):
    def mark_and_wait(path):
        Path(path).write_text(str(os.getpid()))
        time.sleep(600)

    async def main():
        mark = tmp_path / "pid"
        task = asyncio.create_task(pool.call(mark_and_wait, str(mark)))
        while not mark.exists() or not mark.read_text():
            await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return int(mark.read_text())

    pid = asyncio.run(main())
    wait_for(lambda: not Path(f"/proc/{pid}").exists(), 20)


def test_a_forked_child_is_refused(pool):
    def child() -> None:
        told = []
        for question in (lambda: list(pool.map(abs, [1])), work.connect):
            try:
                question()
            except (RuntimeError, ConfigError) as error:
                told.append(str(error))
        os.write(write_fd, " ".join(told).encode())

    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            child()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(write_fd)
    words = os.read(read_fd, 10_000).decode()
    os.close(read_fd)
    assert words.count("'spawn' or 'forkserver'") == 2
    assert list(pool.map(abs, [-1])) == [1], "the parent's goes on"


def test_a_map_that_is_left_early_leaves_nothing_running(pool, tmp_path):
    def long(number):
        (tmp_path / str(number)).write_text(str(os.getpid()))
        time.sleep(0 if number == 0 else 600)
        return number

    results = pool.map(long, range(4))
    assert next(results) == 0
    wait_for(lambda: [one for one in tmp_path.iterdir() if one.name != "0" and one.read_text()])
    texts = [path.read_text() for path in tmp_path.iterdir() if path.name != "0"]
    results.close()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in texts if pid), 20)


_CHILD = """
import sys
from nemo_run_ray import work
with work.connect() as pool:
    print(pool.address, list(pool.map(str, [1, 2])))
"""


def test_a_child_process_joins_the_same_ray(pool):
    done = subprocess.run(
        [sys.executable, "-c", _CHILD], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{pool.address} ['1', '2']"


def test_a_pool_that_was_closed_takes_no_more(pool):
    with work.connect() as other:
        pass
    with pytest.raises(RuntimeError, match="takes no more work"):
        list(other.map(double, [1]))


def test_what_would_end_an_event_loop_is_an_error_of_the_call(pool):
    async def main():
        for function in (next, sys.exit):
            with pytest.raises(WorkError, match="has raised"):
                await pool.call(function, iter(()) if function is next else 3)

    asyncio.run(main())


_STRIKES = 12


def _one_storm(pool, chance: random.Random) -> str:
    """A map whose workers die at random moments; in words what is wrong with its results."""
    count, ordered = chance.randrange(1, 600), chance.random() < 0.5
    pause_s = chance.choice([0.0, 0.0005, 0.01, 0.05])
    over = threading.Event()

    def strike() -> None:
        for _ in range(_STRIKES):  # a busy machine may take longer to start a worker
            if over.wait(chance.uniform(0.05, 1.0)):
                return
            workers = processes_of_home(lambda _, words: words[0].startswith("ray::call_items"))
            if workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(chance.choice(workers), signal.SIGKILL)

    def work_on(number):
        time.sleep(pause_s)
        return number

    striker = threading.Thread(target=strike)
    striker.start()
    try:
        found = list(pool.map(work_on, range(count), ordered=ordered, retries=50))
    finally:
        over.set()
        striker.join()
    right = found == list(range(count)) if ordered else sorted(found) == list(range(count))
    return "" if right else f"{count} items of {pause_s} s, ordered={ordered}: {found}"


def _storms(pool, count: int, seed: int) -> None:
    print(f"seed {seed}", file=sys.stderr)
    chance = random.Random(seed)
    broken = [wrong for wrong in (_one_storm(pool, chance) for _ in range(count)) if wrong]
    assert not broken, f"seed {seed}: " + "\n".join(broken)


def test_workers_that_die_at_random_moments_lose_no_item(pool):
    _storms(pool, 1, seed=26)  # 208 items of 50 ms


@pytest.mark.soak
def test_a_hundred_storms(pool):
    _storms(pool, 100, int(os.environ.get("SEED", random.randrange(10**6))))
