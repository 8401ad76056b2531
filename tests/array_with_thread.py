"""A module that starts a thread when it is imported, and replaces ``os.fork``."""

import functools
import os
import threading
from pathlib import Path

_ended = threading.Event()
_helper = threading.Thread(target=_ended.wait, name="helper", daemon=True)
_helper.start()
os.fork = functools.partial(os.fork)


def task(path: str) -> None:
    """Note whether this process has the thread."""
    has_thread = _helper in threading.enumerate()
    (Path(path) / f"{os.environ['NEMO_RUN_ARRAY_INDEX']}-{has_thread}").touch()
