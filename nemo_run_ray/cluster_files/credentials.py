"""Where the value of a variable is found."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

#: ``$NAME`` and ``${NAME}`` in a value of NeMo-Skills.
REFERENCE = re.compile(r"\$(?:\{(\w+)\}|([A-Za-z_]\w*))")
#: Between a file and the variable whose value stands in a list of it.
_ENTRY = "#NAME="
#: Variables that give their value where these are not set, as NeMo-Skills does.
_INSTEAD = {"NGC_API_KEY": "NVIDIA_API_KEY"}


def value_of(
    name: str, places: Sequence[str] = (), environ: Mapping[str, str] = os.environ
) -> str | None:
    """The value of a variable; ``None`` where no place has one.

    Args:
        name: of the variable.
        places: variables, files where there is a ``/``, and ``in_lists`` of a file: the first that
            is there has the value. Without any, those of ``usual_places``.
        environ: variables of the caller's environment.
    """
    for place in places or usual_places(name, environ):
        found = _content(place, environ) if os.sep in place else environ.get(place)
        if found is not None:
            return found
    return None


def usual_places(name: str, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Where a variable that a cluster file asks for gets its value, if the file says nothing.

    It is the variable of that name; then for ``HF_TOKEN`` the file of ``huggingface-cli login``,
    and for ``NGC_API_KEY`` the variable ``NVIDIA_API_KEY``.
    """
    places = [name, *([_INSTEAD[name]] if name in _INSTEAD else [])]
    if name == "HF_TOKEN":
        home = (
            environ.get("HF_HOME") or f"{environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
        )
        places.append(environ.get("HF_TOKEN_PATH") or f"{home}/token")
    return places


def in_lists(path: Path, name: str) -> str:
    """The place of a value that a file of NeMo-Skills gives as ``NAME=value``."""
    return f"{path.absolute()}{_ENTRY}{name}"


def filled(value: str, environ: Mapping[str, str]) -> str:
    """A value with the variables of the environment for ``$NAME`` and ``${NAME}``."""
    return REFERENCE.sub(lambda match: environ[match[1] or match[2]], value)


def _in_lists(text: str, name: str, environ: Mapping[str, str]) -> str | None:
    found = None
    for key in ("required_env_vars", "env_vars"):
        for entry in yaml.safe_load(text).get(key) or ():
            given, equals, value = (part.strip() for part in entry.partition("="))
            if equals and given == name:
                found = filled(value, environ)
    return found


def _content(path: str, environ: Mapping[str, str]) -> str | None:
    path, _, name = path.partition(_ENTRY)
    if path.startswith("~/"):
        path = f"{environ.get('HOME') or ''}{path[1:]}"
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
        return (_in_lists(text, name, environ) if name else text) or None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, AttributeError):
        return None  # nobody has logged in, or the file is another one now
