"""A chain of twelve jobs goes on without the client that submitted it."""

import json
import os
import shutil
import sys
from pathlib import Path

from nemo_run_ray.remote.status import Reason
from tests import warm
from tests.conftest import ROOT, tool, wait_for
from tests.hosts.conftest import TOKEN, bed
from tests.hosts.detached_client import STEPS
from tests.hosts.steps import complaints, starts

ENDED = ("SUCCEEDED", "FAILED", "CANCELLED")
NOT_RIGHT = {
    "broken": ("FAILED", "exit code"),
    "after-broken": ("CANCELLED", "upstream"),
    "after-both": ("CANCELLED", "upstream"),
}


def test_a_chain_completes_without_its_client(hosts, unique, tmp_path):
    laptop, elsewhere, work = (tmp_path / name for name in ("laptop", "elsewhere", "work"))
    for folder in (laptop, elsewhere, work):
        folder.mkdir()
    client = Path(__file__).with_name("detached_client.py")
    given = [f"NEMORUN_HOME={laptop}", f"RAY_AUTH_TOKEN={TOKEN}", f"HOME={laptop}"]
    log = tmp_path / "client.log"
    command = [sys.executable, str(client), hosts.cluster.url, unique, str(work)]
    bed("exec", "n5", "--", "sh", "-c", f"env {' '.join([*given, *command])} > {log} 2>&1; true")
    bed("cut", "n5")
    try:
        (exp_dir,) = laptop.glob(f"experiments/{unique}/*")
        copy = elsewhere / "experiments" / unique / exp_dir.name
        shutil.move(exp_dir, copy)
        env = {**os.environ, "NEMORUN_HOME": str(elsewhere), "RAY_AUTH_TOKEN": TOKEN}

        def status() -> dict[str, dict]:
            done = tool("nemo-run-ray", "status", exp_dir.name, "--json", env=env)
            assert done.returncode == 0, done.stdout + done.stderr
            return {one["job"]: one for one in json.loads(done.stdout)}

        early = status()
        assert early["report"]["state"] == "WAITING"
        assert set(early["report"]["waits_for"]) <= {"serve", "flaky", "alone"}
        (work / "go").touch()
        wait_for(lambda: (work / "done-report").exists(), within_s=180)
        wait_for(lambda: all(one["state"] in ENDED for one in status().values()))
        jobs = status()
        assert {name: (one["state"], one["reason"]) for name, one in jobs.items()} == {
            step.name: NOT_RIGHT.get(step.name, ("SUCCEEDED", "")) for step in STEPS
        }
        # A busy machine may need longer for a start than Ray waits for it, which does not count.
        flaky = [
            row for row in jobs["flaky"]["attempts"] if row["reason"] != Reason.START_TIMEOUT.value
        ]
        assert [row["exit_code"] for row in flaky] == [5, 5, 0], jobs["flaky"]
        assert "upstream broken failed" in jobs["after-broken"]["message"]
        assert "upstream after-broken was cancelled" in jobs["after-both"]["message"]
        assert complaints(work) == ""
        serve = f"serve {jobs['serve']['attempt']}"
        assert serve in starts(work), "a group's roles know which attempt it is"
        started = [one.split()[0] for one in starts(work)]
        assert sorted(started) == sorted(
            [*(step.name for step in STEPS if not step.name.startswith("after")), *["flaky"] * 2]
        )

        page = tmp_path / "chain.html"
        done = tool("nemo-run-ray", "timeline", exp_dir.name, "-o", str(page), env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        assert all(step.name in page.read_text() for step in STEPS)

        seen = warm.python("-c", STATUS, exp_dir.name, env=env, cwd=str(ROOT))
        assert seen.returncode == 0, seen.stdout + seen.stderr
        states = json.loads(seen.stdout.splitlines()[-1])
        assert {name for name, state in states.items() if state == "SUCCEEDED"} == {
            step.name for step in STEPS if step.name not in NOT_RIGHT
        }
    finally:
        bed("heal", "n5")


#: NeMo-Run's own view, in a new process.
STATUS = """
import json, sys, nemo_run as run
found = run.Experiment.from_id(sys.argv[1]).status(return_dict=True)
print(json.dumps({name: str(one["status"]).rpartition(".")[2] for name, one in found.items()}))
"""
