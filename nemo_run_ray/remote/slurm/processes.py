"""The processes of one node: Ray, sidecars, copies of logs, the driver. None outlives the program.

Each is started here, collected here with the orphans that the program adopts, and ended here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Dict, List, Mapping, Optional, Sequence, Set, Tuple

from ..files import write_file
from ..node.supervise import TAG, before_exec, collect, descendants, describe_exit, kill
from .settings import SANDBOX, Settings

if TYPE_CHECKING:
    from ..node.probe import Probing  # most nodes do without it

#: The part at the end of a log in which its last lines are looked for.
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
    """All processes below this one.

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
        """Start a command in a session of its own, whose output is appended to a log.

        Raises:
            OSError: the program, the folder or the log cannot be opened.
        """
        # The first command truncates the log, which may be that of another job.
        mode = "ab" if log in self._logs or log == os.devnull else "wb"
        self._logs.add(log)
        with open(log, mode) as output:
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

    def reap(self) -> None:
        """Collect the dead, adopted orphans too."""
        exit_codes = dict(collect())
        for command in self._all:
            command.exit_code = exit_codes.get(command.pid, command.exit_code)

    def stop(self, grace_s: float, keep: Sequence[Command] = ()) -> None:
        """End everything below this process: SIGTERM, ``grace_s`` seconds, SIGKILL.

        Args:
            grace_s: from SIGTERM to SIGKILL.
            keep: commands that continue, with what they have started.
        """
        deadline = time.monotonic() + grace_s
        terminated: Set[int] = set()  # a second SIGTERM makes some programs abort
        while True:
            self.reap()
            kept = {pid for one in keep for pid in (one.pid, *descendants(one.pid))}
            pids = set(descendants(os.getpid())) - kept
            if not pids:
                return
            is_late = time.monotonic() >= deadline
            for pid in pids if is_late else pids - terminated:
                kill(pid, signal.SIGKILL if is_late else signal.SIGTERM)
            terminated |= pids
            time.sleep(_ROUND_S)


def tail(path: str) -> str:
    """The last lines of a log, each behind ``| ``; empty without a log."""
    with suppress(OSError), open(path, "rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(file.tell() - _TAIL_BYTES, 0))
        lines = file.read().decode(errors="replace").split("\n")
        lines = [line.rstrip() for line in lines if line.strip()][-_TAIL_LINES:]
        return "".join(f"\n    | {line}" for line in lines)
    return ""


class Sidecars:
    """The sidecars of this node: started, probed until they are ready, and watched."""

    def __init__(self, settings: Settings, commands: Commands) -> None:
        self._settings = settings
        self._commands = commands
        self._running: Dict[str, Command] = {}
        self._probes: Dict[str, Probing] = {}
        self._ready: List[str] = []

    def start(self, env: Mapping[str, str]) -> None:
        """Start all of them.

        Args:
            env: of the job.

        Raises:
            OSError: a log cannot be written.
        """
        for sidecar in self._settings.sidecars:
            log = self._settings.sidecar_log(sidecar, self._settings.rank, self._settings.host)
            merged = {**env, **sidecar.env}
            argv = ["bash", "-c", sidecar.command]
            self._running[sidecar.name] = self._commands.start(sidecar.name, argv, log, merged)
            if sidecar.probe is None:
                self._ready.append(sidecar.name)
            else:
                from ..node.probe import Probing

                self._probes[sidecar.name] = Probing(sidecar.probe, "127.0.0.1", {}, merged)

    @property
    def running(self) -> List[Command]:
        return list(self._running.values())

    @property
    def ready(self) -> Tuple[str, ...]:
        return tuple(self._ready)

    def step(self) -> Optional[str]:
        """Ask the probes; the reason if a sidecar has died or never becomes ready.

        The caller has collected the dead.
        """
        for name, command in self._running.items():
            if command.exit_code is not None:
                when = "" if name in self._ready else " before it was ready"
                return (
                    f"the sidecar {name} has ended{when}: {describe_exit(command.exit_code)}. Its "
                    f"log, {command.log}, ends with:{tail(command.log)}"
                )
        for name, probing in list(self._probes.items()):
            answer = probing.step()
            if answer == "":
                del self._probes[name]
                self._ready.append(name)
                self._publish_ready(name)
            elif answer is not None:
                log = self._running[name].log
                return f"the sidecar {name} is {answer}. Its log, {log}, ends with:{tail(log)}"
        return None

    def _publish_ready(self, name: str) -> None:
        folder = self._settings.sandbox_ports
        if name == SANDBOX and folder:
            with suppress(OSError):  # for others to read; we have our own file
                write_file(os.path.join(folder, f"SANDBOX_READY_{self._settings.host}"), "")
