"""One of the processes that a replica of a role consists of."""

from __future__ import annotations

import os
import subprocess
import time
from typing import Optional

from ..node.output import CHUNK_BYTES, Lines


class Rank:
    """One process of the role, and its output.

    Args:
        process: the process, or ``None`` when it could not be started.
        code: its exit code, when it could not be started.
        words: why it could not be started.
    """

    def __init__(
        self,
        process: Optional[subprocess.Popen[bytes]],
        code: Optional[int] = None,
        words: str = "",
    ) -> None:
        self.pid = process.pid if process is not None else None
        self.code = code
        self.words = words
        self.ended_at = time.monotonic()
        self.fd: Optional[int] = None
        self._lines = Lines()
        if process is not None and process.stdout is not None:
            self.fd = os.dup(process.stdout.fileno())
            process.stdout.close()
            process.returncode = 0  # the loop collects it; the object must not

    def read(self) -> str:
        """The lines that are complete now; called when there is something to read."""
        if self.fd is None:
            return ""
        data = os.read(self.fd, CHUNK_BYTES)
        if not data:
            os.close(self.fd)
            self.fd = None
        return self._lines.feed(data)

    def ended(self, code: int) -> None:
        """Note the exit code; the loop has collected the process."""
        self.code, self.ended_at = code, time.monotonic()
