"""Jobs that are carried over from an allocation of Slurm to the one that continues it.

The head of an allocation keeps the job table of its Ray in a file, together with the rows that it
was handed on itself, see ``slurm/carry.py``. The next run takes over the rows of dispatches from
the newest run before it, so only one file is ever read::

    <cluster>/
        dispatches/<dispatcher's id>/
            ids         ids of the dispatcher and of all its jobs, a line each
            start.json  the request by which the dispatcher is started
            _ray_pkg_…  the archives of the dispatch
        lives/4/
            renewed     this allocation continues the dispatches of the one before
            run/871.0/  the files of a run, see ``slurm/folder.py``; ``871.1`` after a requeue
                jobs.json
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from typing import Iterator

from .spec import JobRow, JobRows, rows_in
from .status import first_id, is_active, is_pending

#: Names in the folder of a cluster, of an allocation and of a run.
DISPATCHES, IDS, RENEWED, TABLE = "dispatches", "ids", "renewed", "jobs.json"
START = "start.json"
#: Ray's own error of a start that it gave up, which counts as no attempt.
_NOT_STARTED = "JOB_SUPERVISOR_ACTOR_START_TIMEOUT"
#: The error of a job that its allocation has ended, instead of Ray's.
ALLOCATION_ENDED = "NEMO_RUN_RAY_ALLOCATION_ENDED"


def rows_of(
    table: str, kept: set[str], written_at: float, why: str = "", is_over: bool = True
) -> JobRows:
    """The rows of kept dispatches in the job table of an earlier run.

    Args:
        table: Ray's, as JSON; empty if there was none.
        kept: first ids of the dispatches' dispatchers and jobs.
        written_at: seconds since the epoch, when the table was written last.
        why: the reason why the run was over; empty if unknown.
        is_over: as far as anybody can know. A job that had not ended has ended with its run.
    """
    rows: dict[str, JobRow] = {}
    for name, row in rows_in(table).items():
        if first_id(name) in kept:
            rows[name] = row
            if is_over and is_active(row):
                rows[name] = {
                    **row,
                    "status": "FAILED",
                    "end_time": int(written_at * 1000),
                    "error_type": _NOT_STARTED if is_pending(row) else ALLOCATION_ENDED,
                    "message": f"its allocation of Slurm has ended: {why}".rstrip(": "),
                }
    return rows


def rows_before(allocation: str, run: str) -> JobRows:
    """The rows of kept dispatches from before a run, read on one of its nodes.

    Args:
        allocation: folder of the allocation; none are kept for a cluster without one.
        run: folder of the run.

    Raises:
        OSError: a file exists and cannot be read now. Without it, jobs would run again.
    """
    for folder in runs_before(allocation, run) if allocation and run else ():
        files = _names(folder)
        if TABLE in files:
            with open(f"{folder}/{TABLE}", encoding="utf-8", errors="replace") as file:
                table, written_at = file.read(), os.fstat(file.fileno()).st_mtime
            if not rows_in(table):  # torn by a crash
                continue
            why = ""
            if "end.json" in files:
                end = f"{folder}/end.json"
                with suppress(ValueError, KeyError), open(end, encoding="utf-8") as file:
                    why = json.load(file)["why"]
            kept: set[str] = set().union(*kept_dispatches(allocation).values())
            return rows_of(table, kept, written_at, why)
    return {}


def kept_dispatches(allocation: str) -> dict[str, set[str]]:
    """First ids of the dispatcher and the jobs of each dispatch that is kept, by its folder.

    Args:
        allocation: folder of an allocation of the cluster.

    Raises:
        OSError: they cannot be read now.
    """
    above, kept = f"{os.path.dirname(os.path.dirname(allocation))}/{DISPATCHES}", {}
    for name in _names(above):
        if IDS in _names(f"{above}/{name}"):
            with open(f"{above}/{name}/{IDS}", encoding="utf-8") as file:
                kept[f"{above}/{name}"] = set(file.read().split())
    return kept


def runs_before(allocation: str, run: str) -> Iterator[str]:
    """The folders of the runs whose dispatches a run continues, the newest one first."""
    own = os.path.basename(os.path.normpath(run))  # Slurm gives a number once
    folder = allocation
    while True:
        for name in reversed(_names(f"{folder}/run")):
            if name != own:
                yield f"{folder}/run/{name}"
        if RENEWED not in _names(folder):
            return
        parent, number = os.path.split(folder)
        folder = f"{parent}/{int(number) - 1}"


def _names(folder: str) -> list[str]:
    """The names in a folder, those of runs by their numbers; none without that folder.

    A folder that cannot be read now is not taken for missing.
    """
    with suppress(FileNotFoundError, NotADirectoryError):
        names = os.listdir(folder)
        return sorted(names, key=lambda name: [*map(int, re.findall("[0-9]+", name))])
    return []
