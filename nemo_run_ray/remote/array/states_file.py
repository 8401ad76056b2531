"""The states of all elements, in a file that Ray's log API serves, written a piece at a time.

An array may have a million elements, and the driver has other things to do meanwhile.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from itertools import islice
from typing import IO, Iterator, Optional

from ..trust import open_own
from .progress import ArrayProgress, Stretch

#: Stretches that are written at once.
_PIECE = 500
#: Seconds from the end of one file to the beginning of the next one.
_AGAIN_S = 1.0


class StatesFile:
    """The file: a line for elements in a row about which the same is known, in JSON.

    Args:
        path: of the file; ``None`` when there is no place for it.

    Attributes:
        is_written: the whole file was, once. Before that, it is another driver's or not there.
    """

    def __init__(self, path: Optional[str]) -> None:
        self._path = path
        self._file: Optional[IO[str]] = None
        self._stretches: Iterator[Stretch] = iter(())
        self._begin_at = 0.0
        self.is_written = False

    def go_on(self, progress: ArrayProgress) -> None:
        """Write the next piece. A full disk leaves the last file as it is."""
        if self._path is None or (self._file is None and time.monotonic() < self._begin_at):
            return
        with suppress(OSError):
            self._write(self._path, progress)
            return
        self._give_up()

    def finish(self, progress: ArrayProgress) -> None:
        """Write all, as it is at the end."""
        self._give_up()
        self._begin_at = 0.0
        self.go_on(progress)
        while self._file is not None:
            self.go_on(progress)

    def _write(self, path: str, progress: ArrayProgress) -> None:
        if self._file is None:
            # Over many turns of the loop, so it is no context as ``files.replacing`` is.
            with suppress(FileNotFoundError):  # of a driver that died, or another user's link
                os.remove(f"{path}.part")
            fd = open_own(f"{path}.part", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            self._file = open(fd, "w", encoding="utf-8")  # noqa: SIM115
            self._stretches = progress.stretches()
        lines = [json.dumps(stretch) + "\n" for stretch in islice(self._stretches, _PIECE)]
        self._file.writelines(lines)
        if len(lines) < _PIECE:
            self._file.close()
            self._file = None
            os.replace(f"{path}.part", path)
            self.is_written = True
            self._begin_at = time.monotonic() + _AGAIN_S

    def _give_up(self) -> None:
        if self._file is not None and self._path is not None:
            with suppress(OSError):
                self._file.close()
            with suppress(OSError):
                os.remove(f"{self._path}.part")
        self._file = None
        self._begin_at = time.monotonic() + _AGAIN_S
