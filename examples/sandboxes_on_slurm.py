"""Score programs in a code sandbox on every node of an allocation of Slurm.

The allocation starts the sandbox beside Ray on each of its nodes, and Ray is up when all sandboxes
are. The task has one replica a node, which sends its share of the programs to the sandbox of its
own node. The allocation ends when the program does. The programs are in ``evaluation/``.

``python examples/sandboxes_on_slurm.py --account ACCOUNT --job-dir /shared/me/jobs --nodes 3`` runs
on a login node; ``--ssh me@login.example.org`` reaches one. Nodes need ray, fastapi and uvicorn, by
``--setup 'source /shared/me/venv/bin/activate'`` for example.
"""

import argparse
import shlex
import sys
from pathlib import Path

import nemo_run as run

from nemo_run_ray import PortProbe, RayExecutor, Sidecar, SlurmCluster

PROGRAMS = Path(__file__).resolve().parent / "evaluation"
PORT = 6000


def sandbox() -> Sidecar:
    """The sandbox, whose program goes along in the command: nodes need not see this folder."""
    program = shlex.quote((PROGRAMS / "sandbox.py").read_text())
    command = f"NEMO_RUN_SANDBOX_PORT_HTTP={PORT} exec python -c {program}"
    return Sidecar("sandbox", command, ready=PortProbe(PORT))


def main(cluster: SlurmCluster, nodes: int) -> bool:
    """Run the task on a cluster; whether it succeeded."""
    executor = RayExecutor(
        cluster=cluster,
        nodes=nodes,
        cpus_per_node=1,
        strategy="STRICT_SPREAD",  # one replica a node
        env_vars={"SANDBOX_PORT": str(PORT)},
        packager=run.PatternPackager(include_pattern=str(PROGRAMS), relative_path=str(PROGRAMS)),
    )
    with run.Experiment("sandboxes-on-slurm") as experiment:
        script = run.Script("share_of_node.py", entrypoint="python")
        experiment.add(script, executor=executor, name="score", tail_logs=True)
        experiment.run()
    return experiment.status(return_dict=True)["score"]["status"].name == "SUCCEEDED"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--account", required=True, help="Slurm's account")
    parser.add_argument("--partition", help="Slurm's partition")
    parser.add_argument("--job-dir", required=True, help="a folder that all nodes share")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ssh", help="user@host of a login node; without it, this machine is one")
    parser.add_argument("--setup", help="shell lines before Ray starts on the nodes")
    given = parser.parse_args()
    if given.ssh:
        user, _, host = given.ssh.rpartition("@")
        tunnel = run.SSHTunnel(host=host, user=user, job_dir=given.job_dir)
    else:
        tunnel = run.LocalTunnel(job_dir=given.job_dir)
    slurm = run.SlurmExecutor(
        account=given.account,
        partition=given.partition,
        nodes=given.nodes,
        time="00:30:00",
        setup_lines=given.setup,
        tunnel=tunnel,
    )
    cluster = SlurmCluster(executor=slurm, name="sandboxes", sidecars=[sandbox()])
    sys.exit(not main(cluster, given.nodes))
