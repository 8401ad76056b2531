"""For readers of other projects' files: keys with their lines, and the values that come of them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from nemo_run_ray.cluster_files.load import Document, Ignored, KeyPath, dotted
from nemo_run_ray.clusters.existing import DASHBOARD_PORT
from nemo_run_ray.errors import ConfigError
from nemo_run_ray.fields import nearest

_HOST_AND_PORT = re.compile(r"[^\s/:]+:\d+|\[[0-9a-fA-F:.]+\]:\d+")


class Translation:
    """A foreign file on its way into this package's form.

    What is absent there, or has no value, is ``None``. The schema checks the values that are put.

    Args:
        form: the name of the foreign form.
        document: the file.
    """

    def __init__(self, form: str, document: Document) -> None:
        self.document = document
        self.values: dict[str, Any] = {}
        self._form = form
        self._sources: dict[KeyPath, str] = {}
        self._ignored: dict[KeyPath, Ignored] = {}

    def get(self, *path: str | int) -> Any:
        """The value of a foreign key."""
        values: Any = self.document.values
        for word in path:
            values = values.get(word) if isinstance(values, Mapping) else None
        return values

    def refuse(self, path: KeyPath, problem: str) -> ConfigError:
        """The error for a foreign key, with its file and line."""
        return self.document.refuse(path, problem)

    def text(self, *path: str | int) -> str:
        """A text without blanks around it; empty where it is absent."""
        return str(self._of(str, "a text", path) or "").strip()

    def table(self, *path: str | int) -> dict[str, Any]:
        """Keys with values; none where it is absent."""
        return self._of(dict, "keys with values", path) or {}

    def items(self, *path: str | int) -> list[Any]:
        """A list; an empty one where it is absent."""
        return self._of(list, "a list", path) or []

    def _of(self, kind: type, expected: str, path: KeyPath) -> Any:
        value = self.get(*path)
        if value is not None and not isinstance(value, kind):
            raise self.refuse(path, f"expected {expected}; found a {type(value).__name__}.")
        return value

    def first(self, *paths: KeyPath) -> KeyPath | None:
        """The first of some keys that has a value; the others are left out."""
        given = [path for path in paths if self.get(*path) not in (None, "")]
        for path in given[1:]:
            self.ignore(path, f"{dotted(given[0])} comes first.")
        return given[0] if given else None

    def put(self, target: KeyPath, value: Any, key: KeyPath, note: str = "") -> None:
        """Set a value of this package's form, which comes from a foreign key."""
        table = self.values
        for word in target[:-1]:
            table = table.setdefault(str(word), {})
        table[str(target[-1])] = value
        self._sources[target] = f"{self.document.where(*key)} ({dotted(key)}{note})"

    def at(self, *target: str) -> Any:
        """A value of this package's form, as far as it was set; an empty table where it was not."""
        values: Any = self.values
        for word in target:
            values = values.get(word, {})
        return values

    def put_address(self, key: KeyPath) -> None:
        """Set the address of the cluster from a foreign key.

        Of a Ray Client server, ``ray://host:port``, it is Ray's default port on the host.
        """
        text = self.text(*key)
        if text != "auto" and not _HOST_AND_PORT.fullmatch(text):
            try:
                url = urlsplit(text)
                host = url.hostname or ""
            except ValueError:
                host = ""
            if not host or url.scheme not in ("http", "https", "ray") or "@" in url.netloc:
                raise self.refuse(
                    key,
                    "expected the address of a cluster, without a user and a password: "
                    "http(s)://host:port, ray://host:port or auto.",
                )
            if url.scheme == "ray":
                text = f"http://{f'[{host}]' if ':' in host else host}:{DASHBOARD_PORT}"
        self.put(("cluster", "address"), text, key)

    def append(self, target: tuple[str, ...], value: str, key: KeyPath, note: str = "") -> None:
        """Add an element to a list of this package's form, unless it is there."""
        elements = [*self.at(*target)]
        if value not in elements:
            self.put(target, [*elements, value], key, note)
            place: KeyPath = (*target, len(elements))
            self._sources[place] = self._sources.pop(target)

    def ignore(self, key: KeyPath, reason: str) -> None:
        """Leave out a foreign key; the first reason stays."""
        where = self.document.where(*key)
        self._ignored.setdefault(key, Ignored(dotted(key), reason, where))

    def ignore_rest(
        self, table: KeyPath, used: Collection[str], reasons: Mapping[str, str]
    ) -> None:
        """Leave out the keys of a table that have a value and were not used.

        Args:
            table: where the keys are.
            used: keys that were read.
            reasons: why known keys mean nothing here; a key of it may be several names.
        """
        known = {name: reason for names, reason in reasons.items() for name in names.split()}
        for name, value in self.table(*table).items():
            if value is not None and name not in used:
                like = nearest(name, [*used, *known])
                meant = f"; the nearest known one is {like}" if like else ""
                self.ignore((*table, name), known.get(name, f"The key is not known{meant}."))

    def done(self) -> Document:
        """The file in this package's form."""
        ignored = tuple(self._ignored.values())
        return replace(
            self.document,
            values=self.values,
            sources=self._sources,
            format=self._form,
            ignored=ignored,
        )
