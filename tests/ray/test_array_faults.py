"""Arrays on one real Ray whose processes die: an element ends once, never runs twice at a time.

An element holds a lock on a file of its own as long as one of its processes lives, so that another
attempt that begins too early finds it locked.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import nemo_run as run
import psutil
import pytest

from nemo_run_ray import array
from nemo_run_ray.jobs.job import RemoteJob
from nemo_run_ray.planning.array import Array
from nemo_run_ray.remote.array.journal import ENDED, records_in
from nemo_run_ray.remote.array.status_file import file_of
from tests import array_tasks
from tests.conftest import processes_of, processes_of_home, wait_for

COUNT = 60
_PROGRAM = (
    "cd {folder}; exec 9>lock-$NEMO_RUN_ARRAY_INDEX; "
    "flock -n 9 || echo $NEMO_RUN_ARRAY_INDEX $NEMO_RUN_ATTEMPT twice >> notes; "
    "echo $NEMO_RUN_ARRAY_INDEX $NEMO_RUN_ATTEMPT begin >> notes; sleep {seconds}; "
    "echo $NEMO_RUN_ARRAY_INDEX $NEMO_RUN_ATTEMPT end >> notes"
)


# ---------------------------------------------------------------------- who dies


def drivers(job: RemoteJob) -> list[int]:
    """The keeper and the runner of the array's driver."""
    return processes_of_home(lambda _, words: "array" in words and job.id in words)


def hosts(job: RemoteJob) -> list[int]:
    found = _with(f"NEMO_RUN_RAY_KEEPER={job.id}/")
    return [pid for pid in found if _parent(pid) in found]


def actors(job: RemoteJob) -> list[int]:
    return processes_of_home(lambda _, words: words[0].startswith("ray::Replicas"))


def warm(job: RemoteJob) -> list[int]:
    """The processes that fork elements."""
    return [pid for pid in processes_of(job.id) if _parent(pid) in hosts(job) and _is_warm(pid)]


def elements(job: RemoteJob) -> list[int]:
    return [pid for pid in processes_of(job.id) if not _is_warm(pid)][:2]


def stopped_hosts(job: RemoteJob) -> list[int]:
    """The actors, after their hosts were stopped: those know nothing of it."""
    for pid in hosts(job):
        os.kill(pid, signal.SIGSTOP)
    return actors(job)


def _with(mark: str) -> list[int]:
    def has(pid: int, words: list[str]) -> bool:
        return mark.encode() in Path(f"/proc/{pid}/environ").read_bytes()

    return processes_of_home(has)


def _parent(pid: int) -> int:
    try:
        return psutil.Process(pid).ppid()
    except psutil.Error:
        return 0


def _is_warm(pid: int) -> bool:
    try:
        words = psutil.Process(pid).cmdline()
    except psutil.Error:
        return False
    is_forks = any(word.endswith("array/warm.py") for word in words)
    return is_forks and _parent(pid) != 0 and not _is_warm(_parent(pid))


VICTIMS = (drivers, hosts, actors, warm, elements, stopped_hosts)


def strike(job: RemoteJob, victims: Callable[[RemoteJob], list[int]]) -> int:
    """Kill them; how many there were."""
    found = victims(job)
    for pid in found:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return len(found)


# ---------------------------------------------------------------------- what must hold


def scripts(folder: Path, seconds: float) -> Array:
    program = _PROGRAM.format(folder=folder, seconds=seconds)
    return array(run.Script(inline=program), over={"env.X": range(COUNT)})


def partials(folder: Path, seconds: float) -> Array:
    task = run.Partial(array_tasks.locks, folder=str(folder), seconds=seconds, number=0)
    return array(task, over={"number": range(COUNT)})


def check(job: RemoteJob, folder: Path, logs: Path) -> None:
    """Each element has ended once in the journal, and no two of its attempts ran together."""
    status = job.wait(timeout_s=240)
    log = "".join(job.log())
    assert status.state.value == "SUCCEEDED", (status, log[-3000:])
    rows = [tuple(line.split()) for line in (folder / "notes").read_text().splitlines()]
    assert not [row for row in rows if row[2] == "twice"], (rows, log[-3000:])
    begins = Counter(row[:2] for row in rows if row[2] == "begin")
    assert set(begins.values()) == {1}, "no attempt begins twice"
    states = Counter(element.state for element in job.select_elements())
    assert states["succeeded"] + states["cancelled"] == COUNT
    done = {row[0] for row in rows if row[2] == "end"}
    assert len(done) >= states["succeeded"]
    path = logs / file_of(job.id, "journal")
    records = list(records_in(path.read_bytes()))
    ends = Counter(one.element for one in records if one.kind == ENDED and not one.code)
    assert set(ends.values()) <= {1}, "an element ends once"
    assert len(ends) == states["succeeded"]
    wait_for(lambda: not processes_of(job.id) and not _with(f"NEMO_RUN_RAY_KEEPER={job.id}/"), 30)


# ---------------------------------------------------------------------- the tests


@pytest.fixture
def logs(dashboard) -> Path:
    """The folder of this Ray's logs, where the journals lie."""
    (pid,) = processes_of_home(lambda _, words: words[0].endswith("gcs_server"))
    (word,) = [one for one in psutil.Process(pid).cmdline() if one.startswith("--log_dir=")]
    return Path(word.partition("=")[2])


@pytest.mark.parametrize("victims", VICTIMS)
def test_an_array_outlives(start, logs, tmp_path, victims):
    is_forked = victims is warm
    job = start((partials if is_forked else scripts)(tmp_path, seconds=0.3), retries=3)
    wait_for(lambda: _ended(tmp_path) >= 4, 90)

    assert strike(job, victims), "there is something to kill"

    check(job, tmp_path, logs)


@pytest.mark.soak
def test_arrays_outlive_everything(start, logs, tmp_path):
    """Up to four strikes at random moments; now and then some elements are cancelled."""
    first = int(os.environ.get("SEED", random.randrange(10**6)))
    broken = []
    for seed in range(first, first + int(os.environ.get("RUNS", "100"))):
        folder = tmp_path / str(seed)
        folder.mkdir()
        try:
            _storm(start, logs, folder, seed)
        except AssertionError as error:
            print(f"seed {seed} is broken: {error}", flush=True)
            broken.append(seed)
    assert not broken


def _storm(start, logs: Path, folder: Path, seed: int) -> None:
    chance = random.Random(seed)
    make = chance.choice([scripts, partials])
    job = start(make(folder, seconds=chance.choice([0.0, 0.1, 0.5])), retries=6)
    told = []
    for _ in range(chance.randrange(1, 5)):
        time.sleep(chance.uniform(0, 6))
        victims = chance.choice(VICTIMS)
        told.append((victims.__name__, strike(job, victims)))
    if chance.random() < 0.3 and _ended(folder) and not job.status.state.is_terminal:
        told.append(("cancel", len(job.cancel_elements(f"{chance.randrange(COUNT)}-{COUNT - 1}"))))
    print(f"seed {seed}: {make.__name__} {told}", flush=True)
    check(job, folder, logs)


def _ended(folder: Path) -> int:
    notes = folder / "notes"
    return notes.read_text().count(" end") if notes.exists() else 0
