"""The file of an array's elements, and what an element's values change in its task.

The first line that is a JSON object is the header; every line behind it is one element: a JSON list
with a value for each target. Only the lines' places are kept in memory, eight bytes an element.
"""

from __future__ import annotations

import json
from array import array
from typing import Any, Dict, List, Mapping, NamedTuple, Sequence

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

    def close(self) -> None:
        """Read no more."""
        self._file.close()

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> List[Any]:
        """The values of one element."""
        self._file.seek(self._places[index])
        values: List[Any] = json.loads(self._file.readline())
        return values


class Target(NamedTuple):
    """The part of a task that one value of an element changes.

    Attributes:
        kind: ``ENV``, ``WORD``, ``WORDS``, ``FIELD``, ``NAME``, ``TASK`` or ``ENVS``.
        name: of the variable; dotted path of the field.
        place: of the word in the command.
    """

    kind: str
    name: str = ""
    place: int = 0


class Applied(NamedTuple):
    """A task with an element's values.

    Attributes:
        argv: the words of the command.
        env: the variables.
        fields: of the configuration, by their paths.
        template: the element's own configuration; empty when it has the one of the array.
    """

    argv: List[str]
    env: Dict[str, str]
    fields: Dict[str, Any]
    template: str


def applied(
    targets: Sequence[Target], values: Sequence[Any], argv: Sequence[str], env: Mapping[str, str]
) -> Applied:
    """A command, variables and a configuration with an element's values."""
    command, variables, fields, template = list(argv), dict(env), {}, ""
    for target, value in zip(targets, values):
        if target.kind == ENV:
            variables[target.name] = value
        elif target.kind == ENVS:
            variables.update(value)
        elif target.kind == WORD:
            command[target.place] = value
        elif target.kind == WORDS:
            command[target.place :] = value
        elif target.kind == TASK and isinstance(value, str):
            template = value
        elif target.kind == TASK:
            command = value
        elif target.kind == FIELD:
            fields[target.name] = value
    return Applied(command, variables, fields, template)
