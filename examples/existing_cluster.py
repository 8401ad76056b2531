"""Run a script and your own code on a Ray cluster that exists.

    RAY_AUTH_TOKEN=… python examples/existing_cluster.py http://ray-head:8265

The files beside this one travel to the node; the job is left running and found again by its name.
"""

import sys
from pathlib import Path

import nemo_run as run

from nemo_run_ray import ExistingCluster, RayExecutor

HERE = Path(__file__).resolve().parent


def main(address: str) -> None:
    executor = RayExecutor(
        cluster=ExistingCluster(url=address),
        packager=run.PatternPackager(include_pattern=str(HERE), relative_path=str(HERE)),
        env_vars={"GREETING": "hello from the node"},
    )
    script = run.Script(inline='echo "$GREETING $(hostname)"\nls\n')
    with run.Experiment("existing-cluster", executor=executor) as experiment:
        experiment.add(script, name="greet")
        experiment.run(detach=True)
    # From here on this process is not needed: any other one can do the same.
    found = run.Experiment.from_title("existing-cluster")
    print(found.status(return_dict=True)["greet"]["handle"])


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
