"""A client's request to end elements of a running array.

A client reaches the driver by Ray's jobs alone: it posts a small job, which runs on the head as the
driver does. That job writes the request beside the driver's journal, and ends when the driver has
removed it, which it does when the journal has what the request says.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from contextlib import suppress
from typing import Iterator, List, Tuple

from ..files import open_own
from ..node.output import say
from ..status import file_of, first_id

#: First and last index of elements in a row.
Range = Tuple[int, int]
#: Kind of the job that writes a request.
KIND = "cancel-elements"
#: Seconds until a driver has taken a request; one that was killed is started again meanwhile.
TAKEN_S = 120.0
_LOOK_S = 0.2


def request_id(submission_id: str, nonce: str) -> str:
    """Submission id of the job that writes a request for an array."""
    return f"{first_id(submission_id)}@{KIND}-{nonce}"


def log_folder(submission_id: str) -> str:
    """Ray's folder of logs, seen from a job; the one for temporary files of a job without a log."""
    log = os.readlink("/proc/self/fd/1")
    is_rays = os.path.basename(log) == f"job-driver-{submission_id}.log"
    return os.path.dirname(log) if is_rays else tempfile.gettempdir()


def run(submission_id: str, request: str) -> int:
    """The program of the job: write a request, and wait until the driver has taken it."""
    folder = log_folder(submission_id)
    nonce = submission_id.rpartition("-")[2]
    path = os.path.join(folder, f"{_prefix(submission_id)}{nonce}")
    part = os.path.join(folder, f".{os.path.basename(path)}")
    with open(open_own(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w", encoding="utf-8") as file:
        file.write(request)
    os.rename(part, path)
    until = time.monotonic() + TAKEN_S
    while os.path.exists(path):
        if time.monotonic() >= until:
            with suppress(FileNotFoundError):
                os.remove(path)
            say(f"the array's driver has not taken the request within {TAKEN_S:.0f} s")
            return 1
        time.sleep(_LOOK_S)
    return 0


class CancelRequests:
    """The requests for one array, as its driver finds them.

    Args:
        folder: that ``log_folder`` gives.
        submission_id: of the array.
    """

    def __init__(self, folder: str, submission_id: str) -> None:
        self._folder = folder
        self._prefix = _prefix(submission_id)

    def find(self, count: int) -> Iterator[Tuple[str, List[Range], bool]]:
        """The requests that nobody has removed, for an array of so many elements.

        Yields:
            The path of the request, the ranges, and whether those are left alone that have begun.
        """
        for path in self._paths():
            try:
                with open(open_own(path, os.O_RDONLY), encoding="utf-8") as file:
                    given = json.load(file)
                ranges = [(max(0, first), min(last, count - 1)) for first, last in given["cancel"]]
                yield path, ranges, given["only_waiting"]
            except (ValueError, TypeError, KeyError, PermissionError) as error:
                say(f"{path} is no request to cancel elements: {error}")
                self.remove(path)
            except OSError:
                continue  # its job has waited too long

    def remove(self, path: str) -> None:
        """Tell the job of a request that the driver has taken it."""
        with suppress(OSError):
            os.remove(path)

    def remove_all(self) -> None:
        """Remove those that come too late."""
        for path in self._paths():
            self.remove(path)

    def _paths(self) -> List[str]:
        names = [name for name in os.listdir(self._folder) if name.startswith(self._prefix)]
        return [os.path.join(self._folder, name) for name in sorted(names)]


def _prefix(submission_id: str) -> str:
    # No id has a tilde: the prefix of one array begins no other one's.
    return f"{file_of(submission_id, 'cancel')}~"
