"""The records of an experiment in its folder: its ledger of requests, and what is kept of jobs.

It lets another process find the cluster and the ids; the truth about a job's state is the
cluster's. A line is written, flushed and synced before the request that it announces.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import field, replace
from pathlib import Path
from typing import IO, Any

from filelock import FileLock
from nemo_run.config import get_nemorun_home
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from nemo_run_ray.errors import JobError
from nemo_run_ray.ids import ID_MAX, LEDGER, safe_id
from nemo_run_ray.remote.files import replacing, why_untrusted, write_file
from nemo_run_ray.remote.node.output import CUT
from nemo_run_ray.remote.spec import read
from nemo_run_ray.remote.status import Attempt, JobState, JobStatus, Reason

log = logging.getLogger(__name__)

INTENT, SUBMITTED, UNSETTLED = "intent", "submitted", "unsettled"
TERMINAL, SEEN, UNKEPT = "terminal", "seen", "unkept"
#: Kind, submission id and values.
Event = tuple[str, str, dict[str, Any]]
#: Digits of seconds since the epoch, until the year 2286.
_DIGITS_OF_SECONDS = 10
_CHECKED = ConfigDict(allow_inf_nan=False)


@dataclass(frozen=True, config=_CHECKED)
class AttemptRecord:
    """One attempt as it was last seen. Times are seconds since the epoch.

    Attributes:
        submission_id: its name on the cluster.
        state, reason: values of a ``JobState`` and of a ``Reason``.
        detail: why, in a sentence.
        node: hexadecimal id of the node of its driver; empty when it had none.
        posted_at: when Ray got it.
        running_at: when it began to run; ``None`` when no process saw that.
        ended_at: when it ended; ``None`` when no process saw that.
        exit_code: of its command; ``None`` when it has none.
    """

    submission_id: str
    state: str
    reason: str = ""
    detail: str = ""
    node: str = ""
    posted_at: float = 0.0
    running_at: float | None = None
    ended_at: float | None = None
    exit_code: int | None = None

    def __post_init__(self) -> None:
        JobState(self.state)

    @classmethod
    def of(cls, submission_id: str, row: Attempt) -> AttemptRecord:
        """The record of a row of the job table, which does not say when it began to run."""
        status = row.status
        about = status.state.value, status.reason.value, status.detail, status.node
        ended_at = row.ended_at or None
        return cls(submission_id, *about, row.posted_at, None, ended_at, row.exit_code)


#: The attempts of one job by submission id, the first one first.
Attempts = Mapping[str, AttemptRecord]


def merged(kept: Attempts, seen: Attempts) -> dict[str, AttemptRecord]:
    """All attempts as seen, or as kept where they are not; the earlier begin time counts."""
    result = {**kept, **seen}
    for name in kept.keys() & seen.keys():
        moments = [at for at in (kept[name].running_at, seen[name].running_at) if at is not None]
        result[name] = replace(seen[name], running_at=min(moments, default=None))
    return result


@dataclass(frozen=True, config=_CHECKED)
class JobRecord:
    """One job as the ledger knows it.

    Attributes:
        submission_id: its name on the cluster.
        job: its name in NeMo-Run.
        cluster: ``Cluster.record()`` of its cluster.
        session: Ray's name of the cluster's life that got it.
        nonces: one of every submission, by whatever process; they tell this job from another one
            that took the same id.
        exp_dir: folder of its experiment.
        dispatcher: id of the dispatcher that submits it; empty when the client did.
        is_dispatcher: it is an attempt of that dispatcher itself.
        has_roles: it is a group.
        is_array: it is an array.
        place: which job of its experiment it is, from 0, in the order in which they were added.
        grace_s: seconds from SIGTERM to SIGKILL when it is cancelled.
        reservation: the parts of its request to Ray that say what it asks for; empty when it asks
            for nothing, is a group, or was submitted by a version that did not write them down.
        keep_logs_max_bytes: bytes of its log that the folder keeps; ``None`` is all of it.
        log_copy: beginning of the path of a second file for its log; empty for none.
        intended_at: when it was last about to be submitted, in seconds since the epoch.
        last: the last event of its submission.
        terminal: its status, once a client has written down its end.
        attempts: what was seen of its attempts, by submission id.
        is_log_given_up: its log could not be copied, and is not tried again.
    """

    submission_id: str
    job: str
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
    terminal: JobStatus | None = None
    attempts: Mapping[str, AttemptRecord] = field(default_factory=dict)
    is_log_given_up: bool = False


class Ledger:
    """One experiment's ledger. Any number of processes may write.

    The file's beginning is remembered: only what was added since is read again.
    """

    def __init__(self, exp_dir: Path) -> None:
        self.exp_dir = exp_dir
        self.path = exp_dir / LEDGER
        self._lock = threading.Lock()
        self._forget(None)

    def write(self, event: str, submission_id: str, **values: Any) -> None:
        """Append one event; on return it is on the disk."""
        self.write_all([(event, submission_id, values)])

    def write_all(self, events: Sequence[Event]) -> None:
        """Append several events: kind, submission id and values of each."""
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
        """Append an event that the job does not depend on, if it can be written."""
        try:
            self.write(event, submission_id, **values)
        except OSError as error:
            log.warning(
                "%s cannot be written: %s. The job %s is not affected; that it is %s is not kept.",
                *(self.path, error.strerror, submission_id, event),
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

    def _forget(self, inode: int | None) -> None:
        self._inode, self._offset = inode, 0
        self._records: dict[str, JobRecord] = {}

    def _read(self) -> None:
        """Take into account what was added to the file. The lock is held."""
        try:
            file = open(self.path, "rb")  # noqa: SIM115
        except FileNotFoundError:
            self._forget(None)
            return
        with file:
            found = os.fstat(file.fileno())
            if found.st_ino != self._inode or found.st_size < self._offset:
                why = why_untrusted(str(self.path))
                if why:  # addresses of other users would get this user's variables and token
                    raise JobError(f"The jobs of {self.exp_dir} are not looked at. {why}")
                self._forget(found.st_ino)
            file.seek(self._offset)
            for line in file.readlines():
                try:
                    if line.strip():
                        self._add(json.loads(line))
                except (KeyError, TypeError, ValueError, RecursionError):
                    if not line.endswith(b"\n"):
                        return  # perhaps its writer is at it
                    log.warning("A line of %s is no record: %r", self.path, line[:80])
                self._offset += len(line)

    def _add(self, event: Any) -> None:
        """Take the next event into account."""
        name, kind, at = event["id"], event["event"], float(event.get("at") or 0.0)
        record = self._records.get(name)
        if kind == INTENT:
            own = {
                "submission_id": name,
                "exp_dir": self.exp_dir,
                "intended_at": at,
                "nonces": [*(record.nonces if record else ()), event["nonce"]],
                "attempts": record.attempts if record else {},
            }
            record = JobRecord(**{**event, **own})
        elif record is None:
            log.warning("The ledger in %s tells of %s too early.", self.exp_dir, name)
            return
        elif kind in (TERMINAL, SEEN):
            # Several processes look, and each knows what it has seen.
            seen = [AttemptRecord(**values) for values in event.get("attempts") or ()]
            attempts = merged(record.attempts, {one.submission_id: one for one in seen})
            ended = read(JobStatus, event["status"]) if kind == TERMINAL else record.terminal
            record = replace(record, terminal=ended, attempts=attempts)
        elif kind == UNKEPT:
            record = replace(record, is_log_given_up=True)
        elif kind in (SUBMITTED, UNSETTLED):
            record = replace(record, last=kind)
        self._records[name] = record


class Kept:
    """The files of one job.

    Args:
        exp_dir: the experiment's folder.
        submission_id: of the job.
        copy: beginning of the path of a second file for the log; empty for none.
    """

    def __init__(self, exp_dir: Path, submission_id: str, copy: str = "") -> None:
        # Whatever a ledger says, the name's end is this one: no other file is replaced.
        self._copy = Path(f"{copy}_{submission_id}_srun.log") if copy else None
        self._id = submission_id
        self._log = exp_dir / "ray_logs" / f"{submission_id}.log"

    @property
    def has_log(self) -> bool:
        return self._log.exists()

    def log(self) -> Iterator[str]:
        """The text, piece by piece."""
        with open(self._log, encoding="utf-8", newline="") as file:
            while text := file.read(65536):
                yield text

    def keep_log(self, texts: Iterable[str], most_bytes: int | None = None) -> None:
        """Write the log, and a second one where that belongs on this machine.

        None is left when reading or writing the first one fails.
        """
        self._log.parent.mkdir(parents=True, exist_ok=True)
        pieces = (text.encode(errors="replace") for text in texts)
        with replacing(self._log) as file:
            if most_bytes is None:
                file.writelines(pieces)
            else:
                _write_end(pieces, most_bytes, file)
        if self._copy is not None and self._copy.parent.parent.is_dir():
            try:
                self._copy.parent.mkdir(exist_ok=True)
                with open(self._log, "rb") as kept, replacing(self._copy) as file:
                    shutil.copyfileobj(kept, file)
            except OSError as error:
                log.warning("The log is not written to %s too: %s", self._copy, error)

    def file(self, kind: str) -> Path:
        """A file that was kept of its driver."""
        return self._log.with_name(f"{self._id}.{kind}")

    def keep(self, kind: str, text: str) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        write_file(self.file(kind), text)


def _write_end(pieces: Iterable[bytes], most_bytes: int, file: IO[bytes]) -> None:
    """Write the last ``most_bytes`` at most, from the beginning of a line on."""
    end, size = bytearray(), 0
    for piece in pieces:
        end += piece
        size += len(piece)
        del end[: max(0, len(end) - most_bytes)]
    if size > most_bytes:
        del end[: end.find(b"\n") + 1]  # of a line that is longer the end is kept
        end = bytearray(end.decode(errors="ignore").encode())
        file.write(
            f"{CUT}{size - len(end)} bytes of this log are not kept: "
            f"RayExecutor.keep_logs_max_bytes is {most_bytes}\n".encode()
        )
    file.write(end)


class ExperimentStore:
    """The knowledge of one experiment on this machine; a process has one object for each folder.

    Attributes:
        exp_dir: the experiment's folder.
        ledger: its ledger.
        dispatches: the experiment's dispatches, by id.
        waiters: objects of this process that wait for its jobs; as long as there is one, what is
            seen of the jobs is recorded.
        lock: guards what several threads do once.
        packing: guards the files that packagers write.
        recording: guards what is written of jobs that were seen.
        copying: guards the copies of logs.
        waited_at: when this process saw an attempt that did not run, last.
        copy_again_at: when the log of a job is to be copied again, by the monotonic clock.
        reported: job, state and reason that were shown to this process's user.
    """

    def __init__(self, exp_dir: Path) -> None:
        self.exp_dir = exp_dir
        self.ledger = Ledger(exp_dir)
        self.dispatches: dict[str, Any] = {}
        self.waiters: set[object] = set()
        self.lock = threading.Lock()
        self.packing = threading.Lock()
        self.recording = threading.Lock()
        self.copying = threading.Lock()
        self.waited_at: dict[str, float] = {}
        self.copy_again_at: dict[str, float] = {}
        self.reported: set[tuple[str, JobState, Reason]] = set()


_stores: dict[str, ExperimentStore] = {}
_stores_lock = threading.Lock()


def store_of(exp_dir: Path) -> ExperimentStore:
    """The process's one store of an experiment."""
    key = os.path.abspath(exp_dir)
    with _stores_lock:
        return _stores.setdefault(key, ExperimentStore(exp_dir))


