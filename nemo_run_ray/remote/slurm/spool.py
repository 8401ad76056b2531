"""Chains that go on in an allocation after another one: their dispatchers are started again."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from contextlib import suppress
from typing import Any, Dict, List, Mapping, Optional, Set

from .. import earlier
from ..attempts import Attempt, attempt_id, attempt_of_row, attempts_of, first_id
from ..node.output import say
from ..rows import JobRows
from ..spec import SUBMISSION_ID
from ..states import JobState
from .run_folder import HeadAddress
from .settings import Settings

#: A dispatcher's exit code when all is decided and not all jobs succeeded, as in
#: ``dispatch/decide.py``.
_NOT_ALL_SUCCEEDED = 8
#: The same when what is left needs more time than the allocation has.
_OUT_OF_TIME = 9
#: Seconds for one request. An archive may be large, and meanwhile the head shows no life.
_ANSWER_S = 15.0


class Spool:
    """The chains that this run of an allocation takes over.

    Args:
        settings: of the head.
        token_path: of the file with Ray's token.
    """

    def __init__(self, settings: Settings, token_path: str) -> None:
        self._settings = settings
        self._token_path = token_path
        self._left: Optional[List[str]] = None
        self._rows: JobRows = {}
        self._decided: Set[str] = set()

    def step(self, head: HeadAddress) -> None:
        """Start the dispatchers that are not started yet; what fails is tried at the next step."""
        if self._left is None:
            try:
                self._left = self._taken_over()
            except OSError:  # the folder cannot be read now
                return
        for folder in list(self._left):
            with suppress(OSError, http.client.HTTPException, ValueError, KeyError):
                self._start(head, folder)
                self._left.remove(folder)

    def has_open(self, rows: List[Any], out_of_time: bool) -> bool:
        """Whether a chain that was started is left with which not everything is decided.

        Args:
            rows: Ray's job table as it is now.
            out_of_time: count only one whose dispatcher had no time for what is left. Another that
                has died would die again.
        """
        table: Dict[str, Any] = dict(self._rows)
        table.update((str(row.get("submission_id")), row) for row in rows if isinstance(row, dict))
        found = False
        for folder in earlier.chains(self._settings.life):
            if folder not in self._decided:
                attempts = _attempts(os.path.basename(folder), table)
                if _is_decided(attempts):
                    self._decided.add(folder)
                    _empty(folder)
                elif attempts:
                    newest = attempts[max(attempts)]
                    found |= not out_of_time or newest.exit_code == _OUT_OF_TIME
        return found

    def dispatchers(self) -> Set[str]:
        """Ids of the dispatchers of all chains."""
        return {os.path.basename(folder) for folder in earlier.chains(self._settings.life)}

    def _taken_over(self) -> List[str]:
        life, run = self._settings.life, self._settings.run
        if not life or not earlier.goes_on(life, run):
            return []
        self._rows = earlier.rows_before(life, run)
        found = []
        for folder in earlier.chains(life):
            attempts = _attempts(os.path.basename(folder), self._rows)
            # One without an attempt is of another life, or its client died before it was sent.
            if attempts and not _is_decided(attempts):
                found.append(folder)
        return found

    def _start(self, head: HeadAddress, folder: str) -> None:
        with open(os.path.join(folder, "start.json"), encoding="utf-8") as file:
            start = json.load(file)
        for name in start["archives"]:
            with open(os.path.join(folder, name), "rb") as archive:
                self._send(head, "PUT", f"/api/packages/gcs/{name}", archive.read())
        body = start["body"]
        first = body["submission_id"]
        number = 1 + max(_attempts(first, self._rows), default=0)
        body["submission_id"] = attempt_id(first, number)
        body["entrypoint"] = body["entrypoint"].replace(SUBMISSION_ID, body["submission_id"])
        self._send(head, "POST", "/api/jobs/", json.dumps(body).encode())
        say(f"The chain {first} goes on, by {body['submission_id']}.")

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
                if b"already exists" not in error.read():  # else a client has started it
                    raise


def _attempts(first: str, rows: JobRows) -> Dict[int, Attempt]:
    table = {name: attempt_of_row(row) for name, row in rows.items() if first_id(name) == first}
    return attempts_of([first], table)[first]


def _is_decided(attempts: Mapping[int, Attempt]) -> bool:
    """Whether a dispatcher of a chain has said that there is nothing left to do."""
    return any(
        one.status.state is JobState.SUCCEEDED or one.exit_code == _NOT_ALL_SUCCEEDED
        for one in attempts.values()
    )


def _empty(folder: str) -> None:
    """Remove what a chain that is decided does not need; its ids tell which rows are its own."""
    with suppress(OSError):  # what is left does no harm
        for name in os.listdir(folder):
            if name != earlier.IDS:
                os.unlink(os.path.join(folder, name))
