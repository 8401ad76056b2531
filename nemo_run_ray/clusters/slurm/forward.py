"""A port of this machine that leads to a dashboard behind SSH, also after the connection broke."""

from __future__ import annotations

import contextlib
import selectors
import socket
import socketserver
import threading
from typing import Any

import paramiko

from nemo_run_ray.clusters.slurm.login import Login
from nemo_run_ray.errors import ClusterError

_CHUNK = 65536
#: Seconds until a new way through the connection must be there.
_OPEN_S = 15.0
#: The ports of this process, by host with SSH and what lies behind it.
_forwards: dict[tuple[str, str, int], Forward] = {}
_lock = threading.Lock()


class Forward:
    """One listening port.

    Args:
        login: the host with SSH; a connection that broke off is made again when it is needed.
        host: where the way leads to, as that host knows it.
        port: of that.
    """

    def __init__(self, login: Login, host: str, port: int) -> None:
        self._login = login
        self._target = (host, port)
        forward = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                forward._serve(self.request)

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def port(self) -> int:
        """The forwarded port on this machine, at 127.0.0.1."""
        found: int = self._server.server_address[1]
        return found

    def _serve(self, client: socket.socket) -> None:
        """Carry one connection; it is closed when there is no way, and its owner asks again."""
        with contextlib.suppress(ClusterError, OSError, EOFError, paramiko.SSHException):
            transport = self._login.transport()
            channel = transport.open_channel(
                "direct-tcpip", self._target, client.getpeername(), timeout=_OPEN_S
            )
            with contextlib.closing(channel):
                _carry(client, channel)


def _carry(client: socket.socket, channel: Any) -> None:
    """Pass on what comes, both ways, until one end has closed."""
    with selectors.DefaultSelector() as selector:
        selector.register(client, selectors.EVENT_READ, (client, channel))
        selector.register(channel, selectors.EVENT_READ, (channel, client))
        while True:
            for key, _ in selector.select():
                one, other = key.data
                data = one.recv(_CHUNK)
                if not data:
                    return
                other.sendall(data)


def forwarded(login: Login, host: str, port: int) -> str:
    """The address of this machine that leads to a port behind a login."""
    key = (login.key, host, port)
    with _lock:
        if key not in _forwards:
            _forwards[key] = Forward(login, host, port)
        return f"http://127.0.0.1:{_forwards[key].port}"
