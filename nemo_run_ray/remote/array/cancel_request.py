"""A client's request to end elements of a running array.

A client reaches the driver by Ray's jobs alone: it posts a small job, which runs on the head as the
driver does. That job writes the request beside the driver's journal, and ends when the driver has
removed it, which it does when the journal has what the request says.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from time import monotonic
from typing import List

from ..files import log_folder, open_own
from ..node.output import say
from ..status import file_of, first_id

#: Kind of the job that writes a request.
KIND = "cancel-elements"
#: Seconds until a driver has taken a request; one that was killed is started again meanwhile.
TAKEN_S = 120.0
_LOOK_S = 0.2


def request_id(submission_id: str, nonce: str) -> str:
    """Submission id of the job that writes a request for an array."""
    return f"{first_id(submission_id)}@{KIND}-{nonce}"


def run(submission_id: str, request: str) -> int:
    """The program of the job: write a request, and wait until the driver has taken it."""
    folder, name = log_folder(), f"{_prefix(submission_id)}{submission_id.rpartition('-')[2]}"
    path, part = f"{folder}/{name}", f"{folder}/.{name}"
    with open(open_own(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w", encoding="utf-8") as file:
        file.write(request)
    os.rename(part, path)
    until = monotonic() + TAKEN_S
    while os.path.exists(path):
        if monotonic() >= until:
            with suppress(FileNotFoundError):
                os.remove(path)
            say(f"the array's driver has not taken the request within {TAKEN_S:.0f} s")
            return 1
        time.sleep(_LOOK_S)
    return 0


def request_paths(folder: str, submission_id: str) -> List[str]:
    """The requests for one array that its driver has not removed."""
    names = [name for name in os.listdir(folder) if name.startswith(_prefix(submission_id))]
    return [f"{folder}/{name}" for name in sorted(names)]


def _prefix(submission_id: str) -> str:
    # No id has a tilde: the prefix of one array begins no other one's.
    return f"{file_of(submission_id, 'cancel')}~"
