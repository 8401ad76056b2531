"""Rows of Ray's job table, and of the drivers' status files, with names and types.

Whoever answers may send anything as JSON. It is checked here, against shapes.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any, Dict, List, Mapping, Optional, TypedDict


class JobRow(TypedDict, total=False):
    """A job as ``GET /api/jobs/`` gives it: those of its keys that are read here.

    Keys:
        submission_id: ``None`` of a job that was not submitted by the Jobs API.
        job_id: Ray's number of the program that it runs; ``None`` of one that is not Ray's.
        status: a word of Ray's, see ``status.FROM_RAY``.
        message: why, in Ray's words, with the end of the log.
        error_type: of a failure, see ``status.FROM_RAY_ERROR``.
        start_time, end_time: milliseconds since the epoch; when it was posted, and when it ended.
        driver_node_id: hexadecimal id of the node of its driver.
        driver_exit_code: of its command.
    """

    submission_id: Optional[str]
    job_id: Optional[str]
    status: str
    entrypoint: str
    message: Optional[str]
    error_type: Optional[str]
    start_time: Optional[int]
    end_time: Optional[int]
    metadata: Optional[Mapping[str, str]]
    runtime_env: Optional[Dict[str, Any]]
    driver_node_id: Optional[str]
    driver_exit_code: Optional[int]


#: Keys in a job's metadata: the nonce of its submission, and the lock of its end record, see
#: ``end_record.py``.
NONCE_KEY, LOCK_KEY = "nemo_run_ray", "nemo_run_ray_lock"
#: A job table: rows by submission id.
JobRows = Mapping[str, JobRow]
#: The shapes of a row's values. A value of another shape is left out.
_JOB = {
    "submission_id": str,
    "job_id": str,
    "status": str,
    "entrypoint": str,
    "message": str,
    "error_type": str,
    "start_time": int,
    "end_time": int,
    "metadata": {str: str},
    "runtime_env": {str: object},
    "driver_node_id": str,
    "driver_exit_code": int,
}
#: The largest number of milliseconds since the epoch that is taken for a time: the year 2100.
_TIME_MAX_MS = 4_102_444_800_000
#: Larger numbers of JSON are no floats.
_NUMBER_MAX = 1e300


def job_row(value: Any) -> Optional[JobRow]:
    """A row of a job table with only the values of the right types.

    ``None`` for a program that was not submitted as a job.

    Raises:
        ValueError: it is no row at all.
    """
    if not isinstance(value, dict):
        raise ValueError("a row of the job table is no object")
    row = {name: value[name] for name, shape in _JOB.items() if fits(value.get(name), shape)}
    for name in ("start_time", "end_time"):
        if not 0 <= row.get(name, 0) <= _TIME_MAX_MS:
            del row[name]
    return row if row.get("submission_id") else None  # type: ignore[return-value]


def job_rows(values: Any) -> List[JobRow]:
    """The rows of a job table that are of submitted jobs.

    Raises:
        ValueError: it is no job table.
    """
    if not isinstance(values, list):
        raise ValueError("the job table is no list")
    return [row for row in map(job_row, values) if row is not None]


def rows_in(jobs_json: str) -> JobRows:
    """The rows of a kept job table, by submission id; empty for a text that is none."""
    with contextlib.suppress(ValueError):
        return {str(row["submission_id"]): row for row in job_rows(json.loads(jobs_json))}
    return {}


def nonce_of(row: JobRow) -> str:
    """The nonce of the submission that made a row of Ray's job table; empty if it has none."""
    return str((row.get("metadata") or {}).get(NONCE_KEY, ""))


def lock_of_row(row: JobRow) -> str:
    """The lock of a job's end record; empty if nothing can prove its end."""
    return str((row.get("metadata") or {}).get(LOCK_KEY, ""))


def fits(value: Any, shape: Any) -> bool:
    """Whether a value of JSON has a shape.

    A shape is a type; a dict of shapes by key; a list of one shape, for any number of items, or of
    several, for as many; or a tuple of shapes, one of which fits. ``float`` is any finite number,
    ``{str: shape}`` a dict with any keys.
    """
    if isinstance(shape, tuple):
        return any(fits(value, each) for each in shape)
    if isinstance(shape, list):
        shapes = shape * len(value) if isinstance(value, list) and len(shape) == 1 else shape
        return (
            isinstance(value, list) and len(value) == len(shapes) and all(map(fits, value, shapes))
        )
    if isinstance(shape, dict) and str in shape:
        return isinstance(value, dict) and all(fits(each, shape[str]) for each in value.values())
    if isinstance(shape, dict):
        return isinstance(value, dict) and all(fits(value.get(key), shape[key]) for key in shape)
    if shape is float:
        return type(value) in (int, float) and -_NUMBER_MAX < value < _NUMBER_MAX  # no NaN
    if shape is int:
        return type(value) is int and abs(value) < 2**63
    return value is None if shape is None else isinstance(value, shape)


def status_file_name(submission_id: str) -> str:
    """Name of the file with the rows of a group or an array, in Ray's folder of logs."""
    return f"nemo_run_ray-{submission_id}.json"


class ReplicaRow(TypedDict):
    """One replica of a group, as its driver last saw it.

    Keys:
        state: a ``ReplicaState``'s value.
        node, host, address: of its node; empty before it has one.
        exit_code: ``None`` before its end.
        waits_for: what the probe of a service got last, while it is not ready.
    """

    role: str
    replica: int
    service: bool
    state: str
    node: str
    host: str
    address: str
    exit_code: Optional[int]
    waits_for: str


class ArrayRows(TypedDict):
    """An array, as its driver last saw it.

    Keys:
        elements: how many there are.
        elements_per_s: how many ended in a second, of late.
        left_s: seconds until the last one has ended, at that rate; ``None`` when none has ended.
        failures: index, exit code and reason of the first elements that failed.
    """

    elements: int
    succeeded: int
    failed: int
    cancelled: int
    running: int
    waiting: int
    elements_per_s: float
    left_s: Optional[float]
    failures: List[List[Any]]


class GroupRows(TypedDict):
    """A group, as its driver last saw it.

    Keys:
        phase: a ``Phase``'s value.
        waits_for_room: what does not fit, in words; empty when it has its nodes.
        roles: one row for every replica.
    """

    phase: str
    waits_for_room: str
    roles: List[ReplicaRow]


#: The shapes of what the driver of a group and that of an array have written.
GROUP = {
    "phase": str,
    "waits_for_room": str,
    "roles": [
        {
            "role": str,
            "replica": int,
            "service": bool,
            "state": str,
            "node": str,
            "host": str,
            "address": str,
            "exit_code": (None, int),
            "waits_for": (None, str),
        }
    ],
}
ARRAY = {
    "elements": int,
    "succeeded": int,
    "failed": int,
    "cancelled": int,
    "running": int,
    "waiting": int,
    "elements_per_s": float,
    "left_s": (None, float),
    "failures": [[int, (None, int), str]],
}
