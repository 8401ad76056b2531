"""A worker that cannot be reached: has it died alone, or with its node?

Ray tells within seconds that the connection to an actor is broken, and needs up to a minute to
count its node as dead. Until then nobody knows whether the item has killed its worker.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from nemo_run_ray.work.items import words_of

#: Seconds until a worker of which nothing is heard counts as lost: twice what Ray needs to count a
#: node as dead.
_LOST_S = 120.0


class Doubt:
    """What is found out about such a worker.

    Args:
        ray: the module, connected.
        handle: Ray's, of the actor.
        why: it cannot be reached, in Ray's words.
        notify: takes a function that the engine's thread shall call.
        now: the time.

    Attributes:
        why: Ray's words for its death, or for why it cannot be reached while no death is known.
        is_over: it is known what has become of it.
        is_lost: it has died with its node, or was cut off: by nothing that its item did.
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
        self.is_over = self.is_lost = False
        self._ray = ray
        self._handle = handle
        self._notify = notify
        self._lost_at = now + _LOST_S
        self._ask()

    def step(self, now: float, has_node: bool) -> None:
        """Ask again, or come to an end; called once a second or so.

        Args:
            now: the time.
            has_node: Ray counts the worker's node as alive.
        """
        if self.is_over:
            return
        if now >= self._lost_at or not has_node:
            self.is_lost = self.is_over = True
        elif self._shall_ask:
            self._ask()

    def _ask(self) -> None:
        self._shall_ask = True
        # The connection to Ray may be closed: then the pool is at its end, too.
        with suppress(self._ray.exceptions.RayError, RuntimeError, OSError):
            answer = self._handle.begin.remote().future()
            self._shall_ask = False
            answer.add_done_callback(lambda done: self._notify(partial(self._answered, done)))

    def _answered(self, answer: Future[Any]) -> None:
        error = answer.exception()
        if error is None:  # it lives, and what it was at has no answer
            self.is_lost = self.is_over = True
        elif isinstance(error, self._ray.exceptions.ActorDiedError):
            self.is_over, self.why = True, words_of(error)
        else:
            self._shall_ask = True
