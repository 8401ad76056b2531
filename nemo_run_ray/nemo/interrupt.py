"""Ctrl-C ends the wait for a job, and not the job."""

from __future__ import annotations

import signal
import threading
from typing import Any, ClassVar

from nemo_run.core.frontend.console.api import CONSOLE
from rich.markup import escape

from nemo_run_ray import plain_errors
from nemo_run_ray.errors import NemoRunRayError
from nemo_run_ray.remote.states import JobStatus


class Interrupt:
    """Ctrl-C ends the wait, not the job.

    NeMo-Run waits in threads that do not see a KeyboardInterrupt, and joins them: without this the
    first Ctrl-C would wait for the job's end.
    """

    _help: ClassVar[str] = (
        "Interrupted: {job} goes on, state {state}.\n"
        "  look at it    nemo-run-ray status {job}\n"
        "  follow it     nemo-run-ray logs --follow {job}\n"
        "  cancel it     nemo-run-ray cancel {job}"
    )

    def __init__(self) -> None:
        self._happened = threading.Event()

    def watch(self) -> None:
        """Notice Ctrl-C from now on, unless the program handles it. Only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._happened.clear()
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)

    def unwatch(self) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) == self._note:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def end_wait(self, job: str, status: JobStatus) -> None:
        """Raise in a thread that waits for a job, after Ctrl-C."""
        main = threading.current_thread() is threading.main_thread()
        if self._happened.is_set() and not main and not status.state.is_terminal:
            CONSOLE.print(escape(self._help.format(job=job, state=status.state.value.lower())))
            raise NemoRunRayError(f"The wait for {job} was interrupted; the job goes on.")

    def _note(self, number: int, frame: Any) -> None:
        self._happened.set()
        raise plain_errors.explained(
            KeyboardInterrupt(
                "Interrupted. Jobs that were handed over go on: nemo-run-ray status <experiment>"
            )
        )


#: The process's handler: there is one Ctrl-C.
interrupt = Interrupt()
