"""SSH connections by OpenSSH, which reads the user's configuration and checks the keys of hosts."""

from __future__ import annotations

import atexit
import os
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from time import monotonic
from typing import Any

import fabric

from nemo_run_ray.errors import ClusterError, Unanswered

#: Exit code of ``ssh`` itself.
FAILED = 255
#: Parts of its messages about failures that another try would not change.
_CONFIGURATION = ("Bad configuration option", "Bad owner or permissions", "terminating,")
_LOGIN = ("Permission denied (", "authentication failures")
#: Whatever the user's configuration says, a command has no terminal, and nothing beside it.
_PLAIN = ("-T", "-oRemoteCommand=none", "-oClearAllForwardings=yes")
#: A command makes no connection of its own.
_SHARED = ("-oControlMaster=no", "-oProxyCommand=false", "-oProxyJump=none", "-oBatchMode=yes")


class SSHConnection:
    """OpenSSH's connection of a NeMo-Run tunnel, which all commands share.

    It is made when it is needed, again after it has broken off, and ends with this process,
    however that ends: ``cat`` at its other side reads a pipe of this process.
    """

    def __init__(self, tunnel: Any):
        self._name = tunnel.key
        self._socket = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # the process that has made it, no fork of that
        self._lock = threading.Lock()
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
            process = self._process
            if not process or process.poll() is not None or not os.path.exists(self._socket):
                self._open()
        return ["ssh", "-S", self._socket, *_SHARED, *_PLAIN, *options, *self._host]

    def _open(self) -> None:
        """Make the connection; in a terminal ``ssh`` asks the user what it needs to know."""
        self.close()
        if not shutil.which("ssh"):
            raise ClusterError(
                f"{self._name} cannot be reached: this machine has no program 'ssh'. Install "
                "OpenSSH's client."
            )
        folder = tempfile.mkdtemp(prefix="nrr-ssh-", dir="/tmp")  # the path of a socket is short
        self._socket, self._owner = f"{folder}/socket", os.getpid()
        terminal = os.isatty(0)
        options = ["-M", "-S", self._socket, "-oControlPersist=no", *_PLAIN]
        options += ["-oConnectTimeout=20", "-oServerAliveInterval=10"]
        options += [f"-oBatchMode={'no' if terminal else 'yes'}"]
        # Ctrl-C ends neither the connection nor the one to a jump host.
        words = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", "ssh", *options, *self._host, "cat"]
        end, shown = monotonic() + 60, 0
        with tempfile.TemporaryFile() as errors:
            process = self._process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors
            )
            try:
                # ssh makes it when the host has let it in.
                while not os.path.exists(self._socket):
                    ended = process.poll() is not None
                    text = os.pread(errors.fileno(), 2**16, shown)
                    if ended or (not terminal and monotonic() > end):
                        raise self._error(os.pread(errors.fileno(), 2**16, 0))
                    if terminal and text:  # such as how to give a second factor
                        os.write(2, text)
                        shown += len(text)
                    time.sleep(0.02)
            except BaseException:
                self.close()
                raise

    def _error(self, errors: bytes) -> ClusterError:
        """The error for a connection that failed after ``ssh`` had printed this."""
        lines = errors.decode(errors="replace").splitlines()
        why = " ".join(line.strip() for line in lines if not line.startswith("@")).rstrip(".")
        shell = shlex.join(["ssh", *self._host])
        if any(text in why for text in _CONFIGURATION):
            return ClusterError(f"ssh refuses its configuration: {why}. Correct it.")
        if "Host key verification failed" in why:
            return ClusterError(
                f"The key of {self._name}, or of a jump host, is not trusted: {why}. Compare it "
                f"with what the administrators say; `{shell}` in a shell adds an unknown one. Only "
                "when they confirm a changed one, remove the old one by `ssh-keygen -R` first."
            )
        if any(text in why for text in _LOGIN):
            return ClusterError(
                f"Nobody could log in as {self._name}: {why}. Try `{shell}` in a shell, and give "
                "the tunnel the right user, host, port and identity."
            )
        return Unanswered(f"{self._name} cannot be reached now: {why or 'ssh gave no answer'}.")

    def close(self) -> None:
        if self._process and self._owner == os.getpid():
            self._process.terminate()
            self._process.wait()
            assert self._process.stdin
            self._process.stdin.close()
            shutil.rmtree(os.path.dirname(self._socket), ignore_errors=True)
        self._process = None


class Session(fabric.Connection):
    """The session of a NeMo-Run tunnel by OpenSSH; NeMo-Run's own ones take any host key."""

    is_connected = True
    _ssh: SSHConnection = None  # type: ignore[assignment]

    def __init__(self, tunnel: Any):
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
        done = self.local(f"{write} < {shlex.quote(local)}", hide=True, warn=True)
        if done.failed:
            reason = done.stderr.strip() or f"exit code {done.exited}"
            raise ClusterError(f"{local} could not be copied to {self.host}:{remote}: {reason}")
