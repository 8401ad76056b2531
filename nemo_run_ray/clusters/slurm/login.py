"""The host where Slurm's commands run, reached by NeMo-Run's tunnel, and forwards to its ports."""

from __future__ import annotations

import base64
import contextlib
import os
import secrets
import selectors
import shlex
import signal
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paramiko
from nemo_run.core.tunnel.client import LocalTunnel

from nemo_run_ray import ssh
from nemo_run_ray.errors import ClusterError, Unanswered
from nemo_run_ray.remote.files import replacing

#: Seconds for one command, and for a sign of life of a connection that nothing comes through.
_COMMAND_S = 90
_KEEPALIVE_S = 10
#: The exit code that stands for a connection which broke off before its command ended.
_NO_EXIT_CODE = -1
#: Errors of paramiko and sockets when there is no connection or it breaks off.
_BROKEN = (OSError, EOFError, paramiko.SSHException)
#: The first line that a script prints.
_MARK = "nemo-run-ray-begins"
_CHUNK = 2**16
#: Seconds until a new way through the connection must be there.
_OPEN_S = 15.0


class Login:
    """Runs commands and writes files where Slurm is, for all threads of this process.

    Args:
        tunnel: NeMo-Run's, of this machine or by SSH.
    """

    def __init__(self, tunnel: Any) -> None:
        self.tunnel = tunnel
        self.key = key_of(tunnel)
        #: The connection, whose host key was checked; NeMo-Run's own ones take any key.
        self.session: Any = None
        #: One command at a time.
        self._turn = threading.Lock()
        #: Held to make the connection, and not for a command, so that a slow one delays nobody.
        self._lock = threading.RLock()
        self._forwards: dict[tuple[str, int], int] = {}  # ports of this process

    @property
    def is_here(self) -> bool:
        """Whether it is this machine."""
        return isinstance(self.tunnel, LocalTunnel)

    @property
    def name(self) -> str:
        """User and host, for messages."""
        return str(self.tunnel.key)

    def run(self, script: str) -> str:
        """Run a script for ``sh`` and return its output.

        Raises:
            Unanswered: the connection has broken off; the script may have run.
            ClusterError: it has failed, or nobody may log in.
        """
        return self._output(script).decode(errors="replace")

    def put(self, data: bytes, path: str) -> None:
        """Write a file there, whole or not at all.

        Raises:
            Unanswered: the connection has broken off.
            ClusterError: the file cannot be written, or nobody may log in.
        """
        new, path = (shlex.quote(name) for name in (f"{path}.{secrets.token_hex(4)}", path))
        encoded = base64.encodebytes(data).decode()
        self.run(f"base64 -d > {new} <<'END' && mv {new} {path} || exit 1\n{encoded}END\n:")

    def run_python(self, program: str) -> str:
        """Run a Python program of ASCII text without a file, and return its output.

        Raises:
            Unanswered: the connection has broken off; the program may have run.
            ClusterError: it has failed, or nobody may log in.
        """
        python = shlex.quote(sys.executable) if self.is_here else "python3"
        return self.run(f"exec {python} -IS - <<'{_MARK}'\n{program}\n{_MARK}")

    def get(self, path: str, here: Path) -> None:
        """Fetch a file from there, whole or not at all.

        Raises:
            Unanswered: the connection has broken off.
            ClusterError: the file cannot be read, or nobody may log in.
        """
        data = self._output(f"cat {shlex.quote(path)}")
        with replacing(here) as file:
            file.write(data)

    def _output(self, script: str) -> bytes:
        # The shell reads all of it before it begins, and no command in it reads the rest.
        text = f"{{ printf '%s\\n' {_MARK}\n{script}\n}} < /dev/null\n".encode()
        with self._turn, self._translated():
            code, output, errors = _here(text) if self.is_here else self._there(text)
        # What the start files of a login shell print comes before.
        output = output.partition(f"{_MARK}\n".encode())[2]
        if code != 0:
            reason = (errors.strip() or output.strip()).decode(errors="replace")
            raise ClusterError(
                f"A command on {self.name} has failed: {reason or f'exit code {code}'}"
            )
        return output

    def _there(self, text: bytes) -> tuple[int, bytes, bytes]:
        """Run a script by SSH without a thread: none can start while Python ends."""
        tunnel = self.tunnel
        channel = self._connected().open_session(timeout=ssh.CONNECT_S)
        with contextlib.closing(channel):
            channel.settimeout(_COMMAND_S)
            # Any login shell understands this, csh and fish too.
            channel.exec_command(f"{tunnel.pre_command} && sh" if tunnel.pre_command else "sh")
            channel.sendall(text)
            channel.shutdown_write()
            output, errors = channel.makefile("rb").read(), channel.makefile_stderr("rb").read()
            if not channel.status_event.wait(_COMMAND_S) or channel.exit_status == _NO_EXIT_CODE:
                raise EOFError("The connection broke off.")
            return int(channel.exit_status), output, errors

    def forward(self, host: str, port: int) -> str:
        """The address of this machine that leads to a port behind the login.

        A connection that broke off is made again when it is needed.
        """
        login, target = self, (host, port)

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                """Carry one connection; without a way it is closed, and its owner asks again."""
                with contextlib.suppress(ClusterError, *_BROKEN):
                    with login._translated():
                        channel = login._connected().open_channel(
                            "direct-tcpip", target, self.client_address, timeout=_OPEN_S
                        )
                    with contextlib.closing(channel):
                        _carry(self.request, channel)

        with self._lock:
            if target not in self._forwards:
                server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
                server.daemon_threads = True
                threading.Thread(target=server.serve_forever, daemon=True).start()
                self._forwards[target] = int(server.server_address[1])
        return f"http://127.0.0.1:{self._forwards[target]}"

    def _connected(self) -> paramiko.Transport:
        with self._lock:
            if self.session is None or not self.session.is_connected:
                self.session = ssh.connect(self.tunnel)
                # Without these packets a cut cable is not noticed.
                self.session.transport.set_keepalive(_KEEPALIVE_S)
            transport: paramiko.Transport = self.session.transport
            return transport

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Raise this package's errors; a connection that broke off is closed."""
        try:
            yield
        except (*_BROKEN, RuntimeError) as error:  # the last one when Python ends
            with self._lock, contextlib.suppress(*_BROKEN):
                session, self.session, self.tunnel.session = self.session, None, None
                if session is not None:
                    session.close()  # it may hang
            why = ssh.unreachable(self.tunnel, error)
            if isinstance(error, TimeoutError):
                why = f"{self.name} gave no answer within {_COMMAND_S} s."
            raise Unanswered(why) from error


def _here(text: bytes) -> tuple[int, bytes, bytes]:
    """Run a script on this machine. It ends what it has begun, whatever Ctrl-C ends."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(["sh"], stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
    try:
        output, errors = process.communicate(text, timeout=_COMMAND_S)
    except subprocess.TimeoutExpired as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise TimeoutError from error
    if process.returncode < 0:
        raise EOFError("Its shell was killed.")
    return process.returncode, output, errors


def key_of(tunnel: Any) -> str:
    """All by which the way of a tunnel differs from others; a command may choose another Slurm."""
    names = ("key", "port", "identity", "pre_command")
    return repr([type(tunnel).__name__, *(getattr(tunnel, name, None) for name in names)])


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
