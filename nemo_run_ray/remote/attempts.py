"""Ids of a job's attempts, what a row of Ray's job table means for decisions, and claims.

An attempt of a job is a row of the table. A *claim* is one too: it takes the id of the next
attempt, so that no process can start it any more, and says why (``CLAIM_KEY`` in its metadata).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Dict, Mapping, Optional, Sequence, Tuple

from .rows import NONCE_KEY, JobRow, nonce_of
from .spec import SUBMISSION_ID
from .status import JobStatus, status_of_row

#: Key in a job's metadata: why it is a claim.
CLAIM_KEY = "nemo_run_ray_claim"
RETRIES_KEY, PERMANENT_KEY = "nemo_run_ray_retries", "nemo_run_ray_permanent"
#: Key of the id of the dispatcher that hands the job over.
DISPATCHER_KEY = "nemo_run_ray_dispatcher"
#: Texts of a claim; any other text is the reason why Ray refuses the attempt.
CANCELLED, NOT_PLACED = "cancelled", "not placed in time"
#: Seconds between two requests to stop the same attempt, and for how long a stop of what waits for
#: room is repeated before Ray is trusted to hold it back until the start.
STOP_AGAIN_S, STOP_TRUST_S = 3.0, 6.0
#: Seconds from a node's death until nothing runs there: a node that was cut off continues until its
#: raylet has noticed, Ray's ``gcs_rpc_server_reconnect_timeout_s`` (60), and its processes for some
#: moments more.
NODE_DEAD_S = 75.0
#: An attempt's id; more digits are not of this package, and int() refuses thousands of them.
_ATTEMPT = re.compile(r"([^@]*)(?:@([2-9]|[1-9][0-9]{1,8}))?")
#: Kinds of files of an array in Ray's folder of logs, which all of its attempts have in common.
JOURNAL_FILE, HOSTS_FILE, RESULTS_FILE, STATES_FILE = "journal", "hosts", "results", "states"


class JobExit(IntEnum):
    """Exit codes of this package's own programs: the dispatcher and the driver of an array."""

    SUCCEEDED = 0
    #: Of a dispatcher: its cluster no longer knows it, or its dashboard cannot be found.
    WRONG_CLUSTER = 3
    #: All is decided, and some jobs or elements did not succeed.
    SOME_FAILED = 8
    #: Of a dispatcher: the remaining jobs need more time than the allocation has.
    OUT_OF_TIME = 9


@dataclass(frozen=True)
class Attempt:
    """One row of the job table, as far as decisions need it.

    Attributes:
        status: what the row says.
        nonce: of the submission that made it.
        posted_at: seconds since the epoch, when Ray got it.
        ended_at: the same of its end; 0 while it goes on.
        exit_code: of its command.
        claim: why it is a claim and no attempt; empty for an attempt.
        retries: further attempts that its own experiment gives it.
        permanent_exit_codes: that end its attempts.
    """

    status: JobStatus
    nonce: str = ""
    posted_at: float = 0.0
    ended_at: float = 0.0
    exit_code: Optional[int] = None
    claim: str = ""
    retries: int = 0
    permanent_exit_codes: Tuple[int, ...] = ()

    @property
    def is_live(self) -> bool:
        return not self.claim and not self.status.state.is_terminal


def attempt_id(first: str, number: int) -> str:
    """Submission id of a job's n-th attempt, from 1.

    No job's own id holds an ``@``. A dot would do harm: Ray names a logger after each id, and the
    first attempt's log would get the lines of the others.
    """
    return first if number == 1 else f"{first}@{number}"


def first_id(submission_id: str) -> str:
    """Submission id of the first attempt of the same job."""
    return submission_id.partition("@")[0]


def file_of(submission_id: str, kind: str) -> str:
    """Name of another file of an array in Ray's folder of logs, the same for all of its attempts.

    Args:
        submission_id: of any attempt.
        kind: ``JOURNAL_FILE``, ``HOSTS_FILE``, ``RESULTS_FILE`` or ``STATES_FILE``.
    """
    return f"nemo_run_ray-{first_id(submission_id)}.{kind}"


def started_as(entrypoint: str, submission_id: str) -> str:
    """The entrypoint of a dispatched job with the id of its attempt in the place that is for it."""
    return entrypoint.replace(SUBMISSION_ID, submission_id)


def attempts_of(ids: Sequence[str], table: Mapping[str, Attempt]) -> Dict[str, Dict[int, Attempt]]:
    """The rows of these ids' attempts, by id and number."""
    wanted = set(ids)
    found: Dict[str, Dict[int, Attempt]] = {first: {} for first in ids}
    for submission_id, row in table.items():
        match = _ATTEMPT.fullmatch(submission_id)
        if match and match[1] in wanted:
            found[match[1]][int(match[2] or 1)] = row
    # They are in the order of their numbers, so that the table's order does not matter.
    return {first: dict(sorted(rows.items())) for first, rows in found.items()}


def attempt_of_row(row: JobRow) -> Attempt:
    """The attempt, or claim, of a row of ``GET /api/jobs/``."""
    metadata = row.get("metadata") or {}
    code = row.get("driver_exit_code")
    return Attempt(
        status=status_of_row(row),
        nonce=nonce_of(row),
        posted_at=(row.get("start_time") or 0) / 1000,
        ended_at=(row.get("end_time") or 0) / 1000,
        exit_code=code if isinstance(code, int) else None,
        claim=str(metadata.get(CLAIM_KEY, "")),
        retries=next(iter(_numbers(metadata.get(RETRIES_KEY, ""))), 0),
        permanent_exit_codes=_numbers(metadata.get(PERMANENT_KEY, "")),
    )


def _numbers(text: Any) -> Tuple[int, ...]:
    """The numbers of ``1,2``; none when another program wrote the text."""
    try:
        return tuple(int(number) for number in str(text).split(",") if number)
    except ValueError:
        return ()


def claim_body(submission_id: str, nonce: str, why: str) -> Dict[str, Any]:
    """The body of a request that takes an id, so that nothing can be started under it."""
    return {
        "submission_id": submission_id,
        "entrypoint": "true",
        "metadata": {NONCE_KEY: nonce, CLAIM_KEY: why},
    }


def node_dead_s() -> float:
    """``NODE_DEAD_S``, or less where this Ray's raylets notice sooner that they are alone."""
    try:
        # Ray writes the name in two cases.
        given = os.environ["RAY_gcs_rpc_server_reconnect_timeout_s"]  # noqa: SIM112
        return float(given) + NODE_DEAD_S - 60.0
    except (KeyError, ValueError):
        return NODE_DEAD_S
