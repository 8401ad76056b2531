"""The elements of an array, one by one: how they are, and how some of them are cancelled."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_run.config import SCRIPTS_DIR

from nemo_run_ray.dashboard.http import repeat
from nemo_run_ray.dashboard.jobs import PATIENCE_S
from nemo_run_ray.errors import ClusterError, ConfigError, JobError, NemoRunRayError, Unanswered
from nemo_run_ray.experiment.snapshot import Snapshot
from nemo_run_ray.remote.attempts import NODE_DEAD_S, RESULTS_FILE, STATES_FILE, JobExit
from nemo_run_ray.remote.rows import ARRAY, GROUP, NONCE_KEY, ArrayRows, GroupRows, fits
from nemo_run_ray.remote.status import JobStatus, Life, Phase, Reason

if TYPE_CHECKING:
    from nemo_run_ray.experiment.job import RemoteJob
    from nemo_run_ray.remote.array.cancel_request import Range
    from nemo_run_ray.remote.array.elements import Stretch
    from nemo_run_ray.remote.status import JobStatus

#: States of an element, as a user selects them.
STATES = ("waiting", "running", "succeeded", "failed", "cancelled", "lost")
#: States in which an element is not over.
ACTIVE = ("waiting", "running")
_OVER = tuple(state for state in STATES if state not in ACTIVE)
#: Seconds until the job of a request has begun, beyond those until the driver has taken it.
_BEGUN_S = 60.0
#: Seconds beyond the grace period until elements that were cancelled have ended, also on a node
#: that has died.
_END_MARGIN_S = NODE_DEAD_S + 60.0
_LOOK_AGAIN_S = 1.0
#: Characters of a request: Linux takes 128 KiB as one word of a command.
_REQUEST_MAX = 2**16


@dataclass(frozen=True)
class Element:
    """One element of an array, as its driver last saw it.

    Attributes:
        index: from 0.
        state: one of ``STATES``. ``running`` ones have a host, where they may wait for a slot;
            ``lost`` ones were not over when their job ended.
        attempts: how often it was given to a host.
        exit_code: of the last attempt that has ended; ``None`` before that.
        reason: why it failed, in words.
        values: its own, by field, where the experiment's folder has them.
    """

    index: int
    state: str
    attempts: int
    exit_code: int | None
    reason: str
    values: Mapping[str, Any]


def elements_of(job: RemoteJob, status: JobStatus, selection: str = "") -> list[Element]:
    """The selected elements of an array.

    Args:
        job: the array.
        status: where it is.
        selection: a state, or indices such as ``3,7-9``; empty is all.

    Raises:
        ConfigError: the selection cannot be understood.
        JobError: the job is no array, has no such element, or nothing is known of its elements.
        ClusterError: the cluster does not answer.
    """
    stretches = _selected(job, status, selection)
    reasons = failures_of(job, status)
    values = _values(job, [(found.first, found.last) for found in stretches])
    found = []
    for first, last, state, attempts, code in stretches:
        exit_code = code if code or state == "succeeded" else None
        for index in range(first, last + 1):
            reason = (reasons.get(index) or f"exit code {code}") if state == "failed" else ""
            own = values.get(index, {})
            found.append(Element(index, state, attempts, exit_code, reason, own))
    return found


def cancel_elements(job: RemoteJob, selection: str) -> list[Element]:
    """End some elements of an array that goes on, and wait until they have ended.

    Args:
        job: the array.
        selection: ``waiting`` leaves those alone that begin meanwhile; else as for ``elements_of``.

    Returns:
        The elements that were selected, as they are then.

    Raises:
        ClusterError: the cluster does not answer, or the array's driver does not.
        ConfigError, JobError: as for ``elements_of``; or the selection holds none that can end.
    """
    if selection in ("", *_OVER):
        raise ConfigError(
            f"The elements to cancel are {selection!r}; expected is waiting, running, or indices "
            "such as 3,7-9. To cancel the whole array, cancel the job."
        )
    chosen = repeat(
        lambda: _selected(job, job.look(Snapshot(is_fresh=True)), selection), PATIENCE_S
    )
    indices = ",".join(f"{element.first}-{element.last}" for element in chosen)
    if any(element.state in ACTIVE for element in chosen):
        _request(job, _merged((element.first, element.last) for element in chosen), selection)
        _wait_for_end(job, indices, ("waiting",) if selection == "waiting" else ACTIVE)
    if not chosen:
        return []
    return repeat(lambda: elements_of(job, job.look(Snapshot(is_fresh=True)), indices), PATIENCE_S)


def _request(job: RemoteJob, ranges: Sequence[Range], selection: str) -> None:
    """Let a small job on the head pass a request on to the driver, which ends when it is taken."""
    from nemo_run_ray.experiment.archives import package_archive  # few look at arrays
    from nemo_run_ray.plan.job import entrypoint
    from nemo_run_ray.remote.array.cancel_request import KIND, TAKEN_S, request_id

    only_waiting = selection == "waiting"
    if only_waiting:  # the driver leaves the others alone
        ranges = [(0, ranges[-1][1])]
    request = json.dumps({"cancel": ranges, "only_waiting": only_waiting})
    if len(request) > _REQUEST_MAX:
        raise ConfigError(
            f"The elements to cancel of {job.name!r} are {len(ranges):,} ranges, too many for one "
            "request. Cancel them in several steps."
        )
    api, nonce = job.api(), secrets.token_hex(8)
    package = package_archive()
    if not api.has_package(package.name):
        api.put_package(package.name, package.pack())
    name = request_id(job.id, nonce)
    body = {
        "submission_id": name,
        "entrypoint": entrypoint(None, [KIND, name, request]),
        "runtime_env": {"py_modules": [package.uri]},
        "metadata": {NONCE_KEY: nonce, "nemo_run_job": f"{KIND} of {job.name}"},
    }
    with contextlib.suppress(Unanswered):  # the table says whether it has arrived
        api.post(body)
    why = f"The request to cancel elements of the array {job.name!r} is not answered. Try again."

    def is_taken() -> bool:
        row = api.job(name)
        if row is not None and row["status"] in ("FAILED", "STOPPED"):
            raise ClusterError(
                f"The driver of the array {job.name!r} has not taken the request to cancel "
                f"elements. Look at the array's log, and at that of the job {name}, and try again."
            )
        is_over = row is not None and row["status"] == "SUCCEEDED"
        return is_over or job.look(Snapshot(is_fresh=True)).state.is_terminal

    _until(is_taken, TAKEN_S + _BEGUN_S, why)


def _wait_for_end(job: RemoteJob, indices: str, states: Sequence[str]) -> None:
    def is_over() -> bool:
        found = _selected(job, job.look(Snapshot(is_fresh=True)), indices)
        return not any(element.state in states for element in found)

    _until(
        is_over,
        job.record.grace_s + _END_MARGIN_S,
        f"Elements of the array {job.name!r} were cancelled and have not ended yet. Look again "
        "with nemo-run-ray status --elements.",
    )


def ranges_of(selection: str, count: int, name: str) -> list[Range]:
    """Indices such as ``3,7-9``, as first and last ones.

    Args:
        selection: the text.
        count: of the array's elements.
        name: of the array, for errors.

    Raises:
        ConfigError: the text is no such list.
        JobError: an element is not there.
    """
    ranges = []
    for part in selection.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or not (last if dash else first).isdecimal():
            raise ConfigError(
                f"{selection!r} selects no elements of an array; expected is one of "
                f"{', '.join(STATES)}, or indices such as 3,7-9."
            )
        found = int(first), int(last or first)
        if found[0] > found[1] or found[1] >= count:
            raise JobError(
                f"The array {name!r} has no element {part.strip()}; it has 0 to {count - 1}."
            )
        ranges.append(found)
    return ranges


def array_file(job: RemoteJob, status: JobStatus, kind: str) -> list[str]:
    """The lines of a file that the driver of an array writes, from its node or as it was kept.

    Args:
        job: the array.
        status: where it is.
        kind: ``STATES_FILE`` or ``RESULTS_FILE``.

    Raises:
        ClusterError: the cluster does not answer.
    """
    if job.kept.has_array_file(kind):
        return job.kept.array_file(kind)
    if not status.node:
        return []
    lines = job.api().state.array_file(status.node, job.id, kind)
    # Ray has words of its own for a file that is not there.
    return lines if lines and lines[0].startswith("[") else []


def failures_of(job: RemoteJob, status: JobStatus) -> dict[int, str]:
    """The reasons of the first failures, by index."""
    told = elements(job, status)
    return {index: words for index, _, words in told["failures"]} if told else {}


def needs_keeping(job: RemoteJob) -> bool:
    """Whether a job is an array of which the experiment's folder has nothing yet."""
    return job.record.is_array and not job.kept.has_array_file(STATES_FILE)


