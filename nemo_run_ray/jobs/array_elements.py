"""The elements of an array, one by one: how they are, and how some of them are cancelled."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_run.config import SCRIPTS_DIR

from nemo_run_ray.errors import ClusterError, ConfigError, JobError
from nemo_run_ray.jobs.explanations import elements
from nemo_run_ray.jobs.snapshot import Snapshot
from nemo_run_ray.remote.array.wishes import Range, wish_name, wish_to_cancel

if TYPE_CHECKING:
    from nemo_run_ray.jobs.job import RemoteJob
    from nemo_run_ray.jobs.observed_job import ObservedJob
    from nemo_run_ray.remote.states import JobStatus

#: States of an element, as a user selects them.
STATES = ("waiting", "running", "succeeded", "failed", "cancelled", "lost")
#: States in which an element is not over.
_ACTIVE = ("waiting", "running")
#: Seconds until a driver has taken a wish; longer than one that is killed takes to be there again.
_HEARD_S = 120.0
#: Seconds beyond the grace period until elements that were cancelled have ended.
_END_MARGIN_S = 60.0
_LOOK_AGAIN_S = 1.0


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


def elements_of(job: ObservedJob, status: JobStatus, selection: str = "") -> list[Element]:
    """Those elements of an array that are selected.

    Args:
        job: the array.
        status: where it is.
        selection: a state, or indices such as ``3,7-9``; empty is all.

    Raises:
        ConfigError: the selection cannot be understood.
        JobError: the job is no array, has no such element, or nothing is known of its elements.
        ClusterError: the cluster does not answer.
    """
    rows = _rows(job, status)
    count = int(rows[-1][1]) + 1
    ranges = None if selection in ("", *STATES) else ranges_of(selection, count, job.name)
    told = elements(job, status)
    reasons = {index: words for index, _, words in told["failures"]} if told else {}
    found = []
    for first, last, word, attempts, code in rows:
        state = _state(word, status)
        if ranges is None and selection not in ("", state):
            continue
        for index in range(first, last + 1):
            if ranges is None or any(low <= index <= high for low, high in ranges):
                exit_code = code if code or state == "succeeded" else None
                reason = reasons.get(index, f"exit code {code}") if state == "failed" else ""
                found.append(Element(index, state, attempts, exit_code, reason, {}))
    values = _values(job, {element.index for element in found})
    return [replace(element, values=values.get(element.index, {})) for element in found]


def cancel_elements(job: RemoteJob, selection: str) -> list[Element]:
    """End some elements of an array that goes on, and wait until they have ended.

    Args:
        job: the array.
        selection: as for ``elements_of``.

    Returns:
        The selected elements, as they are then.

    Raises:
        ClusterError: the cluster does not answer, or the array's driver does not.
        ConfigError, JobError: as for ``elements_of``; or the job has not begun.
    """
    status = job.look(Snapshot(is_fresh=True))
    chosen = elements_of(job, status, selection)
    wanted = [element.index for element in chosen if element.state in _ACTIVE]
    if not wanted:
        return chosen
    api = job.api()
    name = wish_name(job.id, secrets.token_hex(8))
    api.put_package(name, wish_to_cancel(_in_ranges(wanted)))
    _until(
        lambda: not api.has_package(name) or job.look(Snapshot(is_fresh=True)).state.is_terminal,
        _HEARD_S,
        f"The driver of the array {job.name!r} has not taken the order to cancel elements; it does "
        "so when it is there again. Look at the job's log.",
    )
    indices = ",".join(map(str, (element.index for element in chosen)))

    def now() -> list[Element]:
        return elements_of(job, job.look(Snapshot(is_fresh=True)), indices)

    _until(
        lambda: not any(element.state in _ACTIVE for element in now()),
        job.record.grace_s + _END_MARGIN_S,
        f"Elements of the array {job.name!r} were cancelled and have not ended yet; look again "
        "with nemo-run-ray status.",
    )
    return now()


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


def _rows(job: ObservedJob, status: JobStatus) -> list[list[Any]]:
    """First and last index, state, attempts and exit code of elements in a row."""
    if not job.record.is_array:
        raise JobError(f"The job {job.name!r} is no array and has no elements.")
    rows = [json.loads(line) for line in array_file(job, status, "states")]
    if not rows:
        raise JobError(
            f"Nothing is known of the elements of {job.name!r} yet. {status.message}".strip()
        )
    return rows


def array_file(job: ObservedJob, status: JobStatus, kind: str) -> list[str]:
    """The lines of a file that the driver of an array writes, from its node or as it was kept.

    Args:
        job: the array.
        status: where it is.
        kind: ``states`` or ``results``.

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


def keep_array(job: ObservedJob, status: JobStatus) -> None:
    """Keep what the driver of an array has written, in the experiment's folder.

    Raises:
        ClusterError: the cluster does not answer.
        OSError: the folder cannot be written to.
    """
    if job.record.is_array:
        for kind in ("states", "results"):
            lines = array_file(job, status, kind)
            if lines and not job.kept.has_array_file(kind):
                job.kept.keep_array_file(kind, lines)


def _state(word: str, status: JobStatus) -> str:
    """The user's word for a state of the driver's."""
    state = "running" if word == "leased" else word
    return "lost" if state in _ACTIVE and status.state.is_terminal else state


def _values(job: ObservedJob, indices: set[int]) -> dict[int, dict[str, Any]]:
    """The values of elements from the file that was sent, where it is still in the folder."""
    found: dict[int, dict[str, Any]] = {}
    for path in sorted((Path(job.record.exp_dir) / job.record.job / SCRIPTS_DIR).glob("*.sh")):
        with path.open(encoding="utf-8") as file:
            fields: list[str] | None = None
            index = -1
            for line in file:
                if fields is not None and index + 1 in indices:
                    found[index + 1] = dict(zip(fields, json.loads(line), strict=False))
                if fields is not None:
                    index += 1
                elif line.startswith("{"):
                    fields = json.loads(line).get("fields")
        if found:
            return found
    return found


def _in_ranges(indices: list[int]) -> Iterator[Range]:
    """Sorted indices, as first and last ones of those in a row."""
    first = last = indices[0]
    for index in indices[1:]:
        if index != last + 1:
            yield first, last
            first = index
        last = index
    yield first, last


def _until(question: Any, within_s: float, words: str) -> None:
    deadline = time.monotonic() + within_s
    while not question():
        if time.monotonic() >= deadline:
            raise ClusterError(words)
        time.sleep(_LOOK_AGAIN_S)
