"""Dispatches that go on in an allocation after another one: their dispatchers are started again."""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from contextlib import suppress
from typing import Any, Callable, Dict, List, Mapping, Optional, Set

from .. import earlier
from ..attempts import (
    Attempt,
    JobExit,
    attempt_id,
    attempt_of_row,
    attempts_of,
    first_id,
    started_as,
)
from ..node.output import say
from ..rows import JobRows
from ..states import JobState
from .run_folder import HeadAddress
from .settings import Settings

#: Seconds for one request. An archive may be large, and meanwhile the head shows no life.
_ANSWER_S = 10.0
#: Seconds until a request that has failed is tried again, and after how many tries a dispatch is
#: given up: an allocation does not stay for its sake.
_PAUSE_S, _TRIES = 5.0, 60


class Spool:
    """The dispatches that this run of an allocation takes over.

    Args:
        settings: of the head.
        token_path: of the file with Ray's token.
        clock: seconds that only grow.
    """

    def __init__(
        self, settings: Settings, token_path: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._token_path = token_path
        self._left: Optional[List[str]] = None
        self._rows: JobRows = {}
        self._sent: Set[str] = set()
        self._decided: Set[str] = set()
        self._told: Dict[str, str] = {}
        self._tries: Dict[str, int] = {}
        self._pause_until = float("-inf")

    def step(self, head: HeadAddress) -> None:
        """Go one request further with the first dispatch whose dispatcher is not started yet.

        Between two requests the head shows that it lives. What fails is tried again, after the
        other dispatches.
        """
        if not self.is_busy or self._clock() < self._pause_until:
            return
        about = ""
        try:
            if self._left is None:
                self._left = self._taken_over()
            elif self._left:
                about = os.path.basename(self._left[0])
                if self._go_on(head, self._left[0]):
                    del self._left[0]
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            self._failed(about, f"{error or type(error).__name__}")

    @property
    def is_busy(self) -> bool:
        """Whether a dispatcher is not started yet."""
        return self._left is None or bool(self._left)

    def clear(self) -> None:
        """Remove what is kept of dispatches that went on nowhere, before clients can add some.

        Their ids stay: they tell which rows of old job tables are theirs.
        """
        life, run = self._settings.life, self._settings.run
        with suppress(OSError):  # what is left does no harm
            if life and not earlier.goes_on(life, run):
                for folder in earlier.kept_dispatches(life):
                    _empty(folder)

    def open_dispatches(self, rows: List[Any], out_of_time: bool) -> List[str]:
        """Ids of the dispatchers of dispatches that were started and are not decided.

        Args:
            rows: Ray's job table as it is now.
            out_of_time: only those whose dispatcher had no time for what is left. Another that
                has died would die again.

        Raises:
            OSError: the dispatches cannot be read now.
        """
        table: Dict[str, Any] = dict(self._rows)
        table.update((str(row.get("submission_id")), row) for row in rows if isinstance(row, dict))
        found = []
        folders = [
            it for it in earlier.kept_dispatches(self._settings.life) if it not in self._decided
        ]
        attempts = _attempts([os.path.basename(folder) for folder in folders], table)
        for folder in folders:
            name = os.path.basename(folder)
            own = attempts[name]
            if _is_decided(own) or not earlier.is_there(os.path.join(folder, earlier.START)):
                self._decided.add(folder)
                _empty(folder)
            elif own and (not out_of_time or own[max(own)].exit_code == JobExit.OUT_OF_TIME):
                found.append(name)
        return found

    def is_taken_over(self, dispatcher: str) -> bool:
        """Whether a dispatch was handed over in an allocation before this one."""
        return any(first_id(name) == dispatcher for name in self._rows)

    def dispatchers(self) -> Set[str]:
        """Ids of the dispatchers of all dispatches.

        Raises:
            OSError: the dispatches cannot be read now.
        """
        return {os.path.basename(folder) for folder in earlier.kept_dispatches(self._settings.life)}

    def _taken_over(self) -> List[str]:
        life, run = self._settings.life, self._settings.run
        if not life or not earlier.goes_on(life, run):
            return []
        self._rows = earlier.rows_before(life, run)
        folders = earlier.kept_dispatches(life)
        attempts = _attempts([os.path.basename(folder) for folder in folders], self._rows)
        found = ((folder, attempts[os.path.basename(folder)]) for folder in folders)
        # One without an attempt is of another life, or its client died before it was sent.
        return [folder for folder, own in found if own and not _is_decided(own)]

    def _go_on(self, head: HeadAddress, folder: str) -> bool:
        """Send the next archive of a dispatch, or start its dispatcher; whether it was the last."""
        with open(os.path.join(folder, earlier.START), encoding="utf-8") as file:
            start = json.load(file)
        for name in start["archives"]:
            if name not in self._sent:
                with open(os.path.join(folder, name), "rb") as archive:
                    self._send(head, "PUT", f"/api/packages/gcs/{name}", archive.read())
                self._sent.add(name)
                return False
        body = start["body"]
        first = body["submission_id"]
        number = 1 + max(_attempts([first], self._rows)[first], default=0)
        body["submission_id"] = attempt_id(first, number)
        body["entrypoint"] = started_as(body["entrypoint"], body["submission_id"])
        self._send(head, "POST", "/api/jobs/", json.dumps(body).encode())
        say(f"The chain {first} goes on, by {body['submission_id']}.")
        return True

    def _failed(self, about: str, why: str) -> None:
        """Say once what is tried again, and give a dispatch up that fails for too long."""
        self._pause_until = self._clock() + _PAUSE_S
        what = f"The chain {about} cannot go on" if about else "Earlier chains cannot be read"
        if self._told.get(about) != why:
            say(f"{what} yet: {why}")
            self._told[about] = why
        self._tries[about] = self._tries.get(about, 0) + 1
        is_given_up = self._tries[about] >= _TRIES
        if is_given_up:
            say(f"{what}, and {'is given up' if about else 'none of them goes on here'}: {why}")
        if not about:
            self._left = [] if is_given_up else None
        elif self._left:
            folder = self._left.pop(0)
            self._left += [] if is_given_up else [folder]

    def _send(self, head: HeadAddress, method: str, path: str, data: bytes) -> None:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with open(self._token_path, encoding="ascii") as file:
            headers = {"Authorization": f"Bearer {file.read()}", "Content-Type": "application/json"}
        url = f"http://127.0.0.1:{head.dashboard_port}{path}"
        request = urllib.request.Request(url, data, headers, method=method)
        try:
            with opener.open(request, timeout=_ANSWER_S) as answer:
                answer.read()
        except urllib.error.HTTPError as error:
            with error:
                said = error.read()
                if b"already exists" not in said:  # else a client has started it
                    raise ValueError(f"Ray answered {error.code}: {said[-300:]!r}") from error


def _attempts(firsts: List[str], rows: JobRows) -> Dict[str, Dict[int, Attempt]]:
    """The attempts of dispatchers, by first id and number."""
    wanted = set(firsts)
    table = {name: attempt_of_row(row) for name, row in rows.items() if first_id(name) in wanted}
    return attempts_of(firsts, table)


def _is_decided(attempts: Mapping[int, Attempt]) -> bool:
    """Whether a dispatcher of a dispatch has said that there is nothing left to do."""
    return any(
        attempt.status.state is JobState.SUCCEEDED or attempt.exit_code == JobExit.SOME_FAILED
        for attempt in attempts.values()
    )


def _empty(folder: str) -> None:
    """Remove what a dispatch that is decided does not need; its ids tell which rows are its own."""
    with suppress(OSError):  # what is left does no harm
        for name in os.listdir(folder):
            if name != earlier.IDS:
                os.unlink(os.path.join(folder, name))
