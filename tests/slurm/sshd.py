"""A real SSH server of a test: its own keys, port and configuration, on this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.conftest import wait_for


class Sshd:
    """The server, and the connections that it has.

    Args:
        folder: for its keys.
        env: variables of the commands that run by it.
    """

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self.key = folder / "client_key"
        for key in (self.key, folder / "host_key"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True
            )
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        lines = [
            f"Port {self.port}",
            "ListenAddress 127.0.0.1",
            f"HostKey {folder}/host_key",
            f"AuthorizedKeysFile {self.key}.pub",
            f"PidFile {folder}/pid",
            "StrictModes no",
            "PermitRootLogin yes",
            "PasswordAuthentication no",
            "UsePAM no",
            "Subsystem sftp internal-sftp",
            *[f"SetEnv {name}={value}" for name, value in env.items()],
        ]
        (folder / "config").write_text("\n".join(lines) + "\n")
        Path("/run/sshd").mkdir(exist_ok=True)
        words = [str(shutil.which("sshd")), "-D", "-e", "-f", str(folder / "config")]
        with (folder / "log").open("w") as log:
            self._process = subprocess.Popen(words, stderr=log, stdin=subprocess.DEVNULL)
        wait_for(self._listens, 15)

    def _listens(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    def drop(self) -> int:
        """Break off all its connections; how many there were."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        found = [int(pid) for pid in children.read_text().split()]
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(found)

    def close(self) -> None:
        self._process.terminate()
        self.drop()
        self._process.wait(10)


@contextlib.contextmanager
def running(folder: Path, env: Mapping[str, str]) -> Iterator[Sshd]:
    server = Sshd(folder, env)
    try:
        yield server
    finally:
        server.close()
