"""A real SSH server of a test: its own keys, port and configuration, on this machine.

The folder ``bin`` has an ``ssh`` that reads the test's configuration instead of the user's.
"""

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

HOST_KEYS = ("ed25519", "rsa")


class Sshd:
    """The server, and the connections that it has.

    Args:
        folder: for its keys.
        env: variables of the commands that run by it.
    """

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self.key = folder / "client_key"
        for key, kind in ((self.key, "ed25519"), *((folder / kind, kind) for kind in HOST_KEYS)):
            subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-f", str(key)], check=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        lines = [
            f"Port {self.port}",
            "ListenAddress 127.0.0.1",
            *[f"HostKey {folder}/{kind}" for kind in HOST_KEYS],
            f"AuthorizedKeysFile {self.key}.pub",
            f"PidFile {folder}/pid",
            "StrictModes no",
            "PermitRootLogin yes",
            "PasswordAuthentication yes",
            "KbdInteractiveAuthentication no",
            "UsePAM no",
            "MaxStartups 100",
            "Subsystem sftp internal-sftp",
            *[f"SetEnv {name}={value}" for name, value in env.items()],
        ]
        (folder / "config").write_text("\n".join(lines) + "\n")
        self.known_hosts = folder / "known_hosts"
        self.config = folder / ".ssh/config"
        self.config.parent.mkdir()
        self.configure("")
        self.bin = folder / "bin"
        self.bin.mkdir()
        (self.bin / "ssh").write_text(
            f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self.config} "$@"\n'
        )
        (self.bin / "ssh").chmod(0o755)
        self.know(f"[127.0.0.1]:{self.port} {self.host_key('ed25519')}")
        Path("/run/sshd").mkdir(exist_ok=True)
        words = [str(shutil.which("sshd")), "-D", "-e", "-f", str(folder / "config")]
        with (folder / "log").open("w") as log:
            self._process = subprocess.Popen(words, stderr=log, stdin=subprocess.DEVNULL)
        wait_for(self._listens, 15)

    def host_key(self, kind: str) -> str:
        """The public half of one of its keys, as ``known_hosts`` has it."""
        text = (self.known_hosts.parent / f"{kind}.pub").read_text()
        return " ".join(text.split()[:2])

    def know(self, *lines: str) -> None:
        """Write the file with the keys that the user knows."""
        self.known_hosts.write_text("".join(f"{line}\n" for line in lines))

    def configure(self, lines: str) -> None:
        """Write the user's configuration of SSH."""
        files = f"UserKnownHostsFile {self.known_hosts}\nGlobalKnownHostsFile /dev/null\n"
        self.config.write_text(f"{lines}\nHost *\n{files}")

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
