"""The example of a chain on the embedded Ray."""

import json
import re
import time

import pytest

from tests.conftest import ROOT, python, tool, wait_for

EXAMPLE = str(ROOT / "examples" / "pipeline.py")
JOBS = {"prepare", "train-logistic", "train-forest", "train-svm", "choose", "examine"}


def test_pipeline(local_cluster, home):
    done = python(EXAMPLE, cwd=home)

    assert done.returncode == 0, done.stdout + done.stderr
    (accuracy,) = re.findall(r"(0\.\d+)  the winner$", done.stdout, re.M)
    assert float(accuracy) > 0.9
    (name,) = re.findall(r"^Its jobs: nemo-run-ray status (\S+)$", done.stdout, re.M)
    rows = json.loads(tool("nemo-run-ray", "status", name, "--json").stdout)
    assert {row["job"]: row["state"] for row in rows} == dict.fromkeys(JOBS, "SUCCEEDED")


@pytest.mark.soak
def test_a_detached_pipeline_goes_on(local_cluster, home, tmp_path):
    began_at = time.monotonic()
    done = python(EXAMPLE, "--detach", "--folder", str(tmp_path), cwd=home)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "The pipeline goes on" in done.stdout
    assert not (tmp_path / "winner.json").exists(), time.monotonic() - began_at
    wait_for(lambda: (tmp_path / "winner.json").exists(), within_s=120)
    assert json.loads((tmp_path / "winner.json").read_text())["accuracy"] > 0.9
