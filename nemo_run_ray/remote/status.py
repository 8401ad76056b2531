"""The states of a job, why it is in one, and the tables from Ray's words to these."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Iterable, Mapping

from .end_record import RECORDS, describe_exit, record_in
from .spec import NONCE_KEY, JobRow, Json, nonce_of


class JobState(str, Enum):
    """The state of a job. ``reason`` beside it says why."""

    #: The cluster does not have it: its turn has not come, or it was never submitted.
    WAITING = "WAITING"
    #: Ray has it and has not started its command: no room yet, or its runtime environment is built.
    PENDING = "PENDING"
    #: Its command runs.
    RUNNING = "RUNNING"
    #: Its command ended with exit code 0; only Ray's own record says so, never a log.
    SUCCEEDED = "SUCCEEDED"
    #: It ended otherwise, or could not start.
    FAILED = "FAILED"
    #: It was stopped; unlike FAILED this was asked for.
    CANCELLED = "CANCELLED"
    #: The cluster that had it is gone with its records; unlike FAILED no client saw it end.
    LOST = "LOST"
    #: It cannot be asked right now; unlike LOST the next look may tell.
    UNKNOWN = "UNKNOWN"

    __str__ = str.__str__  # users print it

    @property
    def is_terminal(self) -> bool:
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.LOST)


_CORRECT = "Correct what the message names and run it again."


class Reason(str, Enum):
    """The reason of a job's state. The value is printed.

    Attributes:
        next_step: what a user can do; what is in braces the client knows. Empty where nothing went
            wrong, as for a job that waits for its turn.
    """

    next_step: str

    def __new__(cls, value: str, next_step: str = "") -> Reason:
        reason = str.__new__(cls, value)
        reason._value_, reason.next_step = value, next_step
        return reason

    NONE = ""
    EXIT_CODE = "exit code", "Its whole log: `nemo-run-ray logs {job}`."
    SIGNAL = "killed by a signal", "Its whole log: `nemo-run-ray logs {job}`."
    RUNTIME_ENV = (
        "the runtime environment could not be built",
        "Correct `runtime_env`. Ray's own message, with its traceback, is in the job's log.",
    )
    START_TIMEOUT = (
        "not started in time",
        "Ask for less, or raise RAY_JOB_START_TIMEOUT_SECONDS on the cluster.",
    )
    NOT_PLACED = (
        "not placed in time",
        "Ask for what a node has (`nemo-run-ray doctor`, with the cluster file's name or "
        "`--address URL`, shows it), or raise RayExecutor.pending_timeout_s.",
    )
    UNSCHEDULABLE = (
        "no node can ever take it",
        "Ask for resources and labels that nodes of this cluster have, or add such nodes: a task "
        "waits for them, a group does with RayExecutor(wait_for_nodes=True).",
    )
    NODE_DIED = (
        "its node or its supervisor died",
        "Look at the cluster's nodes in Ray's dashboard, then run it again.",
    )
    ALLOCATION = (
        "its allocation ended",
        "Run it again; `retries` lets it continue where the cluster is renewed.",
    )
    NOT_STARTED = "its command could not be started", _CORRECT
    NO_PROGRAM = (
        "a program is missing on its node",
        "Install it in the node's image, or name one that is there.",
    )
    NO_MODULE = (
        "a module cannot be imported on its node",
        "Let the executor's `packager` send it, install it in the node's image, or give it in "
        "`runtime_env`.",
    )
    REFUSED = "its request was refused", _CORRECT
    UNRECORDED = (
        "Ray could not record how it ended",
        "Look at the last lines of `nemo-run-ray logs {job}`, and run it again.",
    )
    NOT_READY = (
        "a service was not ready in time",
        "Look at the service's lines in the log, or raise the probe's timeout_s.",
    )
    SERVICE_ENDED = (
        "a service ended before the primaries",
        "Look at the service's lines in the log; `retries` starts it again.",
    )
    CANCELLED = "cancelled", "Run it again when you want it."
    UPSTREAM = "upstream", "Correct what it depends on and run the experiment again."
    WAITS = "waits for upstream jobs"
    TURN = "waits for its turn"
    RETRY = "waits for its next attempt", "Nothing needs to be done: it is started again by itself."
    UNDISPATCHED = (
        "its dispatcher is not at work",
        "`nemo-run-ray resume {experiment}` starts it again, and so does a client that waits.",
    )
    ROOM = "waits for room"
    BUILDING = "its runtime environment is being built"
    NOT_SUBMITTED = (
        "never reached the cluster",
        "`nemo-run-ray resume {experiment}` submits it now.",
    )
    TAKEN = (
        "its id belongs to another run's job",
        "Give the experiment another id or title and run it again.",
    )
    CLUSTER_GONE = (
        "its cluster is gone",
        "Run it again. What it wrote outside of the cluster, such as checkpoints on shared "
        "storage, is not lost.",
    )
    UNREACHABLE = (
        "its cluster cannot be reached",
        "Nothing is lost while the cluster lives: look again when it answers.",
    )
    OTHER = (
        "see Ray's message",
        "Ray gave no reason but its message above. The job's log may say more: "
        "`nemo-run-ray logs {job}`.",
    )

    @property
    def is_trouble(self) -> bool:
        """Whether something went wrong; waiting for a turn is no trouble."""
        return bool(self.next_step)


class Phase(str, Enum):
    """The phase of a group."""

    #: Waits for room for all of its replicas at once.
    PLACING = "placing"
    #: Has its nodes; ports and folders are made there.
    PREPARING = "preparing"
    #: Services run, not all of them are ready; no primary has started.
    SERVICES = "starting services"
    #: Every service was ready once; primaries run.
    PRIMARIES = "running"
    #: The outcome is known; what still runs has been told to end.
    ENDING = "ending"
    #: Nothing of it runs.
    OVER = "over"


class ReplicaState(str, Enum):
    """The state of a replica."""

    #: Its node has not answered yet.
    AWAITED = "awaited"
    #: Its ports and folders are there.
    PREPARED = "prepared"
    #: Its processes run.
    STARTED = "started"
    #: They run, and its probe has succeeded.
    READY = "ready"
    #: They were told to end.
    STOPPING = "stopping"
    #: They have ended; there is an exit code.
    ENDED = "ended"
    #: Its node or our process there is gone, and its processes with it.
    LOST = "lost"

    @property
    def runs(self) -> bool:
        return self in (ReplicaState.STARTED, ReplicaState.READY, ReplicaState.STOPPING)


#: Ray's JobStatus -> JobState. A word that is not here (a newer Ray) is UNKNOWN, never a guess.
FROM_RAY = {
    "PENDING": JobState.PENDING,
    "RUNNING": JobState.RUNNING,
    "SUCCEEDED": JobState.SUCCEEDED,
    "FAILED": JobState.FAILED,
    "STOPPED": JobState.CANCELLED,
}

#: Ray's JobErrorType -> why the job FAILED.
FROM_RAY_ERROR = {
    "RUNTIME_ENV_SETUP_FAILURE": Reason.RUNTIME_ENV,
    "JOB_SUPERVISOR_ACTOR_START_TIMEOUT": Reason.START_TIMEOUT,
    "JOB_SUPERVISOR_ACTOR_START_FAILURE": Reason.NOT_STARTED,
    "JOB_SUPERVISOR_ACTOR_UNSCHEDULABLE": Reason.UNSCHEDULABLE,
    "JOB_SUPERVISOR_ACTOR_UNKNOWN_FAILURE": Reason.OTHER,
    "JOB_SUPERVISOR_ACTOR_DIED": Reason.NODE_DIED,
    "JOB_ENTRYPOINT_COMMAND_START_ERROR": Reason.NOT_STARTED,
    "JOB_ENTRYPOINT_COMMAND_ERROR": Reason.EXIT_CODE,
    "NEMO_RUN_RAY_ALLOCATION_ENDED": Reason.ALLOCATION,  # of ``carried_over.py``
}

#: Python's words for what is missing, in a traceback or behind one.
_NO_MODULE = re.compile(r"\b(?:ModuleNotFoundError|ImportError)\b|\bNo module named\b")
_NO_PROGRAM = re.compile(r"\bexit code 127: |\bFileNotFoundError\b")
#: Lines that Ray itself writes at the head of every job's log, and the remote half's last one.
_FRAME = re.compile(
    r"^Running entrypoint for job |INFO job_manager\.py:\d+ -- |^nemo_run_ray\| end \w{8} "
)


@dataclass(frozen=True)
class JobStatus:
    """The status of a job at one moment."""

    state: JobState
    #: ``Reason.NONE`` while nothing is wrong.
    reason: Reason = Reason.NONE
    #: One paragraph for people.
    detail: str = ""
    #: Hexadecimal id of Ray's node that runs its driver; empty when it has none.
    node: str = ""
    #: From 1; 0 before the first.
    attempt: int = 1
    #: Names of the jobs that must succeed before it is started.
    waits_for: tuple[str, ...] = ()
    #: The last lines of its log, where Ray has them.
    tail: str = ""
    #: For the next step, its id and that of its experiment; empty on the cluster.
    job: str = field(default="", compare=False)
    experiment: str = field(default="", compare=False)

    @property
    def message(self) -> str:
        """Detail, the log's tail and the next step; the detail alone while nothing is wrong."""
        if not self.reason.is_trouble:
            return self.detail
        tail = f"; the last lines of its log:\n{self.tail}" if self.tail else ""
        next_step = self.reason.next_step.format(
            job=shlex.quote(self.job) if self.job else "<its id>",
            experiment=shlex.quote(self.experiment) if self.experiment else "<its experiment>",
        )
        return f"{self.detail or self.reason.value}{tail}\n{next_step}".strip()


