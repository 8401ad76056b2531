"""The allocations of one cluster on Slurm: claimed, looked at, ended, and what they have left.

``on_login.py`` does it beside Slurm; what it answers is judged here.
"""

from __future__ import annotations

import inspect
import json
import os
import shlex
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from nemo_run.config import get_nemorun_home

from nemo_run_ray.clusters import ClusterArchive
from nemo_run_ray.clusters.slurm import on_login
from nemo_run_ray.clusters.slurm.login import Login
from nemo_run_ray.errors import ClusterError, NemoRunRayError
from nemo_run_ray.remote import files
from nemo_run_ray.remote.carried_over import rows_of
from nemo_run_ray.remote.slurm.folder import JOB_LOGS, HeadAddress, RunEnd
from nemo_run_ray.remote.spec import JobRows, Json, rows_in

#: Seconds between two questions to Slurm's controller, which serves everybody.
PAUSE_S = 30.0
#: Seconds for which the script may ask Slurm, several times, for the job of the next allocation,
#: which it has claimed.
RENEWAL_S = 600.0
#: Seconds from the end of an allocation until its script has claimed the next one; clocks of hosts
#: may differ by some minutes.
_ASKING_S = 300.0
#: Seconds for which an answer counts for what is there now.
_TRUST_S = 2.0
_MODULES = {module.__name__: inspect.getsource(module) for module in (files, on_login)}


@dataclass(frozen=True)
class SlurmAllocation:
    """The newest allocation of a cluster, in one look: one Slurm job, and the newest run of it.

    ``clusters/slurm/__init__.py`` explains the files that it is read from.
    """

    number: int  # counts the allocations from 1
    claimed: str = ""  # the user who may submit its job
    is_sent: bool = False  # whether somebody has begun to submit it
    is_renewal: bool = False  # whether it continues the dispatches of the allocation before
    job: str = ""  # Slurm's number of its job; empty until Slurm has taken it
    over: str = ""  # why a client has given it up, of which Slurm had no job
    refused: str = ""  # by `sbatch`, with its message
    stop: str = ""  # why a user has stopped it, or a client gave it up
    run: str = ""  # folder of its newest run, below the allocation's; empty before the first one
    head: HeadAddress | None = None  # once the cluster is ready
    end: RunEnd | None = None  # of that run, once it is over
    token: str = field(default="", repr=False)  # Ray's
    ended_s: float = 0.0  # seconds since that end, by the clocks of two hosts
    # Seconds since the last change of its folder, by the clocks of two hosts: before it has a job,
    # since it was claimed or a file was added.
    unchanged_s: float = 0.0
    # Whether Slurm has answered since the allocation's job, ready.json and end.json changed last.
    slurm_answered: bool = False
    queued: Mapping[str, str] | None = None  # its job as Slurm has it; see on_login._COLUMNS

    @property
    def why_over(self) -> str:
        """The reason why it can serve no client any more; empty while it may."""
        return self.stop or self.over or self.refused or (self.end.why if self.end else "")

    @property
    def is_queued(self) -> bool:
        """Whether its job waits in Slurm's queue."""
        waiting = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD")
        return self.queued is not None and self.queued["state"] in waiting

    @property
    def is_lost(self) -> bool:
        """Whether Slurm has its job no more."""
        return bool(self.job) and self.slurm_answered and not self.queued

    @property
    def asks_for_next(self) -> bool:
        """Whether its script, at its end, asks for the next allocation now."""
        if not self.end or not self.end.renews or self.stop:
            return False
        return self.ended_s < _ASKING_S

    @property
    def may_start_again(self) -> bool:
        """Whether Slurm may start its job again, of which one start has ended."""
        if not self.end or self.stop:
            return False
        if self.is_queued:
            return True
        # Exit code 143 may be a requeue; the next answer of squeue tells. A job of which a node
        # hangs stays in the queue for hours.
        is_unclear = self.queued or not self.slurm_answered
        return self.end.code == 143 and is_unclear and self.ended_s < _ASKING_S


