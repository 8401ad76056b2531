"""The files by which NeMo-Run's programs see a cluster: beside its logs, and in its own folder."""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from typing import Optional

from ..files import write_file
from .run_folder import HeadAddress
from .settings import Settings

#: The file by which NeMo-Run's script tells its nodes to end.
ENDED = "ENDED"


class NemoFiles:
    """NeMo-Run's files of one run. The next job of the same cluster has files of the same names.

    Args:
        settings: of the head.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._units: Optional[int] = None
        self._info = os.path.join(settings.cluster, "ray_cluster_info.json")

    def tell_started(self) -> None:
        """Say that Ray's GCS listens."""
        write_file(os.path.join(self._settings.logs, "STARTED_RAY_HEAD"), "")

    def tell_units(self, units: int) -> None:
        """Say how many ``worker_units`` there are now, which people and NeMo-RL's scripts watch."""
        if units != self._units:
            with suppress(OSError):  # a later turn tries again
                write_file(os.path.join(self._settings.logs, "ray_worker_units"), f"{units}\n")
                self._units = units

    def tell_ready(self, head: HeadAddress) -> None:
        """Say that the cluster can be used, and where."""
        if self._settings.cluster:
            # NeMo-Run reads this file, and takes its presence for readiness.
            row = {
                "head_ip": head.address,
                "dashboard_port": str(head.dashboard_port),
                "port": str(head.port),
                "job": self._settings.job,
            }
            write_file(self._info, json.dumps(row, indent=2) + "\n")

    def is_ended_by_user(self) -> bool:
        """Whether a user has asked for the end of this run.

        A file that names another run was written at the end of that run. It may be the run of the
        job before, which Slurm still completes while this one has its nodes.
        """
        text = self._text(ENDED)
        is_others = text is not None and re.fullmatch(r"\d+\.\d+", text)
        return text is not None and (not is_others or text == self._settings.job)

    def take_back(self) -> None:
        """Remove the file by which the cluster is found, unless it is another job's by now."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            with open(self._info, encoding="utf-8") as file:
                is_own = json.load(file)["job"] == self._settings.job
            if is_own:
                os.unlink(self._info)

    def tell_ended(self) -> None:
        """Say that this run has ended everything of its own."""
        with suppress(OSError):
            write_file(os.path.join(self._settings.logs, ENDED), f"{self._settings.job}\n")

    def _text(self, name: str) -> Optional[str]:
        """What a file beside the logs holds; ``None`` without one."""
        try:
            with open(os.path.join(self._settings.logs, name), encoding="utf-8") as file:
                return file.read().strip()
        except (OSError, ValueError):
            return None
