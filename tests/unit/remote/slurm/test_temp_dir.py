"""Ray's folder on a node: whose it is, and what is removed of it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from nemo_run_ray.remote.slurm import node
from nemo_run_ray.remote.slurm.node import make_private, remove_stale, temp_dir_of

#: A program that holds its folder until it is killed.
_HOLDER = """
import sys, time
from nemo_run_ray.remote.slurm import node
node._TEMP_ROOT = sys.argv[1]
held = node.make_private(node._private_of(sys.argv[2]))
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(node, "_TEMP_ROOT", str(tmp_path))
    return tmp_path


def folder(root, job: str):
    return root / f"nrr-{os.getuid()}-{job}"


def test_the_folder_of_a_run_that_was_killed_is_removed_and_no_other(root):
    words = [sys.executable, "-c", _HOLDER, str(root), "7.0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        folder(root, "6.0").mkdir()  # one that is just being made
        remove_stale("9.0")
        assert folder(root, "7.0").exists(), "its program lives"
        holder.kill()
        holder.wait()
        remove_stale("9.0")
    assert not folder(root, "7.0").exists()
    assert folder(root, "6.0").exists()


def test_earlier_starts_of_the_same_job_are_removed(root):
    for job in ("9.0", "9.1", "9.2", "19.0"):
        folder(root, job).mkdir()
    remove_stale("9.1")
    assert sorted(path.name.partition("-")[2].partition("-")[2] for path in root.iterdir()) == [
        "19.0",
        "9.1",
        "9.2",
    ]


def test_a_folder_that_two_nodes_share_stays_until_both_have_ended(root):
    first, second = (make_private(os.path.dirname(temp_dir_of("3.0"))) for _ in range(2))
    os.close(second)
    remove_stale("4.0")
    assert folder(root, "3.0").exists()
    os.close(first)
    remove_stale("4.0")
    assert not folder(root, "3.0").exists()