def state_of_row(row: JobRow) -> JobState:
    """The state that Ray's word in a row stands for."""
    return FROM_RAY.get(str(row.get("status")), JobState.UNKNOWN)


def posted_at(row: JobRow) -> float:
    """When Ray was asked for the job of a row, in seconds since the epoch; 0 if it does not say."""
    return (row.get("start_time") or 0) / 1000


def is_pending(row: JobRow) -> bool:
    """Whether the job of a row may start."""
    return state_of_row(row) is JobState.PENDING


def is_running(row: JobRow) -> bool:
    """Whether the job of a row has started and not ended."""
    return state_of_row(row) is JobState.RUNNING


def is_active(row: JobRow) -> bool:
    """Whether the job of a row runs or may start."""
    return is_pending(row) or is_running(row)


def _of_start(text: str) -> Reason:
    """The reason why a command could not be started. It is for people and decides nothing."""
    if _NO_MODULE.search(text):
        return Reason.NO_MODULE
    return Reason.NO_PROGRAM if _NO_PROGRAM.search(text) else Reason.NOT_STARTED


def status_of_row(row: JobRow) -> JobStatus:
    """The status of a job by its row of Ray's job table; a pure function."""
    state = state_of_row(row)
    node = row.get("driver_node_id") or ""
    message = (row.get("message") or "").strip()
    if state is JobState.CANCELLED:
        return JobStatus(state, Reason.CANCELLED, "cancelled", node)
    if state is JobState.UNKNOWN:
        detail = (
            f"Ray calls the job's status {row.get('status')!r}, which this version does not know."
        )
        return JobStatus(state, Reason.OTHER, detail, node)
    if state is not JobState.FAILED:
        return JobStatus(state, node=node)
    code = row.get("driver_exit_code")
    if not code:  # it failed by Ray's word, or never ran its command
        error, last = str(row.get("error_type")), message.rpartition("\n")[2]
        reason = FROM_RAY_ERROR.get(error, Reason.OTHER)
        if error == "JOB_SUPERVISOR_ACTOR_START_FAILURE" and (
            node or "failed to get job supervisor" in message
        ):
            # Ray calls a supervisor so that did start and is gone, too; without a node it is what a
            # second monitor writes, see ``end_record.py``.
            reason = Reason.NODE_DIED if node else Reason.START_TIMEOUT
        elif error == "JOB_ENTRYPOINT_COMMAND_START_ERROR" and RECORDS in message:
            reason, message = Reason.UNRECORDED, last  # of Ray's traceback
        elif reason is Reason.NOT_STARTED:
            reason = _of_start(last)
        elif reason is Reason.UNSCHEDULABLE and "worker startup repeatedly failed" in message:
            reason = Reason.RUNTIME_ENV  # Ray had a node for it
        elif reason is Reason.RUNTIME_ENV:
            message = cause_of(message)
        return JobStatus(state, reason, f"{reason.value}: {message}".rstrip(": "), node)
    cause = describe_exit(code)
    reason = Reason.SIGNAL if cause.startswith("killed") else Reason.EXIT_CODE
    _, _, log = message.partition("last available logs (truncated to 20,000 chars):\n")
    record = record_in(log.splitlines())  # it explains and decides nothing
    if record and record.cause != "CANCELLED" and not record.text.startswith(cause):
        cause = f"{cause}: {record.text}"
        if record.cause not in ("NONE", "EXIT_CODE"):
            reason = Reason.__members__.get(record.cause, reason)
        if reason is Reason.NOT_STARTED:
            return JobStatus(state, _of_start(record.text), cause, node)
        if reason is Reason.RUNTIME_ENV:  # a traceback may follow
            return JobStatus(state, reason, cause, node)
    lines = [line for line in log.splitlines() if not _FRAME.search(line)]
    printed = [line for line in lines if not line.startswith("nemo_run_ray| ")]
    # A job with a line of ours needs no hint, unless that line only repeats the exit code.
    if printed == lines or (record and record.text.endswith(describe_exit(code))):
        # NeMo-Run's warning that it could not run the script of a function of `__main__`.
        first = [line for line in printed if "Failed to load external main: " in line]
        end = "\n".join([cause, *first, *printed[-3:]]).rstrip()  # fiddle adds a line
        hints = ((re.search(pattern, end), text) for pattern, text in _HINTS)
        cause += next((text.format(match[1]) for match, text in hints if match), "")
    return JobStatus(state, reason, cause, node, tail="\n".join(lines))


