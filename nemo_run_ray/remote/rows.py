"""What Ray's job table and a group's driver tell, as rows whose keys have names and types."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Sequence, TypedDict


class JobRow(TypedDict, total=False):
    """A job as ``GET /api/jobs/`` gives it: those of its keys that are read here.

    Keys:
        submission_id: ``None`` of a job that was not submitted by the Jobs API.
        job_id: Ray's number of the program that it runs; ``None`` of one that is not Ray's.
        status: a word of Ray's, see ``states.FROM_RAY``.
        message: why, in Ray's words, with the end of the log.
        error_type: of a failure, see ``states.FROM_RAY_ERROR``.
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
    metadata: Optional[Dict[str, str]]
    runtime_env: Optional[Dict[str, Any]]
    driver_node_id: Optional[str]
    driver_exit_code: Optional[int]


#: A job table: rows by submission id.
JobRows = Mapping[str, JobRow]


class ReplicaRow(TypedDict):
    """One replica of a group, as its driver last saw it.

    Keys:
        state: a ``Life``'s value.
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
        may_be_left: by a node's id the elements that are shown as cancelled and whose processes may
            go on there; ``None`` while the states are not those that this driver has written.
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
    may_be_left: Optional[Dict[str, Sequence[int]]]


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
