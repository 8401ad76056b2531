"""The task that runs in Ray's workers: it calls a function for one item after the other.

The task is sent by value and uses the standard library and ray alone, so a cluster needs nothing of
this package. Items and results are pickled here and in the client, not by Ray: an item that cannot
be pickled is named by its number, and the others of its batch are not affected.
"""

from __future__ import annotations

import faulthandler
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

#: Functions that a worker, and a client, keeps; a further one replaces the oldest.
FUNCTIONS_MAX = 100
#: Seconds after which a batch that takes longer than expected returns the results it has.
_BATCH_MAX_S = 0.5
#: Seconds that the imports of a function may take when its calls have a time limit.
_IMPORT_S = 300.0
#: Kinds of an outcome: the pickled result, the pickled exception, or one that cannot be pickled.
RESULT, RAISED, UNPICKLED = "result", "raised", "unpickled"

_functions: dict[str, Callable[..., Any]] = {}


class CallOutcome(NamedTuple):
    """The result or the failure of one item.

    Attributes:
        kind: ``RESULT``, ``RAISED`` or ``UNPICKLED``.
        data: the pickled result or exception; empty when it cannot be pickled.
        text: the traceback of what the function raised, or why a result cannot be pickled.
        seconds: how long the function took.
    """

    kind: str
    data: bytes
    text: str
    seconds: float


def call_items(
    digest: str, function: bytes, items: Sequence[bytes], timeout_s: float | None
) -> Iterator[Any]:
    """Yield the id of this node, then the values of a ``CallOutcome`` for each item.

    There are fewer of them than items when those took long: other workers may take the rest. The
    client ends the worker when a call takes too long; that time begins after the imports.
    """
    import ray

    if timeout_s is not None and digest not in _functions:
        _end_process_after(_IMPORT_S)
    with suppress(BaseException):  # each item reports it
        _load(digest, function)
    faulthandler.cancel_dump_traceback_later()
    yield ray.get_runtime_context().get_node_id()
    yield _call_each(digest, function, items, None)


def call_items_by_client(
    digest: str, function: bytes, items: Sequence[bytes], timeout_s: float | None
) -> list[tuple[Any, ...]]:
    """The same for Ray Client, which has no tasks that yield: this process ends itself."""
    return _call_each(digest, function, items, timeout_s)


def _call_each(
    digest: str, function: bytes, items: Sequence[bytes], timeout_s: float | None
) -> list[tuple[Any, ...]]:
    outcomes: list[tuple[Any, ...]] = []
    until = time.perf_counter() + _BATCH_MAX_S
    for item in items:
        if timeout_s is not None:
            _end_process_after(timeout_s)
        outcomes.append(tuple(_call(digest, function, item)))
        if time.perf_counter() >= until:
            break
    faulthandler.cancel_dump_traceback_later()
    return outcomes


def _end_process_after(seconds: float) -> None:
    """End this process, unless that is cancelled: by a thread in C, whatever Python code does."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)


def _load(digest: str, function: bytes) -> Callable[..., Any]:
    if digest not in _functions:
        loaded = pickle.loads(function)
        while len(_functions) >= FUNCTIONS_MAX:
            del _functions[next(iter(_functions))]
        _functions[digest] = loaded
    return _functions[digest]


def _call(digest: str, function: bytes, item: bytes) -> CallOutcome:
    began = time.perf_counter()
    try:
        called = _load(digest, function)
        arguments, named = pickle.loads(item)
        value = called(*arguments, **named)
    except BaseException as error:  # also SystemExit: it ends the item, not the worker
        took_s, text = time.perf_counter() - began, traceback.format_exc()
        data, _ = _pickled(error)
        return CallOutcome(RAISED, data, text, took_s)
    took_s = time.perf_counter() - began
    data, reason = _pickled(value)
    return CallOutcome(UNPICKLED if reason else RESULT, data, reason, took_s)


def _pickled(value: Any) -> tuple[bytes, str]:
    """A value as bytes, or why it cannot be pickled."""
    from ray import cloudpickle

    try:
        return cloudpickle.dumps(value, protocol=5), ""
    except Exception as error:  # any that an object's own __reduce__ raises
        return b"", f"{type(value).__name__}: {error}"


def remote_task(ray: Any) -> Any:
    """``call_items`` as a Ray task, sent by value with what it uses of this module."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    by_client = ray.util.client.ray.is_connected()
    return ray.remote(call_items_by_client if by_client else call_items)
