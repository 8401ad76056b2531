"""What another user of the machine can do in folders that are found by their names."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_run_ray.ids import LEDGER
from tests.http_server import Handler, serving
from tests.slurm_commands import put_commands

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can become two other users")

VICTIM, ATTACKER = 12345, 23456
ROOT = Path(__file__).parents[2]

_SLURM = """
import sys
import nemo_run as run
from nemo_run_ray import SlurmCluster
from nemo_run_ray.clusters.slurm.allocations import Allocations
from nemo_run_ray.clusters.slurm.login import Login

shared = sys.argv[1]
tunnel = run.LocalTunnel(job_dir=shared)
allocations = Allocations(Login(tunnel), f"{shared}/mine")
assert allocations.ask("claim", number=1, user="me")
allocations.ask("submit", number=1, script="#!/bin/sh\\n# the victim's script\\n")
cluster = SlurmCluster(executor=run.SlurmExecutor(account="a", tunnel=tunnel), name="team")
for act in (cluster.find, cluster.connect):
    try:
        act()
        print("USED")
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
"""
_HOME = """
import contextlib, sys
from nemo_run_ray import LocalCluster
from nemo_run_ray.cli.main import main

for words in (["status", "sweep", "--once"], ["doctor", "team"], ["down"]):
    sys.argv = ["nemo-run-ray", *words]
    with contextlib.suppress(SystemExit):
        main()
"""


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder in which every user may make files, as ``/tmp`` is one."""
    folder = Path(tempfile.mkdtemp(prefix="nrr-shared-", dir="/tmp"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


def _as(uid: int, words: list[str], **options) -> subprocess.CompletedProcess[str]:
    """Run a program as a user who may read everything: this Python may lie in the home of root."""
    user = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
    user += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    return subprocess.run(
        [*user, *words], text=True, capture_output=True, timeout=120, check=False, **options
    )


def _give(folder: Path, uid: int) -> None:
    for path in (folder, *folder.rglob("*")):
        os.chown(path, uid, uid)


def test_a_slurm_folder_that_an_attacker_has_made_gets_nothing(shared, monkeypatch):
    """It promises a cluster that is ready, and lets everybody write to it."""
    run = shared / "team" / "lives" / "1" / "run" / "7.0"
    run.mkdir(parents=True)
    (run.parents[1] / "job").write_text("7\n")
    head = {"address": "127.0.0.1", "port": 1, "dashboard_port": 1}
    (run / "ready.json").write_text(json.dumps(head))
    (run / "token").write_text("attackers")
    _give(shared / "team", ATTACKER)
    for path in (shared / "team").rglob("*"):
        path.chmod(0o777 if path.is_dir() else 0o666)
    before = sorted((shared / "team").rglob("*"))
    put_commands(_own(shared / "victim", VICTIM), monkeypatch)
    os.chown(shared / "victim" / "slurm", VICTIM, VICTIM)

    program = [sys.executable, "-c", _SLURM, str(shared)]
    done = _as(VICTIM, program, cwd=shared, env={**os.environ, "PYTHONPATH": str(ROOT)})

    told = [line for line in done.stdout.splitlines() if "ClusterError" in line]
    assert len(told) == 2, done.stdout + done.stderr
    assert all(f"{shared}/team belongs to {ATTACKER}" in line for line in told)
    assert "USED" not in done.stdout
    assert sorted((shared / "team").rglob("*")) == before, "nothing was written"
    queue = (shared / "victim" / "slurm" / "queue").read_text().splitlines()
    assert [line.rpartition("|")[2] for line in queue] == [f"{shared}/mine/lives/1"]
    script = shared / "mine" / "lives" / "1" / "ray.sub"
    assert "the victim's script" in script.read_text()
    tried = subprocess.run(
        ["setpriv", f"--reuid={ATTACKER}", "--clear-groups", "sh", "-c", f"echo >> {script}"],
        capture_output=True,
        check=False,
    )
    assert tried.returncode != 0
    assert stat.S_IMODE(script.parents[1].stat().st_mode) == 0o700


def test_a_shared_home_and_a_shared_folder_with_an_attackers_files(shared):
    """A ledger and a cluster file send variables to his address, a state file removes a folder."""
    asked: list[str] = []

    class Attacker(Handler):
        def answer(self) -> None:
            asked.append(f"{self.path} {self.headers}")
            self.send(200, "{}")

    precious = _own(shared / "precious", VICTIM)
    (precious / "thesis").write_text("years")
    with serving(Attacker) as url:
        secret = {"X-Mine": "${AWS_SECRET_ACCESS_KEY}"}
        cluster = {"kind": "existing", "url": url, "token": None, "headers": secret, "verify": True}
        intent = {"event": "intent", "id": "sweep_1.task", "job": "task", "role": "task"}
        intent |= {"at": 1.0, "nonce": "n", "cluster": cluster, "session": "s"}
        experiment = shared / "experiments" / "sweep" / "sweep_1"
        experiment.mkdir(parents=True)
        (experiment / LEDGER).write_text(json.dumps(intent) + "\n")
        files = shared / "cluster_configs"
        files.mkdir()
        (files / "team.yaml").write_text(
            f"cluster:\n  address: {url}\n  headers: {{X-Mine: '${{AWS_SECRET_ACCESS_KEY}}'}}\n"
        )
        embedded = shared / "ray_local"
        program = (
            "from nemo_run_ray import LocalCluster; print(LocalCluster().record()['state_dir'])"
        )
        env = {**os.environ, "NEMORUN_HOME": str(shared), "PYTHONPATH": str(ROOT)}
        env |= {"AWS_SECRET_ACCESS_KEY": "mine", "RAY_AUTH_TOKEN": "mine", "HOME": str(precious)}
        state_dir = _as(VICTIM, [sys.executable, "-c", program], env=env).stdout.split()[-1]
        Path(state_dir).mkdir(parents=True)
        state = {"pid": 0, "born": "", "url": url, "root": str(precious)}
        (Path(state_dir) / "state.json").write_text(json.dumps(state))
        for folder in (shared / "experiments", files, embedded):
            _give(folder, ATTACKER)

        done = _as(VICTIM, [sys.executable, "-c", _HOME], cwd=shared, env=env)

    told = " ".join((done.stdout + done.stderr).split())
    for folder in (shared / "experiments", files, embedded):
        assert f"{folder} belongs to {ATTACKER}" in told, told
    assert "Traceback" not in told
    assert asked == []
    assert (precious / "thesis").read_text() == "years"


def _own(folder: Path, uid: int) -> Path:
    folder.mkdir()
    os.chown(folder, uid, uid)
    return folder
