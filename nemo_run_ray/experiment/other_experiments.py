"""Jobs of other experiments that a job waits for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from nemo_run_ray.dashboard.jobs import JobsApi
from nemo_run_ray.errors import ConfigError, JobError, SubmissionError
from nemo_run_ray.experiment import ledger
from nemo_run_ray.experiment.find import did_you_mean, find_experiment, titles
from nemo_run_ray.experiment.ledger import JobRecord, Ledger
from nemo_run_ray.ids import HANDLE
from nemo_run_ray.remote.attempts import DISPATCHER_KEY, NONCE_KEY, nonce_of
from nemo_run_ray.remote.spec import OutsideSpec


def handles_of(
    dependencies: Iterable[str], exp_dir: Path, jobs_of: Callable[[Path], Collection[str]]
) -> list[str]:
    """The handles that dependencies mean: each experiment that is named becomes all of its jobs.

    Args:
        dependencies: handles, and titles or ids of experiments.
        exp_dir: folder of the experiment that has them; its title means an earlier one.
        jobs_of: gives the names of all jobs of an experiment, whatever their executors are.

    Raises:
        ConfigError: there is no such experiment, or a job of it was not handed over to Ray.
    """
    found: list[str] = []
    for name in dependencies:
        found += [name] if "://" in name else _handles_of_one(name, exp_dir, jobs_of)
    return list(dict.fromkeys(found))


def _handles_of_one(
    name: str, exp_dir: Path, jobs_of: Callable[[Path], Collection[str]]
) -> list[str]:
    folder = find_experiment(name, but=exp_dir)
    if folder is None:
        meant = did_you_mean(name, titles() - {exp_dir.parent.name})
        raise ConfigError(
            f"RayExecutor.dependencies names {name!r}, and NeMo-Run's home has no experiment of "
            f"that title or id.{meant} Nothing was sent. `nemo experiment list <title>` lists the "
            "experiments of a title."
        )
    if folder == exp_dir:
        raise ConfigError(
            f"RayExecutor.dependencies names {name!r}, which is the experiment itself; use the "
            "dependencies of `experiment.add` for its own jobs. Nothing was sent."
        )
    records = [job for job in Ledger.of(folder).jobs().values() if not job.is_dispatcher]
    handed_over = {record.job for record in records}
    missing = sorted(set(jobs_of(folder)) - handed_over)
    if missing:
        raise ConfigError(
            f"RayExecutor.dependencies names {name!r}, but these jobs of the experiment "
            f"{folder.name} were not handed over to Ray: {', '.join(missing)}. Wait until they "
            "are, or name the jobs that you mean by their handles. Nothing was sent."
        )
    if not records:
        raise ConfigError(
            f"RayExecutor.dependencies names {name!r}, but the experiment {folder.name} has handed "
            "nothing over to Ray. Nothing was sent."
        )
    return sorted(f"{HANDLE}{record.submission_id}" for record in records)


def _where(record: JobRecord) -> str:
    """The cluster of a job in words; its record may hold headers."""
    kind, name = record.cluster.get("kind"), record.cluster.get("name")
    if kind == "slurm":
        return f"the cluster {name!r} on Slurm"
    return str(record.cluster.get("url") or "the embedded Ray")


def outside_spec(handle: str, api: JobsApi, session: str) -> OutsideSpec:
    """What a dispatcher must know of a job of another experiment.

    Args:
        handle: of the job.
        api: of the cluster that the new job goes to.
        session: Ray's name of that cluster's life; a cluster may have several addresses.

    Raises:
        SubmissionError: the job is unknown, or another cluster has it.
    """
    name = handle.rpartition("/")[2]
    record = _record_of(name)
    if record is not None and record.session != session and not _has_gone_on(record, api):
        raise SubmissionError(
            f"RayExecutor.dependencies names {name}, which another cluster has, or the same one "
            f"had before it was started again: {_where(record)}, session {record.session}, but "
            f"Ray at {api.dashboard.url} has the session {session}. Wait for the job in the "
            "program, or run both on one cluster. Nothing was started."
        )
    if record is not None and record.dispatcher:
        return OutsideSpec(name, tuple(record.nonces), record.dispatcher)
    row = api.job(name)
    if row is None:
        raise SubmissionError(
            f"RayExecutor.dependencies names {name}, which Ray at {api.dashboard.url} does not "
            "have, nor has an experiment of this NeMo-Run home. Is the handle right? Nothing was "
            "started."
        )
    metadata = row.get("metadata") or {}
    nonces = tuple(record.nonces) if record else (str(metadata.get(NONCE_KEY, "")),)
    return OutsideSpec(name, nonces, str(metadata.get(DISPATCHER_KEY, "")))


def _record_of(name: str) -> JobRecord | None:
    """What NeMo-Run's home knows of a job."""
    try:
        return ledger.find(name)
    except JobError:
        return None


def _has_gone_on(record: JobRecord, api: JobsApi) -> bool:
    """Whether a job's dispatch goes on in the Ray that is up, in another allocation than before."""
    if api.dashboard.earlier is None or not record.dispatcher:
        return False
    dispatcher = ledger.find(record.dispatcher)
    row = api.job(dispatcher.submission_id)
    return row is not None and nonce_of(row) in dispatcher.nonces
