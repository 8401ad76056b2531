"""Answers that serve all callers of a process for a while, so that many jobs cost few requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from nemo_run_ray.errors import NemoRunRayError

_T = TypeVar("_T")
#: Seconds that a failure serves all callers: it may have taken long to come.
_FAILED_AGE_S = 30.0


class Recent(Generic[_T]):
    """The last answer to each question, for a while; a failure is an answer too.

    Args:
        ask: gives the answer to a question.
        age_s: seconds that an answer serves.
        idle_age_s: the same of an empty answer.
    """

    def __init__(self, ask: Callable[[str], _T], age_s: float, idle_age_s: float) -> None:
        self._ask = ask
        self._age_s, self._idle_age_s = age_s, idle_age_s
        self._lock = threading.Lock()
        self._answers: dict[str, _Answer[_T]] = {}

    def get(self, question: str = "") -> _T:
        """The answer. Threads that ask at once wait for one of them.

        Raises:
            NemoRunRayError: what asking raised.
        """
        with self._lock:
            answer = self._answers.setdefault(question, _Answer())
        with answer.lock:
            if time.monotonic() >= answer.ask_at:
                try:
                    found = self._ask(question)
                    answer.values, answer.error = (found,), None
                    age_s = self._age_s if found else self._idle_age_s
                except NemoRunRayError as failure:
                    answer.error, age_s = failure, _FAILED_AGE_S
                answer.ask_at = time.monotonic() + age_s
            if answer.error is not None:
                raise answer.error
            return answer.values[0]


@dataclass
class _Answer(Generic[_T]):
    """The last answer to one question, and when it is to be asked again."""

    values: tuple[_T, ...] = ()
    error: NemoRunRayError | None = None
    ask_at: float = -1e9
    lock: threading.Lock = field(default_factory=threading.Lock)