def keep_array(job: RemoteJob, status: JobStatus) -> None:
    """Keep what the driver of an array has written in the experiment's folder.

    Raises:
        ClusterError: the cluster does not answer.
        OSError: the folder cannot be written to.
    """
    states = array_file(job, status, STATES_FILE)
    if states:  # else it had no elements yet, or they cannot be read now: another look asks again
        job.kept.keep_array_file(RESULTS_FILE, array_file(job, status, RESULTS_FILE))
        job.kept.keep_array_file(STATES_FILE, states)  # last: with it, all is kept


def _selected(job: RemoteJob, status: JobStatus, selection: str) -> list[Stretch]:
    """The selected elements, with the user's words for their states."""
    rows = stretches_of(job, status)
    if not isinstance(selection, str):
        raise ConfigError(
            f"{selection!r} selects no elements of an array; expected is a text: one of "
            f"{', '.join(STATES)}, or indices such as 3,7-9."
        )
    if selection in ("", *STATES):
        return [row for row in rows if selection in ("", row.state)]
    ranges = _merged(ranges_of(selection, rows[-1].last + 1, job.name))
    found, at = [], 0
    for first, last in ranges:
        while rows[at].last < first:
            at += 1
        for row in rows[at:]:
            if row.first > last:
                break
            found.append(row._replace(first=max(first, row.first), last=min(last, row.last)))
    return found


