"""A user's Ray program: calls a function for many numbers, on all hosts.

``spread_work.py ADDRESS FOLDER COUNT``. Each call notes its number and its host in the folder's
``begun``; its ``results`` are a JSON list of ``[number, host]`` in the order of the numbers, and an
item that has failed is printed instead.
"""

import json
import socket
import sys
import time
from pathlib import Path

from nemo_run_ray import work


def main(address: str, folder: Path, count: int) -> None:
    def note(number: int) -> list:
        host = socket.gethostname()
        with open(folder / "begun", "a") as file:
            file.write(f"{number} {host}\n")
        time.sleep(0.5)
        return [number, host]

    with work.connect(address) as pool:
        results = list(pool.map(note, range(count), failures="yield", progress=False))
    failed = [one for one in results if isinstance(one, work.ItemFailed)]
    print(*failed, sep="\n", file=sys.stderr)
    found = [one for one in results if one not in failed]
    (folder / "results").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
