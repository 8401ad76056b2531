"""The archives of one experiment on one cluster, each packed once."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from nemo_run.core.packaging.base import Packager

from nemo_run_ray.experiment.archives import Archive, code_archive, job_archive, packager_key
from nemo_run_ray.plan.job_plan import JobPlan

#: Experiments on two clusters pack the same code into the same file, one after the other.
_packing = threading.Lock()


class Packed:
    """What was packed of an experiment.

    Args:
        exp_dir: NeMo-Run's folder of it.
    """

    def __init__(self, exp_dir: Path) -> None:
        self._exp_dir = exp_dir
        self._code: dict[str, Archive] = {}
        self._jobs: tuple[tuple[str, ...], Archive] | None = None

    def code(self, packager: Packager) -> Archive:
        """The code that a packager delivers; see ``code_archive`` for what it raises."""
        key = packager_key(packager)
        if key not in self._code:
            with _packing:
                self._code[key] = code_archive(packager, self._exp_dir, f"ray_code_{key}")
        return self._code[key]

    def jobs(self, plans: Sequence[JobPlan], folders: Mapping[str, Path]) -> Archive:
        """The specs, configs and scripts of jobs; packed again when there are others.

        Args:
            plans: the jobs.
            folders: where the files of each are, by the job's name.
        """
        names = tuple(sorted(planned.job for planned in plans))
        if self._jobs is None or self._jobs[0] != names:
            self._jobs = names, job_archive(plans, folders, self._exp_dir / "__main__.py")
        return self._jobs[1]
