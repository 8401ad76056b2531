"""One element that runs: its process, its output, its end."""

from __future__ import annotations

import math
import os
import select
import signal
import time
from contextlib import suppress
from typing import Optional

from ..node.output import CHUNK_BYTES, Lines
from ..node.supervise import describe_exit
from .progress import Lease

#: Variables of every element: its index, from 0, and which attempt it is, from 1.
INDEX, ATTEMPT = "NEMO_RUN_ARRAY_INDEX", "NEMO_RUN_ATTEMPT"
#: Exit code of what was killed.
KILLED = 137
#: Characters of one element's output that are passed on.
OUTPUT_MAX = 16 * 2**20
#: Seconds beyond the grace period until it is said that something does not end.
_STUCK_S = 30.0
#: Characters of its last line that explain a failure.
_LAST_MAX = 200


class RunningElement:
    """An element in its slot.

    Args:
        lease: which attempt of which element.
        slot: where.
        pid: of its first process; a negative number until that is known.
        fd: where its output is read; ``None`` when it could not be started.
        code: its exit code, when it could not be started.
        words: why it could not be started.
    """

    def __init__(
        self,
        lease: Lease,
        slot: int,
        pid: int,
        fd: Optional[int],
        code: Optional[int] = None,
        words: str = "",
    ) -> None:
        self.lease, self.slot = lease, slot
        self.pid, self.fd = pid, fd
        self.code, self.words = code, words
        self._end_by: Optional[float] = None  # when it is killed that was told to end
        self._kill_at: Optional[float] = None  # of what its first process has left
        self.seconds = 0.0
        #: It has ended, and its exit code went to a process that was killed.
        self.is_lost = False
        #: How often a process was asked for.
        self.asked = 0
        self._began = time.monotonic()
        self._tell_at = math.inf
        self._lines = Lines()
        self._passed_on = 0
        self._last = ""

    def read(self) -> str:
        """The lines that are complete now; called when there is something to read."""
        if self.fd is None:
            return ""
        data = os.read(self.fd, CHUNK_BYTES)
        if not data:
            os.close(self.fd)
            self.fd = None
        return self._limited(self._lines.feed(data))

    def is_readable(self) -> bool:
        """Whether there is output that was not read yet, or its end."""
        if self.fd is None:
            return False
        poll = select.poll()  # select knows descriptors below 1024 only
        poll.register(self.fd, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> str:
        """Read no more; the last line, if it has no end. A process that hides may write on."""
        if self.fd is None:
            return ""
        os.close(self.fd)
        self.fd = None
        return self._limited(self._lines.feed(b""))

    def ended(self, code: int) -> None:
        """Note the exit code; the loop has collected the process."""
        now = time.monotonic()
        self.code, self.seconds, self._tell_at = code, now - self._began, now + _STUCK_S

    @property
    def is_ending(self) -> bool:
        """Whether it is being ended, or has ended and is not reported yet."""
        return self._end_by is not None or self.code is not None

    def end_by(self, until: float) -> None:
        """End it: SIGTERM now, or when its process is known.

        Args:
            until: when it is to be killed.
        """
        if self._end_by is None:
            self._end_by = until
            self.signal(signal.SIGTERM)

    def has_begun(self, pid: int) -> None:
        """Note its process, which was not known until now."""
        self.pid = pid
        if self._end_by is not None:
            self.signal(signal.SIGTERM)

    def kill_late(self, now: float) -> None:
        """Kill it when its time is over."""
        if self.is_late(now):
            self.signal(signal.SIGKILL)
            if self.pid > 0 and not os.path.exists(f"/proc/{self.pid}"):
                self.ended(KILLED)  # the process that forked it had its exit code

    def is_late(self, now: float) -> bool:
        """Whether it runs longer than it may."""
        return self.code is None and self._end_by is not None and now >= self._end_by

    def is_alone(self, now: float, grace_s: float) -> bool:
        """Whether its first process, which has ended, has left none; those that it has are ended.

        Args:
            now: the time.
            grace_s: seconds from SIGTERM to SIGKILL.
        """
        if self.pid < 0:  # it never began
            return True
        try:
            os.killpg(self.pid, 0)
        except (ProcessLookupError, PermissionError):
            return True
        if self._kill_at is None:
            self._kill_at = now + grace_s
            self.signal(signal.SIGTERM)
        elif now >= self._kill_at:
            self.signal(signal.SIGKILL)
        return False

    def is_stuck(self, now: float, grace_s: float) -> bool:
        """Whether it is to be said, once, that something does not end that it has left."""
        is_due = now >= self._tell_at + grace_s
        if is_due:
            self._tell_at = math.inf
        return is_due

    def signal(self, number: int) -> None:
        """Send a signal to its processes."""
        if self.pid > 0:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def why(self) -> str:
        """How it ended, in words, with the last line of its output when it has failed."""
        words = self.words or describe_exit(self.code or 0)
        return f"{words}: {self._last[:_LAST_MAX]}" if self.code and self._last else words

    def _limited(self, text: str) -> str:
        line = text.rstrip().rpartition("\n")[2].strip()
        self._last = line or self._last
        left = OUTPUT_MAX - self._passed_on
        self._passed_on += len(text)
        if len(text) <= left:
            return text
        if left < 0:
            return ""
        return f"{text[:left]}\nnemo_run_ray: no more of its output is passed on\n"
