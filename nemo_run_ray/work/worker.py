"""What runs in Ray's workers: an actor that calls a function for one item after the other.

The class is sent by value and uses the standard library and ray alone, so that a cluster needs
nothing of this package. Items and results are pickled here and in the client, not by Ray: then one
that cannot be pickled is told by its number, and the others of its batch go on.
"""

from __future__ import annotations

import pickle
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

#: Functions that a worker keeps, and a client of its workers; further ones take the oldest's place.
FUNCTIONS_MAX = 100
#: Seconds after which a batch that takes longer than was expected comes back with what is done.
_BATCH_MAX_S = 0.5
#: Kinds of an outcome: the pickled result, the pickled exception, or one that cannot be pickled.
RESULT, RAISED, UNPICKLED = "result", "raised", "unpickled"


class CallOutcome(NamedTuple):
    """What became of one item.

    Attributes:
        kind: ``RESULT``, ``RAISED`` or ``UNPICKLED``.
        data: the pickled result or exception; empty when it cannot be pickled.
        text: the traceback of what the function raised.
        seconds: that the function took.
    """

    kind: str
    data: bytes
    text: str
    seconds: float


#: The values of a ``CallOutcome``.
_Row = tuple[Any, ...]


class WorkActor:
    """Calls functions for items, one after the other."""

    def __init__(self) -> None:
        self._functions: dict[str, Any] = {}

    def begin(self) -> str:
        """Answer when the worker is there: the id of its node."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def load(self, digest: str, function: bytes) -> None:
        """Load a function and import what it needs, before the time of an item begins.

        When that fails, each item tells so.
        """
        with suppress(BaseException):
            self._keep(digest, function)

    def run(self, digest: str, function: bytes, items: Sequence[bytes]) -> list[_Row]:
        """Call the function for each item; a row of a ``CallOutcome``'s values for each.

        There are fewer rows than items when those took long: others may take what is left.
        """
        rows: list[_Row] = []
        until = time.perf_counter() + _BATCH_MAX_S
        for item in items:
            rows.append(tuple(self._one(digest, function, item)))
            if time.perf_counter() >= until:
                break
        return rows

    def _keep(self, digest: str, function: bytes) -> None:
        loaded = pickle.loads(function)
        while len(self._functions) >= FUNCTIONS_MAX:
            del self._functions[next(iter(self._functions))]
        self._functions[digest] = loaded

    def _one(self, digest: str, function: bytes, item: bytes) -> _Row:
        began = time.perf_counter()
        try:
            if digest not in self._functions:
                self._keep(digest, function)
            arguments, named = pickle.loads(item)
            value = self._functions[digest](*arguments, **named)
        except BaseException as error:  # also SystemExit: it ends the item, not the worker
            took, text = time.perf_counter() - began, traceback.format_exc()
            data, _ = _pickled(error)  # of one that holds a lock its text is left
            return RAISED, data, text, took
        took = time.perf_counter() - began
        data, why = _pickled(value)
        return (UNPICKLED, b"", why, took) if why else (RESULT, data, "", took)


def _pickled(value: Any) -> tuple[bytes, str]:
    """A value as bytes, or why it cannot be pickled."""
    from ray import cloudpickle

    try:
        return cloudpickle.dumps(value, protocol=5), ""
    except Exception as error:  # any that an object's own __reduce__ raises
        return b"", f"{type(value).__name__}: {error}"


def worker_class() -> type:
    """The class of the actors, which is sent by value from now on, with what it uses of here."""
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    return WorkActor
