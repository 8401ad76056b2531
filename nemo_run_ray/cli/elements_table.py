"""The elements of an array as lines, or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from nemo_run_ray.errors import shown

if TYPE_CHECKING:
    from nemo_run_ray.experiment.array_elements import Element

_NAMES = ("element", "state", "attempts", "exit code", "values", "reason")


def print_elements(elements: Sequence[Element], as_json: bool = False) -> None:
    """Print one line for each element, however long, so that ``grep`` finds it."""
    if as_json:
        print(json.dumps([asdict(element) for element in elements], indent=1))
        return
    if not elements:
        print("There is no such element.")
        return
    rows = [_NAMES, *map(_words, elements)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(shown("  ".join(cells).rstrip()))


def _words(element: Element) -> tuple[str, ...]:
    values = ", ".join(f"{field}={value}" for field, value in element.values.items())
    code = "" if element.exit_code is None else str(element.exit_code)
    reason = " ".join(element.reason.split())
    return str(element.index), element.state, str(element.attempts), code, values, reason
