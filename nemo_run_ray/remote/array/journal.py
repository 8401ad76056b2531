"""What has become of each element, on the head's disk: appended to, never changed.

An element is written down as leased before a host may start it, and as ended when its end is known.
A driver that is started again goes on from here. Records have one length and a checksum; what a
crash has torn at the end is cut off.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
import zlib
from typing import Iterator, List, NamedTuple

from ..trust import open_own

#: A host may start the element.
LEASED = 1
#: It has ended with an exit code.
ENDED = 2
#: It was not started, or its host is proven dead.
GIVEN_BACK = 3
#: It is not to run, or not to go on, as the user wants.
CANCELLED = 4

#: Behind the four bytes that tell which array it is.
_FORMAT = b"nemo_run_ray array 1\n"
_RECORD = struct.Struct("<IBBiIf")
_SUM = struct.Struct("<I")
_SIZE = _RECORD.size + _SUM.size
#: Seconds to wait for another driver's end, and between two looks.
_LOCK_S, _LOCK_AGAIN_S = 60.0, 0.1
#: Records that are read at once.
_BLOCK_RECORDS = 2**14


class Record(NamedTuple):
    """One line of the journal.

    Attributes:
        element: its index, from 0.
        kind: what has happened.
        attempt: of the element, from 1.
        code: its exit code.
        host: number of the host that has it.
        seconds: that it took.
    """

    element: int
    kind: int
    attempt: int = 0
    code: int = 0
    host: int = 0
    seconds: float = 0.0


class Journal:
    """The journal of one array. It has one writer, which locks it.

    Args:
        path: of the file, which may hold what an earlier driver wrote.
        key: tells this array from any other, so that a strange file is not read as its journal.

    Raises:
        TimeoutError: another driver of this array is still there.
        PermissionError: the file is a link, or another user's.

    Attributes:
        count: of the records that the file holds.
    """

    def __init__(self, path: str, key: str) -> None:
        head = zlib.crc32(key.encode()).to_bytes(4, "little") + _FORMAT
        self._fd = open_own(path, os.O_RDWR | os.O_CREAT)
        self._path = path
        _lock(self._fd, path)
        is_ours = os.pread(self._fd, len(head), 0) == head
        self.count = sum(1 for _ in read_records(path)) if is_ours else 0
        kept = len(head) + self.count * _SIZE
        self._good = kept if self.count else 0  # bytes that are whole
        self._waiting: List[bytes] = [] if self.count else [head]

    def records(self) -> Iterator[Record]:
        """What an earlier driver wrote."""
        return read_records(self._path) if self.count else iter(())

    def add(self, record: Record) -> None:
        """Let a record wait for the next ``commit``."""
        data = _RECORD.pack(*record)
        self._waiting.append(data + _SUM.pack(zlib.crc32(data)))

    def close(self) -> None:
        """Write no more; what waits is lost."""
        os.close(self._fd)

    def commit(self) -> None:
        """Write what waits, and return when the disk has it.

        Raises:
            OSError: the disk is full, or broken. What waits is written by the next call.
        """
        if not self._waiting:
            return
        data = b"".join(self._waiting)
        view = memoryview(data)
        os.ftruncate(self._fd, self._good)  # what a crash, or a full disk, has left behind it
        os.lseek(self._fd, self._good, os.SEEK_SET)
        while view:
            view = view[os.write(self._fd, view) :]
        os.fdatasync(self._fd)
        self._good += len(data)
        self._waiting.clear()


def _lock(fd: int, path: str) -> None:
    """Wait until no other driver has the journal, which one that was killed has for a moment."""
    until = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() >= until:
                os.close(fd)
                raise TimeoutError(f"another driver of this array writes {path}") from error
        except OSError:  # a file system without locks
            return
        time.sleep(_LOCK_AGAIN_S)


def read_records(path: str) -> Iterator[Record]:
    """The records of a journal up to the first that is torn."""
    with open(open_own(path, os.O_RDONLY), "rb") as file:
        file.seek(4 + len(_FORMAT))
        for block in iter(lambda: file.read(_BLOCK_RECORDS * _SIZE), b""):
            found = list(_records(block))
            yield from found
            if len(found) * _SIZE != len(block):
                return


def _records(data: bytes) -> Iterator[Record]:
    for start in range(0, len(data) - _SIZE + 1, _SIZE):
        record = data[start : start + _RECORD.size]
        (checksum,) = _SUM.unpack_from(data, start + _RECORD.size)
        if zlib.crc32(record) != checksum:
            return
        yield Record(*_RECORD.unpack(record))
