"""The process that ends an embedded Ray which nobody uses any more.

It starts with the Ray and ends with it. It is run as a file, without this package's imports, so
that it needs 10 MB; what it finds idle is stopped by another process, in ``cli/clusters.py``.
"""

import http.client
import json
import os
import subprocess
import sys
import time
import urllib.request
from typing import Any

#: Seconds between two looks at most, and for an answer of the dashboard.
_LOOK_MAX_S, _ANSWER_S = 60.0, 30.0
_ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
_STOP = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from nemo_run_ray.cli.clusters import stop_unused; stop_unused(sys.argv[2])"
)


def main(folder: str, root: str, idle_timeout_s: float) -> None:
    """Stop the embedded Ray when no user has lived and no job has run for so long.

    Args:
        folder: with its ``state.json``.
        root: its own folder, which tells it from a later one.
        idle_timeout_s: how long.
    """
    rows: list[Any] | None = None
    used_at = time.monotonic()
    while True:
        time.sleep(min(idle_timeout_s / 10, _LOOK_MAX_S))
        try:
            with open(os.path.join(folder, "state.json"), encoding="utf-8") as file:
                state = json.load(file)
        except (OSError, ValueError):
            return
        if state["root"] != root or not _lives(state["pid"], state["born"]):
            return
        before, is_used = rows, state["keep"] or any(_lives(*user) for user in state["users"])
        if not is_used:
            rows = _jobs(folder, state["url"])
        # A table that has changed had a job that ran; without an answer nothing is known.
        if is_used or rows is None or rows != before or _is_busy(rows):
            used_at = time.monotonic()
        elif time.monotonic() - used_at >= idle_timeout_s:
            package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
            # All that has the variable with the Ray's folder is ended with it.
            env = {name: value for name, value in os.environ.items() if value != root}
            words = [sys.executable, "-c", _STOP, package, folder]
            subprocess.run(words, env=env, check=False)
            used_at = time.monotonic()  # somebody came meanwhile


def _jobs(folder: str, url: str) -> list[Any] | None:
    """The rows of the job table; ``None`` without an answer."""
    try:
        with open(os.path.join(folder, "token"), encoding="ascii") as file:
            headers = {"Authorization": f"Bearer {file.read().strip()}"}
        request = urllib.request.Request(f"{url}/api/jobs/", headers=headers)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=_ANSWER_S) as answer:
            rows = json.load(answer)
    except (OSError, ValueError, http.client.HTTPException):
        return None
    return rows if isinstance(rows, list) else None


def _is_busy(rows: list[Any]) -> bool:
    return any(not isinstance(row, dict) or row.get("status") not in _ENDED for row in rows)


def _lives(pid: int, born: str) -> bool:
    """Whether a process lives, by its identity in the state: the boot, and the ticks since then."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return False
    return fields[0] not in (b"Z", b"X") and born.endswith(f"/{int(fields[19])}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
