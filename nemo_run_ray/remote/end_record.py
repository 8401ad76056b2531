"""The end of a command: the last line of its job's log, with a proof of the exit code.

It is written once, and everyone reads it: a JSON record behind a mark with the nonce of the
submission. It is written when no process of the command exists any more, and carries a proof of the
exit code by a key that the command never sees. The lock of the key is in the job's metadata, so
whoever can read the job table can check the proof, and nobody has to keep a key.

Ray's job table counts. Where it is wrong (Ray 2.54 to 2.60) the proven record does:

- The agent of a node starts a job manager of its own when it is first asked for a log, also by
  Ray's dashboard. That one watches all jobs of that moment, and of each that fails within its
  first second it writes "failed to get job supervisor" over the exit code.
- A supervisor that cannot reach the head for 30 s, or whose head has another address since (Ray's
  issue 65608), cannot write the end. When the head is back it writes that the command could not be
  started, or Ray finds that the supervisor has died.
"""

from __future__ import annotations

import json
import signal
from contextlib import suppress
from time import monotonic
from typing import Callable, Dict, Iterable, NamedTuple, Optional, Tuple

from .spec import LOCK_KEY, JobRow, Json, nonce_of, read

#: Prefix of this package's lines in a job's log.
PREFIX = "nemo_run_ray| "
#: Begins the first line of a log of which only the end is kept.
CUT = f"{PREFIX}the first "
#: Says that every process of a cancelled job is proven to have ended.
NO_PROCESS_LEFT = "no process of it is left"
#: Says, with the nodes, that this is not proven.
MAY_BE_LEFT = "processes of it may be left"
#: Ray's errors that may hide an end.
_START_ERROR = "JOB_ENTRYPOINT_COMMAND_START_ERROR"
_ERRORS = {"JOB_SUPERVISOR_ACTOR_START_FAILURE", "JOB_SUPERVISOR_ACTOR_DIED", _START_ERROR}
#: The call of Ray's supervisor that writes a state: not before the command has ended.
RECORDS = "_job_info_client.put_status("


class EndRecord(NamedTuple):
    """The end of a command."""

    #: Exit code.
    code: int
    #: Name of a ``Reason``; empty if the command's own end is not known.
    cause: str
    #: The same for people.
    text: str
    #: Seconds since the epoch, when its job began on the node.
    began_at: float = 0.0
    ended_at: float = 0.0
    #: Places in which processes may remain; ``None`` if that is not known.
    left_on: Optional[Tuple[str, ...]] = ()
    #: See ``proof_of``; empty in a record that nothing proves.
    proof: str = ""

    def line(self, nonce: str) -> str:
        """The last line of the log, with its end."""
        return f"{end_mark(nonce)} {json.dumps(self._asdict())}\n"


def end_mark(nonce: str) -> str:
    """The beginning of the last line of a job's log: a reader that has it has all.

    The nonce keeps a command that prints such a line by chance from ending its own log.
    """
    return f"{PREFIX}end {nonce[:8]}"


def record_in(
    lines: Iterable[str], nonces: Iterable[str] = ("",), lock: str | None = None
) -> EndRecord | None:
    """The last record in the lines of a log, by one of these submissions and with this lock."""
    marks, found = tuple(map(end_mark, nonces)), None
    for line in lines:
        if line.startswith(marks):
            with suppress(ValueError, RecursionError):
                record: EndRecord = read(EndRecord, json.loads("{" + line.partition(" {")[2]))
                if lock is None or lock_of(record.proof) == lock:
                    found = record
    return found


def describe_exit(code: int) -> str:
    """The words ``exit code 3`` or ``killed by SIGSEGV (exit code 139)``."""
    with suppress(ValueError):  # a program may exit with any number
        name = signal.Signals(-code if code < 0 else code - 128).name
        return f"killed by {name} (exit code {code})"
    return f"exit code {code}"


def proof_of(key: str, code: int) -> str:
    """Proof that whoever has the key says this exit code; it proves no other one.

    It is a one-time signature of two chains of hashes. The code is how far one of them is shown and
    255 less the code how far the other is: from these follow only later places of each chain, and
    another code needs an earlier one. ``lock_of`` gives the ends of both, which anybody may know.
    """
    code %= 256  # what a parent process sees of it
    return f"{code}.{_hashed(f'{key}+', code + 1)}.{_hashed(f'{key}-', 256 - code)}"


def lock_of(proof: str) -> str:
    """The part that all proofs by one key share; empty if the text is no proof."""
    number, _, shown = proof.partition(".")
    up, _, down = shown.partition(".")
    if not number.isdecimal() or len(number) > 3 or int(number) > 255:
        return ""
    return _hashed(_hashed(up, 256 - int(number)) + _hashed(down, int(number) + 1), 1)


def _hashed(text: str, times: int) -> str:
    import hashlib  # takes milliseconds, and no command waits for it here

    for _ in range(times):
        text = hashlib.sha256(text.encode()).hexdigest()[:32]
    return text


class LostEnds:
    """Restores the rows of one job table.

    ``log_end`` gives the last ``LINES`` lines of a job's log, by its node's id and the job's;
    ``None`` when they cannot be had.
    """

    def __init__(self, log_end: Callable[[str, str], str | None]):
        self._log_end = log_end
        self._ends: Dict[str, Json] = {}  # by job and time of its end
        self._again_at: Dict[str, float] = {}  # of a node or a job
        self._next_at = 0.0  # for all requests

    def restored(self, row: JobRow) -> JobRow:
        """The row with the end that the job's log proves; the row itself when it proves none.

        A log is asked for only if a supervisor has died or could not write the end.
        """
        error, lock = row.get("error_type"), (row.get("metadata") or {}).get(LOCK_KEY, "")
        if (
            error not in _ERRORS
            or row.get("driver_exit_code") is not None
            or not row.get("driver_node_id")
            or not lock
            or (error == _START_ERROR and RECORDS not in str(row.get("message")))
        ):
            return row
        name, node = str(row["submission_id"]), str(row["driver_node_id"])
        key = f"{name} {row.get('end_time')}"
        if key not in self._ends:
            asked_at = monotonic()
            again_at = self._again_at
            if asked_at < max(self._next_at, again_at.get(name, 0.0), again_at.get(node, 0.0)):
                return row
            text = self._log_end(node, name)
            proven = record_in((text or "").splitlines(), [nonce_of(row)], lock)
            # A cancelled job has no end of its own: a node that shuts down tells its processes to
            # end, as Ray does for a cancelled job.
            if not proven or proven.cause in ("", "CANCELLED"):
                # A tenth of the time, after some quick answers: no look waits for every node of a
                # rack that is cut off.
                now = monotonic()
                took_s = now - asked_at
                self._next_at = max(self._next_at, now - 4.0) + took_s * 10
                # A node that does not answer, or a log without an end, is asked again when others
                # had their turn.
                self._again_at[node if text is None else name] = now + 15.0 + took_s * 20
                return row
            self._ends[key] = _end(int(proven.proof.partition(".")[0]), text)
        return {**row, **self._ends[key]}  # type: ignore[typeddict-item]


def _end(code: int, text: str | None) -> Json:
    """The fields of a row of such an end, as Ray would have written them."""
    if code == 0:
        return {
            "status": "SUCCEEDED",
            "error_type": None,
            "driver_exit_code": 0,
            "message": "Job finished successfully.",
        }
    return {
        "error_type": "JOB_ENTRYPOINT_COMMAND_ERROR",
        "driver_exit_code": code,
        "message": f"Job entrypoint command failed with exit code {code}, "
        f"last available logs (truncated to 20,000 chars):\n{text}",
    }
