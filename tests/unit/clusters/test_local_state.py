"""The folder in which processes find the embedded Ray, without a Ray."""

import json
import os
import stat
import subprocess
import sys

import pytest

from nemo_run_ray import LocalCluster
from nemo_run_ray.clusters import from_record, local_state
from nemo_run_ray.clusters.local_state import Home, State, process_identity
from nemo_run_ray.errors import ClusterError, ConfigError


@pytest.fixture
def home(weird_tmp_path):
    return Home(weird_tmp_path)


def _shifted(process_identity: str, ticks: int) -> str:
    """The identity of another process that had the same pid in the same boot."""
    boot, _, born = process_identity.partition("/")
    return f"{boot}/{int(born) + ticks}"


def _state(pid: int, born: str) -> State:
    return State(pid=pid, born=born, url="http://127.0.0.1:1", root="/tmp/nray-x")


def _me() -> State:
    return _state(os.getpid(), process_identity(os.getpid()))


@pytest.fixture
def child():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.stdin.close()
    process.wait()


def test_a_living_cluster_is_found(home):
    state = _me()
    home.write(state)
    assert home.read() == state


def test_nothing_is_there(home):
    assert home.read() is None


def test_a_dead_process(home, child):
    home.write(_state(child.pid, process_identity(child.pid)))
    assert home.read() is not None
    child.kill()
    child.wait()
    assert home.read() is None


def test_a_zombie_is_dead(home, child):
    home.write(_state(child.pid, process_identity(child.pid)))
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert home.read() is None


@pytest.mark.parametrize("shift", [-3600, 1])
def test_a_pid_that_somebody_else_has_now(home, shift):
    home.write(_state(os.getpid(), _shifted(process_identity(os.getpid()), shift)))
    assert home.read() is None


def test_a_cut_off_file(home):
    home.write(_me())
    path = home.path / "state.json"
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        assert home.read() is None


@pytest.mark.parametrize(
    "text", ["[]", "null", '"x"', "{}", '{"pid": 1}', "\0" * 80, '{"pid": "x"']
)
def test_another_files_text(home, text):
    (home.path / "state.json").write_text(text)
    assert home.read() is None


def test_a_file_of_a_newer_version(home):
    (home.path / "state.json").write_text(json.dumps({**vars(_me()), "color": "red"}))
    assert home.read() is None


def test_a_write_leaves_one_file(home):
    home.write(_me())
    home.write(_me())
    assert os.listdir(home.path) == ["state.json"]


def test_the_token_is_private_and_new_each_time(home):
    before = os.umask(0)
    try:
        home.environment("/tmp/nray-x")
        first = home.token()
        mode = stat.S_IMODE((home.path / "token").stat().st_mode)
        (home.path / "token").chmod(0o666)  # somebody's mistake does not last
        home.environment("/tmp/nray-x")
    finally:
        os.umask(before)
    assert mode == 0o600
    assert stat.S_IMODE((home.path / "token").stat().st_mode) == 0o600
    assert len(first) >= 32
    assert home.token() != first


def test_the_environment_of_the_embedded_ray(home, monkeypatch):
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.setenv(name, "of another cluster")
    env = home.environment("/tmp/nray-x")
    assert env["RAY_AUTH_MODE"] == "token"
    assert env["RAY_AUTH_TOKEN_PATH"] == str(home.path / "token")
    assert "of another cluster" not in env.values()
    assert home.token() not in env.values()


def test_the_folder_is_private(tmp_path):
    home = Home(tmp_path / "a" / "b")
    with home.locked():
        assert stat.S_IMODE(home.path.stat().st_mode) == 0o700


def test_a_cluster_is_found_by_its_record(weird_tmp_path):
    cluster = LocalCluster(state_dir=str(weird_tmp_path), num_cpus=3)
    again = from_record(json.loads(json.dumps(cluster.record())))
    assert again.find() is None
    home = Home(weird_tmp_path)
    home.environment("/tmp/nray-x")
    home.write(_me())
    found = again.find()
    assert found.url == "http://127.0.0.1:1"
    assert found.headers == {"Authorization": f"Bearer {home.token()}"}
    assert home.token() not in repr(found) + repr(cluster) + json.dumps(cluster.record())


def test_stopping_what_is_not_there(tmp_path):
    cluster = LocalCluster(state_dir=str(tmp_path))
    cluster.stop()
    assert cluster.find() is None


def test_stopping_buries_what_a_killed_cluster_left(tmp_path, child):
    """Its folder and its other processes go; who has its pid now is left alone."""
    root = tmp_path / "root"
    root.mkdir()
    left = subprocess.Popen(["sleep", "1000"], env={**os.environ, "NEMO_RUN_RAY_LOCAL": str(root)})
    state = _state(child.pid, _shifted(process_identity(child.pid), -1000))
    state.root = str(root)
    home = Home(tmp_path / "home")
    home.path.mkdir()
    home.write(state)
    LocalCluster(state_dir=str(home.path)).stop()
    assert left.wait(10) < 0
    assert not root.exists()
    assert child.poll() is None
    assert not (home.path / "state.json").exists()


@pytest.mark.parametrize(
    "fields",
    [
        {"num_cpus": 0},
        {"num_cpus": -1},
        {"num_gpus": -1},
        {"num_cpus": True},
        {"num_cpus": "4"},
        {"num_cpus": 1.5},
    ],
)
def test_counts_are_checked(fields):
    (name,) = fields
    with pytest.raises(ConfigError, match=name):
        LocalCluster(**fields)


def test_who_waits_too_long_for_another_process_is_told_so(home, monkeypatch):
    monkeypatch.setattr(local_state, "_LOCK_LIMIT_S", 0.2)
    message = "Another process has been starting"
    with home.locked(), pytest.raises(ClusterError, match=message), Home(home.path).locked():
        pytest.fail("both hold it")


def test_a_folder_that_is_none(tmp_path):
    (tmp_path / "file").touch()
    home = Home(tmp_path / "file" / "ray")
    with pytest.raises(ConfigError, match="cannot use its folder"):
        home.read()
    with pytest.raises(ConfigError, match="NEMORUN_HOME"), home.locked():
        pytest.fail("there is no such folder")


_GREETING = """2026-11-22 09:26:35,703\tINFO usage_lib.py:447 -- Usage stats collection is disabled.
2026-11-22 09:26:35,703\tSUCC scripts.py:1085 -- Ray runtime started.
"""
_REASON = (
    "2026-11-22 09:26:41,101\tERR scripts.py:1301 -- Some Ray subprocesses exited unexpectedly:"
)


def test_the_log_of_a_dead_ray_without_its_greeting(home):
    home.log.write_text(_GREETING)
    assert "does not say why" in home.end_of_log()
    home.log.write_text(f"{_GREETING}{_REASON}\n  gcs_server [exit code=-9]\n")
    assert home.end_of_log().splitlines()[-2:] == [f"  {_REASON}", "    gcs_server [exit code=-9]"]
