"""The socket between a replica's process and its actor. Orders and reports are JSON, one a line."""

from __future__ import annotations

import json
import socket
from typing import Any, Iterator, Optional

from ..node.output import CHUNK_BYTES

#: Bytes of reports that wait for the actor before the output is no longer read.
_UNSENT_MAX = 4 * 2**20


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
