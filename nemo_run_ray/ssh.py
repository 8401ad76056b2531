"""SSH connections by OpenSSH, which reads the user's configuration and checks the keys of hosts."""

from __future__ import annotations

import atexit
import os
import shlex
import shutil
import subprocess
import tempfile
import threading
from typing import Any

import fabric

from nemo_run_ray.errors import ClusterError, Unanswered

#: Seconds for a new connection, between two signs of its life, and without use until it ends.
_CONNECT_S, _KEEPALIVE_S, _UNUSED_S = 20, 10, 30
#: Exit code of ``ssh`` itself, and what it says when nobody may log in.
FAILED = 255
_REFUSALS = ("Permission denied", "Host key verification failed", "authentication failures")


class SSHConnection:
    """OpenSSH's connection of a NeMo-Run tunnel, which all commands share.

    It is made when it is needed, again after it has broken off, and ends with this process.
    """

    def __init__(self, tunnel: Any) -> None:
        self._name = tunnel.key
        folder = tempfile.mkdtemp(prefix="nrr-ssh-", dir="/tmp")  # the path of a socket is short
        self._socket = os.path.join(folder, "socket")
        self._lock = threading.Lock()
        self._options = ["-S", self._socket, f"-oServerAliveInterval={_KEEPALIVE_S}"]
        self._host = ["-p", str(tunnel.port)] if tunnel.port else []
        self._host += ["-i", str(tunnel.identity)] if tunnel.identity else []
        self._host += ["--", self._name]
        atexit.register(self.close)

    def command(self, *options: str) -> list[str]:
        """``ssh`` with options and the host, behind which a command may follow.

        Raises:
            Unanswered: the host cannot be reached.
            ClusterError: nobody may log in, or there is no OpenSSH.
        """
        with self._lock:
            if not os.path.exists(self._socket):
                self._open()
        return ["ssh", *self._options, "-oBatchMode=yes", *options, *self._host]

    def _open(self) -> None:
        """Make the connection; in a terminal ``ssh`` asks the user what it needs to know."""
        batch = "no" if os.isatty(0) else "yes"
        options = [f"-oControlPersist={_UNUSED_S}", f"-oBatchMode={batch}"]
        options += ["-M", f"-oConnectTimeout={_CONNECT_S}"]
        null = subprocess.DEVNULL
        # No pipe: an older ssh keeps it open as long as the connection.
        with tempfile.TemporaryFile() as errors:
            try:
                words = ["ssh", *self._options, *options, *self._host, "true"]
                code = subprocess.call(words, stdin=null, stdout=null, stderr=errors)
            except FileNotFoundError as error:
                raise ClusterError(
                    f"{self._name} cannot be reached: this machine has no program 'ssh'. Install "
                    "OpenSSH's client."
                ) from error
            if code == FAILED:
                errors.seek(0)
                raise self.error(errors.read())

    def error(self, errors: bytes) -> ClusterError:
        """The error for an ``ssh`` that failed after it had printed this."""
        why = errors.decode(errors="replace").strip().rstrip(".")
        if not any(refusal in why for refusal in _REFUSALS):
            return Unanswered(f"{self._name} cannot be reached now: {why or 'ssh has ended'}.")
        return ClusterError(
            f"Nobody could log in as {self._name}: {why}. Try `{shlex.join(['ssh', *self._host])}` "
            "in a shell, and give the tunnel the right user, host, port and identity."
        )

    def close(self) -> None:
        if os.path.exists(self._socket):
            words = ["ssh", *self._options, "-Oexit", *self._host]
            subprocess.call(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        shutil.rmtree(os.path.dirname(self._socket), ignore_errors=True)


class Session(fabric.Connection):
    """The session of a NeMo-Run tunnel by OpenSSH; NeMo-Run's own ones take any host key."""

    is_connected = True
    _ssh: SSHConnection = None  # type: ignore[assignment]

    def __init__(self, tunnel: Any) -> None:
        super().__init__(
            tunnel.host,
            user=tunnel.user,
            port=tunnel.port,
            connect_kwargs={"key_filename": [str(tunnel.identity)]} if tunnel.identity else {},
            config=fabric.Config(overrides={"run": {"in_stream": False}}),
        )
        self._ssh = SSHConnection(tunnel)

    def run(self, command: str, **options: Any) -> Any:
        return self.local(shlex.join([*self._ssh.command(), command]), **options)

    def put(self, local: str, remote: str) -> None:
        write = shlex.join([*self._ssh.command(), f"cat > {shlex.quote(remote)}"])
        self.local(f"{write} < {shlex.quote(local)}", hide=True)
