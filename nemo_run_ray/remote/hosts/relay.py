"""The link between a driver and a process of this package on a node, by way of an actor.

::

    driver ══ calls ══ actor (a worker of Ray) ══ socket ══ process, no relative of any worker
                                                              └── what it starts

Orders and reports are JSON, one a line. Reports are numbered and kept until the driver has said
that it has them, so that a call whose answer was lost can be made again: no line is lost and none
comes twice.

When the actor dies, for whatever reason, the socket ends and the process ends all that it has
started: by then Ray may have given the GPUs to another job. The process' parent is a watchdog that
ends what remains when the process itself is killed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from contextlib import suppress
from typing import (
    Any,
    Callable,
    Deque,
    Dict,
    Iterator,
    List,
    Mapping,
    NoReturn,
    Optional,
    Sequence,
    Tuple,
)

from .. import FOLDER
from ..node import command
from ..node.output import CHUNK_BYTES
from ..node.rundir import RunDir, run_dirs
from ..node.supervise import (
    ENDING,
    SUPERVISOR_TAG,
    WATCHDOG,
    Supervisor,
    adopt_orphans,
    kill_tagged,
    name_process,
)

#: The last line to the actor: all orders are carried out, and nothing is left.
OVER = b'{"at": "over"}\n'
#: Seconds for the actor to take it.
_SAY_S = 5.0
#: Bytes of reports that wait for the actor before the output is no longer read.
_UNSENT_MAX = 4 * 2**20
#: Bytes of one replica's reports kept for the driver; beyond it the role's processes wait to write.
_KEPT_MAX = 2 * 2**20
#: Seconds for the processes to end and to remove their folders.
_CLOSE_S = 10.0
#: Text of a program that runs ``main`` of a module of this package: its arguments are the package's
#: folder, two for ``main``, and the module.
PROGRAM = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from importlib import import_module as load; load(sys.argv[4]).main(sys.argv[2:4])"
)


class Relays:
    """All replicas of one actor. The methods are called from any thread.

    Args:
        folder: of this actor alone; the replicas' processes remove it.
        places: of each replica the key that names it, the tag in the environment of all its
            processes, the name of its run directory, and the module that its process runs.
    """

    def __init__(self, folder: str, places: Sequence[Tuple[str, ...]]) -> None:
        self._folder = folder
        self._changed = threading.Condition()
        is_alone = len(places) == 1
        self._relays = {
            place[0]: _Relay(folder, place, self._changed, is_alone) for place in places
        }
        for relay in self._relays.values():
            relay.listen()

    def order(self, key: str, number: int, order: Dict[str, Any]) -> None:
        """Pass an order on: once, and in the order of the numbers, however often it comes."""
        self._relays[key].order(number, order)

    def pull(
        self, seen: Mapping[str, int], patience_s: float, gather_s: float = 0.0
    ) -> Dict[str, Tuple[int, List[str]]]:
        """Return new reports of the replicas, and forget those that the caller has.

        Args:
            seen: how many reports of each replica the caller has.
            patience_s: how long to wait for one.
            gather_s: how long to wait for more, once there is one.

        Returns:
            By replica the number of the first report, and the reports; nothing of those that have
            none.
        """
        with self._changed:
            for key, count in seen.items():
                self._relays[key].forget(count)
            self._changed.notify_all()
            relays = self._relays.values()
            has_some = self._changed.wait_for(lambda: any(one.kept for one in relays), patience_s)
        if has_some:
            time.sleep(gather_s)
        with self._changed:
            return {
                key: (relay.first, [report.decode() for report in relay.kept])
                for key, relay in self._relays.items()
                if relay.kept
            }

    def close(self) -> bool:
        """End the processes and wait until nothing of them is left; whether they have ended."""
        with self._changed:
            for relay in self._relays.values():
                relay.hang_up()
            self._changed.notify_all()  # no thread need wait for room among the reports now
        deadline = time.monotonic() + _CLOSE_S
        gone = [
            relay.gone.wait(max(0.0, deadline - time.monotonic()))
            for relay in self._relays.values()
        ]
        shutil.rmtree(self._folder, ignore_errors=True)  # those that were killed could not
        return all(gone)


class _Relay:
    """One replica's process, and its reports that the driver does not have yet."""

    def __init__(
        self,
        folder: str,
        place: Sequence[str],
        changed: threading.Condition,
        is_alone: bool,
    ) -> None:
        _, self._tag, self._run_dir, program = place
        self._folder, self._is_alone = folder, is_alone
        self._changed = changed
        self._ordering = threading.Lock()
        self._early: Dict[int, Dict[str, Any]] = {}
        self._next = 0
        self.kept: Deque[bytes] = deque()  # reports
        self.kept_bytes = 0
        self.first = 0  # number of the oldest report that is kept
        self.gone = threading.Event()
        self._closing = self._keeps_run_dir = False
        self._channel, theirs = socket.socketpair()
        package = os.path.dirname(FOLDER)
        module = f"{__package__.rpartition('.')[0]}.{program}"
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", PROGRAM, package, folder, str(theirs.fileno()), module],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, SUPERVISOR_TAG: self._tag},
        )
        theirs.close()

    def listen(self) -> None:
        self._process.wait()  # it is only the parent of the one that stays
        threading.Thread(target=self._listen, name="reports", daemon=True).start()

    def order(self, number: int, order: Dict[str, Any]) -> None:
        with self._ordering:
            if order["do"] == "prepare":
                self._keeps_run_dir = json.loads(order["role"])["task"]["keep_run_dir"]
            if number >= self._next:
                self._early[number] = order
            while self._next in self._early:
                data = json.dumps(self._early.pop(self._next)).encode()
                self._next += 1
                with suppress(OSError):  # the process is gone; its last report says so
                    self._channel.sendall(data + b"\n")

    def forget(self, count: int) -> None:
        while self.kept and self.first < count:
            self.kept_bytes -= len(self.kept.popleft())
            self.first += 1

    def hang_up(self) -> None:
        self._closing = True
        with suppress(OSError):  # it is gone already
            self._channel.shutdown(socket.SHUT_WR)

    def _listen(self) -> None:
        last = b""
        # A process that is killed before it has read its last order resets the connection.
        with self._channel.makefile("rb") as reports, suppress(ConnectionResetError):
            for last in reports:
                if last.endswith(b"\n") and last != OVER:  # else it died in the middle of it
                    self._keep(last)
        is_expected, killed = self._closing, 0
        # One that was not killed has ended everything, and has removed what is not to be kept.
        if last != OVER:
            killed = kill_tagged(self._tag)
            if not self._keeps_run_dir:
                RunDir(self._run_dir, base=run_dirs(command.tmpdir())).remove()
        if not is_expected:
            if self._is_alone:  # else other replicas use it
                shutil.rmtree(self._folder, ignore_errors=True)
            self._keep(json.dumps({"at": "gone", "left": killed}).encode())
        self.gone.set()

    def _keep(self, report: bytes) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.kept_bytes <= _KEPT_MAX or self._closing)
            self.kept.append(report)
            self.kept_bytes += len(report)
            self._changed.notify_all()


