"""Ray's job tables of allocations of Slurm whose jobs go on in the next one.

An allocation writes the job table of its Ray down, see ``slurm/allocation.py``. Where it is
renewed, the dispatches that were handed over to it go on in the next one, and their attempts are
rows of several tables: those of the runs before, and that of the Ray which is up::

    <cluster>/
        dispatches/<dispatcher's id>/
            ids         ids of the dispatcher and of all its jobs, a line each
            start.json  the request by which the dispatcher is started
            _ray_pkg_…  the archives of the dispatch
        lives/4/
            renewed     this allocation goes on with the dispatches of the one before
            run/871.0/  its files, see ``slurm/run_folder.py``; ``871.1`` after a requeue
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Dict, Iterable, Iterator, List, Mapping, Set, Tuple

from .attempts import first_id
from .rows import JobRow, JobRows, job_rows
from .states import is_active, is_pending
from .variables import LIFE, RUN

#: Names in the folder of a cluster, of an allocation and of a run.
DISPATCHES, IDS, RENEWED, TABLE = "dispatches", "ids", "renewed", "jobs.json"
START = "start.json"
#: Ray's own error of a start that it gave up, which counts as no attempt.
_NOT_STARTED = "JOB_SUPERVISOR_ACTOR_START_TIMEOUT"
#: The error of a job that its allocation has ended, in the place of Ray's.
ALLOCATION_ENDED = "NEMO_RUN_RAY_ALLOCATION_ENDED"


@dataclass(frozen=True)
class EarlierRun:
    """What a run that is over has left.

    Attributes:
        table: Ray's job table as JSON; empty if there was none.
        written_at: seconds since the epoch, when the table was written last.
        why: why the run was over; empty when nobody could say so.
        is_over: whether nothing of it goes on, as far as anybody can know.
    """

    table: str
    written_at: float
    why: str = ""
    is_over: bool = True


def rows_of(runs: Iterable[EarlierRun], kept: Set[str]) -> JobRows:
    """The rows of kept dispatches, as they are now that their allocations have ended.

    Args:
        runs: the first one first.
        kept: first ids of the dispatches' dispatchers and jobs.
    """
    found: Dict[str, JobRow] = {}
    for run in runs:
        with suppress(ValueError):
            for row in job_rows(json.loads(run.table or "[]")):
                name = str(row["submission_id"])
                if first_id(name) in kept:
                    found[name] = _ended(row, run)
    return found


def rows_before(life: str, run: str) -> JobRows:
    """The rows of kept dispatches from before a run, read on one of its nodes.

    Args:
        life: folder of the allocation.
        run: folder of the run.

    Raises:
        OSError: a file is there and cannot be read now. Without it, jobs would run again.
    """
    return rows_of([_read(folder) for folder in _others(life, run)], kept_ids(life))


def rows_of_job(env: Mapping[str, str]) -> JobRows:
    """The rows of kept dispatches from before the run in which a job is.

    Args:
        env: of the job; empty rows where its cluster is no such allocation.

    Raises:
        OSError: a file is there and cannot be read now.
    """
    life, run = env.get(LIFE), env.get(RUN)
    return rows_before(life, run) if life and run and goes_on(life, run) else {}


def goes_on(life: str, run: str) -> bool:
    """Whether a run goes on with the dispatches of those before it.

    Raises:
        OSError: the folders cannot be read now.
    """
    return is_there(os.path.join(life, RENEWED)) or bool(_others(life, run))


def kept_dispatches(life: str) -> List[str]:
    """The folders of the dispatches that are kept for the cluster of an allocation.

    Raises:
        OSError: they cannot be read now.
    """
    folder = os.path.join(os.path.dirname(os.path.dirname(life)), DISPATCHES)
    found = (os.path.join(folder, name) for name in sorted(_names(folder)))
    return [path for path in found if is_there(os.path.join(path, IDS))]


def kept_ids(life: str) -> Set[str]:
    """First ids of the dispatchers and jobs of all kept dispatches.

    Raises:
        OSError: they cannot be read now.
    """
    found: Set[str] = set()
    for folder in kept_dispatches(life):
        with open(os.path.join(folder, IDS), encoding="utf-8") as file:
            found |= set(file.read().split())
    return found


def _ended(row: JobRow, run: EarlierRun) -> JobRow:
    """A row as it is without its Ray: what had not ended has ended with it."""
    if not is_active(row) or not run.is_over:
        return row
    words = f": {run.why}" if run.why else ""
    changes: Mapping[str, object] = {
        "status": "FAILED",
        "end_time": int(run.written_at * 1000),
        "error_type": _NOT_STARTED if is_pending(row) else ALLOCATION_ENDED,
        "message": f"its allocation of Slurm has ended{words}",
    }
    return {**row, **changes}  # type: ignore[typeddict-item]


def _others(life: str, run: str) -> List[str]:
    """The folders of the runs before a run whose dispatches go on in it, the first one first."""
    own = os.path.basename(os.path.normpath(run))  # Slurm gives a number once
    return [folder for folder in _runs(life) if os.path.basename(folder) != own]


def _runs(life: str) -> Iterator[str]:
    """The folders of all runs whose dispatches go on in an allocation, the first one first."""
    folders = [life]
    while is_there(os.path.join(folders[-1], RENEWED)):
        parent, number = os.path.split(folders[-1])
        folders.append(os.path.join(parent, str(int(number) - 1)))
    for folder in reversed(folders):
        for name in sorted(_names(os.path.join(folder, "run")), key=_place):
            yield os.path.join(folder, "run", name)


def _names(folder: str) -> List[str]:
    with suppress(FileNotFoundError):
        return os.listdir(folder)
    return []


def is_there(path: str) -> bool:
    """Whether there is a file; one that cannot be looked for is not taken for absent."""
    with suppress(FileNotFoundError, NotADirectoryError):
        os.stat(path)
        return True
    return False


def _place(name: str) -> Tuple[int, ...]:
    return tuple(int(part) for part in name.split(".") if part.isdigit())


def _read(folder: str) -> EarlierRun:
    table, written_at, why = "", 0.0, ""
    path = os.path.join(folder, TABLE)
    absent = suppress(FileNotFoundError, NotADirectoryError)
    with absent, open(path, encoding="utf-8", errors="replace") as file:
        table, written_at = file.read(), os.fstat(file.fileno()).st_mtime
    end = os.path.join(folder, "end.json")
    with absent, suppress(ValueError), open(end, encoding="utf-8") as file:
        why = str(json.load(file)["why"])
    return EarlierRun(table, written_at, why)
