"""What an allocation that has ended has left: how it ended, Ray's job table, the logs of jobs."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from nemo_run.config import get_nemorun_home

from nemo_run_ray.clusters.slurm.login import Login
from nemo_run_ray.errors import NemoRunRayError
from nemo_run_ray.remote.rows import JobRows, job_rows
from nemo_run_ray.remote.slurm.folder import JOB_LOGS, RunEnd


@dataclass(frozen=True)
class Remains:
    """What a run has left in its folder.

    Attributes:
        folder: of the run.
        session: Ray's name of it; empty when nobody could say so.
        end: how it was over; ``None`` while it goes on, or when nobody could say so.
        is_whole: whether its head has left, and more of it cannot come.
        table: Ray's job table, as JSON.
        written_at: seconds since the epoch, when the table was written last.
        logs: names of the files with logs of jobs.
    """

    folder: str
    session: str
    end: RunEnd | None
    is_whole: bool
    table: str
    written_at: float
    logs: tuple[str, ...]

    @cached_property
    def rows(self) -> JobRows:
        """Ray's job table, by submission id."""
        with contextlib.suppress(ValueError):
            rows = job_rows(json.loads(self.table or "[]"))
            return {str(row["submission_id"]): row for row in rows}
        return {}

    @property
    def job(self) -> str:
        """Slurm's number of the job."""
        return os.path.basename(self.folder).partition(".")[0]

    @property
    def why(self) -> str:
        """Why it is over, as the end of a sentence."""
        why = f": {self.end.why}" if self.end is not None else ""
        return f"its Slurm job {self.job} has ended{why}"

    def log(self, login: Login, submission_id: str) -> Path | None:
        """The log of a job, fetched to this machine if it lies elsewhere; ``None`` without one."""
        name = f"job-driver-{submission_id}.log"
        if name not in self.logs:
            return None
        there = os.path.join(self.folder, JOB_LOGS, name)
        if login.is_here:
            return Path(there)
        run = os.path.basename(self.folder)
        here = Path(get_nemorun_home(), "ray_slurm", "logs", run, name).absolute()
        if not here.exists():
            with contextlib.suppress(NemoRunRayError, OSError):  # `logs` tries it again
                here.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                login.get(there, here)
        return here if here.exists() else None
