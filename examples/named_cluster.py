"""Run a task where a cluster file says, by the names of the file and of a pool.

python examples/named_cluster.py                # examples/cluster_configs/laptop.yaml
python examples/named_cluster.py team-a gpu     # a file and a pool of yours
"""

import sys
from pathlib import Path

import nemo_run as run

from nemo_run_ray import RayExecutor

FILE = Path(__file__).resolve().parent / "cluster_configs" / "laptop.yaml"


def main(cluster: str = str(FILE), pool: str = "small") -> bool:
    """Run it; whether it succeeded."""
    executor = RayExecutor(cluster=cluster, pool=pool)
    task = run.Script(inline='echo "$GREETING from a pool of $(nproc) CPUs"')
    with run.Experiment("named-cluster", executor=executor) as experiment:
        experiment.add(task, name="greet", tail_logs=True)
        experiment.run()
    return experiment.status(return_dict=True)["greet"]["status"].name == "SUCCEEDED"


if __name__ == "__main__":
    sys.exit(not main(*sys.argv[1:]))
