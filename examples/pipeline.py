"""Train three classifiers of handwritten digits in parallel, and examine the best of them.

The steps are jobs of one experiment, each of which waits for those before it::

    prepare ─┬─ train-logistic ─┬─ choose ── examine
             ├─ train-forest ───┤
             └─ train-svm ──────┘

``python examples/pipeline.py`` runs them on an embedded Ray of this machine, and with ``--address
http://ray-head:8265 --folder /shared/digits`` on a cluster whose nodes have scikit-learn. The
cluster keeps the order: with ``--detach`` the program ends as soon as the jobs are handed over,
and the pipeline goes on. The programs of the steps are in ``pipeline_steps/``.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import nemo_run as run
from nemo_run.config import get_nemorun_home

from nemo_run_ray import RayExecutor

PROGRAMS = Path(__file__).resolve().parent / "pipeline_steps"
MODELS = ["logistic", "forest", "svm"]


def main(address: str | None, folder: Path, name: str, detach: bool) -> bool:
    """Hand the pipeline over and wait for it, or not; whether all is well so far."""
    common: dict[str, Any] = {
        "address": address,
        "packager": run.PatternPackager(include_pattern=str(PROGRAMS), relative_path=str(PROGRAMS)),
        "cpus_per_node": 1,
        "env_vars": {"OMP_NUM_THREADS": "1"},
        # Of this experiment's jobs, at once: with more models, some would wait for their turn.
        "max_in_flight": 3,
        # What a step ends with when trying again would not help.
        "permanent_exit_codes": [2],
    }
    with run.Experiment("pipeline", id=name, executor=RayExecutor(**common)) as experiment:
        prepare = experiment.add(step("prepare.py", folder), name="prepare")
        trainings = []
        for model in MODELS:
            # The forest takes the most time and memory. When its node dies or kills it, it is
            # trained again, up to twice, and the pipeline goes on.
            retries = 2 if model == "forest" else 0
            training = experiment.add(
                step("train.py", folder, model),
                executor=RayExecutor(retries=retries, **common),
                name=f"train-{model}",
                dependencies=[prepare],
            )
            trainings.append(training)
        choose = experiment.add(
            step("choose.py", folder, *MODELS), name="choose", dependencies=trainings
        )
        experiment.add(step("examine.py", folder), name="examine", dependencies=[choose])
        experiment.run(detach=detach)
    states = [job["status"].name for job in experiment.status(return_dict=True).values()]
    return detach or set(states) == {"SUCCEEDED"}


def step(program: str, folder: Path, *models: str) -> run.Script:
    """A program of ``pipeline_steps/``, run by the node's Python."""
    return run.Script(program, args=[str(folder), *models], entrypoint="python")


def table(folder: Path) -> str:
    """What the steps found out."""
    accuracies = json.loads((folder / "validation.json").read_text())
    winner = json.loads((folder / "winner.json").read_text())
    lines = ["model       validation   test"]
    for model in sorted(accuracies, key=accuracies.__getitem__, reverse=True):
        won = f"  {winner['accuracy']:.3f}  the winner" if model == winner["model"] else ""
        lines.append(f"{model:10}  {accuracies[model]:10.3f}{won}")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--address", help="dashboard of a cluster that exists")
    parser.add_argument("--folder", type=Path, help="for the steps' files; every node must see it")
    parser.add_argument("--detach", action="store_true", help="do not wait for the end")
    given = parser.parse_args()
    name = f"pipeline_{int(time.time())}"
    folder = (given.folder or Path(get_nemorun_home()) / "pipeline" / name).absolute()

    if not main(given.address, folder, name, given.detach):
        sys.exit(f"The pipeline failed. Its jobs: nemo-run-ray status {name}")
    if given.detach:
        print(f"The pipeline goes on, its files will be in {folder}")
    elif (folder / "winner.json").exists():
        print(f"{table(folder)}\nThe models are in {folder}")
    else:
        print(f"{folder} is not seen here. Result: nemo-run-ray logs {name} --job examine")
    print(f"Its jobs: nemo-run-ray status {name}")
    print(f"As a page: nemo-run-ray timeline {name} -o pipeline.html")
