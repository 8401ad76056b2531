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
    ├── SubmissionError      a job could not be handed over
    │   ├── ArchiveTooLarge  what would be sent exceeds Ray's limit
    │   ├── PackagingFailed  the packager did not deliver an archive (also a RuntimeError)
    │   ├── Conflict         the submission id belongs to another run's job
    │   ├── JobRefused       Ray refuses the request for a job
    │   └── Taken            Ray has a job of the submission id already
    ├── JobError             a job is unknown, or did not end as asked
    │   └── StillGoesOn      it has not ended in the time of a wait (also a TimeoutError)
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
Exceptions of other libraries are translated where they enter and kept as ``__cause__``. What ends a
program is printed by ``plain_errors.py``.
"""

import errno
import re
import traceback

#: Numbers of an OSError that say that a disk is full or may only be read.
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_COLOUR_CODE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
#: What a progress bar has written over.
_OVERWRITTEN = re.compile(r"[^\n]*\r(?=[^\n])|\r(?=\n|$)")
#: What a terminal would obey, and what HTML or UTF-8 cannot carry.
_UNFIT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
#: What ``rich`` takes for the end of a style, and refuses where that style has no beginning.
_CLOSING_TAG = re.compile(r"\[(?=/[^\[\]]*\])")


def shown(text: str) -> str:
    """A text of others without colours and control characters, as it is printed or put on a page.

    A job's log is the user's own and is passed on as it is.
    """
    text = _COLOUR_CODE.sub("", text.replace("\r\n", "\n"))
    return _UNFIT.sub("\ufffd", _OVERWRITTEN.sub("", text))


class NemoRunRayError(Exception):
    """Root of the tree above."""

    def __str__(self) -> str:
        # NeMo-Run prints what a launch raises as markup of ``rich``.
        return _CLOSING_TAG.sub("[ ", shown(super().__str__()))

    def _render_traceback_(self) -> list[str]:
        """What IPython and notebooks print of an uncaught error."""
        from nemo_run_ray.plain_errors import needs_traceback, paragraph

        if needs_traceback(self):
            return "".join(traceback.format_exception(self)).splitlines()
        return paragraph(self, self.__traceback__).splitlines()


class ConfigError(NemoRunRayError, ValueError):
    """A value that the user gave is wrong."""


class NoClusterFile(ConfigError):
    """No folder has a cluster file of that name."""


class ClusterError(NemoRunRayError):
    """The cluster cannot serve the request."""


class Unreachable(ClusterError):
    """No answer from the address, or an answer that is not Ray's."""


class Unanswered(Unreachable):
    """No usable answer this time; the same request may be answered later.

    Attributes:
        after_s: seconds until then, as the answer says.
    """

    def __init__(self, text: str, after_s: float = 0.0) -> None:
        super().__init__(text)
        self.after_s = after_s


class StreamCut(ClusterError):
    """A log stream ended without the server's close."""


class Unauthorised(ClusterError):
    """The dashboard, or a proxy before it, wants other credentials."""


class TooOld(ClusterError):
    """The cluster's Ray lacks a feature that was asked for."""


class DoesNotFit(ClusterError):
    """A look at the cluster found what would keep the jobs from running; nothing was sent."""


class VersionMismatch(ClusterError):
    """The cluster has another Ray or Python than this program, and Ray wants the same."""


class WorkError(NemoRunRayError):
    """A call that was spread over a Ray has given no result."""


class CannotBeSent(WorkError, TypeError):
    """A function, or an item for it, cannot be pickled; the message says what it holds."""


class ItemFailed(WorkError):
    """An item of a map has failed, after its retries.

    Attributes:
        index: its place among the items, from 0.
        cause: what was raised, or why there is no result.
    """

    def __init__(self, index: int, cause: BaseException, name: str) -> None:
        super().__init__(f"item {index} of {name} has failed: {type(cause).__name__}: {cause}")
        self.index = index
        self.cause = cause
        self._name = name

    def __reduce__(self) -> tuple[type, tuple[int, BaseException, str]]:
        return type(self), (self.index, self.cause, self._name)


class TimedOut(WorkError, TimeoutError):
    """A call took longer than it may; its worker was ended."""


class WorkerDied(WorkError):
    """The process that ran a call has died, or there can be none."""


class PoolClosed(WorkError, RuntimeError):
    """A pool takes no more work: it was closed, or belongs to another process."""


class SubmissionError(NemoRunRayError):
    """A job could not be handed over to the cluster."""


class JobRefused(SubmissionError):
    """Ray refuses the request for a job, and will do so again; nothing was started."""


class ArchiveTooLarge(SubmissionError):
    """What would be sent exceeds the limit of Ray's Jobs API; nothing was sent."""


class PackagingFailed(SubmissionError, RuntimeError):
    """The packager raised, or left no archive behind.

    NeMo-Run's own packagers raise a RuntimeError, for which NeMo-Skills has advice.
    """


class Conflict(SubmissionError):
    """The submission id is taken by a job that this experiment did not submit."""


class Taken(SubmissionError):
    """Ray has a job of this submission id already; it may be the same one."""


class JobError(NemoRunRayError):
    """A job is unknown, or it did not end as asked."""


class StillGoesOn(JobError, TimeoutError):
    """A job has not ended in the time that was given to a wait for it."""


class PatchError(NemoRunRayError):
    """A patch of NeMo-Run is unknown or cannot be applied."""


class UnsupportedNemoRun(PatchError):
    """What is installed, NeMo-Run or NeMo-Skills, has another structure than the patch knows."""


class TransportError(NemoRunRayError):
    """Source code cannot be sent to a pod; nothing was sent."""


class SourceTooLarge(TransportError):
    """The source code exceeds a limit of the platform; nothing was sent."""