# ---- the process on the node


class Channel:
    """Orders that come in and reports that go out; neither makes the process wait."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._socket.setblocking(False)
        self._begun = b""
        self._unsent = bytearray()

    def fileno(self) -> int:
        """The descriptor, by which ``select`` waits for the channel."""
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    @property
    def is_full(self) -> bool:
        """Whether so many reports wait for the actor that no more output should be read."""
        return len(self._unsent) >= _UNSENT_MAX

    def orders(self) -> Optional[Iterator[Any]]:
        """The orders that are complete now; ``None`` when the actor is gone."""
        try:
            data = self._socket.recv(CHUNK_BYTES)
        except BlockingIOError:
            return iter(())  # it was ready for writing
        except OSError:
            return None
        if not data:
            return None
        *lines, self._begun = (self._begun + data).split(b"\n")
        return map(json.loads, lines)

    def report(self, kind: str, **values: Any) -> None:
        """Add a report to those that wait to be sent."""
        self._unsent += json.dumps({"at": kind, **values}).encode() + b"\n"

    def report_text(self, text: str) -> None:
        if text:
            self.report("text", text=text)

    def send(self) -> None:
        """Send what the actor takes now."""
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent[:CHUNK_BYTES])
            except BlockingIOError:
                return
            except OSError:
                return  # the actor is gone; the next read of the socket says so
            del self._unsent[:sent]

    def send_all(self) -> None:
        """Send everything, and wait for the actor to take it: the last thing that is sent."""
        self._socket.setblocking(True)
        self.send()


def become_supervised(argv: Sequence[str], kind: Callable[[socket.socket, str], Any]) -> NoReturn:
    """Become a process that is no relative of the actor's worker, and serve.

    Args:
        argv: the package's folder, and the number of the socket to the actor.
        kind: makes the object that serves, of the socket and the folder. It has ``serve()``, which
            returns when the actor is gone; ``fail(words)``, which reports that it cannot continue;
            and ``abandon()``, which kills what runs and removes the folders.
    """
    folder, number = argv
    if os.fork():
        os._exit(0)
    os.setsid()
    for signum in ENDING:  # a stop of the worker closes the socket as well
        signal.signal(signum, signal.SIG_IGN)
    command.restore_tmpdir()
    channel = socket.socket(fileno=int(number))
    adopt_orphans()
    child = os.fork()
    if child:
        channel.close()
        _watch(child)
    process = kind(channel, folder)
    try:
        process.serve()
    except Exception as error:  # the last frame of this process: only its actor can be told
        traceback.print_exc()  # into the worker's log
        process.fail(f"our process failed: {type(error).__name__}: {error}")
    finally:
        process.abandon()
        channel.settimeout(_SAY_S)
        with suppress(OSError):  # the actor is gone
            channel.sendall(OVER)
        os._exit(0)


def _watch(child: int) -> NoReturn:
    """Outlive that process and end what it can leave behind only by being killed."""
    name_process(WATCHDOG)
    while os.wait()[0] != child:
        pass  # an orphan of a process that is dead by now
    Supervisor().stop(0.0)
    os._exit(0)
