"""A dispatch as the client knows it: its plan in the experiment's folder, and its dispatcher.

The folder holds all that a dispatcher needs to be started again, by whoever has it::

    <experiment>/ray_dispatches/<dispatcher's id>/
        dispatch.json  the jobs, see ``remote/spec.py``; written last, so that it means "complete"
        dispatcher.json    how the dispatcher is started
        _ray_pkg_….zip     the archives: Ray forgets what nobody uses for some minutes
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from nemo_run_ray.clusters import from_record
from nemo_run_ray.dashboard.jobs_api import JobsApi
from nemo_run_ray.errors import (
    ClusterError,
    JobError,
    NemoRunRayError,
    SubmissionError,
    Taken,
    Unanswered,
)
from nemo_run_ray.ids import job_id
from nemo_run_ray.jobs import archives, ledger
from nemo_run_ray.jobs.ledger import JobRecord, Ledger
from nemo_run_ray.jobs.submit_once import submit_once
from nemo_run_ray.planning.entrypoints import dispatcher_entrypoint
from nemo_run_ray.remote.attempts import (
    CANCELLED,
    DISPATCHER_KEY,
    NONCE_KEY,
    Attempt,
    attempt_id,
    attempt_of_row,
    attempts_of,
    claim_body,
    first_id,
)
from nemo_run_ray.remote.dispatch.decide import Decision, Do, decide
from nemo_run_ray.remote.dispatch.dispatcher import STOP_TRUST_S
from nemo_run_ray.remote.node.rundir import DISPATCH
from nemo_run_ray.remote.spec import DispatchSpec, OutsideSpec, from_json
from nemo_run_ray.remote.states import JobState, JobStatus

log = logging.getLogger(__name__)

#: Name of a dispatcher after its experiment's, and of the folder of dispatches.
DISPATCHER, FOLDER = "dispatcher", "ray_dispatches"
#: Seconds between two starts of a dispatcher by one process that finds it dead, and how many.
REVIVE_AGAIN_S, REVIVALS_MAX = 20.0, 20
_LOOK_AGAIN_S = 2.0
#: Seconds that a dispatcher may be about to start before another one is started.
PENDING_MAX_S = 60.0
#: Seconds beyond the grace period until a cancelled dispatch must have ended.
CANCEL_S = 60.0
_NOTHING = Attempt(JobStatus(JobState.UNKNOWN))


@dataclass(frozen=True)
class Snapshot:
    """One look at a dispatch.

    Attributes:
        decision: the status of every job.
        rows: Ray's rows, by submission id.
        dispatcher: attempts of the dispatcher, by number.
        lost: why the cluster does not have the dispatch any more; empty as long as it has.
    """

    decision: Decision
    rows: Mapping[str, dict[str, Any]]
    dispatcher: Mapping[int, Attempt]
    lost: str = ""

    @property
    def is_dispatched(self) -> bool:
        """Whether a dispatcher is on its way or at work.

        One that has been about to start for long may never do so: the head died at that moment. A
        second one beside it does no harm.
        """
        too_early = time.time() - PENDING_MAX_S
        return any(
            row.is_live and (row.status.state is not JobState.PENDING or row.posted_at > too_early)
            for row in self.dispatcher.values()
        )


class Dispatch:
    """One dispatch of an experiment; all users of a process share one by ``Dispatch.of``."""

    _shared: ClassVar[dict[tuple[Path, str], Dispatch]] = {}
    _shared_lock = threading.Lock()

    def __init__(self, exp_dir: Path, dispatcher_id: str) -> None:
        self.exp_dir = exp_dir
        self.id = dispatcher_id
        self.folder = exp_dir / FOLDER / dispatcher_id
        self._spec: DispatchSpec | None = None
        self._lock = threading.Lock()
        self._last: tuple[dict[str, dict[str, Any]], Snapshot] | None = None
        self._revived_at = -1e9
        self._revivals = 0

    @classmethod
    def of(cls, exp_dir: Path, dispatcher_id: str) -> Dispatch:
        with cls._shared_lock:
            key = (exp_dir, dispatcher_id)
            if key not in cls._shared:
                cls._shared[key] = cls(exp_dir, dispatcher_id)
            return cls._shared[key]

    @property
    def is_saved(self) -> bool:
        """Whether everything is there that a dispatcher needs."""
        return (self.folder / "dispatch.json").exists()

    @property
    def spec(self) -> DispatchSpec:
        """The plan.

        Raises:
            JobError: the experiment's folder does not have it.
        """
        if self._spec is None:
            try:
                found = from_json((self.folder / "dispatch.json").read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise JobError(
                    f"The plan of the chain {self.id} cannot be read from {self.folder}: {error}. "
                    "Copy the experiment's whole folder, with the version of nemo_run_ray that "
                    "submitted it."
                ) from error
            if not isinstance(found, DispatchSpec):
                raise JobError(f"{self.folder} holds no chain.")
            self._spec = found
        return self._spec

    def save(
        self, spec: DispatchSpec, travels: Mapping[str, archives.Archive], pythons: list[str]
    ) -> None:
        """Write the plan and all that travels into the experiment's folder.

        Args:
            spec: the jobs.
            travels: the archives that the jobs use, by URI.
            pythons: interpreters that the jobs name.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for archive in travels.values():
            if not (self.folder / archive.name).exists():
                _write(self.folder / archive.name, archive.pack())
        start = {"archives": [one.name for one in travels.values()], "pythons": pythons}
        _write(self.folder / "dispatcher.json", json.dumps(start).encode())
        _write(self.folder / "dispatch.json", spec.to_json().encode())
        self._spec = spec

    def cancel(self, api: JobsApi, grace_s: float) -> None:
        """Cancel every job of it, those that have not started among them.

        Raises:
            ClusterError: it did not end in time, or the cluster stopped answering.
        """
        began_at = time.monotonic()
        trouble = "jobs go on"
        while time.monotonic() < began_at + grace_s + CANCEL_S:
            try:
                self.claim(api, self.spec.cancel_id, self.spec.nonce)
                look = self.look(api, fresh=True)
                stops = [one for one in look.decision.actions if one.do is Do.STOP]
                held = all(look.rows[one.submission_id]["status"] == "PENDING" for one in stops)
                trusted = held and time.monotonic() - began_at >= STOP_TRUST_S
                if look.decision.is_over and (not stops or trusted):
                    return
                self._end(api, look.decision)
            except Unanswered as error:
                trouble = str(error)
            time.sleep(1.0)
        raise ClusterError(
            f"The chain {self.id} did not end within {grace_s + CANCEL_S:.0f} s of being "
            f"cancelled: {trouble}. Nothing more of it is started; cancel it again."
        )

    def _end(self, api: JobsApi, decision: Decision) -> None:
        """What a dispatcher would do to end jobs, since there may be none at work."""
        nonces = {job.name: job.nonce for job in self.spec.jobs}
        for action in decision.actions:
            if action.do is Do.CLAIM:
                self.claim(api, action.submission_id, nonces[action.job])
            elif action.do is Do.STOP:
                api.stop(action.submission_id)

    def claim(self, api: JobsApi, submission_id: str, nonce: str) -> None:
        """Take an id, so that nobody can start it any more, unless somebody has it."""
        with contextlib.suppress(Taken):  # an attempt that began now, or a claim: look again
            api.post(claim_body(submission_id, nonce, CANCELLED))

    # ------------------------------------------------------------------ the cluster

    def look(self, api: JobsApi, fresh: bool = False) -> Snapshot:
        """The status of every job now. Jobs of one look share one decision.

        Raises:
            ClusterError: the cluster cannot be asked.
        """
        rows = api.table(fresh)
        with self._lock:
            if self._last is None or self._last[0] is not rows:
                table = {name: attempt_of_row(row) for name, row in self._own(rows).items()}
                decision = decide(self.spec, table, time.time())
                own = attempts_of([self.id], table)[self.id]
                ours = {n: row for n, row in own.items() if row.nonce == self.spec.nonce}
                lost = "" if ours else self._why_lost(api)
                self._last = rows, Snapshot(decision, rows, ours, lost)
            return self._last[1]

    def start(self, api: JobsApi, cluster: dict[str, Any]) -> str:
        """Start a dispatcher, whether there was one before or not; its submission id.

        Raises:
            ConfigError: a secret of a job that has not started is not set.
            JobError: the experiment's folder is not whole, or cannot be written to.
            SubmissionError: Ray refuses it, or nobody can tell whether it arrived.
            ClusterError: the cluster cannot be reached.
        """
        look = self.look(api, fresh=True)
        name = attempt_id(self.id, max(look.dispatcher, default=0) + 1)
        start = self._upload(api)
        travels = [self._plan_archive()]
        hidden = self._secrets(look)
        if hidden:
            travels.append(archives.secrets_archive(hidden, f"{self.spec.nonce} {name}"))
        for archive in travels:
            api.put_package(archive.name, archive.pack())
        names = [*start["archives"], *(archive.name for archive in travels)]
        body = {
            "submission_id": name,
            "entrypoint": dispatcher_entrypoint(start["pythons"], name, self.spec.nonce),
            "runtime_env": {"py_modules": [f"gcs://{one}" for one in names], "env_vars": {}},
            "metadata": {NONCE_KEY: self.spec.nonce, "nemo_run_job": DISPATCHER},
        }
        book = self._write_intent(name, cluster)
        try:
            submit_once(api, body, lambda: [self.spec.nonce], time.monotonic, time.sleep)
        except NemoRunRayError as error:
            book.write(ledger.UNSETTLED, name, why=str(error))
            raise
        book.write(ledger.SUBMITTED, name)
        return name

    def _upload(self, api: JobsApi) -> dict[str, Any]:
        """Send the archives that Ray lacks; how the dispatcher is started."""
        try:
            start: dict[str, Any] = json.loads(
                (self.folder / "dispatcher.json").read_text(encoding="utf-8")
            )
            for name in start["archives"]:
                if not api.has_package(name):
                    api.put_package(name, (self.folder / name).read_bytes())
        except (OSError, ValueError) as error:
            raise JobError(
                f"The chain {self.id} cannot be started again from {self.folder}: {error}. Copy "
                "the experiment's whole folder."
            ) from error
        return start

    def _write_intent(self, name: str, cluster: dict[str, Any]) -> Ledger:
        book = Ledger.of(self.exp_dir)
        try:
            book.write(
                ledger.INTENT,
                name,
                job=DISPATCHER,
                role=DISPATCHER,
                cluster=cluster,
                session=self.spec.session,
                nonce=self.spec.nonce,
                dispatcher=self.id,
                is_dispatcher=True,
            )
        except OSError as error:
            raise JobError(
                f"The dispatcher {name} cannot be written down in {self.exp_dir}: "
                f"{error.strerror}. Look at the experiment as the user who owns that folder."
            ) from error
        return book

    def resume(self) -> str:
        """Start the dispatcher if it is dead and something is left to do; what was done, in words.

        Raises:
            ConfigError: a secret of a job that has not started is not set.
            SubmissionError: Ray refuses it.
            ClusterError: the cluster cannot be asked.
        """
        record = self._cluster_record()
        cluster = from_record(record)
        dashboard = cluster.find()
        if dashboard is None:
            return f"run the experiment again: {cluster.why_gone()}"
        api = JobsApi.of(dashboard)
        look = self.look(api, fresh=True)
        if look.lost:
            return f"lost: {look.lost}; run the experiment again"
        if look.decision.is_over:
            return "all is decided"
        if look.is_dispatched:
            return "its dispatcher is at work"
        return f"started again as {self.start(api, record)}"

    def _cluster_record(self) -> dict[str, Any]:
        records = Ledger.of(self.exp_dir).jobs().values()
        return next(one.cluster for one in records if one.dispatcher == self.id)

    def revive(self, api: JobsApi, cluster: dict[str, Any], look: Snapshot) -> None:
        """Start the dispatcher again if it is dead and there is something left for it to do."""
        if look.is_dispatched or look.decision.is_over:
            return
        with self._lock:
            too_soon = time.monotonic() - self._revived_at < REVIVE_AGAIN_S
            if too_soon or self._revivals >= REVIVALS_MAX:
                return
            self._revived_at, self._revivals = time.monotonic(), self._revivals + 1
        why = "never reached the cluster"
        if look.dispatcher:
            last = look.dispatcher[max(look.dispatcher)].status
            why = f"has ended before its jobs ({last.detail or last.state.value.lower()})"
        try:
            name = self.start(api, cluster)
        except NemoRunRayError as error:
            log.warning("The dispatcher %s %s, and cannot be started: %s", self.id, why, error)
            return
        log.warning("The dispatcher %s %s; it is started again as %s.", self.id, why, name)

    def _why_lost(self, api: JobsApi) -> str:
        """Why a table without a dispatcher of this dispatch is not its table; empty if it is."""
        session = api.version(patience_s=0.0)["session_name"]
        if session != self.spec.session:
            return (
                f"the Ray at {api.dashboard.url} is not the one that had it (then "
                f"{self.spec.session}, now {session})"
            )
        records = Ledger.of(self.exp_dir).jobs().values()
        if not any(
            one.is_dispatcher and one.dispatcher == self.id and one.last == ledger.SUBMITTED
            for one in records
        ):
            return ""
        time.sleep(_LOOK_AGAIN_S)  # a head that recovers may answer before it knows its jobs
        if any(attempts_of([self.id], dict.fromkeys(api.table(fresh=True), _NOTHING))[self.id]):
            return ""
        return f"the Ray at {api.dashboard.url} has no record of it any more"

    def _own(self, rows: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        wanted = {self.id, self.spec.cancel_id}
        for job in self.spec.jobs:
            wanted.add(job.id)
            wanted.update(name for one in job.outside for name in (one.id, one.dispatcher))
        return {
            name: row for name, row in rows.items() if name in wanted or first_id(name) in wanted
        }

    def _plan_archive(self) -> archives.Archive:
        data = self.spec.to_json().encode()
        return archives.single_file(
            "The experiment's plan", DISPATCH, data, hashlib.sha256(data).hexdigest()
        )

    def _secrets(self, look: Snapshot) -> list[str]:
        """Names of the secrets that a job needs which may still be started."""
        return sorted(
            {
                name
                for job in self.spec.jobs
                if not look.decision.statuses[job.name].state.is_terminal
                for name in job.secrets
            }
        )


def dispatcher_id(experiment_or_job: str) -> str:
    """Id of the dispatcher of an experiment, or of a job that is handed over by itself."""
    return job_id(experiment_or_job, DISPATCHER)


def outside_spec(handle: str, api: JobsApi, session: str) -> OutsideSpec:
    """What a dispatcher must know of a job of another experiment.

    Args:
        handle: of the job.
        api: of the cluster that the new job goes to.
        session: Ray's name of that cluster's life; a cluster may have several addresses.

    Raises:
        SubmissionError: nobody knows the job, or another cluster has it.
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


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_bytes(data)
    temporary.replace(path)


__all__ = ["Dispatch", "Snapshot", "dispatcher_id", "outside_spec"]
