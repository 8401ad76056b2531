"""What the events of a ledger say of each job."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nemo_run_ray.experiment.attempt_records import AttemptRecord, merged
from nemo_run_ray.remote.rows import fits
from nemo_run_ray.remote.states import JobStatus

log = logging.getLogger(__name__)

INTENT, SUBMITTED, UNSETTLED = "intent", "submitted", "unsettled"
CANCEL, TERMINAL, SEEN, UNKEPT = "cancel", "terminal", "seen", "unkept"
#: What an intent says of a job, and what it may leave out, with the types.
_GIVEN = {"job": str, "role": str, "cluster": dict, "session": str}
_OPTIONAL = {
    "dispatcher": str,
    "is_dispatcher": bool,
    "has_roles": bool,
    "is_array": bool,
    "place": int,
    "grace_s": float,
    "reservation": dict,
    "keep_logs_max_bytes": int,
    "log_copy": str,
}
_TIME = (None, float)
_EVENT = {"at": _TIME, "id": str, "event": str}
_STATUS = {"state": str, "reason": str, "detail": str, "node": str, "attempt": int, "tail": str}
_ATTEMPT = {
    **dict.fromkeys(("submission_id", "state"), str),
    **dict.fromkeys(("reason", "detail", "node"), (None, str)),
    **dict.fromkeys(("posted_at", "running_at", "ended_at", "seen_at"), _TIME),
    "exit_code": (None, int),
}
_SEEN = {**_EVENT, "attempts": (None, [_ATTEMPT])}
#: The shapes of events, by their kind.
_SHAPES = {
    INTENT: {
        **_EVENT,
        "nonce": str,
        **_GIVEN,
        **{name: (None, shape) for name, shape in _OPTIONAL.items()},
    },
    SEEN: _SEEN,
    TERMINAL: {**_SEEN, "status": _STATUS},
}


@dataclass
class JobRecord:
    """What the ledger knows of one job.

    Attributes:
        submission_id: its name on the cluster.
        job: its name in NeMo-Run.
        role: name of its role, for logs.
        cluster: ``Cluster.record()`` of its cluster.
        session: Ray's name of the cluster's life that got it.
        nonces: one of every submission, by whatever process; they tell this job from another one
            that took the same id.
        exp_dir: folder of its experiment.
        dispatcher: id of the dispatcher that hands it over; empty when the client did.
        is_dispatcher: it is an attempt of that dispatcher itself.
        has_roles: it is a group.
        is_array: it is an array.
        place: which job of its experiment it is, from 0, in the order in which they were added.
        grace_s: seconds from SIGTERM to SIGKILL when it is cancelled.
        reservation: the parts of its request to Ray that say what it asks for; empty when it asks
            for nothing, is a group, or was handed over by a version that did not write them down.
        keep_logs_max_bytes: bytes of its log that the folder keeps; ``None`` is all of it.
        log_copy: beginning of the path of a second file for its log; empty for none.
        intended_at: when it was last about to be submitted, in seconds since the epoch.
        last: the last event of its submission.
        cancelled: its end was asked for.
        is_log_given_up: its log could not be kept.
        terminal: what was last seen of it, once it had ended.
        attempts: what was seen of its attempts, by submission id.
    """

    submission_id: str
    job: str
    role: str
    cluster: dict[str, Any]
    session: str
    nonces: list[str]
    exp_dir: Path
    dispatcher: str = ""
    is_dispatcher: bool = False
    has_roles: bool = False
    is_array: bool = False
    place: int = 0
    grace_s: float = 10.0
    reservation: Mapping[str, Any] = field(default_factory=dict)
    keep_logs_max_bytes: int | None = 0
    log_copy: str = ""
    intended_at: float = 0.0
    last: str = INTENT
    cancelled: bool = False
    is_log_given_up: bool = False
    terminal: dict[str, Any] = field(default_factory=dict)
    attempts: dict[str, AttemptRecord] = field(default_factory=dict)

    def copy(self) -> JobRecord:
        """A copy that may be changed."""
        return replace(self, nonces=[*self.nonces], attempts={**self.attempts})


class JobRecords:
    """The records of one experiment, which every event changes.

    Attributes:
        by_id: the jobs by submission id, in the order of their first intents.
        arrived: ids of the dispatchers that have reached their cluster.
        began_at: seconds since the epoch, when the first event was written; ``None`` before it.
    """

    def __init__(self, exp_dir: Path) -> None:
        self._exp_dir = exp_dir
        self.by_id: dict[str, JobRecord] = {}
        self.arrived: set[str] = set()
        self.began_at: float | None = None

    def add(self, event: Mapping[str, Any]) -> None:
        """Take the next event into account.

        Raises:
            ValueError: it is no event; nothing is changed.
        """
        if not fits(event, _EVENT) or not fits(event, _SHAPES.get(event["event"], _EVENT)):
            raise ValueError("it has not the form of an event")
        found = [AttemptRecord.from_json(attempt) for attempt in event.get("attempts") or ()]
        if event["event"] == TERMINAL:
            JobStatus.from_json(event["status"])  # what every later look makes of it
        if self.began_at is None:
            self.began_at = event.get("at")
        submission_id, kind = event["id"], event["event"]
        record = self.by_id.get(submission_id)
        if kind == INTENT:
            self.by_id[submission_id] = self._intended(event, record)
        elif record is None:
            log.warning("The ledger in %s tells of %s too early.", self._exp_dir, submission_id)
        elif kind in (TERMINAL, SEEN):
            if kind == TERMINAL:
                record.terminal = event["status"]
            # Several processes look, and each knows what it has seen.
            record.attempts = merged(
                record.attempts, {attempt.submission_id: attempt for attempt in found}
            )
        elif kind == CANCEL:
            record.cancelled = True
        elif kind == UNKEPT:
            record.is_log_given_up = True
        else:
            record.last = kind
            if kind == SUBMITTED and record.is_dispatcher:
                self.arrived.add(record.dispatcher)

    def _intended(self, event: Mapping[str, Any], before: JobRecord | None) -> JobRecord:
        return JobRecord(
            submission_id=event["id"],
            exp_dir=self._exp_dir,
            intended_at=float(event.get("at") or 0.0),
            nonces=[*(before.nonces if before else ()), event["nonce"]],
            attempts=before.attempts if before else {},
            **{name: event[name] for name in _GIVEN},
            **{name: event[name] for name in _OPTIONAL if name in event},
        )
