"""A worker that cannot be reached: has it died alone, or with its node?

Ray tells at once that the connection to an actor is broken, and needs up to a minute to count its
node as dead. Until then nobody knows whether the item has killed its worker.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from nemo_run_ray.work.items import words_of

#: Seconds between two looks, and until a worker of which nothing is heard counts as lost.
_LOOK_S, _LOST_S = 1.0, 120.0


class Doubt:
    """What is found out about such a worker.

    Args:
        ray: the module, connected.
        handle: Ray's, of the actor.
        why: it cannot be reached, in Ray's words.
        notify: takes a function that the engine's thread shall call.
        now: the time.

    Attributes:
        why: it is dead, in Ray's words; until that is known, why it cannot be reached.
        is_lost: it was cut off, with its node or alone, by nothing that the item did.
    """

    def __init__(
        self,
        ray: Any,
        handle: Any,
        why: str,
        notify: Callable[[Callable[[], None]], None],
        now: float,
    ) -> None:
        self.why = why
        self.is_lost = False
        self._ray = ray
        self._handle = handle
        self._notify = notify
        self._is_over = False
        self._look_at, self._lost_at = now + _LOOK_S, now + _LOST_S
        self._ask()

    def is_over(self, now: float, is_node_alive: Callable[[], bool]) -> bool:
        """Whether it is known by now what has become of the worker.

        Args:
            now: the time.
            is_node_alive: asks whether Ray counts the worker's node as alive.
        """
        if self._is_over or now < self._look_at:
            return self._is_over
        self._look_at = now + _LOOK_S
        if now >= self._lost_at or not is_node_alive():
            self.is_lost = self._is_over = True
        elif self._shall_ask:
            self._ask()
        return self._is_over

    def _ask(self) -> None:
        self._shall_ask = False
        answer = self._handle.begin.remote().future()
        answer.add_done_callback(lambda done: self._notify(partial(self._answered, done)))

    def _answered(self, answer: Future[Any]) -> None:
        error = answer.exception()
        if isinstance(error, self._ray.exceptions.ActorUnavailableError):
            self._shall_ask = True
            return
        self._is_over = True
        if error is None:  # it lives, and what it was at has no answer
            self.is_lost = True
        else:
            self.why = words_of(error)
