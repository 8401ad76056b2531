"""Submissions of single jobs and of dispatches, each once, whatever answer is lost; their status.

A job that the client submits itself is a dispatch of one job without a dispatcher. The plan of a
dispatcher's jobs is in the experiment's folder, with all that a dispatcher needs to be started
again, by any client::

    <experiment>/ray_dispatches/<dispatcher's id>/
        dispatch.json  the jobs, see ``remote/spec.py``; written last, so that it means "complete"
        dispatcher.json    how the dispatcher is started
        _ray_pkg_….zip     the archives: Ray forgets those that are unused for some minutes
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from nemo_run_ray.clusters import ClusterArchive, from_record
from nemo_run_ray.dashboard.http import repeat
from nemo_run_ray.dashboard.jobs import JobsApi
from nemo_run_ray.errors import (
    ClusterError,
    Conflict,
    JobError,
    JobRefused,
    NemoRunRayError,
    SubmissionError,
    Taken,
    Unanswered,
)
from nemo_run_ray.experiment.store import (
    INTENT,
    SUBMITTED,
    TERMINAL,
    UNSETTLED,
    Event,
    JobRecord,
    records_of,
    store_of,
)
from nemo_run_ray.ids import DISPATCHER
from nemo_run_ray.remote.decide import Decision, Do, decide
from nemo_run_ray.remote.files import write_file
from nemo_run_ray.remote.spec import (
    NONCE_KEY,
    SUBMISSION_ID,
    DispatchedJobSpec,
    DispatchSpec,
    JobRows,
    Json,
    from_json,
    nonce_of,
    to_json,
)
from nemo_run_ray.remote.status import (
    CANCELLED,
    STOP_AGAIN_S,
    STOP_TRUST_S,
    Attempt,
    JobExit,
    JobState,
    JobStatus,
    Reason,
    attempt_id,
    attempt_of_row,
    attempts_of,
    claim_body,
    first_id,
    is_running,
)

if TYPE_CHECKING:
    from nemo_run_ray.experiment.archives import Archive

log = logging.getLogger(__name__)

_T = TypeVar("_T")
#: Seconds in which a head that recovers may answer before it knows its jobs.
_RECOVERS_S = 2.0
#: Seconds that a dispatcher may be about to start before another one is started.
PENDING_MAX_S = 60.0
#: Seconds that an allocation of Slurm may take to end when what is left needs more time.
_RENEWAL_S = 120.0
#: The reason where nobody knows a better one.
GONE = "the cluster that had it is gone"


@dataclass
class Snapshot:
    """The answers of clusters at one moment. Each is asked once, and an error is an answer too.

    The job tables of a fresh one are asked for now; otherwise they may be a moment old.
    """

    is_fresh: bool = False
    _answers: dict[tuple[Hashable, str], Any] = field(default_factory=dict)

    def rows(self, api: JobsApi) -> JobRows:
        """The job table."""
        return self.once(api, "rows", lambda: api.table(self.is_fresh))

    def once(self, about: Hashable, what: str, ask: Callable[[], _T]) -> _T:
        """The result of ``ask``, or the error that it raises, remembered for this snapshot."""
        key = (about, what)
        if key not in self._answers:
            try:
                self._answers[key] = ask()
            except NemoRunRayError as error:
                self._answers[key] = error
        answer: _T = self._answers[key]
        if isinstance(answer, NemoRunRayError):
            raise answer
        return answer


@dataclass(frozen=True)
class DispatchStatus:
    """The state of a dispatch in one snapshot."""

    decision: Decision
    rows: JobRows
    #: Attempts of every job by number, by the id of the first one.
    attempts: Mapping[str, Mapping[int, Attempt]]
    #: By number, the attempts under the dispatch's own id: of its dispatcher, or of its direct job.
    own_attempts: Mapping[int, Attempt]
    #: Reason for which the cluster has it no more; empty as long as it has.
    lost: str = ""

    @property
    def is_dispatched(self) -> bool:
        """Whether a dispatcher is on its way or at work.

        One that had no time for the remaining jobs is on its way in the next allocation, for a
        while. One that has been about to start for long may never do so: the head died at that
        moment. A second one beside it does no harm.
        """
        now = time.time()
        last = self.own_attempts.get(max(self.own_attempts, default=0))
        if last and last.exit_code == JobExit.OUT_OF_TIME and last.ended_at > now - _RENEWAL_S:
            return True
        return any(
            row.is_live
            and (row.status.state is not JobState.PENDING or row.posted_at > now - PENDING_MAX_S)
            for row in self.own_attempts.values()
        )

    @property
    def is_stuck(self) -> bool:
        """Whether something is left to do on the cluster, and no dispatcher there does it."""
        return not (self.lost or self.decision.is_over or self.is_dispatched)


class Dispatch:
    """One dispatch of an experiment: jobs that are submitted together, or one direct job.

    A dispatch has its dispatcher's id. A direct job is one that the client submits itself, without
    a dispatcher: then the dispatch has that job's id and is made from its record. All users of a
    process share the dispatch of a dispatcher by ``Dispatch.of``.
    """

    def __init__(self, exp_dir: Path, name: str, record: JobRecord | None = None):
        self.exp_dir = exp_dir
        self.id = name
        self.folder = exp_dir / "ray_dispatches" / name
        self._lock = threading.Lock()
        self._last: DispatchStatus | None = None
        #: When this process may start its dispatcher again, by the monotonic clock, and how often
        #: it has done so.
        self.revive_at, self.revivals = 0.0, 0
        #: The nonces of all submissions of a direct job: several processes may have submitted it.
        self._nonces: frozenset[str] = frozenset()
        if record:
            nonce = record.nonces[-1]
            jobs = (DispatchedJobSpec(record.job, name, nonce, {}),)
            self.spec = DispatchSpec(name, nonce, jobs, record.session)
            self._nonces = frozenset(record.nonces)

    @classmethod
    def of(cls, exp_dir: Path, dispatcher_id: str) -> Dispatch:
        """The one that all threads of this process share."""
        fresh = cls(exp_dir, dispatcher_id)
        found: Dispatch = store_of(exp_dir).dispatches.setdefault(dispatcher_id, fresh)
        return found

    @classmethod
    def of_job(cls, record: JobRecord) -> Dispatch:
        """The dispatch that a job belongs to."""
        if record.dispatcher and not record.is_dispatcher:
            return cls.of(record.exp_dir, record.dispatcher)
        return cls(record.exp_dir, first_id(record.submission_id), record)

    @functools.cached_property
    def spec(self) -> DispatchSpec:
        """The plan."""
        try:
            text = (self.folder / "dispatch.json").read_text(encoding="utf-8")
            return from_json(text)  # type: ignore[return-value]
        except (OSError, ValueError) as error:
            raise JobError(
                f"The plan of the chain {self.id} cannot be read from {self.folder}: {error}. "
                "Copy the experiment's whole folder, with the version of nemo_run_ray that "
                "submitted it."
            ) from error

    @functools.cached_property
    def after(self) -> Mapping[str, tuple[str, ...]]:
        """By the name of every job, the names of those that it depends on."""
        return {job.name: job.after for job in self.spec.jobs}

    def save(
        self,
        spec: DispatchSpec,
        uploads: Iterable[Archive],
        pythons: list[str],
        places: Mapping[str, Sequence[str]],
    ) -> None:
        """Write the plan and all archives into the experiment's folder."""
        from nemo_run_ray.experiment.archives import Archive, Entry  # few clients need them
        from nemo_run_ray.remote.node.rundir import DISPATCH

        self.folder.mkdir(parents=True, exist_ok=True)
        plan = to_json(spec).encode()
        digest = hashlib.sha256(plan).hexdigest()
        uploads = [*uploads, Archive("The experiment's plan", [Entry(DISPATCH, plan)], digest)]
        for archive in uploads:
            if not (self.folder / archive.name).exists():
                write_file(self.folder / archive.name, archive.pack())
        names = [archive.name for archive in uploads]
        start = {"archives": names, "pythons": pythons, "secret_places": places}
        write_file(self.folder / "dispatcher.json", json.dumps(start))
        write_file(self.folder / "dispatch.json", plan)
        self.spec = spec

    def look(self, api: JobsApi, snapshot: Snapshot) -> DispatchStatus:
        """The status of every job. Jobs of one table share one decision."""
        return snapshot.once(self, api.dashboard.url, lambda: self._look(api, snapshot))

    def decided(self, rows: JobRows) -> DispatchStatus:
        """The status of every job by a job table."""
        with self._lock:  # for many threads that look at the same table; nothing in here waits
            if self._last and self._last.rows is rows:
                return self._last
            wanted, nonce = self.spec.ids, self.spec.nonce
            table = {}
            for name, row in rows.items():
                if name in wanted or first_id(name) in wanted:
                    attempt = attempt_of_row(row)
                    # ``decide`` knows one nonce; the rows of the other submissions of the same
                    # direct job get it.
                    if attempt.nonce in self._nonces:
                        attempt = replace(attempt, nonce=nonce)
                    table[name] = attempt
            attempts = attempts_of([self.id, *(job.id for job in self.spec.jobs)], table)
            own = {n: attempt for n, attempt in attempts[self.id].items() if attempt.nonce == nonce}
            decision = decide(self.spec, table, time.time())
            self._last = DispatchStatus(decision, rows, attempts, own)
            return self._last

    def _look(self, api: JobsApi, snapshot: Snapshot) -> DispatchStatus:
        found = self.decided(snapshot.rows(api))
        if found.own_attempts:
            return found
        url, session = api.dashboard.url, self.spec.session
        now = snapshot.once(api, "session", lambda: api.version(0.0)["session_name"])
        if now != session:
            why = f"the Ray at {url} is not the one that had it (then {session}, now {now})"
            return replace(found, lost=why)
        if not any(
            first_id(record.submission_id) == self.id and record.last == SUBMITTED
            for record in records_of(self.exp_dir)
        ):
            return found  # only a job that Ray has confirmed can be lost

        def ask_again() -> JobRows:  # a head that recovers may not know its jobs yet
            time.sleep(_RECOVERS_S)
            return api.table(fresh=True)

        found = self.decided(snapshot.once(api, "again", ask_again))
        if any(first_id(name) == self.id for name in found.rows):
            return found
        return replace(found, lost=f"the Ray at {url} has no record of it any more")


