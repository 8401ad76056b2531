"""A replica's place on its node: the run directory, the ports and the environment."""

from __future__ import annotations

import os
import socket
from typing import Dict, List, Sequence, Tuple

from .. import FOLDER
from ..node import command
from ..node.rundir import JOBS, RunDir
from ..node.supervise import SUPERVISOR_TAG, TAG
from ..spec import Env, Json, ProbeSpec, RoleSpec, from_json

#: Variables by which a worker knows its raylet and job, for which a role that is a Ray program has
#: others, and the mark of this package's own process.
_OF_WORKER = ("RAY_JOB_ID", "RAY_RAYLET_PID", SUPERVISOR_TAG)


class Workspace:
    """The place of one replica. Nothing is made or reserved before ``prepare``."""

    def __init__(self, order: Json):
        role = from_json(order["role"])
        assert isinstance(role, RoleSpec)
        self._order, self.role, self.address = order, role, str(order["address"])
        self._run_dir = RunDir(order["run_dir"])
        self.root = self._run_dir.root
        self._cwd = role.task.cwd or self._run_dir.code
        self._env: Dict[str, str] = {}
        self._held: Dict[str, socket.socket] = {}  # ports, until the role's processes take them
        self.ports: Dict[str, int] = {}

    # ------------------------------------------------------------------ before the start

    def prepare(self, folder: str) -> None:
        """Make the run directory and reserve the ports.

        Raises:
            OSError, ValueError: this node cannot host the replica; the message says why.
        """
        order, role, run_dir = self._order, self.role, self._run_dir
        code = f"{folder}/code" if role.task.has_code else None
        run_dir.create(f"{os.path.dirname(FOLDER)}/{JOBS}", order["job"], code)
        # The worker's environment without the variables about the worker alone.
        given = {name: value for name, value in os.environ.items() if name not in _OF_WORKER}
        if given.get("OMP_NUM_THREADS", "1") == "1":  # Ray's, for a worker that reserves nothing
            given["OMP_NUM_THREADS"] = str(max(1, int(role.resources.get("CPU", 0))))
        given.update(order["given"])
        # Ray sets it so for a job: first the code, then the archives that are sent with it.
        paths = [run_dir.code, os.path.dirname(FOLDER), given.get("PYTHONPATH", "")]
        given["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        self._env = command.environment(role.task, run_dir, given, order["secrets"])
        self._env[TAG] = order["tag"]
        for name, port in role.ports.items():  # free ones are chosen, the others must be free
            holder = self._held[name] = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                holder.bind(("", port))
            except OSError as error:
                raise OSError(
                    f"the port {port} ({name!r}), which the role {role.name!r} asks for, cannot be "
                    f"had on node {socket.gethostname()}: {error.strerror}. Ask for another one, "
                    "or for 0, which is a free one"
                ) from error
            # Taken back, so that no other replica can reserve the same one. No process listens on
            # it: a client that connects too early is refused, and can try again.
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            self.ports[name] = holder.getsockname()[1]

    def remove(self) -> None:
        """Remove the run directory, unless the task wants it to be kept."""
        if not self.role.task.keep_run_dir:
            self._run_dir.remove()

    # ------------------------------------------------------------------ start

    def begin(self, env: Env) -> None:
        """Let the processes have the ports, and the variables that are known only now."""
        for holder in self._held.values():
            holder.close()
        self._held.clear()
        self._env.update(env)
        for name in self.role.task.env:  # they may hold macros, whose values are known now
            self._env[name] = command.expand(self._env[name], self._env)

    def command(self, argv: Sequence[str], env: Env) -> Tuple[List[str], Dict[str, str], str]:
        """The exact words, all variables and the folder of a process with some of its own."""
        own = {**self._env, **self.variables(env), TAG: self._order["tag"]}
        task = self.role.task._replace(argv=tuple(argv))
        return command.argv_of(task, self._run_dir, own), own, self._cwd

    def variables(self, env: Env) -> Dict[str, str]:
        """The variables of one element as they are here: paths and NeMo-Run's macros replaced."""
        run_dir = self._run_dir
        return {name: command.expand(run_dir.map(value), self._env) for name, value in env.items()}

    def probe_command(self, probe: ProbeSpec) -> Tuple[ProbeSpec, Dict[str, str], str]:
        """The probe with this node's values in its command, and the command's place."""
        words = tuple(command.expand(word, self._env) for word in probe.command)
        return probe._replace(command=words), self._env, self._cwd
