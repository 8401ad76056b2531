"""``SlurmCluster``: one allocation for a name, whoever asks, and whatever dies on the way."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nemo_run as run
import pytest

from nemo_run_ray import CommandProbe, HttpProbe, Sidecar, SlurmCluster
from nemo_run_ray.clusters import Dashboard, from_record
from nemo_run_ray.clusters.slurm import allocations as allocations_module
from nemo_run_ray.clusters.slurm import cluster as cluster_module
from nemo_run_ray.errors import ClusterError
from tests import warm
from tests.conftest import ROOT, processes_with, python, tool, wait_for
from tests.slurm.conftest import BIN, PYTHON, Slurm
from tests.slurm.sshd import Sshd, running

#: A program of another process: what it connects to, and what it does then.
_CLIENT = """
import json, os, pathlib, sys, time
import nemo_run as run
from nemo_run_ray import RayExecutor, SlurmCluster
given = json.loads(sys.argv[1])
pathlib.Path(given["job_dir"], f"imported-{os.getpid()}").touch()
executor = run.SlurmExecutor(tunnel=run.LocalTunnel(job_dir=given["job_dir"]), **given["executor"])
cluster = SlurmCluster(executor=executor, **given["cluster"])
if given["task"]:
    run.run(run.Script(inline="true"), executor=RayExecutor(cluster=cluster))
print(cluster.connect().url, flush=True)
time.sleep(given["stays_s"])
"""


class Allocations:
    """Clusters of one test, all in one folder."""

    def __init__(self, slurm: Slurm, folder: Path) -> None:
        self.slurm = slurm
        self.folder = folder
        self.clients: list[subprocess.Popen[str]] = []
        self.executor = {
            "account": "root",
            "partition": "batch",
            "time": "00:05:00",
            "nodes": 2,
            "ntasks_per_node": 1,
            "env_vars": {"PATH": f"{BIN}:$PATH", "LIGHT_RAY_JOBS": str(folder / "jobs.json")},
        }

    def cluster(self, executor: dict | None = None, **fields) -> SlurmCluster:
        given = {**self.executor, **(executor or {})}
        tunnel = run.LocalTunnel(job_dir=str(self.folder))
        return SlurmCluster(executor=run.SlurmExecutor(tunnel=tunnel, **given), **fields)

    def words_of_client(self, stays_s: float = 0, task: bool = False, **fields) -> list[str]:
        """A program that connects, also for a task, stays for some time, and ends."""
        given = {
            "job_dir": str(self.folder),
            "executor": self.executor,
            "cluster": fields,
            "stays_s": stays_s,
            "task": task,
        }
        return [sys.executable, "-c", _CLIENT, json.dumps(given)]

    def client(self, **given) -> subprocess.Popen[str]:
        """One that runs, with the arguments of ``words_of_client``."""
        started = subprocess.Popen(
            self.words_of_client(**given),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # A shell lets what it starts in the background ignore Ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self.clients.append(started)
        return started

    def wait_imported(self, client: subprocess.Popen[str]) -> None:
        """Until a client has imported NeMo-Run; only what it does then has bounds."""
        sign = self.folder / f"imported-{client.pid}"
        while not sign.exists():
            assert client.poll() is None, client.communicate()
            time.sleep(0.005)

    def jobs(self, *states: str) -> list[str]:
        """Numbers of the jobs that Slurm has."""
        which = ["-t", ",".join(states)] if states else []
        return self.slurm.ask("squeue", "-h", "-o", "%A", *which).split()

    def life(self, number: int = 1, name: str = "ray") -> Path:
        return self.folder / name / "lives" / str(number)

    def run_jobs(self, *states: str) -> None:
        """Let Ray's job table have these."""
        rows = [{"submission_id": f"job{place}", "status": one} for place, one in enumerate(states)]
        (self.folder / "new.json").write_text(json.dumps(rows))
        (self.folder / "new.json").replace(self.folder / "jobs.json")