@dataclass(frozen=True)
class History:
    """The runs whose dispatches continue in the newest of them, as ``on_login`` answers."""

    numbers: Sequence[int]  # of their allocations, the newest one first
    runs: Sequence[Json]  # the newest one first
    kept: Sequence[str]  # first ids of the dispatchers and jobs of all kept dispatches
    newest: SlurmAllocation  # of the cluster, seen after the runs

    def rows(self, session: str = "", is_up: bool = False) -> JobRows:
        """The rows of the dispatches in all the runs, and all rows of one run.

        Args:
            session: Ray's name of that run.
            is_up: another run is up by now, so that all of these have ended.
        """
        tables = (run["table"] for run in self.runs if session and run["session"] == session)
        rows = dict(rows_in(next(tables, "")))
        if session and len(self.runs) == 1:
            return rows  # there is no other run
        # Each run has carried the rows of those before it over into its own table.
        latest = next((run for run in self.runs if run["table"]), None)
        if not latest:
            return rows
        # A run is over, also without a recorded end, when there is a newer one.
        is_over = is_up or latest["end"] is not None or latest is not self.runs[0]
        why = latest["end"]["why"] if latest["end"] else ""
        rows.update(rows_of(latest["table"], set(self.kept), latest["written_at"], why, is_over))
        return rows


class Allocations:
    """The allocations of one cluster, as one process sees them.

    Args:
        login: where the folder is.
        folder: of the cluster, absolute.
    """

    def __init__(self, login: Login, folder: str):
        self.login = login
        self.folder = folder
        #: Held by the thread that brings the cluster up; others of this process wait for it.
        self.lock = threading.Lock()
        #: Whether this process is among the users of an allocation.
        self.is_used = False
        self._seen: tuple[float, SlurmAllocation | None] = (float("-inf"), None)
        #: Histories by the session or run that they were asked for, with the time of the question.
        self._histories: dict[str, tuple[float, History | None]] = {}

    def path(self, number: int) -> str:
        return f"{self.folder}/lives/{number}"

    def ask(self, what: str, **arguments: Any) -> Any:
        """Ask on the login node: the answer of a method of ``on_login.ClusterFolder``.

        Raises:
            Unanswered: the connection has broken off; it may have been done.
            ClusterError: it has failed, nobody may log in, or others may write to the folder.
        """
        request = {"folder": self.folder, "do": what, "with": arguments}
        program = (
            "import sys, types\n"
            "sys.version_info < (3, 9) and sys.exit('this python3 is older than 3.9; put a later "
            "one first into PATH, by pre_command of the SSHTunnel')\n"
            f"for name, text in {_MODULES!a}.items():\n"
            "    module = sys.modules[name] = types.ModuleType(name)\n"
            "    exec(text, module.__dict__)\n"
            f"module.main({request!a})"
        )
        python = shlex.quote(sys.executable) if self.login.is_here else "python3"
        answer = json.loads(self.login.run(f"exec {python} -IS - <<'END'\n{program}\nEND"))
        if "untrusted" in answer:
            raise ClusterError(
                f"The folder {self.folder}/lives on {self.login.name} is not safe to use. "
                f"{answer['untrusted']}"
            )
        return answer["answer"]

    # ------------------------------------------------------------------ looking

    def look(self) -> SlurmAllocation | None:
        """The newest allocation; ``None`` before the first one.

        Raises:
            ClusterError: the host cannot be asked.
        """
        row = self.ask("look", pause_s=PAUSE_S)
        allocation = row and _allocation(row)
        self._seen = monotonic(), allocation
        return allocation

    def newest(self) -> SlurmAllocation | None:
        """The newest allocation, a moment old at most; ``None`` before the first one.

        Raises:
            ClusterError: the host cannot be asked.
        """
        at, allocation = self._seen
        return allocation if monotonic() - at < _TRUST_S else self.look()

    def stop(self, why: str) -> bool:
        """End the newest allocation now, with all that runs in it; whether there was one.

        Raises:
            ClusterError: Slurm has not taken its job out of the queue; a second call tries again.
        """
        allocation = self.look()
        self._seen = float("-inf"), None
        if not allocation or allocation.refused:
            return False
        return bool(self.ask("cancel", number=allocation.number, why=why))

    # ------------------------------------------------------------------ archives

    def archive(self, session: str) -> ClusterArchive | None:
        """The archive of a run, with those of the runs that continue its dispatches.

        Raises:
            ClusterError: the host cannot be asked.
        """
        self.newest()  # so that the history is a moment old at most
        history = self._history(session, session=session)
        if not history:
            return None
        reason, continues = _reason(history)
        return ClusterArchive(reason, history.rows(session), partial(self._log, history), continues)

    def earlier(self, allocation: SlurmAllocation) -> ClusterArchive:
        """The jobs before the run that is up, of the dispatches that it continues.

        Raises:
            ClusterError: the host cannot be asked.
        """
        if not allocation.is_renewal and allocation.run.endswith(".0"):
            return ClusterArchive()
        history = self._history(allocation.run, number=allocation.number)
        assert history
        before = [run for run in history.runs if not run["folder"].endswith(allocation.run)]
        history = replace(history, runs=before)
        return ClusterArchive(rows=history.rows(is_up=True), log=partial(self._log, history))

    def _history(self, key: str, **which: str | int) -> History | None:
        """A history, which may be large.

        That of a run is what came before it, and does not change. That of a session is never older
        than the last look at the newest allocation: by that its user may know already that a run
        has ended.
        """
        at, history = self._histories.get(key, (float("-inf"), None))
        if at <= self._seen[0] and not ("number" in which and history):
            at, row = monotonic(), self.ask("history", pause_s=PAUSE_S, **which)
            history = row and History(**{**row, "newest": _allocation(row["newest"])})
            self._histories[key] = at, history
        return history

    def _log(self, history: History, submission_id: str) -> Path | None:
        """The log of a job, which is fetched to this machine if it lies elsewhere."""
        name = f"job-driver-{submission_id}.log"
        run = next((run["folder"] for run in history.runs if name in run["logs"]), None)
        if not run:
            return None
        there = f"{run}/{JOB_LOGS}/{name}"
        if self.login.is_here:
            return Path(there)
        here = Path(get_nemorun_home(), "ray_slurm", "logs", os.path.basename(run), name).absolute()
        with suppress(NemoRunRayError, OSError):  # `logs` tries it again
            if not here.exists():
                here.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                files.write_file(here, self.login.run(f"cat {shlex.quote(there)}", 2**26))
            return here
        return None


