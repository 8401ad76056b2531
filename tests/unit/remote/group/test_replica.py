"""The real relays and the real processes of replicas, without Ray."""

import contextlib
import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import psutil
import pytest

from nemo_run_ray.remote.group.driver import variables
from nemo_run_ray.remote.spec import RENDEZVOUS, GroupSpec, JobSpec, RoleSpec, to_json
from tests.relays import Relayed, holding, is_zombie, wait

_LOCAL = "127.0.0.1"

#: Prelude of commands.
_WORDS = """
import json, os, signal, socket, subprocess, sys, time
def say(text):
    os.write(1, f"{text}\\n".encode())
def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.005)
def stay():
    # Not one long sleep: a signal just before it runs Python's handler only after it.
    while True:
        time.sleep(0.02)
"""


def _python(code: str, *words: str) -> tuple[str, ...]:
    return (sys.executable, "-ISc", _WORDS + code, *words)


def _shell(code: str) -> tuple[str, ...]:
    return ("sh", "-c", code)


def _role(
    argv: tuple[str, ...] = ("true",), task: Mapping[str, Any] | None = None, **values: Any
) -> RoleSpec:
    return RoleSpec("train", JobSpec(argv, **(task or {})), **values)


def _preparation(role: RoleSpec, tag: str, run_dir: str, **values: Any) -> dict[str, Any]:
    """As the driver orders it."""
    return {
        "do": "prepare",
        "role": to_json(role),
        "index": 0,
        "job": "job",
        "run_dir": run_dir,
        "code": "code-1",
        "address": _LOCAL,
        "tag": tag,
        "given": {},
        "secrets": {},
        **values,
    }


class Site(Relayed):
    """What a driver holds of one replica, and the relays of its actor."""

    def prepare(self, role: RoleSpec, **values: Any) -> None:
        self._role = role
        self.order(_preparation(role, self.tag, self.run_dir, **values))

    def start(self) -> None:
        """With the variables that the driver gives when all replicas are on this node."""
        ports = next(one["ports"] for one in self.reports if one["at"] == "prepared")
        replicas = [("train", index) for index in range(self._role.replicas)]
        env = variables(
            GroupSpec((self._role,)),
            ("train", 0),
            dict.fromkeys(replicas, _LOCAL),
            dict.fromkeys(replicas, ports),
        )
        self.order({"do": "start", "env": env})

    def run(self, role: RoleSpec, **values: Any) -> None:
        self.prepare(role, **values)
        self.until("prepared")
        self.start()

    def processes(self) -> set[int]:
        """The role's, wherever they went."""
        return holding(f"NEMO_RUN_RAY_TAG={self.tag}", "environ")

    def process(self) -> int:
        """Ours, which looks after them; the processes of other replicas have the same words."""
        return _only(wait(self._parents))

    def _parents(self) -> set[int]:
        # A child has the words of its parent until it becomes a program, so words alone do not do.
        role, parents = self.processes(), _parents_of(holding(str(self.folder), "cmdline"))
        guards = {pid for pid, parent in parents.items() if parent not in parents}
        ours = {pid for pid, parent in parents.items() if parent in guards}
        looking_after = ours & set(_parents_of(role).values())
        return looking_after if role else ours


def _parents_of(pids: set[int]) -> dict[int, int]:
    """The parents of those that are still there."""
    found: dict[int, int] = {}
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found[pid] = psutil.Process(pid).ppid()
    return found


def _only(found: Any) -> int:
    (one,) = found
    return int(one)


@pytest.fixture
def make(relays, tag, temporary) -> Iterator[Callable[..., Site]]:
    """Makes actors, one after the other on the same node; gives their replicas."""
    made: list[Site] = []

    def begin() -> Site:
        number = len(made)
        folder = temporary / f"{tag}.{number}"
        folder.mkdir()
        place = (f"{tag}/{number}", f"{tag}.{number}~train-0", "group.replica")
        made.append(Site(relays.Relay(str(folder), *place), folder, place))
        return made[-1]

    yield begin
    for one in made:
        one.drain()
        one.relay.close()
        one.relay._channel.close()


@pytest.fixture
def site(make) -> Site:
    return make()


_BIND = """
for name in sys.argv[1:]:
    server = socket.socket()
    server.bind(("", int(os.environ[f"NEMO_RUN_TRAIN_PORT_{name}"])))
    server.listen()
    say(f"{name} {server.getsockname()[1]}")
"""


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("", 0))
        return one.getsockname()[1]


