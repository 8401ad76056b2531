"""One replica of a role on its node: ports, processes, readiness, output, end.

The replica's actor starts this process and passes orders and reports on::

    actor (a worker of Ray) ══ socket ══ this process, no relative of any worker; adopts orphans
                                            ├── process 0 of the role, in a session of its own
                                            └── process 1 …

Its parent is a guard that does nothing but end what is left when this process is killed.

When the actor dies, for whatever reason, the socket ends and all processes are killed: by then Ray
may have given the GPUs to somebody else.

Orders and reports are JSON, one a line. Orders: ``prepare``, ``start``, ``end``. Reports:
``prepared``, ``unprepared``, ``ready``, ``unready``, ``exited``, ``text``, ``failed``.
"""

from __future__ import annotations

import errno
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import time
import traceback
from typing import Any, Dict, List, Mapping, NoReturn, Optional, Sequence

from .. import FOLDER
from ..node import command
from ..node.missing_modules import explain
from ..node.output import CHUNK_BYTES, Lines
from ..node.process import describe_exit
from ..node.rundir import RunDir, run_dirs
from ..node.tree import (
    ENDING,
    ROUND_S,
    TAG,
    Tree,
    adopt_orphans,
    before_exec,
    collect,
    explain_start,
    sweep,
    wake_at,
)
from ..spec import RoleSpec, from_json
from .probe import Probing

#: Bytes of reports that wait for the actor before the output is no longer read.
_UNSENT_MAX = 4 * 2**20
_IDLE_S = 60.0
#: Variables by which a worker knows its raylet and job; a role that is a Ray program has others.
_OF_WORKER = ("RAY_JOB_ID", "RAY_RAYLET_PID")


def main(argv: Sequence[str]) -> NoReturn:
    """Become the process of a replica; ``argv`` is the package's folder and the socket's number."""
    folder, number = argv
    if os.fork():
        os._exit(0)
    os.setsid()
    for one in ENDING:  # whoever stops the worker above us closes the socket as well
        signal.signal(one, signal.SIG_IGN)
    command.restore_tmpdir()
    channel = socket.socket(fileno=int(number))
    adopt_orphans()
    child = os.fork()
    if child:
        channel.close()
        _guard(child)
    replica = ReplicaProcess(channel, folder)
    try:
        replica.serve()
    except Exception as error:  # the last frame of this process: its actor is whom it can tell
        traceback.print_exc()  # into the worker's log
        replica.fail(f"our process failed: {type(error).__name__}: {error}")
    finally:
        replica.abandon()
        os._exit(0)


def _guard(child: int) -> NoReturn:
    """Outlive the replica's process and end what it can leave behind only by being killed."""
    while os.wait()[0] != child:
        pass  # an orphan of a replica's that is dead by now
    tree = Tree(child, adopts=True)
    while tree.alive():
        tree.signal(signal.SIGKILL)
        tree.reap()
        time.sleep(ROUND_S)
    os._exit(0)


