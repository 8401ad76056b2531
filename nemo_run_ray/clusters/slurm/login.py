"""The host where Slurm's commands run, reached by NeMo-Run's tunnel."""

from __future__ import annotations

import base64
import contextlib
import os
import shlex
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import fabric
import invoke
import paramiko
from nemo_run.core.tunnel.client import LocalTunnel

from nemo_run_ray.errors import ClusterError, Unanswered

#: Seconds for one command, and for a sign of life of a connection that nothing comes through.
_COMMAND_S = 90
_KEEPALIVE_S = 10
#: Seconds for a new connection.
_CONNECT_S = 20
#: Of a command whose connection broke off before it ended.
_NO_EXIT_CODE = -1
#: What paramiko and sockets raise when a connection is not there or breaks off.
_BROKEN = (OSError, EOFError, paramiko.SSHException, invoke.exceptions.ThreadException)


class Login:
    """Runs commands and writes files where Slurm is, for all threads of this process.

    Args:
        tunnel: NeMo-Run's, of this machine or by SSH.
    """

    def __init__(self, tunnel: Any) -> None:
        self.tunnel = tunnel
        self._lock = threading.RLock()

    @property
    def is_here(self) -> bool:
        """Whether it is this machine."""
        return isinstance(self.tunnel, LocalTunnel)

    @property
    def name(self) -> str:
        """Who and where, for messages."""
        return str(self.tunnel.key)

    @property
    def key(self) -> str:
        """All by which this way differs from others."""
        return key_of(self.tunnel)

    def run(self, script: str) -> str:
        """What a script for ``sh`` prints.

        Raises:
            Unanswered: the connection has broken off; the script may have run.
            ClusterError: it has failed, or nobody may log in.
        """
        with self._lock, self._translated():
            self._connect()
            done = self.tunnel.run(
                _command(script),
                warn=True,
                in_stream=False,
                timeout=_COMMAND_S,
            )
            if done.return_code == _NO_EXIT_CODE:
                raise EOFError("The connection broke off.")
        if done.return_code != 0:
            told = done.stderr.strip() or done.stdout.strip() or f"exit code {done.return_code}"
            raise ClusterError(f"A command on {self.name} has failed: {told}")
        return str(done.stdout)

    def put(self, text: str, path: str) -> None:
        """Write a file there.

        Raises:
            Unanswered: the connection has broken off.
            ClusterError: the file cannot be written, or nobody may log in.
        """
        with tempfile.NamedTemporaryFile("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            with self._lock, self._translated():
                self._connect()
                self.tunnel.put(file.name, path)

    def get(self, path: str, here: Path) -> None:
        """Fetch a file from there, whole or not at all.

        Raises:
            Unanswered: the connection has broken off.
            ClusterError: the file cannot be read, or nobody may log in.
        """
        part = here.with_name(f"{here.name}.{os.getpid()}")
        try:
            with self._lock, self._translated():
                self._connect()
                self.tunnel.get(path, str(part))
            part.replace(here)
        finally:
            part.unlink(missing_ok=True)

    def transport(self) -> paramiko.Transport:
        """The SSH connection as it is now, made again if it has broken off.

        Raises:
            Unanswered: there is no connection now.
            ClusterError: nobody may log in.
        """
        with self._lock, self._translated():
            self._connect()
            found: paramiko.Transport = self.tunnel.session.transport
        return found

    def _connect(self) -> None:
        """Connect as NeMo-Run does, which takes a connection that breaks off for a refusal."""
        tunnel = self.tunnel
        if self.is_here or (tunnel.session is not None and tunnel.session.is_connected):
            return
        keys = {"key_filename": [str(tunnel.identity)]} if tunnel.identity else {}
        session = fabric.Connection(
            tunnel.host,
            user=tunnel.user,
            port=tunnel.port,
            connect_kwargs=keys,
            connect_timeout=_CONNECT_S,
            forward_agent=False,
            config=fabric.Config(overrides={"run": {"in_stream": False}}),
        )
        try:
            session.open()
        except paramiko.SSHException as error:
            session.close()
            if keys or not _is_refusal(error) or not sys.stdin.isatty():
                raise
            tunnel.connect()  # it asks for a password
            session = tunnel.session
        # Or nobody notices that a cable is cut.
        session.transport.set_keepalive(_KEEPALIVE_S)
        tunnel.session = session

    @contextlib.contextmanager
    def _translated(self) -> Any:
        try:
            yield
        except SystemExit as error:  # NeMo-Run ends the program
            raise ClusterError(self._refused(error)) from error
        except paramiko.SSHException as error:
            if _is_refusal(error):
                raise ClusterError(self._refused(error)) from error
            self._disconnect()
            raise Unanswered(f"{self.name} cannot be reached now: {_words(error)}") from error
        except invoke.exceptions.CommandTimedOut as error:
            self._disconnect()
            raise Unanswered(f"{self.name} gave no answer within {_COMMAND_S} s.") from error
        except PermissionError as error:
            raise ClusterError(f"{error.filename} cannot be written: {error.strerror}.") from error
        except _BROKEN as error:
            self._disconnect()
            raise Unanswered(f"{self.name} cannot be reached now: {_words(error)}") from error

    def _refused(self, error: BaseException) -> str:
        return (
            f"Nobody could log in as {self.name} ({error}). Try `ssh {self.name}` in a shell, and "
            "give the tunnel the right user, host, port and identity."
        )

    def _disconnect(self) -> None:
        """The next command makes a new connection; this one may hang."""
        session = None if self.is_here else self.tunnel.session
        if session is not None:
            with contextlib.suppress(*_BROKEN):
                session.close()
            self.tunnel.session = None


def _is_refusal(error: paramiko.SSHException) -> bool:
    """Whether the host let nobody in, as opposed to a connection that broke off."""
    # Paramiko calls it so when the connection breaks off meanwhile.
    is_one = isinstance(error, paramiko.AuthenticationException) and "saw EOF" not in str(error)
    return is_one or "No authentication methods" in str(error)


def _words(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text if text.endswith(".") else f"{text}."


def _command(script: str) -> str:
    """A script for ``sh`` as a line that any login shell can read, csh and fish too."""
    return f"echo {base64.b64encode(script.encode()).decode()} | base64 -d | sh"


def key_of(tunnel: Any) -> str:
    """All by which the way of a tunnel differs from others."""
    parts = [tunnel.key, getattr(tunnel, "port", None), getattr(tunnel, "identity", None)]
    return ":".join([type(tunnel).__name__, *(str(part) for part in parts if part is not None)])


def quoted(*parts: str) -> str:
    """A path for ``sh``."""
    return shlex.quote(os.path.join(*parts))
