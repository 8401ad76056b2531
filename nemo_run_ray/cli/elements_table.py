"""The elements of an array as a table, or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from nemo_run_ray.jobs.array_elements import Element

_out = Console(soft_wrap=True, highlight=False)


def print_elements(elements: Sequence[Element], as_json: bool = False) -> None:
    """Print one line for each element."""
    if as_json:
        print(json.dumps([asdict(element) for element in elements], indent=1))
        return
    if not elements:
        print("There is no such element.")
        return
    table = Table("element", "state", "attempts", "exit code", "values", "reason", box=None)
    for element in elements:
        values = ", ".join(f"{field}={value}" for field, value in element.values.items())
        code = "" if element.exit_code is None else str(element.exit_code)
        row = str(element.index), element.state, str(element.attempts), code, values
        table.add_row(*map(Text, row), Text(element.reason))
    _out.print(table)
