"""The runs of a cluster on Slurm whose dispatches go on in the next one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from nemo_run_ray.clusters.slurm.login import Login
from nemo_run_ray.clusters.slurm.remains import Remains
from nemo_run_ray.remote.carried_over import PreviousRun, rows_of
from nemo_run_ray.remote.rows import JobRows


@dataclass(frozen=True)
class Series:
    """The runs whose dispatches go on in the newest of them.

    Attributes:
        login: where their folders are.
        runs: the newest one first.
        kept: first ids of the dispatchers and jobs of all dispatches that are kept.
    """

    login: Login
    runs: tuple[Remains, ...]
    kept: frozenset[str]
    _is_before: bool = False

    def before(self, run: str) -> Series:
        """This series without a run that is up.

        Args:
            run: end of its folder, such as ``run/871.0``.
        """
        runs = tuple(earlier for earlier in self.runs if not earlier.folder.endswith(run))
        return replace(self, runs=runs, _is_before=True)

    @property
    def is_whole(self) -> bool:
        """Whether nothing can come to it any more."""
        newest = self.runs[0].end if self.runs else None
        is_last = newest is not None and not newest.renews
        return is_last and self.has_ended

    @property
    def has_ended(self) -> bool:
        """Whether its runs have left all that they leave; another may go on with its dispatches."""
        return bool(self.runs) and all(run.is_whole for run in self.runs)

    def leads_to(self, number: int, renewed: bool) -> bool:
        """Whether its dispatches go on in a life.

        Args:
            number: of the life.
            renewed: whether that goes on with the dispatches of the one before.
        """
        lives = {int(Path(run.folder).parts[-3]) for run in self.runs}
        return number in lives or (renewed and number - 1 in lives)

    def left_rows(self, session: str) -> JobRows:
        """The job table of a run, with what became of its dispatches in the others."""
        own = self.of(session)
        rows = {} if own is None else own.rows
        return {**rows, **self.rows()} if len(self.runs) > 1 else rows

    def of(self, session: str) -> Remains | None:
        """The run with that name of Ray's."""
        return next((run for run in self.runs if run.session == session), None)

    def rows(self) -> JobRows:
        """The rows of the dispatches in all the runs, none of which is up any more."""
        return self._rows

    def log(self, submission_id: str) -> Path | None:
        """The log of a job, as the run that had it has left it."""
        found = (run.log(self.login, submission_id) for run in self.runs)
        return next((path for path in found if path is not None), None)

    @cached_property
    def _rows(self) -> JobRows:
        runs = [
            PreviousRun(
                run.table,
                run.written_at,
                "" if run.end is None else run.end.why,
                # The newest one may be up by now, whatever was seen a moment ago.
                is_over=run.end is not None or run is not self.runs[0] or self._is_before,
            )
            for run in reversed(self.runs)
        ]
        return rows_of(runs, set(self.kept))
