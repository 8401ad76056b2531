"""Ray in a Slurm allocation: requests at the controller and seconds until the driver starts.

NeMo-Run's script and this package's side by side, on a real Slurm of hosts on this machine. With a
``ray`` that starts no Ray the way to a cluster is measured, not Ray; with the real one there is one
round for each number of nodes.

How the time grows with the nodes is measured by itself, few and many in turns. All hosts share the
processors of one machine, and there even a step of Slurm that does nothing takes eight times as
long on 64 hosts as on four. Nodes have processors of their own, so it is measured once more with
the same share of a processor for each worker's host, few or many.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import nemo_run as run
from nemo_run.run.ray.job import RayJob

from benchmarks.common import Add, quietly
from benchmarks.processor_share import processor_share
from nemo_run_ray import patches
from tests.slurm.conftest import BIN, PYTHON, Slurm

ROUNDS = 3
#: Numbers of nodes, and up to which one NeMo-Run's script is measured: it takes minutes at 64.
NODES, THEIRS_MAX = (1, 2, 4, 8, 16, 64), 16
#: The same with the real Ray, of which eight need most of the two CPUs that this is made for.
REAL_NODES, REAL_THEIRS_MAX = (1, 2, 4, 8), 2
#: The numbers of nodes that are measured in turns, and how often; the share of a processor that a
#: host has then. All hosts but the head's together have less than the two processors there are.
FEW, MANY, TURNS, SHARE = 4, 64, 8, 1 / 40
_OWN_SHARE = f"each worker's host with 1/{1 / SHARE:.0f} of a processor"
#: The only folder that each of these hosts has for itself. Raylets of several hosts in one folder
#: take the same names for their sockets when they start at the same moment, and end.
_OWN = "/tmp/ray"
#: What NeMo-Run's script writes into the root of a node's file system.
_LITTER = ("/launch-head.sh", "/launch-worker.sh")


class _Run(NamedTuple):
    """One job.

    Attributes:
        starts_s: until its driver starts, since it was submitted.
        ends_s: until it has ended.
        requests: at the controller.
    """

    starts_s: float
    ends_s: float
    requests: int


class _Kind(NamedTuple):
    """What is measured: the patch, the folders of commands, further fields of the executor."""

    patch: str
    path: str
    fields: dict[str, Any]


def measure() -> dict[str, Any]:
    """By the number of nodes: requests and seconds, for each script."""
    results: dict[str, Any] = {}
    growth: dict[str, Any] = {}
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
        growth = _in_turns(Path(folder), ours)
    for path in litter:
        path.unlink(missing_ok=True)
    return {"by nodes": results, "growth": growth}


def show(found: dict[str, Any], add: Add) -> None:
    for nodes, row in found["by nodes"].items():
        for name, one in row.items():
            requests = one["requests"]
            add(
                f"Ray on Slurm, {nodes.partition(',')[0]} nodes, {name}: until the driver starts",
                f"{_seconds(one['starts_s'])}, {requests:g} requests",
                "" if name.startswith("NeMo-Run") else "≤ 10 requests",
            )
    least, most = (found["by nodes"][str(nodes)]["ours"]["starts_s"][0] for nodes in (FEW, MANY))
    add(
        f"{MANY} nodes / {FEW}, each on hosts of their own, no real Ray",
        f"{most / least:.2f}",
        "≤ 1.5",
    )
    for where, rows in found["growth"].items():
        if isinstance(rows, str):
            add(f"{MANY} nodes and {FEW} in turns, {where}", f"not measured: {rows}")
            continue
        few, many = (rows[str(nodes)]["starts_s"] for nodes in (FEW, MANY))
        add(
            f"{MANY} nodes / {FEW} in turns, {where}: until the driver starts",
            f"{many[0] / few[0]:.2f}: {_seconds(many)}; {_seconds(few)}",
            "≤ 1.5",
        )


def _seconds(values: list[float]) -> str:
    median, low, high = values
    return f"{median:.1f} s ({low:.1f} to {high:.1f})"


def _tools(folder: Path) -> Path:
    """A folder with the commands that the hosts lack, without the light ``ray``."""
    tools = folder / "tools"
    tools.mkdir()
    for command in BIN.iterdir():
        if command.name != "ray":
            (tools / command.name).symlink_to(command)
    return tools


@contextlib.contextmanager
def _slurm(folder: Path, nodes: int, *settings: str) -> Iterator[Slurm]:
    slurm = Slurm(folder, nodes)
    slurm.bed("up", str(nodes))
    try:
        slurm.bed("slurm", *settings)
        yield slurm
    finally:
        slurm.bed("down")


def _on(folder: Path, nodes: int, kinds: dict[str, _Kind], rounds: int) -> dict[str, Any]:
    """Measure on so many hosts, one kind after the other in every round."""
    found: dict[str, list[_Run]] = {name: [] for name in kinds}
    with _slurm(folder, nodes) as slurm:
        for number in range(rounds):
            for place, (name, kind) in enumerate(kinds.items()):
                title = f"n{nodes}-{place}-{number}{'-real' if 'real' in name else ''}"
                found[name].append(_once(slurm, nodes, kind, title))
    return {name: _summary(runs) for name, runs in found.items()}


def _in_turns(folder: Path, kind: _Kind) -> dict[str, Any]:
    """By how the hosts share the processors: few nodes and many of the same hosts, in turns."""
    found: dict[str, Any] = {}
    # Otherwise Slurm lets a job wait for up to 3 s, which hides most of the rest.
    with _slurm(folder, MANY, "SchedulerParameters=batch_sched_delay=0") as slurm:
        found["on two processors"] = _growth(slurm, kind, "shared")
        with contextlib.ExitStack() as stack:
            try:
                # The head's program does more than a worker's, and there is one of it.
                stack.enter_context(processor_share(_workers(slurm), SHARE))
            except OSError as error:
                found[_OWN_SHARE] = str(error)
            else:
                found[_OWN_SHARE] = _growth(slurm, kind, "own")
    return found


def _growth(slurm: Slurm, kind: _Kind, title: str) -> dict[str, Any]:
    found: dict[int, list[_Run]] = {FEW: [], MANY: []}
    for number in range(TURNS):
        for nodes, runs in found.items():
            runs.append(_once(slurm, nodes, kind, f"{title}{nodes}-{number}"))
    return {str(nodes): _summary(runs) for nodes, runs in found.items()}


def _workers(slurm: Slurm) -> dict[str, list[int]]:
    """The process of Slurm on every host but the head's."""
    found = {}
    for pid in slurm.processes(slurm.conf):
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if "-N" in words and words[words.index("-N") + 1] != "n1":
            found[words[words.index("-N") + 1]] = [pid]
    return found


