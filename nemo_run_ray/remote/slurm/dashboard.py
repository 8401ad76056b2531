"""What the head asks of its own dashboard."""

from __future__ import annotations

import http.client
import json
import urllib.request
from typing import Any

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
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with open(token_path, encoding="ascii") as file:
            headers = {"Authorization": f"Bearer {file.read()}"}
        url = f"http://127.0.0.1:{head.dashboard_port}{path}"
        with opener.open(urllib.request.Request(url, headers=headers), timeout=_ANSWER_S) as answer:
            return json.load(answer)
    except (OSError, http.client.HTTPException, ValueError):
        return None
