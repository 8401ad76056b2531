"""The process that stops an embedded Ray which nobody uses any more.

It starts with the Ray and ends with it. It is run as a file, without this package's imports, so
that it needs 10 MB. Another process stops what it has seen idle, see ``cli/clusters.py``.
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
    """Stop the embedded Ray when no user has lived and no job has run for some time.

    Args:
        folder: with its ``state.json``.
        root: its own folder, by which it differs from a later one.
        idle_timeout_s: seconds without a user and a job.
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
        if state["root"] != root or not lives(state["pid"], state["born"]):
            return
        before, is_used = rows, state["keep"] or any(lives(*user) for user in state["users"])
        if not is_used:
            rows = _jobs(folder, state["url"])
        # A job has run since the last look if the table has changed.
        if is_used or rows is None or rows != before or _is_busy(rows):
            used_at = time.monotonic()
        elif time.monotonic() - used_at >= idle_timeout_s:
            package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
            # What has the variable with the Ray's folder is ended with the Ray.
            env = {name: value for name, value in os.environ.items() if value != root}
            subprocess.run([sys.executable, "-c", _STOP, package, folder], env=env, check=False)
            used_at = time.monotonic()  # somebody came meanwhile


def ask(url: str, token: str, timeout_s: float = _ANSWER_S) -> Any:
    """The JSON that the dashboard of an embedded Ray answers with.

    Raises:
        OSError: it gives no answer, or another one.
    """
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            return json.load(answer)
    except (http.client.HTTPException, ValueError) as error:
        raise OSError(str(error)) from error


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


def lives(pid: int, born: str | None) -> bool:
    """Whether the process of that pid is the one with that identity."""
    return born is not None and born == process_identity(pid)


def _jobs(folder: str, url: str) -> list[Any] | None:
    """The rows of the job table; ``None`` without an answer."""
    try:
        with open(os.path.join(folder, "token"), encoding="ascii") as file:
            rows = ask(f"{url}/api/jobs/", file.read().strip())
    except OSError:
        return None
    return rows if isinstance(rows, list) else None


def _is_busy(rows: list[Any]) -> bool:
    return any(not isinstance(row, dict) or row.get("status") not in _ENDED for row in rows)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
