"""Every error that this package raises.

    NemoRunRayError
    ├── ConfigError          a field, a file or a command-line argument is wrong (also a ValueError)
    │   └── NoClusterFile    no folder has a cluster file of that name
    ├── ClusterError         the cluster cannot serve the request
    │   ├── Unreachable      no answer, or not Ray's answer
    │   │   └── Unanswered   the same, and the next attempt may succeed
    │   ├── StreamCut        a log stream ended without the server's close
    │   ├── Unauthorised     the answer is 401 or 403
    │   ├── TooOld           this Ray lacks a feature that was asked for
    │   ├── VersionMismatch  its Ray or Python is not that of this program
    │   └── DoesNotFit       a preflight found what would keep the jobs from running
    ├── SubmissionError      a job could not be submitted
    │   ├── ArchiveTooLarge  what would be sent exceeds Ray's limit
    │   ├── PackagingFailed  the packager did not deliver an archive (also a RuntimeError)
    │   ├── Conflict         the submission id belongs to another run's job
    │   ├── JobRefused       Ray refuses the request for a job
    │   └── Taken            Ray has a job of the submission id already
    ├── JobError             a job is unknown, or did not end as asked
    │   └── StillRunning     a wait for it has timed out (also a TimeoutError)
    ├── WorkError            a call on a Ray has given no result
    │   ├── CannotBeSent     the function or an item cannot be pickled (also a TypeError)
    │   ├── ItemFailed       an item of a map has failed: its index, and the cause
    │   ├── TimedOut         the call took too long (also a TimeoutError)
    │   ├── WorkerDied       its worker has died, or none can be had
    │   └── PoolClosed       the pool takes no more work (also a RuntimeError)
    ├── PatchError           a change of NeMo-Run is unknown or cannot be made
    │   └── UnsupportedNemoRun  this NeMo-Run, or NeMo-Skills, is not one that the patch knows
    └── TransportError       source code cannot be sent to a pod
        └── SourceTooLarge   it exceeds a limit of the platform

A message says what failed, on which object, what was expected and found, and the next step.
Exceptions of other libraries are translated where they enter and kept as ``__cause__``. An error of
these that ends a program is printed as one paragraph, with the line of the user's program that led
to it: the frames of NeMo-Run, and the causes in httpx and other libraries, tell the user nothing.
"""

import os
import re
import sys
import traceback
from pathlib import Path
from typing import Any

import nemo_run
from rich.markup import escape

#: Environment variable that brings the tracebacks back, for a report of a fault of this package.
VARIABLE = "NEMO_RUN_RAY_TRACEBACK"
_LIBRARIES = (f"{Path(__file__).parent}/", f"{Path(nemo_run.__file__).parent}/")


def shown(text: str) -> str:
    """A text of others without colours and control characters, as it is printed or put on a page.

    A job's log is the user's own and is passed on as it is.
    """
    text = re.sub(r"\x1b\[[0-9;?]*[ -/]*[@-~]", "", text.replace("\r\n", "\n"))
    # A progress bar writes over its text.
    text = re.sub(r"[^\n]*\r(?=[^\n])|\r(?=\n|$)", "", text)
    # A terminal would obey these, and HTML or UTF-8 cannot carry them.
    return re.sub("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]", "\ufffd", text)


class NemoRunRayError(Exception):
    """Root of the tree above."""

    def __str__(self) -> str:
        # NeMo-Run prints what a launch raises as markup of ``rich``, which refuses the end of a
        # style where none begins.
        return re.sub(r"\[(?=/[^\[\]]*\])", "[ ", shown(super().__str__()))

    def _render_traceback_(self) -> list[str]:
        """The lines that IPython and notebooks print of an uncaught error."""
        return paragraph(self).splitlines()


class ConfigError(NemoRunRayError, ValueError): ...


class NoClusterFile(ConfigError): ...


class ClusterError(NemoRunRayError): ...


class Unreachable(ClusterError): ...


class Unanswered(Unreachable):
    """No usable answer this time; the same request may be answered later."""


class StreamCut(ClusterError): ...


class Unauthorised(ClusterError): ...


class TooOld(ClusterError): ...


class DoesNotFit(ClusterError): ...


class VersionMismatch(ClusterError): ...


class WorkError(NemoRunRayError): ...


class CannotBeSent(WorkError, TypeError): ...


class ItemFailed(WorkError):
    """An item of a map has failed, after its retries.

    Attributes:
        index: its place among the items, from 0.
        cause: what was raised, or why there is no result.
    """

    def __init__(self, index: int, cause: BaseException, name: str):
        super().__init__(f"item {index} of {name} has failed: {type(cause).__name__}: {cause}")
        self.index = index
        self.cause = cause
        self._name = name

    def __reduce__(self) -> tuple[type, tuple[int, BaseException, str]]:
        return type(self), (self.index, self.cause, self._name)


class TimedOut(WorkError, TimeoutError): ...


class WorkerDied(WorkError): ...


class PoolClosed(WorkError, RuntimeError): ...


class SubmissionError(NemoRunRayError): ...


class JobRefused(SubmissionError): ...


class ArchiveTooLarge(SubmissionError): ...


#: NeMo-Run's own packagers raise a RuntimeError, for which NeMo-Skills has advice.
class PackagingFailed(SubmissionError, RuntimeError): ...


class Conflict(SubmissionError): ...


class Taken(SubmissionError): ...


class JobError(NemoRunRayError): ...


class StillRunning(JobError, TimeoutError): ...


class PatchError(NemoRunRayError): ...


class UnsupportedNemoRun(PatchError): ...


class TransportError(NemoRunRayError): ...


class SourceTooLarge(TransportError): ...


# ---------------------------------------------------------------------- how errors are printed


def install() -> None:
    """Let Python print an error of this package as a paragraph; a second call changes nothing."""
    before = sys.excepthook
    if getattr(before, "__module__", "") == __name__:
        return

    def excepthook(kind: Any, error: Any, frames: Any) -> None:
        if isinstance(error, NemoRunRayError):
            print(paragraph(error), file=sys.stderr)
        elif hasattr(error, "_is_explained"):
            print(shown(str(error)), file=sys.stderr)
        else:
            before(kind, error, frames)

    sys.excepthook = excepthook


def as_markup(text: str) -> str:
    """The markup of ``rich`` that shows this text, whatever is in it."""
    return escape(shown(text))


def paragraph(error: NemoRunRayError) -> str:
    """The error, and the last line before NeMo-Run or this package was called, or its traceback.

    Above it is the traceback of its cause in the process where the user's function has raised it.
    """
    if os.environ.get(VARIABLE):
        return "".join(traceback.format_exception(error)).rstrip()
    text = "".join(traceback.format_exception_only(error)).rstrip()
    cause = error.__cause__
    while cause is not None:
        text = f"{getattr(cause, 'traceback_elsewhere', '')}\n\n{text}".strip()
        cause = cause.__cause__
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename.startswith(_LIBRARIES):
            break
        place = f"{frame.filename}, line {frame.lineno}; "
    return f"{shown(text)}\n({place}{VARIABLE}=1 shows the traceback)"
