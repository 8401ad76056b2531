"""What an experiment asked of clusters, one line per event, in the experiment's folder.

It lets another process find the cluster and the ids; the truth about a job's state is the
cluster's. A line is written, flushed and synced before the request that it announces.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock
from nemo_run.config import get_nemorun_home

from nemo_run_ray.errors import JobError
from nemo_run_ray.executor import LEDGER
from nemo_run_ray.ids import ID_MAX, safe_id
from nemo_run_ray.jobs.attempt_records import AttemptRecord, Attempts, merged

log = logging.getLogger(__name__)

INTENT, SUBMITTED, UNSETTLED = "intent", "submitted", "unsettled"
CANCEL, TERMINAL, SEEN = "cancel", "terminal", "seen"


@dataclass
class JobRecord:
    """What the ledger knows of one job.

    Attributes:
        submission_id: its name on the cluster.
        job: its name in NeMo-Run.
        role: name of its role, for logs.
        cluster: ``Cluster.record()`` of its cluster.
        session: Ray's name of the cluster's life that got it.
        nonces: one of every submission of ours, by whatever process; they tell our job from another
            one that took the same id.
        exp_dir: folder of its experiment.
        dispatcher: id of the dispatcher that hands it over; empty when the client did.
        is_dispatcher: it is an attempt of that dispatcher itself.
        has_roles: it is a group.
        last: the last event of its submission.
        cancelled: somebody asked for its end.
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
    last: str = INTENT
    cancelled: bool = False
    terminal: dict[str, Any] = field(default_factory=dict)
    attempts: dict[str, AttemptRecord] = field(default_factory=dict)


class Ledger:
    """One experiment's ledger. Any number of processes may write."""

    def __init__(self, exp_dir: Path) -> None:
        self.exp_dir = exp_dir
        self.path = exp_dir / LEDGER

    def write(self, event: str, submission_id: str, **values: Any) -> None:
        """Append one event; on return it is on the disk."""
        self.write_all([(event, submission_id, values)])

    def write_all(self, events: Sequence[tuple[str, str, dict[str, Any]]]) -> None:
        """Append several events: kind, submission id and values of each."""
        at = round(time.time(), 3)
        lines = "".join(
            json.dumps({"at": at, "event": event, "id": name, **values}, sort_keys=True) + "\n"
            for event, name, values in events
        )
        with FileLock(f"{self.path}.lock"), open(self.path, "ab+") as file:
            file.seek(0, os.SEEK_END)
            if file.tell() > 0:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # a writer died in the middle of its line
                    file.write(b"\n")
            file.write(lines.encode())
            file.flush()
            os.fsync(file.fileno())

    def keep_attempts(self, found: Mapping[str, Attempts]) -> None:
        """Write down what was seen of the attempts of jobs, by the jobs' submission ids.

        Where nothing can be written (another user's folder, a full disk) it is not kept: who looks
        at a job is not to fail for that.
        """
        if not found or not os.access(self.exp_dir, os.W_OK):
            return
        try:
            self.write_all(
                [
                    (SEEN, name, {"attempts": [one.to_json() for one in attempts.values()]})
                    for name, attempts in found.items()
                ]
            )
        except OSError as error:
            log.warning("What was seen of the jobs is not kept in %s: %s", self.path, error)

    def jobs(self) -> dict[str, JobRecord]:
        """All jobs by submission id, as the events tell."""
        records: dict[str, JobRecord] = {}
        for event in self.events():
            submission_id, kind = event["id"], event["event"]
            if kind == INTENT:
                before = records.get(submission_id)
                names = ("job", "role", "cluster", "session")
                optional = ("dispatcher", "is_dispatcher", "has_roles")
                more = {name: event[name] for name in optional if name in event}
                records[submission_id] = JobRecord(
                    submission_id=submission_id,
                    exp_dir=self.exp_dir,
                    nonces=[*(before.nonces if before else ()), event["nonce"]],
                    attempts=before.attempts if before else {},
                    **{name: event[name] for name in names},
                    **more,
                )
            elif submission_id not in records:
                log.warning("%s tells of %s before its intent.", self.path, submission_id)
            elif kind in (TERMINAL, SEEN):
                if kind == TERMINAL:
                    records[submission_id].terminal = event["status"]
                found = [AttemptRecord.from_json(one) for one in event.get("attempts", ())]
                # Several processes look, and each knows what it has seen.
                records[submission_id].attempts = merged(
                    records[submission_id].attempts, {one.submission_id: one for one in found}
                )
            elif kind == CANCEL:
                records[submission_id].cancelled = True
            else:
                records[submission_id].last = kind
        return records

    def events(self) -> Iterator[dict[str, Any]]:
        """Every event, the oldest first."""
        if not self.path.exists():
            return
        for number, line in enumerate(self.path.read_bytes().splitlines(), start=1):
            try:
                event = json.loads(line)
            except ValueError:
                log.warning("Line %d of %s is torn and ignored.", number, self.path)
                continue
            yield event


def find(submission_id: str) -> JobRecord:
    """The record of a job by its id alone, from NeMo-Run's home.

    Raises:
        JobError: no experiment in this home submitted such a job.
    """
    for exp_dir in _candidates({submission_id}):
        record = Ledger(exp_dir).jobs().get(submission_id)
        if record is not None:
            return record
    raise JobError(
        f"No experiment below {get_nemorun_home()} has submitted a Ray job {submission_id}. Is the "
        "handle right, and NEMORUN_HOME that of the run?"
    )


def experiments_of(submission_ids: Set[str]) -> set[Path]:
    """Folders of the experiments in NeMo-Run's home that have submitted one of these jobs."""
    candidates = set(_candidates(submission_ids))
    return {one for one in candidates if not Ledger(one).jobs().keys().isdisjoint(submission_ids)}


def remember(exp_dir: Path, experiment_id: str) -> None:
    """Make an experiment findable that is not in its usual place in NeMo-Run's home."""
    if exp_dir.parent.parent == Path(get_nemorun_home()) / "experiments":
        return
    pointer = _pointers() / safe_id(experiment_id)[:ID_MAX]
    pointer.parent.mkdir(parents=True, exist_ok=True)
    pointer.write_text(str(exp_dir.absolute()), encoding="utf-8")


def _candidates(submission_ids: Set[str]) -> Iterator[Path]:
    for folder in (Path(get_nemorun_home()) / "experiments").glob("*/*"):
        if _may_hold(safe_id(folder.name), submission_ids) and (folder / LEDGER).exists():
            yield folder
    for pointer in _pointers().glob("*"):
        if _may_hold(pointer.name, submission_ids):
            yield Path(pointer.read_text(encoding="utf-8"))


def _may_hold(experiment_id: str, submission_ids: Set[str]) -> bool:
    # A shortened id may have lost the end of the experiment's.
    return any(one.startswith(f"{experiment_id}.") or len(one) >= ID_MAX for one in submission_ids)


def _pointers() -> Path:
    return Path(get_nemorun_home()) / "ray_experiments"
