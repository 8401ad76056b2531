"""``${oc.env:NAME}`` and ``${oc.env:NAME,default}`` in texts of a file, by OmegaConf.

OmegaConf's own ``oc.env`` reads the environment of this process. Here it is given, so that a
reading depends on its arguments alone, and the names that were asked for are told: some are
credentials.
"""

from __future__ import annotations

import datetime
import inspect
import re
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_run_ray.cluster_files.document import KeyPath

_RESOLVER = "nemo_run_ray.env"
#: ``${oc.env:`` with an even number of backslashes before it, so that it is not escaped.
_ENV = re.compile(r"(?<!\\)((?:\\\\)*)\$\{\s*oc\.env\s*:")
_REFERENCE = re.compile(r"\s*\$\{\s*oc\.env\s*:\s*([A-Za-z_]\w*)\s*(,.*)?\}\s*", re.DOTALL)
_EMPTY = ("", "''", '""', "null")


@dataclass
class _Lookup:
    """One text that is being resolved.

    Attributes:
        environ: where variables are looked for.
        asked: names of variables that were asked for.
        missing: those that are not set and have no default.
    """

    environ: Mapping[str, str]
    asked: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


_LOOKUP: ContextVar[_Lookup] = ContextVar("nemo_run_ray_interpolation")


class Unresolved(Exception):
    """A text cannot be resolved; the message says why, without file and key."""


@dataclass(frozen=True)
class Resolved:
    """A text without interpolations.

    Attributes:
        value: what it stands for; not a text where a whole text names another key.
        asked: names of variables that it asked for.
    """

    value: Any
    asked: tuple[str, ...]


class Interpolation:
    """The interpolations of one table, whose keys may name each other."""

    def __init__(self, table: Mapping[str, Any], environ: Mapping[str, str]) -> None:
        _register()
        self._config = OmegaConf.create(_prepared(table))
        self._environ = environ

    def resolve(self, path: KeyPath, text: str) -> Resolved:
        """What a text at a path of the table stands for.

        Raises:
            Unresolved: a variable or key that it names is missing, or it is not well formed.
        """
        lookup = _Lookup(self._environ)
        token = _LOOKUP.set(lookup)
        try:
            OmegaConf.create([text])
            value: Any = self._config
            for word in path:
                value = value[word]
            if OmegaConf.is_config(value):
                value = OmegaConf.to_container(value, resolve=True)
        except OmegaConfBaseException as error:
            if lookup.missing:
                name = lookup.missing[0]
                raise Unresolved(
                    f"it asks for the variable {name} of your environment, which is not set; set "
                    f"it, or give a default: ${{oc.env:{name},default}}."
                ) from error
            reason = str(error).splitlines()[0].replace(_RESOLVER, "oc.env")
            raise Unresolved(f"it cannot be resolved: {reason}.") from error
        finally:
            _LOOKUP.reset(token)
        return Resolved(value, tuple(lookup.asked))


def variables_of(text: str) -> tuple[list[str], str | None]:
    """The variables of a text that is nothing but one ``${oc.env:…}``, and its last default.

    A default may be such a text again. No variables where the text is something else; the default
    is ``None`` where there is none, and empty for ``''`` and ``null``.
    """
    match = _REFERENCE.fullmatch(text)
    if match is None:
        return [], None
    if match[2] is None:
        return [match[1]], None
    default = match[2][1:].strip()
    names, last = variables_of(default)
    if names:
        return [match[1], *names], last
    return [match[1]], "" if default in _EMPTY else default


def _register() -> None:
    """Make our resolver known to OmegaConf, once in a process.

    Up to 2.3 ``register_resolver`` is the deprecated one, from 2.4 on it is
    ``register_new_resolver``; both versions warn of the deprecated one.
    """
    if OmegaConf.has_resolver(_RESOLVER):
        return
    register: Any = OmegaConf.register_resolver
    if "use_cache" not in inspect.signature(register).parameters:
        register = OmegaConf.register_new_resolver
    register(_RESOLVER, _look_up)


def _look_up(name: Any, *default: Any) -> Any:
    name = str(name)
    lookup = _LOOKUP.get()
    lookup.asked.append(name)
    if name in lookup.environ:
        return lookup.environ[name]
    if not default:
        lookup.missing.append(name)
        raise KeyError(name)
    return None if default[0] is None else str(default[0])


def _prepared(value: Any) -> Any:
    """Plain values for OmegaConf, with our resolver.

    OmegaConf takes no dates and times, and of a text that is not well formed nothing of the table;
    such a text counts only where it is asked for.
    """
    if isinstance(value, Mapping):
        return {str(key): _prepared(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_prepared(item) for item in value]
    if isinstance(value, (datetime.date, datetime.time)):
        return str(value)
    if not isinstance(value, str):
        return value
    try:
        OmegaConf.create([value])
    except OmegaConfBaseException:
        return None
    return _ENV.sub(rf"\1${{{_RESOLVER}:", value)
