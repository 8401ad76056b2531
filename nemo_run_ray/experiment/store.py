"""The experiment's folder: its ledger of requests, and the logs and files that are kept of jobs.

Others write there too: dispatch.py the plans of dispatches, submit.py archives of code, and
NeMo-Run its tasks, which ``nemo/`` rewrites once. The ledger lets another process find the cluster
and the ids; the truth about a job's state is the cluster's. A line is written, flushed and synced
before the request that it announces.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import Any

from filelock import FileLock
from nemo_run.config import get_nemorun_home
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from nemo_run_ray.errors import JobError, SubmissionError
from nemo_run_ray.fields import nearest
from nemo_run_ray.ids import ID_MAX, LEDGER, safe_id
from nemo_run_ray.remote.end_record import CUT
from nemo_run_ray.remote.files import replacing, why_untrusted, write_file
from nemo_run_ray.remote.spec import Json, read
from nemo_run_ray.remote.status import JobState, JobStatus, Reason

log = logging.getLogger(__name__)

INTENT, SUBMITTED, UNSETTLED = "intent", "submitted", "unsettled"
TERMINAL, SEEN, UNKEPT = "terminal", "seen", "unkept"
#: Kind, submission id and values.
Event = tuple[str, str, Json]
#: Folder of NeMo-Run's home that names experiments elsewhere.
_POINTERS = "ray_experiments"
#: Digits of seconds since the epoch, until the year 2286.
_DIGITS_OF_SECONDS = 10
_CHECKED = ConfigDict(allow_inf_nan=False)


@dataclass(frozen=True, config=_CHECKED)
class AttemptRecord:
    """One attempt as it was last seen. Times are seconds since the epoch, if somebody saw them."""

    submission_id: str
    state: JobState
    #: The value of a ``Reason``, and why, in a sentence.
    reason: str = ""
    detail: str = ""
    #: Hexadecimal id of the node of its driver; empty when it had none.
    node: str = ""
    posted_at: float = 0.0
    running_at: float | None = None
    ended_at: float | None = None
    exit_code: int | None = None


#: The attempts of one job by submission id, the first one first.
Attempts = Mapping[str, AttemptRecord]


def merged(kept: Attempts, seen: Attempts) -> dict[str, AttemptRecord]:
    """All attempts as seen, or as kept where they are not; the earlier begin time counts.

    The answer that an attempt runs may arrive when it has ended; that moment is no begin time.
    """
    result = {**kept, **seen}
    for name in kept.keys() & seen.keys():
        ended_at = seen[name].ended_at or math.inf
        moments = (kept[name].running_at, seen[name].running_at)
        running_at = min((at for at in moments if at and at < ended_at), default=None)
        result[name] = replace(seen[name], running_at=running_at)
    return result


@dataclass(frozen=True, config=_CHECKED)
class JobRecord:
    """One job as the ledger knows it."""

    #: Its name on the cluster, and its name in NeMo-Run.
    submission_id: str
    job: str
    #: ``Cluster.record()`` of its cluster, and the name of Ray's session when the job was sent.
    cluster: Json
    session: str
    #: One of every submission, by whatever process; they tell it from a job that took the same id.
    nonces: list[str]
    exp_dir: Path
    #: Id of the dispatcher that submits it. An attempt of a dispatcher has its dispatch's id, and a
    #: job that the client submits itself has none.
    dispatcher: str = ""
    is_dispatcher: bool = False
    has_roles: bool = False
    is_array: bool = False
    #: Its number in the experiment, from 0, in the order in which jobs were added.
    place: int = 0
    grace_s: float = 10.0
    #: The parts of its request to Ray that say what it asks for; empty of a group.
    reservation: Json = field(default_factory=dict)
    #: Bytes of its log that the folder keeps; ``None`` is all of it.
    keep_logs_max_bytes: int | None = 0
    #: Beginning of the path of a second file for its log; empty for none.
    log_copy: str = ""
    #: When it was last about to be submitted, in seconds since the epoch.
    intended_at: float = 0.0
    #: The last event of its submission.
    last: str = INTENT
    #: Its status, once a client has written down its end.
    terminal: JobStatus | None = None
    #: Its attempts as they were last seen, by submission id.
    attempts: Mapping[str, AttemptRecord] = field(default_factory=dict)
    #: Its log could not be copied, and is not tried again.
    is_log_given_up: bool = False


@contextmanager
def writable(path: Path) -> Iterator[None]:
    """Translate the error of a full disk, or of another user's folder, before a request."""
    try:
        yield
    except OSError as error:
        raise SubmissionError(
            f"{path} cannot be written: {error.strerror}. Nothing was submitted. Make room there, "
            "or name another home by NEMORUN_HOME, and run it again."
        ) from error


