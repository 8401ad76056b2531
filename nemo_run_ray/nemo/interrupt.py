"""Ctrl-C ends the wait for a job, and not the job."""

from __future__ import annotations

import shlex
import signal
import threading
from typing import Any, ClassVar

from nemo_run_ray.clusters.base import interrupted
from nemo_run_ray.errors import NemoRunRayError, without_traceback
from nemo_run_ray.remote.status import JobStatus


class Interrupt:
    """Ctrl-C ends the wait, not the job.

    NeMo-Run waits in threads that do not see a KeyboardInterrupt, and joins them: without this the
    first Ctrl-C would wait for the job's end.
    """

    #: Told by the main thread: those that wait may end with the program before they tell anything.
    _nothing: ClassVar[str] = "Interrupted. Nothing of {name} was handed over."
    _help: ClassVar[str] = (
        "Interrupted. Jobs that were handed over go on:\n"
        "  look at them  nemo-run-ray status {name}\n"
        "  follow them   nemo-run-ray logs --follow {name}\n"
        "  cancel them   nemo-run-ray cancel {name}"
    )

    def __init__(self) -> None:
        self._happened = threading.Event()
        self._experiment = ""
        self._has_sent = False

    def watch(self, experiment: str) -> None:
        """Notice Ctrl-C from now on, unless the program handles it. Only the main thread can.

        Args:
            experiment: id of the one whose jobs are handed over.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        self._has_sent = self._has_sent and self._experiment == experiment
        self._experiment = experiment
        self._happened.clear()
        interrupted.clear()
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)

    def unwatch(self) -> None:
        self._happened.clear()
        interrupted.clear()
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) == self._note:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def forbid(self) -> None:
        """Raise after Ctrl-C, before jobs are handed over: the cluster took long to come up."""
        if self._happened.is_set():
            raise NemoRunRayError("Interrupted. What was not handed over before is not sent.")
        self._has_sent = True

    def end_wait(self, job: str, status: JobStatus) -> None:
        """Raise in a thread that waits for a job, after Ctrl-C."""
        main = threading.current_thread() is threading.main_thread()
        if self._happened.is_set() and not main and not status.state.is_terminal:
            raise NemoRunRayError(f"The wait for {job} was interrupted; the job goes on.")

    def _note(self, number: int, frame: Any) -> None:
        self._happened.set()
        interrupted.set()
        text = self._help if self._has_sent else self._nothing
        told = text.format(name=shlex.quote(self._experiment))
        raise without_traceback(KeyboardInterrupt(told))


#: The process's handler: there is one Ctrl-C.
interrupt = Interrupt()