def find_experiment(name: str, but: Path | None = None) -> Path | None:
    """The folder of an experiment's id, or of the newest one of a title; ``None`` without any."""
    folders = _folders()
    by_id = [folder for folder in folders if folder.name == name]
    of_title = [folder for folder in folders if folder.parent.name == name and folder != but]
    return by_id[0] if by_id else max(of_title, key=_began_at, default=None)


def _began_at(exp_dir: Path) -> float:
    """When an experiment was made: by the number at the end of its id, in seconds or parts of them.

    NeMo-Run's ``from_title`` goes by the folder's last change, and a look that keeps a log is one.
    """
    number = exp_dir.name.rpartition("_")[2]
    if number.isdigit() and len(number) >= _DIGITS_OF_SECONDS:
        return float(f"{number[:_DIGITS_OF_SECONDS]}.{number[_DIGITS_OF_SECONDS:]}")
    return exp_dir.stat().st_ctime


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question that names those most like it, with a space before it; empty without any."""
    titles = sorted(known)
    near = difflib.get_close_matches(name, titles) or difflib.get_close_matches(
        name.rpartition("_")[0], titles
    )
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


def titles() -> set[str]:
    """The titles of all experiments in NeMo-Run's home."""
    return {folder.parent.name for folder in _folders()}