_SHIPS = "the executor's `packager` ships files to it"
#: Ends of a log behind the cause, and what they mean.
_HINTS = (
    (
        r"\A(killed by SIGKILL)",
        ", perhaps by the kernel since the node's memory was full: see Ray's dashboard",
    ),
    (  # of a Ray that the task starts itself: the job's archives are on the outer cluster
        "(Failed to download runtime_env file package gcs://)",
        ": a Ray that the task starts itself has no archives of this job's cluster; unset "
        "RAY_JOB_CONFIG_JSON_ENV_VAR, and RAY_ADDRESS, in the task before it starts one",
    ),
    (
        r"/nemo_run/code/([^':\n]+)'?: [^\n]*No such file[^\n]*\Z",
        f": {{}} is not on that node; {_SHIPS}",
    ),
    (
        r"\bNo module named '?([\w.]+)",
        f": the module '{{}}' is not on that node; {_SHIPS}, or give it in "
        "`runtime_env={{'pip': […]}}`",
    ),
    (
        r"\A(exit code 127)\b",
        f", with which a shell says that a command was not found on that node; {_SHIPS}, and "
        "`python` must name one that is there",
    ),
)


# ---------------------------------------------------------------- runtime environments

#: Lines of Ray, pip and podman that name the cause.
_CAUSE = re.compile(
    r"(Failed to install .* within the timeout of .* seconds)|^ERROR: (.*)|stderr=(.*)$"
)
#: The last line of a traceback, but for Ray's own.
_RAISED = re.compile(
    r"^(?:[\w.]+\.)?(?!SubprocessCalledProcessError|RuntimeEnvSetupError|ActorDiedError)"
    r"\w*(?:Error|Exception|Timeout)\b.*$"
)
#: Lines before the output of a program that failed, and before Ray's own reason.
_OUTPUT = re.compile(
    r"^Last \d+ lines of stdout:$|"
    r"\bRuntimeEnvSetupError: Failed to set up runtime environment\.$"
)


