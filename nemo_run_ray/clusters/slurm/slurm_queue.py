"""What Slurm says of this user's jobs; all programs of a machine ask once in half a minute."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nemo_run.config import get_nemorun_home

from nemo_run_ray.clusters.slurm.login import Login
from nemo_run_ray.errors import ClusterError
from nemo_run_ray.remote.files import write_file
from nemo_run_ray.remote.trust import why_untrusted

#: Seconds between two questions to Slurm's controller, which serves everybody.
PAUSE_S = 30.0
_COMMAND = "timeout 20 squeue -h -a -u \"$(id -un)\" -o '%A|%T|%r|%S|%Z'"
_NEVER: tuple[float, str | None] = (float("-inf"), None)
#: When this process has asked last, and Slurm's answer, by the file that it is kept in.
_asked: dict[Path, tuple[float, str | None]] = {}


@dataclass(frozen=True)
class QueuedJob:
    """One job of this user, as ``squeue`` tells it.

    Attributes:
        number: Slurm's.
        state: Slurm's word, such as PENDING.
        reason: why it does not run yet; ``None`` in text when there is none.
        start: when it began, or when Slurm expects it to; ``N/A`` when Slurm does not know.
        folder: its working directory.
    """

    number: str
    state: str
    reason: str
    start: str
    folder: str

    @property
    def waits(self) -> bool:
        return self.state in ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD")


class SlurmQueue:
    """The jobs of this user on one Slurm.

    Args:
        login: where ``squeue`` is.
        clock: seconds since 1970, the same for all processes of this machine.
    """

    def __init__(self, login: Login, clock: Callable[[], float] = time.time) -> None:
        self._login = login
        self._clock = clock
        # A home may be shared by machines: their clocks differ, and so may their Slurms.
        chosen = [os.environ.get(name, "") for name in ("SLURM_CONF", "SLURM_CLUSTERS")]
        parts = (socket.gethostname(), _machine(), *chosen, login.key)
        digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
        folder = Path(get_nemorun_home(), "ray_slurm").absolute()
        self._path, self._lock_path = folder / f"{digest}.json", folder / f"{digest}.lock"

    def jobs(self, after: float = 0.0) -> list[QueuedJob] | None:
        """What Slurm said last; ``None`` when nobody has asked since a moment, or nothing is known.

        Args:
            after: the answer must be younger than this moment, in seconds since 1970.

        Raises:
            Unanswered: the host with Slurm cannot be reached now.
        """
        from filelock import FileLock, Timeout

        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with FileLock(self._lock_path, timeout=PAUSE_S):
                at, text = self._answer()
        except Timeout:
            return None
        except OSError:  # NeMo-Run's home is full: this process has its own answer
            at, text = self._answer()
        return None if text is None or at < after else _jobs(text)

    def _answer(self) -> tuple[float, str | None]:
        """When Slurm was asked last, and what it said; it is asked again when it is time to."""
        now = self._clock()
        for at, text in (self._read(), _asked.get(self._path, _NEVER)):
            if at <= now < at + PAUSE_S:
                return at, text
        text = self._ask()
        _asked[self._path] = now, text
        with contextlib.suppress(OSError):  # others ask for themselves
            write_file(self._path, json.dumps({"at": now, "text": text}))
        return now, text

    def _ask(self) -> str | None:
        try:
            return self._login.run(_COMMAND)
        except ClusterError as error:
            if type(error) is not ClusterError:
                raise
            return None  # its controller is away

    def _read(self) -> tuple[float, str | None]:
        if why_untrusted(str(self._path)):
            return _NEVER
        try:
            row = json.loads(self._path.read_text(encoding="utf-8"))
            return float(row["at"]), row["text"]
        except (OSError, ValueError, KeyError, TypeError):
            return _NEVER


def _machine() -> str:
    """What tells this machine from others of its name; empty where nothing does."""
    with contextlib.suppress(OSError):
        return Path("/etc/machine-id").read_text(encoding="ascii").strip()
    return ""


def _jobs(text: str) -> list[QueuedJob]:
    rows = (line.split("|", 4) for line in text.splitlines())
    return [QueuedJob(*row) for row in rows if len(row) == 5]
