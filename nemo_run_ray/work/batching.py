"""How many items travel together, and which, and how many are on their way.

A call of an actor costs some 0.5 ms on both sides. Items that take less than that are sent
together; items that take longer are sent one by one, so that a slow one keeps no other waiting.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from nemo_run_ray.work.items import Item

#: Seconds that a batch should take: a hundred times what its call costs.
BATCH_S = 0.05
#: Items and bytes of one batch at most.
BATCH_MAX, BATCH_BYTES_MAX = 1000, 2**20
#: Batches that one worker holds: the next one is there when the first is done.
HELD = 2
#: Longer calls than this are not held by a worker that has one already: another may be free first.
HOLD_S = 0.25
#: How much a new measure counts.
_WEIGHT = 0.2
#: By how much a new measure moves the median, and the shortest time that it begins with.
_STEP, _SHORTEST_S = 1.05, 1e-7


@dataclass
class Pace:
    """What items of one function have cost so far.

    Attributes:
        seconds: that one item takes; ``None`` until one has ended.
        median_s: seconds that half of the items stay below, estimated: unlike the mean it does not
            follow the few that a busy machine has interrupted.
        result_bytes: of one result.
    """

    seconds: float | None = None
    median_s: float = 0.0
    result_bytes: float = 0.0

    def measured(self, seconds: float, result_bytes: int) -> None:
        """Take the cost of one more item into account."""
        if self.seconds is None:
            self.seconds, self.result_bytes = seconds, float(result_bytes)
            self.median_s = max(seconds, _SHORTEST_S)
            return
        self.median_s *= _STEP if seconds > self.median_s else 1 / _STEP
        self.seconds += _WEIGHT * (seconds - self.seconds)
        self.result_bytes += _WEIGHT * (result_bytes - self.result_bytes)

    def batch(self, waiting: int, workers: int, item_bytes: float) -> int:
        """How many items the next call shall have.

        Args:
            waiting: items that no worker has.
            workers: that can take some.
            item_bytes: of one pickled item.
        """
        if self.seconds is None:
            return 1
        by_time = BATCH_S / max(self.seconds, 1e-6)
        by_size = BATCH_BYTES_MAX / max(item_bytes, self.result_bytes, 1.0)
        # At the end of the work each worker gets its share of what is left.
        by_share = -(-waiting // max(workers * HELD, 1))
        return max(1, min(int(by_time), int(by_size), by_share, BATCH_MAX))

    def held(self, items: int) -> int:
        """How many calls a worker may hold, of so many items each."""
        if self.seconds is None:
            return 1
        return HELD if self.seconds * items <= HOLD_S else 1

    def window(self, workers: int, item_bytes: float) -> int:
        """How many items may be on their way, or done and not taken, to keep all workers busy."""
        # The share of the end is none of a stream that goes on.
        batch = self.batch(BATCH_MAX * workers * HELD, workers, item_bytes)
        return max(workers, 1) * batch * (HELD + 1)


def alike(waiting: Iterable[Item], most: int) -> list[Item]:
    """The items at the front that can be in one call, so many at most.

    They are of one function with one limit of time, and not more than ``BATCH_BYTES_MAX`` together.

    Args:
        waiting: at least one item.
        most: of them.
    """
    items = iter(waiting)
    first = next(items)
    batch, size_bytes = [first], len(first.data)
    for item in islice(items, 0 if first.is_alone else most - 1):
        size_bytes += len(item.data)
        is_like = item.function.digest == first.function.digest and not item.is_alone
        if not is_like or item.timeout_s != first.timeout_s or size_bytes > BATCH_BYTES_MAX:
            break
        batch.append(item)
    return batch
