"""NeMo-Skills for tests: a stand-in with the signatures of an older and of a newer version."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import nemo_run as run

from nemo_run_ray import patches

_SOURCE = Path(__file__).parent / "skills_stand_in"
_EXP = "nemo_skills/pipeline/utils/exp.py"
#: What a newer version of NeMo-Skills has where the older one has this, in ``get_executor``.
_NEWER = {
    "    partition=None,\n    qos=None,\n    time_min=None,\n": (
        "    partition=None,\n    account=None,\n"
    ),
    "    slurm_kwargs: dict | None = None,\n": "    sbatch_kwargs: dict | None = None,\n",
    "    overlap: bool = False,\n    with_ray: bool = False,\n": (
        "    overlap: bool = False,\n    with_ray: bool = False,\n"
        "    ray_template: str | None = None,\n    extra_srun_args: list[str] | None = None,\n"
    ),
}
VERSIONS = ("older", "newer")


def write(folder: Path, version: str = "older") -> None:
    """Put the package ``nemo_skills`` of a version into a folder, with its command ``ns``."""
    shutil.copytree(_SOURCE, folder, dirs_exist_ok=True)
    if version == "newer":
        path = folder / _EXP
        text = path.read_text(encoding="utf-8")
        for before, after in _NEWER.items():
            assert before in text, before
            text = text.replace(before, after)
        path.write_text(text, encoding="utf-8")
    info = folder / "nemo_skills-0.1.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nemo-skills\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[console_scripts]\nns = nemo_skills.pipeline.cli:app\n")


@contextmanager
def imported(folder: Path) -> Iterator[SimpleNamespace]:
    """Import the package of a folder, with the patch applied; nothing of it stays afterwards."""
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        undo = patches.apply("skills_executor")
        names = ("cluster", "exp", "declarative")
        utils = {
            name: importlib.import_module(f"nemo_skills.pipeline.utils.{name}") for name in names
        }
        yield SimpleNamespace(**utils)
        assert undo()
    finally:
        patches.undo("skills_executor")
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.partition(".")[0] == "nemo_skills"]:
            del sys.modules[name]


def submit_served_task(
    folder: Path, cluster: str, title: str, container: str, ports: tuple[int, int], **fields: object
) -> run.Experiment:
    """A client with a server and a sandbox of its own, submitted as NeMo-Skills does.

    Args:
        folder: where the package is.
        cluster: name of the cluster file.
        title: of the experiment.
        container: of the client.
        ports: of the server and of the sandbox.
        fields: of the executors, beside GPUs, which no test has.
    """
    server, sandbox = ports
    config = {"model_path": "/m", "server_type": "vllm", "num_gpus": 1, "num_nodes": 1}
    entrypoint = "python3 nemo_skills/serve.py"
    with imported(folder) as of_skills:
        cluster_config = of_skills.cluster.get_cluster_config(cluster)
        with of_skills.exp.get_exp(title, cluster_config) as exp:
            of_skills.exp.add_task(
                exp,
                cmd=f"cd /nemo_run/code && python3 nemo_skills/client.py localhost:{server}",
                task_name="t",
                cluster_config=cluster_config,
                container=container,
                server_config={**config, "server_port": server, "server_entrypoint": entrypoint},
                with_sandbox=True,
                sandbox_port=sandbox,
            )
            for role in exp.jobs[0].executors.resource_group:
                for name, value in {"gpus_per_node": 0, **fields}.items():
                    setattr(role, name, value)
            of_skills.exp.run_exp(exp, cluster_config)
    return exp
