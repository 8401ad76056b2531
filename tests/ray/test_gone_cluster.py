"""An embedded Ray of one's own that dies: what is said at once, and what is still known."""

import contextlib
import json
import os
import re
import signal
import time
from datetime import datetime
from pathlib import Path

import nemo_run as run
import psutil
import pytest

from nemo_run_ray import LocalCluster, RayExecutor, find
from nemo_run_ray.cli.main import dashboard_of
from nemo_run_ray.dashboard.jobs import JobsApi
from nemo_run_ray.errors import ClusterError, Unreachable
from tests.conftest import processes_where, tool, wait_for
from tests.ray.test_local_cluster import lives


@pytest.fixture
def own(tmp_path):
    """An embedded Ray that nobody else uses."""
    cluster = LocalCluster(num_cpus=3, keep=True, state_dir=str(tmp_path / "ray"))
    cluster.connect()
    yield cluster
    cluster.stop()


def kill(cluster: LocalCluster) -> None:
    state = json.loads(Path(cluster.state_dir, "state.json").read_text())
    children = psutil.Process(state["pid"]).children(recursive=True)
    os.kill(state["pid"], signal.SIGKILL)
    wait_for(lambda: not lives(state["pid"]))
    # Its children outlive it for a moment; one of them for long, and takes a whole processor.
    wait_for(lambda: not answers(cluster, state["url"]))
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            if "DashboardAgent" in " ".join(child.cmdline()):
                child.kill()


def answers(cluster: LocalCluster, url: str) -> bool:
    import httpx

    try:
        return bool(httpx.get(f"{url}/api/version", timeout=5, trust_env=False))
    except httpx.HTTPError:
        return False


def status(name: str) -> list[dict]:
    """The rows, without the names of hosts: they come from a cluster that lives."""
    rows = json.loads(tool("nemo-run-ray", "status", "--json", name).stdout)
    for one in (*rows, *(attempt for row in rows for attempt in row["attempts"])):
        del one["host"]
    return rows


def page_of(name: str, path: Path) -> str:
    done = tool("nemo-run-ray", "timeline", name, "-o", str(path))
    assert done.returncode == 0, done.stderr
    return path.read_text()


def test_times_outlive_the_cluster_and_nobody_waits_for_it(own, unique, tmp_path):
    executor, retried = RayExecutor(cluster=own), RayExecutor(cluster=own, retries=1)
    running, ended = f"{unique}r", f"{unique}e"
    with run.Experiment(running, skip_status_at_exit=True) as experiment:
        words = f"echo here; sleep 3; echo there; date +%s > {tmp_path}/there; sleep 1000"
        script = run.Script(inline=words)
        experiment.add(script, executor=retried, name="job")
        experiment.run(detach=True)
    dispatcher = f"{experiment._id}.dispatcher"
    with run.Experiment(ended, skip_status_at_exit=True) as experiment:
        first = experiment.add(run.Script(inline="sleep 2"), executor=executor, name="first")
        script = run.Script(inline="sleep 1; exit 3")
        experiment.add(script, executor=retried, name="fails", dependencies=[first])
        experiment.run()
    unseen = f"{unique}u"
    with run.Experiment(unseen, skip_status_at_exit=True) as experiment:
        script = run.Script(inline=f"echo unseen; touch {tmp_path}/unseen; sleep 1000")
        experiment.add(script, executor=executor, name="job")
        experiment.run(detach=True)
    wait_for((tmp_path / "unseen").exists)
    before = {row["job"]: row for row in status(ended)}
    drawn = page_of(ended, tmp_path / "before.html")
    assert [len(before[name]["attempts"]) for name in ("first", "fails")] == [1, 2]
    wait_for(lambda: "there" in tool("nemo-run-ray", "logs", running).stdout)
    with pytest.raises(TimeoutError):
        find(running)[0].wait(timeout_s=0)  # who waits writes down what is seen
    (job,) = status(running)
    assert job["state"] == "RUNNING"

    wait_for(lambda: processes_where(lambda _, words: dispatcher in words), 60)
    api = JobsApi.of(own.find())
    kill(own)

    assert_a_death_is_told_at_once(api)
    with pytest.raises(ClusterError, match="has died: its process"):
        dashboard_of(own)
    after = {row["job"]: row for row in status(ended)}
    assert after == before
    for row in after.values():
        for attempt in row["attempts"]:
            assert attempt["ended_at"] - attempt["posted_at"] > 1
            assert attempt["posted_at"] < attempt["running_at"] < attempt["ended_at"]
            assert attempt["node"]
    assert bars(page_of(ended, tmp_path / "after.html")) == bars(drawn)
    assert_lost_with_its_times(own, running, job["attempts"])
    (row,) = status(unseen)
    assert row["state"] == "LOST"
    assert "has died" in row["message"], "though nobody had looked before its rest was removed"
    assert tool("nemo-run-ray", "logs", unseen).stdout == "unseen\n"
    # The chain's dispatcher waits for no cluster that never comes back.
    wait_for(lambda: not processes_where(lambda _, words: dispatcher in words), 90)
    page = page_of(running, tmp_path / "lost.html")
    assert "last seen alive" in page
    assert re.search(r'<i class="runs lost" style="left: [\d.]+%; width: [1-9]', page)
    (seen,) = re.findall(r"last seen alive ([\d: -]+) UTC", page)
    at = datetime.fromisoformat(f"{seen}+00:00").timestamp()
    assert at >= int((tmp_path / "there").read_text()) - 1, "it ran to its last line"