def test_ports_are_the_roles_from_the_preparation_to_the_start(site):
    fixed = _free_port()
    site.prepare(_role(_python(_BIND, "A", "B", "C"), ports={"a": 0, "b": fixed, "c": 0}))
    ports = site.until("prepared")["ports"]
    assert ports["b"] == fixed
    assert len({0, *ports.values()}) == 4
    for port in ports.values():  # nobody else can take it meanwhile
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("", port))
    site.start()
    assert site.until("exited")["code"] == 0
    assert site.text == "".join(f"{name} {ports[name.lower()]}\n" for name in "ABC")


_SHOW = "say(json.dumps([dict(os.environ), sys.argv[1:], os.getcwd(), sys.stdin.read()]))"


def test_a_process_gets_its_variables_words_folder_and_no_input(make, package, monkeypatch):
    monkeypatch.setenv("NODE_HAS", "1")
    monkeypatch.setenv("BOTH", "node")
    monkeypatch.setenv("PYTHONPATH", "/from/ray")
    site = make()
    words = ("$NEMO_RUN_HEAD_NODE_IP:x", "$HOME *", "/nemo_run/code", "")
    task = {"env": {"MINE": "é /nemo_run/code", "BOTH": "task"}, "secrets": ("TOKEN",)}
    site.run(
        _role(_python(_SHOW, *words), task),
        given={"RAY_ADDRESS": "10.0.0.1:6379", "BOTH": "driver"},
        secrets={"TOKEN": "s3cret"},
    )
    assert site.until("exited")["code"] == 0
    env, argv, cwd, given_input = json.loads(site.text)
    code = str(site.root / "nemo_run" / "code")
    assert argv == [f"{_LOCAL}:x", "$HOME *", code, ""]
    assert cwd == code
    assert given_input == ""
    assert env["NODE_HAS"] == "1"
    assert env["MINE"] == f"é {code}"
    assert env["BOTH"] == "task"
    assert env["TOKEN"] == "s3cret"
    assert env["RAY_ADDRESS"] == "10.0.0.1:6379"
    assert env["NEMO_RUN_TRAIN_HOST"] == _LOCAL
    assert env["PYTHONPATH"].split(os.pathsep) == [code, str(package), "/from/ray"]
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} & set(env)


def test_20000_lines_are_complete_and_in_order_over_pulls_that_are_lost(site):
    site.run(_role(_shell("seq 20000")))
    while "exited" not in site.kinds():
        site.ask(len(site.reports), 0.05)  # the answer does not arrive
        site.pull(0.05)
    assert site.text == "".join(f"{number}\n" for number in range(1, 20001))


def test_all_output_comes_before_the_exit(site):
    site.run(
        _role(
            _shell(
                "(trap 'echo child ends; exit' TERM; echo up; while :; do sleep 0.01; "
                "done) & while ! [ -e stop ]; do sleep 0.01; done; exit 4"
            )
        )
    )
    site.says("up")
    (site.root / "nemo_run" / "code" / "stop").touch()
    exited = site.until("exited")
    assert exited["code"] == 4
    assert "child ends" in site.text
    assert site.reports[-1] == exited


def test_one_failing_process_ends_the_others_and_its_code_is_the_replicas(site):
    code = """
if os.environ["LOCAL_RANK"] == "1":
    wait_for("up")
    sys.exit(3)
def leave(*_):
    say("told to end")
    sys.exit(7)
signal.signal(signal.SIGTERM, leave)
open("up", "w").close()
stay()
"""
    site.run(_role(_python(code), processes=2, ranked=True, ports={RENDEZVOUS: 0}))
    exited = site.until("exited")
    assert exited["code"] == 3
    assert exited["words"] == "process 1: exit code 3"
    assert site.text == "told to end\n"
    assert site.processes() == set()


#: A process that ignores SIGTERM, with a child in its session, one in another, and a daemon.
_STUBBORN = """
signal.signal(signal.SIGTERM, lambda *_: say("TERM"))
here, tell = os.pipe()  # Python drops what a process gets before fork() has returned in it
if not os.fork():
    os.write(tell, b"x")
    stay()
if not os.fork():
    os.setsid()
    os.write(tell, b"x")
    stay()
if not os.fork():
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork():
        os._exit(0)
    for fd in range(3):
        os.close(fd)
    stay()
os.wait()
for _ in range(2):
    os.read(here, 1)
say("up")
stay()
"""


