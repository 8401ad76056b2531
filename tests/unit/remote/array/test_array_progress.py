"""Which elements wait, are leased, and have ended; and the journal that says so after a crash."""

from __future__ import annotations

import os
import random

import pytest

from nemo_run_ray.remote.array.elements import (
    CANCELLED,
    ENDED,
    GIVEN_BACK,
    HOST,
    LEASED,
    LOSSES_MAX,
    ArrayProgress,
    ElementState,
    HostRecord,
    LinesFile,
    Record,
    read_records,
)


def leased(progress: ArrayProgress, host: int = 0) -> Record:
    """Lease the next element to a host."""
    record = progress.next_lease(host)
    assert record is not None
    progress.apply(record)
    return record


def ended(progress: ArrayProgress, lease: Record, code: int = 0) -> bool:
    return progress.apply(lease._replace(kind=ENDED, code=code), f"exit code {code}")


def given_back(progress: ArrayProgress, lease: Record, has_run: bool = True) -> bool:
    return progress.apply(lease._replace(kind=GIVEN_BACK, code=int(has_run)))


def test_an_end_that_comes_twice_or_late_or_from_another_host_changes_nothing():
    progress = ArrayProgress(1, retries=1)
    first = leased(progress)
    assert ended(progress, first, 1)
    assert not ended(progress, first)
    second = leased(progress)
    assert second.attempt == 2
    assert not ended(progress, first)
    assert not ended(progress, second._replace(host=7))
    assert ended(progress, second)
    assert not ended(progress, second, 1)
    assert progress.number(ElementState.SUCCEEDED) == 1


def test_the_death_of_hosts_costs_no_retry_until_there_are_many():
    progress = ArrayProgress(1)
    for number in range(LOSSES_MAX):
        lease = leased(progress)
        assert lease.attempt == number + 1
        given_back(progress, lease)
    ended(progress, leased(progress), 1)
    assert progress.number(ElementState.FAILED) == 1

    progress = ArrayProgress(1, retries=100)
    for _ in range(LOSSES_MAX + 1):
        given_back(progress, leased(progress))
    assert progress.ended_count == 1
    assert "died 4 times" in progress.failures[0][2]


def test_an_element_that_may_kill_its_host_has_one_to_itself():
    progress = ArrayProgress(3)
    for _ in range(LOSSES_MAX):
        given_back(progress, leased(progress))
    assert leased(progress).element == 0
    assert progress.next_lease(0) is None, "the host has it alone"
    lease = leased(progress, 1)
    given_back(progress, leased(progress, 2), has_run=False)
    given_back(progress, Record(0, LEASED, 0, LOSSES_MAX + 1), has_run=False)
    assert (lease.element, leased(progress, 1).element) == (1, 2), "this host has another one"


def test_a_replay_comes_to_the_same_state(tmp_path):
    """Whatever has happened: also when the driver was killed between any two records."""
    chance = random.Random(5)
    for run in range(20):
        path = str(tmp_path / str(run))
        progress, journal, leases = ArrayProgress(8, retries=1), LinesFile(path), []
        for _ in range(60):
            record = None
            if chance.random() < 0.5:
                record = progress.next_lease(chance.randrange(3))
                leases += [] if record is None else [record]
            elif chance.random() < 0.1:
                record = Record(chance.randrange(8), CANCELLED)
            elif leases:
                lease = leases.pop(chance.randrange(len(leases)))
                kind = chance.choice([ENDED, ENDED, GIVEN_BACK])
                record = lease._replace(kind=kind, code=chance.randrange(2))
            if record is not None and progress.apply(record):
                journal.add(record)
            journal.commit()
            again = ArrayProgress(8, retries=1)
            assert all(map(again.apply, read_records(path)))
            assert list(again.stretches()) == list(progress.stretches())
            for one in (again, progress):
                held = [(host, *lease) for host, row in one.held.items() for lease in row.items()]
                assert sorted(held) == sorted((lease.host, lease[0], lease[3]) for lease in leases)
        os.close(journal.fd)


def test_what_is_cancelled_is_not_tried_again_whatever_becomes_of_it():
    progress = ArrayProgress(4, retries=5)
    first, second, third = (leased(progress) for _ in range(3))
    for index in range(4):
        progress.apply(Record(index, CANCELLED))
    assert ended(progress, first, 143)
    assert given_back(progress, second)
    assert ended(progress, third), "it was quicker"
    assert not progress.apply(Record(2, CANCELLED))
    assert [stretch[:3] for stretch in progress.stretches()] == [
        (0, 0, "cancelled"),
        (1, 1, "cancelled"),
        (2, 2, "succeeded"),
        (3, 3, "cancelled"),
    ]


def test_stretches_hold_all_that_is_known_of_elements_in_a_row():
    progress = ArrayProgress(6, retries=1)
    for lease in [leased(progress) for _ in range(4)]:
        ended(progress, lease, 3 if lease.element == 2 else 0)
    again = leased(progress)
    assert list(progress.stretches()) == [
        (0, 1, "succeeded", 1, 0),
        (2, 2, "leased", 2, 3),
        (3, 3, "succeeded", 1, 0),
        (4, 5, "waiting", 0, 0),
    ]
    ended(progress, again, 300)
    assert list(progress.stretches())[1] == (2, 2, "failed", 2, 300 & 0xFF)
    progress.cancel_rest()
    assert [stretch[2] for stretch in progress.stretches()][-1] == "cancelled"
    numbers = [progress.number(state) for state in ElementState]
    assert (numbers, progress.ended_count) == ([0, 0, 3, 1, 2], 6)


RECORDS = [
    HostRecord(3, HOST, "node", "tag", "run_dir"),
    Record(0, LEASED, 3, 1),
    Record(0, ENDED, 3, 1, code=143),
    Record(70_000, GIVEN_BACK, 4, 2, code=1),
]


def test_a_journal_that_is_torn_at_any_byte_keeps_what_is_whole(tmp_path):
    path = tmp_path / "journal"
    journal = LinesFile(str(path))
    for record in RECORDS:
        journal.add(record)
    journal.commit()
    os.close(journal.fd)
    data = path.read_bytes()
    for length in range(len(data) + 1):
        path.write_bytes(data[:length])
        journal = LinesFile(str(path))
        kept = RECORDS[: data[:length].count(b"\n")]
        assert list(read_records(str(path))) == kept
        journal.add(RECORDS[1])
        journal.commit()
        os.close(journal.fd)
        assert list(read_records(str(path))) == [*kept, RECORDS[1]]


def test_nothing_is_lost_by_a_disk_that_is_full(tmp_path, monkeypatch):
    path = str(tmp_path / "journal")
    journal = LinesFile(path)
    journal.add(RECORDS[0])
    journal.commit()
    journal.add(RECORDS[1])

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fdatasync", full)
        with pytest.raises(OSError, match="No space left"):
            journal.commit()
    # A driver that started now might find what was written and is not known to be on the disk.
    assert list(read_records(path)) in (RECORDS[:1], RECORDS[:2])
    journal.commit()
    os.close(journal.fd)
    assert list(read_records(path)) == RECORDS[:2]
