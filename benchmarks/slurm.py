"""Ray in a Slurm allocation: requests at the controller and seconds until the driver has ended.

NeMo-Run's script and ours side by side, on a real Slurm of hosts on this machine, with a ``ray``
that starts no Ray: what is measured is the way to a cluster, not Ray.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import nemo_run as run
from nemo_run.run.ray.job import RayJob

from benchmarks.common import Add, quietly
from nemo_run_ray import patches
from tests.slurm.conftest import BIN, Slurm

ROUNDS = 3
#: Numbers of nodes, and up to which one NeMo-Run's script is measured: it takes minutes at 64.
NODES, THEIRS_MAX = (1, 4, 16, 64), 16
#: What NeMo-Run's script writes into the root of a node's file system.
_LITTER = ("/launch-head.sh", "/launch-worker.sh")


def measure() -> dict[str, Any]:
    """By the number of nodes: requests and seconds, for each script, and this package's ratio."""
    results: dict[str, Any] = {}
    litter = [Path(name) for name in _LITTER if not Path(name).exists()]
    with tempfile.TemporaryDirectory(prefix="nemo-run-ray-bench-") as folder:
        for nodes in NODES:
            slurm = Slurm(Path(folder), nodes)
            slurm.bed("up", str(nodes))
            try:
                slurm.bed("slurm")
                row = {"ours": _rounds(slurm, nodes, "slurm_ray")}
                if nodes <= THEIRS_MAX:
                    row["NeMo-Run"] = _rounds(slurm, nodes, "")
                results[str(nodes)] = row
            finally:
                slurm.bed("down")
    for path in litter:
        path.unlink(missing_ok=True)
    return results


def show(found: dict[str, Any], add: Add) -> None:
    for nodes, row in found.items():
        for name, one in row.items():
            median, low, high = one["seconds"]
            requests = one["requests"][0]
            add(
                f"Ray on Slurm, {nodes} nodes, {name}: to the driver's end",
                f"{median:.1f} s ({low:.1f} to {high:.1f}), {requests:g} requests",
                "≤ 10 requests" if name == "ours" else "",
            )
    least, most = (found[str(nodes)]["ours"]["seconds"][0] for nodes in (NODES[1], NODES[-1]))
    add(f"the same, {NODES[-1]} nodes / {NODES[1]} nodes", f"{most / least:.2f}", "≤ 1.5")


def _rounds(slurm: Slurm, nodes: int, patch: str) -> dict[str, Any]:
    found = [_once(slurm, nodes, patch, f"n{nodes}{patch}{number}") for number in range(ROUNDS)]
    seconds = [one[0] for one in found]
    return {
        "seconds": [statistics.median(seconds), min(seconds), max(seconds)],
        "requests": [
            statistics.median(one[1] for one in found),
            *sorted({one[1] for one in found}),
        ],
    }


def _once(slurm: Slurm, nodes: int, patch: str, name: str) -> tuple[float, int]:
    """(seconds, requests) of one job whose driver ends at once."""
    slurm.wait_idle()
    tunnel = run.LocalTunnel(job_dir=str(slurm.folder / "jobs"))
    executor = run.SlurmExecutor(
        account="root",
        partition="batch",
        nodes=nodes,
        time="00:30:00",
        tunnel=tunnel,
        packager=run.Packager(),
        env_vars={"PATH": f"{BIN}:$PATH", "CPUS_PER_WORKER": "1"},
    )
    (slurm.folder / "jobs" / name / "logs").mkdir(parents=True)
    work = slurm.folder / "work"
    work.mkdir(exist_ok=True)
    undo = patches.apply(patch) if patch else lambda: True
    try:
        slurm.forget_rpcs()
        began = time.monotonic()
        job = RayJob(name=name, executor=executor)
        with slurm.environment():
            quietly(lambda: job.start(command="true", workdir=str(work)))
        state = slurm.wait(str(job.backend.job_id), within_s=600)
        took = time.monotonic() - began
    finally:
        undo()
    assert state == ("COMPLETED", "0:0"), (name, state)
    return took, sum(slurm.rpcs().values())
