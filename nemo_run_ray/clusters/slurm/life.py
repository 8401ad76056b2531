"""One life of a cluster on Slurm: an allocation, as one look at its folder sees it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_run_ray.remote.slurm.folder import HeadAddress, RunEnd

#: Seconds that the script of an allocation may take until it has asked for the next one, and by
#: which clocks of hosts may differ.
_ASKING_S, _CLOCKS_S = 120.0, 900.0
#: Seconds that the script may ask Slurm for the job of a life that it has claimed: several times.
RENEWAL_S = 600.0


@dataclass(frozen=True)
class AllocationLife:
    """The newest life of a cluster, in one look.

    Attributes:
        number: counts the lives from 1.
        folder: real path of its folder, without symbolic links.
        claimed: the user who may submit its job.
        sent: whether that was begun.
        renewed: whether it goes on with the dispatches of the life before.
        job: Slurm's number of its job; empty until Slurm has taken it.
        refused: what ``sbatch`` said when it did not take the job.
        stopped: why it was told to end; empty while nobody has.
        over: why a client gave it up; empty while nobody has.
        run: folder of the job's run, below the life's; empty until it runs.
        head: where Ray is reached, once the cluster is ready.
        end: how the run was over.
        token: Ray's.
        session: Ray's name of this life.
        ended_s: seconds since its end, by the clocks of two hosts.
        jobless_s: while nobody has heard of a job of it, the same since it was claimed.
    """

    number: int
    folder: str = ""
    claimed: str = ""
    sent: bool = False
    renewed: bool = False
    job: str = ""
    refused: str = ""
    stopped: str = ""
    over: str = ""
    run: str = ""
    head: HeadAddress | None = None
    end: RunEnd | None = None
    token: str = ""
    session: str = ""
    ended_s: float = 0.0
    jobless_s: float = 0.0

    @property
    def why_over(self) -> str:
        """Why there is nothing to be had of it any more; empty while there may be."""
        return self.over or self.refused or (self.end.why if self.end is not None else "")

    @property
    def was_left(self) -> bool:
        """Whether the script that claimed it for its dispatches has died before Slurm had a job."""
        return self.renewed and not self.job and self.jobless_s >= RENEWAL_S + _CLOCKS_S

    def is_asked_for(self, known_s: float) -> bool:
        """Whether its script is about to ask for the life that goes on.

        Args:
            known_s: seconds for which this process has known its end.
        """
        if self.end is None or not self.end.renews or self.stopped or self.over:
            return False
        return known_s < _ASKING_S and self.ended_s < _ASKING_S + _CLOCKS_S


def life_of(rows: Mapping[str, str]) -> AllocationLife:
    """What one look has printed, by the name of the file."""
    names = ("folder", "claimed", "job", "refused", "stopped", "over", "run")
    texts = {name: rows.get(name, "").strip() for name in names}
    ready = _row(rows.get("ready", ""))
    return AllocationLife(
        number=int(rows["number"]),
        sent="sent" in rows,
        renewed="renewed" in rows,
        **texts,
        head=None if ready is None else HeadAddress(**ready),
        end=end_of(rows.get("end", "")),
        token=rows.get("token", "").strip(),
        session=rows.get("session", "").strip(),
        ended_s=float(rows.get("ended_s") or 0.0),
        jobless_s=float(rows.get("jobless_s") or 0.0),
    )


def end_of(text: str) -> RunEnd | None:
    """How a run was over, of its file's text; ``None`` while there is none."""
    row = _row(text)
    return None if row is None else RunEnd(**row)


def _row(text: str) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError):
        row = json.loads(text)
        return row if isinstance(row, dict) else None
    return None