@pytest.fixture
def allocations(slurm: Slurm, tmp_path, monkeypatch) -> Iterator[Allocations]:
    monkeypatch.setenv("SLURM_CONF", slurm.conf)
    monkeypatch.setenv("PATH", f"{BIN}:{PYTHON}:{os.environ['PATH']}")
    monkeypatch.setenv("NEMORUN_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(allocations_module, "PAUSE_S", 2.0)
    folder = slurm.folder / "clusters" / tmp_path.name
    folder.mkdir(parents=True)
    found = Allocations(slurm, folder)
    yield found
    for client in found.clients:  # one that a test has left could submit during the next test
        client.kill()
        client.communicate()
    slurm.ask("scancel", "--full", "--user=root")
    wait_for(lambda: not slurm.ask("squeue", "-h"), 60)
    mark = f"NEMO_RUN_RAY_LIFE={folder}"
    wait_for(lambda: not processes_with(mark), 60)


def _version(dashboard: Dashboard) -> str:
    request = urllib.request.Request(f"{dashboard.url}/api/version", headers=dashboard.headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)["session_name"]


def test_the_cluster_of_a_name_is_found_and_ends_with_its_last_user(allocations):
    cluster = allocations.cluster()
    assert cluster.find() is None
    dashboard = cluster.connect()
    session = _version(dashboard)
    assert allocations.cluster().connect() == dashboard
    remembered = from_record(json.loads(json.dumps(cluster.record())))
    assert remembered.find() == dashboard
    assert len(allocations.jobs()) == 1
    assert (allocations.life().stat().st_mode & 0o777) == 0o700
    allocations.run_jobs("RUNNING")
    cluster._leave()
    time.sleep(12)  # longer than it takes to see that nothing runs
    assert dashboard.why_dead() == ""
    allocations.run_jobs("SUCCEEDED")
    wait_for(lambda: not allocations.jobs("RUNNING"), 30)
    wait_for(lambda: remembered.find() is None, 10)
    wait_for(lambda: "its last user has left" in dashboard.why_dead(), 10)
    assert "its last user has left" in cluster.archive(session).reason
    with pytest.raises(ClusterError, match="Run the program again"):
        remembered.connect()


def test_clients_at_the_same_time_get_one_allocation(allocations):
    words = allocations.words_of_client(stays_s=8)[1:]
    with ThreadPoolExecutor(4) as pool:
        clients = [
            pool.submit(warm.python, *words, env=dict(os.environ), cwd=os.getcwd())
            for _ in range(4)
        ]
    done = [client.result() for client in clients]
    told = [one.stdout + one.stderr for one in done]
    assert [one.returncode for one in done] == [0] * 4, told
    urls = {line for one in told for line in one.splitlines() if line.startswith("http")}
    assert len(urls) == 1, told
    assert sorted(path.name for path in allocations.life().parent.iterdir()) == ["1"]
    wait_for(lambda: not allocations.jobs(), 60)  # all have left


def test_an_idle_one_ends(allocations):
    dashboard = allocations.cluster(keep=True, idle_timeout_s=3).connect()
    wait_for(lambda: not allocations.jobs(), 60)
    assert "no job has run for 3 s" in dashboard.why_dead()
    end = json.loads(next(allocations.life().glob("run/*/end.json")).read_text())
    assert end["code"] == 0


def test_a_kept_one_stays_until_it_is_stopped(allocations):
    cluster = allocations.cluster(keep=True)
    cluster.connect()
    assert not (allocations.life() / "released").exists()
    assert cluster.stop()
    wait_for(lambda: not allocations.jobs(), 60)
    assert cluster.find() is None
    assert not cluster.stop()


def test_up_and_down_by_a_cluster_file(allocations, tmp_path):
    slurm = {
        **allocations.executor,
        "job_dir": str(allocations.folder),
        "walltime": allocations.executor["time"],
    }
    del slurm["time"], slurm["ntasks_per_node"]
    file = tmp_path / "cluster_configs/team.yaml"
    file.parent.mkdir()
    file.write_text(json.dumps({"cluster": {"slurm": slurm}}))

    def told(*words: str) -> str:
        done = tool("nemo-run-ray", *words, "--cluster", "team", cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        return " ".join(done.stdout.split())

    first, again = told("up"), told("up")
    assert "is up: http://" in first
    assert "nemo-run-ray down --cluster team" in first
    assert first.partition(" Stop")[0].endswith(again.partition(" Stop")[0].rpartition(" ")[2])
    assert len(allocations.jobs()) == 1
    wrong = tool("nemo-run-ray", "up", "--cluster", "team", "--num-cpus", "4", cwd=tmp_path)
    assert wrong.returncode == 1
    assert "--num-cpus and --num-gpus are for the embedded Ray; the cluster file 'team'" in (
        wrong.stderr
    )
    assert "Ray is stopped" in told("down")
    wait_for(lambda: not allocations.jobs(), 60)
    assert "No Ray is up" in told("down"), "there is none any more"
    none = tool("nemo-run-ray", "doctor", "team", cwd=tmp_path)
    assert "Start one with: nemo-run-ray up --cluster team;" in none.stderr


def test_the_next_client_gets_another_one_after_it_has_died(allocations):
    cluster = allocations.cluster()
    first = cluster.connect()
    (job,) = allocations.jobs()
    allocations.slurm.ask("scancel", job)
    wait_for(lambda: "cancelled" in first.why_dead(), 40)
    second = cluster.connect()
    assert second.headers != first.headers
    assert "another one has its name" in first.why_dead()
    cluster._leave()


def test_what_slurm_or_the_script_refuses(allocations):
    setup = "echo no license >&2; exit 3"
    for executor, words in (
        ({"partition": "nix"}, "does not take the job of the cluster 'ray': .*nvalid partition"),
        ({"time": "soon"}, "Invalid --time"),
        (
            {"setup_lines": setup},
            r"did not come up in Slurm job \d+ of the cluster 'ray': .*\n?.*(3|no license)",
        ),
    ):
        with pytest.raises(ClusterError, match=words):
            allocations.cluster(executor).connect()
    assert allocations.cluster().connect().url  # the next one is not kept by them
    assert allocations.life(4).is_dir()
    allocations.cluster()._leave()


def test_more_nodes_than_there_are(allocations):
    with pytest.raises(ClusterError, match=r"PartitionConfig|PartitionNodeLimit"):
        allocations.cluster(nodes=99, queue_timeout_s=4).connect()
    wait_for(lambda: not allocations.jobs(), 10)


@pytest.mark.parametrize("task", [pytest.param(False, marks=pytest.mark.soak), True])
def test_ctrl_c_takes_the_job_out_of_the_queue(allocations, task):
    """Of a task another thread waits, which does not see it."""
    first = allocations.cluster(name="first", nodes=4, executor={"exclusive": True})
    first.connect()
    waiting = allocations.client(task=task, name="second", nodes=4)
    allocations.wait_imported(waiting)
    wait_for(lambda: allocations.jobs("PENDING"), 30)
    time.sleep(1)
    waiting.send_signal(signal.SIGINT)
    waiting.communicate(timeout=60)
    wait_for(lambda: not allocations.jobs("PENDING"), 20)
    assert "before it was ready" in (allocations.life(1, "second") / "stop").read_text()
    first._leave()


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("claim", marks=pytest.mark.soak),
        "submit",
        pytest.param("wait", marks=pytest.mark.soak),
        pytest.param("start", marks=pytest.mark.soak),
        pytest.param("ready", marks=pytest.mark.soak),
    ],
)
def test_a_client_that_dies_on_its_way(allocations, monkeypatch, moment):
    """Another one goes on, or passes its life over; there are never two allocations."""
    monkeypatch.setattr(cluster_module, "_CLAIM_S", 4.0)
    life = allocations.life()
    client = allocations.client(stays_s=60)
    signs: dict[str, Callable[[], bool]] = {
        "claim": life.is_dir,
        "submit": (life / "sbatch").is_dir,
        "wait": (life / "job").exists,
        "start": lambda: bool(list(life.glob("run/*/token"))),
        "ready": lambda: bool(list(life.glob("run/*/ready.json"))),
    }
    allocations.wait_imported(client)
    deadline = time.monotonic() + 60
    while not signs[moment]():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    client.kill()
    client.communicate(timeout=60)
    dashboard = allocations.cluster().connect()
    assert _version(dashboard)
    running = allocations.jobs("RUNNING", "PENDING")
    assert len(running) == 1, running
    allocations.cluster()._leave()


