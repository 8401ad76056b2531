"""Functions and items as bytes, and what keeps one from being sent, in words."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nemo_run_ray.errors import CannotBeSent

_SHOWN_MAX = 200


class Function(NamedTuple):
    """A function that workers call.

    Attributes:
        name: for people.
        digest: of its bytes; workers unpickle it once.
        data: the pickled function.
    """

    name: str
    digest: str
    data: bytes


def pickle_function(function: Any) -> Function:
    """The function as bytes.

    Raises:
        CannotBeSent: it is not callable, or cannot be pickled; the message names what it holds.
    """
    name = getattr(function, "__qualname__", None) or type(function).__name__
    if not callable(function):
        raise CannotBeSent(f"{function!r} is not callable; expected is a function of one item.")
    data = _dumps(function, f"the function {name}", [function])
    return Function(name, hashlib.sha256(data).hexdigest(), data)


def pickle_item(arguments: Sequence[Any], named: Mapping[str, Any], what: str) -> bytes:
    """The arguments of one call as bytes.

    Args:
        arguments: without a name.
        named: those with a name.
        what: is sent, for the message.

    Raises:
        CannotBeSent: one of them cannot be pickled.
    """
    parts = [*arguments, *named.values()]
    return _dumps((tuple(arguments), dict(named)), what, parts)


def _dumps(value: Any, what: str, parts: Sequence[Any]) -> bytes:
    """A value as bytes; ``parts`` are searched for what keeps it from being pickled."""
    from ray import cloudpickle

    try:
        return bytes(cloudpickle.dumps(value, protocol=5))
    except Exception as error:  # any that an object's own __reduce__ raises
        held = next(filter(None, map(_culprit, parts)), "")
        raise CannotBeSent(
            f"{what[:1].upper()}{what[1:]} cannot be sent to a worker: {held}{_first_line(error)}. "
            "Send what it is made from, and make it in the function."
        ) from error


def _culprit(value: Any) -> str:
    """Which object inside cannot be pickled, as Ray's own search finds it."""
    from ray.util import inspect_serializability

    try:
        _, failures = inspect_serializability(value, name="it", print_file=io.StringIO())
    except Exception:  # the search calls the object's own code, which has failed before
        return ""
    found = sorted((_path(failure), type(failure.obj).__name__) for failure in failures)
    return "".join(f"{path} is of type {kind}; " for path, kind in found[:1])


def _path(failure: Any) -> str:
    words = [str(word) for word in getattr(failure, "path", ()) if word is not None]
    return ".".join(words or [str(getattr(failure, "name", "it"))])


def _first_line(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]} …"
