"""One replica of a role on its node: ports, processes, readiness, output, end.

The replica's actor starts this process and passes orders and reports on::

    actor (a worker of Ray) ══ socket ══ this process, no relative of any worker; adopts orphans
                                            ├── process 0 of the role, in a session of its own
                                            └── process 1 …

Its parent is a guard that does nothing but end what is left when this process is killed.

When the actor dies, for whatever reason, the socket ends and all processes are killed: by then Ray
may have given the GPUs to another job.

Orders and reports are JSON, one a line. Orders: ``prepare``, ``start``, ``end``. Reports:
``prepared``, ``unprepared``, ``waiting``, ``ready``, ``unready``, ``exited``, ``text``, ``failed``.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import time
from typing import Any, List, Mapping, NoReturn, Optional, Sequence

from ..hosts.relay import Channel, stay
from ..hosts.workspace import Workspace
from ..node.output import CHUNK_BYTES, Lines
from ..node.probe import Probing
from ..node.supervise import (
    ROUND_S,
    Tree,
    adopt_orphans,
    before_exec,
    collect,
    describe_exit,
    explain_start,
    wake_at,
)

#: Seconds of one turn of the loop when there is nothing to look after.
_IDLE_S = 60.0


def main(argv: Sequence[str]) -> NoReturn:
    """Become the process of a replica; ``argv`` is the package's folder and the socket's number."""
    stay(argv, ReplicaProcess)


class Rank:
    """One process of the role, and its output.

    Args:
        process: the process, or ``None`` when it could not be started.
        code: its exit code, when it could not be started.
        words: why it could not be started.
    """

    def __init__(
        self,
        process: Optional[subprocess.Popen[bytes]],
        code: Optional[int] = None,
        words: str = "",
    ) -> None:
        self.pid = process.pid if process is not None else None
        self.code = code
        self.words = words
        self.ended_at = time.monotonic()
        self.fd: Optional[int] = None
        self._lines = Lines()
        if process is not None and process.stdout is not None:
            self.fd = os.dup(process.stdout.fileno())
            process.stdout.close()
            process.returncode = 0  # the loop collects it; the object must not

    def read(self) -> str:
        """The lines that are complete now; called when there is something to read."""
        if self.fd is None:
            return ""
        data = os.read(self.fd, CHUNK_BYTES)
        if not data:
            os.close(self.fd)
            self.fd = None
        return self._lines.feed(data)

    def ended(self, code: int) -> None:
        """Note the exit code; the loop has collected the process."""
        self.code, self.ended_at = code, time.monotonic()


class ReplicaProcess:
    """Everything of one replica, in one loop without threads."""

    def __init__(self, end: socket.socket, folder: str) -> None:
        self._channel = Channel(end)
        self._folder = folder
        self._wake = wake_at(signal.SIGCHLD)
        self._tree = Tree(0, adopt_orphans())
        self._workspace: Optional[Workspace] = None
        self._index = 0
        self._ranks: List[Rank] = []
        self._probing: Optional[Probing] = None
        self._deadline: Optional[float] = None  # when SIGTERM becomes SIGKILL
        self._told_to_end = False

    def serve(self) -> None:
        """Serve until the actor is gone."""
        while True:
            ready = self._wait()
            if self._channel in ready and not self._obey():
                return
            for rank in self._ranks:
                if rank.fd in ready:
                    self._channel.report_text(rank.read())
            self._reap()
            self._go_on()
            self._channel.send()

    def abandon(self) -> None:
        """Kill what runs, now, and remove the folders."""
        while self._tree.alive():
            self._tree.signal(signal.SIGKILL)
            self._reap()
            time.sleep(ROUND_S)
        if self._workspace is not None:
            self._workspace.remove()
        shutil.rmtree(self._folder, ignore_errors=True)

    def fail(self, words: str) -> None:
        """Report that this process cannot go on."""
        self._channel.report("failed", words=words)
        self._channel.send_all()

    def _wait(self) -> List[Any]:
        reading: List[Any] = [self._channel, self._wake]
        writing: List[Any] = [self._channel] if self._channel.has_unsent else []
        if not self._channel.is_full:
            reading += [rank.fd for rank in self._ranks if rank.fd is not None]
        asking = self._probing.socket if self._probing is not None else None
        if asking is not None and self._probing is not None:
            (reading if self._probing.is_asked else writing).append(asking)
        busy = self._deadline is not None or any(rank.code is not None for rank in self._ranks)
        timeout_s = ROUND_S if busy else 0.2 if self._probing is not None else _IDLE_S
        ready, writable, _ = select.select(reading, writing, [], timeout_s)
        if self._wake in ready:
            os.read(self._wake, 1024)
        return ready + writable

    # ------------------------------------------------------------------ orders

    def _obey(self) -> bool:
        """Carry out what has arrived; ``False`` when the actor is gone."""
        orders = self._channel.orders()
        if orders is None:
            return False
        for order in orders:
            {"prepare": self._prepare, "start": self._start, "end": self._end}[order["do"]](order)
        return True

    def _prepare(self, order: Mapping[str, Any]) -> None:
        self._workspace, self._index = Workspace(order), int(order["index"])
        try:
            self._workspace.prepare(self._folder)
        except (OSError, ValueError) as error:
            self._channel.report("unprepared", words=str(error))
            return
        self._channel.report("prepared", ports=self._workspace.ports)

    def _start(self, order: Mapping[str, Any]) -> None:
        place = self._prepared
        place.begin(order["env"])
        self._deadline = None
        self._ranks = []
        for local_rank in range(place.role.processes):
            rank = self._start_rank(place, local_rank)
            self._ranks.append(rank)
            if rank.code is not None:
                return
        if place.role.ready is None:
            self._channel.report("ready")
        else:
            ready, ports = place.role.ready, place.ports
            self._probing = Probing(ready, place.address, ports, place.start_probe)

    def _start_rank(self, place: Workspace, local_rank: int) -> Rank:
        """Start one process of the role; it has ended already when it cannot be started."""
        role, variables = place.role, {}
        if role.ranked:
            rank = self._index * role.processes + local_rank
            variables = {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
        argv, env, cwd = place.words(role.task.argv, variables)
        try:
            process = subprocess.Popen(
                argv,
                env=env,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=before_exec,
            )
            return Rank(process)
        except (OSError, ValueError) as error:
            return Rank(None, *explain_start(argv, env, cwd, error))

    def _end(self, order: Mapping[str, Any]) -> None:
        self._told_to_end = True
        if self._ranks and self._deadline is None:
            self._terminate()

    @property
    def _prepared(self) -> Workspace:
        if self._workspace is None:
            raise ValueError("a replica is started before it is prepared")
        return self._workspace

    # ------------------------------------------------------------------ the end

    def _terminate(self) -> None:
        self._stop_probing()  # what it starts from now on would miss the signal
        self._deadline = time.monotonic() + self._prepared.role.task.grace_s
        self._tree.signal(signal.SIGTERM)

    def _stop_probing(self) -> None:
        if self._probing is not None:
            self._probing.close()
            self._probing = None

    def _reap(self) -> None:
        for pid, code in collect():
            if self._probing is not None and pid == self._probing.pid:
                self._probing.reaped(code)
            for rank in self._ranks:
                if rank.pid == pid:
                    rank.ended(code)

    def _go_on(self) -> None:
        if not self._ranks:
            return
        codes = [rank.code for rank in self._ranks]
        # All have ended and what they left has not, or one failed and the others wait for it.
        ends = None not in codes or any(codes)
        if self._deadline is None and ends and self._tree.alive():
            self._terminate()
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._tree.signal(signal.SIGKILL)
        if None not in codes and not self._tree.alive():
            self._over()
        elif self._probing is not None:
            self._probe(self._probing)

    def _probe(self, probing: Probing) -> None:
        answer = probing.step()
        if answer is None:
            words = probing.waiting()
            if words is not None:
                self._channel.report("waiting", words=words)
        else:
            self._probing = None
            if answer:
                self._channel.report("unready", words=answer)
            else:
                self._channel.report("ready")

    def _over(self) -> None:
        self._stop_probing()
        self._reap()  # what has died since the last time; nothing is left at the report
        for rank in self._ranks:
            while rank.fd is not None:
                self._channel.report_text(rank.read())
        first = next((rank for rank in self._failed()), self._ranks[0])
        words = first.words or describe_exit(first.code or 0)
        if first.code and len(self._ranks) > 1:
            words = f"process {self._ranks.index(first)}: {words}"
        if first.code and not first.words and not self._told_to_end:
            hint = self._prepared.explain()
            if hint is not None:
                self._channel.report_text(f"nemo_run_ray: {hint}\n")
        if self._prepared.role.task.keep_run_dir:
            kept = f"nemo_run_ray: the run directory is kept: {self._prepared.root}\n"
            self._channel.report_text(kept)
        self._channel.report("exited", code=first.code, words=words)
        self._ranks = []
        self._deadline = None

    def _failed(self) -> List[Rank]:
        failed = [rank for rank in self._ranks if rank.code]
        return sorted(failed, key=lambda rank: rank.ended_at)
