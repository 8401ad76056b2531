"""What is asked of the dashboard of an embedded Ray before there is a client for it."""

from __future__ import annotations

import http.client
import json
import urllib.request
from typing import Any

from nemo_run_ray.errors import Unanswered
from nemo_run_ray.remote.rows import JobRow

#: Seconds for an answer.
_ANSWER_S = 5.0


def jobs_of(url: str, token: str) -> list[JobRow]:
    """The job table of an embedded Ray, whose dashboard is on this machine.

    Raises:
        Unanswered: there is no answer, or none of the job table.
    """
    rows: list[JobRow] = _answer(f"{url}/api/jobs/", token)
    return rows


def has_node(url: str, token: str) -> bool:
    """Whether a node has joined the embedded Ray: its raylet is up, and the raylet's agents are.

    Raises:
        Unanswered: there is no answer.
    """
    answer = _answer(f"{url}/api/v0/nodes", token)
    try:
        return any(node["state"] == "ALIVE" for node in answer["data"]["result"]["result"])
    except (KeyError, TypeError):
        return True  # a Ray that words it otherwise: then its job table tells


def _answer(url: str, token: str) -> Any:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_ANSWER_S) as answer:
            return json.load(answer)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Unanswered(str(error)) from error
