"""How many items travel together."""

import math

from hypothesis import given
from hypothesis import strategies as st

from nemo_run_ray.work.batching import BATCH_BYTES_MAX, BATCH_MAX, HELD, Pace


def paced(seconds: float, result_bytes: int = 10) -> Pace:
    found = Pace()
    found.measured(seconds, result_bytes)
    return found


def test_the_first_item_travels_alone():
    assert Pace().batch(waiting=10_000, workers=2, item_bytes=10) == 1
    assert Pace().held(1) == 1


def test_short_items_travel_together_and_long_ones_alone():
    assert paced(0.001).batch(10_000, 2, 10) == 50
    assert paced(0.1).batch(10_000, 2, 10) == 1
    assert paced(1e-7).batch(10**6, 2, 10) == BATCH_MAX


def test_large_items_and_results_travel_alone():
    assert paced(0.001).batch(10_000, 2, BATCH_BYTES_MAX) == 1
    assert paced(0.001, 10 * 2**20).batch(10_000, 2, 10) == 1


def test_at_the_end_each_worker_gets_its_share():
    assert paced(0.001).batch(waiting=8, workers=4, item_bytes=10) == 1
    assert paced(0.001).batch(waiting=80, workers=4, item_bytes=10) == 10


def test_a_worker_holds_no_second_call_behind_a_long_one():
    assert paced(0.001).held(50) == HELD
    assert paced(1.0).held(1) == 1


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
    assert 1 <= count <= min(BATCH_MAX, math.ceil(waiting / max(workers * HELD, 1)))
    assert count == 1 or count * max(item_bytes, result_bytes) <= BATCH_BYTES_MAX
    assert pace.window(workers, item_bytes) > max(workers, 1)


def test_the_median_does_not_follow_the_few_that_were_interrupted():
    found = Pace()
    for number in range(1000):
        found.measured(1.0 if number % 20 == 0 else 2e-6, 1)
    found.measured(1.0, 1)
    assert found.seconds > 0.1
    assert found.median_s < 1e-5
