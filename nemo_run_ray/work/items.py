"""One call of a function on its way: what is called, how often it was tried, who waits for it."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from nemo_run_ray.errors import CannotBeSent
from nemo_run_ray.work.pickling import Function
from nemo_run_ray.work.worker import RAISED, RESULT, CallOutcome


@dataclass(eq=False)
class Item:
    """One call of a function.

    Attributes:
        function: what is called.
        data: its pickled arguments.
        timeout_s: that the call may take; ``None`` is no limit.
        retries: further attempts after a failure.
        future: gets the result, or the last failure.
        attempts: that have failed.
        node_deaths: deaths of nodes, and of connections to workers, that it has outlived.
        is_alone: it is sent in a batch of its own, since one that it was in did not come back.
        is_given_up: the caller wants no result any more.
        has_met_dead: a worker was found dead to which it was sent.
    """

    function: Function
    data: bytes
    timeout_s: float | None = None
    retries: int = 0
    future: Future[Any] = field(default_factory=Future)
    attempts: int = 0
    node_deaths: int = 0
    is_alone: bool = False
    is_given_up: bool = False
    has_met_dead: bool = False
    _has_begun: bool = False

    def may_begin(self) -> bool:
        """Whether it is still wanted; asked when a worker is about to get it."""
        if not self.is_given_up and not self._has_begun:
            self._has_begun = self.future.set_running_or_notify_cancel()
            self.is_given_up = not self._has_begun
        return not self.is_given_up

    def give_up(self) -> None:
        """Want no result any more; who waits for it is told, unless a worker has it already."""
        if not (self._has_begun or self.is_given_up) and self.future.cancel():
            self.future.set_running_or_notify_cancel()
        self.is_given_up = True

    def succeed(self, outcome: CallOutcome) -> None:
        """Pass on the result."""
        try:
            value = pickle.loads(outcome.data)
        except Exception as error:  # of a class that this program cannot import
            self.future.set_exception(error)
        else:
            self.future.set_result(value)


def fail_all(items: Iterable[Item], error: BaseException) -> None:
    """Let items fail that have not ended."""
    for item in items:
        if item.may_begin() and not item.future.done():
            item.future.set_exception(error)


def words_of(error: BaseException) -> str:
    """What one of Ray's errors says, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:500] or type(error).__name__


def failure_of(item: Item, outcome: CallOutcome) -> BaseException | None:
    """Why an item has failed in its worker; ``None`` when it has not."""
    if outcome.kind == RESULT:
        return None
    if outcome.kind == RAISED:
        return _raised(outcome)
    return CannotBeSent(f"The result of {item.function.name} cannot be sent back: {outcome.text}")


def _raised(outcome: CallOutcome) -> BaseException:
    """What the function raised, with its traceback in the worker as the cause."""
    try:
        error = pickle.loads(outcome.data) if outcome.data else None
    except Exception:  # of a class that this program cannot import, or that wants other arguments
        error = None
    if not isinstance(error, BaseException):
        lines = outcome.text.strip().splitlines()
        error = RuntimeError(lines[-1] if lines else "it raised")
    try:
        error.__cause__ = RemoteTraceback(outcome.text)
    except AttributeError:  # a frozen dataclass
        error = RuntimeError(repr(error))
        error.__cause__ = RemoteTraceback(outcome.text)
    return error


class RemoteTraceback(Exception):
    """The traceback of an exception where it was raised."""

    @property
    def traceback_elsewhere(self) -> str:
        """For ``errors.py``, which prints it above a failure that ends the program."""
        return str(self.args[0])

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'