def dispatches_of(exp_dir: Path) -> list[Dispatch]:
    """The dispatches of an experiment."""
    records = records_of(exp_dir)
    names = dict.fromkeys(record.dispatcher for record in records if record.dispatcher)
    return [Dispatch.of(exp_dir, name) for name in names]


#: Seconds to find out what became of a request whose answer was lost; a dashboard's restart is
#: less.
OUTCOME_S = 180.0


def submit_once(exp_dir: Path, intent: Event, api: JobsApi, body: Json) -> None:
    """Write a job's intent down, post it so that exactly one comes of it, and note the outcome.

    After an error the job is looked for before anything else is decided. A repeated request cannot
    start a second one: Ray gives a submission id away once.
    """
    ledger, url, name = store_of(exp_dir).ledger, api.dashboard.url, str(body["submission_id"])
    ledger.write_all([intent])

    def ask() -> None:
        try:
            api.post(body)
            return
        except Taken:
            cause = Unanswered("Its id is taken.")
        except Unanswered as error:
            cause = error
        row = api.job(name)
        if not row:
            raise cause
        if nonce_of(row) not in ledger.jobs()[name].nonces:  # another process may have added one
            raise Conflict(
                f"The id {name} is taken at {url} by a job that another run submitted (its "
                f"entrypoint: {str(row.get('entrypoint'))[:80]!r}). Nothing was started. Give the "
                "experiment another id or title."
            )

    try:
        repeat(ask, OUTCOME_S, f"{url} to take the job {name}")
    except JobRefused as error:
        status = JobStatus(JobState.FAILED, Reason.REFUSED, str(error))
        ledger.note(TERMINAL, name, status=status)
        raise
    except NemoRunRayError as error:
        ledger.note(UNSETTLED, name, why=str(error))
        if not isinstance(error, Unanswered):
            raise
        raise SubmissionError(
            f"It is not known whether the job {name} has started: {error} It is noted; "
            "`nemo-run-ray status` finds it when the cluster answers, and `nemo-run-ray resume` "
            "submits it if it never arrived."
        ) from error
    ledger.note(SUBMITTED, name)


