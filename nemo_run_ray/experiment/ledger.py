"""What an experiment asked of clusters, one line per event, in the experiment's folder.

It lets another process find the cluster and the ids; the truth about a job's state is the
cluster's. A line is written, flushed and synced before the request that it announces.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, ClassVar

from filelock import FileLock
from nemo_run.config import get_nemorun_home

from nemo_run_ray.errors import JobError
from nemo_run_ray.experiment.attempt_records import Attempts
from nemo_run_ray.experiment.job_records import (
    CANCEL,
    INTENT,
    SEEN,
    SUBMITTED,
    TERMINAL,
    UNKEPT,
    UNSETTLED,
    JobRecord,
    JobRecords,
)
from nemo_run_ray.ids import ID_MAX, LEDGER, safe_id
from nemo_run_ray.remote.files import write_file
from nemo_run_ray.remote.trust import why_untrusted

log = logging.getLogger(__name__)


#: Kind, submission id and values.
Event = tuple[str, str, dict[str, Any]]


class Ledger:
    """One experiment's ledger. Any number of processes may write.

    What was read of the file is remembered: only what was added since is read again.
    """

    _shared: ClassVar[dict[Path, Ledger]] = {}
    _shared_lock = threading.Lock()

    def __init__(self, exp_dir: Path) -> None:
        self.exp_dir = exp_dir
        self.path = exp_dir / LEDGER
        self._lock = threading.Lock()
        self._inode: int | None = None
        self._beginning = b""
        self._offset = self._lines = 0
        self._records = JobRecords(exp_dir)

    @classmethod
    def of(cls, exp_dir: Path) -> Ledger:
        """The process's ledger of this experiment."""
        with cls._shared_lock:
            if exp_dir not in cls._shared:
                cls._shared[exp_dir] = cls(exp_dir)
            return cls._shared[exp_dir]

    def write(self, event: str, submission_id: str, **values: Any) -> None:
        """Append one event; on return it is on the disk."""
        self.write_all([(event, submission_id, values)])

    def write_all(self, events: Sequence[Event]) -> None:
        """Append several events: kind, submission id and values of each.

        Raises:
            OSError: they cannot be written; it names the file.
        """
        at = round(time.time(), 3)
        lines = "".join(
            json.dumps({"at": at, "event": event, "id": name, **values}, sort_keys=True) + "\n"
            for event, name, values in events
        )
        try:
            with FileLock(f"{self.path}.lock"), open(self.path, "ab+") as file:
                file.seek(0, os.SEEK_END)
                if file.tell() > 0:
                    file.seek(-1, os.SEEK_END)
                    if file.read(1) != b"\n":  # a writer died in the middle of its line
                        file.write(b"\n")
                file.write(lines.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            if error.errno:
                error.filename = str(self.path)  # a write that fails names no file
            raise

    def note(self, event: str, submission_id: str, **values: Any) -> None:
        """Append an event that what happens to the job does not depend on, if it can be written."""
        try:
            self.write(event, submission_id, **values)
        except OSError as error:
            log.warning(
                "%s cannot be written: %s. The job %s is not affected; that it is %s is not kept.",
                *(self.path, error.strerror, submission_id, event),
            )

    def keep_attempts(self, found: Mapping[str, Attempts]) -> None:
        """Write down what was seen of the attempts of jobs, by the jobs' submission ids.

        Where nothing can be written (another user's folder, a full disk) it is not kept: a look at
        a job must not fail for that.
        """
        if not found or not os.access(self.exp_dir, os.W_OK):
            return
        try:
            self.write_all(
                [
                    (SEEN, name, {"attempts": [attempt.to_json() for attempt in attempts.values()]})
                    for name, attempts in found.items()
                ]
            )
        except OSError as error:
            log.warning("What was seen of the jobs is not kept in %s: %s", self.path, error)

    def jobs(self) -> dict[str, JobRecord]:
        """All jobs by submission id, as the events tell, in the order of their submission."""
        with self._lock:
            return {name: record.copy() for name, record in self._read().by_id.items()}

    def job(self, submission_id: str) -> JobRecord | None:
        """The record of one job; ``None`` when there is no such job."""
        with self._lock:
            found = self._read().by_id.get(submission_id)
            return None if found is None else found.copy()

    def nonces(self, submission_id: str) -> list[str]:
        """By which the rows of a job are known as its own; none of a job that is not there."""
        record = self.job(submission_id)
        return record.nonces if record is not None else []

    def has_any(self, submission_ids: Set[str]) -> bool:
        """Whether one of these jobs is in it."""
        with self._lock:
            return not submission_ids.isdisjoint(self._read().by_id)

    def has_arrived(self, dispatcher: str) -> bool:
        """Whether a dispatcher of this id has reached its cluster."""
        with self._lock:
            return dispatcher in self._read().arrived

    def began_at(self) -> float | None:
        """When the first event was written, in seconds since the epoch."""
        with self._lock:
            return self._read().began_at

    def _read(self) -> JobRecords:
        """All records, after what has been added to the file. The lock is held."""
        try:
            file = open(self.path, "rb")  # noqa: SIM115
        except FileNotFoundError:
            self._forget(None)
            return self._records
        with file:
            found = os.fstat(file.fileno())
            is_same = found.st_ino == self._inode and found.st_size >= self._offset
            # The number of a file that was removed is given to the next one that is made.
            if not is_same or file.read(len(self._beginning)) != self._beginning:
                self._require_trusted()
                self._forget(found.st_ino)
            if not self._beginning:
                file.seek(0)
                self._beginning = file.readline()
            file.seek(self._offset)
            for line in file.readlines():
                self._add(line)
        return self._records

    def _add(self, line: bytes) -> None:
        is_whole = line.endswith(b"\n")
        try:
            if line.strip():
                self._records.add(json.loads(line))
        except (ValueError, RecursionError):
            log.warning("Line %d of %s is no record and is ignored.", self._lines + 1, self.path)
            if not is_whole:
                return  # perhaps its writer is at it
        self._offset += len(line)
        self._lines += is_whole

    def _require_trusted(self) -> None:
        """Refuse addresses of other users, which would get this user's variables and token."""
        why = why_untrusted(str(self.path))
        if why:
            raise JobError(f"The jobs of {self.exp_dir} are not looked at. {why}")

    def _forget(self, inode: int | None) -> None:
        self._inode = inode
        self._offset = self._lines = 0
        self._beginning = b""
        self._records = JobRecords(self.exp_dir)


def find(submission_id: str) -> JobRecord:
    """The record of a job by its id alone, from NeMo-Run's home.

    Raises:
        JobError: no experiment in this home submitted such a job.
    """
    for exp_dir in _candidates({submission_id}):
        record = Ledger.of(exp_dir).job(submission_id)
        if record is not None:
            return record
    raise JobError(
        f"No experiment below {get_nemorun_home()} has submitted a Ray job {submission_id}. Is the "
        "handle right, and NEMORUN_HOME that of the run?"
    )


def experiments_of(submission_ids: Set[str]) -> set[Path]:
    """Folders of this user's experiments in NeMo-Run's home that submitted one of these jobs."""
    found = set(_candidates(submission_ids))
    candidates = {folder for folder in found if not why_untrusted(str(folder / LEDGER))}
    return {folder for folder in candidates if Ledger.of(folder).has_any(submission_ids)}


def remember(exp_dir: Path, experiment_id: str) -> None:
    """Make an experiment findable that is not in its usual place in NeMo-Run's home."""
    if exp_dir.parent.parent == Path(get_nemorun_home()) / "experiments":
        return
    pointer = _pointers() / safe_id(experiment_id)[:ID_MAX]
    pointer.parent.mkdir(parents=True, exist_ok=True)
    write_file(pointer, str(exp_dir.absolute()))


def remembered(experiment_id: str) -> Path | None:
    """The folder of an experiment that ``remember`` was told of."""
    pointer = _pointers() / safe_id(experiment_id)[:ID_MAX]
    return Path(pointer.read_text(encoding="utf-8")) if pointer.is_file() else None


def _candidates(submission_ids: Set[str]) -> Iterator[Path]:
    for folder in (Path(get_nemorun_home()) / "experiments").glob("*/*"):
        if _may_hold(safe_id(folder.name), submission_ids) and (folder / LEDGER).exists():
            yield folder
    for pointer in _pointers().glob("*"):
        if _may_hold(pointer.name, submission_ids):
            yield Path(pointer.read_text(encoding="utf-8"))


def _may_hold(experiment_id: str, submission_ids: Set[str]) -> bool:
    # A shortened id may have lost the end of the experiment's.
    return any(
        submission_id.startswith(f"{experiment_id}.") or len(submission_id) >= ID_MAX
        for submission_id in submission_ids
    )


def _pointers() -> Path:
    return Path(get_nemorun_home()) / "ray_experiments"


__all__ = [
    "CANCEL",
    "INTENT",
    "SEEN",
    "SUBMITTED",
    "TERMINAL",
    "UNKEPT",
    "UNSETTLED",
    "Event",
    "JobRecord",
    "Ledger",
    "experiments_of",
    "find",
    "remember",
    "remembered",
]
