"""A TCP proxy before a real dashboard that misbehaves as it is told to."""

from __future__ import annotations

import contextlib
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable
from urllib.parse import urlsplit

_METHODS = (b"GET ", b"POST ", b"PUT ", b"DELETE ")


class Fault:
    """What is done to one request. The base does nothing: it forwards."""

    def before(self) -> bool:
        """Called when the request has arrived; False cuts the connection before it is forwarded."""
        return True

    def forwarded(self) -> None:
        """Called when the request has been passed to the dashboard."""

    def answer(self, data: bytes) -> bytes | None:
        """The dashboard's bytes as the client gets them; None cuts the connection."""
        return data

    #: An answer given without asking the dashboard.
    instead: bytes | None = None


class DropAnswer(Fault):
    """The dashboard gets the request, the client never its answer."""

    def answer(self, data: bytes) -> bytes | None:
        return None


class CutBefore(Fault):
    """The request is lost."""

    def before(self) -> bool:
        return False


class Answer500(Fault):
    instead = (
        b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 4\r\nConnection: close\r\n\r\noops"
    )


class Hang(Fault):
    """No answer until the end of the trouble."""

    def __init__(self, until: float) -> None:
        self._until = until

    def before(self) -> bool:
        while time.monotonic() < self._until:
            time.sleep(0.05)
        return True


class CutAfter(Fault):
    """The connection is cut after some time, in the middle of whatever it carries."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    def answer(self, data: bytes) -> bytes | None:
        return data if time.monotonic() < self._at else None


class FlakyProxy:
    """Forwards to ``url``; ``choose(request_line)`` names the fault of each request.

    ``requests`` holds the first line of every request, ``sent`` the bytes that clients sent.

    Args:
        url: of the real dashboard.
        choose: what to do to a request; nothing by default.
        prefix: path under which the dashboard is to be seen; other paths are cut off.
        header: line that every request must have, in lower case.
        tls: speak TLS to clients.
        address: host and port to listen at; by default any free port of this machine's own.
    """

    def __init__(
        self,
        url: str,
        choose: Callable[[str], Fault] | None = None,
        prefix: str = "",
        header: str = "",
        tls: ssl.SSLContext | None = None,
        address: tuple[str, int] = ("127.0.0.1", 0),
    ) -> None:
        parts = urlsplit(url)
        self._upstream = (parts.hostname, parts.port)
        self._choose = choose or (lambda line: Fault())
        self._server = socket.create_server(address)
        self._prefix, self._header, self._tls = prefix.encode(), header.encode(), tls
        scheme = "http" if tls is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self._server.getsockname()[1]}{prefix}"
        self.requests: list[str] = []
        self.sent: dict[str, int] = {}
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def __enter__(self) -> FlakyProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            if self._tls is not None:
                client = self._tls.wrap_socket(client, server_side=True)
            with client, socket.create_connection(self._upstream) as upstream:
                self._pump(client, upstream)
        except OSError:
            pass  # one of the two is gone: the connection ends

    def _pump(self, client: socket.socket, upstream: socket.socket) -> None:
        fault = Fault()
        line = ""
        with selectors.DefaultSelector() as selector:
            selector.register(client, selectors.EVENT_READ)
            selector.register(upstream, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select(0.05):
                    data = read(key.fileobj)
                    if not data:
                        return
                    if key.fileobj is client:
                        if data.startswith(_METHODS):
                            data = self._admit(data)
                            if data is None:
                                return
                            line = data.split(b"\r\n", 1)[0].decode()
                            self.requests.append(line)
                            fault = self._choose(line)
                            if fault.instead is not None:
                                client.sendall(fault.instead)
                                return
                            if not fault.before():
                                return
                        self.sent[line] = self.sent.get(line, 0) + len(data)
                        upstream.sendall(data)
                        fault.forwarded()
                    else:
                        answer = fault.answer(data)
                        if answer is None:
                            return
                        client.sendall(answer)
                if fault.answer(b"") is None and isinstance(fault, CutAfter):
                    return

    def _admit(self, data: bytes) -> bytes | None:
        """The request without our prefix, or None when it lacks the prefix or the header."""
        path = data.split(b" ", 2)[1]
        known = path.startswith(self._prefix + b"/") and self._header in data.lower()
        return data.replace(path, path.removeprefix(self._prefix), 1) if known else None


def read(source: socket.socket) -> bytes:
    """What can be read without waiting; TLS may hold more than the socket shows."""
    data = source.recv(65536)
    while isinstance(source, ssl.SSLSocket) and source.pending():
        data += source.recv(65536)
    return data
