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
    NoReturn,
    Sequence,
    Tuple,
)

from .. import FOLDER
from ..node.output import CHUNK_BYTES
from ..node.rundir import RunDir
from ..node.supervise import (
    ENDING,
    SUPERVISOR_TAG,
    WATCHDOG,
    Supervisor,
    adopt_orphans,
    kill_tagged,
    name_process,
)
from ..spec import Json

#: The last line to the actor: all orders are carried out, and nothing is left.
OVER = b'{"at": "over"}\n'
#: Seconds for the actor to take it.
_SAY_S = 5.0
#: Bytes of reports that wait for the actor before the output is no longer read.
_UNSENT_MAX = 4 * 2**20
#: Bytes of the reports that are kept for the driver; beyond it the role's processes wait to write.
_KEPT_MAX = 2 * 2**20
#: Seconds for the processes to end and to remove their folders.
_CLOSE_S = 10.0
#: Text of a program that runs ``main`` of a module of this package: its arguments are the package's
#: folder, two for ``main``, and the module.
PROGRAM = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from importlib import import_module as load; load(sys.argv[4]).main(sys.argv[2:4])"
)


class Relay:
    """One replica's process, and its reports that the driver does not have yet.

    The public methods are called from any thread. The folder is this replica's alone; the
    process, which runs the program, removes it. The tag is in the environment of all its processes.
    """

    def __init__(self, folder: str, tag: str, run_dir: str, program: str):
        self._folder, self._tag, self._run_dir = folder, tag, run_dir
        self._changed = threading.Condition()
        self._ordering = threading.Lock()
        self._early: Dict[int, Json] = {}
        self._kept: Deque[bytes] = deque()  # reports
        #: Numbers of the next order and of the oldest report that is kept.
        self._next = self._first = self._kept_bytes = 0
        self._gone = threading.Event()
        self._closing = self._keeps_run_dir = False
        self._channel, theirs = socket.socketpair()
        package = os.path.dirname(FOLDER)
        module = f"{__package__.rpartition('.')[0]}.{program}"
        self._parent = subprocess.Popen(  # it forks the one that stays, and ends
            [sys.executable, "-I", "-c", PROGRAM, package, folder, str(theirs.fileno()), module],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, SUPERVISOR_TAG: tag},
        )
        theirs.close()
        threading.Thread(target=self._listen, name="reports", daemon=True).start()

    def order(self, number: int, order: Json) -> None:
        """Pass an order on: once, and in the order of the numbers, however often it comes."""
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

    def pull(self, seen: int, patience_s: float, gather_s: float) -> Tuple[int, List[str]]:
        """The number of the first report that is not seen, and all from that on; forget the others.

        The first one is waited for, with patience, and then others.
        """
        with self._changed:
            while self._kept and self._first < seen:
                self._kept_bytes -= len(self._kept.popleft())
                self._first += 1
            self._changed.notify_all()
            has_some = self._changed.wait_for(lambda: self._kept, patience_s)
        if has_some:
            time.sleep(gather_s)
        with self._changed:
            return self._first, [report.decode() for report in self._kept]

    def close(self) -> bool:
        """End the processes and wait until nothing of them is left; whether they have ended."""
        with self._changed:
            self._closing = True
            with suppress(OSError):  # it is gone already
                self._channel.shutdown(socket.SHUT_WR)
            self._changed.notify_all()  # no thread need wait for room among the reports now
        has_ended = self._gone.wait(_CLOSE_S)
        shutil.rmtree(self._folder, ignore_errors=True)  # one that was killed could not
        return has_ended

    def _listen(self) -> None:
        self._parent.wait()
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
                RunDir(self._run_dir).remove()
        if not is_expected:
            shutil.rmtree(self._folder, ignore_errors=True)
            report = {"at": "gone", "left": killed, "was_killed": last != OVER}
            self._keep(json.dumps(report).encode())
        self._gone.set()

    def _keep(self, report: bytes) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._kept_bytes <= _KEPT_MAX or self._closing)
            self._kept.append(report)
            self._kept_bytes += len(report)
            self._changed.notify_all()


# ---- the process on the node


class Channel:
    """Orders that come in and reports that go out; neither makes the process wait."""

    def __init__(self, end: socket.socket):
        self._socket = end
        end.setblocking(False)
        self._begun = b""
        self.unsent = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def is_full(self) -> bool:
        """Whether so many reports wait for the actor that no more output should be read."""
        return len(self.unsent) >= _UNSENT_MAX

    def orders(self) -> Iterator[Any] | None:
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
        self.unsent += json.dumps({"at": kind, **values}).encode() + b"\n"

    def send(self) -> None:
        """Send what the actor takes now."""
        with suppress(OSError):  # it takes no more; if it is gone, the next read says so
            while self.unsent:
                del self.unsent[: self._socket.send(self.unsent[:CHUNK_BYTES])]


def become_supervised(argv: Sequence[str], kind: Callable[[Channel, str], Any]) -> NoReturn:
    """Become a process that is no relative of the actor's worker, and serve.

    Args:
        argv: the package's folder, and the number of the socket to the actor.
        kind: makes the object that serves, of the channel and the folder. It has ``serve()``, which
            returns when the actor is gone, and ``abandon()``, which kills what runs and removes the
            folders.
    """
    folder, number = argv
    if os.fork():
        os._exit(0)
    os.setsid()
    for signum in ENDING:  # a stop of the worker closes the socket as well
        signal.signal(signum, signal.SIG_IGN)
    end = socket.socket(fileno=int(number))
    adopt_orphans()
    child = os.fork()
    if child:  # it outlives that process and ends what it can leave behind only by being killed
        end.close()
        name_process(WATCHDOG)
        while os.wait()[0] != child:
            pass  # an orphan of a process that is dead by now
        Supervisor().stop(0.0)
        os._exit(0)
    channel = Channel(end)
    process = kind(channel, folder)
    try:
        process.serve()
    except Exception as error:  # the last frame of this process: only its actor can be told
        traceback.print_exc()  # into the worker's log
        words = f"this package's process failed: {type(error).__name__}: {error}"
        channel.report("failed", words=words)
        end.setblocking(True)
        channel.send()
    finally:
        process.abandon()
        end.settimeout(_SAY_S)
        with suppress(OSError):  # the actor is gone
            end.sendall(OVER)
        os._exit(0)
