"""Scores this node's share of the exercises in the sandbox beside Ray on the same node."""

import json
import os
import socket
import sys
from urllib.request import Request, urlopen

from exercises import EXERCISES


def main() -> bool:
    """Print what passes here; whether that is as it should be."""
    rank, count = int(os.environ["NODE_RANK"]), int(os.environ["WORLD_SIZE"])
    share = EXERCISES[rank::count]
    passed = []
    for exercise in share:
        code = {"code": f"{exercise.solution}\n{exercise.test}\n"}
        url = f"http://127.0.0.1:{os.environ['SANDBOX_PORT']}/run"
        headers = {"Content-Type": "application/json"}
        with urlopen(Request(url, json.dumps(code).encode(), headers), timeout=60) as answer:
            passed.append(json.load(answer)["exit_code"] == 0)
    print(f"{socket.gethostname()}: {sum(passed)} of {len(passed)} solutions pass")
    return passed == [exercise.passes for exercise in share]


if __name__ == "__main__":
    sys.exit(not main())
