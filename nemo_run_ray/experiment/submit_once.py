"""Handing one job over, once."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from nemo_run_ray.dashboard.http import waiting_for
from nemo_run_ray.dashboard.jobs import JobsApi
from nemo_run_ray.errors import ClusterError, Conflict, SubmissionError, Taken, Unanswered
from nemo_run_ray.remote.attempts import nonce_of
from nemo_run_ray.remote.rows import JobRow

#: Seconds to find out what became of a request whose answer was lost; a dashboard's restart is
#: less.
OUTCOME_S = 180.0


def submit_once(
    api: JobsApi,
    body: dict[str, Any],
    nonces: Callable[[], Collection[str]],
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> None:
    """Post a job so that exactly one comes of it, also when answers are lost.

    After an error the job table is asked before anything else is done. A repeated request cannot
    start a second job: Ray gives a submission id away once.

    Args:
        api: where.
        body: of the request; its intent is in the ledger.
        nonces: gives those of all submissions of this id by the experiment's processes.
        clock: seconds that only grow; ``sleep`` waits so many of them.

    Raises:
        SubmissionError: Ray refuses the request, or ``OUTCOME_S`` passed without an outcome.
        Conflict: the id belongs to a job of another run.
    """
    submission_id = str(body["submission_id"])
    deadline = clock() + OUTCOME_S
    lost: ClusterError | None = None
    what = f"{api.dashboard.url} to take the job {submission_id}"
    with waiting_for(what, lambda: str(lost or "")):
        while True:
            try:
                api.post(body)
                return
            except Taken:
                lost, after_s = None, 0.0
            except Unanswered as error:
                lost, after_s = error, error.after_s
            row = _outcome(api, submission_id, max(0.0, deadline - clock()))
            if row is not None:
                _must_be_ours(api, row, nonces())
                return
            if clock() + after_s >= deadline:
                raise _not_taken(api, submission_id, lost)
            sleep(max(0.5, after_s))


def _outcome(api: JobsApi, submission_id: str, patience_s: float) -> JobRow | None:
    """The job's row now; ``None`` when the cluster has no such job."""
    try:
        return api.job(submission_id, patience_s)
    except Unanswered as error:
        raise SubmissionError(
            f"It is not known whether the job {submission_id} has started: {error} It is noted; "
            "`nemo-run-ray status` finds it when the cluster answers, and `nemo-run-ray resume` "
            "hands it over if it never arrived."
        ) from error


def _not_taken(api: JobsApi, submission_id: str, lost: ClusterError | None) -> SubmissionError:
    why = "its id is taken" if lost is None else str(lost).rstrip(".")
    return SubmissionError(
        f"{api.dashboard.url} has not taken the job {submission_id} in {OUTCOME_S:.0f} s: {why}. "
        "It has not started; as long as this Ray lives, `nemo-run-ray resume` hands it over later."
    )


def _must_be_ours(api: JobsApi, row: JobRow, nonces: Collection[str]) -> None:
    if nonce_of(row) in nonces:
        return
    raise Conflict(
        f"The id {row.get('submission_id')} is taken at {api.dashboard.url} by a job that another "
        f"run submitted (its entrypoint: {str(row.get('entrypoint'))[:80]!r}). Nothing was "
        "started. Give the experiment another id or title."
    )