def test_a_job_that_slurm_takes_late_ends_by_itself(allocations):
    """It was given up, and another one has its name."""
    cluster = allocations.cluster()
    late = cluster._own_allocations
    assert late.ask("claim", number=1, user="late")
    monitored = allocations.life()
    cluster_script = cluster._script(str(monitored))
    assert late.ask("claim", number=2, user="next")
    late.ask("note", number=2, name="stop", text="a test needs no second one")
    late.ask("submit", number=1, script=cluster_script)
    wait_for(lambda: not allocations.jobs(), 60)
    (log,) = monitored.glob("logs/sbatch_*.out")
    assert "given up before it started" in log.read_text()


@pytest.mark.soak
def test_ray_is_up_when_sidecars_of_all_kinds_are_ready(allocations):
    mark = allocations.folder / "warm"
    server = f"exec python3 -m http.server --directory {allocations.folder} 6100"
    sidecars = [
        Sidecar("web", f"sleep 2; {server}", everywhere=False, ready=HttpProbe(6100)),
        Sidecar(
            "cache",
            f"sleep 3; touch {mark}-$(hostname); exec sleep 600",
            ready=CommandProbe(["sh", "-c", f"test -e {mark}-$(hostname)"]),
        ),
    ]
    cluster = allocations.cluster(sidecars=sidecars, nodes=2)
    cluster.connect()
    (nodes,) = allocations.life().glob("run/*/nodes")
    ready = [json.loads((nodes / f"{rank}.json").read_text())["ready"] for rank in (0, 1)]
    assert [sorted(one) for one in ready] == [["cache", "web"], ["cache"]]
    logs = sorted(path.name for path in allocations.life().glob("logs/ray-*-n?.log"))
    assert logs == ["ray-cache-n1.log", "ray-cache-n2.log", "ray-web-n1.log"]
    cluster._leave()


