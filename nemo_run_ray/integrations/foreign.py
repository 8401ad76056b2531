"""For readers of other projects' files: keys with their lines, and the values that come of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from nemo_run_ray.cluster_files.load import Document, Ignored, KeyPath, dotted
from nemo_run_ray.fields import meant

_T = TypeVar("_T")
_EXPECTED: dict[type[Any], str] = {str: "a text", dict: "keys with values", list: "a list"}


class Translation:
    """A foreign file on its way into this package's form.

    What is absent there, or has no value, is ``None``. The schema checks the values that are put.

    Args:
        form: the name of the foreign form.
        document: the file; ``result`` is the one in this package's form.
        reasons: why known keys mean nothing here; a key of it may be several names.
    """

    def __init__(self, form: str, document: Document, reasons: Mapping[str, str]):
        self.document = document
        self.result = replace(document, format=form, values={}, sources={}, ignored=[])
        self._reasons = {name: why for names, why in reasons.items() for name in names.split()}

    def get(self, *path: str | int) -> Any:
        """The value of a foreign key."""
        return at(self.document.values, path)

    def of(self, kind: type[_T], *path: str | int) -> _T:
        """The value of a foreign key, which must be of a kind; an empty one where it is absent."""
        value = self.get(*path)
        if value is None:
            return kind()
        if not isinstance(value, kind):
            problem = f"expected {_EXPECTED[kind]}; found a {type(value).__name__}."
            raise self.document.refuse(path, problem)
        return value

    def put(self, target: tuple[str, ...], value: Any, key: KeyPath) -> None:
        """Set a value of this package's form, which comes from a foreign key."""
        table = self.result.values
        for word in target[:-1]:
            table = table.setdefault(word, {})
        table[target[-1]] = value
        self.result.sources[target] = f"{self.document.where(*key)} ({dotted(key)})"

    def put_or(self, target: tuple[str, ...], default: Any, key: KeyPath) -> None:
        """Set a value of this package's form: that of a foreign key, or its default there."""
        value = self.get(*key)
        self.put(target, default if value is None else value, key)

    def append(self, target: tuple[str, ...], value: str, key: KeyPath) -> None:
        """Add an element to a list of this package's form, unless it is there."""
        elements = at(self.result.values, target) or []
        if value not in elements:
            self.put(target, [*elements, value], key)

    def ignore(self, key: KeyPath, reason: str) -> None:
        """Leave out a foreign key."""
        self.result.ignored.append(Ignored(dotted(key), reason, self.document.where(*key)))

    def ignore_rest(self, table: KeyPath, used: Collection[str]) -> None:
        """Leave out the keys of a table that have a value and were not used."""
        for name, value in self.of(dict, *table).items():
            if value is not None and name not in used:
                self.ignore(
                    (*table, name),
                    self._reasons.get(name, f"The key is not known; {meant(name, used)}"),
                )


def at(values: Any, path: KeyPath) -> Any:
    """The value below some keys; ``None`` where there is none."""
    for word in path:
        values = values.get(word) if isinstance(values, Mapping) else None
    return values
