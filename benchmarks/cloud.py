"""Source code to cloud pods: its size beside tar.gz and base64, the time to pack it, and what DGX
Cloud has to start for it, with and without ``ShipSource``, side by side.
"""

from __future__ import annotations

import base64
import importlib.util
import io
import shutil
import statistics
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.common import FOLDER, Add, quietly  # isort: skip

import nemo_run as run
from nemo_run.core.execution import dgxcloud

from nemo_run_ray import patches
from nemo_run_ray.cloud import ShipSource, SourcePackager, encode
from tests.cloud.pods import Cluster, Image
from tests.cloud.servers import RunAI
from tests.patches.dgxcloud import make_executor

#: Whose sources make the tree: what every installation has.
PACKAGES = ("nemo_run", "torchx", "fiddle", "leptonai", "nemo_run_ray")
ROUNDS = 3
SOURCE_BYTES = 400_000


def measure() -> dict[str, object]:
    return {"size": measure_size(), "packing": measure_packing(), "movers": measure_movers()}


def tree(name: str, limit_bytes: int, packages: tuple[str, ...] = PACKAGES) -> Path:
    """A project of installed packages' sources, up to a size."""
    root = FOLDER / name
    taken = 0
    for package in packages:
        found = importlib.util.find_spec(package)
        if found is None or found.origin is None:
            raise RuntimeError(f"the package {package} is not installed")
        home = Path(found.origin).parent
        for path in sorted(home.rglob("*.py")):
            if taken + path.stat().st_size > limit_bytes:
                continue
            target = root / "src" / package / path.relative_to(home)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
            taken += path.stat().st_size
    return root


def as_tarball(root: Path) -> str:
    """What NeMo-Run's data mover makes of the same files."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz", compresslevel=6) as archive:
        archive.add(root, arcname=".")
    return base64.b64encode(raw.getvalue()).decode("ascii")


def _size(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def measure_size() -> dict[str, object]:
    root = tree("size", 4_000_000)
    sent = SourcePackager(root=str(root)).collect()
    ours, theirs = len(encode(sent)[1]), len(as_tarball(root))
    return {
        "source_bytes": _size(root),
        "files": len(sent),
        "ours_chars": ours,
        "tar_gz_base64_chars": theirs,
        "ratio": ours / theirs,
    }


def measure_packing() -> dict[str, object]:
    root = tree("packing", 10_000_000, (*PACKAGES, "rich", "networkx", "pydantic", "aiohttp"))
    taken, busy = [], []
    for _ in range(ROUNDS):
        began, began_busy = time.perf_counter(), time.process_time()
        encode(SourcePackager(root=str(root)).collect())
        taken.append(time.perf_counter() - began)
        busy.append(time.process_time() - began_busy)
    return {
        "source_bytes": _size(root),
        "median_s": statistics.median(taken),
        "range_s": [min(taken), max(taken)],
        "median_cpu_s": statistics.median(busy),  # what a busy machine does not change
    }


def measure_movers() -> dict[str, object]:
    """Workloads that DGX Cloud has to start before the job itself, one after the other."""
    root = tree("movers", SOURCE_BYTES)
    task = run.Script(inline="true")
    real = dgxcloud.time
    # NeMo-Run looks every ten seconds; only how often it does is of interest.
    dgxcloud.time = SimpleNamespace(time=time.time, sleep=lambda seconds: time.sleep(0.02))
    found: dict[str, object] = {"source_bytes": SOURCE_BYTES}
    try:
        for name, plugins, packager in (
            ("ours", [ShipSource(root)], run.Packager()),
            (
                "NeMo-Run alone",
                [],
                run.PatternPackager(include_pattern=str(root / "src"), relative_path=str(root)),
            ),
        ):
            found[name] = _movers(task, plugins, packager, FOLDER / f"cluster-{len(found)}")
            patches.undo("data_mover_configs", "dgxcloud_exports", "dgxcloud_refusal")
    finally:
        dgxcloud.time = real
    return found


def _movers(task: run.Script, plugins: list[Any], packager: run.Packager, folder: Path) -> int:
    (folder / "shared").mkdir(parents=True)
    cluster = Cluster(folder / "shared", folder / "pods", Image(folder / "image"))
    server = RunAI(cluster)
    try:
        executor = make_executor(
            base_url=server.url,
            pvc_nemo_run_dir="/shared/runs",
            packager=packager,
        )
        quietly(
            lambda: run.run(
                task, executor=executor, plugins=plugins, name="movers", tail_logs=False
            )
        )
        (job,) = cluster.of("trainings")
        if job.codes() != [0]:
            raise AssertionError(cluster.submitted[-1].log())
        return len(cluster.of("workspaces"))
    finally:
        server.close()


def show(found: dict[str, Any], add: Add) -> None:
    size, packing, movers = (found[name] for name in ("size", "packing", "movers"))
    add("source as text / tar.gz and base64", f"{size['ratio']:.3f}", "≤ 0.65")
    took = f"{packing['median_s']:.1f} s ({packing['median_cpu_s']:.1f} s of CPU)"
    add("packing 10 MB of source", took, "≤ 3")
    add("data movers for 400 kB on DGX Cloud", f"{movers['ours']}", "1")
    add("the same, NeMo-Run alone", f"{movers['NeMo-Run alone']}")
