"""The host where Slurm's commands run, reached by NeMo-Run's tunnel, and forwards to its ports."""

from __future__ import annotations

import base64
import os
import secrets
import shlex
import signal
import socketserver
import subprocess
import threading
from contextlib import suppress
from typing import Any

from nemo_run.core.tunnel.client import LocalTunnel

from nemo_run_ray import ssh
from nemo_run_ray.errors import ClusterError, Unanswered

#: Seconds for one command, and the speed with which a file is sent or fetched at least.
_COMMAND_S, _BYTES_PER_S = 90, 2**17
#: The first line that a script prints.
_MARK = "nemo-run-ray-begins"


class Login:
    """Runs commands and writes files where Slurm is, for all threads of this process.

    Args:
        tunnel: NeMo-Run's, of this machine or by SSH.
    """

    def __init__(self, tunnel: Any):
        self.tunnel = tunnel
        self.key = key_of(tunnel)
        #: Whether it is this machine.
        self.is_here = isinstance(tunnel, LocalTunnel)
        #: User and host, for messages.
        self.name = str(tunnel.key)
        #: ``None`` for this machine.
        self.ssh = None if self.is_here else ssh.SSHConnection(tunnel)
        #: One command at a time.
        self._turn = threading.Lock()
        self._forwards: dict[tuple[str, int], int] = {}  # ports of this process

    def run(self, script: str, most_bytes: int = 0) -> bytes:
        """Run a script for ``sh`` and return its output, for which it has more time if it is large.

        Raises:
            Unanswered: the connection has broken off; the script may have run.
            ClusterError: it has failed, or nobody may log in.
        """
        # The shell reads all of it before it begins, and no command in it reads the rest.
        text = f"{{ printf '%s\\n' {_MARK}\n{script}\n}} < /dev/null\n".encode()
        words, pipe = ["sh"], subprocess.PIPE
        with self._turn:
            if self.ssh:
                # Any login shell understands this, csh and fish too.
                before = self.tunnel.pre_command
                words = [*self.ssh.command(), f"{before} && sh" if before else "sh"]
            # In a session of its own it ends what it has begun, whatever Ctrl-C ends.
            process = subprocess.Popen(
                words, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
            )
            limit_s = _COMMAND_S + (len(text) + most_bytes) / _BYTES_PER_S
            try:
                output, errors = process.communicate(text, timeout=limit_s)
            except subprocess.TimeoutExpired as error:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                raise Unanswered(f"{self.name} gave no answer within {limit_s:.0f} s.") from error
        code = process.returncode
        if self.ssh and code == ssh.FAILED:
            why = " ".join(errors.decode(errors="replace").split())
            raise Unanswered(f"The connection to {self.name} has broken off: {why or 'no reason'}")
        if code < 0:
            raise Unanswered(f"A command on {self.name} was killed.")
        # Drop what login files print before the mark.
        output = output.partition(f"{_MARK}\n".encode())[2]
        if code != 0:
            reason = (errors.strip() or output.strip()).decode(errors="replace")
            raise ClusterError(
                f"A command on {self.name} has failed: {reason or f'exit code {code}'}"
            )
        return output

    def put(self, data: bytes, path: str) -> None:
        """Write a file there, whole or not at all; raises as ``run`` does."""
        new, path = (shlex.quote(name) for name in (f"{path}.{secrets.token_hex(4)}", path))
        self.run(
            f"base64 -d > {new} <<'END' && mv {new} {path} || exit 1\n"
            f"{base64.encodebytes(data).decode()}END\n:"
        )

    def forward(self, host: str, port: int) -> str:
        """The address of this machine that leads to a port behind the login."""
        login, target = self, (host, port)

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                """Carry one connection; without a way it is closed, and its owner asks again."""
                with suppress(ClusterError):
                    assert login.ssh
                    subprocess.call(
                        login.ssh.command(f"-W[{host}]:{port}"),
                        stdin=self.request,
                        stdout=self.request,
                        stderr=subprocess.DEVNULL,
                        start_new_session=True,
                    )

        with self._turn:
            if target not in self._forwards:
                server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
                server.daemon_threads = True
                threading.Thread(target=server.serve_forever, daemon=True).start()
                self._forwards[target] = int(server.server_address[1])
        return f"http://127.0.0.1:{self._forwards[target]}"


def key_of(tunnel: Any) -> str:
    """The values by which tunnels differ; a ``pre_command`` may choose another Slurm."""
    names = ("key", "port", "identity", "pre_command")
    return repr([type(tunnel).__name__, *(getattr(tunnel, name, None) for name in names)])
