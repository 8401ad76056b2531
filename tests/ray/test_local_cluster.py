"""The embedded Ray: started once, found by others, stopped by the last user."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from tests.conftest import tool, wait_for

USER = """
import sys
from nemo_run_ray import LocalCluster
dashboard = LocalCluster(num_cpus=1).connect()
print(dashboard.url, flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def home_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("NEMORUN_HOME", str(tmp_path))
    yield tmp_path
    for state in states(tmp_path):
        psutil.Process(state["pid"]).terminate()


def user() -> subprocess.Popen:
    """A process that uses the embedded Ray until its input is closed."""
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", USER], stdin=pipe, stdout=pipe, text=True)


def url_of(process: subprocess.Popen) -> str:
    """The line with the address; NeMo-Run's own may stand before it."""
    for line in process.stdout:
        if line.startswith("http://"):
            return line.strip()
    return pytest.fail("it ended without an address")


def leave(process: subprocess.Popen, is_killed: bool = False) -> None:
    if is_killed:
        process.kill()
    process.stdin.close()
    process.wait(60)
    process.stdout.close()


def states(home: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in home.glob("ray_local/*/state.json")]


def test_a_race_starts_one_and_the_last_living_one_stops_it(home_of_its_own):
    """In the place of one that has died, whose last user is still there."""
    late = user()
    old = url_of(late)
    (dead,) = states(home_of_its_own)
    os.kill(dead["pid"], signal.SIGKILL)
    wait_for(lambda: not lives(dead["pid"]))

    first, second, killed = user(), user(), user()
    urls = {url_of(first), url_of(second), url_of(killed)}
    assert len(urls) == 1
    assert old not in urls
    port = httpx.URL(*urls).port
    listeners = [one.laddr for one in psutil.net_connections("tcp") if one.status == "LISTEN"]
    assert {ip for ip, used in listeners if used == port} == {"127.0.0.1"}
    (state,) = states(home_of_its_own)
    assert len(state["users"]) == 3

    leave(killed, is_killed=True)  # from now on it is no user
    leave(first)
    leave(late)
    assert len(states(home_of_its_own)) == 1, "who used the dead one must not stop the new one"
    assert lives(state["pid"])
    assert httpx.get(urls.pop() + "/api/version").status_code in (200, 401)
    family = psutil.Process(state["pid"]).children(recursive=True)
    leave(second)

    assert states(home_of_its_own) == []
    assert not lives(state["pid"])
    assert [process for process in family if lives(process.pid)] == []
    for root in (dead["root"], state["root"]):
        wait_for(lambda root=root: not Path(root).exists())
        assert marked(root) == []


def lives(pid: int) -> bool:
    """A zombie does not: its parent left before it, and init collects it when it likes."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def marked(root: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("NEMO_RUN_RAY_LOCAL") == root:
                found.append(process.pid)
    return found


DETACHED = """
import nemo_run as run
from nemo_run_ray import LocalCluster, RayExecutor

if __name__ == "__main__":
    cluster = LocalCluster(num_cpus=1, idle_timeout_s=6)
    with run.Experiment("alone") as experiment:
        script = run.Script(inline="until [ -e GO ]; do sleep 0.1; done; echo hello; exit 3")
        experiment.add(script, executor=RayExecutor(cluster=cluster), name="job")
        experiment.run(detach=True)
"""


def test_an_idle_one_ends_by_itself_and_what_it_had_is_known(home_of_its_own):
    """After a detached run, and after its only user was killed."""
    program = home_of_its_own / "program.py"
    program.write_text(DETACHED.replace("GO", f"{home_of_its_own}/go"))
    subprocess.run([sys.executable, str(program)], check=True, capture_output=True, timeout=120)
    (state,) = states(home_of_its_own)
    with user() as killed:
        assert url_of(killed) == state["url"]
        killed.kill()
    assert lives(state["pid"])

    (home_of_its_own / "go").touch()  # now the job ends, and the cluster is idle
    wait_for(lambda: states(home_of_its_own) == [], 60)
    wait_for(lambda: not lives(state["pid"]) and marked(state["root"]) == [])
    (row,) = json.loads(look("status", "--json", "alone"))
    assert (row["state"], row["attempts"][0]["exit_code"]) == ("FAILED", 3)
    assert look("logs", "alone") == "hello\n"


@pytest.mark.soak
def test_a_forced_stop_cancels_and_keeps_the_output(home_of_its_own):
    """What runs, what waits in a chain, and what waits for room."""
    program = home_of_its_own / "program.py"
    program.write_text(
        DISPATCH.replace("sleep 2; echo hello", "echo hello; sleep 1000") + TOO_LARGE
    )
    subprocess.run([sys.executable, str(program)], check=True, capture_output=True, timeout=120)
    wait_for(lambda: json.loads(look("status", "--json", "pipe"))[0]["state"] == "RUNNING")
    wait_for(lambda: json.loads(look("status", "--json", "large"))[0]["state"] == "PENDING")
    refused = tool("nemo-run-ray", "down")
    assert (refused.returncode, "still run" in refused.stderr) == (1, True)

    assert "Cancelling 3 job(s)" in look("down", "--force")  # the dispatcher is one

    rows = json.loads(look("status", "--json", "pipe")) + json.loads(
        look("status", "--json", "large")
    )
    assert [row["state"] for row in rows] == ["CANCELLED", "CANCELLED", "CANCELLED"]
    assert look("logs", "pipe", "--job", "first") == "hello\n"
    assert "first is cancelled" in look("cancel", "pipe")


@pytest.mark.parametrize("verb", ["up", "down", "doctor"])
@pytest.mark.parametrize("home", ["/proc/no", "/dev/null"])
def test_a_home_that_cannot_be_used_is_named(home, verb):
    done = tool("nemo-run-ray", verb, env={**os.environ, "NEMORUN_HOME": home})
    assert "Traceback" not in done.stderr
    if verb == "up" or home == "/dev/null":
        assert done.returncode == 1
        assert f"nemo-run-ray: The embedded Ray cannot use its folder {home}/" in done.stderr
        assert "NEMORUN_HOME" in done.stderr


DISPATCH = """
import nemo_run as run
from nemo_run_ray import RayExecutor
with run.Experiment("pipe", executor=RayExecutor()) as experiment:
    first = experiment.add(run.Script(inline="sleep 2; echo hello"), name="first")
    experiment.add(run.Script(inline="sleep 2; exit 3"), name="second", dependencies=[first])
    experiment.run(detach=True)
"""


def look(*arguments: str) -> str:
    done = tool("nemo-run-ray", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


TOO_LARGE = """
task = run.Script(inline="true")
with run.Experiment("large") as experiment:
    experiment.add(task, executor=RayExecutor(cpus_per_node=5000), name="large")
    experiment.run(detach=True)
"""
