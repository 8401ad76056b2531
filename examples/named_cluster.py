"""Run a task where a cluster file says, by the names of the file and of a pool.

python examples/named_cluster.py                # examples/cluster_configs/laptop.yaml
python examples/named_cluster.py team-a gpu     # a file and a pool of yours
"""

import sys
from pathlib import Path

import nemo_run as run

from nemo_run_ray import RayExecutor

FILE = Path(__file__).resolve().parent / "cluster_configs" / "laptop.yaml"


def main(cluster: str = str(FILE), pool: str = "small") -> None:
    executor = RayExecutor(cluster=cluster, pool=pool)
    task = run.Script(inline='echo "$GREETING from a pool of $(nproc) CPUs"')
    run.run(task, executor=executor, name="named-cluster", tail_logs=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
