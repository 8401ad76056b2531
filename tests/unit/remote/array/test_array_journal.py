"""The journal of an array survives a crash at any byte, and has one writer."""

import pytest

from nemo_run_ray.remote.array import elements as journal_module
from nemo_run_ray.remote.array.elements import (
    ENDED,
    GIVEN_BACK,
    LEASED,
    Journal,
    Record,
    read_records,
)

RECORDS = [
    Record(0, LEASED, 1, host=3),
    Record(0, ENDED, 1, code=143, host=3, seconds=0.5),
    Record(70_000, LEASED, 2, host=4),
    Record(70_000, GIVEN_BACK, 2, code=1, host=4),
]


def written(path) -> bytes:
    journal = Journal(str(path), "one")
    for record in RECORDS:
        journal.add(record)
    journal.commit()
    journal.close()
    return path.read_bytes()


def read(path, key: str = "one") -> list[Record]:
    """What the next driver finds."""
    journal = Journal(str(path), key)
    try:
        return list(journal.records())
    finally:
        journal.close()


def test_what_was_written_is_found_and_goes_on(tmp_path):
    path = tmp_path / "journal"
    written(path)
    again = Journal(str(path), "one")
    assert list(again.records()) == RECORDS

    again.add(Record(1, LEASED, 1))
    again.commit()
    again.close()

    assert read(path) == [*RECORDS, Record(1, LEASED, 1)]


def test_a_journal_that_is_torn_at_any_byte_keeps_what_is_whole(tmp_path):
    path = tmp_path / "journal"
    data = written(path)
    before = 0
    for length in range(len(data) + 1):
        path.write_bytes(data[:length])
        journal = Journal(str(path), "one")
        assert list(journal.records()) == RECORDS[: journal.count]
        assert journal.count >= before
        before = journal.count
        journal.add(Record(9, LEASED, 1))
        journal.commit()
        journal.close()
        assert read(path)[-1] == Record(9, LEASED, 1)
    assert before == len(RECORDS)


def test_a_byte_that_is_wrong_ends_it_there(tmp_path):
    path = tmp_path / "journal"
    data = bytearray(written(path))
    data[-30] ^= 1
    path.write_bytes(bytes(data))
    assert read(path) == RECORDS[:2]


def test_the_journal_of_another_array_is_none(tmp_path):
    path = tmp_path / "journal"
    written(path)
    assert read(path, "another") == []


def test_a_driver_waits_until_the_one_before_it_is_gone(tmp_path, monkeypatch):
    path = tmp_path / "journal"
    before = Journal(str(path), "one")
    monkeypatch.setattr(journal_module, "_LOCK_S", 0.2)
    with pytest.raises(TimeoutError, match=f"another driver of this array writes {path}"):
        Journal(str(path), "one")
    before.close()
    assert read(path) == []


def test_nothing_is_lost_by_a_disk_that_is_full(tmp_path, monkeypatch):
    path = tmp_path / "journal"
    journal = Journal(str(path), "one")
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
    assert list(read_records(str(path))) in (RECORDS[:1], RECORDS[:2])
    journal.commit()
    journal.close()
    assert read(path) == RECORDS[:2]
