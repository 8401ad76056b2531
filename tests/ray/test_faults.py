"""Dropped answers, cut connections, dashboards that are away, clients that are killed."""

import json
import os
import random
from pathlib import Path

import pytest

from tests.conftest import python

CHAOS = Path(__file__).with_name("chaos.py")


@pytest.fixture
def chaos(dashboard, token, tmp_path):
    def chaos(runs: int, seed: int, trouble_s: float) -> None:
        env = {**os.environ, "RAY_AUTH_TOKEN": token, "TMPDIR": str(tmp_path)}
        run_chaos(dashboard.url, env, runs, seed, trouble_s)

    return chaos


def run_chaos(url: str, env: dict[str, str], runs: int, seed: int, trouble_s: float) -> None:
    print(f"seed {seed}")
    workers = 5
    arguments = [str(CHAOS), url, str(runs), str(seed), str(workers), str(trouble_s)]
    done = python(*arguments, env=env, timeout=3600)
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"run"')]
    assert len(reports) == runs, done.stdout + done.stderr
    broken = [report for report in reports if report["broken"]]
    assert not broken, f"seed {seed}: {json.dumps(broken, indent=1)}"


def test_every_fault_once(chaos):
    chaos(runs=11, seed=1, trouble_s=5)


@pytest.mark.soak
def test_a_hundred_faults(chaos):
    chaos(runs=110, seed=int(os.environ.get("SEED", random.randrange(10**6))), trouble_s=60)