def _stubborn(**task: Any) -> RoleSpec:
    return _role(_python(_STUBBORN), task)


def test_a_replica_is_started_again_with_its_ports_and_folder(site):
    code = (
        _BIND
        + """
with open("starts", "a") as file:
    file.write("x")
say(os.path.getsize("starts"))
sys.exit(3)
"""
    )
    site.run(_role(_python(code, "A"), service=True, ports={"a": 0}))
    assert site.until("exited")["code"] == 3
    for _ in range(2):
        site.start()
        site.until("ready")
        assert site.until("exited")["code"] == 3
    port = site.reports[0]["ports"]["a"]
    assert site.text == f"A {port}\n1\nA {port}\n2\nA {port}\n3\n"
    assert site.kinds() == ["prepared"] + ["ready", "exited"] * 3


def test_orders_are_carried_out_once_and_in_their_order(site):
    site._role = _role(_shell("echo x >> ran; cat ran"))
    prepare = _preparation(site._role, site.tag, site.run_dir)
    start, again = {"do": "start", "env": {"N": "1"}}, {"do": "start", "env": {"N": "2"}}
    for number, order in [(1, start), (1, start), (0, prepare), (0, prepare), (1, start)]:
        site.relay.order(number, order)
    assert site.until("exited")["code"] == 0
    site.relay.order(1, start)
    site.relay.order(0, prepare)
    site.relay.order(2, again)
    assert site.until("exited")["code"] == 0
    assert site.kinds() == ["prepared", "ready", "exited", "ready", "exited"]
    assert site.text == "x\nx\nx\n"


#: Prints 30 MB, and beside it how much of that it could write.
_MUCH = """
piece = b"0123456789abcde\\n" * 4096
with open("progress", "w") as progress:
    for number in range(480):
        os.write(1, piece)
        progress.write("x")
        progress.flush()
"""
_PIECE = b"0123456789abcde\n" * 4096


def _written(site: Site) -> int:
    path = site.root / "nemo_run" / "code" / "progress"
    return path.stat().st_size * len(_PIECE) if path.exists() else 0


def _until_it_waits(site: Site) -> int:
    """Bytes that the command could write until it made no progress for a while."""
    last, since = 0, time.monotonic()
    deadline = since + 15
    while not last or time.monotonic() - since < 0.4:
        assert time.monotonic() < deadline
        if (now := _written(site)) != last:
            last, since = now, time.monotonic()
        time.sleep(0.02)
    return last


def _busy(process: psutil.Process, for_s: float) -> float:
    """Seconds of computing in so much time."""
    before = process.cpu_times()
    time.sleep(for_s)
    after = process.cpu_times()
    return after.user + after.system - before.user - before.system


def test_a_command_waits_while_nobody_pulls_and_nothing_is_lost(site):
    site.run(_role(_python(_MUCH)))
    before = psutil.Process().memory_info().rss
    assert len(_PIECE) <= _until_it_waits(site) < 20 * 2**20
    assert psutil.Process().memory_info().rss - before < 24 * 2**20
    ours = psutil.Process(site.process())
    assert ours.memory_info().rss < 64 * 2**20
    assert _busy(ours, 0.4) < 0.1
    digest, size_bytes, code = hashlib.sha256(), 0, None
    seen = len(site.reports)
    deadline = time.monotonic() + 30
    while code is None:
        assert time.monotonic() < deadline
        first, reports = site.ask(seen, 1.0)
        assert first == seen
        assert sum(map(len, reports)) < 3 * 2**20
        seen += len(reports)
        for report in map(json.loads, reports):
            if report["at"] == "text":
                digest.update(report["text"].encode())
                size_bytes += len(report["text"])
            elif report["at"] == "exited":
                code = report["code"]
    assert (code, size_bytes) == (0, 480 * len(_PIECE))
    assert digest.digest() == hashlib.sha256(_PIECE * 480).digest()


def test_close_removes_processes_and_folders(site):
    (site.folder / "package").mkdir()
    site.run(_stubborn(grace_s=1000.0))
    site.says("up")
    ours = site.process()
    assert site.root.exists()
    assert site.relay.close()
    assert site.processes() == set()
    wait(lambda: is_zombie(ours))
    assert not site.folder.exists()
    assert not site.root.exists()
    assert site.relay.close()  # twice is once
