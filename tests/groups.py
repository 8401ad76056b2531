"""Groups for tests: real programs in shell, submitted through NeMo-Run as users do."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import nemo_run as run

from nemo_run_ray import PortProbe, RayExecutor
from nemo_run_ray.clusters import Cluster
from nemo_run_ray.experiment.job import RemoteJob, find_job
from tests.conftest import processes_of, wait_for

#: A server that is ready at once and says when it is told to end.
SERVER = """
trap 'echo server got SIGTERM; exit 0' TERM
{python} -m http.server $NEMO_RUN_SERVER_PORT_HTTP >/dev/null 2>&1 &
wait
"""


@dataclass
class Role:
    """One task of a group: its shell program and its executor's fields."""

    program: str
    fields: dict


def server(program: str = SERVER, **fields) -> Role:
    """A service whose program finds ``{python}`` replaced."""
    fields = {"ports": {"http": 0}, "ready": PortProbe("http", interval_s=0.2), **fields}
    fields = {"role": "server", "service": True, **fields}
    return Role(program.replace("{python}", sys.executable), fields)


def client(program: str, role: str = "client", **fields) -> Role:
    return Role(program, {"role": role, **fields})


def submit(name: str, cluster: Cluster, *roles: Role) -> RemoteJob:
    """Hand a group over and leave; the job."""
    with run.Experiment(name) as experiment:
        experiment.add(
            [run.Script(inline=role.program) for role in roles],
            executor=[
                RayExecutor(cluster=cluster, python=sys.executable, **role.fields) for role in roles
            ],
            name="group",
        )
        experiment.run(detach=True)
    return find_job(f"{experiment._id}.group")


def submit_one(name: str, executor: RayExecutor, task: run.Script) -> RemoteJob:
    """Hand one task over and leave; the job."""
    with run.Experiment(name, executor=executor, skip_status_at_exit=True) as experiment:
        experiment.add(task, name="job")
        experiment.run(detach=True)
    return find_job(f"{experiment._id}.job")


def finish(job: RemoteJob) -> tuple[str, str, str]:
    """Follow a job to its end: state, reason and log."""
    log = "".join(job.log(follow=True))
    status = job.status
    return status.state.value, status.reason.value, log


def assert_nothing_left(hosts, job: RemoteJob, within_s: float = 60) -> None:
    """No process of the job on any host, and on the cluster nothing that a group holds."""
    wait_for(lambda: not processes_of(job.id), within_s)
    wait_for(lambda: not hosts.leftovers(), within_s)
