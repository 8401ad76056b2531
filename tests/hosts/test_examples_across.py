"""The examples of groups across hosts, by the commands that their texts name."""

import os
import re
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, python, wait_for
from tests.hosts.conftest import TOKEN

#: The environment with torch, which `make soak` makes.
TORCH = ROOT / ".venv-torch" / "bin" / "python"


def run_example(hosts, name: str, *arguments: str, interpreter: str | Path = sys.executable) -> str:
    words = [str(ROOT / "examples" / name), "--address", hosts.cluster.url]
    words += ["--python", str(interpreter)]
    done = python(*words, *arguments, env={**os.environ, "RAY_AUTH_TOKEN": TOKEN}, cwd="/")
    assert done.returncode == 0, done.stdout + done.stderr
    wait_for(lambda: not hosts.leftovers(), within_s=60)
    return done.stdout


@pytest.mark.soak
def test_evaluate_with_server_in_three_pools(hosts):
    shown = run_example(
        hosts, "evaluate_with_server.py", "--pools", "server=gpu,sandbox=cpu,client=client"
    )

    goes = dict(re.findall(r"nemo_run_ray\| (\w+) goes to (n\d)", shown))
    assert goes == {"server": "n2", "sandbox": "n3", "client": "n1"}
    (accuracy,) = re.findall(r"client/0\| accuracy (\d\.\d\d) on 450 digits$", shown, re.M)
    assert float(accuracy) > 0.9
    assert re.search(r"client/0\| sandbox 5 of 8 solutions pass$", shown, re.M)


# Marked so for the environment that it needs, which takes minutes to make.
@pytest.mark.soak
def test_torchrun_on_two_nodes(hosts):
    shown = run_example(hosts, "torchrun_two_nodes.py", interpreter=TORCH)

    (found,) = re.findall(r"world size 4, on (.+)$", shown, re.M)
    first, second, third, fourth = found.split(", ")
    assert first == second != third == fourth
    epochs = re.findall(r"\]:epoch (\d) loss (\d\.\d+)$", shown, re.M)
    assert [int(epoch) for epoch, _ in epochs] == [0, 1, 2, 3, 4]
    losses = [float(loss) for _, loss in epochs]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] / 2
