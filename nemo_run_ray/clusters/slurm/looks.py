"""What this process has seen of clusters on Slurm, and believes for a moment."""

from __future__ import annotations

import contextlib
import time

from nemo_run_ray.clusters.slurm.life import AllocationLife
from nemo_run_ray.clusters.slurm.lives import Lives
from nemo_run_ray.clusters.slurm.series import Series
from nemo_run_ray.clusters.slurm.slurm_queue import SlurmQueue
from nemo_run_ray.errors import NemoRunRayError

#: Seconds for which what a look has found is believed.
_TRUST_S = 2.0
#: The same of what lives have left, which may be large; less if another one has begun or ended.
_TRUST_LEFT_S = 30.0
#: Exit code of a run that SIGTERM has ended, and seconds within which Slurm says what it does next.
_TERMINATED, _UNSAID_S = 143, 60.0
_Key = tuple[str, str]
#: Number and run of a life, and whether it has ended.
_State = tuple[int, str, bool]
#: The newest life that was seen of each cluster, by host and folder, and when it was seen.
_seen: dict[_Key, tuple[float, AllocationLife | None]] = {}
#: When this process heard of a job, in seconds since 1970; when it saw the end of a life.
_known_at: dict[tuple[str, str, str], float] = {}
_ended_at: dict[tuple[str, str, int], float] = {}
#: What lives have left, by host, folder and Ray's name of the life; when that was seen, and what
#: the newest life was then.
_left: dict[tuple[str, str, str], tuple[float, _State, Series]] = {}
#: The runs before one that is up, by host, folder and that run.
_before: dict[tuple[str, str, str], Series] = {}


class Looks:
    """Looks at one cluster.

    Args:
        lives: of the cluster.
    """

    def __init__(self, lives: Lives) -> None:
        self._lives = lives
        self._key = lives.key

    def newest(self) -> AllocationLife | None:
        """The newest life, a moment old at most; ``None`` before the first one.

        Raises:
            ClusterError: the host cannot be asked.
        """
        at, life = _seen.get(self._key, (float("-inf"), None))
        if time.monotonic() - at >= _TRUST_S:
            life = self._lives.look()
            self.saw(life)
        return life

    def saw(self, life: AllocationLife | None) -> None:
        """Take note of what another look has found."""
        _seen[self._key] = time.monotonic(), life

    def forget(self) -> None:
        """Believe nothing of it any more."""
        _seen.pop(self._key, None)

    def is_over(self, life: AllocationLife) -> bool:
        """Whether there is nothing to be had of a life, as far as anybody has said so."""
        if life.why_over:
            return True
        # What Slurm said before this process knew of the job proves nothing.
        known_at = _known_at.setdefault((*self._key, life.job), time.time())
        jobs = SlurmQueue(self._lives.login).jobs(after=known_at)
        return jobs is not None and bool(life.job) and all(job.number != life.job for job in jobs)

    def series(self, session: str) -> Series:
        """What a life has left, with those before and after it in which its dispatches go on."""
        key = (*self._key, session)
        nothing = Series(self._lives.login, (), frozenset())
        at, state, found = _left.get(key, (float("-inf"), self._state, nothing))
        trust_s = _TRUST_LEFT_S if found.has_ended and state == self._state else _TRUST_S
        if not found.is_whole and time.monotonic() - at >= trust_s:
            state = self._state
            with contextlib.suppress(NemoRunRayError):
                found = self._lives.series(session=session)
            _left[key] = time.monotonic(), state, found
        return found

    @property
    def _state(self) -> _State:
        """What the newest life was at the last look."""
        _, life = _seen.get(self._key, (0.0, None))
        return (0, "", False) if life is None else (life.number, life.run, life.end is not None)

    def before(self, life: AllocationLife) -> Series | None:
        """The runs before the one that is up; ``None`` if it goes on with no dispatches.

        Raises:
            ClusterError: the host cannot be asked.
        """
        if not life.renewed and life.run.endswith(".0"):
            return None
        key = (*self._key, life.run)
        if key not in _before:
            _before[key] = self._lives.series(number=life.number).before(life.run)
        return _before[key]

    def why_gone(self, session: str) -> str:
        """Why a life is over, and with it its dispatches; empty if nobody can say so."""
        series = self.series(session)
        if not series.runs:
            return ""
        end, why = series.runs[0].end, series.runs[0].why
        if end is None or not end.renews:
            return why
        with contextlib.suppress(NemoRunRayError):
            life = self.newest()
            if life is not None and series.leads_to(life.number, life.renewed):
                told = " ".join((life.over or life.stopped or life.refused).split())
                if told:
                    return f"{why}, and the next one did not come: {told}"
        return f"{why}, and nobody has asked for the next one"

    def why_away(self, session: str) -> str:
        """Why a life is over whose dispatches go on in one that is not up yet; empty otherwise."""
        with contextlib.suppress(NemoRunRayError):
            life, series = self.newest(), self.series(session)
            if life is None or not series.leads_to(life.number, life.renewed) or life.was_left:
                return ""
            if self.is_asked_for(life):
                return f"{series.runs[0].why}, and the next one is being asked for"
            if series.kept and self._may_start_again(life):
                job = f"Slurm job {life.job}"
                return f"{series.runs[0].why}, and chains go on in {job} if Slurm starts it again"
            runs = series.before(life.run).runs if life.run else series.runs
            if life.head is None and runs and not life.stopped and not self.is_over(life):
                job = f"Slurm job {life.job}" if life.job else "a job of Slurm"
                return f"{runs[0].why}, and chains go on in {job}, which is not up yet"
        return ""

    def _may_start_again(self, life: AllocationLife) -> bool:
        """Whether Slurm may start the job of a life again, of which one start has told its end."""
        if life.end is None or life.stopped or life.over:
            return False
        # By this signal Slurm ends a start. What it says next tells whether it was the last one.
        had_signal = life.end.code == _TERMINATED
        jobs = SlurmQueue(self._lives.login).jobs(after=time.time() - life.ended_s)
        if jobs is None:
            return had_signal and life.ended_s < _UNSAID_S
        return any(job.number == life.job and (job.waits or had_signal) for job in jobs)

    def is_asked_for(self, life: AllocationLife) -> bool:
        """Whether the script of a life that has ended is about to ask for the next one."""
        if life.end is None:
            return False
        seen_at = _ended_at.setdefault((*self._key, life.number), time.monotonic())
        return life.is_asked_for(time.monotonic() - seen_at)