@pytest.mark.soak
def test_one_is_stopped_while_slurms_controller_is_away(allocations):
    """It ends by itself, so that the next client's is not a second one."""
    slurm, cluster = allocations.slurm, allocations.cluster(keep=True)
    cluster.connect()
    pid = int(Path(f"{Path(slurm.conf).parent}/run/slurmctld.pid").read_text())
    os.kill(pid, signal.SIGTERM)
    try:
        wait_for(lambda: not Path(f"/proc/{pid}").exists(), 30)
        assert cluster.stop()
        (end,) = wait_for(lambda: list(allocations.life().glob("run/*/end.json")), 30)
        assert "it was ended by `nemo-run-ray down`" in json.loads(end.read_text())["why"]
    finally:
        slurm.bed("slurmctld")
    wait_for(lambda: not allocations.jobs("RUNNING"), 120)


@pytest.mark.soak
def test_slurms_controller_is_away_for_a_moment(allocations):
    slurm = allocations.slurm
    pid = int(Path(f"{Path(slurm.conf).parent}/run/slurmctld.pid").read_text())
    os.kill(pid, signal.SIGTERM)
    client = allocations.client(stays_s=1)
    time.sleep(6)
    slurm.bed("slurmctld")
    told = client.communicate(timeout=180)[0]
    assert "http://" in told, told
    wait_for(lambda: not allocations.jobs(), 60)


