"""Which elements wait, are leased, and have ended."""

from __future__ import annotations

import random

import pytest

from nemo_run_ray.remote.array.elements import (
    CANCELLED,
    ENDED,
    GIVEN_BACK,
    LEASED,
    LOSSES_MAX,
    ArrayProgress,
    ElementState,
    Lease,
    Record,
)


def test_elements_are_leased_in_order_and_end():
    progress = ArrayProgress(3)
    assert [progress.take() for _ in range(4)] == [Lease(0, 1), Lease(1, 1), Lease(2, 1), None]
    assert progress.ended(Lease(1, 1), 0, "")
    assert progress.ended(Lease(0, 1), 3, "exit code 3")
    assert not progress.is_over
    assert progress.ended(Lease(2, 1), 0, "")
    assert progress.is_over
    assert progress.number(ElementState.SUCCEEDED) == 2
    assert [tuple(failure) for failure in progress.failures] == [(0, 3, "exit code 3")]


def test_an_end_that_comes_twice_or_late_changes_nothing():
    progress = ArrayProgress(1, retries=1)
    first = progress.take()
    assert progress.ended(first, 1, "")
    assert not progress.ended(first, 0, "")
    second = progress.take()
    assert second == Lease(0, 2)
    assert not progress.ended(first, 0, "")
    assert progress.ended(second, 0, "")
    assert not progress.ended(second, 1, "")
    assert progress.number(ElementState.SUCCEEDED) == 1


def test_a_permanent_exit_code_is_not_tried_again():
    progress = ArrayProgress(1, retries=5, permanent_exit_codes=[2])
    progress.ended(progress.take(), 2, "")
    assert progress.number(ElementState.FAILED) == 1


def test_the_death_of_hosts_costs_no_retry_until_there_are_many():
    progress = ArrayProgress(1)
    for number in range(LOSSES_MAX - 1):
        lease = progress.take()
        assert lease == Lease(0, number + 1)
        progress.given_back(lease, has_run=True)
    lease = progress.take()
    progress.ended(lease, 1, "its own failure")
    assert progress.number(ElementState.FAILED) == 1

    progress = ArrayProgress(1, retries=100)
    for _ in range(LOSSES_MAX):
        progress.given_back(progress.take(), has_run=True)
    assert progress.is_over
    assert "died 3 times" in progress.failures[0].reason


def test_a_replay_comes_to_the_same_state():
    """Whatever has happened: also when the driver was killed between any two records."""
    chance = random.Random(5)
    for _ in range(50):
        progress, records, leased = ArrayProgress(8, retries=1), [], {}
        for _ in range(60):
            if chance.random() < 0.5:
                lease = progress.take()
                if lease is not None:
                    host = chance.randrange(3)
                    leased[lease] = host
                    records.append(Record(*lease[:1], LEASED, lease.attempt, host=host))
            elif chance.random() < 0.1:
                index = chance.randrange(8)
                if progress.state(index) in (ElementState.WAITING, ElementState.LEASED):
                    progress.cancel(index)
                    records.append(Record(index, CANCELLED))
            elif leased:
                lease = chance.choice(list(leased))
                host, code = leased.pop(lease), chance.randrange(2)
                if chance.random() < 0.7:
                    progress.ended(lease, code, "")
                    records.append(Record(lease.element, ENDED, lease.attempt, code, host))
                else:
                    progress.given_back(lease, has_run=bool(code))
                    records.append(Record(lease.element, GIVEN_BACK, lease.attempt, code, host))
            again = ArrayProgress(8, retries=1)
            held = again.replay(records)
            assert [again.state(n) for n in range(8)] == [progress.state(n) for n in range(8)]
            assert {
                Lease(element, attempt): host
                for host, elements in held.items()
                for element, attempt in elements.items()
            } == leased


def test_what_is_cancelled_is_not_tried_again_whatever_becomes_of_it():
    progress = ArrayProgress(4, retries=5)
    leases = [progress.take() for _ in range(3)]
    assert [progress.cancel(index) for index in range(4)] == [*leases, None]
    assert progress.ended(leases[0], 143, "SIGTERM")
    assert progress.given_back(leases[1], has_run=True)
    assert progress.ended(leases[2], 0, "it was quicker")
    assert progress.is_over
    assert [stretch[:3] for stretch in progress.stretches()] == [
        (0, 0, "cancelled"),
        (1, 1, "cancelled"),
        (2, 2, "succeeded"),
        (3, 3, "cancelled"),
    ]
    assert progress.cancel(2) is None
    assert progress.number(ElementState.SUCCEEDED) == 1


def test_stretches_hold_all_that_is_known_of_elements_in_a_row():
    progress = ArrayProgress(6, retries=1)
    leases = [progress.take() for _ in range(4)]
    for lease in leases:
        progress.ended(lease, 3 if lease.element == 2 else 0, "")
    again = progress.take()
    assert list(progress.stretches()) == [
        (0, 1, "succeeded", 1, 0),
        (2, 2, "leased", 2, 3),
        (3, 3, "succeeded", 1, 0),
        (4, 5, "waiting", 0, 0),
    ]
    progress.ended(again, 300, "")
    assert list(progress.stretches())[1] == (2, 2, "failed", 2, 300 & 0xFF)


@pytest.mark.parametrize("count", [1000, 100_000])
def test_memory_is_three_bytes_an_element(count):
    import tracemalloc

    tracemalloc.start()
    progress = ArrayProgress(count)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert size < 3 * count + 5000
    assert progress.count == count
