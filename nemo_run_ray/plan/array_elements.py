"""What differs between the elements of an array: the values that a user gives, as lines of JSON."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from nemo_run_ray.errors import ConfigError

#: Bytes of one element's values.
ELEMENT_MAX_BYTES = 32 * 1024
#: Elements of an array: each is a line of the file that is sent, of four bytes at least.
ELEMENTS_MAX = 16 * 1024**2
#: What a user may give: values of each field, a mapping for each element, a file of them.
Over = Mapping[str, Iterable[Any]] | Iterable[Mapping[str, Any]] | str | os.PathLike[str]


def rows_of(over: Over, combine: str) -> tuple[list[str], Iterator[Sequence[Any]]]:
    """The fields, and the values of each element in their order."""
    if isinstance(over, (str, os.PathLike)):
        return _of_mappings(_json_lines(over))
    if not isinstance(over, Iterable):
        raise ConfigError(
            f"`over` is {over!r}; expected is a mapping with the values of each field, a list with "
            "a mapping for each element, or the path of a JSONL file."
        )
    if not isinstance(over, Mapping):
        return _of_mappings(over)
    if not over:
        raise ConfigError("`over` names no field; expected is at least one.")
    for name, values in over.items():
        if not isinstance(name, str):
            raise ConfigError(f"`over` has the field {name!r}; expected is the name of one.")
        if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
            raise ConfigError(
                f"The values of the field {name!r} are {values!r}; expected is a list, with "
                "a value for each element."
            )
    columns = [list(itertools.islice(values, ELEMENTS_MAX + 1)) for values in over.values()]
    _limit(max(len(column) for column in columns))
    if combine == "product":
        _limit(math.prod(len(column) for column in columns))
        return list(over), iter(itertools.product(*columns))
    if combine != "zip":
        raise ConfigError(f"combine is {combine!r}; expected is 'product' or 'zip'.")
    if len({len(column) for column in columns}) > 1:
        lengths = ", ".join(f"{name}: {len(col)}" for name, col in zip(over, columns, strict=True))
        raise ConfigError(f"combine='zip' needs as many values of each field; found {lengths}.")
    return list(over), iter(zip(*columns, strict=True))


def _limit(count: int) -> None:
    if count > ELEMENTS_MAX:
        raise ConfigError(
            f"`over` gives {count:,} elements or more, and an array has {ELEMENTS_MAX:,} at most. "
            "Let each element do more, or make several arrays."
        )


def _json_lines(path: str | os.PathLike[str]) -> Iterator[Mapping[str, Any]]:
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    try:
                        yield json.loads(line)
                    except ValueError as error:
                        raise ConfigError(
                            f"The line {number} of {os.fspath(path)} is no JSON: {error}"
                        ) from error
    except OSError as error:
        raise ConfigError(
            f"The elements cannot be read from {os.fspath(path)}: {error.strerror}. Give the path "
            "of a JSONL file with a mapping in each line, or the values themselves."
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"The elements cannot be read from {os.fspath(path)}: it is no text in UTF-8 "
            f"({error.reason} at byte {error.start}). Expected is JSONL, with a mapping in each "
            "line."
        ) from error


def _of_mappings(rows: Iterable[Any]) -> tuple[list[str], Iterator[Sequence[Any]]]:
    each = iter(rows)
    first = next(each, None)
    if first is None:
        raise ConfigError("The array has no elements: `over` gives no values.")

    def values() -> Iterator[Sequence[Any]]:
        for number, row in enumerate(itertools.chain([first], each)):
            _limit(number + 1)
            if not isinstance(row, Mapping) or set(row) != set(first):
                found = list(row) if isinstance(row, Mapping) else row
                raise ConfigError(
                    f"The element {number} of the array is {found!r}; every element gives a value "
                    f"for the same fields, which are {list(first)} in the first one."
                )
            yield [row[name] for name in first]

    if (
        not isinstance(first, Mapping)
        or not first
        or not all(isinstance(key, str) for key in first)
    ):
        raise ConfigError(
            f"The first element of the array is {first!r}; expected is a mapping from names of "
            "fields to their values."
        )
    return list(first), values()


def lines_of(
    fields: Sequence[str], rows: Iterable[Sequence[Any]], is_script: bool
) -> Iterator[str]:
    """The line of each element.

    Args:
        fields: their names.
        rows: their values, for each element.
        is_script: values are words and variables.

    Raises:
        ConfigError: a value cannot be sent.
    """
    for number, row in enumerate(rows):
        if is_script:
            row = [_text(field, value, number) for field, value in zip(fields, row, strict=True)]
        try:
            line = json.dumps(list(row), default=_plain)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"The element {number} of the array cannot be sent: {error}. Values are texts, "
                "numbers, None, lists and mappings of them."
            ) from error
        if len(line) > ELEMENT_MAX_BYTES:
            raise ConfigError(
                f"The element {number} of the array has {len(line)} bytes of values, and "
                f"{ELEMENT_MAX_BYTES} are sent at most. Put them into a file that the nodes can "
                "read, and give its name."
            )
        yield line


def _plain(value: Any) -> Any:
    """The number, or list of numbers, in a value of NumPy or PyTorch."""
    if not hasattr(value, "tolist"):
        raise TypeError(f"an object of type {type(value).__name__} is no plain value")
    return value.tolist()


def _text(field: str, value: Any, number: int) -> str | list[str]:
    """A value as a word of a command, or as a variable."""
    if field == "args":
        if not isinstance(value, (list, tuple)):
            raise ConfigError(
                f"The field args of the element {number} is {value!r}; expected is a list of words."
            )
        return [str(word) for word in value]
    if hasattr(value, "tolist"):
        value = _plain(value)
    if not isinstance(value, (str, int, float)):
        raise ConfigError(
            f"The field {field} of the element {number} is {value!r}; expected is a text or a "
            "number."
        )
    return str(value)