def start_dispatcher(dispatch: Dispatch, api: JobsApi, cluster: Json) -> str:
    """Start a dispatcher, whether there was one before or not; its submission id."""
    # Few clients start a dispatcher.
    from nemo_run_ray.experiment.archives import secrets_archive
    from nemo_run_ray.plan.job import entrypoint

    found = dispatch.look(api, Snapshot(is_fresh=True))
    spec, folder, nonce = dispatch.spec, dispatch.folder, dispatch.spec.nonce
    name = attempt_id(dispatch.id, max(found.own_attempts, default=0) + 1)
    try:
        start: Json = json.loads((folder / "dispatcher.json").read_text(encoding="utf-8"))
        packages = list(start["archives"])
        for saved in packages:
            if not api.has_package(saved):
                api.put_package(saved, (folder / saved).read_bytes())
    except (OSError, ValueError) as error:
        raise JobError(
            f"The chain {dispatch.id} cannot be started again from {folder}: {error}. Copy the "
            "experiment's whole folder."
        ) from error
    waiting = [job for job in spec.jobs if not found.decision.statuses[job.name].state.is_terminal]
    hidden = sorted({secret for job in waiting for secret in job.secrets})
    if hidden:
        archive = secrets_archive(hidden, f"{nonce} {name}", start["secret_places"])
        api.put_package(archive.name, archive.pack())
        packages.append(archive.name)

    def body(submission_id: str, argument: str) -> Json:
        return {
            "submission_id": submission_id,
            # Killed by a signal, it is started again. The jobs' Pythons may not be on the head.
            "entrypoint": entrypoint(
                None, ["dispatch", argument, nonce], start["pythons"], again="-gt 128"
            ),
            "runtime_env": {"py_modules": [f"gcs://{one}" for one in packages], "env_vars": {}},
            "metadata": {NONCE_KEY: nonce, "nemo_run_job": DISPATCHER},
        }

    if not hidden:  # the cluster itself can continue with it in another allocation
        ids = sorted(spec.ids - {dispatch.id, spec.cancel_id, ""})
        from_record(cluster).keep_dispatch(
            dispatch.id,
            ids,
            body(dispatch.id, SUBMISSION_ID),
            lambda: {saved: (folder / saved).read_bytes() for saved in packages},
        )
    values = {
        "job": DISPATCHER,
        "dispatcher": dispatch.id,
        "is_dispatcher": True,
        "cluster": cluster,
        "session": spec.session,
        "nonce": nonce,
    }
    submit_once(dispatch.exp_dir, (INTENT, name, values), api, body(name, name))
    return name


