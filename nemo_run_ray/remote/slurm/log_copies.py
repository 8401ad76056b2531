"""Copies of the logs in Ray's folder, for who looks at them after the job."""

from __future__ import annotations

import glob
import os
import shutil
import time
from contextlib import suppress
from typing import Optional

from ..files import replacing

#: Folder of the logs of jobs, in that of the run, and what is kept of each of them.
JOB_LOGS = "job_logs"
_LOG_BYTES = 64 * 2**20


class LogCopies:
    """Copies Ray's logs into the job's folder now and then.

    Args:
        temp_dir: Ray's folder.
        target: where the copies go, a folder for each of Ray's sessions.
        pause_s: from one copy to the next; ``None`` copies nothing.
    """

    def __init__(self, temp_dir: str, target: str, pause_s: Optional[float]) -> None:
        self._temp_dir = temp_dir
        self._target = target
        self._pause_s = pause_s
        self._copied_at = time.monotonic()

    def step(self) -> None:
        if self._pause_s is not None and time.monotonic() - self._copied_at >= self._pause_s:
            self.copy()

    def copy(self) -> None:
        """Copy what there is now."""
        self._copied_at = time.monotonic()
        if self._pause_s is None:
            return
        for name in os.listdir(self._temp_dir):
            source = os.path.join(self._temp_dir, name, "logs")
            if name.startswith("session_2") and os.path.isdir(source):
                target = os.path.join(self._target, name, "logs")
                with suppress(OSError, shutil.Error):  # Ray removes a log while it is copied
                    shutil.copytree(source, target, dirs_exist_ok=True)


def keep_job_logs(temp_dir: str, target: str) -> None:
    """Keep the logs of Ray's jobs, of long ones the end; what cannot be copied is left out.

    Args:
        temp_dir: Ray's folder on this node.
        target: a folder that is shared by the nodes.
    """
    for path in glob.glob(os.path.join(temp_dir, "session_2*", "logs", "job-driver-*.log")):
        with suppress(OSError):
            os.makedirs(target, exist_ok=True)
            with (
                open(path, "rb") as log,
                replacing(os.path.join(target, os.path.basename(path))) as file,
            ):
                log.seek(max(0, os.fstat(log.fileno()).st_size - _LOG_BYTES))
                shutil.copyfileobj(log, file)
