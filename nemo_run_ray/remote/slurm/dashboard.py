"""What the head asks of its own dashboard."""

from __future__ import annotations

import http.client
import json
import urllib.request
from typing import Any, Optional
from urllib.parse import urlencode

from ..dashboard import ANSWER_S, LINES, LOG_FILE, log_query
from .run_folder import HeadAddress

#: Seconds for one answer.
_ANSWER_S = 5.0


def answer_of(head: HeadAddress, token_path: str, path: str) -> Any:
    """The answer to a GET, as JSON; ``None`` when there is none now.

    Args:
        head: where the dashboard is; it is asked on this node.
        token_path: of the file with Ray's token.
        path: of the request.
    """
    try:
        return json.loads(_ask(head, token_path, path))
    except (OSError, http.client.HTTPException, ValueError):
        return None


def log_end(head: HeadAddress, token_path: str, node: str, submission_id: str) -> Optional[str]:
    """The end of a job's log; ``None`` when it cannot be had now."""
    query = {**log_query(node, submission_id, LINES), "timeout": str(ANSWER_S)}
    try:
        text = _ask(head, token_path, f"{LOG_FILE}?{urlencode(query)}")
        return text.decode(errors="replace") or None
    except (OSError, http.client.HTTPException, ValueError):
        return None


def _ask(head: HeadAddress, token_path: str, path: str) -> bytes:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with open(token_path, encoding="ascii") as file:
        headers = {"Authorization": f"Bearer {file.read()}"}
    url = f"http://127.0.0.1:{head.dashboard_port}{path}"
    with opener.open(urllib.request.Request(url, headers=headers), timeout=_ANSWER_S) as answer:
        return bytes(answer.read())