def resume(dispatch: Dispatch) -> str:
    """Start the dispatcher if it is dead and something is left to do, and say what was done."""
    records = [job for job in records_of(dispatch.exp_dir) if job.dispatcher == dispatch.id]
    if all(job.terminal for job in records if not job.is_dispatcher):
        return "all is decided"  # its cluster may be gone since
    cluster = from_record(records[0].cluster)
    dashboard = cluster.find()
    if not dashboard:
        archive = cluster.archive(dispatch.spec.session) or ClusterArchive()
        if archive.continues:
            return f"it continues by itself: {archive.reason}"
        return f"run the experiment again: {archive.reason or GONE}"
    api = JobsApi.of(dashboard)
    found = dispatch.look(api, Snapshot(is_fresh=True))
    if found.is_stuck:
        return f"started again as {start_dispatcher(dispatch, api, records[0].cluster)}"
    if found.lost:
        return f"lost: {found.lost}; run the experiment again"
    return "all is decided" if found.decision.is_over else "its dispatcher is at work"


# ---------------------------------------------------------------- while a client waits

#: Seconds between two starts of a dispatcher by one process that finds it dead.
_REVIVE_AGAIN_S = 20.0
#: Starts by one process of a dispatcher that always ends at once.
_REVIVALS_MAX = 20


def tend(exp_dir: Path) -> None:
    """Look after the jobs of an experiment that have not ended, where their cluster answers.

    A dispatcher that has died is started again, what a cancelled job has left is stopped, and Ray's
    job manager is woken when a head has died. Only jobs of that experiment are touched.
    """
    with suppress(OSError):
        records = [one for one in records_of(exp_dir) if not one.terminal]
        for cluster in {repr(one.cluster): one.cluster for one in records}.values():
            with suppress(NemoRunRayError):
                dashboard = from_record(cluster).find()
                if dashboard:
                    here = [one for one in records if one.cluster == cluster]
                    _tend_on(JobsApi.of(dashboard), here)


