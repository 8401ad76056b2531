"""What a person sees of a pool: a progress bar on a terminal, and lines about what is waited for.

All of it is on standard error, since a program's results may go to standard output.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.errors import LiveError
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from nemo_run_ray.errors import as_markup

_err = Console(stderr=True, soft_wrap=True, highlight=False, log_path=False)


def say(line: str) -> None:
    """Print a line for people, with the time."""
    _err.log(as_markup(line))


class MapProgress:
    """How many items have ended, of how many if that is known.

    Args:
        name: of the function.
        total: number of items; ``None`` where nobody knows it.
    """

    def __init__(self, name: str, total: int | None) -> None:
        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        # What is printed on a terminal stands above the bar; a file or a pipe gets it as it is.
        shares = sys.stdout.isatty()
        name_column = TextColumn("{task.description}", markup=False)
        self._bar = Bar(name_column, *columns, console=_err, redirect_stdout=shares)
        self._task = self._bar.add_task(name, total=total)

    def __enter__(self) -> MapProgress:
        with suppress(LiveError):  # Rich before 14.1 shows one at a time: the outer one
            self._bar.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._bar.stop()

    def advance(self) -> None:
        """Count one more item."""
        self._bar.advance(self._task)
