"""Tasks of arrays, by names that a node can import."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import random
import signal
import sys
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
    return {"fields": {"seed": seed, "width": width}, "pid": os.getpid(), "random": random.random()}


def waits(path: str) -> None:
    """Says in a file that it has begun, and ends when there is another one.

    For ``…/daemon`` it leaves a process in a session of its own that runs no other program.
    """
    folder = Path(path)
    if folder.name == "daemon":
        folder = folder.parent
        if os.fork() == 0:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if os.fork():
                os._exit(0)
            (folder / "daemon-pid").write_text(str(os.getpid()))
            time.sleep(1000)
            os._exit(0)
        os.wait()
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


def starts_a_process(text: str) -> None:
    """Starts a process by a method of ``multiprocessing``."""
    process = multiprocessing.get_context(text).Process(target=print, args=("started",))
    process.start()
    process.join()
    sys.exit(process.exitcode)