def cause_of(text: str) -> str:
    """The reason in the words of the program that failed: pip, uv, conda, podman or Ray itself.

    It is one line of Ray's message or log; the end of the text when no line of it is known.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    begins = [number for number, line in enumerate(lines, 1) if _OUTPUT.search(line)]
    printed = lines[begins[-1] :] if begins else []
    named = [match[match.lastindex or 0] for match in map(_CAUSE.search, lines) if match]
    if not named and not printed:
        named = list(filter(_RAISED.search, lines))
    cause = named[-1] if named else " / ".join((printed or lines)[-3:])
    if cause.endswith("No such file or directory: 'podman'"):
        return "podman is not on the PATH of that node's Ray; an image needs it"
    is_late = cause.endswith(("TimeoutError", "seconds"))
    return f"{cause}; raise `setup_timeout_seconds` in its `config`" if is_late else cause


# ---------------------------------------------------------------- attempts

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
JOURNAL_FILE, RESULTS_FILE, STATES_FILE = "journal", "results", "states"


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
    """One row of the job table, as far as decisions need it. Times are seconds since the epoch."""

    status: JobStatus
    nonce: str = ""
    posted_at: float = 0.0
    #: 0 before its end.
    ended_at: float = 0.0
    exit_code: int | None = None
    #: The reason of a claim; empty for an attempt.
    claim: str = ""
    #: Further attempts that its own experiment gives it.
    retries: int = 0
    permanent_exit_codes: tuple[int, ...] = ()

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
    """Name of a file of an array in Ray's folder of logs, the same for all attempts."""
    return f"nemo_run_ray-{first_id(submission_id)}.{kind}"


