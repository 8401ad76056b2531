"""A dispatch as the client knows it: its plan in the experiment's folder, and one look at it.

The folder holds all that a dispatcher needs to be started again, by any client::

    <experiment>/ray_dispatches/<dispatcher's id>/
        dispatch.json  the jobs, see ``remote/spec.py``; written last, so that it means "complete"
        dispatcher.json    how the dispatcher is started
        _ray_pkg_….zip     the archives: Ray forgets those that are unused for some minutes
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from nemo_run_ray.dashboard.jobs import JobsApi
from nemo_run_ray.errors import JobError, Taken
from nemo_run_ray.experiment.archives import Archive
from nemo_run_ray.experiment.cancel_loop import DISPATCH_MARGIN_S, Stops, insist
from nemo_run_ray.experiment.ledger import Ledger
from nemo_run_ray.experiment.snapshot import Snapshot
from nemo_run_ray.remote.attempts import (
    CANCELLED,
    OUT_OF_TIME,
    Attempt,
    attempt_of_row,
    attempts_of,
    claim_body,
    first_id,
)
from nemo_run_ray.remote.dispatch.decide import Decision, Do, decide
from nemo_run_ray.remote.files import write_file
from nemo_run_ray.remote.rows import JobRows
from nemo_run_ray.remote.spec import DispatchSpec, from_json
from nemo_run_ray.remote.states import JobState, JobStatus, is_pending

#: Name of the folder of dispatches.
FOLDER = "ray_dispatches"
#: Seconds that a dispatcher may be about to start before another one is started.
PENDING_MAX_S = 60.0
#: Seconds that an allocation of Slurm may take to end when what is left needs more time.
_RENEWAL_S = 120.0


@dataclass(frozen=True)
class DispatchStatus:
    """What one snapshot says of a dispatch.

    Attributes:
        decision: the status of every job.
        rows: Ray's rows, by submission id.
        dispatcher: attempts of the dispatcher, by number.
        lost: why the cluster does not have the dispatch any more; empty as long as it has.
    """

    decision: Decision
    rows: JobRows
    dispatcher: Mapping[int, Attempt]
    lost: str = ""

    @property
    def is_dispatched(self) -> bool:
        """Whether a dispatcher is on its way or at work.

        One that had no time for what is left is on its way in the next allocation, for a while.
        A dispatcher that has been about to start for long may never do so: the head died at that
        moment. A second one beside it does no harm.
        """
        too_early = time.time() - PENDING_MAX_S
        last = self.dispatcher[max(self.dispatcher)] if self.dispatcher else None
        if last and last.exit_code == OUT_OF_TIME and last.ended_at > time.time() - _RENEWAL_S:
            return True
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
        self._last: DispatchStatus | None = None

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

    @functools.cached_property
    def after(self) -> Mapping[str, tuple[str, ...]]:
        """By the name of every job, the names of those that it depends on."""
        return {job.name: job.after for job in self.spec.jobs}

    def save(
        self,
        spec: DispatchSpec,
        uploads: Mapping[str, Archive],
        pythons: list[str],
        places: Mapping[str, Sequence[str]],
    ) -> None:
        """Write the plan and all archives into the experiment's folder.

        Args:
            spec: the jobs.
            uploads: the archives that the jobs use, by URI.
            pythons: interpreters that the jobs name.
            places: where secrets come from, which a later start of the dispatcher reads again.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for archive in uploads.values():
            if not (self.folder / archive.name).exists():
                write_file(self.folder / archive.name, archive.pack())
        start = {
            "archives": [archive.name for archive in uploads.values()],
            "pythons": pythons,
            "secret_places": places,
        }
        write_file(self.folder / "dispatcher.json", json.dumps(start))
        write_file(self.folder / "dispatch.json", spec.to_json())
        self._spec = spec

    def look(self, api: JobsApi, snapshot: Snapshot) -> DispatchStatus:
        """The status of every job. Jobs of one table share one decision.

        Raises:
            ClusterError: the cluster cannot be asked.
        """
        return snapshot.once(self, api.dashboard.url, lambda: self._seen(api, snapshot))

    def statuses_left(self, rows: JobRows) -> Mapping[str, JobStatus]:
        """The status of every job by the job table that a cluster has left at its end."""
        return self._decided(rows).decision.statuses

    def cancel(self, api: JobsApi) -> None:
        """Cancel every job of it, those that have not started among them.

        Raises:
            ClusterError: it did not end in time, or the cluster stopped answering.
        """
        stops = Stops(api)

        def turn() -> bool | None:
            found = self.look(api, Snapshot(is_fresh=True))
            if self.spec.cancel_id not in found.rows:
                self.claim(api, self.spec.cancel_id, self.spec.nonce)
                return None
            wanted = [action for action in found.decision.actions if action.do is Do.STOP]
            held = all(is_pending(found.rows[action.submission_id]) for action in wanted)
            if found.decision.is_over and (not wanted or (held and stops.are_trusted)):
                return True
            self._end(api, found.decision, stops)
            return None

        records = Ledger.of(self.exp_dir).jobs().values()
        grace_s = max(record.grace_s for record in records if record.dispatcher == self.id)
        insist(turn, grace_s + DISPATCH_MARGIN_S, f"the chain {self.id}")

    def claim(self, api: JobsApi, submission_id: str, nonce: str) -> None:
        """Take an id, so that no process can start it any more, unless it is taken already."""
        with contextlib.suppress(Taken):  # an attempt that began now, or a claim: look again
            api.post(claim_body(submission_id, nonce, CANCELLED))

    def _end(self, api: JobsApi, decision: Decision, stops: Stops) -> None:
        """Do what a dispatcher would do to end jobs, since there may be none at work."""
        nonces = {job.name: job.nonce for job in self.spec.jobs}
        for action in decision.actions:
            if action.do is Do.CLAIM:
                self.claim(api, action.submission_id, nonces[action.job])
            elif action.do is Do.STOP:
                stops.ask(action.submission_id)

    def _seen(self, api: JobsApi, snapshot: Snapshot) -> DispatchStatus:
        found = self._decided(snapshot.rows(api))
        if found.dispatcher:
            return found
        was_there = Ledger.of(self.exp_dir).has_arrived(self.id)
        why = snapshot.why_lost(api, self.spec.session, was_there, self._is_in)
        if why or not was_there:
            return replace(found, lost=why)
        return self._decided(snapshot.rows_again(api))  # the head has recovered since

    def _decided(self, rows: JobRows) -> DispatchStatus:
        with self._lock:  # for many threads that look at the same table; nothing in here waits
            if self._last is None or self._last.rows is not rows:
                self._last = self._decide(rows)
            return self._last

    def _decide(self, rows: JobRows) -> DispatchStatus:
        table = {name: attempt_of_row(row) for name, row in self._own(rows).items()}
        decision = decide(self.spec, table, time.time())
        own = attempts_of([self.id], table)[self.id]
        attempts = {n: row for n, row in own.items() if row.nonce == self.spec.nonce}
        return DispatchStatus(decision, rows, attempts)

    def _is_in(self, rows: JobRows) -> bool:
        return any(first_id(name) == self.id for name in rows)

    def _own(self, rows: JobRows) -> JobRows:
        wanted = {self.id, self.spec.cancel_id}
        for job in self.spec.jobs:
            wanted.add(job.id)
            wanted.update(
                name for upstream in job.outside for name in (upstream.id, upstream.dispatcher)
            )
        return {
            name: row for name, row in rows.items() if name in wanted or first_id(name) in wanted
        }


def dispatches_of(exp_dir: Path) -> list[Dispatch]:
    """The dispatches of an experiment, saved ones only."""
    records = Ledger.of(exp_dir).jobs().values()
    found = dict.fromkeys(record.dispatcher for record in records if record.dispatcher)
    return [
        dispatch for dispatch in (Dispatch.of(exp_dir, name) for name in found) if dispatch.is_saved
    ]
