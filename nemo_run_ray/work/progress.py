"""A progress bar on a terminal."""

from __future__ import annotations

from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar


class MapProgress:
    """How many items have ended, of how many if that is known.

    Args:
        name: of the function.
        total: number of items; ``None`` where nobody knows it.
    """

    def __init__(self, name: str, total: int | None) -> None:
        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        from rich.console import Console

        # Results may go to standard output.
        self._bar = Bar(TextColumn("{task.description}"), *columns, console=Console(stderr=True))
        self._task = self._bar.add_task(name, total=total)

    def __enter__(self) -> MapProgress:
        self._bar.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._bar.stop()

    def advance(self) -> None:
        """Count one more item."""
        self._bar.advance(self._task)
