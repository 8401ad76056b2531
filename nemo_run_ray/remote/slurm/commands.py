"""The processes of one node: Ray, sidecars, the driver; none of them outlives the node program."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from typing import Dict, List, Mapping, Optional, Sequence, Set

from ..node.supervise import TAG, before_exec, collect, descendants, kill

#: Bytes at the end of a log in which its last lines are looked for.
_TAIL_BYTES = 8192
_TAIL_LINES = 12
_ROUND_S = 0.1


class Command:
    """A process that was started, and its exit code once it has ended."""

    def __init__(self, name: str, pid: int, log: str) -> None:
        self.name = name
        self.pid = pid
        self.log = log
        self.exit_code: Optional[int] = None


class Commands:
    """What runs on this node.

    Args:
        tag: is in the environment of everything that is started, for the guard's last sweep.
    """

    def __init__(self, tag: str) -> None:
        self._tag = tag
        self._all: List[Command] = []
        self._logs: Set[str] = set()

    def start(
        self,
        name: str,
        argv: Sequence[str],
        log: str,
        env: Mapping[str, str],
        cwd: Optional[str] = None,
    ) -> Command:
        """Start a command in a session of its own; what it prints goes to the end of a log.

        Raises:
            OSError: the program, the folder or the log is not to be had.
        """
        how = "ab" if log in self._logs or log == os.devnull else "wb"  # not that of another job
        self._logs.add(log)
        with open(log, how) as output:
            process = subprocess.Popen(
                list(argv),
                env={**env, TAG: self._tag},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=before_exec,
            )
        process.returncode = 0  # it is collected below, with the orphans
        command = Command(name, process.pid, log)
        self._all.append(command)
        return command

    def reap(self) -> Dict[int, int]:
        """Collect the dead, adopted orphans too; exit codes by pid, 128 + n after signal n."""
        ended = dict(collect())
        for command in self._all:
            if command.pid in ended:
                command.exit_code = ended[command.pid]
        return ended

    def stop(self, grace_s: float, keep: Sequence[Command] = ()) -> None:
        """End everything below this process: SIGTERM, ``grace_s`` seconds, SIGKILL.

        Args:
            grace_s: from the one to the other.
            keep: commands that go on, with what they have started.
        """
        deadline = time.monotonic() + grace_s
        number = signal.SIGTERM
        told: Dict[int, int] = {}
        while True:
            self.reap()
            kept = {pid for process in keep for pid in (process.pid, *descendants(process.pid))}
            left = [pid for pid in descendants(os.getpid()) if pid not in kept]
            if not left:
                return
            if time.monotonic() >= deadline:
                number = signal.SIGKILL
            for pid in left:
                if told.get(pid) != number:  # a second SIGTERM makes some programs give up at once
                    told[pid] = number
                    kill(pid, number)
            time.sleep(_ROUND_S)


def tail(path: str) -> str:
    """The last lines of a log, each behind ``| ``; empty when there is none."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(file.tell() - _TAIL_BYTES, 0))
        lines = file.read().decode(errors="replace").split("\n")
        words = [line.rstrip() for line in lines if line.strip()][-_TAIL_LINES:]
        return "".join(f"\n    | {line}" for line in words)
    return ""