@pytest.fixture
def sshd(allocations, tmp_path, monkeypatch) -> Iterator[Sshd]:
    env = {"SLURM_CONF": allocations.slurm.conf, "PATH": os.environ["PATH"]}
    (tmp_path / "sshd").mkdir()
    with running(tmp_path / "sshd", env) as server:
        monkeypatch.setenv("PATH", f"{server.bin}:{os.environ['PATH']}")
        yield server


def _by_ssh(allocations: Allocations, sshd: Sshd, **fields) -> SlurmCluster:
    tunnel = run.SSHTunnel(
        host="127.0.0.1",
        user="root",
        port=sshd.port,
        identity=str(sshd.key),
        job_dir=str(allocations.folder),
    )
    return SlurmCluster(executor=run.SlurmExecutor(tunnel=tunnel, **allocations.executor), **fields)


def test_by_ssh_that_breaks_off(allocations, sshd):
    cluster = _by_ssh(allocations, sshd)
    dashboard = cluster.connect()
    assert dashboard.url.startswith("http://127.0.0.1:")
    session = _version(dashboard)
    assert from_record(json.loads(json.dumps(cluster.record()))).find() == dashboard
    for _ in range(3):
        assert sshd.drop()
        wait_for(lambda: _answers(dashboard, session), 30)
        assert cluster._own_allocations.look().number == 1
    cluster._leave()
    wait_for(lambda: not allocations.jobs("RUNNING"), 60)


def _answers(dashboard: Dashboard, session: str) -> bool:
    with contextlib.suppress(OSError, http.client.HTTPException):
        return _version(dashboard) == session
    return False


@pytest.mark.soak
def test_ssh_that_breaks_off_on_the_way(allocations, sshd):
    """Whatever it was doing: there is one allocation, and the client gets to it."""
    cluster = _by_ssh(allocations, sshd)
    stop = threading.Event()

    def drop() -> None:
        # A busy machine may need longer than the short pauses for its way through one connection.
        for pause_s in (*[2.5] * 8, *[10] * 20):
            if stop.wait(pause_s):
                return
            sshd.drop()

    dropping = threading.Thread(target=drop)
    dropping.start()
    try:
        with ThreadPoolExecutor(1) as pool:
            dashboard = pool.submit(cluster.connect).result(timeout=240)
    finally:
        stop.set()
        dropping.join()
    assert _version(dashboard)
    assert len(allocations.jobs("RUNNING", "PENDING")) == 1
    cluster._leave()


def test_nobody_may_log_in(allocations, sshd, tmp_path):
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")], check=True
    )
    cluster = _by_ssh(allocations, sshd)
    cluster.executor.tunnel.identity = str(tmp_path / "other")
    with pytest.raises(ClusterError, match=r"root@127\.0\.0\.1"):
        cluster.connect()


