"""Cancelling: claim what has not started, stop what runs, and ask again until all has ended."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from nemo_run_ray.dashboard.jobs import JobsApi
from nemo_run_ray.errors import ClusterError, JobError, Taken, Unanswered
from nemo_run_ray.experiment import history
from nemo_run_ray.experiment.dispatch import Dispatch
from nemo_run_ray.experiment.logs import OF_RAY
from nemo_run_ray.experiment.snapshot import Snapshot
from nemo_run_ray.experiment.store import CANCEL, store_of
from nemo_run_ray.remote.attempts import (
    CANCELLED,
    STOP_AGAIN_S,
    STOP_TRUST_S,
    attempt_id,
    claim_body,
)
from nemo_run_ray.remote.dispatch.decide import Do
from nemo_run_ray.remote.end_record import record_in
from nemo_run_ray.remote.node.output import MAY_BE_LEFT, NO_PROCESS_LEFT
from nemo_run_ray.remote.status import JobState, JobStatus, is_active, is_pending

if TYPE_CHECKING:
    from nemo_run_ray.experiment.job import RemoteJob

log = logging.getLogger(__name__)

#: Seconds beyond the grace period until a cancelled job must be terminal, and all jobs of a
#: dispatch, which end one after the other.
JOB_MARGIN_S, _DISPATCH_MARGIN_S = 40.0, 60.0
#: Seconds that a cluster may take for its first answer.
_AWAY_S = 20.0
_STEP_S = 0.2
#: Jobs that are cancelled at the same time: each that waits for room takes some seconds.
_AT_A_TIME = 8
_T = TypeVar("_T")


def poll_until(step: Callable[[], _T | None], limit_s: float, what: str) -> _T:
    """Take one step after the other until one returns something, and return that.

    Args:
        step: looks and asks; a cluster that does not answer is asked again in the next step.
        limit_s: seconds for all steps.
        what: the object, for the error: ``the job …``.

    Raises:
        ClusterError: no step returned anything in that time.
    """
    began = time.monotonic()
    trouble: Unanswered | None = None
    has_answered = False
    while time.monotonic() < began + (limit_s if has_answered else min(limit_s, _AWAY_S)):
        try:
            result = step()
            if result is not None:
                return result
            trouble, has_answered = None, True
        except Unanswered as error:
            trouble = error
        time.sleep(_STEP_S)
    if trouble is not None and not has_answered:
        raise ClusterError(
            f"It is not known whether {what} was told to end. {trouble} Cancel it "
            "again when the cluster answers."
        ) from trouble
    reason = "it is still running." if trouble is None else str(trouble)
    raise ClusterError(
        f"Within {limit_s:.0f} s of being cancelled {what} did not end: {reason} Cancel it again, "
        "or look at it in Ray's dashboard."
    )


class StopRequests:
    """The requests to stop jobs that one cancellation has sent."""

    def __init__(self, api: JobsApi) -> None:
        self._api = api
        self._began_at = time.monotonic()
        self._asked_at: dict[str, float] = {}

    def ask(self, submission_id: str) -> None:
        """Ask Ray to stop it, unless it was asked a moment ago."""
        now = time.monotonic()
        if now - self._asked_at.get(submission_id, -STOP_AGAIN_S) >= STOP_AGAIN_S:
            self._api.stop(submission_id)
            self._asked_at[submission_id] = now

    @property
    def have_settled(self) -> bool:
        """Whether what is still pending waits for room, and Ray holds it back from its start."""
        return max(self._asked_at.values(), default=0.0) - self._began_at >= STOP_TRUST_S


def cancel_job(job: RemoteJob) -> JobStatus:
    """Cancel one job, and return how it ended; see ``RemoteJob.cancel``."""
    status = job.answered()
    never_there = job.dispatch is None and status.state is JobState.WAITING
    if status.state.is_terminal or never_there:
        return status
    api = job.api()
    note_cancel(job)
    stops = StopRequests(api)

    def step() -> tuple[JobStatus, Snapshot] | None:
        snapshot = Snapshot(is_fresh=True)
        if job.dispatch is None:  # of one job alone the whole table need not be read
            snapshot.answer_rows(api, job.id, api.job(job.id))
        status, row = job.decided(api, snapshot)
        is_live = row is not None and is_active(row)
        is_held = row is not None and is_pending(row) and stops.have_settled
        if status.state.is_terminal and (is_held or not is_live):
            return status, snapshot
        if is_live:
            stops.ask(job.ran_as(status))
        if job.dispatch is not None and status.state in (JobState.WAITING, JobState.PENDING):
            claim(api, attempt_id(job.id, status.attempt + 1), job.record.nonces[-1])
        return None

    limit_s = job.record.grace_s + JOB_MARGIN_S
    page = api.dashboard.job_page(job.id)
    status, snapshot = poll_until(step, limit_s, f"the job {job.id} ({page})")
    history.record([(job, status)], snapshot)
    return status


def note_cancel(job: RemoteJob) -> None:
    """Write down that its end is asked for; a folder that cannot be written to stops no cancel."""
    job.record.cancelled = True
    try:
        store_of(job.record.exp_dir).ledger.write(CANCEL, job.id)
    except OSError as error:
        log.warning("That %s is cancelled is not kept in its folder: %s", job.id, error)


def claim(api: JobsApi, submission_id: str, nonce: str) -> None:
    """Take an id, so that no process can start it any more, unless it is taken already."""
    with contextlib.suppress(Taken):  # an attempt that began now, or a claim: look again
        api.post(claim_body(submission_id, nonce, CANCELLED))


def cancel_dispatch(dispatch: Dispatch, api: JobsApi) -> None:
    """Cancel every job of a dispatch, those that have not started among them, by one claim.

    Raises:
        ClusterError: it did not end in time, or the cluster stopped answering.
    """
    stops = StopRequests(api)
    nonces = {job.name: job.nonce for job in dispatch.spec.jobs}

    def step() -> bool | None:
        seen = dispatch.look(api, Snapshot(is_fresh=True))
        if dispatch.spec.cancel_id not in seen.rows:
            claim(api, dispatch.spec.cancel_id, dispatch.spec.nonce)
            return None
        # Do what a dispatcher would do to end jobs, since there may be none at work.
        to_stop = [action for action in seen.decision.actions if action.do is Do.STOP]
        held = all(is_pending(seen.rows[action.submission_id]) for action in to_stop)
        if seen.decision.is_over and (not to_stop or (held and stops.have_settled)):
            return True
        for action in seen.decision.actions:
            if action.do is Do.CLAIM:
                claim(api, action.submission_id, nonces[action.job])
        for action in to_stop:
            stops.ask(action.submission_id)
        return None

    records = store_of(dispatch.exp_dir).ledger.jobs().values()
    grace_s = max(record.grace_s for record in records if record.dispatcher == dispatch.id)
    poll_until(step, grace_s + _DISPATCH_MARGIN_S, f"the chain {dispatch.id}")


def cancel_all(jobs: Sequence[RemoteJob]) -> Iterator[str]:
    """Cancel jobs, some at the same time, and wait for their ends.

    Yields:
        What became of each, in words and in their order.

    Raises:
        ClusterError: a job did not end in time, or a cluster stopped answering; all others were
            cancelled too.
    """
    _cancel_whole_dispatches(jobs)
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        ends = [pool.submit(_cancel, job) for job in jobs]
        try:
            for end in ends:
                yield end.result()
        except KeyboardInterrupt:  # those that were told to end are waited for, others go on
            pool.shutdown(cancel_futures=True)
            raise


def _cancel(job: RemoteJob) -> str:
    status = job.status
    if status.state.is_terminal and status.state is not JobState.CANCELLED:
        return f"{job.name} is {status.state.value}: there is nothing to cancel"
    if not status.state.is_terminal:
        status = job.cancel()
    proof = ""
    if status.state is JobState.CANCELLED:
        with contextlib.suppress(JobError):  # its cluster has been stopped since, with all of it
            proof = f"; {job.leftovers(status)}"
    return f"{job.name} is {status.state.value.lower()}{proof}"


def _cancel_whole_dispatches(jobs: Sequence[RemoteJob]) -> None:
    """Cancel dispatches whose jobs are all given, with one claim each for what has not started."""
    by_dispatch: dict[Dispatch, list[RemoteJob]] = {}
    for job in jobs:
        if job.dispatch is not None:
            by_dispatch.setdefault(job.dispatch, []).append(job)
    for dispatch, given in by_dispatch.items():
        if len(dispatch.spec.jobs) != len(given) or len(given) == 1:
            continue
        snapshot = Snapshot()
        if not all(job.status_in(snapshot).state.is_terminal for job in given):
            cancel_dispatch(dispatch, given[0].api())
            snapshot = Snapshot(is_fresh=True)
            history.record([(job, job.status_in(snapshot)) for job in given], snapshot)


def leftovers(job: RemoteJob, status: JobStatus) -> str:
    """Proof that no process of a cancelled job is left, or where some may be, in words.

    The remote half ends every process of a job before its own last line, unless it was killed. That
    of a group or of an array says whether it could, on all their nodes.

    Raises:
        ClusterError: the cluster cannot be asked.
        JobError: the cluster is gone for good.
    """
    never = "it never had a process"
    if status.attempt > 1:
        never = f"its attempt {status.attempt} never had a process"
    if not status.node:
        return never
    ending = job.api().state.last_lines(status.node, job.ran_as(status), 3)
    record = record_in(ending, job.record.nonces)
    if record is not None and record.left_on == ():
        return f"{NO_PROCESS_LEFT} on its node"
    if record is not None and record.left_on:
        return f"{MAY_BE_LEFT} {', and '.join(record.left_on)}"
    if ending and all(OF_RAY.match(line) for line in ending):
        return never
    return f"its node {status.node[:12]} did not confirm that all its processes ended"
