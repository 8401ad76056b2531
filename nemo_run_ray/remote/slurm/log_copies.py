"""Copies of the logs in Ray's folder, for who looks at them after the job."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from typing import Optional


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
