"""A YAML or TOML file as plain values, with the line of every key.

Keys are told apart by their paths, ``("pools", "gpu", "image")``; a list's elements count from 0.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from nemo_run_ray.errors import ConfigError
from nemo_run_ray.remote.trust import why_untrusted

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

KeyPath = tuple[str | int, ...]
#: Far more than anybody writes; YAML takes a second for it.
_SIZE_MAX_BYTES = 256 * 1024
_DEPTH_MAX, _KEYS_MAX = 20, 10_000
SUFFIXES = (".yaml", ".yml", ".toml")
_TOML_TABLE = re.compile(r"\s*\[\[?\s*([^\]]+?)\s*\]\]?\s*(#.*)?")
_TOML_KEY = re.compile(
    r"""\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*="""
)
_TOML_WORD = re.compile(r"""[\w-]+|"[^"]*"|'[^']*'""")


@dataclass(frozen=True)
class Document:
    """What a file says.

    Attributes:
        path: of the file.
        values: what it holds.
        lines: the line of a key, from 1, by the key's path.
    """

    path: Path
    values: dict[str, Any]
    lines: dict[KeyPath, int] = field(default_factory=dict)

    def where(self, *path: str | int) -> str:
        """``file:line`` of a key, or of the nearest one above it that has a line."""
        for length in range(len(path), 0, -1):
            line = self.lines.get(path[:length])
            if line is not None:
                return f"{self.path}:{line}"
        return str(self.path)

    def refuse(self, path: KeyPath, problem: str) -> ConfigError:
        """The error for a key: file, line, key, then what is wrong and what was expected."""
        name = dotted(path)
        return ConfigError(f"{self.where(*path)}: {name + ': ' if name else ''}{problem}")


def dotted(path: KeyPath) -> str:
    """A key's path as people write it: ``pools.gpu.image``, ``preflight.required_labels[0]``."""
    text = ""
    for word in path:
        text += f"[{word}]" if isinstance(word, int) else f".{word}"
    return text.removeprefix(".")


def read(path: Path) -> Document:
    """Read a file, by its suffix.

    Its addresses get this user's variables and token, so nobody else may have written it.

    Raises:
        ConfigError: it cannot be read, another user may write to it, it is no YAML or TOML, names a
            key twice, or holds no table.
    """
    why = why_untrusted(str(path))
    if why:
        raise ConfigError(f"The cluster file {path} is not safe to use. {why}")
    try:
        if path.stat().st_size > _SIZE_MAX_BYTES:
            raise ConfigError(
                f"The cluster file {path} has {path.stat().st_size:,} bytes; expected at most "
                f"{_SIZE_MAX_BYTES:,}."
            )
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"The cluster file {path} cannot be read: {reason}.") from error
    try:
        values, lines = _read_toml(path, text) if path.suffix == ".toml" else _read_yaml(path, text)
    except RecursionError as error:
        raise ConfigError(f"The cluster file {path} is nested too deeply.") from error
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(
            f"The cluster file {path} holds a {type(values).__name__}; expected keys with values, "
            "such as `cluster:`."
        )
    return Document(path, values, lines)


# ---------------------------------------------------------------------- YAML

_TEXT_TAG, _MERGE_TAG = "tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"


def _read_yaml(path: Path, text: str) -> tuple[Any, dict[KeyPath, int]]:
    lines: dict[KeyPath, int] = {}
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is not None:
            for key, line in _yaml_keys(node, (), path):
                lines[key] = line
                if len(lines) > _KEYS_MAX or len(key) > _DEPTH_MAX:
                    raise ConfigError(f"{path}:{line}: the file has too many keys, or too deep.")
        return yaml.safe_load(text), lines
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        hint = "; YAML is indented by blanks, not by tabs" if _has_tab(text, mark) else ""
        raise ConfigError(f"{where}: {error.problem}{hint}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {error}") from error


def _has_tab(text: str, mark: Any) -> bool:
    lines = text.splitlines()
    return (
        mark is not None
        and mark.line < len(lines)
        and lines[mark.line].lstrip(" ").startswith("\t")
    )


def _yaml_keys(node: yaml.Node, path: KeyPath, file: Path) -> Iterator[tuple[KeyPath, int]]:
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            name = str(key.value)
            if key.tag not in (_TEXT_TAG, _MERGE_TAG):
                raise ConfigError(
                    f"{file}:{line}: {dotted((*path, name))}: YAML reads this key as something "
                    f'else than a text; write "{name}" in quotes.'
                )
            if name in seen and name != "<<":
                raise ConfigError(
                    f"{file}:{line}: {dotted((*path, name))} is there twice, first in line "
                    f"{seen[name]}; expected one of them."
                )
            seen[name] = line
            yield (*path, name), line
            yield from _yaml_keys(value, (*path, name), file)
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            yield (*path, number), value.start_mark.line + 1
            yield from _yaml_keys(value, (*path, number), file)


# ---------------------------------------------------------------------- TOML


def _read_toml(path: Path, text: str) -> tuple[Any, dict[KeyPath, int]]:
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r" \(at line (\d+), column \d+\)", str(error))
        where = f"{path}:{found.group(1)}" if found else str(path)
        problem = str(error).replace(found.group(0), "") if found else str(error)
        raise ConfigError(f"{where}: {problem}.") from error
    return values, dict(_toml_keys(text))


def _toml_keys(text: str) -> Iterator[tuple[KeyPath, int]]:
    """The lines of tables and keys; those of keys within one line's values are not told."""
    table: KeyPath = ()
    for number, line in enumerate(text.splitlines(), start=1):
        header, key = _TOML_TABLE.fullmatch(line), _TOML_KEY.match(line)
        if header:
            table = _toml_path(header.group(1))
            yield table, number
        elif key:
            yield (*table, *_toml_path(key.group(1))), number


def _toml_path(text: str) -> KeyPath:
    return tuple(word.strip("\"'") for word in _TOML_WORD.findall(text))
