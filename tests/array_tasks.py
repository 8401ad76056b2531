"""Tasks of arrays, by names that a node can import."""

from __future__ import annotations

import fcntl
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Model:
    width: int


def train(seed: int, model: Model | None = None) -> dict[str, Any]:
    width = 0 if model is None else model.width
    print(f"trained {seed} with {width}")
    return {
        "fields": {"seed": seed, "width": width},
        "pid": os.getpid(),
        "random": random.random(),
    }


def waits(path: str) -> None:
    """Says in a file that it has begun, and ends when there is another one."""
    folder = Path(path)
    with (folder / f"begun-{os.environ['NEMO_RUN_ARRAY_INDEX']}").open("a") as file:
        file.write("x")
    while not (folder / "go").exists():
        time.sleep(0.02)


def locks(folder: str, seconds: float, number: int) -> None:
    """Holds a lock while it runs, and notes its beginning, its end, and a lock that is held."""
    place = Path(folder)
    mark = f"{os.environ['NEMO_RUN_ARRAY_INDEX']} {os.environ['NEMO_RUN_ATTEMPT']}"

    def note(word: str) -> None:
        with (place / "notes").open("a") as file:
            file.write(f"{mark} {word}\n")

    with (place / f"lock-{number}").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            note("twice")
        note("begin")
        time.sleep(seconds)
        note("end")
