"""The functions that the items of one queue call: each of them is kept once, and not for ever.

A program may make a function for each call, by ``functools.partial`` or a closure with its data.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from nemo_run_ray.work.batching import Pace
from nemo_run_ray.work.pickling import Function
from nemo_run_ray.work.worker import FUNCTIONS_MAX


@dataclass(eq=False)
class _Known:
    function: Function
    pace: Pace = field(default_factory=Pace)
    stored: Any = None


class Functions:
    """The functions that were used last; any thread may ask.

    Args:
        ray: the module, connected.
    """

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._lock = threading.Lock()
        self._known: OrderedDict[str, _Known] = OrderedDict()

    def pace(self, function: Function) -> Pace:
        """What items of a function have cost."""
        return self._get(function).pace

    def same(self, function: Function) -> Function:
        """An equal function, of which there is one copy for all items."""
        return self._get(function).function

    def stored(self, function: Function) -> Any:
        """A function in Ray's object store."""
        known = self._get(function)
        if known.stored is None:
            known.stored = self._ray.put(function.data)
        return known.stored

    def _get(self, function: Function) -> _Known:
        with self._lock:
            known = self._known.get(function.digest)
            if known is None:
                known = self._known[function.digest] = _Known(function)
            self._known.move_to_end(function.digest)
            while len(self._known) > FUNCTIONS_MAX:
                self._known.popitem(last=False)
            return known