class ReplicaProcess:
    """Everything of one replica, in one loop without threads."""

    def __init__(self, channel: socket.socket, folder: str) -> None:
        self._channel = channel
        self._channel.setblocking(False)
        self._folder = folder
        self._orders = b""
        self._unsent = bytearray()
        self._wake = wake_at(signal.SIGCHLD)
        self._tree = Tree(0, adopt_orphans())
        self._run_dir: Optional[RunDir] = None
        self._ranks: List[_Rank] = []
        self._probing: Optional[Probing] = None
        self._deadline: Optional[float] = None  # when SIGTERM becomes SIGKILL
        self._told_to_end = False
        self._held: Dict[str, socket.socket] = {}  # ports, until the role's processes take them

    def serve(self) -> None:
        """Until the actor is gone."""
        while True:
            ready = self._wait()
            if self._channel in ready and not self._take_orders():
                return
            for rank in self._ranks:
                if rank.fd in ready:
                    self._report_text(rank.read())
            self._reap()
            self._go_on()
            self._send()

    def abandon(self) -> None:
        """Kill what runs, now, and remove the folders."""
        while self._tree.alive():
            self._tree.signal(signal.SIGKILL)
            self._reap()
            time.sleep(ROUND_S)
        if self._run_dir is not None and not self._role.task.keep_run_dir:
            self._run_dir.remove()
        shutil.rmtree(self._folder, ignore_errors=True)

    def fail(self, words: str) -> None:
        """Report that this process cannot go on."""
        self._report("failed", words=words)
        self._channel.setblocking(True)
        self._send()

    # ------------------------------------------------------------------ orders and reports

    def _wait(self) -> List[Any]:
        reading: List[Any] = [self._channel, self._wake]
        writing: List[Any] = [self._channel] if self._unsent else []
        if len(self._unsent) < _UNSENT_MAX:
            reading += [rank.fd for rank in self._ranks if rank.fd is not None]
        asking = self._probing.socket if self._probing is not None else None
        if asking is not None and self._probing is not None:
            (reading if self._probing.is_asked else writing).append(asking)
        busy = self._deadline is not None or any(one.code is not None for one in self._ranks)
        timeout_s = ROUND_S if busy else 0.2 if self._probing is not None else _IDLE_S
        ready, writable, _ = select.select(reading, writing, [], timeout_s)
        if self._wake in ready:
            os.read(self._wake, 1024)
        return ready + writable

    def _take_orders(self) -> bool:
        """Carry out what has arrived; ``False`` when the actor is gone."""
        try:
            data = self._channel.recv(CHUNK_BYTES)
        except BlockingIOError:
            return True  # it was ready for writing
        except OSError:
            return False
        *lines, self._orders = (self._orders + data).split(b"\n")
        for line in lines:
            order = json.loads(line)
            {"prepare": self._prepare, "start": self._start, "end": self._end}[order["do"]](order)
        return bool(data)

    def _report(self, kind: str, **values: Any) -> None:
        self._unsent += json.dumps({"at": kind, **values}).encode() + b"\n"

    def _report_text(self, text: str) -> None:
        if text:
            self._report("text", text=text)

    def _send(self) -> None:
        while self._unsent:
            try:
                sent = self._channel.send(self._unsent[:CHUNK_BYTES])
            except BlockingIOError:
                return
            except OSError:
                return  # the actor is gone; the next read of the socket says so
            del self._unsent[:sent]

    # ------------------------------------------------------------------ before the start

    def _prepare(self, order: Mapping[str, Any]) -> None:
        role = from_json(order["role"])
        if not isinstance(role, RoleSpec):
            raise ValueError("the order to prepare holds no role")
        self._role, self._index = role, int(order["index"])
        self._address, self._tag = str(order["address"]), str(order["tag"])
        try:
            run_dir = self._run_dir = RunDir(order["run_dir"])
            code = os.path.join(self._folder, order["code"]) if role.task.has_code else None
            run_dir.create(os.path.join(FOLDER, "payload"), order["job"], code)
            given = {**_of_node(role), **order["given"]}
            # As Ray sets it for a job: first the code, then what travels with it.
            paths = [run_dir.code, os.path.dirname(FOLDER), given.get("PYTHONPATH", "")]
            given["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
            self._env = command.environment(role.task, run_dir, given, order["secrets"])
            ports = self._take_ports()
        except (OSError, ValueError) as error:
            self._report("unprepared", words=str(error))
            return
        self._report("prepared", ports=ports)

    def _take_ports(self) -> Dict[str, int]:
        """Reserve the role's ports: free ones are chosen, the others must be free."""
        for name, port in self._role.ports.items():
            holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                holder.bind(("", port))
                # Taken back, so that no other replica can reserve the same one. Nobody listens on
                # it: who connects too early is refused, and can try again.
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            except OSError as error:
                taken = "is taken" if error.errno == errno.EADDRINUSE else "cannot be had"
                raise OSError(
                    f"the port {port} ({name!r}), which the role {self._role.name!r} asks for, "
                    f"{taken} on node {socket.gethostname()}: {error.strerror}. Ask for another "
                    "one, or for 0, which is a free one"
                ) from error
            self._held[name] = holder
        self._ports = {name: one.getsockname()[1] for name, one in self._held.items()}
        return self._ports

    # ------------------------------------------------------------------ start and end

    def _start(self, order: Mapping[str, Any]) -> None:
        for holder in self._held.values():
            holder.close()
        self._held.clear()
        self._env.update(order["env"])
        for name in self._role.task.env:  # they may hold macros, whose values are known now
            self._env[name] = command.expand(self._env[name], self._env)
        self._deadline = None
        self._ranks = []
        for local_rank in range(self._role.processes):
            env = {**self._env, **self._rank_variables(local_rank)}
            argv = command.words(self._role.task, self._folders, env)
            try:
                self._ranks.append(_Rank(self._spawn(argv, env, piped=True)))
            except (OSError, ValueError) as error:
                code, words = explain_start(argv, env, self._cwd, error)
                self._ranks.append(_Rank(None, code, words))
                return
        if self._role.ready is None:
            self._report("ready")
        else:
            self._probing = Probing(self._role.ready, self._address, self._ports, self._ask)

    def _rank_variables(self, local_rank: int) -> Dict[str, str]:
        if not self._role.ranked:
            return {}
        return {
            "RANK": str(self._index * self._role.processes + local_rank),
            "LOCAL_RANK": str(local_rank),
        }

    @property
    def _folders(self) -> RunDir:
        if self._run_dir is None:
            raise ValueError("a replica is started before it is prepared")
        return self._run_dir

    @property
    def _cwd(self) -> str:
        return self._role.task.cwd or self._folders.code

    def _spawn(
        self, argv: Sequence[str], env: Mapping[str, str], piped: bool
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            list(argv),
            env={**env, TAG: self._tag},
            cwd=self._cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if piped else subprocess.DEVNULL,
            stderr=subprocess.STDOUT if piped else subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=before_exec,
        )

    def _ask(self, words: Sequence[str]) -> int:
        """Start the command of a probe."""
        process = self._spawn([command.expand(one, self._env) for one in words], self._env, False)
        process.returncode = 0  # the loop collects it; the object must not
        return process.pid

    def _end(self, order: Mapping[str, Any]) -> None:
        self._told_to_end = True
        if self._ranks and self._deadline is None:
            self._terminate()

    def _terminate(self) -> None:
        self._stop_probing()  # what it starts from now on would miss the signal
        self._deadline = time.monotonic() + self._role.task.grace_s
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
        # All are done and what they left is not, or one failed and the others wait for it.
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
        if answer is not None:
            self._probing = None
            if answer:
                self._report("unready", words=answer)
            else:
                self._report("ready")

    def _over(self) -> None:
        self._stop_probing()
        self._reap()  # what has died since the last time; nothing is left when we report
        for rank in self._ranks:
            while rank.fd is not None:
                self._report_text(rank.read())
        first = next((rank for rank in self._failed()), self._ranks[0])
        words = first.words or describe_exit(first.code or 0)
        if first.code and len(self._ranks) > 1:
            words = f"process {self._ranks.index(first)}: {words}"
        if first.code and not first.words and not self._told_to_end:
            self._explain()
        if self._role.task.keep_run_dir:
            kept = f"nemo_run_ray: the run directory is kept: {self._folders.root}\n"
            self._report_text(kept)
        self._report("exited", code=first.code, words=words)
        self._ranks = []
        self._deadline = None

    def _failed(self) -> List[_Rank]:
        failed = [rank for rank in self._ranks if rank.code]
        return sorted(failed, key=lambda rank: rank.ended_at)

    def _explain(self) -> None:
        config = self._role.task.config
        if config is not None:
            hint = explain(os.path.join(self._folders.root, config), self._env, self._cwd)
            if hint is not None:
                self._report_text(f"nemo_run_ray: {hint}\n")


def _of_node(role: RoleSpec) -> Dict[str, str]:
    """What the node has set: the worker's environment without what is about the worker alone."""
    env = {name: value for name, value in os.environ.items() if name not in _OF_WORKER}
    if env.get("OMP_NUM_THREADS", "1") == "1":  # Ray's, for a worker that reserves nothing
        env["OMP_NUM_THREADS"] = str(max(1, int(role.resources.get("CPU", 0))))
    return env


def clean_up(tag: str, run_dir: str) -> int:
    """End what a killed replica process left, from its actor; how many processes there were."""
    left = sweep(tag)
    RunDir(run_dir, base=run_dirs(command.tmpdir())).remove()
    return left


class _Rank:
    """One process of the role's, and its output."""

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
        self.code, self.ended_at = code, time.monotonic()
