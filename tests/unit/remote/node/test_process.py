"""The real watchdog and runner, with their output in a file, as under Ray."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from nemo_run_ray.remote.end_record import end_mark, record_in
from tests.relays import holding, wait

_NONCE = "0123456789abcdef"
_MARK = end_mark(_NONCE)

_WATCHDOG = """
import json, os, sys
sys.path.append(sys.argv[1])
from nemo_run_ray_remote.node.output import write
from nemo_run_ray_remote.node.supervise import supervise
argv, env, cwd, grace_s, tag, nonce = json.loads(sys.argv[2])
work = lambda runner: runner.run(argv, {**os.environ, **env}, cwd, grace_s)
end = supervise(tag, work)
write(end.line(nonce))
sys.exit(end.code)
"""

#: Prelude of commands: ``put`` returns when the runner has read what was written, and nothing else.
_PUT = """
import fcntl, os, signal, struct, subprocess, sys, termios, time
def put(data):
    os.write(1, data)
    while struct.unpack("i", fcntl.ioctl(1, termios.FIONREAD, b"\\0\\0\\0\\0"))[0]:
        time.sleep(0.001)
def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.002)
"""


@dataclass
class Kept:
    """One command under a watchdog."""

    watchdog: subprocess.Popen
    log: Path
    tag: str

    @property
    def raw(self) -> bytes:
        return self.log.read_bytes()

    @property
    def text(self) -> str:
        """The log as Ray reads it: strict UTF-8, universal newlines."""
        return self.log.read_text(encoding="utf-8")

    @property
    def output(self) -> str:
        """What came from the command."""
        return self.text.rpartition(_MARK)[0]

    @property
    def ending(self) -> str:
        record = record_in(self.text.splitlines(), [_NONCE])
        return record.text if record else ""

    def end(self, within_s: float = 30) -> int:
        return self.watchdog.wait(within_s)

    def says(self, text: str) -> None:
        wait(lambda: text in self.text, 20)

    def command(self) -> set[int]:
        """Processes of the command, wherever they went."""
        return holding(f"NEMO_RUN_RAY_TAG={self.tag}", "environ")

    def runner(self) -> int:
        (pid,) = holding(self.tag, "cmdline") - {self.watchdog.pid}
        return pid


@pytest.fixture
def start(package, tmp_path) -> Iterator[Callable[..., Kept]]:
    begun = []

    def begin(*argv: str, env: dict | None = None, cwd: str = "", grace_s: float = 10) -> Kept:
        tag = uuid.uuid4().hex
        log = tmp_path / f"{tag}.log"
        told = json.dumps([argv, env or {}, cwd or str(tmp_path), grace_s, tag, _NONCE])
        with open(log, "wb") as file:
            watchdog = subprocess.Popen(
                [sys.executable, "-I", "-c", _WATCHDOG, str(package), told],
                stdout=file,
                stderr=file,
            )
        begun.append(Kept(watchdog, log, tag))
        return begun[-1]

    yield begin
    for one in begun:
        one.watchdog.kill()
        one.watchdog.wait()
        for pid in one.command():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def start_python(start) -> Callable[..., Kept]:
    """Starts Python code as the command."""
    return lambda code, *words, **options: start(
        sys.executable, "-I", "-c", _PUT + code, *words, **options
    )


@pytest.mark.parametrize("code", [0, 1, 3, 127, 255])
def test_the_exit_code_is_the_commands(start, code):
    kept = start("sh", "-c", f"exit {code}")
    assert kept.end() == code
    assert kept.ending == f"exit code {code}"


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGTERM", "SIGABRT"])
def test_a_signals_death_is_named(start, name):
    kept = start("sh", "-c", f"ulimit -c 0; kill -{name.removeprefix('SIG')} $$")
    code = 128 + signal.Signals[name]
    assert kept.end() == code
    assert kept.ending == f"killed by {name} (exit code {code})"


@pytest.mark.parametrize(
    "pieces",
    [
        ["a\r", "\nb\n"],
        ["a\r\nb\n"],
        ["a\r", "b\r", "\n"],
        ["\r", "\r", "\n", "x\n"],
        ["a\r", "\n", "\n", "b\n"],
        ["a\r", "\n", "\nb\n"],
        ["10%\r", "20%\r", "done\n"],
    ],
)
def test_line_ends_count_once_wherever_the_writes_are_cut(start_python, pieces):
    """All readers must count the same characters, whether they take ``\\r`` for an end or not."""
    kept = start_python(f"for one in {pieces!r}: put(one.encode())")
    assert kept.end() == 0
    assert kept.output == "".join(pieces).replace("\r\n", "\n").replace("\r", "\n")
    assert b"\r" not in kept.raw


_DAEMON = """
if os.fork():
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
for fd in range(3):
    os.close(fd)
