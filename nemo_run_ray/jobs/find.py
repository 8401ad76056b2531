"""Finding jobs that were handed over: by an experiment's id or title, a handle, or a job's id."""

from __future__ import annotations

from pathlib import Path

from nemo_run.config import get_nemorun_home

from nemo_run_ray.errors import JobError
from nemo_run_ray.jobs import ledger
from nemo_run_ray.jobs.dispatched_job import DispatchedJob
from nemo_run_ray.jobs.job import RemoteJob
from nemo_run_ray.jobs.ledger import JobRecord, Ledger


def find(name: str) -> list[RemoteJob]:
    """The jobs of an experiment, or one job.

    Args:
        name: an experiment's id, or its title (then its newest one); a handle of NeMo-Run's; or a
            job's id on the cluster.

    Returns:
        The jobs in the order of their submission; one of a handle or a job's id.

    Raises:
        JobError: no such job was submitted from this NeMo-Run home.
    """
    bare = name.rpartition("/")[2]
    try:
        return [find_job(bare)]
    except JobError:
        folder = find_experiment(name)
    if folder is None:
        raise JobError(
            f"There is no experiment {name!r} in NeMo-Run's home, and no job or handle of that "
            "name. `nemo experiment list <title>` lists the experiments of a title; NEMORUN_HOME "
            "names another home."
        )
    found = jobs_of(folder)
    if not found:
        raise JobError(f"The experiment {name!r} has handed nothing over to Ray yet.")
    return found


def find_job(submission_id: str) -> RemoteJob:
    """The job of a submission id.

    Raises:
        JobError: it was not submitted from this NeMo-Run home.
    """
    return job_of(ledger.find(submission_id))


def find_experiment(name: str) -> Path | None:
    """The folder of an experiment's id, or of the newest one of a title; ``None`` without any."""
    home = Path(get_nemorun_home()) / "experiments"
    folders = [folder for folder in home.glob("*/*") if folder.is_dir()]
    by_id = [folder for folder in folders if folder.name == name]
    if by_id:
        return by_id[0]
    outside = ledger.remembered(name)
    if outside is not None:
        return outside
    of_title = [folder for folder in folders if folder.parent.name == name]
    # NeMo-Run's from_title chooses in the same way.
    return max(of_title, key=lambda folder: folder.stat().st_ctime, default=None)


def jobs_of(exp_dir: Path) -> list[RemoteJob]:
    """The jobs that an experiment's ledger knows, in the order of their submission."""
    records = Ledger.of(exp_dir).jobs().values()
    return [job_of(record) for record in records if not record.is_dispatcher]


def job_of(record: JobRecord) -> RemoteJob:
    """The job that a record tells of."""
    is_dispatched = record.dispatcher and not record.is_dispatcher
    return DispatchedJob(record) if is_dispatched else RemoteJob(record)