def assert_a_death_is_told_at_once(api: JobsApi) -> None:
    began = time.monotonic()
    with pytest.raises(Unreachable, match="has died") as caught:
        api.post({"submission_id": "x", "entrypoint": "true"})
    with pytest.raises(Unreachable, match="has died"):
        api.table(fresh=True, patience_s=60)
    assert time.monotonic() - began < 30, "there is nothing to wait for"
    assert "Its log" in str(caught.value)
    assert "INFO" not in str(caught.value), "Ray's greeting says nothing of a death"
    assert "ray.log" in str(caught.value)


def without_looks(attempts: list[dict]) -> list[dict]:
    """The attempts without the time at which they were seen last."""
    return [{name: value for name, value in one.items() if name != "seen_at"} for one in attempts]


def assert_lost_with_its_times(cluster: LocalCluster, name: str, seen: list[dict]) -> None:
    lost = [{**attempt, "state": "LOST"} for attempt in without_looks(seen)]
    (row,) = status(name)
    assert (row["state"], without_looks(row["attempts"])) == ("LOST", lost)
    assert row["node"] == seen[0]["node"] != ""
    assert "has died" in row["message"]
    assert "ray.log" in row["message"]
    cluster.stop()  # as a later one does before its start: it removes what that one has left
    (row,) = status(name)
    assert (row["state"], without_looks(row["attempts"])) == ("LOST", lost)
    assert "has died" in row["message"]
    log = tool("nemo-run-ray", "logs", name)
    assert log.stdout.splitlines()[0] == "here", "its cluster had left the log"


def bars(page: str) -> list[str]:
    """Place and width of every bar that has one."""
    found = re.findall(r'<i class="([\w ]+)" style="left: ([\d.]+)%; width: ([\d.]+)%"', page)
    assert len([one for one in found if float(one[2]) > 1]) >= 3, found
    return found


@pytest.mark.soak
def test_a_raylet_that_ended_alone_is_a_death_too(own, unique):
    """`ray start` continues without it, as it does after `ray stop`."""
    with run.Experiment(unique, skip_status_at_exit=True) as experiment:
        script = run.Script(inline="echo here; sleep 1000")
        experiment.add(script, executor=RayExecutor(cluster=own), name="job")
        experiment.run(detach=True)
    wait_for(lambda: "here" in tool("nemo-run-ray", "logs", unique).stdout)
    state = json.loads(Path(own.state_dir, "state.json").read_text())
    raylet = psutil.Process(state["raylet"][0])
    raylet.terminate()
    wait_for(lambda: not lives(raylet.pid), 90)
    assert lives(state["pid"])
    (row,) = status(unique)
    assert (row["state"], "has died" in row["message"]) == ("LOST", True)
    assert tool("nemo-run-ray", "logs", unique).stdout == "here\n"
    own.connect()
    assert not lives(state["pid"])
    assert own.find()