def tend_until(exp_dir: Path, is_over: threading.Event) -> None:
    """Look after the jobs of an experiment again and again."""
    while not is_over.wait(2.0):
        tend(exp_dir)


def _tend_on(api: JobsApi, records: list[JobRecord]) -> None:
    snapshot = Snapshot()
    rows = snapshot.rows(api)
    nonces = {first_id(record.submission_id): record.nonces for record in records}
    own = {
        name: row for name, row in rows.items() if nonce_of(row) in nonces.get(first_id(name), ())
    }
    if api.wake_for(own):
        return  # the next look sees what has become of them
    for record in records:
        if not record.dispatcher:
            # When the head restarts, Ray forgets a stop that was requested before the job began.
            for action in Dispatch.of_job(record).decided(rows).decision.actions:
                if action.do is Do.STOP and is_running(own[action.submission_id]):
                    api.stop(action.submission_id)
    dispatches = {record.dispatcher: record for record in records if record.dispatcher}
    for name, record in dispatches.items():
        dispatch = Dispatch.of(record.exp_dir, name)
        found = dispatch.look(api, snapshot)
        # Its first dispatcher may be on its way: the client sends the archives before.
        is_young = time.time() - record.intended_at < 120.0 and not found.own_attempts
        if is_young or not found.is_stuck:
            continue
        with store_of(record.exp_dir).lock:
            if monotonic() < dispatch.revive_at or dispatch.revivals >= _REVIVALS_MAX:
                continue
            dispatch.revive_at = monotonic() + _REVIVE_AGAIN_S
        try:
            if not dispatch.look(api, Snapshot(is_fresh=True)).is_stuck:
                continue  # another client was faster
            outcome = f"it is started again as {start_dispatcher(dispatch, api, record.cluster)}"
            dispatch.revivals += 1
        except (NemoRunRayError, OSError) as error:
            outcome = f"it cannot be started: {error}"
        log.warning("The dispatcher %s was not at work: %s", name, outcome)


# ---------------------------------------------------------------- cancel

#: Seconds that a cluster may take for its first answer.
_AWAY_S = 20.0


def poll_until(step: Callable[[], _T | None], limit_s: float, what: str) -> _T:
    """Repeat a step until it returns something that is true, and return that."""
    began = monotonic()
    trouble: Unanswered | None = None
    has_answered = False
    while monotonic() < began + (limit_s if has_answered else min(limit_s, _AWAY_S)):
        try:
            result = step()
            if result:
                return result
            trouble, has_answered = None, True
        except Unanswered as error:
            trouble = error
        time.sleep(0.2)
    if not has_answered:
        raise ClusterError(
            f"It is not known whether {what} was told to end. {trouble} Cancel it again when the "
            "cluster answers."
        ) from trouble
    raise ClusterError(
        f"Within {limit_s:.0f} s of being cancelled {what} did not end: "
        f"{trouble or 'it is still running.'} Cancel it again, or look at it in Ray's dashboard."
    ) from trouble


class StopRequests:
    """The requests to stop jobs that one cancellation has sent."""

    def __init__(self) -> None:
        self._began_at = monotonic()
        self._asked_at: dict[str, float] = {}

    def ask(self, api: JobsApi, submission_id: str) -> None:
        """Ask Ray to stop it, unless it was asked a moment ago."""
        now = monotonic()
        if now - self._asked_at.get(submission_id, -STOP_AGAIN_S) >= STOP_AGAIN_S:
            api.stop(submission_id)
            self._asked_at[submission_id] = now

    @property
    def end_pending(self) -> bool:
        """Whether a pending attempt counts as stopped.

        It does when a stop was sent ``STOP_TRUST_S`` after the cancellation began: Ray is trusted
        then to end the attempt as soon as it starts.
        """
        return max(self._asked_at.values(), default=0.0) - self._began_at >= STOP_TRUST_S


def claim(api: JobsApi, submission_id: str, nonce: str) -> None:
    """Submit a job that does nothing under an id, so that nothing else can start under it.

    An id that is taken is left as it is. A pending attempt before a claim counts as given up.
    """
    with suppress(Taken):  # an attempt that began now, or a claim: look again
        api.post(claim_body(submission_id, nonce, CANCELLED))