def _allocation(row: Json) -> SlurmAllocation:
    """An allocation as ``on_login`` answers it."""
    for name, kind in (("head", HeadAddress), ("end", RunEnd)):
        row[name] = row.get(name) and kind(**row[name])
    return SlurmAllocation(**row)


def _reason(history: History) -> tuple[str, bool]:
    """Explain why runs are over, and say whether their dispatches may continue."""

    def why(run: Json) -> str:
        job = os.path.basename(run["folder"]).partition(".")[0]
        return f"its Slurm job {job} has ended" + (f": {run['end']['why']}" if run["end"] else "")

    newest, last, problem = history.newest, history.runs[0], ""
    # One that was made after the runs were read continues them too.
    if newest.number - newest.is_renewal in history.numbers:
        ended = _last_before(newest, history)
        if ended:
            job = f"Slurm job {newest.job}"
            if newest.asks_for_next or not newest.job:
                job = "the next one, which is being asked for"
            return f"{why(ended)}, and chains continue in {job}, when Ray is up in it", True
        problem = newest.stop or newest.over or newest.refused
    if not last["end"] or not last["end"].get("renews"):
        return why(last), False
    return f"{why(last)}, and the next one did not come{problem and f': {problem}'}", False


def _last_before(newest: SlurmAllocation, history: History) -> Json | None:
    """The last run before the one that comes up next, or is up; ``None`` without one."""
    if newest.asks_for_next or (history.kept and newest.may_start_again):
        return history.runs[0]  # the newest run has ended, and the next one has not begun
    # A script that claimed the allocation may have died before it had a job.
    has_waited = newest.unchanged_s >= RENEWAL_S + _ASKING_S
    is_abandoned = newest.is_renewal and not newest.job and has_waited
    if newest.why_over or newest.is_lost or is_abandoned:
        return None
    # The newest allocation is up or on its way. Its run, if it has begun, is the one that is meant.
    return next(
        (run for run in history.runs if not newest.run or not run["folder"].endswith(newest.run)),
        None,
    )