def _summary(runs: list[_Run]) -> dict[str, Any]:
    return {
        "starts_s": _middle([one.starts_s for one in runs]),
        "ends_s": _middle([one.ends_s for one in runs]),
        "requests": statistics.median(one.requests for one in runs),
    }


def _middle(values: list[float]) -> list[float]:
    return [statistics.median(values), min(values), max(values)]


def _once(slurm: Slurm, nodes: int, kind: _Kind, name: str) -> _Run:
    slurm.wait_idle()
    tunnel = run.LocalTunnel(job_dir=str(slurm.folder / "jobs"))
    executor = run.SlurmExecutor(
        account="root",
        partition="batch",
        nodes=nodes,
        time="00:30:00",
        tunnel=tunnel,
        packager=run.Packager(),
        container_image="image",  # NeMo-Run's script has a container's name, which needs one
        env_vars={
            "PATH": f"{kind.path}:$PATH",
            "CPUS_PER_WORKER": "1",
            "RAY_TEMP_DIR": _OWN,
            "TMPDIR": str(slurm.folder),  # Ray's helpers leave folders there when they are killed
            # With a token in ~/.ray, Ray asks for it, and NeMo-Run's script has none to give.
            **({} if kind.patch else {"RAY_AUTH_MODE": "disabled"}),
        },
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
    started = float(mark.read_text())
    return _Run(started - began, ended - began, sum(slurm.rpcs().values()))
