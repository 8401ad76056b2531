"""The process that stops an embedded Ray which nobody uses any more.

It starts with the Ray and ends with it. It imports the standard library alone, so that it is small;
another process, which it starts, stops the Ray.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from time import monotonic

from .dashboard import DashboardClient, Unanswered

#: Seconds between two looks at most.
_LOOK_MAX_S = 60.0
_ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
_STOP = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from nemo_run_ray.cli.main import stop_unused; stop_unused(sys.argv[2])"
)


def main(folder: str, root: str, idle_timeout_s: float) -> None:
    """Stop the embedded Ray when no user has lived and no job has run for some time.

    Args:
        folder: with its ``state.json``.
        root: its own folder, by which it differs from a later one.
        idle_timeout_s: seconds without a user and a job.
    """
    rows = None
    used_at = monotonic()
    while True:
        time.sleep(min(idle_timeout_s / 10, _LOOK_MAX_S))
        try:
            state = json.loads(Path(folder, "state.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return
        if state["root"] != root or not is_running(state["pid"], state["born"]):
            return
        is_used = state["keep"] or any(is_running(*user) for user in state["users"])
        if not is_used:
            before, rows = rows, None
            with suppress(OSError, Unanswered):
                rows = DashboardClient(state["url"], Path(folder, "token").read_text).table()
            # A job has run since the last look if the table has changed.
            is_used = rows is None or rows != before
            is_used = is_used or any(row.get("status") not in _ENDED for row in rows or ())
        if is_used:
            used_at = monotonic()
        elif monotonic() - used_at >= idle_timeout_s:
            # Processes that have the variable with the Ray's folder are ended with the Ray.
            env = {name: value for name, value in os.environ.items() if value != root}
            package = str(Path(__file__).resolve().parents[2])
            subprocess.run([sys.executable, "-c", _STOP, package, folder], env=env, check=False)
            used_at = monotonic()  # somebody came meanwhile


def process_identity(pid: int) -> str | None:
    """A lasting name of the process of that pid; ``None`` when there is none, or a zombie.

    It consists of the boot and the ticks since then: a wall clock that is set changes neither.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    if fields[0] in (b"Z", b"X"):
        return None
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()}/{int(fields[19])}"


def is_running(pid: int, born: str | None) -> bool:
    """Whether the process of that pid is the one with that identity."""
    return born is not None and born == process_identity(pid)
