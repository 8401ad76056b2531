"""A way to the dashboard that loses answers while a file says so: ``dropping.py PORT URL FILE``."""

import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from flaky_proxy import DropAnswer, Fault, FlakyProxy


def main(port: int, url: str, file: Path) -> None:
    chance = random.Random(0)

    def choose(line: str) -> Fault:
        try:
            share = float(file.read_text() or 0)
        except FileNotFoundError:
            share = 0.0
        return DropAnswer() if chance.random() < share else Fault()

    with FlakyProxy(url, choose, address=("", port)):
        while True:
            time.sleep(3600)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
