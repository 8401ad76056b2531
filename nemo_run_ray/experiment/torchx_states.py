"""The table from the states of a job to torchx's words, which NeMo-Run shows."""

from __future__ import annotations

from torchx.specs import AppState

from nemo_run_ray.remote.states import JobState, JobStatus, Reason

#: JobState -> torchx's word, which is what NeMo-Run shows. torchx has no word for LOST.
TO_TORCHX = {
    JobState.WAITING: AppState.UNSUBMITTED,
    JobState.PENDING: AppState.PENDING,
    JobState.RUNNING: AppState.RUNNING,
    JobState.SUCCEEDED: AppState.SUCCEEDED,
    JobState.FAILED: AppState.FAILED,
    JobState.CANCELLED: AppState.CANCELLED,
    JobState.LOST: AppState.FAILED,
    JobState.UNKNOWN: AppState.UNKNOWN,
}
#: Why a job waits that a dispatcher has.
_ON_THE_CLUSTER = {Reason.WAITS, Reason.TURN, Reason.RETRY, Reason.UNDISPATCHED}


def torchx_state(status: JobStatus) -> AppState:
    """What NeMo-Run shows: a job that waits on the cluster was submitted.

    torchx's UNSUBMITTED is 0, which NeMo-Run takes for no answer: it calls a group UNKNOWN then.
    """
    if status.state is JobState.WAITING and status.reason in _ON_THE_CLUSTER:
        return AppState.SUBMITTED
    return TO_TORCHX[status.state]
