"""The folder in which processes find the embedded Ray, without a Ray."""

import contextlib
import json
import os
import stat
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from filelock import Timeout

from nemo_run_ray import LocalCluster
from nemo_run_ray.clusters import local
from nemo_run_ray.clusters.local import MARKER, LocalState
from nemo_run_ray.errors import ClusterError, ConfigError
from nemo_run_ray.remote import CALLERS_TMPDIR, FOLDER, local_watch
from nemo_run_ray.remote.dashboard import Unanswered
from nemo_run_ray.remote.end_record import CUT
from nemo_run_ray.remote.local_watch import process_identity
from tests.conftest import wait_for


@pytest.fixture
def home(weird_tmp_path):
    return LocalCluster(state_dir=str(weird_tmp_path))


def _shifted(process_identity: str, ticks: int) -> str:
    """The identity of another process that had the same pid in the same boot."""
    boot, _, born = process_identity.partition("/")
    return f"{boot}/{int(born) + ticks}"


def _state(pid: int, born: str) -> LocalState:
    return LocalState(pid=pid, born=born, url="http://127.0.0.1:1", root="/tmp/nray-x")


def _me() -> LocalState:
    return _state(os.getpid(), process_identity(os.getpid()))


@pytest.fixture
def child():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.stdin.close()
    process.wait()


def test_a_pid_that_somebody_else_has_now(home):
    home._write(_state(os.getpid(), _shifted(process_identity(os.getpid()), 1)))
    assert home._read() is None


def test_another_version_finds_it_by_its_state(home):
    home._write(_me())
    path = home._path / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "of_another": True}))
    assert home._read() == _me()