open(sys.argv[1], "w").close()
time.sleep(1000)
"""


def test_daemons_go_with_the_command(start_python, tmp_path):
    up = tmp_path / "up"
    code = f"subprocess.Popen([sys.executable, '-c', {_PUT + _DAEMON!r}, sys.argv[1]])\n"
    kept = start_python(code + "wait_for(sys.argv[1])", str(up))
    assert kept.end() == 0
    assert up.exists()
    assert kept.command() == set()


def test_sigterm_reaches_the_command_once(start_python, tmp_path):
    code = """
folder = sys.argv[1]
signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"TERM\\n"))
put(b"ready\\n")
for name in ("1", "2", "3", "4", "5"):
    wait_for(f"{folder}/{name}")
    put(f"seen {name}\\n".encode())
sys.exit(7)
"""
    kept = start_python(code, str(tmp_path), grace_s=30)
    kept.says("ready")
    kept.watchdog.terminate()
    kept.says("TERM")
    kept.watchdog.terminate()
    kept.watchdog.send_signal(signal.SIGINT)
    for name in "12345":  # each answer is a round of the runner's loop after the signals
        (tmp_path / name).touch()
        kept.says(f"seen {name}")
    assert kept.end() == 7
    assert kept.output.count("TERM") == 1
    assert "cancelled" in kept.ending
    assert "no process of it is left" in kept.ending


def test_the_command_is_no_descendant_of_the_watchdog(start):
    """Ray signals every descendant of its shell: the command would get SIGTERM twice."""
    kept = start("sh", "-c", "echo ready; sleep 1000")
    kept.says("ready")
    below = {one.pid for one in psutil.Process(kept.watchdog.pid).children(recursive=True)}
    assert not below & kept.command()
    assert len(kept.command()) >= 1


@pytest.mark.parametrize("victim", ["watchdog", "runner"])
def test_the_death_of_one_of_ours_ends_everything(start_python, tmp_path, victim):
    up = tmp_path / "up"
    code = f"""
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, '-c', {_PUT + _DAEMON!r}, sys.argv[1]])
wait_for(sys.argv[1])
put(b"ready\\n")
time.sleep(1000)
"""
    kept = start_python(code, str(up), grace_s=1000)
    kept.says("ready")
    runner = kept.runner()
    assert len(kept.command()) == 2
    os.kill(kept.watchdog.pid if victim == "watchdog" else runner, signal.SIGKILL)
    code = kept.end()
    wait(lambda: not kept.command(), 20)
    wait(lambda: not psutil.pid_exists(runner) or psutil.Process(runner).status() == "zombie", 20)
    if victim == "runner":
        assert code == 137
        assert "process on this node was killed" in kept.ending


def test_a_program_that_is_not_there(start):
    kept = start("no such program é", env={"PATH": "/nowhere/bin"})
    assert kept.end() == 127
    assert "'no such program é'" in kept.ending
    assert kept.ending in kept.output, "readers without --raw do not see the last line"
    assert "/nowhere/bin" in kept.ending


def test_a_program_that_cannot_be_run(start, tmp_path):
    (tmp_path / "data").write_text("no program")
    kept = start("./data")
    assert kept.end() == 126
    assert "'./data' cannot be started" in kept.ending
    assert kept.ending in kept.output, "readers without --raw do not see the last line"


def test_work_that_raises_is_reported_in_the_log(package, tmp_path):
    code = (
        "import sys; sys.path.append(sys.argv[1])\n"
        "from nemo_run_ray_remote.node.supervise import supervise\n"
        "def work(runner): raise RuntimeError('two\\nlines')\n"
        "sys.exit(supervise('tag', work).code)"
    )
    words = [sys.executable, "-I", "-c", code, str(package)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    assert done.returncode == 125
    assert "RuntimeError: two" in done.stdout
