"""A user's program: submits a chain with an array of a thousand elements and dies at once.

``detached_sweep.py URL TITLE FOLDER``; the token is in RAY_AUTH_TOKEN, NeMo-Run's home in
NEMORUN_HOME. Elements from 500 on end when the folder has a file ``go``.
"""

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import nemo_run as run

from nemo_run_ray import ExistingCluster, RayExecutor, array

COUNT = 1000
PROGRAM = (
    "echo $NAME is $NEMO_RUN_ARRAY_INDEX; echo $NEMO_RUN_ARRAY_INDEX >> begun; "
    "test $NEMO_RUN_ARRAY_INDEX -lt 500 || until test -e go; do sleep 0.2; done"
)


def main(url: str, title: str, folder: Path) -> None:
    executor = RayExecutor(cluster=ExistingCluster(url=url), python=sys.executable)
    elements = executor.clone()
    elements.cpus_per_node = 1
    inside = f"cd {folder}; "
    sweep = array(
        run.Script(inline=inside + PROGRAM), over={"env.NAME": [f"n{n}" for n in range(COUNT)]}
    )
    with run.Experiment(title) as experiment:
        first = experiment.add(
            run.Script(inline=inside + "touch prepared"), executor=executor, name="prepare"
        )
        second = experiment.add(sweep, executor=elements, name="sweep", dependencies=[first])
        experiment.add(
            run.Script(inline=inside + "wc -l < begun > report"),
            executor=executor,
            name="report",
            dependencies=[second],
        )
        experiment.run(detach=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