def test_the_token_is_private_and_new_each_time(home):
    before = os.umask(0)
    try:
        home._environment("/tmp/nray-x")
        first = home._token.read_text()
        (home._path / "token").chmod(0o666)  # a mistake that does not last
        home._environment("/tmp/nray-x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((home._path / "token").stat().st_mode) == 0o600
    assert len(first) >= 32
    assert home._token.read_text() != first


def test_the_environment_of_the_embedded_ray(home, monkeypatch):
    """A program that runs in an allocation of Slurm may start an embedded Ray there."""
    names = ["RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_API_SERVER_ADDRESS"]
    for part in ("LIFE", "RUN", "DASHBOARD", "ENDS_AT", "LASTS_S", "RENEWS"):
        names.append(f"NEMO_RUN_RAY_{part}")
    for name in names:
        monkeypatch.setenv(name, "of another cluster")
    env = home._environment("/tmp/nray-x")
    assert env["RAY_AUTH_MODE"] == "token"
    assert env["RAY_AUTH_TOKEN_PATH"] == str(home._path / "token")
    assert "of another cluster" not in env.values()
    assert env["TMPDIR"] == "/tmp/nray-x"
    assert home._token.read_text() not in env.values()


@pytest.mark.parametrize("given", ["", "/var"])
def test_a_job_has_the_callers_folder_of_temporary_files(given):
    program = "import os, tempfile; tempfile.gettempdir(); import remote; "
    program += "print(tempfile.gettempdir(), os.environ.get('TMPDIR', ''))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"TMPDIR": "/dev/shm", CALLERS_TMPDIR: given},
        cwd=Path(FOLDER).parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{given or '/tmp'} {given}\n"


@pytest.mark.parametrize("is_made_by_us", [True, False])
def test_stopping_removes_what_a_killed_cluster_left(tmp_path, child, is_made_by_us):
    """Its folder and its other processes go; a process that has its pid now, and a folder that a
    spoilt file names, stay."""
    root = tmp_path / "root"
    root.mkdir()
    if is_made_by_us:
        (root / MARKER).touch()
    left = subprocess.Popen(["sleep", "1000"], env={**os.environ, "NEMO_RUN_RAY_LOCAL": str(root)})
    state = _state(child.pid, _shifted(process_identity(child.pid), -1000))
    state.root = str(root)
    home = LocalCluster(state_dir=str(tmp_path / "home"))
    home._path.mkdir()
    home._write(state)
    home.stop()
    assert left.wait(10) < 0
    if is_made_by_us:
        wait_for(lambda: not root.exists())
        root.mkdir()  # as a program of the dead cluster that still writes does
        wait_for(lambda: not root.exists())
    assert root.exists() is not is_made_by_us
    assert child.poll() is None
    assert not (home._path / "state.json").exists()


def test_a_log_of_another_user_is_named_with_its_folder(home):
    home._log.mkdir()  # cannot be written to either
    with pytest.raises(ConfigError, match="cannot use its folder"):
        home.connect()


def test_who_holds_the_lock_for_too_long_is_named(home, monkeypatch):
    monkeypatch.setattr(local, "_LOCK_LIMIT_S", 0.1)
    with home._locked(), pytest.raises(ClusterError, match=r"(?s)for 0 s \(lock .*lock\); end it"):
        home.connect()


@pytest.fixture
def room(monkeypatch, tmp_path):
    """Folders of a cluster that starts, and a program in the place of Ray that only sleeps."""
    ray = tmp_path / "ray"
    ray.write_text("#!/bin/sh\nexec sleep 600\n")
    ray.chmod(0o755)
    monkeypatch.setattr(local, "sys", SimpleNamespace(executable=str(ray), prefix=sys.prefix))
    short = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    yield short
    wait_for(lambda: not list(short.iterdir()))
    short.rmdir()


def test_a_ray_that_was_too_slow_is_started_again(room, tmp_path, monkeypatch):
    """Its raylet gives up after 15 s; what fails at once fails the next time too."""
    starts = tmp_path / "starts"
    for slow_s, count in ((0.0, 3), (10.0, 1)):
        monkeypatch.setattr(local, "_SLOW_S", slow_s)
        starts.unlink(missing_ok=True)
        (tmp_path / "ray").write_text(f"#!/bin/sh\necho s >> {starts}\necho no node\nexit 1\n")
        with pytest.raises(ClusterError, match="no node"):
            LocalCluster(state_dir=str(tmp_path / "state")).connect()
        assert starts.read_text() == "s\n" * count


_IDLE = b'[{"status": "SUCCEEDED"}]'


@pytest.mark.parametrize(
    ("fields", "tables", "stopped_at"),
    [
        ({}, [_IDLE], 660),  # the first look is one too
        ({"users": [[os.getpid(), "boot/1"]]}, [_IDLE], 660),  # of another process with this pid
        ({"users": [[os.getpid(), process_identity(os.getpid())]]}, [_IDLE], None),
        ({"keep": True}, [_IDLE], None),
        ({}, [b'[{"status": "RUNNING"}]'], None),
        ({}, [b'[{"status": "PENDING"}]'] * 5 + [_IDLE], 960),
        ({}, [b"[]"] * 5 + [_IDLE], 960),  # a job ran between two looks
        ({}, [b""], None),  # the dashboard does not answer
        ({"root": "/tmp/nray-another"}, [_IDLE], None),
        ({"born": "boot/1"}, [_IDLE], None),
    ],
)
def test_what_nobody_uses_is_stopped_after_a_while(home, monkeypatch, fields, tables, stopped_at):
    state = _me()
    for name, value in fields.items():
        setattr(state, name, value)
    home._write(state)
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        if now > 3000:
            raise TimeoutError

    def stop(*_: object, **__: object) -> None:
        raise InterruptedError

    monkeypatch.setattr(local_watch.time, "sleep", sleep)
    monkeypatch.setattr(local_watch, "monotonic", lambda: now)
    monkeypatch.setattr(local_watch.subprocess, "run", stop)
    left = list(tables)

    def table() -> list[dict[str, str]]:
        text = left.pop(0) if len(left) > 1 else left[0]
        if not text:
            raise Unanswered
        return json.loads(text)

    client = SimpleNamespace(table=table)
    monkeypatch.setattr(local_watch, "DashboardClient", lambda *_: client)
    if stopped_at is None:
        with contextlib.suppress(TimeoutError):
            local_watch.main(str(home._path), "/tmp/nray-x", 600)
    else:
        with pytest.raises(InterruptedError):
            local_watch.main(str(home._path), "/tmp/nray-x", 600)
        assert now == stopped_at


SESSION = "session_2026-11-22_10-00-00_1_1"


def _dead(tmp_path: Path) -> LocalState:
    """A cluster whose first process was killed, with the log of one job."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    born = process_identity(process.pid)
    root = tmp_path / "nray-1"
    logs = root / "r" / SESSION / "logs"
    logs.mkdir(parents=True)
    (root / MARKER).touch()
    (logs / "job-driver-x_1.job.log").write_text("its line\n")
    (root / "r" / "session_latest").symlink_to(SESSION)
    process.kill()
    process.communicate()
    return LocalState(pid=process.pid, born=born, url="http://127.0.0.1:1", root=str(root))


def test_logs_and_the_reason_outlive_the_next_start(home, tmp_path, monkeypatch):
    state = _dead(tmp_path)
    log = Path(state.root, "r", SESSION, "logs", "job-driver-x_1.job.log")
    log.write_text("".join(f"line {number}\n" for number in range(100)))
    os.utime(log, (1000, 1000))
    monkeypatch.setattr(local, "_LOG_BYTES", 30)
    home._log.write_text("gcs_server [exit code=-9]\n")
    home._write(state)
    before = home.archive(SESSION)
    assert "has died: its process" in before.reason
    assert before.log("x_1.job") == log
    assert home.archive("").reason == before.reason, "whatever its session is"
    assert "out-of-memory" not in before.reason
    home._log.write_text("2026-11-22 10:00:00,000\tINFO scripts.py:989 -- To use Ray …\n")
    guess = "gone; the machine's out-of-memory killer may have ended it. Its log is"
    assert f"{guess} {home._log}" in home.archive("").reason
    home._log.write_text("gcs_server [exit code=-9]\n")
    home.stop()
    home._log.write_text("of the next one\n")
    wait_for(lambda: not (tmp_path / "nray-1").exists())
    archive = home.archive(SESSION)
    lines = archive.log("x_1.job").read_text().splitlines()
    assert (lines[0].startswith(CUT), lines[-1]) == (True, "line 99"), "of a long log the end"
    assert archive.log("x_1.job").stat().st_mtime == 1000, "as old as its last line"
    assert archive.log("x_1.other") is None
    assert archive.reason.splitlines()[-1] == "    | gcs_server [exit code=-9]"
    assert str(home._path / "archive" / SESSION / "logs" / "ray.log") in archive.reason
    assert home.archive("session_of_another") is None
    assert home.archive("") is None


def test_of_one_that_was_stopped_the_job_table_and_the_logs_are_kept(home, tmp_path):
    state = _dead(tmp_path)
    process = subprocess.Popen(["sleep", "100"], start_new_session=True)
    state.pid, state.born = process.pid, process_identity(process.pid)
    with home._locked():
        home._write(state)
        assert home.archive(SESSION) is None
        home._stop(state, [{"submission_id": "x_1.job", "status": "SUCCEEDED"}])
    process.wait()
    archive = home.archive(SESSION)
    assert archive.reason == "the embedded Ray that had it has been stopped"
    assert archive.rows["x_1.job"]["status"] == "SUCCEEDED"
    assert archive.log("x_1.job").read_text() == "its line\n"


def test_nothing_is_lost_while_another_process_stops_it(home, tmp_path):
    home._write(_dead(tmp_path))
    kept = home._path / "archive" / SESSION
    kept.mkdir(parents=True)
    with ThreadPoolExecutor() as pool:
        with home._locked():
            archive = pool.submit(home.archive, SESSION)
            (kept / "reason").write_text("it has been stopped")
            (home._path / "state.json").unlink()
        assert archive.result().reason == "it has been stopped"


def test_a_detached_run_keeps_it_until_it_is_idle(home, monkeypatch):
    stopped = Mock()
    monkeypatch.setattr(LocalCluster, "_stop", stopped)
    monkeypatch.setattr(LocalCluster, "_client", lambda *_: SimpleNamespace(table=list))
    home._write(_me())
    home.detach()
    home._leave(os.getpid())
    assert not stopped.called
    home.stop_unused()
    assert stopped.called


@pytest.mark.parametrize("error", [OSError(28, "No space left", "/tmp/x"), Timeout("another lock")])
def test_an_error_under_the_lock_is_raised_as_it_is(home, error):
    with pytest.raises(type(error)) as caught, home._locked():
        raise error
    assert caught.value is error
    with home._locked():
        pass
