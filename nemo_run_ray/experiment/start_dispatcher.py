"""Starting the dispatcher of a dispatch, also again and by another process than the first time."""

from __future__ import annotations

import hashlib
import json
import time
from typing import Any

from nemo_run_ray.clusters import from_record
from nemo_run_ray.dashboard.http import pause
from nemo_run_ray.dashboard.jobs import JobsApi
from nemo_run_ray.errors import JobError, NemoRunRayError
from nemo_run_ray.experiment import archives, ledger
from nemo_run_ray.experiment.dispatch import Dispatch, DispatchStatus
from nemo_run_ray.experiment.ledger import Ledger
from nemo_run_ray.experiment.snapshot import GONE, Snapshot
from nemo_run_ray.experiment.submit_once import submit_once
from nemo_run_ray.ids import DISPATCHER
from nemo_run_ray.plan.entrypoints import dispatcher_entrypoint
from nemo_run_ray.remote.attempts import NONCE_KEY, attempt_id
from nemo_run_ray.remote.node.rundir import DISPATCH
from nemo_run_ray.remote.spec import SUBMISSION_ID

#: What is said of a dispatch with which nothing is left to do.
_OVER = "all is decided"


def start_dispatcher(dispatch: Dispatch, api: JobsApi, cluster: dict[str, Any]) -> str:
    """Start a dispatcher, whether there was one before or not; its submission id.

    Args:
        dispatch: what it is to hand over.
        api: of the cluster.
        cluster: the cluster's record.

    Raises:
        ConfigError: a secret of a job that has not started is not set.
        JobError: the experiment's folder is not whole, or cannot be written to.
        SubmissionError: Ray refuses it, or it is not known whether it arrived.
        ClusterError: the cluster cannot be reached.
    """
    found = dispatch.look(api, Snapshot(is_fresh=True))
    nonce = dispatch.spec.nonce
    name = attempt_id(dispatch.id, max(found.dispatcher, default=0) + 1)
    start = _upload(dispatch, api)
    uploads = [_plan_archive(dispatch)]
    hidden = _secrets(dispatch, found)
    if hidden:
        places = start.get("secret_places", {})
        uploads.append(archives.secrets_archive(hidden, f"{nonce} {name}", places))
    for archive in uploads:
        api.put_package(archive.name, archive.pack())
    names = [*start["archives"], *(archive.name for archive in uploads)]
    body = _body(name, nonce, start["pythons"], names)
    if not hidden:
        _keep(dispatch, cluster, body, start, uploads)
    book = _write_intent(dispatch, name, cluster)
    try:
        submit_once(api, body, lambda: [nonce], time.monotonic, pause)
    except NemoRunRayError as error:
        book.note(ledger.UNSETTLED, name, why=str(error))
        raise
    book.note(ledger.SUBMITTED, name)
    return name


def resume(dispatch: Dispatch) -> str:
    """Start the dispatcher if it is dead and something is left to do, and say what was done.

    Raises:
        ConfigError: a secret of a job that has not started is not set.
        SubmissionError: Ray refuses it.
        ClusterError: the cluster cannot be asked.
    """
    records = [
        job for job in Ledger.of(dispatch.exp_dir).jobs().values() if job.dispatcher == dispatch.id
    ]
    if all(job.terminal for job in records if not job.is_dispatcher):
        return _OVER  # its cluster may be gone since
    record = records[0].cluster
    cluster = from_record(record)
    dashboard = cluster.find()
    if dashboard is None:
        away = cluster.why_away(dispatch.spec.session)
        if away:
            return f"it goes on by itself: {away}"
        why = cluster.why_gone(dispatch.spec.session) or GONE
        return f"run the experiment again: {why}"
    api = JobsApi.of(dashboard)
    found = dispatch.look(api, Snapshot(is_fresh=True))
    if found.lost:
        return f"lost: {found.lost}; run the experiment again"
    if found.decision.is_over:
        return _OVER
    if found.is_dispatched:
        return "its dispatcher is at work"
    return f"started again as {start_dispatcher(dispatch, api, record)}"


def _upload(dispatch: Dispatch, api: JobsApi) -> dict[str, Any]:
    """Send the archives that Ray lacks, and return how the dispatcher is started."""
    folder = dispatch.folder
    try:
        start: dict[str, Any] = json.loads((folder / "dispatcher.json").read_text(encoding="utf-8"))
        for name in start["archives"]:
            if not api.has_package(name):
                api.put_package(name, (folder / name).read_bytes())
    except (OSError, ValueError) as error:
        raise JobError(
            f"The chain {dispatch.id} cannot be started again from {folder}: {error}. Copy the "
            "experiment's whole folder."
        ) from error
    return start


def _body(name: str, nonce: str, pythons: list[str], packages: list[str]) -> dict[str, Any]:
    return {
        "submission_id": name,
        "entrypoint": dispatcher_entrypoint(pythons, name, nonce),
        "runtime_env": {"py_modules": [f"gcs://{package}" for package in packages], "env_vars": {}},
        "metadata": {NONCE_KEY: nonce, "nemo_run_job": DISPATCHER},
    }


def _keep(
    dispatch: Dispatch,
    cluster: dict[str, Any],
    body: dict[str, Any],
    start: dict[str, Any],
    uploads: list[archives.Archive],
) -> None:
    """Let the cluster go on with a dispatch by itself; one with secrets needs a client."""
    entrypoint = dispatcher_entrypoint(start["pythons"], SUBMISSION_ID, dispatch.spec.nonce)
    again = {**body, "submission_id": dispatch.id, "entrypoint": entrypoint}

    def data() -> dict[str, bytes]:
        saved = {name: (dispatch.folder / name).read_bytes() for name in start["archives"]}
        return saved | {archive.name: archive.pack() for archive in uploads}

    ids = [job.id for job in dispatch.spec.jobs]
    outside = [upstream for job in dispatch.spec.jobs for upstream in job.outside]
    ids += [name for upstream in outside for name in (upstream.id, upstream.dispatcher) if name]
    from_record(cluster).keep_dispatch(dispatch.id, ids, again, data)


def _write_intent(dispatch: Dispatch, name: str, cluster: dict[str, Any]) -> Ledger:
    book = Ledger.of(dispatch.exp_dir)
    try:
        book.write(
            ledger.INTENT,
            name,
            job=DISPATCHER,
            role=DISPATCHER,
            cluster=cluster,
            session=dispatch.spec.session,
            nonce=dispatch.spec.nonce,
            dispatcher=dispatch.id,
            is_dispatcher=True,
        )
    except OSError as error:
        raise JobError(
            f"The dispatcher {name} cannot be written down in {dispatch.exp_dir}: "
            f"{error.strerror}. It was not started. Make room there, or look at the experiment as "
            "the user who owns that folder."
        ) from error
    return book


def _plan_archive(dispatch: Dispatch) -> archives.Archive:
    data = dispatch.spec.to_json().encode()
    return archives.single_file(
        "The experiment's plan", DISPATCH, data, hashlib.sha256(data).hexdigest()
    )


def _secrets(dispatch: Dispatch, found: DispatchStatus) -> list[str]:
    """Names of the secrets of all jobs that may still be started."""
    return sorted(
        {
            name
            for job in dispatch.spec.jobs
            if not found.decision.statuses[job.name].state.is_terminal
            for name in job.secrets
        }
    )
