"""Our own cluster files: ``${NAME}`` in a text is a variable of the environment."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from typing import Any

from nemo_run_ray.cluster_files.document import Document, KeyPath
from nemo_run_ray.cluster_files.reading import Reading
from nemo_run_ray.errors import ConfigError
from nemo_run_ray.fields import looks_like_credential

NAME = "cluster file"
_NAMES = re.compile(r"\$\{?(\w+)")
#: Texts that keep their ``${NAME}``: a header is saved as it is and filled at every connection.
_KEPT = (("cluster", "headers"),)


def read(document: Document, environ: Mapping[str, str]) -> Reading:
    """The file's own values, with the variables filled in.

    Raises:
        ConfigError: a variable is not set, or a dollar stands alone.
    """
    values = _filled(document.values, (), document, environ)
    sources = {path: document.where(*path) for path in document.lines}
    return Reading(NAME, values, sources)


def _filled(value: Any, path: KeyPath, document: Document, environ: Mapping[str, str]) -> Any:
    if path[:2] in _KEPT:
        return value
    if isinstance(value, dict):
        return {
            key: _filled(inner, (*path, str(key)), document, environ)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [
            _filled(inner, (*path, number), document, environ) for number, inner in enumerate(value)
        ]
    if not isinstance(value, str) or "$" not in value:
        return value
    return _fill(value, path, document, environ)


def _fill(text: str, path: KeyPath, document: Document, environ: Mapping[str, str]) -> str:
    for name in _NAMES.findall(text):
        if looks_like_credential(name):
            problem = (
                f"{name} is the name of a credential, whose value would be shown; list the name "
                "under `secrets:`, and let the task read the variable."
            )
            raise ConfigError(str(document.refuse(path, problem)))
    try:
        return string.Template(text).substitute(environ)
    except KeyError as error:
        problem = f"the environment variable {error.args[0]} is not set; set it and run again."
    except ValueError:
        problem = f"{text!r} has a '$' that begins no ${{NAME}}; write $$ for a dollar."
    raise ConfigError(str(document.refuse(path, problem)))
