"""Copies of the logs in Ray's folder, for who looks at them after the job."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Callable, Optional

from ..files import replacing
from .commands import Command, Commands

#: Folder of the logs of jobs, in that of the run, and what is kept of each of them.
JOB_LOGS = "job_logs"
_LOG_BYTES = 64 * 2**20
#: Copies what has changed since the last time; Ray removes a log now and then while it is copied.
#: A copy that breaks off, on a full disk or at the end of the run, leaves a torn file that is newer
#: than its log. So all are copied again after one that has not ended well.
_COPY = """\
cd "$1" && mkdir -p "$2" || exit
only_newer=-u
[ ! -e "$2/.unfinished" ] || only_newer=
: > "$2/.unfinished" || exit
code=0
for name in session_2*; do
  [ ! -d "$name/logs" ] && continue
  mkdir -p "$2/$name" && cp -rp $only_newer "$name/logs" "$2/$name/" || code=$?
done
[ $code -ne 0 ] || rm "$2/.unfinished"
exit $code
"""
#: Seconds for the last copy of Ray's logs, at least and at most, and for those of its jobs: Slurm,
#: and the job's script, wait for the head to leave.
_FINISH_MIN_S, _FINISH_S, _KEEP_S = 1.0, 10.0, 12.0


class LogCopies:
    """Copies Ray's logs into the job's folder now and then.

    A process of its own does it, so that the head goes on showing that it lives: the folder may be
    slow, and the logs large.

    Args:
        temp_dir: Ray's folder.
        target: where the copies go, a folder for each of Ray's sessions.
        pause_s: from one copy to the next; ``None`` copies nothing.
        commands: starts the process.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        temp_dir: str,
        target: str,
        pause_s: Optional[float],
        commands: Commands,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._words = ["sh", "-c", _COPY, "copy", temp_dir, target]
        self._pause_s = pause_s
        self._commands = commands
        self._clock = clock
        self._copied_at = clock()
        self._last: Optional[Command] = None

    def step(self) -> None:
        """Begin a copy when it is time to, and the last one has ended."""
        if self._pause_s is None or self._clock() - self._copied_at < self._pause_s:
            return
        if self._last is None or self._last.exit_code is not None:
            with suppress(OSError):  # no process is to be had now; the next pause tries again
                self._begin()

    def finish(self, limit_s: float) -> None:
        """Copy what there is now, and wait for that, but not for long.

        Args:
            limit_s: seconds that the head has for it; it waits one second all the same.
        """
        if self._pause_s is not None:
            copy = self._begin()
            deadline = time.monotonic() + min(max(limit_s, _FINISH_MIN_S), _FINISH_S)
            while copy.exit_code is None and time.monotonic() < deadline:
                time.sleep(0.05)
                self._commands.reap()

    def _begin(self) -> Command:
        self._copied_at = self._clock()
        self._last = self._commands.start("log copies", self._words, os.devnull, os.environ)
        return self._last


def keep_job_logs(temp_dir: str, target: str) -> None:
    """Keep the logs of Ray's jobs, of long ones the end; what cannot be copied is left out.

    The newest are copied first, and none after some seconds: Slurm ends this program soon.

    Args:
        temp_dir: Ray's folder on this node.
        target: a folder that is shared by the nodes.
    """
    import glob  # no node needs it to start
    import shutil

    deadline = time.monotonic() + _KEEP_S
    paths = glob.glob(os.path.join(temp_dir, "session_2*", "logs", "job-driver-*.log"))
    for path in sorted(paths, key=_changed_at, reverse=True):
        if time.monotonic() >= deadline:
            return
        with suppress(OSError):
            os.makedirs(target, exist_ok=True)
            with (
                open(path, "rb") as log,
                replacing(os.path.join(target, os.path.basename(path))) as file,
            ):
                log.seek(max(0, os.fstat(log.fileno()).st_size - _LOG_BYTES))
                shutil.copyfileobj(log, file)


def _changed_at(path: str) -> float:
    with suppress(OSError):
        return os.path.getmtime(path)
    return 0.0
