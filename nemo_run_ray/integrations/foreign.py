"""Shared by readers of other projects' files: typed values with their lines, and a draft."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from nemo_run_ray.cluster_files.load import Document, Ignored, KeyPath, dotted
from nemo_run_ray.clusters.existing import DASHBOARD_PORT
from nemo_run_ray.errors import ConfigError
from nemo_run_ray.fields import is_amount, is_whole, nearest

_HOST_AND_PORT = re.compile(r"[^\s/:]+:\d+|\[[0-9a-fA-F:.]+\]:\d+")

_KINDS: dict[type, str] = {
    dict: "a table of keys",
    list: "a list",
    str: "a text",
    bool: "true or false",
    int: "a number",
    float: "a number",
    type(None): "without a value",
}


class Keys:
    """The keys of a foreign file; what is absent, or has no value, is ``None``."""

    def __init__(self, document: Document) -> None:
        self.document = document

    def get(self, *path: str | int) -> Any:
        """The value of a key."""
        return at(self.document.values, path)

    def written(self, path: KeyPath) -> KeyPath:
        """The path of a key in the file itself."""
        return path

    def source(self, path: KeyPath, note: str = "") -> str:
        """``file:line (key)``, as a ``Document`` gives it."""
        written = self.written(path)
        return f"{self.document.where(*written)} ({dotted(written)}{note})"

    def refuse(self, path: KeyPath, problem: str) -> ConfigError:
        """The error for a key, with its file and line."""
        return self.document.refuse(self.written(path), problem)

    def _expected(self, path: KeyPath, value: Any, expected: str) -> ConfigError:
        return self.refuse(path, f"it is {shown(value)}; expected {expected}.")

    def text(self, *path: str | int) -> str | None:
        """A text without blanks around it; an empty one is ``None``."""
        value = self.get(*path)
        if value is not None and not isinstance(value, str):
            raise self._expected(path, value, "a text")
        return (value or "").strip() or None

    def flag(self, *path: str | int) -> bool | None:
        """A truth value."""
        value = self.get(*path)
        if value is not None and not isinstance(value, bool):
            raise self._expected(path, value, "true or false")
        return value

    def whole(self, *path: str | int) -> int | None:
        """A whole number from 1."""
        value = self._number(path)
        if value is not None and not is_whole(value, 1):
            raise self._expected(path, value, "a whole number from 1")
        return None if value is None else int(value)

    def amount(self, *path: str | int) -> int | float | None:
        """A number from 0."""
        value: int | float | None = self._number(path)
        if value is not None and not is_amount(value):
            raise self._expected(path, value, "a number from 0")
        return value

    def table(self, *path: str | int) -> dict[str, Any]:
        """Keys with values; none where it is absent."""
        value = self.get(*path)
        if value is not None and not isinstance(value, Mapping):
            raise self._expected(path, type(value), "keys with values")
        return {str(key): one for key, one in (value or {}).items()}

    def texts(self, *path: str | int) -> list[str]:
        """A list of texts; none where it is absent."""
        value = self.items(*path)
        for number, one in enumerate(value):
            if not isinstance(one, str):
                raise self._expected((*path, number), type(one), "a text")
        return value

    def items(self, *path: str | int) -> list[Any]:
        """A list; none where it is absent."""
        value = self.get(*path)
        if value is not None and not isinstance(value, list):
            raise self._expected(path, type(value), "a list")
        return value or []

    def address(self, *path: str | int) -> str | None:
        """The dashboard's address, from one of a dashboard or of a Ray Client server."""
        text = self.text(*path)
        try:
            return None if text is None else dashboard_address(text)
        except ValueError as error:
            raise self.refuse(path, str(error)) from error

    def _number(self, path: KeyPath) -> Any:
        return self.get(*path)


def dashboard_address(text: str) -> str:
    """The dashboard's address: for ``ray://host:port`` that of Ray's default port on the host.

    Raises:
        ValueError: it is no address, or holds a password; the message says what is expected.
    """
    if text == "auto" or _HOST_AND_PORT.fullmatch(text):
        return text
    try:
        url = urlsplit(text)
        host = url.hostname
    except ValueError:
        host = None
    if not host or url.scheme not in ("http", "https", "ray"):
        raise ValueError(
            f"it is {shown(text)}; expected the address of a cluster: http(s)://host:port, "
            "ray://host:port or auto."
        )
    if "@" in url.netloc:
        raise ValueError(
            "it holds a user or a password, which a shared file must not hold (it is not shown "
            "here); expected the address alone."
        )
    if url.scheme != "ray":
        return text
    return f"http://{f'[{host}]' if ':' in host else host}:{DASHBOARD_PORT}"


class Draft:
    """A file in this package's form, in the making."""

    def __init__(self, form: str, keys: Keys) -> None:
        self.keys = keys
        self._form = form
        self._values: dict[str, Any] = {}
        self._sources: dict[KeyPath, str] = {}
        self._ignored: dict[KeyPath, Ignored] = {}

    def put(self, target: KeyPath, value: Any, key: KeyPath, note: str = "") -> None:
        """Set a value of this package's form, which comes from a key of the foreign one."""
        table = self._values
        for word in target[:-1]:
            table = table.setdefault(str(word), {})
        table[str(target[-1])] = value
        self._sources[target] = self.keys.source(key, note)

    def append(self, target: KeyPath, value: Any, key: KeyPath, note: str = "") -> None:
        """Add an element to a list of this package's form, unless it is there."""
        table = self._values
        for word in target[:-1]:
            table = table.setdefault(str(word), {})
        elements = table.setdefault(str(target[-1]), [])
        if value not in elements:
            element = (*target, len(elements))
            self._sources[element] = self.keys.source(key, note)
            elements.append(value)

    def got(self, *target: str) -> Any:
        """A value of this package's form, as far as it was set."""
        return at(self._values, target)

    def ignore(self, key: KeyPath, reason: str) -> None:
        """Leave out a key of theirs; the first reason stays."""
        written = self.keys.written(key)
        where = self.keys.document.where(*written)
        self._ignored.setdefault(written, Ignored(dotted(written), reason, where))

    def ignore_rest(
        self, table: KeyPath, used: Collection[str], reasons: Mapping[str, str]
    ) -> None:
        """Leave out the keys of a table that have a value and were not used.

        Args:
            table: where the keys are.
            used: keys that were read.
            reasons: why a known key means nothing here.
        """
        for name, value in self.keys.table(*table).items():
            if value is None or name in used:
                continue
            like = nearest(name, [*used, *reasons])
            unknown = f"The key is not known{f'; the nearest known one is {like}' if like else ''}."
            self.ignore((*table, name), reasons.get(name, unknown))

    def done(self) -> Document:
        """The file in this package's form."""
        return replace(
            self.keys.document,
            values=self._values,
            sources=self._sources,
            format=self._form,
            ignored=tuple(self._ignored.values()),
        )


def at(values: Any, path: KeyPath) -> Any:
    """The value at a path of nested tables and lists; ``None`` where there is none."""
    for word in path:
        if isinstance(values, Mapping):
            values = values.get(word)
        elif isinstance(values, list) and isinstance(word, int) and word < len(values):
            values = values[word]
        else:
            return None
    return values


def shown(value: Any) -> str:
    """A value in a message: short, and only its kind where it may hold anything."""
    if isinstance(value, type):
        return _KINDS.get(value, f"of the type {value.__name__}")
    if not isinstance(value, (str, int, float)):
        return shown(type(value))
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