def stretches_of(job: RemoteJob, status: JobStatus) -> list[Stretch]:
    """All elements, with the user's words for their states.

    Raises:
        JobError: the job is no array, or nothing is known of its elements.
        ClusterError: the cluster does not answer.
    """
    if not job.record.is_array:
        raise JobError(f"The job {job.name!r} is no array and has no elements.")
    rows = list(_stretches(array_file(job, status, STATES_FILE)))
    if not rows and status.state.is_terminal:
        raise JobError(
            f"Nothing is known of the elements of {job.name!r}, which has ended. {status.message}"
        )
    if not rows:
        raise JobError(
            f"Nothing is known of the elements of {job.name!r} yet. {status.message} Look again "
            "when it runs."
        )
    return [row._replace(state=_word(row.state, status)) for row in rows]


def _stretches(lines: Iterable[str]) -> Iterator[Stretch]:
    from nemo_run_ray.remote.array.elements import Stretch  # few look at arrays

    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line)
            if fits(row, [int, int, str, int, int]):
                yield Stretch(*row)


def _word(state: str, status: JobStatus) -> str:
    """The user's word for a state of the driver's."""
    word = "running" if state == "leased" else state
    return "lost" if word in ACTIVE and status.state.is_terminal else word


def _values(job: RemoteJob, ranges: Sequence[Range]) -> dict[int, dict[str, Any]]:
    """The values of elements from the file that was sent, where it is still in the folder."""
    for path in sorted((Path(job.record.exp_dir) / job.record.job / SCRIPTS_DIR).glob("*")):
        with path.open(encoding="utf-8", errors="replace") as file:
            fields = _fields(file)
            if fields:
                wanted = (range(first, last + 1) for first, last in _merged(ranges))
                return dict(_read_values(file, fields, chain.from_iterable(wanted)))
    return {}


