"""The dispatcher's log: one line a decision, written for people and read by ``timeline``."""

from __future__ import annotations

import calendar
import re
import time
from dataclasses import dataclass
from typing import Iterable, Iterator

from ..node.output import PREFIX

_LINE = re.compile(
    re.escape(PREFIX) + r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)\.(\d{3})Z ([A-Z]+) ([\w.@-]+) ?(.*)$"
)


@dataclass(frozen=True)
class Line:
    """One line of the dispatcher's log.

    Attributes:
        at: seconds since the epoch.
        state: the new state of the attempt, a ``JobState``'s value.
        submission_id: of the attempt.
        words: why.
    """

    at: float
    state: str
    submission_id: str
    words: str = ""

    def __str__(self) -> str:
        whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(self.at))
        words = " ".join(self.words.split())
        return (
            f"{whole}.{int(self.at * 1000) % 1000:03d}Z {self.state} {self.submission_id} {words}"
        )


def parse(lines: Iterable[str]) -> Iterator[Line]:
    """The lines of a dispatcher's log that tell of a job; others are left out."""
    for text in lines:
        match = _LINE.match(text.rstrip("\n"))
        if match:
            whole, millis, state, name, words = match.groups()
            try:
                parsed = time.strptime(f"{whole}+0000", "%Y-%m-%dT%H:%M:%S%z")
            except ValueError:
                continue  # another program's line
            yield Line(calendar.timegm(parsed) + int(millis) / 1000, state, name, words)
