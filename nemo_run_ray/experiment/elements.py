"""Selections of an array's elements, and what is shown of them. Pure, but for ``values_of``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_run.config import SCRIPTS_DIR

from nemo_run_ray.errors import ConfigError, JobError
from nemo_run_ray.remote.spec import ArrayRows, GroupRows

#: First and last index of elements in a row.
Range = tuple[int, int]
#: States of an element, as a user selects them.
STATES = ("waiting", "running", "succeeded", "failed", "cancelled", "lost")
#: States in which an element is not over.
ACTIVE = ("waiting", "running")
#: Begins the failures of elements in the detail of an array that has failed.
FIRST_FAILURES = "; its first failures:"


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
    parts = selection.split(",") if isinstance(selection, str) else [""]
    for part in parts:
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


def merged_ranges(ranges: Iterable[Range]) -> list[Range]:
    """The same elements in their order, each once."""
    found: list[Range] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(last, found[-1][1])
        else:
            found.append((first, last))
    return found


def values_of(folder: Path, ranges: Sequence[Range]) -> dict[int, dict[str, Any]]:
    """The values of elements from the file that was sent, if the folder of the job still has it."""
    for path in sorted((folder / SCRIPTS_DIR).glob("*")):
        with path.open(encoding="utf-8", errors="replace") as file:
            header = next((line for line in file if line.startswith('{"')), "{}")
            try:
                fields = json.loads(header).get("fields", ())
            except ValueError:
                continue
            if fields:  # else it is any other script
                wanted = {index for first, last in ranges for index in range(first, last + 1)}
                return {
                    index: dict(zip(fields, json.loads(line), strict=False))
                    for index, line in enumerate(file)
                    if index in wanted
                }
    return {}


def not_ready(group: GroupRows) -> list[str]:
    """The services of a group that are not ready for long, each with what its probe gets."""
    return [
        f"{row['role']}/{row['replica']} is {row['waits_for']}"
        for row in group["roles"]
        if row.get("waits_for")  # the driver may be of an older version
    ]


def failure_lines(array: ArrayRows) -> list[str]:
    """A line for each of the first elements that have failed."""
    return [
        f"  element {index}: {words or f'exit code {code}'}"
        for index, code, words in array["failures"]
    ]