def _fields(lines: Iterable[str]) -> list[str]:
    """The fields that the header of an elements' file names; none of any other script."""
    header = next((line for line in lines if line.startswith('{"')), "{}")
    try:
        return list(json.loads(header).get("fields", ()))
    except ValueError:
        return []


def _read_values(
    lines: Iterable[str], fields: Sequence[str], wanted: Iterator[int]
) -> Iterator[tuple[int, dict[str, Any]]]:
    index = next(wanted, None)
    for number, line in enumerate(lines):
        if number == index:
            yield number, dict(zip(fields, json.loads(line), strict=False))
            index = next(wanted, None)
        if index is None:
            return


def _merged(ranges: Iterable[Range]) -> list[Range]:
    """The same elements in their order, each once."""
    found: list[Range] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(last, found[-1][1])
        else:
            found.append((first, last))
    return found


def _until(question: Callable[[], bool], within_s: float, words: str) -> None:
    """Ask until the answer is yes, also while the cluster does not answer."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        with contextlib.suppress(Unanswered):
            if question():
                return
        time.sleep(_LOOK_AGAIN_S)
    raise ClusterError(words)


#: What stands before the failures of elements in the detail of an array that has failed.
FIRST_FAILURES = "; its first failures:"


def roles(job: RemoteJob, status: JobStatus) -> GroupRows | None:
    """What is known of a group's roles: ``phase``, ``waits_for_room`` and a list ``roles``.

    ``None`` for a task alone, and for a group whose cluster does not answer.
    """
    if not job.record.has_roles:
        return None
    found: GroupRows | None = _told(job, status, GROUP)
    if found and status.state.is_terminal and found["phase"] != Phase.OVER.value:
        # The driver was killed, and what it wrote last is no longer so.
        found["phase"], found["waits_for_room"] = Phase.OVER.value, ""
        for row in found["roles"]:
            if row["state"] != Life.ENDED.value:
                row["state"] = Life.LOST.value
                row["waits_for"] = ""
    return found


def not_ready(group: GroupRows) -> list[str]:
    """The services of a group that are not ready for long, each with what its probe gets."""
    return [
        f"{row['role']}/{row['replica']} is {row['waits_for']}"
        for row in group["roles"]
        if row.get("waits_for")  # the driver may be of an older version
    ]


def elements(job: RemoteJob, status: JobStatus) -> ArrayRows | None:
    """What is known of an array's elements; ``None`` for other jobs, and where nothing is known."""
    found: ArrayRows | None = _told(job, status, ARRAY) if job.record.is_array else None
    return found


def failure_lines(array: ArrayRows) -> list[str]:
    """A line for each of the first elements that have failed."""
    return [
        f"  element {index}: {words or f'exit code {code}'}"
        for index, code, words in array["failures"]
    ]


def with_failures(job: RemoteJob, status: JobStatus) -> JobStatus:
    """The status; of an array that has failed with its first failures.

    The last lines of its log are of any elements, mostly of those that have succeeded.
    """
    # With another code its driver could not go on, and the log says why.
    if not status.tail or not status.detail.startswith(f"exit code {JobExit.SOME_FAILED}"):
        return status
    array = elements(job, status)
    lines = failure_lines(array) if array else []
    if not lines:
        return status
    return replace(status, detail="\n".join([f"{status.detail}{FIRST_FAILURES}", *lines]), tail="")


def _told(job: RemoteJob, status: JobStatus, shape: dict[str, Any]) -> Any:
    """What the job's driver wrote last, if it has this shape."""
    found: Any = None
    if job.kept.has_rows:
        found = job.kept.rows()
    elif status.node and status.reason not in (Reason.UNREACHABLE, Reason.CLUSTER_GONE):
        with contextlib.suppress(NemoRunRayError):  # a node may be known all the same
            found = job.api().state.rows(status.node, job.ran_as(status))
    return found if fits(found, shape) else None
