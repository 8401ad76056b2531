"""One line that says what a long wait waits for."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from nemo_run.core.frontend.console.api import CONSOLE
from rich.errors import LiveError

from nemo_run_ray.errors import as_markup


class Progress:
    """A line that is updated on a terminal; elsewhere, a line at each change."""

    def __init__(self) -> None:
        self._last = ""
        self._status: Any = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def say(self, text: str) -> None:
        """Show what is waited for now."""
        if text == self._last:
            return
        self._last = text
        if not CONSOLE.is_terminal:
            CONSOLE.log(as_markup(text))
        elif self._status is None:
            status = CONSOLE.status(as_markup(text))
            try:
                status.start()
            except LiveError:  # another thread shows a line
                CONSOLE.log(as_markup(text))
                return
            self._status = status
        else:
            self._status.update(as_markup(text))

    def done(self, text: str) -> None:
        """Say how it ended, if there was a wait."""
        if self._last:
            CONSOLE.log(as_markup(text))
