"""What an experiment's folder keeps of a job that has ended: its log, and the roles of a group."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import cast

from nemo_run_ray.remote.files import replacing, write_file
from nemo_run_ray.remote.rows import GroupRows


class Kept:
    """The files of one job.

    Args:
        exp_dir: the experiment's folder.
        submission_id: of the job.
    """

    def __init__(self, exp_dir: Path, submission_id: str) -> None:
        self._log = exp_dir / "ray_logs" / f"{submission_id}.log"
        self._roles = exp_dir / "ray_logs" / f"{submission_id}.json"

    @property
    def has_log(self) -> bool:
        return self._log.exists()

    def log(self) -> Iterator[str]:
        """The text, piece by piece."""
        with open(self._log, encoding="utf-8", newline="") as file:
            while text := file.read(65536):
                yield text

    def keep_log(self, texts: Iterable[str]) -> None:
        """Write the log; none is left when reading or writing fails."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self._log) as file:
            file.writelines(text.encode() for text in texts)

    @property
    def has_roles(self) -> bool:
        return self._roles.exists()

    def roles(self) -> GroupRows:
        return cast(GroupRows, json.loads(self._roles.read_text(encoding="utf-8")))

    def keep_roles(self, roles: GroupRows) -> None:
        self._roles.parent.mkdir(parents=True, exist_ok=True)
        write_file(self._roles, json.dumps(roles))
