"""Asks whether a service is ready, beside everything else that its process loop does.

There is no thread and no waiting: the loop that starts processes must not be forked while a thread
holds a lock, and must not miss a deadline while a server is slow.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from typing import Callable, List, Mapping, Optional, Sequence

from ..spec import ProbeSpec

#: Seconds for one try of a port or a GET.
_TRY_S = 10.0
#: Seconds between two reports of what a service that is not ready answers.
_TELL_S = 30.0
_LOCAL = "127.0.0.1"
_NOT_ASKED = "it was not asked yet"
#: Bytes of an answer in which its first line must end.
_ANSWER_MAX = 8192


class Probing:
    """The tries of one probe, one after the other, until one succeeds or the time is up.

    Args:
        spec: what to ask.
        address: of this node, as the other roles know it: a server that listens on 127.0.0.1 alone
            is not ready for them.
        ports: the role's.
        spawn: starts a command and gives its process id.
    """

    def __init__(
        self,
        spec: ProbeSpec,
        address: str,
        ports: Mapping[str, int],
        spawn: Callable[[Sequence[str]], int],
    ) -> None:
        self._spec = spec
        self._address = address
        self._port = ports[spec.port] if isinstance(spec.port, str) else spec.port
        self._spawn = spawn
        self._began_at = time.monotonic()
        self._give_up_at = self._began_at + spec.timeout_s
        self._tell_at = self._began_at + _TELL_S
        self._next_at = 0.0
        self._try: Optional[_Try] = None
        self.pid: Optional[int] = None
        self._why = _NOT_ASKED
        self._was_reached = False  # by the last try, on the node's own address

    @property
    def socket(self) -> Optional[socket.socket]:
        """The socket to wait for: for writing until it ``is_asked``, then for reading."""
        return self._try.socket if self._try is not None else None

    @property
    def is_asked(self) -> bool:
        return self._try is not None and self._try.is_asked

    def reaped(self, code: int) -> None:
        """The probe's command has ended."""
        self.pid = None
        self._settle("" if code == 0 else f"{list(self._spec.command)} ended with exit code {code}")

    def step(self) -> Optional[str]:
        """Continue: ``None`` is undecided, ``""`` ready, another text the reason for giving up."""
        now = time.monotonic()
        if self._try is not None:
            answer = self._try.step(now)
            if answer is not None:
                self._was_reached = self._try.is_asked
                self._try.socket.close()
                self._try = None
                self._settle(answer)
        if self._why == "":
            return ""
        if now >= self._give_up_at:
            why = self._reason()
            self.close()
            return f"not ready within {self._spec.timeout_s:g} s: {why}"
        if self._try is None and self.pid is None and now >= self._next_at:
            self._begin(now)
        return None

    def waiting(self) -> Optional[str]:
        """Report the last try once in 30 s; ``None`` in between."""
        now = time.monotonic()
        if now < self._tell_at:
            return None
        self._tell_at = now + _TELL_S
        return f"not ready for {now - self._began_at:.0f} s: {self._reason()}"

    def close(self) -> None:
        if self._try is not None:
            self._try.socket.close()
            self._try = None

    def _begin(self, now: float) -> None:
        if self._spec.kind == "command":
            try:
                self.pid = self._spawn(self._spec.command)
            except OSError as error:
                self._settle(f"{list(self._spec.command)} cannot be started: {error}")
            return
        path = self._spec.path if self._spec.kind == "http" else None
        self._try = _Try(self._address, self._port, path, self._spec.status, now + _TRY_S)

    def _settle(self, why: str) -> None:
        self._why = why
        self._next_at = time.monotonic() + self._spec.interval_s

    def _reason(self) -> str:
        """The reason why it is not ready, by the last try."""
        why = self._why
        if why is _NOT_ASKED and self._try is not None:
            why = self._try.late
        elif why is _NOT_ASKED and self.pid is not None:
            why = f"{list(self._spec.command)} has not ended"
        return why + self._hint()

    def _hint(self) -> str:
        if self._spec.kind == "command" or self._address == _LOCAL or self._was_reached:
            return ""
        try:
            socket.create_connection((_LOCAL, self._port), timeout=1).close()
        except OSError:
            return ""
        return (
            f". It does listen on {_LOCAL}:{self._port}, where no other node can reach it; let it "
            "listen on 0.0.0.0"
        )


class _Try:
    """One connection, with a GET on it or without."""

    def __init__(
        self, address: str, port: int, path: Optional[str], status: int, until: float
    ) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._where = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        self._path = path
        self._status = status
        self._until = until
        self._answer = b""
        self.is_asked = False
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        self.socket.setblocking(False)
        self._connect_error = self.socket.connect_ex((address, port))

    def step(self, now: float) -> Optional[str]:
        """Continue: ``None`` is undecided, ``""`` success, another text the reason why not."""
        if not self.is_asked:
            return self._connected(now)
        try:
            while b"\n" not in self._answer and len(self._answer) < _ANSWER_MAX:
                data = self.socket.recv(4096)
                self._answer += data
                if not data:
                    break
        except BlockingIOError:
            return self._unless_late(now)
        except OSError as error:
            return f"{self._words} failed: {error}"
        return self._outcome()

    def _connected(self, now: float) -> Optional[str]:
        error = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if not error:
            try:
                self.socket.getpeername()
            except OSError:
                error = self._connect_error
        if error in (errno.EINPROGRESS, errno.EALREADY):
            return self._unless_late(now)
        if error:
            return f"port {self._where} does not take connections: {os.strerror(error)}"
        if self._path is None:
            return ""
        host = self._where
        request = f"GET {self._path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
        try:
            self.socket.sendall(request.encode())
        except OSError as failure:
            return f"{self._words} failed: {failure}"
        self.is_asked = True
        return None

    def _outcome(self) -> str:
        line = self._answer.split(b"\r\n")[0].split(b"\n")[0].decode(errors="replace")
        words: List[str] = line.split()
        if len(words) < 2 or not words[0].startswith("HTTP/"):
            return f"{self._words} is answered with {line[:80]!r}, which is not HTTP"
        if words[1] != str(self._status):
            return f"{self._words} is answered with {words[1]}, not {self._status}"
        return ""

    @property
    def late(self) -> str:
        """The reason for giving up a try that takes too long."""
        return f"{self._where} does not {'answer' if self.is_asked else 'take connections'}"

    def _unless_late(self, now: float) -> Optional[str]:
        return self.late if now >= self._until else None

    @property
    def _words(self) -> str:
        return f"GET http://{self._where}{self._path}"
