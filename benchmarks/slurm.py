"""Ray in a Slurm allocation: requests at the controller and seconds until the driver starts.

NeMo-Run's script and this package's side by side, on a real Slurm of hosts on this machine. With a
``ray`` that starts no Ray the way to a cluster is measured, not Ray; with the real one there is one
round for each number of nodes.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import nemo_run as run
from nemo_run.run.ray.job import RayJob

from benchmarks.common import Add, quietly
from nemo_run_ray import patches
from tests.slurm.conftest import BIN, PYTHON, Slurm

ROUNDS = 3
#: Numbers of nodes, and up to which one NeMo-Run's script is measured: it takes minutes at 64.
NODES, THEIRS_MAX = (1, 2, 4, 8, 16, 64), 16
#: The same with the real Ray, of which eight need most of the two CPUs that this is made for.
REAL_NODES, REAL_THEIRS_MAX = (1, 2, 4, 8), 2
#: The only folder that each of these hosts has for itself. Raylets of several hosts in one folder
#: take the same names for their sockets when they start at the same moment, and end.
_OWN = "/tmp/ray"
#: What NeMo-Run's script writes into the root of a node's file system.
_LITTER = ("/launch-head.sh", "/launch-worker.sh")


class _Kind(NamedTuple):
    """What is measured: the patch, the folders of commands, further fields of the executor."""

    patch: str
    path: str
    fields: dict[str, Any]


def measure() -> dict[str, Any]:
    """By the number of nodes: requests and seconds, for each script."""
    results: dict[str, Any] = {}
    litter = [Path(name) for name in _LITTER if not Path(name).exists()]
    light = f"{BIN}:{PYTHON}"
    ours, theirs = _Kind("slurm_ray", light, {}), _Kind("", light, {})
    with tempfile.TemporaryDirectory(prefix="nemo-run-ray-bench-") as folder:
        for nodes in NODES:
            kinds = {"ours": ours}
            if nodes <= THEIRS_MAX:
                kinds["NeMo-Run"] = theirs
            if nodes == 4:
                kinds["ours, command_srun_args"] = ours._replace(
                    fields={"srun_args": ["--comment=x"]}
                )
            results[str(nodes)] = _on(Path(folder), nodes, kinds, ROUNDS)
        real = _Kind("slurm_ray", f"{_tools(Path(folder))}:{Path(sys.executable).parent}", {})
        for nodes in REAL_NODES:
            kinds = {"ours, real Ray": real}
            if nodes <= REAL_THEIRS_MAX:
                kinds["NeMo-Run, real Ray"] = real._replace(patch="")
            results[f"{nodes}, real"] = _on(Path(folder), nodes, kinds, 1)
    for path in litter:
        path.unlink(missing_ok=True)
    return results


def show(found: dict[str, Any], add: Add) -> None:
    for nodes, row in found.items():
        for name, one in row.items():
            median, low, high = one["starts_s"]
            requests = one["requests"]
            add(
                f"Ray on Slurm, {nodes.partition(',')[0]} nodes, {name}: until the driver starts",
                f"{median:.1f} s ({low:.1f} to {high:.1f}), {requests:g} requests",
                "" if name.startswith("NeMo-Run") else "≤ 10 requests",
            )
    least, most = found["4"]["ours"], found[str(NODES[-1])]["ours"]
    ratio = most["starts_s"][0] / least["starts_s"][0]
    add(f"the same, {NODES[-1]} nodes / 4 nodes", f"{ratio:.2f}", "≤ 1.5")


def _tools(folder: Path) -> Path:
    """A folder with the commands that the hosts lack, without the light ``ray``."""
    tools = folder / "tools"
    tools.mkdir()
    for command in BIN.iterdir():
        if command.name != "ray":
            (tools / command.name).symlink_to(command)
    return tools


def _on(folder: Path, nodes: int, kinds: dict[str, _Kind], rounds: int) -> dict[str, Any]:
    """Measure on so many hosts, one kind after the other in every round."""
    slurm = Slurm(folder, nodes)
    slurm.bed("up", str(nodes))
    try:
        slurm.bed("slurm")
        found: dict[str, list[tuple[float, float, int]]] = {name: [] for name in kinds}
        for number in range(rounds):
            for place, (name, kind) in enumerate(kinds.items()):
                title = f"n{nodes}-{place}-{number}{'-real' if 'real' in name else ''}"
                found[name].append(_once(slurm, nodes, kind, title))
    finally:
        slurm.bed("down")
    return {
        name: {
            "starts_s": _middle([one[0] for one in rows]),
            "ends_s": _middle([one[1] for one in rows]),
            "requests": statistics.median(one[2] for one in rows),
        }
        for name, rows in found.items()
    }


def _middle(values: list[float]) -> list[float]:
    return [statistics.median(values), min(values), max(values)]


def _once(slurm: Slurm, nodes: int, kind: _Kind, name: str) -> tuple[float, float, int]:
    """(seconds until the driver starts, until the job has ended, requests) of one job."""
    slurm.wait_idle()
    tunnel = run.LocalTunnel(job_dir=str(slurm.folder / "jobs"))
    executor = run.SlurmExecutor(
        account="root",
        partition="batch",
        nodes=nodes,
        time="00:30:00",
        tunnel=tunnel,
        packager=run.Packager(),
        env_vars={"PATH": f"{kind.path}:$PATH", "CPUS_PER_WORKER": "1", "RAY_TEMP_DIR": _OWN},
        **kind.fields,
    )
    (slurm.folder / "jobs" / name / "logs").mkdir(parents=True)
    work = slurm.folder / "work"
    work.mkdir(exist_ok=True)
    mark = slurm.folder / f"{name}.started"
    undo = patches.apply(kind.patch) if kind.patch else lambda: True
    try:
        slurm.forget_rpcs()
        began = time.time()
        job = RayJob(name=name, executor=executor)
        with slurm.environment():
            quietly(lambda: job.start(command=f"date +%s.%N > {mark}", workdir=str(work)))
        state = slurm.wait(str(job.backend.job_id), within_s=600)
        ended = time.time()
    finally:
        undo()
    assert state == ("COMPLETED", "0:0"), (name, state)
    return float(mark.read_text()) - began, ended - began, sum(slurm.rpcs().values())
