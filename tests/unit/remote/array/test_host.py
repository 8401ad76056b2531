"""The real process of a host and those of its elements, without Ray."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nemo_run as run
import psutil
import pytest

from nemo_run_ray import array
from nemo_run_ray.remote.array import host as host_module
from nemo_run_ray.remote.array import notes as notes_module
from nemo_run_ray.remote.hosts.relay import PROGRAM
from nemo_run_ray.remote.node.rundir import JOBS
from nemo_run_ray.remote.spec import JobSpec, RoleSpec, to_json
from tests import array_tasks, array_with_thread
from tests.relays import Relayed, holding, is_zombie, wait


class Host(Relayed):
    """What a driver holds of one host."""

    def prepare(self, argv: tuple[str, ...], slots: int = 2, **values: Any) -> None:
        """Make it ready for commands with a value in ``VALUE``, or functions with a ``path``."""
        keep_run_dir, grace_s = values.pop("keep_run_dir", False), values.pop("grace_s", 0.3)
        self._field = "path" if "runs" in values else "env.VALUE"
        job = JobSpec(argv, grace_s=grace_s, python=sys.executable, keep_run_dir=keep_run_dir)
        role = RoleSpec("element", job)
        self.order(
            {
                "do": "prepare",
                "role": to_json(role),
                "index": 0,
                "job": "job",
                "run_dir": self.run_dir,
                "code": "",
                "address": "127.0.0.1",
                "tag": self.tag,
                "given": {},
                "secrets": {},
                "slots": slots,
                "gpus": 0.0,
                "runs": "command",
                "args_at": 0,
                "elements": "scripts/elements",
                "count": 100,
                **values,
            }
        )
        self.until("prepared")

    def shell(self, program: str, **values: Any) -> None:
        """Make it ready for a program of the shell."""
        self.prepare(("sh", "-c", program), **values)

    def run(self, *elements: int, value: str = "x") -> None:
        rows = [[element, 1, {"values": {self._field: value}}] for element in elements]
        self.order({"do": "run", "elements": rows})

    def ended(self, within_s: float = 10) -> list[Any]:
        """The next element that ends: its index, attempt and exit code."""
        return list(self.until("ended", within_s)["row"][:3])

    def elements(self) -> set[int]:
        """The processes of its elements."""
        return holding(f"NEMO_RUN_RAY_TAG={self.tag}", "environ")

    def supervisors(self) -> tuple[int, int]:
        """Its own process, and the watchdog of it."""
        found = holding(f"NEMO_RUN_RAY_SUPERVISOR={self.tag}", "environ")
        (watchdog,) = [pid for pid in found if psutil.Process(pid).name() == "nrr-watchdog"]
        (host,) = found - {watchdog}
        return host, watchdog


@pytest.fixture
def make(relays, tag, temporary) -> Iterator[Callable[[], Host]]:
    """Makes hosts on one node, each with an actor of its own."""
    made: list[Host] = []

    def host() -> Host:
        number = len(made)
        folder = temporary / f"{tag}.{number}"
        folder.mkdir()
        place = (f"{tag}/{number}", f"{tag}~host-{number}", "array.host")
        made.append(Host(relays.Relay(str(folder), *place), folder, place))
        return made[-1]

    yield host
    for one in made:
        one.drain()
        one.relay.close()
        one.relay._channel.close()


@pytest.fixture
def host(make) -> Host:
    return make()


def test_elements_run_in_their_slots_and_their_ends_are_told(host, tmp_path):
    host.shell(f"echo $VALUE; mkdir {tmp_path}/$NEMO_RUN_ARRAY_INDEX; sleep 0.1; exit $VALUE")
    host.run(0, 1, 2, 3, 4, value="7")
    assert sorted(host.ended() for _ in range(5)) == [[index, 1, 7] for index in range(5)]
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "2", "3", "4", "tmp"]


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_host_that_leaves_removes_its_notes_and_its_run_directory_unless_that_is_kept(
    host, is_kept
):
    host.shell("true", keep_run_dir=is_kept)
    (notes,) = host.root.parent.glob("*.notes")
    host.order({"do": "leave"})
    assert not host.until("gone")["was_killed"]
    assert not notes.exists()
    assert host.root.exists() is is_kept
    shutil.rmtree(host.root, ignore_errors=True)


def test_a_host_that_is_killed_before_it_leaves_is_reported_as_killed(host):
    host.shell("true")
    process, _ = host.supervisors()
    os.kill(process, signal.SIGSTOP)
    host.order({"do": "leave"})
    os.kill(process, signal.SIGKILL)
    assert host.until("gone")["was_killed"]
    assert list(host.root.parent.glob("*.notes"))


def test_what_an_element_starts_in_a_session_of_its_own_goes_on_while_it_runs(host, tmp_path):
    program = f"setsid sh -c 'sleep 1.5; touch {tmp_path}/done' & sleep 0.1; exec sleep 3"
    host.shell(
        f"sh -c '{program}'".replace("sh -c 'sleep", 'sh -c "sleep').replace("done'", 'done"')
    )
    host.run(0)
    wait((tmp_path / "done").exists)
    assert host.ended() == [0, 1, 0]


def _begin_three(host: Host, tmp_path: Path) -> None:
    """The first element has ended, the second one runs, and the third one waits."""
    host.shell(
        f"mkdir {tmp_path}/$NEMO_RUN_ARRAY_INDEX; test $NEMO_RUN_ARRAY_INDEX = 0 || sleep 1000",
        slots=1,
    )
    host.run(0, 1)
    assert host.ended() == [0, 1, 0]
    wait((tmp_path / "1").exists)


def sweep(package: Path, *hosts: Host, forget: bool = False) -> dict[str, Any]:
    """Run the program that ends what dead hosts have left; its answer."""
    rows = [[number, one.tag, one.run_dir] for number, one in enumerate(hosts)]
    request = {"sweep": rows, "forget": [one.run_dir for one in hosts if forget]}
    module = "nemo_run_ray_remote.array.notes"
    words = [sys.executable, "-I", "-c", PROGRAM, str(package), "", "", module]
    done = subprocess.run(
        words, input=json.dumps(request), stdout=subprocess.PIPE, text=True, check=True
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.mark.parametrize("stopped", ["host", "host and watchdog", "watchdog"])
def test_a_stopped_host_starts_nothing_and_notes_nothing_once_it_is_swept(
    make, package, tmp_path, stopped
):
    dead = make()
    _begin_three(dead, tmp_path)
    host, watchdog = dead.supervisors()
    for pid, name in ((host, "host"), (watchdog, "watchdog")):
        if name in stopped:
            os.kill(pid, signal.SIGSTOP)
    dead.run(2)

    answer = sweep(package, dead)

    ((number, ended, begun),) = answer["swept"]
    assert (number, [row[:3] for row in ended], begun) == (0, [[0, 1, 0]], [[1, 1]])
    assert not holding(dead.tag, "environ")
    time.sleep(0.3)
    assert not (tmp_path / "2").exists()
    assert not dead.root.exists()
    assert sweep(package, dead) == answer, "the driver may have died with it"
    assert sweep(package, dead, forget=True)["swept"] == [[0, [], None]]
    assert not list(dead.root.parent.glob("*.notes"))


def test_what_has_lost_its_mark_is_ended_by_the_watchdog(make, package, tmp_path):
    dead = make()
    hides = f"setsid env -i sh -c 'echo $$ > {tmp_path}/pid; sleep 1000'"
    dead.shell(f"{hides} & sleep 1000")
    dead.run(0)
    wait(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    os.kill(dead.supervisors()[0], signal.SIGSTOP)

    assert sweep(package, dead)["swept"] == [[0, [], [[0, 1]]]]

    assert is_zombie(int((tmp_path / "pid").read_text()))


def test_notes_that_are_torn_are_read_as_far_as_they_are_whole(make, package, tmp_path):
    dead = make()
    _begin_three(dead, tmp_path)
    (notes,) = dead.root.parent.glob("*~host-0.notes")
    with notes.open("a") as file:
        file.write('\n[5, 1, 0\n[6, 1, 0, 0.1, "exit code 0"]\n[7, 1')
    os.kill(dead.supervisors()[0], signal.SIGKILL)

    ((_, ended, begun),) = sweep(package, dead)["swept"]

    assert [row[0] for row in ended] == [0, 6]
    assert begun == [[1, 1]]


def test_what_does_not_end_is_named(tag, monkeypatch):
    monkeypatch.setattr(notes_module, "kill", lambda pid, number: None)  # as if the kernel had it
    monkeypatch.setattr(notes_module, "_TELL_S", 0.5)
    process = psutil.Popen(["sleep", "1000"], env={**os.environ, "NEMO_RUN_RAY_TAG": tag})
    try:
        assert notes_module._end_all([tag]) == f"process {process.pid}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def forks(package, request) -> Iterator[dict[str, Any]]:
    """What a host is told so that it forks elements, of ``array_tasks.waits`` if not said."""
    function = getattr(request, "param", array_tasks.waits)
    made = array(run.Partial(function, path=""), over={"path": ["x"]})
    folder = package / JOBS / "job" / "scripts"
    folder.mkdir(parents=True)
    (folder / "elements").write_text(made.inline)
    root = str(Path(__file__).parents[4])
    yield {"runs": "auto", "given": {"PYTHONPATH": root}}
    (folder / "elements").unlink()
    folder.rmdir()
    folder.parent.rmdir()


def _warm(host: Host) -> set[int]:
    """The process that forks elements, and no element."""
    found = set()
    for pid in host.elements():
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
            process = psutil.Process(pid)
            is_server = os.readlink(f"/proc/{pid}/fd/1").endswith("fork_server.log")
            if is_server and process.ppid() == host.supervisors()[0]:
                found.add(pid)
    return found


def test_whatever_becomes_of_the_process_that_forks_each_element_runs_once(host, forks, tmp_path):
    """It is killed during its imports, with elements that run, and with some that wait."""
    host.prepare(("python",), slots=2, **forks)
    host.run(*range(6), value=str(tmp_path))
    (warm,) = wait(lambda: _warm(host))
    os.kill(warm, signal.SIGKILL)
    wait(lambda: len(list(tmp_path.glob("begun-*"))) == 2, within_s=60)
    (warm,) = _warm(host)
    os.kill(warm, signal.SIGKILL)  # what it had forked goes on
    (tmp_path / "go").touch()

    rows = [host.ended(within_s=60) for _ in range(6)]

    assert sorted(rows) == [[index, 1, 0] for index in range(6)]
    begun = sorted((tmp_path / f"begun-{index}").read_text() for index in range(6))
    assert begun == ["x"] * 6


def _leave_descriptors(pid: int, count: int) -> None:
    """Let a process open so many more."""
    used = set(map(int, os.listdir(f"/proc/{pid}/fd")))
    limit = [number for number in range(4096) if number not in used][count]
    psutil.Process(pid).rlimit(psutil.RLIMIT_NOFILE, (limit, 4096))


def test_on_a_node_without_room_elements_wait_until_another_has_ended(host):
    host.shell("sleep 0.3", slots=3)
    supervisor = host.supervisors()[0]
    _leave_descriptors(supervisor, 6)  # of two elements: each keeps one, and needs five to begin
    host.run(0, 1, 2, 3)
    assert sorted(host.ended() for _ in range(4)) == [[index, 1, 0] for index in range(4)]
    _leave_descriptors(supervisor, 1)
    host.run(4)
    assert host.until("ended", within_s=30)["row"] == [4, 1, None], "another host may have it"
    assert "has no room for another process: Too many" in host.until("unprepared")["words"]


def test_a_fork_server_without_room_does_not_end_elements(host, forks, tmp_path):
    host.prepare(("python",), slots=2, **forks)
    host.run(0, value=str(tmp_path))
    wait((tmp_path / "begun-0").exists, within_s=60)
    (warm,) = _warm(host)
    folder = Path(f"/proc/{warm}/fd")  # until it has closed the element's output
    wait(lambda: len({name for fd in folder.iterdir() if "pipe" in (name := os.readlink(fd))}) == 1)
    _leave_descriptors(warm, 0)
    host.run(1, value=str(tmp_path))
    time.sleep(0.3)
    (tmp_path / "go").touch()
    assert host.ended() == [0, 1, 0]
    assert host.until("ended", within_s=30)["row"] == [1, 1, None]
    assert "has no room for another process: Too many" in host.until("unprepared")["words"]


def test_the_output_is_passed_on_to_its_limit_and_a_failure_has_its_last_line(monkeypatch):
    monkeypatch.setattr(host_module, "OUTPUT_MAX", 4)
    cut = "nemo_run_ray: no more of its output is passed on\n"
    rows = {b"abc\n": "abc\n", b"abc\nd": f"abc\n{cut}", b"abcde": cut}
    for data, text in rows.items():
        element = host_module.RunningElement((0, 1), {}, {})
        write_end = element.pipe()
        os.write(write_end, data)
        assert element.close() == text
        os.close(write_end)
        element.ended(1)
        assert element.why() == f"exit code 1: {data.split()[-1].decode()}"


_LATE = """
import json, os, socket
from types import SimpleNamespace
from nemo_run_ray.remote.array.host import HostProcess, RunningElement
from nemo_run_ray.remote.hosts.relay import Channel

