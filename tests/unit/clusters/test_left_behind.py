"""What an embedded Ray that has died leaves for those who look later."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_run_ray.clusters import left_behind
from nemo_run_ray.clusters.local_state import Home, LocalState, process_identity

SESSION = "session_2026-11-22_10-00-00_1_1"


def _dead(tmp_path: Path, number: int = 1, session: str = SESSION) -> LocalState:
    """A cluster whose first process was killed, with the log of one job."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    born = process_identity(process.pid)
    root = tmp_path / f"nray-{number}"
    logs = root / "r" / session / "logs"
    logs.mkdir(parents=True)
    (root / left_behind.MARKER).touch()
    (logs / "job-driver-x_1.job.log").write_text("its line\n")
    (root / "r" / "session_latest").symlink_to(session)
    process.kill()
    process.communicate()
    return LocalState(pid=process.pid, born=born, url="http://127.0.0.1:1", root=str(root))


@pytest.fixture
def home(tmp_path) -> Home:
    return Home(tmp_path / "home")


def test_logs_and_the_reason_outlive_the_next_start(home, tmp_path):
    with home.locked():
        home.log.write_text("gcs_server [exit code=-9]\n")
        home.write(_dead(tmp_path))
        assert home.left_log(SESSION, "x_1.job").read_text() == "its line\n"
        before = home.why_gone(SESSION)
        assert "has died: its process" in before
        home.remove_dead()
    home.log.write_text("of the next one\n")
    assert not (tmp_path / "nray-1").exists()
    assert home.left_log(SESSION, "x_1.job").read_text() == "its line\n"
    assert home.left_log(SESSION, "x_1.other") is None
    told = home.why_gone(SESSION)
    assert told.splitlines()[-1].strip() == "gcs_server [exit code=-9]"
    assert str(home.path / "left" / SESSION / "ray.log") in told
    assert home.why_gone("session_of_another") == "", "of that one nothing is known"


def test_only_the_last_sessions_are_kept(home, tmp_path):
    """By when they were over, and not by their names, which have the time of the wall clock."""
    names = [f"session_2026-11-22_10-00-0{number}_1_1" for number in (3, 9, 1, 4, 0, 2, 5)]
    with home.locked():
        for number, name in enumerate(names):
            home.write(_dead(tmp_path, number, name))
            home.remove_dead()
            os.utime(home.path / "left" / name, (number, number))
    kept = {path.name for path in (home.path / "left").iterdir()}
    assert kept == set(names[-5:])


def test_those_that_were_stopped_take_no_place_of_those_that_died(home, tmp_path):
    died, *stopped = [f"session_2026-11-22_10-00-0{number}_1_1" for number in range(8)]
    with home.locked():
        home.write(_dead(tmp_path, 0, died))
        home.remove_dead()
        for number, name in enumerate(stopped, start=1):
            (tmp_path / f"nray-{number}" / "r" / name).mkdir(parents=True)
            left_behind.keep(tmp_path / f"nray-{number}", home.path, None)
    assert home.left_log(died, "x_1.job") is not None
    assert "has been stopped" in home.why_gone(stopped[0])


def test_of_a_long_log_the_end_is_kept_and_it_says_so(home, tmp_path, monkeypatch):
    monkeypatch.setattr(left_behind, "_LOG_BYTES", 20)
    state = _dead(tmp_path)
    logs = Path(state.root, "r", SESSION, "logs")
    text = "".join(f"line {number}\n" for number in range(100))
    (logs / "job-driver-x_1.job.log").write_text(text)
    (logs / "job-driver-x_1.bar.log").write_text("\r50 %" * 100)
    with home.locked():
        home.write(state)
        home.remove_dead()
    found = home.left_log(SESSION, "x_1.job").read_text()
    end = "line 98\nline 99\n"
    assert found == f"{left_behind.CUT}{len(text) - len(end)} bytes of this log are not kept\n{end}"
    bar = "".join(left_behind.text_of(home.left_log(SESSION, "x_1.bar")))
    assert bar.endswith("50 %\n50 %\n50 %\n50 %"), "a line without an end is kept too"


def test_a_log_is_as_old_as_its_last_line(home, tmp_path):
    state = _dead(tmp_path)
    os.utime(Path(state.root, "r", SESSION, "logs", "job-driver-x_1.job.log"), (1000, 1000))
    with home.locked():
        home.write(state)
        home.remove_dead()
    assert home.left_log(SESSION, "x_1.job").stat().st_mtime == 1000


def test_a_folder_that_takes_nothing_keeps_nobody_from_the_next_start(home, tmp_path, caplog):
    state = _dead(tmp_path)
    with home.locked():
        home.write(state)
        (home.path / "left").write_text("no folder")
        home.remove_dead()
    assert home.read() is None
    assert not Path(state.root).exists()
    assert "is not kept" in caplog.text


def test_of_one_that_was_stopped_only_that_is_known(home, tmp_path):
    state = _dead(tmp_path)
    process = subprocess.Popen(["sleep", "100"], start_new_session=True)
    state.pid, state.born = process.pid, process_identity(process.pid)
    with home.locked():
        home.write(state)
        assert home.why_gone(SESSION) == ""
        assert home.left_log(SESSION, "x_1.job") is None, "that of a job that goes on is Ray's"
        home.remove_dead()
    process.wait()
    assert home.why_gone(SESSION) == "the embedded Ray that had it has been stopped"
    assert home.left_log(SESSION, "x_1.job") is None
