"""Many items through workers: a bounded number on their way, results in order or as they come."""

from __future__ import annotations

import queue
import sys
import warnings
from collections.abc import Iterable, Iterator, Sized
from contextlib import nullcontext, suppress
from typing import Any

from nemo_run_ray.errors import CannotBeSent, ItemFailed
from nemo_run_ray.work.engine import Engine
from nemo_run_ray.work.items import Item
from nemo_run_ray.work.pickling import Function, pickle_item
from nemo_run_ray.work.progress import MapProgress
from nemo_run_ray.work.shape import Shape
from nemo_run_ray.work.source import ItemSource

#: Bytes of items, and of results that wait to be taken, at most.
_BYTES_MAX = 256 * 2**20
#: Items that are taken and sent at once, at most.
_AT_ONCE = 100
#: Seconds after which the cluster's room is looked at again while an item is waited for.
_REFILL_S = 0.25
#: Items after which it can be told whether they are too small.
_ENOUGH = 1000
#: Seconds that sending one item and its result costs at least, and a byte of them (measured).
_SENDING_S, _BYTE_S = 20e-6, 2e-9


class Stream:
    """One map.

    Args:
        engine: of the pool.
        shape: what each worker reserves.
        function: that is called.
        timeout_s: that a call may take.
        retries: of an item.
    """

    def __init__(
        self,
        engine: Engine,
        shape: Shape,
        function: Function,
        timeout_s: float | None,
        retries: int,
    ) -> None:
        self._engine = engine
        self._shape = shape
        self._function = function
        self._timeout_s = timeout_s
        self._retries = retries
        #: Numbers of items that have ended, and ``None`` when the source has something to tell.
        self._done: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        #: Items that are on their way, or done and not taken, by number.
        self._live: dict[int, Item] = {}
        self._bytes = 0
        self._sent = self._sent_bytes = 0
        #: Of the iterable, or of an item that cannot be sent: raised behind the results before it.
        self._error: Exception | None = None

    def results(
        self, items: Iterable[Any], ordered: bool, yields_failures: bool, progress: bool | None
    ) -> Iterator[Any]:
        """See ``Pool.map``."""
        ready, turn = set[int](), 0
        shown = sys.stderr.isatty() if progress is None else progress
        total = len(items) if isinstance(items, Sized) else None
        source = ItemSource(items, wake=lambda: self._done.put(None))
        try:
            with MapProgress(self._function.name, total) if shown else nullcontext() as bar:
                while True:
                    self._fill(source, yields_failures)
                    if not self._live and (self._error is not None or source.is_over):
                        if self._error is not None:
                            raise self._error
                        self._advise()
                        return
                    self._collect(ready, source)
                    numbers = self._in_turn(ready, turn) if ordered else sorted(ready)
                    for number in numbers:
                        ready.discard(number)
                        turn = number + 1
                        if bar is not None:
                            bar.advance()
                        yield self._take(number, yields_failures)
        finally:
            source.close()
            self._engine.give_up(list(self._live.values()))

    def _fill(self, source: ItemSource, yields_failures: bool) -> None:
        """Send items while there is room for them; results go before further ones."""
        average = self._bytes / max(len(self._live), 1)
        window = self._engine.window(self._shape, self._function, average)
        each = average + self._engine.pace(self._shape, self._function).result_bytes
        window = min(window, int(_BYTES_MAX / max(each, 1.0)) + 1)
        while len(self._live) < window and (self._done.empty() or not self._live):
            most = min(window - len(self._live), _AT_ONCE)
            items = self._take_items(source, most, yields_failures)
            if wanted := [item for item in items if not item.future.done()]:
                self._engine.submit(self._shape, wanted)
            if not items or self._error is not None:
                return

    def _take_items(self, source: ItemSource, most: int, yields_failures: bool) -> list[Item]:
        """The next items, up to the error that ends the map."""
        items: list[Item] = []
        if self._error is not None:
            return items
        try:
            for value in source.take(most):
                items.append(self._prepare(value, yields_failures))
        except Exception as error:
            self._error = error
        return items

    def _prepare(self, value: Any, yields_failures: bool) -> Item:
        """The next item; one that cannot be sent has failed already, where failures are yielded."""
        number, data, failure = self._sent, b"", None
        try:
            data = pickle_item((value,), {}, f"item {number} of {self._function.name}")
        except CannotBeSent as error:
            if not yields_failures:
                raise
            failure = error
        item = Item(self._function, data, self._timeout_s, self._retries)
        if failure is not None:
            item.future.set_exception(failure)
        item.future.add_done_callback(lambda _: self._done.put(number))
        self._live[number] = item
        self._bytes += len(data)
        self._sent += 1
        self._sent_bytes += len(data)
        return item

    def _collect(self, ready: set[int], source: ItemSource) -> None:
        """Wait until an item has ended, or there is another one, and note all that have ended.

        Where there are more items the wait is short: the cluster may have room for them by now.
        """
        with suppress(queue.Empty):
            found = self._done.get(timeout=None if source.is_over else _REFILL_S)
            while True:
                if found is not None:
                    ready.add(found)
                found = self._done.get_nowait()

    def _in_turn(self, ready: set[int], turn: int) -> list[int]:
        numbers = []
        while turn in ready:
            numbers.append(turn)
            turn += 1
        return numbers

    def _take(self, number: int, yields_failures: bool) -> Any:
        item = self._live.pop(number)
        self._bytes -= len(item.data)
        error = item.future.exception()
        if error is None:
            return item.future.result()
        failed = ItemFailed(number, error, self._function.name)
        if yields_failures:
            return failed
        raise failed from error

    def _advise(self) -> None:
        """Say that items are too small for being sent one by one, if they are."""
        pace = self._engine.pace(self._shape, self._function)
        if self._sent < _ENOUGH or pace.seconds is None:
            return
        sending_s = _SENDING_S + _BYTE_S * (self._sent_bytes / self._sent + pace.result_bytes)
        if pace.median_s < sending_s:
            warnings.warn(
                f"An item of {self._function.name} takes {pace.median_s * 1e6:.0f} µs, and sending "
                f"it about {sending_s * 1e6:.0f} µs: put more work into each item, such as a list "
                "of what are items now.",
                RuntimeWarning,
                stacklevel=3,
            )
