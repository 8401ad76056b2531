"""What all benchmarks share. Imported first: it sets the home before NeMo-Run reads it."""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

_T = TypeVar("_T")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
#: Adds a row to the table of results: what, figure, promise.
Add = Callable[..., None]
FOLDER = Path(tempfile.mkdtemp(prefix="nrr-bench-"))
# Registered before what leaves the embedded Ray at the end, and so done after it.
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
os.environ["NEMORUN_HOME"] = str(FOLDER / "home")
# LocalExecutor takes the first python on PATH, and this environment need not be activated.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


def quietly(work: Callable[[], None]) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        work()


def wait_for(question: Callable[[], _T | None], within_s: float = 120) -> _T:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        answer = question()
        if answer:
            return answer
        time.sleep(0.02)
    raise TimeoutError(f"not true within {within_s} s")


def ratio_range(times: Sequence[float], peers: Sequence[float]) -> tuple[float, float]:
    """The range of the ratio of medians in 90 % of 1,000 bootstrap samples of these rounds.

    The times of one round stay together: a machine that is slower for a while is so for both.
    """
    rounds, draw = list(zip(times, peers, strict=True)), random.Random(0)
    samples = [draw.choices(rounds, k=len(rounds)) for _ in range(1000)]
    medians = [map(statistics.median, zip(*sample, strict=True)) for sample in samples]
    ratios = sorted(own / other for own, other in medians)
    return ratios[50], ratios[-51]


def apart(program: str, *given: Any) -> dict[str, Any]:
    """Run a program in a process and a NeMo-Run home of its own.

    Args:
        program: its text; the last line that it prints is a JSON object.
        given: what it finds in its first argument, as a JSON list.
    """
    with tempfile.TemporaryDirectory(prefix="nrr-bench-") as home:
        done = subprocess.run(
            [sys.executable, "-c", program, json.dumps(given)],
            env={**os.environ, "NEMORUN_HOME": home},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