notes = []
host = HostProcess(Channel(socket.socketpair()[0]), "")
host._notes, host._place = SimpleNamespace(add=notes.append), SimpleNamespace(root="/nowhere")
for index, words in enumerate(("exit 0", "exit 3", "kill -9 $$")):
    pid = os.spawnlp(os.P_NOWAIT, "sh", "sh", "-c", words)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    host._running.append(RunningElement((index, 1), {}, {}))
    host._running[-1].pid = pid
host.note_ends()
host.note_ends()
print(json.dumps([row[:3] for row in notes]))
"""


def test_what_ends_by_itself_while_the_rest_is_killed_is_noted():
    """In a process of its own, since all its children are collected."""
    words = [sys.executable, "-W", "ignore", "-c", _LATE]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[0, 1, 0], [1, 1, 3]]


@pytest.mark.parametrize("forks", [array_with_thread.task], indirect=True)
def test_imports_that_start_a_thread_or_replace_fork_forbid_a_fork(host, forks, tmp_path):
    host.prepare(("python",), slots=2, **forks)
    host.run(0, 1, value=str(tmp_path))
    assert sorted(host.ended(within_s=60) for _ in range(2)) == [[0, 1, 0], [1, 1, 0]]
    (told,) = [one for one in host.reports if one["at"] == "obstacles"]
    assert told["obstacles"] == ["have started the thread 'helper'", "have replaced os.fork"]
    assert {path.name for path in tmp_path.glob("*-*")} == {"0-True", "1-True"}


def test_those_that_wait_and_those_that_run_are_cancelled(host, tmp_path):
    host.shell(f"mkdir {tmp_path}/$NEMO_RUN_ARRAY_INDEX; exec sleep 1000", slots=2)
    host.run(0, 1, 2, 3)
    wait(lambda: {"0", "1"} <= set(os.listdir(tmp_path)))
    host.order({"do": "cancel", "elements": [[0, 1], [3, 1], [1, 7], [9, 1]]})

    assert sorted(host.ended() for _ in range(2)) == [[0, 1, 143], [3, 1, 143]]

    wait((tmp_path / "2").exists)  # in the place of the first one; the second one has gone on
    wait(lambda: len(host.elements()) == 2)


def test_one_that_was_asked_for_and_is_not_forked_yet_is_cancelled(host, forks, tmp_path):
    host.prepare(("python",), slots=1, **forks)
    host.run(0, value=str(tmp_path))
    (warm,) = wait(lambda: _warm(host))
    os.kill(warm, signal.SIGSTOP)  # as if its imports took for ever
    host.order({"do": "cancel", "elements": [[0, 1]]})
    assert host.ended() == [0, 1, 143]
    os.kill(warm, signal.SIGCONT)
    (tmp_path / "go").touch()
    host.run(1, value=str(tmp_path))
    assert host.ended(within_s=60) == [1, 1, 0]
    assert not (tmp_path / "begun-0").exists()


def test_what_a_forked_element_leaves_in_a_session_of_its_own_ends_with_it(host, forks, tmp_path):
    host.prepare(("python",), slots=1, **forks)
    host.run(0, value=f"{tmp_path}/daemon")
    wait((tmp_path / "daemon-pid").exists, within_s=60)
    pid = int(wait((tmp_path / "daemon-pid").read_text))
    time.sleep(1.2)  # two looks for what elements have left
    assert psutil.pid_exists(pid), "its element runs"
    (tmp_path / "go").touch()
    assert host.ended() == [0, 1, 0]
    wait(lambda: is_zombie(pid), within_s=1)  # without memory it has no environment, and ends now


def test_an_element_whose_random_numbers_get_no_new_seed_fails_with_the_reason(
    host, forks, package
):
    main = package / JOBS / "__main__.py"
    main.write_text("import sys, types\nsys.modules['numpy'] = types.SimpleNamespace(random=1)\n")
    host.prepare(("python",), **forks)
    main.unlink()
    host.run(0)
    _, _, code, _, reason = host.until("ended", within_s=60)["row"]
    assert (code, "AttributeError: 'int' object has no attribute 'seed'" in reason) == (1, True)


def test_notes_are_found_in_a_folder_that_has_become_full(temporary, tmp_path, monkeypatch):
    """Python then takes another one for temporary files."""
    (temporary / f"nemo_run_{os.getuid()}").mkdir()
    notes_module.Notes("x").add([0, 1])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert notes_module.read_notes("x") == ([], [[0, 1]])
    notes_module.forget("x")
    assert notes_module.read_notes("x") == ([], None), "any may have begun"
