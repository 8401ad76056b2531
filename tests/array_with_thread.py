"""A module that starts a thread when it is imported, as some libraries do."""

from __future__ import annotations

import os
import threading
from pathlib import Path

_ended = threading.Event()
_helper = threading.Thread(target=_ended.wait, name="helper", daemon=True)
_helper.start()


def task(path: str) -> None:
    """Note whether this process has the thread."""
    has_thread = _helper in threading.enumerate()
    (Path(path) / f"{os.environ['NEMO_RUN_ARRAY_INDEX']}-{has_thread}").touch()
