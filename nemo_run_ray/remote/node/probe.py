"""Asks whether a service is ready, beside everything else that its process' loop does.

There is no thread and no waiting: the loop that starts processes must not be forked while a thread
holds a lock, and must not miss a deadline while a server is slow.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from typing import Callable, Mapping, Optional, Sequence

from ..spec import ProbeSpec

#: Seconds for one try of a port or a GET, and between two reports of a service that is not ready.
_TRY_S, _REPORT_S = 10.0, 30.0
_LOCAL = "127.0.0.1"
#: Bytes of an answer in which its first line must end.
_ANSWER_MAX = 8192


class Probing:
    """The tries of one probe, one after the other, until one succeeds or the time is up.

    Args:
        spec: the probe.
        address: of this node, as the other roles know it: a server that listens on 127.0.0.1 alone
            is not ready for them.
        ports: the role's.
        spawn: starts a command and returns its process id.
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
        self._where = f"[{address}]:{self._port}" if ":" in address else f"{address}:{self._port}"
        self._spawn = spawn
        self._began_at = time.monotonic()
        self._report_at = self._began_at + _REPORT_S
        self._next_at = self._try_until = 0.0
        self._connect_error = 0
        self._answer = b""
        self._why = "not asked"  # by the last try; empty when it succeeded
        self._is_reachable = False
        #: Of the command that is asked; ``None`` between two tries.
        self.pid: Optional[int] = None
        #: Wait for it: for writing until the probe ``is_asked``, then for reading.
        self.socket: Optional[socket.socket] = None
        self.is_asked = False

    def reaped(self, code: int) -> None:
        """Take the exit code of the probe's command."""
        self.pid = None
        self._settle("" if code == 0 else f"{list(self._spec.command)} ended with exit code {code}")

    def step(self) -> Optional[str]:
        """Continue: ``None`` is undecided, ``""`` ready, another text the reason for giving up."""
        now = time.monotonic()
        if self.socket is not None:
            why = self._received() if self.is_asked else self._connected(self.socket)
            if why is None and now >= self._try_until:
                why = self._late
            if why is not None:
                self._is_reachable = self.is_asked
                self.close()
                self._settle(why)
        if not self._why:
            return ""
        if now >= self._began_at + self._spec.timeout_s:
            why = self._reason()
            self.close()
            return f"not ready within {self._spec.timeout_s:g} s: {why}"
        if self.socket is None and self.pid is None and now >= self._next_at:
            self._begin(now)
        return None

    def waiting(self) -> Optional[str]:
        """Report the last try once in 30 s; ``None`` in between."""
        now = time.monotonic()
        if now < self._report_at:
            return None
        self._report_at = now + _REPORT_S
        return f"not ready for {now - self._began_at:.0f} s: {self._reason()}"

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()
            self.socket = None

    def _begin(self, now: float) -> None:
        if self._spec.kind == "command":
            try:
                self.pid = self._spawn(self._spec.command)
            except OSError as error:
                self._settle(f"{list(self._spec.command)} cannot be started: {error}")
            return
        self._try_until, self._answer, self.is_asked = now + _TRY_S, b"", False
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        self.socket.setblocking(False)
        self._connect_error = self.socket.connect_ex((self._address, self._port))

    def _settle(self, why: str) -> None:
        self._why = why
        self._next_at = time.monotonic() + self._spec.interval_s

    def _connected(self, connection: socket.socket) -> Optional[str]:
        """The outcome of a port's try, or ``None`` once a GET is on its way."""
        error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if not error:
            try:
                connection.getpeername()
            except OSError:
                error = self._connect_error
        if error in (errno.EINPROGRESS, errno.EALREADY):
            return None
        if error:
            return f"port {self._where} does not take connections: {os.strerror(error)}"
        if self._spec.kind == "port":
            return ""
        request = f"GET {self._spec.path} HTTP/1.1\r\nHost: {self._where}\r\n"
        try:
            connection.sendall(f"{request}Connection: close\r\n\r\n".encode())
        except OSError as failure:
            return f"{self._get} failed: {failure}"
        self.is_asked = True
        return None

    def _received(self) -> Optional[str]:
        """The outcome of a GET; ``None`` while its first line is not complete."""
        assert self.socket is not None
        try:
            while b"\n" not in self._answer and len(self._answer) < _ANSWER_MAX:
                data = self.socket.recv(4096)
                self._answer += data
                if not data:
                    break
        except BlockingIOError:
            return None
        except OSError as error:
            return f"{self._get} failed: {error}"
        line = self._answer.partition(b"\n")[0].decode(errors="replace").rstrip("\r")
        version, _, status = line.partition(" ")
        if not version.startswith("HTTP/") or not status:
            return f"{self._get} is answered with {line[:80]!r}, which is not HTTP"
        status = status.split()[0]
        if status != str(self._spec.status):
            return f"{self._get} is answered with {status}, not {self._spec.status}"
        return ""

    @property
    def _get(self) -> str:
        return f"GET http://{self._where}{self._spec.path}"

    @property
    def _late(self) -> str:
        if self._spec.kind == "command":
            return f"{list(self._spec.command)} has not ended"
        return f"{self._where} does not {'answer' if self.is_asked else 'take connections'}"

    def _reason(self) -> str:
        """The reason why it is not ready, by the last try; the first one may not have ended."""
        why = self._why if self._next_at else self._late
        if self._spec.kind == "command" or self._address == _LOCAL or self._is_reachable:
            return why
        try:
            socket.create_connection((_LOCAL, self._port), timeout=1).close()
        except OSError:
            return why
        return (
            f"{why}. It does listen on {_LOCAL}:{self._port}, where no other node can reach it; "
            "let it listen on 0.0.0.0"
        )
