"""What has become of each element, on the head's disk: appended to, never changed.

An element is written down as leased before a host may start it, and as ended when its end is known.
A driver that is started again goes on from here. Records have one length and a checksum; what a
crash has torn at the end is cut off.
"""

from __future__ import annotations

import os
import struct
import zlib
from typing import Iterator, List, NamedTuple, Tuple

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
    """The journal of one array. It has one writer.

    Args:
        path: of the file; what it holds already is read first.
        key: tells this array from any other, so that a strange file is not read as its journal.

    Attributes:
        found: the records that the file held.
    """

    def __init__(self, path: str, key: str) -> None:
        head = zlib.crc32(key.encode()).to_bytes(4, "little") + _FORMAT
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        data = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
        self.found: Tuple[Record, ...] = ()
        if data[: len(head)] == head:
            self.found = tuple(records_in(data))
        kept = len(head) + len(self.found) * _SIZE
        self._good = kept if self.found else 0  # bytes that are whole
        self._waiting: List[bytes] = [] if self.found else [head]

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


def records_in(data: bytes) -> Iterator[Record]:
    """The records of a journal's bytes up to the first that is torn."""
    for start in range(4 + len(_FORMAT), len(data) - _SIZE + 1, _SIZE):
        record = data[start : start + _RECORD.size]
        (checksum,) = _SUM.unpack_from(data, start + _RECORD.size)
        if zlib.crc32(record) != checksum:
            return
        yield Record(*_RECORD.unpack(record))