def experiments() -> list[Path]:
    """The folders of all experiments of this user that submitted jobs, the newest first."""
    folders = (folder for folder in _folders() if (folder / LEDGER).exists())
    trusted = (folder for folder in folders if not why_untrusted(str(folder / LEDGER)))
    return sorted(trusted, key=_began_at, reverse=True)


def remember(exp_dir: Path) -> None:
    """Let an experiment be found that is not in its usual place in NeMo-Run's home."""
    if exp_dir.parent.parent != Path(get_nemorun_home()) / "experiments":
        pointer = _pointers() / safe_id(exp_dir.name)[:ID_MAX]
        pointer.parent.mkdir(parents=True, exist_ok=True)
        write_file(pointer, str(exp_dir.absolute()))


def _pointers() -> Path:
    return Path(get_nemorun_home()) / "ray_experiments"


def _folders() -> list[Path]:
    """The folders of all experiments in NeMo-Run's home, and of those that it points to."""
    folders = list((Path(get_nemorun_home()) / "experiments").glob("*/*"))
    for pointer in _pointers().glob("*"):
        with contextlib.suppress(FileNotFoundError):  # it is being written, and has another name
            folders.append(Path(pointer.read_text(encoding="utf-8")))
    return [folder for folder in folders if folder.is_absolute() and folder.is_dir()]


def find_record(submission_id: str) -> JobRecord:
    """The record of a job by its id alone, from NeMo-Run's home."""
    for exp_dir in _candidates({submission_id}):
        record = store_of(exp_dir).ledger.job(submission_id)
        if record is not None:
            return record
    raise JobError(
        f"No experiment below {get_nemorun_home()} has submitted a Ray job {submission_id}. Is the "
        "handle right, and NEMORUN_HOME that of the run?"
    )


def experiments_of(submission_ids: Set[str]) -> list[Path]:
    """Folders of this user's experiments in NeMo-Run's home that submitted one of these jobs."""
    return [
        folder
        for folder in _candidates(submission_ids)
        if not why_untrusted(str(folder / LEDGER))
        and not submission_ids.isdisjoint(store_of(folder).ledger.jobs())
    ]


def _candidates(submission_ids: Set[str]) -> Iterator[Path]:
    """The folders of experiments that may have submitted one of these jobs, by their names."""
    for folder in _folders():
        begin = f"{safe_id(folder.name)}."
        # A shortened id may have lost the end of the experiment's.
        if any(one.startswith(begin) or len(one) >= ID_MAX for one in submission_ids):
            yield folder
