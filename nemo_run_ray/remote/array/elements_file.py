"""The file of an array's elements, and what an element's values change in its task.

The first line that is a JSON object is the header; every line behind it is one element: a JSON list
with a value for each target. Only the lines' places are kept in memory, eight bytes an element.
"""

from __future__ import annotations

import json
from array import array
from typing import Any, List

#: Kinds of a target: a variable, one word of the command, all words from one on, a field of the
#: configuration.
ENV, WORD, WORDS, FIELD = "env", "word", "words", "field"
#: Of tasks that differ: a task's name, which changes nothing; its command, or its configuration in
#: Fiddle's JSON; its variables.
NAME, TASK, ENVS = "name", "task", "envs"


class Elements:
    """The elements of one file, read one by one.

    Args:
        path: of the file.
    """

    def __init__(self, path: str) -> None:
        self._file = open(path, "rb")  # noqa: SIM115 lives as long as the driver
        self._places = array("Q")
        has_header, place = False, 0
        for line in self._file:
            if has_header and line.strip():
                self._places.append(place)
            has_header = has_header or line.startswith(b"{")
            place += len(line)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> List[Any]:
        """The values of one element."""
        self._file.seek(self._places[index])
        values: List[Any] = json.loads(self._file.readline())
        return values
