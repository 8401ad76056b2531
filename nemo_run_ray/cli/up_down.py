"""``nemo-run-ray up`` and ``down``: the clusters that this package starts and stops."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer

from nemo_run_ray.cli import out
from nemo_run_ray.clusters import Dashboard, LocalCluster, SlurmCluster
from nemo_run_ray.errors import ClusterError, ConfigError, JobError

_FILE = "A cluster file of an embedded Ray, or of one on Slurm."


def up(
    num_cpus: Annotated[int | None, typer.Option(help="CPUs that Ray may give away.")] = None,
    num_gpus: Annotated[int | None, typer.Option(help="GPUs that Ray may give away.")] = None,
    cluster: Annotated[str | None, typer.Option(help=_FILE)] = None,
) -> None:
    """Start the embedded Ray, or an allocation of Slurm, and keep it."""
    found = cluster_of_ours(cluster)
    size = {"num_cpus": num_cpus, "num_gpus": num_gpus}
    given: dict[str, Any] = {name: value for name, value in size.items() if value is not None}
    if isinstance(found, SlurmCluster) and given:
        raise ConfigError(
            f"--{next(iter(given)).replace('_', '-')} is for the embedded Ray; the cluster file "
            f"{cluster!r} says how large its allocation is."
        )
    dashboard = replace(found, keep=True, **given).connect()
    out.print(f"{_title(found)} is up: {dashboard.url}")
    out.print(f"Stop it with: {_down(cluster)}")


def down(
    force: Annotated[
        bool, typer.Option("--force", help="Cancel the jobs that run on it first.")
    ] = False,
    name: Annotated[str | None, typer.Option("--cluster", help=_FILE)] = None,
) -> None:
    """Stop such a cluster, when its jobs have ended; how they ended is noted first."""
    cluster = cluster_of_ours(name)
    title = _title(cluster)
    dashboard = cluster.find()
    if dashboard is None:
        # What an embedded Ray that has died has left is kept; a job of Slurm may wait in the queue.
        ended = cluster.why_down() or f"No {title[4:]} is up."
        was_there = cluster.stop()
        out.print(f"{title} is stopped." if was_there else ended)
        return
    _end_jobs(cluster, dashboard, force, name)
    cluster.stop()
    out.print(f"{title} is stopped.")


def stop_unused(state_dir: str) -> None:
    """Note how the jobs of an idle embedded Ray ended, and stop it; ``local_watch.py`` calls it."""
    cluster = LocalCluster(state_dir=state_dir)
    dashboard = cluster.find()
    if dashboard is not None:
        _end_jobs(cluster, dashboard, False, None)
        cluster.stop_unused()


def _end_jobs(
    cluster: LocalCluster | SlurmCluster, dashboard: Dashboard, force: bool, name: str | None
) -> None:
    """Cancel what runs, if that is asked for, and note how all jobs ended.

    Raises:
        JobError: jobs run, and nobody asked to cancel them.
    """
    from nemo_run_ray.dashboard.jobs import JobsApi
    from nemo_run_ray.experiment.shutdown import active, end_all, note_ends

    api = JobsApi.of(dashboard)
    try:
        busy = active(api.table(fresh=True))
        if busy and not force:
            raise JobError(
                f"{len(busy)} job(s) still run on {_title(cluster)[:1].lower()}"
                f"{_title(cluster)[1:]}: {', '.join(busy)}. Cancel "
                f"them, or cancel all and stop it: {_down(name)} --force"
            )
        if busy:
            out.print(f"Cancelling {len(busy)} job(s) …")
            for job in end_all(api):
                out.print(f"{job} has not ended; it is killed with the cluster.")
        for line in note_ends(api, cluster, is_forced=bool(busy)):
            out.print(line)
    except ClusterError as error:
        if not force:
            raise
        out.print(f"Its jobs' ends are not known: {error}")


def _title(cluster: LocalCluster | SlurmCluster) -> str:
    if isinstance(cluster, LocalCluster):
        return "The embedded Ray"
    return f"The allocation of the cluster {cluster.name!r} on Slurm"


def _down(name: str | None) -> str:
    return "nemo-run-ray down" + ("" if name is None else f" --cluster {name}")


def cluster_of_ours(name: str | None) -> LocalCluster | SlurmCluster:
    """The embedded Ray, or the cluster that a cluster file describes.

    Raises:
        ConfigError: the file is wrong, or names a cluster that exists.
    """
    if name is None:
        return LocalCluster()
    from nemo_run_ray.cluster_files.load import load
    from nemo_run_ray.cluster_files.resolve import cluster_of

    found = cluster_of(load(name))
    if not isinstance(found, (LocalCluster, SlurmCluster)):
        raise ConfigError(
            f"The cluster file {name!r} names {getattr(found, 'url', 'a cluster')}, which is not "
            "for this command to start or stop; expected a file with `cluster: {local: {}}` or "
            "`cluster: {slurm: …}`."
        )
    return found
