"""Jobs of other experiments that a job waits for."""

from __future__ import annotations

from nemo_run_ray.dashboard.jobs_api import JobsApi
from nemo_run_ray.errors import JobError, SubmissionError
from nemo_run_ray.jobs import ledger
from nemo_run_ray.jobs.ledger import JobRecord
from nemo_run_ray.remote.attempts import DISPATCHER_KEY, NONCE_KEY
from nemo_run_ray.remote.spec import OutsideSpec


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
    try:
        record: JobRecord | None = ledger.find(name)
    except JobError:
        record = None
    if record is not None and record.session != session:
        raise SubmissionError(
            f"RayExecutor.dependencies names {name}, which another cluster has, or the same one "
            f"had before it was started again: {record.cluster}, session {record.session}, but "
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
