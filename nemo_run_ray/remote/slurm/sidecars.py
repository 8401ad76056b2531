"""The sidecars of one node: started, asked until they are ready, and watched."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Dict, List, Mapping, Optional, Tuple

from ..files import write_file
from ..node.supervise import describe_exit
from .commands import Command, Commands, tail
from .settings import SANDBOX, Settings, SidecarSpec

if TYPE_CHECKING:
    from ..node.probe import Probing  # most nodes do without it


class Sidecars:
    """What runs beside Ray on this node.

    Args:
        settings: of this node.
        commands: starts them.
        env: of the job.
    """

    def __init__(self, settings: Settings, commands: Commands, env: Mapping[str, str]) -> None:
        self._settings = settings
        self._commands = commands
        self._env = env
        self._running: Dict[str, Command] = {}
        self._probes: Dict[str, Probing] = {}
        #: Commands of probes that have not ended.
        self._asking: Dict[str, Command] = {}
        self._ready: List[str] = []

    def start(self) -> None:
        """Start all of them.

        Raises:
            OSError: a log cannot be written.
        """
        for sidecar in self._settings.sidecars:
            log = self._settings.sidecar_log(sidecar, self._settings.rank, self._settings.host)
            env = {**self._env, **sidecar.env}
            words = ["bash", "-c", sidecar.command]
            self._running[sidecar.name] = self._commands.start(sidecar.name, words, log, env)
            if sidecar.probe is None:
                self._ready.append(sidecar.name)
            else:
                from ..node.probe import Probing

                self._probes[sidecar.name] = Probing(
                    sidecar.probe,
                    "127.0.0.1",
                    {},
                    lambda words, it=sidecar: self._spawn_probe(it, list(words)),  # type: ignore[misc]
                )

    @property
    def running(self) -> List[Command]:
        return list(self._running.values())

    @property
    def ready(self) -> Tuple[str, ...]:
        return tuple(self._ready)

    def step(self) -> Optional[str]:
        """Go on; the reason when one has died or was given up. The dead have been collected."""
        for name, command in self._running.items():
            if command.exit_code is not None:
                when = "" if name in self._ready else " before it was ready"
                return (
                    f"the sidecar {name} has ended{when}: {describe_exit(command.exit_code)}. Its "
                    f"log, {command.log}, ends with:{tail(command.log)}"
                )
        for name, probing in list(self._probes.items()):
            asking = self._asking.get(name)
            if asking is not None and asking.exit_code is not None:
                del self._asking[name]
                probing.reaped(asking.exit_code)
            answer = probing.step()
            if answer == "":
                del self._probes[name]
                self._ready.append(name)
                self._tell(name)
            elif answer is not None:
                log = self._running[name].log
                return f"the sidecar {name} is {answer}. Its log, {log}, ends with:{tail(log)}"
        return None

    def _spawn_probe(self, sidecar: SidecarSpec, words: List[str]) -> int:
        env = {**self._env, **sidecar.env}
        command = self._commands.start(f"{sidecar.name} probe", words, os.devnull, env)
        self._asking[sidecar.name] = command
        return command.pid

    def _tell(self, name: str) -> None:
        folder = self._settings.sandbox_ports
        if name == SANDBOX and folder:
            with suppress(OSError):  # for others to read; we have our own file
                write_file(os.path.join(folder, f"SANDBOX_READY_{self._settings.host}"), "")