def attempts_of(ids: Iterable[str], table: Mapping[str, Attempt]) -> dict[str, dict[int, Attempt]]:
    """The rows of these ids' attempts, by id and number."""
    found: dict[str, dict[int, Attempt]] = {first: {} for first in ids}
    for submission_id, row in table.items():
        match = _ATTEMPT.fullmatch(submission_id)
        if match and match[1] in found:
            found[match[1]][int(match[2] or 1)] = row
    # They are in the order of their numbers, so that the table's order does not matter.
    return {first: dict(sorted(rows.items())) for first, rows in found.items()}


def attempt_of_row(row: JobRow) -> Attempt:
    """The attempt, or claim, of a row of ``GET /api/jobs/``."""
    metadata = row.get("metadata") or {}
    return Attempt(
        status=status_of_row(row),
        nonce=nonce_of(row),
        posted_at=posted_at(row),
        ended_at=(row.get("end_time") or 0) / 1000,
        exit_code=row.get("driver_exit_code"),
        claim=metadata.get(CLAIM_KEY, ""),
        retries=sum(_numbers(metadata.get(RETRIES_KEY, ""))),
        permanent_exit_codes=_numbers(metadata.get(PERMANENT_KEY, "")),
    )


def _numbers(text: str) -> tuple[int, ...]:
    """The numbers of ``1,2``, which another program may have written."""
    return tuple(map(int, re.findall(r"[0-9]{1,9}", text)))


def claim_body(submission_id: str, nonce: str, why: str) -> Json:
    """The body of a request that takes an id, so that nothing can be started under it."""
    return {
        "submission_id": submission_id,
        "entrypoint": "true",
        "metadata": {NONCE_KEY: nonce, CLAIM_KEY: why},
    }


def node_dead_s() -> float:
    """``NODE_DEAD_S``, or less where this Ray's raylets notice sooner that they are alone."""
    name = "RAY_gcs_rpc_server_reconnect_timeout_s"
    return NODE_DEAD_S - 60.0 + float(os.environ.get(name, 60))
