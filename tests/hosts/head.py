"""Ray's head on host n1: its job table may outlive it, in a Redis on a host of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.conftest import wait_for
from tests.hosts import own_set

TESTBED = Path(__file__).with_name("testbed.py")
#: Each test process has a set of hosts of its own.
NUMBER = own_set.claim()


def address_of(name: str) -> str:
    return f"10.77.{NUMBER}.{name[1:]}"


HOST, ADDRESS = "n1", address_of("n1")
REDIS_HOST, REDIS = "n4", address_of("n4")
#: Runs its arguments and collects orphans, as an init does. A host's first process is a ``sleep``,
#: which leaves dead orphans as zombies, and to Ray's ``kill -s 0`` a zombie is a living supervisor.
INIT = """\
import ctypes, os, sys
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
if os.fork() == 0:
    os.execvp(sys.argv[2], sys.argv[2:])
while True:
    try:
        os.wait()
    except ChildProcessError:
        break
"""

#: Before a command in shell: what it starts gets the processor before the tests that run beside it.
#: Linux shares the processor out among sessions, and each start of a host is one.
FIRST = "echo -10 > /proc/self/autogroup; exec"
_START_S = 300
#: What `ray start` says when its raylet died meanwhile.
_GAVE_UP = "timed out during startup"
_STARTED = "Ray runtime started"


def bed(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(TESTBED), *arguments],
        env={**os.environ, "TESTBED": NUMBER},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def share(name: str) -> None:
    """Take from a host's Ray, which is up, what ``FIRST`` gave it.

    While the head is away, each agent of a raylet takes a whole processor (Ray 2.60), and with
    precedence nothing else on the machine would go on.
    """
    namespace = namespace_of(name)
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it ended while we looked
            if folder.name.isdigit() and os.readlink(folder / "ns" / "pid") == namespace:
                (folder / "autogroup").write_text("0")


class Head:
    """Ray's head, and what can happen to it.

    Args:
        logs: folder for the output of what is started.
        environment: assignments before ``ray start``, as a shell reads them.
        options: of ``ray start``.
        answers: whether its dashboard does.
    """

    def __init__(
        self, logs: Path, environment: str, options: str, answers: Callable[[], bool]
    ) -> None:
        self._logs = logs
        self._environment = environment
        self._options = options
        self._answers = answers
        self._log = logs / f"{HOST}.log"

    def start_redis(self) -> None:
        """In memory only: it lives as long as its host, and leaves no file."""
        command = (
            f"exec redis-server --bind {REDIS} --port 6379 --protected-mode no "
            "--save '' --appendonly no --dir /tmp --daemonize no"
        )
        bed("spawn", REDIS_HOST, str(self._logs / "redis.log"), "--", "sh", "-c", command)
        wait_for(lambda: _is_open(REDIS, 6379), 20)

    def start(self, keeps_its_table: bool = True) -> None:
        """Start it, with the tables in Redis, or in its memory as Ray does by default.

        A raylet gives its agents 15 s to start, whatever its options are (Ray 2.60), and dies when
        they need longer. A head on a busy machine is started again, as its supervisor would do.
        """
        deadline = time.monotonic() + _START_S
        while not self._starts(keeps_its_table):
            assert time.monotonic() < deadline, f"Ray's head does not start:\n{self._told()}"
            self.kill()

    def _starts(self, keeps_its_table: bool) -> bool:
        redis = ""
        if keeps_its_table:
            redis = f"RAY_REDIS_ADDRESS={REDIS}:6379 RAY_external_storage_namespace=hosts"
        # Without --block: with it Ray's starter ends the whole head when its dashboard is killed.
        ray = f"{sys.executable} -m ray.scripts.scripts start --head --disable-usage-stats"
        command = (
            f"{FIRST} {self._environment} {redis} {sys.executable} -c '{INIT}' init {ray} "
            f"--port=6379 --dashboard-host={ADDRESS} --node-ip-address={ADDRESS} {self._options}"
        )
        self._log.unlink(missing_ok=True)
        bed("spawn", HOST, str(self._log), "--", "sh", "-c", command)
        wait_for(lambda: any(it in self._told() for it in (_STARTED, _GAVE_UP)), within_s=120)
        if _GAVE_UP in self._told():
            return False
        wait_for(self._answers, within_s=120)
        share(HOST)
        return True

    def _told(self) -> str:
        """What the last start has printed."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def start_way(self, port: int, file: Path) -> None:
        """Another way to the dashboard, which loses the part of all answers that a file names."""
        command = [sys.executable, str(Path(__file__).with_name("dropping.py"))]
        to = f"http://{ADDRESS}:8265"
        log = str(self._logs / "dropping.log")
        bed("spawn", HOST, log, "--", *command, str(port), to, str(file))
        wait_for(lambda: _is_open(ADDRESS, port), 20)

    def kill(self) -> None:
        """SIGKILL to every process of Ray on the host, which lives on with users' processes."""

        def kill_once() -> bool:
            found = list(_processes(_is_rays))
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not found

        wait_for(kill_once, 20)

    def restart_dashboard(self) -> None:
        """SIGKILL to the dashboard, which Ray does not bring back, and the same command again."""
        (pid,) = _processes(lambda words: any(one.endswith("dashboard.py") for one in words))
        words = _strings(pid, "cmdline")
        environment = _strings(pid, "environ")
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not self._answers(), 20)
        log = str(self._logs / "dashboard.log")
        bed("spawn", HOST, log, "--", "env", "-i", *environment, *words)
        wait_for(self._answers, within_s=120)


def _is_rays(words: list[str]) -> bool:
    return (
        words[0].startswith(("ray::", "ray-dashboard-"))
        or ("/site-packages/ray/" in "".join(words[:3]) and "init" not in words)
        or (words[1] == "-m" and words[2].startswith("ray."))
        or "multiprocessing." in "".join(words[2:4])
    )


def _processes(wanted: Callable[[list[str]], bool]) -> Iterator[int]:
    """Living processes of the host of which this holds of the words of their command lines."""
    namespace = namespace_of(HOST)
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and os.readlink(folder / "ns" / "pid") == namespace:
                words = _strings(int(folder.name), "cmdline")
                if words and wanted([*words, "", "", ""]):  # a zombie has no words
                    yield int(folder.name)
        except (OSError, UnicodeDecodeError):
            continue  # it ended while we looked


def namespace_of(name: str) -> str:
    """The name that Linux has for the processes of a host."""
    return bed("exec", name, "--", "readlink", "/proc/self/ns/pid").strip()


def _strings(pid: int, name: str) -> list[str]:
    text = Path(f"/proc/{pid}/{name}").read_bytes().rstrip(b"\0").decode()
    return text.split("\0") if text else []


def _is_open(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True
