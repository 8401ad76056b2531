"""Arrays whose elements note what becomes of them, and what must hold whatever dies meanwhile.

An element holds a lock on a file of its own as long as one of its processes lives, so that another
attempt that begins too early finds it locked.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

import nemo_run as run

from nemo_run_ray import array
from nemo_run_ray.experiment.job import RemoteJob
from nemo_run_ray.plan.array import Array
from nemo_run_ray.remote.array.elements import ENDED, Record, read_records
from nemo_run_ray.remote.node.rundir import run_dirs
from nemo_run_ray.remote.status import JOURNAL_FILE, file_of
from tests import array_tasks
from tests.conftest import processes_of, processes_with

COUNT = 60
_PROGRAM = (
    "cd {folder}; exec 9>lock-$NEMO_RUN_ARRAY_INDEX; "
    "flock -n 9 || echo $NEMO_RUN_ARRAY_INDEX $NEMO_RUN_ATTEMPT twice >> notes; "
    "echo $NEMO_RUN_ARRAY_INDEX $NEMO_RUN_ATTEMPT begin >> notes; {wait}sleep {seconds}; "
    "echo $NEMO_RUN_ARRAY_INDEX $NEMO_RUN_ATTEMPT end >> notes"
)


#: Until a file is there, or for as many elements as it takes to see that the array has begun.
_GATE = "until [ -e go ] || [ $NEMO_RUN_ARRAY_INDEX -lt 6 ]; do sleep 0.2; done; "


def scripts(folder: Path, seconds: float, is_gated: bool = False) -> Array:
    """Elements that sleep; of a gated array all but six wait for the file ``go`` first."""
    wait = _GATE if is_gated else ""
    program = _PROGRAM.format(folder=folder, seconds=seconds, wait=wait)
    return array(run.Script(inline=program), over={"env.X": range(COUNT)})


def partials(folder: Path, seconds: float) -> Array:
    task = run.Partial(array_tasks.locks, folder=str(folder), seconds=seconds, number=0)
    return array(task, over={"number": range(COUNT)})


def check(job: RemoteJob, folder: Path, logs: Path | None, unseen: int) -> None:
    """Each element has ended once in the journal, and no two of its attempts ran together.

    Args:
        job: the array.
        folder: of its notes.
        logs: Ray's folder of logs, if it is here.
        unseen: elements that may have run once more after they have noted their end, since a strike
            came before anybody saw their exit codes.
    """
    status = job.wait(timeout_s=240)
    log = "".join(job.log())
    assert status.state.value == "SUCCEEDED", (status, log[-3000:])
    rows = [tuple(line.split()) for line in (folder / "notes").read_text().splitlines()]
    assert not [row for row in rows if row[2] == "twice"], (rows, log[-3000:])
    begins = Counter(row[:2] for row in rows if row[2] == "begin")
    assert set(begins.values()) == {1}, "no attempt begins twice"
    again = {
        row[:2] for row in rows if row[2] == "end" and (row[0], str(int(row[1]) + 1)) in begins
    }
    assert len(again) <= unseen, (again, "ended, and ran once more", log[-3000:])
    elements = job.select_elements()
    succeeded = {one.index for one in elements if one.state == "succeeded"}
    assert len(succeeded) + sum(one.state == "cancelled" for one in elements) == COUNT
    assert succeeded <= {int(row[0]) for row in rows if row[2] == "end"}
    if logs is not None:
        ends = defaultdict(list)
        for one in read_records(str(logs / file_of(job.id, JOURNAL_FILE))):
            if isinstance(one, Record) and one.kind == ENDED:
                ends[one.element].append(one.code)
        assert all(0 not in codes[:-1] for codes in ends.values()), "nothing follows a success"
        assert {index for index, codes in ends.items() if codes[-1] == 0} == succeeded
    deadline = time.monotonic() + 30
    while (left := [*processes_of(job.id), *supervisors(job), *_left(job)]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.2)
    assert not left, (left, log[-3000:])


def _left(job: RemoteJob) -> list[Path]:
    """Run directories and notes of its hosts."""
    return list(Path(run_dirs(tempfile.gettempdir())).glob(f"{job.id}~*"))


def supervisors(job: RemoteJob) -> list[int]:
    """The processes of this package that look after elements, and their watchdogs."""
    return processes_with(f"NEMO_RUN_RAY_SUPERVISOR={job.id}/")


def ended(folder: Path) -> int:
    """How many elements have noted their end."""
    notes = folder / "notes"
    return notes.read_text().count(" end") if notes.exists() else 0
