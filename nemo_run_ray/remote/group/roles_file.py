"""What the driver knows of a group's roles, in a file beside the job's log, for ``status``.

Ray's log API serves it. Nothing is decided by it.
"""

from __future__ import annotations

import json
import os
from typing import Any, Dict, Optional

from ..files import write_file


def file_name(submission_id: str) -> str:
    """Name of the file in Ray's folder of logs."""
    return f"nemo_run_ray-{submission_id}.json"


class RolesFile:
    """Written anew at every change; absent when the output goes to no file of Ray's."""

    def __init__(self, submission_id: str) -> None:
        log = os.readlink("/proc/self/fd/1")
        self._path: Optional[str] = None
        if os.path.basename(log) == f"job-driver-{submission_id}.log":
            self._path = os.path.join(os.path.dirname(log), file_name(submission_id))
        self._last = ""

    def write(self, values: Dict[str, Any]) -> None:
        text = json.dumps(values)
        if self._path is None or text == self._last:
            return
        try:
            write_file(self._path, text)
        except OSError:  # a full disk: the group goes on, and nobody sees its roles
            return
        self._last = text