class Ledger:
    """One experiment's ledger. Any number of processes may write.

    The file's beginning is remembered: only what was added since is read again.
    """

    def __init__(self, exp_dir: Path):
        self.exp_dir = exp_dir
        self.path = exp_dir / LEDGER
        self._lock = threading.Lock()
        self._offset = 0
        self._records: dict[str, JobRecord] = {}

    def write_all(self, events: Sequence[Event]) -> None:
        """Append events: kind, submission id and values of each; on return they are on the disk."""
        at = round(time.time(), 3)
        rows = ({"at": at, "event": event, "id": name, **values} for event, name, values in events)
        lines = "".join(json.dumps(row, default=asdict, sort_keys=True) + "\n" for row in rows)
        with (
            writable(self.path),
            FileLock(f"{self.path}.lock"),
            open(self.path, "ab+") as file,
        ):
            if file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
                file.write(b"\n")  # the last writer has died in the middle of its line
            file.write(lines.encode())
            file.flush()
            os.fsync(file.fileno())

    def note(self, event: str, submission_id: str, **values: Any) -> None:
        """Append an event that the job does not depend on, if it can be written."""
        try:
            self.write_all([(event, submission_id, values)])
        except SubmissionError as error:
            log.warning(
                "%s cannot be written: %s. The job %s is not affected; that it is %s is not kept.",
                *(self.path, error.__cause__, submission_id, event),
            )

    def jobs(self) -> dict[str, JobRecord]:
        """All jobs by submission id, in the order of their submission."""
        with self._lock:
            self._read()
            return dict(self._records)

    def job(self, submission_id: str) -> JobRecord | None:
        """The record of one job; ``None`` when there is no such job."""
        return self.jobs().get(submission_id)

    def began_at(self) -> float | None:
        """When the first job was submitted, in seconds since the epoch."""
        return min((record.intended_at for record in self.jobs().values()), default=None)

    def _read(self) -> None:
        """Take into account what was added to the file. The lock is held."""
        size = self.path.stat().st_size if self.path.exists() else 0
        if size < self._offset:  # the experiment was deleted, and may run anew
            self._offset, self._records = 0, {}
        if size == self._offset:
            return
        if not self._offset:
            why = why_untrusted(str(self.path))
            if why:  # addresses of other users would get this user's variables and token
                raise JobError(f"The jobs of {self.exp_dir} are not looked at. {why}")
        with open(self.path, "rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # perhaps it is being written
                try:
                    self._add(json.loads(line))
                except (KeyError, TypeError, ValueError, RecursionError):
                    log.warning("A line of %s is no record: %r", self.path, line[:80])
                self._offset += len(line)

    def _add(self, event: Any) -> None:
        """Take the next event into account."""
        name, kind = event["id"], event["event"]
        if kind == INTENT:
            before = self._records.get(name)
            own = {
                "submission_id": name,
                "exp_dir": self.exp_dir,
                "intended_at": event["at"],
                "nonces": [*(before.nonces if before else ()), event["nonce"]],
                "attempts": before.attempts if before else {},
            }
            self._records[name] = JobRecord(**event | own)
            return
        record = self._records[name]
        if kind in (TERMINAL, SEEN):
            # Several processes look, and each knows what it has seen.
            seen = {row["submission_id"]: AttemptRecord(**row) for row in event.get("attempts", ())}
            ended = read(JobStatus, event["status"]) if kind == TERMINAL else record.terminal
            record = replace(record, terminal=ended, attempts=merged(record.attempts, seen))
        elif kind == UNKEPT:
            record = replace(record, is_log_given_up=True)
        elif kind in (SUBMITTED, UNSETTLED):
            record = replace(record, last=kind)
        self._records[name] = record


class Kept:
    """The files of one job. ``copy`` begins the path of a second file for its log, if any."""

    def __init__(self, exp_dir: Path, submission_id: str, copy: str = ""):
        # The end of the name is fixed, so that a forged ledger cannot overwrite other files.
        self._copy = Path(f"{copy}_{submission_id}_srun.log") if copy else None
        self._beginning = exp_dir / "ray_logs" / submission_id
        self.log = Path(f"{self._beginning}.log")

    def keep_log(self, texts: Iterable[str], most_bytes: int | None = None) -> None:
        """Write the log, and a second one where that belongs on this machine.

        No file is left if reading or writing the first one fails.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        pieces = (text.encode(errors="replace") for text in texts)
        with replacing(self.log) as file:
            file.writelines(pieces if most_bytes is None else _end_of(pieces, most_bytes))
        if self._copy and self._copy.parent.parent.is_dir():
            try:
                self._copy.parent.mkdir(exist_ok=True)
                with open(self.log, "rb") as kept, replacing(self._copy) as file:
                    shutil.copyfileobj(kept, file)
            except OSError as error:
                log.warning("The log is not written to %s too: %s", self._copy, error)

    def text(self, kind: str) -> str:
        """The text of a file of its driver; empty if it was not kept."""
        path = Path(f"{self._beginning}.{kind}")
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def keep(self, kind: str, text: str) -> None:
        """Keep a file of its driver."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        write_file(f"{self._beginning}.{kind}", text)


def _end_of(pieces: Iterable[bytes], most_bytes: int) -> Iterator[bytes]:
    """The last ``most_bytes`` at most, from the beginning of a line on."""
    end, size = bytearray(), 0
    for piece in pieces:
        end += piece
        size += len(piece)
        del end[: max(0, len(end) - most_bytes)]
    if size > most_bytes:
        del end[: end.find(b"\n") + 1]  # of a line that is longer the end is kept
        yield (
            f"{CUT}{size - len(end)} bytes of this log are not kept: "
            f"RayExecutor.keep_logs_max_bytes is {most_bytes}\n".encode()
        )
    yield bytes(end)


class ExperimentStore:
    """The knowledge of one experiment on this machine; a process has one object for each folder."""

    def __init__(self, exp_dir: Path):
        self.exp_dir = exp_dir
        self.ledger = Ledger(exp_dir)
        #: Each ``Dispatch`` of a dispatcher, by its id.
        self.dispatches: Json = {}
        #: Objects of this process that wait for its jobs. As long as there is one, what is seen of
        #: the jobs is recorded.
        self.waiters: set[object] = set()
        #: The first one is held for moments; under the others one thread packs the code, records
        #: ends, and copies logs.
        self.lock = threading.Lock()
        self.packing = threading.Lock()
        self.recording = threading.Lock()
        self.copying = threading.Lock()
        #: By attempt, when this process last saw that it did not run.
        self.waited_at: dict[str, float] = {}
        #: The jobs that have ended of which everything is copied, or given up.
        self.copied: set[str] = set()
        #: Job, state and reason that were shown to this process's user.
        self.reported: set[tuple[str, JobState, Reason]] = set()


_stores: dict[str, ExperimentStore] = {}


def store_of(exp_dir: Path) -> ExperimentStore:
    """The process's one store of an experiment."""
    return _stores.setdefault(os.path.abspath(exp_dir), ExperimentStore(exp_dir))


def records_of(exp_dir: Path) -> Collection[JobRecord]:
    """The jobs that an experiment's ledger knows, in the order of their submission."""
    return store_of(exp_dir).ledger.jobs().values()


def find_experiment(name: str, but: Path | None = None) -> Path | None:
    """The folder of an experiment's id, or of the newest one of a title; ``None`` without any."""
    folders = _folders()
    of_title = [folder for folder in folders if folder.parent.name == name and folder != but]
    newest = max(of_title, key=_began_at, default=None)
    return next((folder for folder in folders if folder.name == name), newest)


def _began_at(exp_dir: Path) -> float:
    """When an experiment was made: by the number at the end of its id, in seconds or parts of them.

    NeMo-Run's ``from_title`` goes by the folder's last change, and a look that keeps a log is one.
    """
    number = exp_dir.name.rpartition("_")[2]
    if number.isdigit() and len(number) >= _DIGITS_OF_SECONDS:
        return float(f"{number[:_DIGITS_OF_SECONDS]}.{number[_DIGITS_OF_SECONDS:]}")
    return exp_dir.stat().st_ctime


def did_you_mean(name: str, known: Collection[str]) -> str:
    """A question that names the one most like it, with a space before it; empty without any."""
    near = nearest(name, known) or nearest(name.rpartition("_")[0], known)
    return f" Did you mean {near!r}?" if near else ""


def titles() -> set[str]:
    """The titles of all experiments in NeMo-Run's home."""
    return {folder.parent.name for folder in _folders()}


def experiments() -> list[Path]:
    """The folders of all experiments of this user that submitted jobs, the newest first."""
    folders = (
        folder
        for folder in _folders()
        if (folder / LEDGER).exists() and not why_untrusted(str(folder / LEDGER))
    )
    return sorted(folders, key=_began_at, reverse=True)


def remember(exp_dir: Path) -> None:
    """Let an experiment be found that is not in its usual place in NeMo-Run's home."""
    home = Path(get_nemorun_home())
    if exp_dir.parent.parent != home / "experiments":
        pointer = home / _POINTERS / safe_id(exp_dir.name)[:ID_MAX]
        pointer.parent.mkdir(parents=True, exist_ok=True)
        write_file(pointer, str(exp_dir.absolute()))


def _folders() -> list[Path]:
    """The folders of all experiments in NeMo-Run's home, and of those that it points to."""
    home = Path(get_nemorun_home())
    folders = list(home.glob("experiments/*/*"))
    for pointer in home.glob(f"{_POINTERS}/*"):
        with suppress(FileNotFoundError):  # it is being written, and has another name
            folders.append(Path(pointer.read_text(encoding="utf-8")))
    return [folder for folder in folders if folder.is_absolute() and folder.is_dir()]


def find_record(submission_id: str) -> JobRecord:
    """The record of a job by its id alone, from NeMo-Run's home."""
    for folder in _folders():
        # A shortened id may have lost the end of the experiment's.
        if submission_id.startswith(f"{safe_id(folder.name)}.") or len(submission_id) >= ID_MAX:
            record = store_of(folder).ledger.job(submission_id)
            if record:
                return record
    raise JobError(
        f"No experiment below {get_nemorun_home()} has submitted a Ray job {submission_id}. Is the "
        "handle right, and NEMORUN_HOME that of the run?"
    )