@pytest.mark.soak
def test_down_notes_how_the_jobs_of_a_real_ray_ended(allocations, tmp_path):
    job_dir, setup = allocations.folder, f"export PATH={Path(sys.executable).parent}:$PATH"
    # The only folder that each of these hosts has for itself.
    section = {"account": "root", "job_dir": str(job_dir), "setup_lines": setup}
    section |= {"walltime": "00:05:00", "env_vars": {"RAY_TEMP_DIR": "/tmp/ray"}}
    file = tmp_path / "cluster_configs/team.yaml"
    file.parent.mkdir()
    file.write_text(json.dumps({"cluster": {"slurm": section}}))
    program = """
import nemo_run as run
from nemo_run_ray import RayExecutor
for number in range(2):
    with run.Experiment(f"part{number}") as experiment:
        task = run.Script(inline=f"echo part {number}; sleep {600 * number}")
        experiment.add(task, executor=RayExecutor(cluster="team"), name="task")
        experiment.run(detach=number == 1)
"""
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr

    refused = tool("nemo-run-ray", "down", "--cluster", "team", cwd=tmp_path)
    assert refused.returncode == 1
    assert "1 job(s) still run on team on Slurm" in " ".join(refused.stderr.split())
    assert "stop it: nemo-run-ray down --cluster team --force" in refused.stderr
    stopped = tool("nemo-run-ray", "down", "--cluster", "team", "--force", cwd=tmp_path)
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    assert "Ray is stopped" in stopped.stdout
    wait_for(lambda: not allocations.jobs(), 60)
    for name, state in (("part0", "SUCCEEDED"), ("part1", "CANCELLED")):
        (row,) = json.loads(tool("nemo-run-ray", "status", "--json", name, cwd=tmp_path).stdout)
        assert row["state"] == state, row
        log = tool("nemo-run-ray", "logs", name, cwd=tmp_path).stdout
        assert name.replace("part", "part ") in log


#: Submits a chain to the cluster of the example, and ends.
_CHAIN = """
import sys
import nemo_run as run
from nemo_run_ray import RayExecutor, SlurmCluster
is_alone = sys.argv[4] == "alone"
slurm = run.SlurmExecutor(account="root", nodes=1 if is_alone else 2, time="00:05:00",
                          setup_lines=sys.argv[2], tunnel=run.LocalTunnel(job_dir=sys.argv[1]))
sys.path.append(sys.argv[3])
from sandboxes_on_slurm import sandbox
own = {"idle_timeout_s": 10} if is_alone else {}
cluster = SlurmCluster(executor=slurm, name="sandboxes", sidecars=[sandbox()], **own)
with run.Experiment("chain", executor=RayExecutor(cluster=cluster)) as experiment:
    first = experiment.add(run.Script(inline="echo first; sleep 1"), name="first")
    second = run.Script(inline="echo second on $(hostname); exit 3")
    experiment.add(second, name="second", dependencies=[first])
    experiment.run(detach=True)
"""


@pytest.mark.parametrize("example", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_a_real_ray_with_a_chain(allocations, tmp_path, example):
    """The chain's client ends; what became of it is known when the allocation has ended.

    Meanwhile the example uses the same allocation.
    """
    env = {**os.environ, "NEMORUN_HOME": str(tmp_path / "home")}
    env["PATH"] = env["PATH"].removeprefix(f"{BIN}:")  # Slurm's own srun, which has no pyxis
    setup = f"export PATH={Path(sys.executable).parent}:$PATH"
    examples = ROOT / "examples"

    def succeeded(done: subprocess.CompletedProcess) -> str:
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    job_dir = str(allocations.folder)
    users = "with the example" if example else "alone"
    words = ["-c", _CHAIN, job_dir, setup, str(examples), users]
    succeeded(warm.python(*words, env=env, cwd=str(tmp_path)))
    if example:
        words = ["--account", "root", "--job-dir", job_dir, "--nodes", "2", "--setup", setup]
        program = str(examples / "sandboxes_on_slurm.py")
        told = succeeded(python(program, *words, env=env, cwd=tmp_path, timeout=240))
        assert sorted(re.findall(r"n[12]: (\d) of 4 solutions pass", told)) == ["2", "3"]
    wait_for(lambda: not allocations.jobs(), 120)
    assert len(list(allocations.life(name="sandboxes").parent.iterdir())) == 1

    def look(*words: str) -> str:
        return succeeded(tool("nemo-run-ray", *words, env=env, cwd=tmp_path))

    rows = json.loads(look("status", "--json", "chain"))
    states = {row["job"]: (row["state"], row["reason"]) for row in rows}
    assert states == {"first": ("SUCCEEDED", ""), "second": ("FAILED", "exit code")}
    assert look("logs", "chain", "--job", "second") == "second on n1\n"
